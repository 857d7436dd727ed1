//! The source's end: one named thread for each data connection.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::stream::{Patience, Ranges, Stream};
use super::{BATCH_BYTES, HEAD_BYTES};
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

/// Answers up to this many bytes are one message: a copy costs less than two more calls, and the
/// reader is woken once.
const ONE_MESSAGE: u64 = 32 << 10;

/// Limits of a data connection.
#[derive(Clone, Copy, Debug)]
pub struct Serving {
    /// A reader that takes nothing for this long is dropped.
    pub stall: Duration,
    /// How long to look before sleeping.
    pub spin: Duration,
}

/// Serves a connection, whose hello has been answered, until its end.
///
/// # Errors
/// The connection broke, or its reader does not speak the protocol.
pub fn serve(stream: &Stream, source: &dyn Source, limits: Serving) -> Result<()> {
    let broken = |e: io::Error| err!(KVF_ERR_PEER_LOST, "data connection: {e}");
    let mut decoder = Decoder::new(MAX_FRAME);
    let mut jobs: HashMap<u64, Result<Opened>> = HashMap::new();
    let mut buffers = (Vec::new(), Ranges::default());
    let mut bytes = vec![0; 64 << 10];
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
                    answer(stream, source, job, &read, limits, &mut buffers).map_err(broken)?;
                }
                Some(_) => bail!(KVF_ERR_PROTOCOL, "a control message on a data connection"),
                None => {}
            }
        }
        let patience = Patience {
            spin: limits.spin,
            wake: None, // shutting the socket down wakes us
            stall: None,
        };
        match stream.receive_next(&mut bytes, patience) {
            Ok(0) => return Ok(()),
            Ok(n) => decoder.push(&bytes[..n]),
            Err(e) => return Err(broken(e)),
        }
    }
}

fn answer(
    stream: &Stream,
    source: &dyn Source,
    job: Option<&Result<Opened>>,
    read: &DataRead,
    limits: Serving,
    (batch, ranges): &mut (Vec<Pattern>, Ranges),
) -> io::Result<()> {
    let patience = Patience {
        spin: limits.spin,
        wake: None,
        stall: Some(limits.stall),
    };
    let unknown = err!(KVF_ERR_PROTOCOL, "job {} was not opened", read.job);
    let opened = match job {
        Some(Ok(opened)) => opened,
        Some(Err(e)) => return refuse(stream, e, patience),
        None => return refuse(stream, &unknown, patience),
    };
    batch.clear();
    ranges.clear();
    let cursor = &mut Cursor::from_parts(read.piece, read.segment, read.taken);
    if let Some(binding) = opened.bindings.get(read.binding as usize) {
        binding.take(cursor, read.max_bytes.min(BATCH_BYTES), batch);
    }
    let pools = match pools(source, batch) {
        Ok(pools) => pools,
        Err(e) => return refuse(stream, &e, patience),
    };
    // No byte leaves before the lease was seen to hold, and none of a pool that is being freed.
    let mut guards = Vec::with_capacity(pools.len());
    for pool in pools.values() {
        match pool.enter() {
            Some(guard) => guards.push(guard),
            None => {
                let e = err!(KVF_ERR_EXPIRED, "pool {} was unregistered", pool.id());
                return refuse(stream, &e, patience);
            }
        }
    }
    if !(opened.holds)() {
        let e = err!(KVF_ERR_EXPIRED, "the source's lease has ended");
        return refuse(stream, &e, patience);
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
                Err(e) => return refuse(stream, &e, patience),
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
            Err(e) => return refuse(stream, &e, patience),
        }
    }
    if let Err(e) = raising.wait(limits.stall) {
        // The device may still read the pools.
        raising.finish(true);
        std::mem::forget(guards);
        return refuse(stream, &e, patience);
    }
    let mut head = [0; HEAD_BYTES];
    head[8..].copy_from_slice(&bytes.to_le_bytes());
    if bytes <= ONE_MESSAGE {
        let mut whole = head.to_vec();
        // SAFETY: `check` has put every byte inside a pool, which `guards` keep, or it is in the
        // buffer of a lane that `raising` has.
        unsafe { ranges.copy_to(&mut whole) };
        raising.finish(false);
        let held = u32::from((opened.holds)());
        drop(guards);
        whole.extend_from_slice(&held.to_le_bytes());
        return stream.send(&whole, patience);
    }
    stream.send(&head, patience)?;
    // SAFETY: as above.
    let sent = unsafe { stream.send_ranges(ranges, patience) };
    raising.finish(false);
    sent?;
    let held = u32::from((opened.holds)());
    drop(guards);
    stream.send(&held.to_le_bytes(), patience)
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

fn refuse(stream: &Stream, e: &Error, patience: Patience<'_>) -> io::Result<()> {
    let text = &e.text.as_bytes()[..e.text.len().min(super::MAX_TEXT)];
    let mut out = Vec::with_capacity(HEAD_BYTES + text.len());
    out.extend_from_slice(&(e.status as i32).to_le_bytes());
    out.extend_from_slice(&(text.len() as u32).to_le_bytes());
    out.extend_from_slice(&0u64.to_le_bytes());
    out.extend_from_slice(text);
    stream.send(&out, patience)
}
