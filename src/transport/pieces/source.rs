//! The source's end: derives a reader's copies, checks them against the live lease, and answers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::{BATCH_BYTES, MAX_TEXT, Ranges};
use crate::cuda::Devices;
use crate::error::{Error, Result};
use crate::memory::Pool;
use crate::plan::{Binding, Cursor, Pattern};
use crate::transport::device::socket::Raising;
use crate::transport::span::{Runs, check};
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
    /// Waits for more of what the reader says; false: it has said all.
    fn hear(&self, decoder: &mut Decoder) -> io::Result<bool>;

    /// Sends the bytes of all ranges in order, `bytes` together, then what `held` says once the last
    /// one has been read.
    ///
    /// # Safety
    /// All ranges must be readable until this returns; another thread or process may write them
    /// meanwhile.
    unsafe fn answer(
        &self,
        job: u64,
        bytes: u64,
        ranges: &mut Ranges,
        held: &dyn Fn() -> bool,
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
    let mut buffers = (Vec::new(), Ranges::default());
    loop {
        while let Some(frame) = decoder.next_frame()? {
            match frame.body {
                Some(Body::DataOpen(open)) => {
                    if jobs.len() >= MAX_JOBS {
                        bail!(KVF_ERR_LIMIT, "{MAX_JOBS} jobs on one data connection");
                    }
                    jobs.insert(open.job, source.open(&open));
                }
                Some(Body::DataClose(close)) => {
                    jobs.remove(&close.job);
                }
                Some(Body::DataRead(read)) => {
                    let job = jobs.get(&read.job);
                    answer(carrier, source, job, &read, stall, &mut buffers).map_err(broken)?;
                }
                Some(_) => bail!(KVF_ERR_PROTOCOL, "a control message on a data connection"),
                None => {}
            }
        }
        if !carrier.hear(&mut decoder).map_err(broken)? {
            return Ok(());
        }
    }
}

fn answer(
    carrier: &dyn Carrier,
    source: &dyn Source,
    job: Option<&Result<Opened>>,
    read: &DataRead,
    stall: Duration,
    (batch, ranges): &mut (Vec<Pattern>, Ranges),
) -> io::Result<()> {
    let refuse = |e: &Error| {
        let text = &e.text.as_bytes()[..e.text.len().min(MAX_TEXT)];
        carrier.refuse(read.job, e.status as i32, text)
    };
    let opened = match job {
        Some(Ok(opened)) => opened,
        Some(Err(e)) => return refuse(e),
        None => {
            return refuse(&err!(KVF_ERR_PROTOCOL, "job {} was not opened", read.job));
        }
    };
    batch.clear();
    ranges.clear();
    let cursor = &mut Cursor::from_parts(read.piece, read.segment, read.taken);
    if let Some(binding) = opened.bindings.get(read.binding as usize) {
        binding.take(cursor, read.max_bytes.min(BATCH_BYTES), batch);
    }
    let pools = match pools(source, batch) {
        Ok(pools) => pools,
        Err(e) => return refuse(&e),
    };
    // No byte leaves before the lease was seen to hold, and none of a pool that is being freed.
    let mut guards = Vec::with_capacity(pools.len());
    for pool in pools.values() {
        match pool.enter() {
            Some(guard) => guards.push(guard),
            None => {
                let e = err!(KVF_ERR_EXPIRED, "pool {} was unregistered", pool.id());
                return refuse(&e);
            }
        }
    }
    if !(opened.holds)() {
        let e = err!(KVF_ERR_EXPIRED, "the source's lease has ended");
        return refuse(&e);
    }
    let (mut bytes, mut raising) = (0, Raising::new(source.devices()));
    let mut known: Option<&Arc<Pool>> = None; // neighbours mostly use the same one
    for pattern in batch.iter() {
        let same = known.filter(|pool| pool.id() == pattern.src_pool);
        let Some(pool) = same.or_else(|| pools.get(&pattern.src_pool)) else {
            continue;
        };
        known = Some(pool);
        match check(pattern, pool.bytes(), u64::MAX) {
            Ok(0) => {}
            Ok(moved) if pool.is_device() => match raising.place(pattern, pool, moved) {
                Ok(at) => {
                    bytes += moved;
                    ranges.push(at, moved as usize);
                }
                Err(e) => return refuse(&e),
            },
            Ok(moved) => {
                bytes += moved;
                for (from, _) in Runs::new(pattern) {
                    ranges.push(
                        pool.base().wrapping_add(from as usize),
                        pattern.run as usize,
                    );
                }
            }
            Err(e) => return refuse(&e),
        }
    }
    if let Err(e) = raising.wait(stall) {
        // The device may still read the pools.
        raising.finish(true);
        std::mem::forget(guards);
        return refuse(&e);
    }
    // SAFETY: `check` has put every byte inside a pool, which `guards` keep, or it is in the buffer of
    // a lane that `raising` has.
    let sent = unsafe { carrier.answer(read.job, bytes, ranges, &*opened.holds) };
    raising.finish(false);
    drop(guards);
    sent
}

fn pools(source: &dyn Source, batch: &[Pattern]) -> Result<HashMap<u32, Arc<Pool>>> {
    let mut pools = HashMap::new();
    let mut last = None;
    for pattern in batch {
        if last.replace(pattern.src_pool) == Some(pattern.src_pool) {
            continue;
        }
        if let Entry::Vacant(new) = pools.entry(pattern.src_pool) {
            match source.pool(pattern.src_pool) {
                Some(pool) => new.insert(pool),
                None => bail!(KVF_ERR_EXPIRED, "no pool {} any more", pattern.src_pool),
            };
        }
    }
    Ok(pools)
}
