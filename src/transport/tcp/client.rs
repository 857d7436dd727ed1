//! The reader's end: asks for pieces and receives them into place.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::stream::{Patience, Stream};
use super::{HEAD_BYTES, TRAILER_BYTES};
use crate::bail;
use crate::cuda::Devices;
use crate::error::{Error, Result, Status};
use crate::plan::Batch;
use crate::transport::device::flow::Flow;
use crate::transport::pieces::{Asking, MAX_TEXT, PIPELINE, Placed, Ranges, Walk, place, refusal};
use crate::transport::{DataPath, ReadJob};

/// Jobs up to this size are asked for by the thread that begins them.
const INLINE_BYTES: u64 = 32 << 10;
/// Answers up to this size are received by one call and copied into place, instead of by three.
const ONE_CALL: u64 = 8 << 10;
/// Longest time that such a thread looks for the answer, if it may look at all (`spin`).
const LOOK: Duration = Duration::from_micros(200);
/// Longest wait for the rest of a small answer that has begun to come.
const REST: Duration = Duration::from_millis(2);

/// Opens one more connection to the source: connected, and its [`crate::wire::DataHello`] sent.
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

    /// Begins one worker's part of a job: names it and asks for its first pieces. Nothing has come
    /// when this returns.
    fn ask_first(&self, job: &ReadJob, stream: Stream, patience: Patience<'_>) -> Result<Asked> {
        let number = self.next_job.fetch_add(1, Ordering::Relaxed);
        let mut out = Vec::new();
        let mut asked = Asked {
            stream,
            asking: Asking::begin(job, number, &mut out)?,
            batches: VecDeque::new(),
        };
        self.ask_more(job, &mut asked, out, patience)?;
        Ok(asked)
    }

    /// Asks for as many pieces as may be on their way; with the last one says that it is the last.
    fn ask_more(
        &self,
        job: &ReadJob,
        asked: &mut Asked,
        mut out: Vec<u8>,
        patience: Patience<'_>,
    ) -> Result<()> {
        while asked.batches.len() < PIPELINE
            && let Some(batch) = asked.asking.next(job, &mut out)?
        {
            asked.batches.push_back(batch);
        }
        if out.is_empty() {
            return Ok(());
        }
        let sent = asked.stream.send(&out, patience);
        sent.map_err(|e| self.failed(job, "request", &e))
    }

    /// Receives everything that was asked for, and asks for more until there is no more.
    fn receive_all(
        &self,
        job: &ReadJob,
        asked: &mut Asked,
        flow: &mut Flow<'_>,
        patience: Patience<'_>,
    ) -> Result<()> {
        let mut ranges = Ranges::default();
        while let Some(batch) = asked.batches.pop_front() {
            self.receive(&asked.stream, job, &batch, &mut ranges, flow, patience)
                .map_err(|e| match e {
                    Fault::Io(e) => self.failed(job, "read", &e),
                    Fault::Told(e) => e,
                })?;
            asked.asking.give_back(batch);
            self.ask_more(job, asked, Vec::new(), patience)?;
        }
        Ok(())
    }

    fn failed(&self, job: &ReadJob, what: &str, e: &io::Error) -> Error {
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
    }

    fn receive(
        &self,
        stream: &Stream,
        job: &ReadJob,
        batch: &Batch,
        ranges: &mut Ranges,
        flow: &mut Flow<'_>,
        patience: Patience<'_>,
    ) -> std::result::Result<(), Fault> {
        let placed = place(job, &self.pools, batch, ranges, flow).map_err(Fault::Told)?;
        if placed.bytes <= ONE_CALL {
            return self.receive_at_once(stream, job, placed, ranges, flow, patience);
        }
        let mut head = [0; HEAD_BYTES];
        stream.receive(&mut head, patience).map_err(Fault::Io)?;
        check_head(&head, placed.bytes, |text| stream.receive(text, patience))?;
        // SAFETY: `place` has put every destination byte inside a pool of this job, which keeps it,
        // or it is in the buffer of a lane that `placed` has.
        unsafe { stream.receive_ranges(ranges, patience) }.map_err(Fault::Io)?;
        let mut trailer = [0; TRAILER_BYTES];
        stream.receive(&mut trailer, patience).map_err(Fault::Io)?;
        arrived(job, placed, &trailer, flow)
    }

    /// A small answer, through a buffer.
    fn receive_at_once(
        &self,
        stream: &Stream,
        job: &ReadJob,
        placed: Placed,
        ranges: &mut Ranges,
        flow: &mut Flow<'_>,
        patience: Patience<'_>,
    ) -> std::result::Result<(), Fault> {
        let bytes = placed.bytes as usize;
        let mut answer = vec![0; HEAD_BYTES + bytes + TRAILER_BYTES];
        let mut come = 0;
        while come < HEAD_BYTES {
            match stream.receive_next(&mut answer[come..], patience) {
                Ok(0) => return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => come += n,
                Err(e) => return Err(Fault::Io(e)),
            }
        }
        let (head, rest) = answer.split_at_mut(HEAD_BYTES);
        let come = come - HEAD_BYTES;
        check_head(head, placed.bytes, |text| {
            let known = come.min(text.len());
            text[..known].copy_from_slice(&rest[..known]);
            stream.receive(&mut text[known..], patience)
        })?;
        stream
            .receive(&mut rest[come..], patience)
            .map_err(Fault::Io)?;
        let (data, trailer) = rest.split_at(bytes);
        // SAFETY: as in `receive`.
        unsafe { ranges.write(&mut Walk::default(), data) };
        arrived(job, placed, trailer, flow)
    }
}

