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
use crate::plan::Pattern;

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

    /// The next `bytes` bytes of the buffer. One batch fits.
    fn next(&mut self, bytes: u64) -> *mut u8 {
        let at = self.buffer.wrapping_add(self.bytes as usize);
        self.bytes += bytes;
        at
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
        let copy = device_copy(&out, stage.device, place.address, None)?;
        stage.copies.push(copy);
        Ok(stage.next(bytes))
    }

    /// Everything has been received: the device takes it from here.
    pub fn start(self, flow: &mut Flow<'_>) -> Result<()> {
        let mut outcome = Ok(());
        for mut stage in self.stages.into_values() {
            // SAFETY: the buffer is the lane's; the destination was checked by the caller and
            // belongs to the job.
            let enqueued = unsafe { stage.lane.copy(&stage.copies) };
            let started = flow.start(
                stage.lane,
                Rc::new(Open::nothing()),
                Vec::new(),
                stage.bytes,
            );
            outcome = outcome.and(enqueued).and(started);
        }
        outcome
    }
}

/// One batch of a sender.
pub(in crate::transport) struct Raising<'a> {
    devices: &'a Devices,
    stages: BTreeMap<Context, Stage>,
}

impl<'a> Raising<'a> {
    pub fn new(devices: &'a Devices) -> Self {
        Self {
            devices,
            stages: BTreeMap::new(),
        }
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
        let copy = device_copy(&into, place.address, stage.device, None)?;
        stage.copies.push(copy);
        Ok(stage.next(bytes))
    }

    /// Copies into the buffers and waits, so long at most. The caller keeps the pools open, after
    /// an error for ever.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        let until = Instant::now() + limit;
        for stage in self.stages.values_mut() {
            // SAFETY: the buffer is the lane's; the source was checked and is kept by the caller.
            let enqueued = unsafe { stage.lane.copy(&stage.copies) };
            let marked = stage.lane.mark();
            if fault::deviates("cuda_no_send_wait") {
                continue;
            }
            if stage.lane.wait(until)? == Waited::Late {
                bail!(
                    KVF_ERR_TRANSFER,
                    "device {} has not copied {} bytes within {limit:?}",
                    stage.lane.context().device,
                    stage.bytes
                );
            }
            enqueued.and(marked)?;
        }
        Ok(())
    }

    /// Gives the buffers back, when their bytes have been sent; `stuck`: the device may still use
    /// them.
    pub fn finish(self, stuck: bool) {
        for stage in self.stages.into_values() {
            match stuck {
                true => stage.lane.abandon(),
                false => self.devices.give_back(stage.lane),
            }
        }
    }
}
