//! The reader's end: asks for pieces and receives them into place.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::stream::{Patience, Ranges, Stream};
use super::{BATCH_BYTES, HEAD_BYTES, MAX_TEXT, PIPELINE, TRAILER_BYTES};
use crate::bail;
use crate::cuda::Devices;
use crate::error::{Error, Result, Status};
use crate::plan::Pattern;
use crate::transport::device::flow::Flow;
use crate::transport::device::socket::Landing;
use crate::transport::span::{Runs, check};
use crate::transport::{DataPath, ReadJob};
use crate::wire::{self, Body, DataClose, DataRead, Frame};

/// Opens one more connection to the source: connected, and its [`wire::DataHello`] sent.
/// Given up when the descriptor is readable.
pub type Connect = Box<dyn Fn(Option<BorrowedFd<'_>>) -> Result<Stream> + Send + Sync>;

/// Reads one source agent through stream sockets.
pub struct TcpPath {
    name: &'static str,
    reason: String,
    /// Lengths of the source's pools, as announced.
    pools: BTreeMap<u32, u64>,
    connect: Connect,
    idle: Mutex<Vec<Stream>>,
    next_job: AtomicU64,
    /// Of one job at once, and kept when they are idle.
    connections: usize,
    spin: Duration,
    devices: Arc<Devices>,
}

impl TcpPath {
    /// A path over connections that `connect` makes when they are needed; at most `connections` of
    /// one job at once.
    pub fn new(
        name: &'static str,
        reason: String,
        pools: BTreeMap<u32, u64>,
        connections: usize,
        spin: Duration,
        devices: Arc<Devices>,
        connect: Connect,
    ) -> Self {
        Self {
            name,
            reason,
            pools,
            connect,
            idle: Mutex::default(),
            next_job: AtomicU64::new(1),
            connections: connections.max(1),
            spin,
            devices,
        }
    }

    /// Makes a connection and keeps it, so that a source that cannot be reached shows early.
    ///
    /// # Errors
    /// As the connecting.
    pub fn prove(&self) -> Result<()> {
        let stream = (self.connect)(None)?;
        self.put_back(stream);
        Ok(())
    }

    /// A connection that is idle here and that the source has not closed.
    fn take_idle(&self) -> Option<Stream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(stream) = idle.pop() {
            if stream.is_quiet() {
                return Some(stream);
            }
        }
        None
    }

    fn put_back(&self, stream: Stream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < self.connections {
            idle.push(stream);
        }
    }

    /// One worker's part of a job, on one connection.
    fn read(&self, stream: &Stream, job: &ReadJob) -> Result<()> {
        let mut flow = Flow::new(&self.devices, job);
        let outcome = self.read_with(stream, job, &mut flow);
        flow.finish(outcome)
    }

    fn read_with<'a>(
        &'a self,
        stream: &Stream,
        job: &'a ReadJob,
        flow: &mut Flow<'a>,
    ) -> Result<()> {
        let wake = job.wake()?;
        let patience = Patience {
            spin: self.spin,
            wake: Some(wake.as_fd()),
            stall: None, // the import's deadline sets `wake`
        };
        let failed = |what: &str, e: &io::Error| {
            Error::os(
                Status::KVF_ERR_TRANSFER,
                format!(
                    "{} {what} after {} of {} bytes",
                    self.name,
                    job.moved(),
                    job.bytes()
                ),
                e,
            )
        };
        let number = self.next_job.fetch_add(1, Ordering::Relaxed);
        let mut request = job.request().clone();
        request.job = number;
        let mut out = Vec::new();
        encode(Body::DataOpen(request), &mut out)?;
        let mut asked: VecDeque<Vec<Pattern>> = VecDeque::new();
        let (mut spare, mut ranges) = (Vec::new(), Ranges::default());
        loop {
            while asked.len() < PIPELINE {
                let mut batch: Vec<Pattern> = spare.pop().unwrap_or_default();
                batch.clear();
                let Some((binding, cursor)) = job.next_at(BATCH_BYTES, &mut batch) else {
                    break;
                };
                let (piece, segment, taken) = cursor.to_parts();
                let read = DataRead {
                    job: number,
                    binding: binding as u32,
                    piece,
                    segment,
                    taken,
                    max_bytes: BATCH_BYTES,
                };
                encode(Body::DataRead(read), &mut out)?;
                asked.push_back(batch);
            }
            let Some(batch) = asked.pop_front() else {
                encode(Body::DataClose(DataClose { job: number }), &mut out)?;
                return stream.send(&out, patience).map_err(|e| failed("close", &e));
            };
            if !out.is_empty() {
                stream
                    .send(&out, patience)
                    .map_err(|e| failed("request", &e))?;
                out.clear();
            }
            self.receive(stream, job, &batch, &mut ranges, flow, patience)
                .map_err(|e| match e {
                    Fault::Io(e) => failed("read", &e),
                    Fault::Told(e) => e,
                })?;
            spare.push(batch);
        }
    }

    fn receive(
        &self,
        stream: &Stream,
        job: &ReadJob,
        batch: &[Pattern],
        ranges: &mut Ranges,
        flow: &mut Flow<'_>,
        patience: Patience<'_>,
    ) -> std::result::Result<(), Fault> {
        ranges.clear();
        let (mut bytes, mut on_host) = (0, 0);
        let mut landing = Landing::default();
        for pattern in batch {
            let Some(pool) = job.pool(pattern.dst_pool) else {
                return Err(Fault::Told(crate::err!(
                    KVF_ERR_TRANSFER,
                    "this side has no pool {}",
                    pattern.dst_pool
                )));
            };
            let src_bytes = self.pools.get(&pattern.src_pool).copied().unwrap_or(0);
            let moved = check(pattern, src_bytes, pool.bytes()).map_err(Fault::Told)?;
            if moved > 0 && pool.is_device() {
                let at = landing.place(flow, pattern, pool, moved);
                ranges.push(at.map_err(Fault::Told)?, moved as usize);
                bytes += moved;
            } else if moved > 0 {
                for (_, to) in Runs::new(pattern) {
                    ranges.push(pool.base().wrapping_add(to as usize), pattern.run as usize);
                }
                bytes += moved;
                on_host += moved;
            }
        }
        let mut head = [0; HEAD_BYTES];
        stream.receive(&mut head, patience).map_err(Fault::Io)?;
        let number =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (status, text) = (number(0) as i32, number(4) as usize);
        let coming = u64::from(number(8)) | u64::from(number(12)) << 32;
        if status != 0 || coming != bytes {
            return Err(self.refused(stream, status, text, coming, bytes, patience));
        }
        // SAFETY: `check` has put every destination byte inside a pool of this job, which keeps it,
        // or it is in the buffer of a lane that `landing` has.
        unsafe { stream.receive_ranges(ranges, patience) }.map_err(Fault::Io)?;
        let mut trailer = [0; TRAILER_BYTES];
        stream.receive(&mut trailer, patience).map_err(Fault::Io)?;
        if u32::from_le_bytes(trailer) != 1 {
            job.lose_lease();
        }
        job.add_moved(on_host);
        landing.start(flow).map_err(Fault::Told)
    }

    fn refused(
        &self,
        stream: &Stream,
        status: i32,
        text: usize,
        coming: u64,
        expected: u64,
        patience: Patience<'_>,
    ) -> Fault {
        if status == 0 || text > MAX_TEXT {
            return Fault::Told(crate::err!(
                KVF_ERR_PROTOCOL,
                "the source sends {coming} bytes where {expected} were asked for"
            ));
        }
        let mut bytes = vec![0; text];
        match stream.receive(&mut bytes, patience) {
            Ok(()) => Fault::Told(Error::new(
                Status::from_code(status).unwrap_or(Status::KVF_ERR_TRANSFER),
                format!("the source refused: {}", String::from_utf8_lossy(&bytes)),
            )),
            Err(e) => Fault::Io(e),
        }
    }
}