/// Whether an answer brings the `expected` bytes; else what it says instead, for which `receive` fills
/// a buffer.
fn check_head(
    head: &[u8],
    expected: u64,
    receive: impl FnOnce(&mut [u8]) -> io::Result<()>,
) -> std::result::Result<(), Fault> {
    let number =
        |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (status, text) = (number(0) as i32, number(4) as usize);
    let coming = u64::from(number(8)) | u64::from(number(12)) << 32;
    if status == 0 && coming == expected {
        return Ok(());
    }
    if status == 0 || text > MAX_TEXT {
        return Err(Fault::Told(crate::err!(
            KVF_ERR_PROTOCOL,
            "the source sends {coming} bytes where {expected} were asked for"
        )));
    }
    let mut bytes = vec![0; text];
    Err(match receive(&mut bytes) {
        Ok(()) => Fault::Told(refusal(status, &bytes)),
        Err(e) => Fault::Io(e),
    })
}

/// Every byte is in place.
fn arrived(
    job: &ReadJob,
    placed: Placed,
    trailer: &[u8],
    flow: &mut Flow<'_>,
) -> std::result::Result<(), Fault> {
    if trailer != 1u32.to_le_bytes() {
        job.lose_lease();
    }
    placed.arrived(job, flow).map_err(Fault::Told)
}

/// What one connection was asked for and has not brought yet.
struct Asked {
    stream: Stream,
    asking: Asking,
    batches: VecDeque<Batch>,
}

enum Fault {
    Io(io::Error),
    Told(Error),
}

impl DataPath for TcpPath {
    fn name(&self) -> &'static str {
        self.name
    }

    fn reason(&self) -> String {
        self.reason.clone()
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        let wake = job.wake()?;
        let patience = Patience {
            spin: self.spin,
            wake: Some(wake.as_fd()),
            stall: None, // the import's deadline sets `wake`
        };
        let begun = job.unpark().and_then(|begun| begun.downcast().ok());
        let asked = match begun {
            Some(asked) => Ok(*asked),
            None => {
                let stream = match self.take_idle() {
                    Some(stream) => Ok(stream),
                    None => (self.connect)(Some(wake.as_fd())),
                };
                stream.and_then(|stream| self.ask_first(job, stream, patience))
            }
        };
        let outcome = asked.and_then(|mut asked: Asked| {
            let mut flow = Flow::new(&self.devices, job);
            let received = self.receive_all(job, &mut asked, &mut flow, patience);
            flow.finish(received)?;
            Ok(asked.stream)
        });
        match outcome {
            Ok(stream) if !job.is_cancelled() => {
                self.put_back(stream);
                Ok(())
            }
            // What is in flight on the connection is of no use any more: it is closed.
            Ok(_) => Ok(()),
            Err(_) if job.is_cancelled() => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Asks at once, and takes the answer if it comes while the thread looks. Otherwise a worker
    /// finds it, for which the request was on its way all the time.
    fn run_at_once(&self, job: &ReadJob) -> Result<bool> {
        let Some(stream) = self.take_idle() else {
            return Ok(false);
        };
        let look = |spin: Duration, stall: Duration| Patience {
            spin,
            wake: None,
            stall: Some(stall),
        };
        // Anything odd: the connection is given up, and a worker starts over with another one.
        let Ok(mut asked) = self.ask_first(job, stream, look(Duration::ZERO, Duration::ZERO))
        else {
            job.rewind();
            return Ok(false);
        };
        let spin = self.spin.min(LOOK);
        let host_only = asked
            .batches
            .iter()
            .flat_map(Batch::shapes)
            .all(|(shape, _)| {
                let pool = job.pool(shape.dst_pool);
                pool.is_some_and(|pool| !pool.is_device())
            });
        if !host_only || spin.is_zero() || !asked.stream.comes_within(spin) {
            job.park(Box::new(asked));
            return Ok(false);
        }
        let mut flow = Flow::new(&self.devices, job);
        let received = self.receive_all(job, &mut asked, &mut flow, look(spin, REST));
        match flow.finish(received) {
            Ok(()) => {
                self.put_back(asked.stream);
                Ok(true)
            }
            Err(_) => {
                job.rewind();
                Ok(false)
            }
        }
    }

    fn has_to_ask(&self) -> bool {
        true
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
        INLINE_BYTES
    }
}
