//! Copies on a device that are under way while the next ones are prepared.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::Open;
use crate::cuda::{Context, Copy, Devices, Lane, MAX_DIMS, Waited};
use crate::error::Result;
use crate::memory::{OnDevice, Pool};
use crate::observe::fault;
use crate::plan::{Batch, Pattern};
use crate::transport::ReadJob;
use crate::transport::span::{Scratch, Source, copy_batch};
use crate::{bail, err};

/// Batches under way: one is copied while the next one is read or received.
const DEPTH: usize = 2;

/// How long a cancelled job's copy may still take before its memory is given up.
const GRACE: Duration = Duration::from_secs(10);

/// How often a wait looks at the cancel flag.
const LOOK: Duration = Duration::from_millis(50);

/// One worker's copies of one job.
pub(in crate::transport) struct Flow<'a> {
    devices: &'a Devices,
    job: &'a ReadJob,
    under_way: VecDeque<UnderWay<'a>>,
    scratch: Scratch,
}

/// A batch on its lane.
struct UnderWay<'a> {
    lane: Lane,
    /// Keeps the source's pools of this process open.
    open: Rc<Open<'a>>,
    /// What is copied from the lane's buffer to host memory afterwards.
    land: Batch,
    bytes: u64,
    /// The device writes memory of the job.
    writes: bool,
}

impl<'a> Flow<'a> {
    pub fn new(devices: &'a Devices, job: &'a ReadJob) -> Self {
        Self {
            devices,
            job,
            under_way: VecDeque::new(),
            scratch: Scratch::default(),
        }
    }

    pub fn is_cancelled(&self) -> bool {
        self.job.is_cancelled()
    }

    /// A lane for the next batch; waits for an earlier one if enough are under way.
    pub fn lane(&mut self, context: Context) -> Result<Lane> {
        let depth = if fault::deviates("cuda_one_landing") {
            1
        } else {
            DEPTH
        };
        while self.under_way.len() >= depth {
            self.retire()?;
        }
        self.devices.lane(context)
    }

    /// Starts what has been enqueued on `lane`. `land`: what follows on the host; `bytes` count
    /// as moved when all is done.
    pub fn start(
        &mut self,
        mut lane: Lane,
        open: Rc<Open<'a>>,
        land: Batch,
        bytes: u64,
    ) -> Result<()> {
        let writes = land.is_empty();
        let marked = lane.mark();
        self.under_way.push_back(UnderWay {
            lane,
            open,
            land,
            bytes,
            writes,
        });
        fault::point("mid_copy");
        // What was enqueued before the driver refused still runs: it is waited for like the rest.
        marked
    }

    /// Waits for the oldest batch and lets it land.
    fn retire(&mut self) -> Result<()> {
        let Some(mut batch) = self.under_way.pop_front() else {
            return Ok(());
        };
        if let Err(e) = self.wait(&mut batch.lane) {
            if batch.writes {
                self.job.mark_unquiet();
            }
            // The device may still read the source and write the buffer.
            batch.lane.abandon();
            std::mem::forget(batch.open);
            return Err(e);
        }
        let landed = self.land(&mut batch);
        self.devices.give_back(batch.lane);
        landed?;
        self.job.add_moved(batch.bytes);
        Ok(())
    }

    fn wait(&self, lane: &mut Lane) -> Result<()> {
        if fault::deviates("cuda_no_copy_wait") {
            return Ok(());
        }
        let mut cancelled: Option<Instant> = None;
        while lane.wait(Instant::now() + LOOK)? == Waited::Late {
            if !self.job.is_cancelled() {
                continue;
            }
            let since = *cancelled.get_or_insert_with(Instant::now);
            if since.elapsed() > GRACE {
                bail!(
                    KVF_ERR_TRANSFER,
                    "a copy on device {} is still running {GRACE:?} after its cancel",
                    lane.context().device
                );
            }
        }
        Ok(())
    }

    fn land(&mut self, batch: &mut UnderWay<'a>) -> Result<()> {
        if batch.land.is_empty() {
            return Ok(());
        }
        let staging = staging(&mut batch.lane)?.0;
        let job = self.job;
        copy_batch(
            batch.land.shapes(),
            |_| Some(Source::from(&staging)),
            |id| job.pool(id).map(|pool| &**pool),
            job.bytes(),
            &mut self.scratch,
        )?;
        Ok(())
    }

    /// Waits for everything. The first error is told, but nothing is left running that may touch
    /// the job's memory, or the job is marked.
    pub fn finish(mut self, so_far: Result<()>) -> Result<()> {
        let mut outcome = so_far;
        while !self.under_way.is_empty() {
            let retired = self.retire();
            outcome = outcome.and(retired);
        }
        outcome
    }
}

impl Drop for Flow<'_> {
    fn drop(&mut self) {
        // Only after a panic.
        while !self.under_way.is_empty() {
            let _ = self.retire();
        }
    }
}

/// The lane's buffer as a pool, and its address for devices. One batch fits.
pub(in crate::transport) fn staging(lane: &mut Lane) -> Result<(Pool, u64)> {
    let bytes = crate::transport::PIECE_BYTES;
    let (base, device) = lane.staging(bytes as usize)?;
    let Some(base) = std::ptr::NonNull::new(base) else {
        bail!(KVF_ERR_INTERNAL, "a staging buffer without address");
    };
    // SAFETY: the lane's buffer, that long, which lives as long as the lane is used by us.
    let pool = unsafe { Pool::passing(super::pack::STAGING, base, bytes) };
    Ok((pool, device))
}

/// The context of a place.
pub(in crate::transport) fn context(place: OnDevice) -> Context {
    Context::from_handle(place.context, place.device)
}

/// A checked pattern between two addresses that a device can use.
pub(in crate::transport) fn device_copy(
    pattern: &Pattern,
    src: u64,
    dst: u64,
    from: Option<Context>,
) -> Result<Copy> {
    let mut copy = Copy {
        src: src + pattern.src_offset,
        dst: dst + pattern.dst_offset,
        run: pattern.run,
        rank: pattern.rank,
        from,
        ..Copy::default()
    };
    if usize::from(pattern.rank) > MAX_DIMS {
        return Err(err!(KVF_ERR_INTERNAL, "a pattern of {} axes", pattern.rank));
    }
    for (to, dim) in copy.dims.iter_mut().zip(&pattern.dims) {
        (to.count, to.src, to.dst) = (dim.count, dim.src, dim.dst);
    }
    Ok(copy)
}
