//! Device memory at the ends of a socket: bytes pass through a pinned buffer.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Open;
use super::flow::{Flow, context, device_copy, staging};
use super::pack::{into_staging, out_of_staging};
use crate::bail;
use crate::cuda::{Context, Copy, Devices, Lane, Waited};
use crate::error::Result;
use crate::memory::Pool;
use crate::observe::fault;
use crate::plan::{Batch, Pattern};
use crate::transport::PIECE_BYTES;

/// A lane's buffer that is being filled.
struct Stage {
    lane: Lane,
    buffer: *mut u8,
    device: u64,
    copies: Vec<Copy>,
    bytes: u64,
}

impl Stage {
    fn new(mut lane: Lane) -> Result<Self> {
        let (pool, device) = staging(&mut lane)?;
        Ok(Self {
            lane,
            buffer: pool.base(),
            device,
            copies: Vec::new(),
            bytes: 0,
        })
    }

    /// The next `bytes` bytes of the buffer.
    fn next(&mut self, bytes: u64) -> Result<*mut u8> {
        let (used, size) = (self.bytes, PIECE_BYTES);
        if bytes > size - used {
            bail!(
                KVF_ERR_INTERNAL,
                "{bytes} bytes behind {used} in a staging buffer of {size}"
            );
        }
        self.bytes += bytes;
        Ok(self.buffer.wrapping_add(used as usize))
    }
}

/// One batch of a receiver.
#[derive(Default)]
pub(in crate::transport) struct Landing {
    stages: BTreeMap<Context, Stage>,
}

impl Landing {
    /// Where the bytes of a checked pattern, `bytes` together, are to be received.
    pub fn place(
        &mut self,
        flow: &mut Flow<'_>,
        pattern: &Pattern,
        pool: &Pool,
        bytes: u64,
    ) -> Result<*mut u8> {
        let Some(place) = pool.on_device() else {
            bail!(KVF_ERR_INTERNAL, "pool {} is not on a device", pool.id());
        };
        let context = context(place);
        let stage = match self.stages.entry(context) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Stage::new(flow.lane(context)?)?),
        };
        let out = out_of_staging(pattern, stage.bytes);
        let at = stage.next(bytes)?;
        let copy = device_copy(&out, stage.device, place.address, None)?;
        stage.copies.push(copy);
        Ok(at)
    }

    /// Everything has been received: the device takes it from here.
    pub fn start(self, flow: &mut Flow<'_>) -> Result<()> {
        let mut outcome = Ok(());
        for mut stage in self.stages.into_values() {
            // SAFETY: the buffer is the lane's; the destination was checked by the caller and
            // belongs to the job.
            let enqueued = unsafe { stage.lane.copy(&stage.copies, &|| flow.is_cancelled()) };
            let started = flow.start(
                stage.lane,
                Rc::new(Open::nothing()),
                Batch::new(),
                stage.bytes,
            );
            outcome = outcome.and(enqueued).and(started);
        }
        outcome
    }
}

/// One batch of a sender. Its buffers are its own until it is finished, so that the next batch can be
/// copied into others while this one is sent.
pub(in crate::transport) struct Raising<'a> {
    devices: &'a Devices,
    stages: BTreeMap<Context, Stage>,
    started: bool,
    /// The first call that the driver refused.
    refused: Result<()>,
    /// The device may still use the buffers and the pools.
    stuck: bool,
}

impl<'a> Raising<'a> {
    pub fn new(devices: &'a Devices) -> Self {
        Self {
            devices,
            stages: BTreeMap::new(),
            started: false,
            refused: Ok(()),
            stuck: false,
        }
    }

    /// Whether nothing of the batch is on a device.
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// Where the bytes of a checked pattern will be, `bytes` together, once [`Self::wait`] is over.
    pub fn place(&mut self, pattern: &Pattern, pool: &Pool, bytes: u64) -> Result<*mut u8> {
        let Some(place) = pool.on_device() else {
            bail!(KVF_ERR_INTERNAL, "pool {} is not on a device", pool.id());
        };
        let context = context(place);
        let stage = match self.stages.entry(context) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Stage::new(self.devices.lane(context)?)?),
        };
        let into = into_staging(pattern, stage.bytes);
        let at = stage.next(bytes)?;
        let copy = device_copy(&into, place.address, stage.device, None)?;
        stage.copies.push(copy);
        Ok(at)
    }

    /// Has the devices copy into the buffers; the caller keeps the pools open until
    /// [`Self::finish`]. What a driver refuses, [`Self::wait`] tells.
    pub fn start(&mut self) {
        self.started = true;
        for stage in self.stages.values_mut() {
            // SAFETY: the buffer is the lane's; the source was checked and is kept by the caller.
            let enqueued = unsafe { stage.lane.copy(&stage.copies, &|| false) };
            let marked = stage.lane.mark();
            if self.refused.is_ok() {
                self.refused = enqueued.and(marked);
            }
        }
    }

    /// Waits for the devices, so long at most. After [`Self::start`].
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the driver's reason, or if it took too long.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        if !self.started && !self.is_empty() {
            bail!(KVF_ERR_INTERNAL, "a batch was not started");
        }
        let until = Instant::now() + limit;
        let mut outcome = std::mem::replace(&mut self.refused, Ok(()));
        if self.stuck {
            return outcome; // was told
        }
        for stage in self.stages.values_mut() {
            if fault::deviates("cuda_no_send_wait") {
                continue;
            }
            let waited = match stage.lane.wait(until) {
                Ok(Waited::Done) => continue,
                Ok(Waited::Late) => Err(crate::err!(
                    KVF_ERR_TRANSFER,
                    "device {} has not copied {} bytes within {limit:?}",
                    stage.lane.context().device,
                    stage.bytes
                )),
                Err(e) => Err(e),
            };
            self.stuck = true;
            outcome = outcome.and(waited);
        }
        outcome
    }

    /// Gives the buffers back, when their bytes have been sent or shall not be. After [`Self::wait`].
    /// False: a device may still read the pools, which must stay for ever.
    #[must_use]
    pub fn finish(&mut self) -> bool {
        for stage in std::mem::take(&mut self.stages).into_values() {
            match self.stuck {
                true => stage.lane.abandon(),
                false => self.devices.give_back(stage.lane),
            }
        }
        !self.stuck
    }
}
