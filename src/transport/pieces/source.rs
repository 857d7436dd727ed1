//! The source's end: derives a reader's copies, checks them against the live lease, and answers.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::{BATCH_BYTES, MAX_TEXT, Ranges};
use crate::cuda::Devices;
use crate::error::Result;
use crate::memory::{Guard, Pool};
use crate::observe::fault;
use crate::plan::{Batch, Binding, Cursor};
use crate::transport::device::socket::Raising;
use crate::transport::span::{Runs, check_all};
use crate::wire::{Body, DataOpen, DataRead, Decoder, MAX_FRAME};
use crate::{bail, err};

/// Jobs that one connection may have open.
const MAX_JOBS: usize = 1024;

/// A reader's job as the source sees it.
pub struct Opened {
    /// The copies, in the reader's order.
    pub bindings: Vec<Binding>,
    /// Whether the publication still holds.
    pub holds: Box<dyn Fn() -> bool + Send>,
}

/// What an agent does for its data connections.
pub trait Source: Send + Sync {
    /// Derives the copies of a reader's job.
    ///
    /// # Errors
    /// `KVF_ERR_EXPIRED` for a publication that has ended; what does not fit otherwise.
    fn open(&self, open: &DataOpen) -> Result<Opened>;

    /// One of our pools.
    fn pool(&self, id: u32) -> Option<Arc<Pool>>;

    /// Streams and buffers for pools on a device.
    fn devices(&self) -> &Devices;
}

/// Limits of a data connection.
#[derive(Clone, Copy, Debug)]
pub struct Serving {
    /// A reader that takes nothing for this long is dropped.
    pub stall: Duration,
    /// How long to look before sleeping.
    pub spin: Duration,
}

/// How a reader's words come and how answers go.
pub(in crate::transport) trait Carrier {
    /// Takes more of what the reader says, waits for it if `wait`; then false: it has said all.
    fn hear(&self, decoder: &mut Decoder, wait: bool) -> io::Result<bool>;

    /// Sends the bytes of all ranges in order, `bytes` together, then what `held` says, which is asked
    /// once, after the last one has been read.
    ///
    /// # Safety
    /// All ranges must be readable until `held` is called; another thread or process may write them
    /// meanwhile.
    unsafe fn answer(
        &self,
        job: u64,
        bytes: u64,
        ranges: &mut Ranges,
        held: &mut dyn FnMut() -> bool,
    ) -> io::Result<()>;

    /// Answers with an error, whose text is not too long.
    fn refuse(&self, job: u64, status: i32, text: &[u8]) -> io::Result<()>;
}

/// Serves a reader, whose hello has been answered, until its end. `stall`: how long a device may take
/// for a batch.
///
/// # Errors
/// The connection broke, or its reader does not speak the protocol.
pub(in crate::transport) fn serve(
    carrier: &dyn Carrier,
    source: &dyn Source,
    stall: Duration,
) -> Result<()> {
    let broken = |e: io::Error| err!(KVF_ERR_PEER_LOST, "data connection: {e}");
    let mut decoder = Decoder::new(MAX_FRAME);
    let mut jobs: HashMap<u64, Result<Opened>> = HashMap::new();
    let mut buffers: Buffers = (Batch::new(), Vec::new());
    let mut frames = VecDeque::new();
    // The next answer, if it is being copied from a device while this one is sent.
    let mut ahead = None;
    loop {
        decode(&mut decoder, &mut frames)?;
        while let Some(body) = frames.pop_front() {
            match body {
                Body::DataOpen(open) => {
                    if jobs.len() >= MAX_JOBS {
                        bail!(KVF_ERR_LIMIT, "{MAX_JOBS} jobs on one data connection");
                    }
                    jobs.insert(open.job, source.open(&open));
                }
                Body::DataClose(close) => {
                    jobs.remove(&close.job);
                }
                Body::DataRead(read) => {
                    let mut raise = |read: &DataRead| {
                        raise(source, jobs.get(&read.job), read, stall, &mut buffers)
                    };
                    let mut answer = ahead.take().unwrap_or_else(|| raise(&read));
                    let on_device = answer
                        .as_ref()
                        .is_ok_and(|raised| !raised.raising.is_empty());
                    if on_device && !fault::deviates("cuda_no_ahead") {
                        if fault::deviates("cuda_buffer_before_sent")
                            && let Ok(raised) = &mut answer
                        {
                            let _ = (raised.raising.wait(stall), raised.raising.finish());
                        }
                        if frames.is_empty() {
                            carrier.hear(&mut decoder, false).map_err(broken)?;
                            decode(&mut decoder, &mut frames)?;
                        }
                        if let Some(Body::DataRead(next)) = frames.front() {
                            ahead = Some(raise(next));
                        }
                    }
                    let holds = || matches!(jobs.get(&read.job), Some(Ok(job)) if (job.holds)());
                    let ranges =
                        answer_with(carrier, read.job, answer, holds, stall).map_err(broken)?;
                    buffers.1.extend(ranges);
                }
                _ => bail!(KVF_ERR_PROTOCOL, "a control message on a data connection"),
            }
        }
        if !carrier.hear(&mut decoder, true).map_err(broken)? {
            return Ok(());
        }
    }
}