enum Fault {
    Io(io::Error),
    Told(Error),
}

fn encode(body: Body, out: &mut Vec<u8>) -> Result<()> {
    wire::encode(&Frame { body: Some(body) }, out)
}

impl DataPath for TcpPath {
    fn name(&self) -> &'static str {
        self.name
    }

    fn reason(&self) -> String {
        self.reason.clone()
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        let stream = match self.take_idle() {
            Some(stream) => stream,
            None => match (self.connect)(Some(job.wake()?.as_fd())) {
                Ok(stream) => stream,
                Err(_) if job.is_cancelled() => return Ok(()),
                Err(e) => return Err(e),
            },
        };
        let outcome = self.read(&stream, job);
        match outcome {
            Ok(()) if !job.is_cancelled() => {
                self.put_back(stream);
                Ok(())
            }
            // What is in flight on the connection is of no use any more: it is closed.
            Ok(()) => Ok(()),
            Err(_) if job.is_cancelled() => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn attest(&self, job: &ReadJob) -> Result<bool> {
        if self.pools.is_empty() {
            bail!(KVF_ERR_INTERNAL, "a path without pools has moved bytes");
        }
        Ok(!job.lease_lost())
    }

    fn most_workers(&self) -> usize {
        self.connections
    }

    fn inline_bytes(&self) -> u64 {
        0 // a round trip is not for the caller's thread
    }
}