fn decode(decoder: &mut Decoder, frames: &mut VecDeque<Body>) -> Result<()> {
    while let Some(frame) = decoder.next_frame()? {
        frames.extend(frame.body);
    }
    Ok(())
}

/// Used again and again: a batch, and ranges of answers that were sent.
type Buffers = (Batch, Vec<Ranges>);

/// An answer whose bytes are in place, or on their way from a device.
struct Raised<'a> {
    ranges: Ranges,
    bytes: u64,
    raising: Raising<'a>,
    stall: Duration,
    /// Keep the pools open.
    guards: Vec<Guard<Arc<Pool>>>,
}

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        let _ = self.raising.wait(self.stall);
        if !self.raising.finish() {
            // The device may still read the pools.
            std::mem::forget(std::mem::take(&mut self.guards));
        }
    }
}

/// Checks what is asked for, and starts copies of what is on a device.
fn raise<'a>(
    source: &'a dyn Source,
    job: Option<&Result<Opened>>,
    read: &DataRead,
    stall: Duration,
    (batch, spare): &mut Buffers,
) -> Result<Raised<'a>> {
    let opened = match job {
        Some(Ok(opened)) => opened,
        Some(Err(e)) => return Err(e.clone()),
        None => bail!(KVF_ERR_PROTOCOL, "job {} was not opened", read.job),
    };
    batch.clear();
    let cursor = &mut Cursor::from_parts(read.piece, read.segment, read.taken);
    if let Some(binding) = opened.bindings.get(read.binding as usize) {
        binding.take(cursor, read.max_bytes.min(BATCH_BYTES), batch);
    }
    let pools = pools(source, batch)?;
    let mut raised = Raised {
        ranges: spare.pop().unwrap_or_default(),
        bytes: 0,
        raising: Raising::new(source.devices()),
        stall,
        guards: Vec::with_capacity(pools.len()),
    };
    raised.ranges.clear();
    // No byte leaves before the lease was seen to hold, and none of a pool that is being freed.
    for pool in pools.values() {
        match pool.enter_shared() {
            Some(guard) => raised.guards.push(guard),
            None => bail!(KVF_ERR_EXPIRED, "pool {} was unregistered", pool.id()),
        }
    }
    if !(opened.holds)() {
        bail!(KVF_ERR_EXPIRED, "the source's lease has ended");
    }
    let mut known: Option<&Arc<Pool>> = None; // neighbours mostly use the same one
    for (shape, places) in batch.shapes() {
        let same = known.filter(|pool| pool.id() == shape.src_pool);
        let Some(pool) = same.or_else(|| pools.get(&shape.src_pool)) else {
            continue;
        };
        known = Some(pool);
        let moved = check_all(shape, places, pool.bytes(), u64::MAX)?;
        raised.bytes += moved;
        if moved > 0 && pool.is_device() {
            let each = shape.bytes();
            for place in places {
                let at = raised.raising.place(&shape.at(*place), pool, each)?;
                raised.ranges.push(at, each as usize);
            }
        } else if moved > 0 {
            for (from, _) in places.iter().flat_map(|place| Runs::at(shape, *place)) {
                let at = pool.base().wrapping_add(from as usize);
                raised.ranges.push(at, shape.run as usize);
            }
        }
    }
    raised.raising.start();
    Ok(raised)
}

/// Sends an answer, or why there is none. Gives its ranges back, to be used again.
fn answer_with(
    carrier: &dyn Carrier,
    job: u64,
    answer: Result<Raised<'_>>,
    holds: impl Fn() -> bool,
    stall: Duration,
) -> io::Result<Option<Ranges>> {
    let waited = answer.and_then(|mut raised| {
        raised.raising.wait(stall)?;
        Ok(raised)
    });
    let mut raised = match waited {
        Ok(raised) => raised,
        Err(e) => {
            let text = &e.text.as_bytes()[..e.text.len().min(MAX_TEXT)];
            return carrier.refuse(job, e.status as i32, text).map(|()| None);
        }
    };
    let (bytes, mut ranges) = (raised.bytes, std::mem::take(&mut raised.ranges));
    let mut raised = Some(raised);
    let mut held = || {
        let held = holds();
        raised = None; // before the reader hears that it has everything
        held
    };
    // SAFETY: `check` has put every byte inside a pool, which `guards` keep, or it is in the buffer of
    // a lane that `raising` has.
    unsafe { carrier.answer(job, bytes, &mut ranges, &mut held) }?;
    Ok(Some(ranges))
}

fn pools(source: &dyn Source, batch: &Batch) -> Result<HashMap<u32, Arc<Pool>>> {
    let mut pools = HashMap::new();
    let mut last = None;
    for (shape, _) in batch.shapes() {
        if last.replace(shape.src_pool) == Some(shape.src_pool) {
            continue;
        }
        if let Entry::Vacant(new) = pools.entry(shape.src_pool) {
            match source.pool(shape.src_pool) {
                Some(pool) => new.insert(pool),
                None => bail!(KVF_ERR_EXPIRED, "no pool {} any more", shape.src_pool),
            };
        }
    }
    Ok(pools)
}
