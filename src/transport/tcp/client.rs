//! The reader's end: asks for pieces and receives them into place.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::stream::{Patience, Stream, Until};
use super::{HEAD_BYTES, TRAILER_BYTES};
use crate::bail;
use crate::cuda::Devices;
use crate::error::{Error, Result, Status};
use crate::plan::Batch;
use crate::transport::device::flow::Flow;
use crate::transport::pieces::{Asking, MAX_TEXT, PIPELINE, Placed, Ranges, Walk, place, refusal};
use crate::transport::{DataPath, ReadJob};

/// Jobs up to this size are asked for by the thread that begins them. Answers up to this size are
/// received by one call and copied into place, instead of by three.
const SMALL_BYTES: u64 = 32 << 10;
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
            come: Vec::new(),
        };
        self.ask_more(job, &mut asked, out, patience)?;
        Ok(asked)
    }

    /// Asks for as many pieces as may be on their way, of a small job for all; with the last one says
    /// that it is the last.
    fn ask_more(
        &self,
        job: &ReadJob,
        asked: &mut Asked,
        mut out: Vec<u8>,
        patience: Patience<'_>,
    ) -> Result<()> {
        while (asked.batches.len() < PIPELINE || job.bytes() <= SMALL_BYTES)
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

    /// Receives everything that was asked for, and asks for more until there is no more. After a
    /// time-out amid small answers it may be called again, and goes on.
    fn receive_all(
        &self,
        job: &ReadJob,
        asked: &mut Asked,
        flow: &mut Flow<'_>,
        patience: &Waits<'_>,
    ) -> std::result::Result<(), Fault> {
        let mut ranges = Ranges::default();
        while let Some(batch) = asked.batches.pop_front() {
            let received = self.receive(asked, job, &batch, &mut ranges, flow, patience);
            if received.is_err() {
                asked.batches.push_front(batch);
                return received;
            }
            asked.asking.give_back(batch);
            self.ask_more(job, asked, Vec::new(), patience())
                .map_err(Fault::Told)?;
        }
        Ok(())
    }

    fn told(&self, job: &ReadJob, fault: Fault) -> Error {
        match fault {
            Fault::Io(e) => self.failed(job, "read", &e),
            Fault::Told(e) => e,
        }
    }

    /// Takes all answers to a small job on a thread of the caller; what has come when its patience
    /// ends is kept: false.
    fn take_small(&self, job: &ReadJob, asked: Box<Asked>, patience: &Waits<'_>) -> Result<bool> {
        let mut asked = asked;
        let mut flow = Flow::new(&self.devices, job);
        let received = self.receive_all(job, &mut asked, &mut flow, patience);
        if matches!(&received, Err(Fault::Io(e)) if e.kind() == io::ErrorKind::TimedOut) {
            job.park(asked, true);
            return Ok(false);
        }
        match flow.finish(received.map_err(|fault| self.told(job, fault))) {
            Ok(()) if !job.is_cancelled() => self.put_back(asked.stream),
            // What is in flight on the connection is of no use any more: it is closed.
            Ok(()) => {}
            Err(_) if job.is_cancelled() => {}
            Err(e) => return Err(e),
        }
        Ok(true)
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
        asked: &mut Asked,
        job: &ReadJob,
        batch: &Batch,
        ranges: &mut Ranges,
        flow: &mut Flow<'_>,
        patience: &Waits<'_>,
    ) -> std::result::Result<(), Fault> {
        let placed = place(job, &self.pools, batch, ranges, flow).map_err(Fault::Told)?;
        if placed.bytes <= SMALL_BYTES {
            return self.receive_small(asked, job, placed, ranges, flow, patience);
        }
        let stream = &asked.stream;
        let mut head = [0; HEAD_BYTES];
        stream.receive(&mut head, patience()).map_err(Fault::Io)?;
        if let Answer::Refusal { status, text } = Answer::of(&head, placed.bytes)? {
            let mut bytes = vec![0; text];
            stream.receive(&mut bytes, patience()).map_err(Fault::Io)?;
            return Err(Fault::Told(refusal(status, &bytes)));
        }
        // SAFETY: `place` has put every destination byte inside a pool of this job, which keeps it,
        // or it is in the buffer of a lane that `placed` has.
        unsafe { stream.receive_ranges(ranges, patience()) }.map_err(Fault::Io)?;
        let mut trailer = [0; TRAILER_BYTES];
        stream
            .receive(&mut trailer, patience())
            .map_err(Fault::Io)?;
        arrived(job, placed, &trailer, flow)
    }

    /// A small answer, through a buffer that keeps what has come if the rest is late.
    fn receive_small(
        &self,
        asked: &mut Asked,
        job: &ReadJob,
        placed: Placed,
        ranges: &mut Ranges,
        flow: &mut Flow<'_>,
        patience: &Waits<'_>,
    ) -> std::result::Result<(), Fault> {
        let bytes = placed.bytes as usize;
        asked.come_in(HEAD_BYTES, bytes + TRAILER_BYTES, patience)?;
        if let Answer::Refusal { status, text } = Answer::of(&asked.come, placed.bytes)? {
            asked.come_in(HEAD_BYTES + text, 0, patience)?;
            let text = &asked.come[HEAD_BYTES..HEAD_BYTES + text];
            return Err(Fault::Told(refusal(status, text)));
        }
        let whole = HEAD_BYTES + bytes + TRAILER_BYTES;
        asked.come_in(whole, 0, patience)?;
        let (data, trailer) = asked.come[HEAD_BYTES..whole].split_at(bytes);
        // SAFETY: as in `receive`.
        unsafe { ranges.write(&mut Walk::default(), data) };
        let done = arrived(job, placed, trailer, flow);
        asked.come.clear();
        done
    }
}

/// What an answer's head says.
enum Answer {
    /// The bytes that were asked for follow, and the trailer.
    Data,
    /// Only the reason follows: a text of so many bytes.
    Refusal { status: i32, text: usize },
}

impl Answer {
    /// Reads a head where `expected` bytes were asked for.
    fn of(head: &[u8], expected: u64) -> std::result::Result<Self, Fault> {
        let number =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (status, text) = (number(0) as i32, number(4) as usize);
        let coming = u64::from(number(8)) | u64::from(number(12)) << 32;
        if status == 0 && coming == expected {
            return Ok(Self::Data);
        }
        if status == 0 || text > MAX_TEXT {
            return Err(Fault::Told(crate::err!(
                KVF_ERR_PROTOCOL,
                "the source sends {coming} bytes where {expected} were asked for"
            )));
        }
        Ok(Self::Refusal { status, text })
    }
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

/// How each of several waits may be waited.
type Waits<'a> = dyn Fn() -> Patience<'a> + 'a;

/// What one connection was asked for and has not brought yet.
struct Asked {
    stream: Stream,
    asking: Asking,
    batches: VecDeque<Batch>,
    /// The beginning of a small answer.
    come: Vec<u8>,
}

impl Asked {
    /// Receives until there are `least` bytes of a small answer, and up to `more` that follow them.
    fn come_in(
        &mut self,
        least: usize,
        more: usize,
        patience: &Waits<'_>,
    ) -> std::result::Result<(), Fault> {
        let mut come = self.come.len();
        if come < least {
            self.come.resize(least + more, 0);
        }
        let mut outcome = Ok(());
        while come < least && outcome.is_ok() {
            match self.stream.receive_next(&mut self.come[come..], patience()) {
                Ok(0) => outcome = Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => come += n,
                Err(e) => outcome = Err(e),
            }
        }
        self.come.truncate(come);
        outcome.map_err(Fault::Io)
    }

    /// What was asked for is the whole of a small job, and goes to host memory: a caller's thread
    /// may take it.
    fn is_small(&self, job: &ReadJob) -> bool {
        let mut shapes = self.batches.iter().flat_map(Batch::shapes);
        let on_host = shapes.all(|(shape, _)| {
            let pool = job.pool(shape.dst_pool);
            pool.is_some_and(|pool| !pool.is_device())
        });
        on_host && job.bytes() <= SMALL_BYTES
    }
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
            let received = self.receive_all(job, &mut asked, &mut flow, &|| patience);
            flow.finish(received.map_err(|fault| self.told(job, fault)))?;
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

    /// Asks at once, and takes the answer if it comes while the thread looks. Otherwise who goes on
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
        let Ok(asked) = self.ask_first(job, stream, look(Duration::ZERO, Duration::ZERO)) else {
            job.rewind();
            return Ok(false);
        };
        let (spin, small) = (self.spin.min(LOOK), asked.is_small(job));
        if !small || spin.is_zero() || !asked.stream.comes_within(spin) {
            job.park(Box::new(asked), small);
            return Ok(false);
        }
        let taken = self.take_small(job, Box::new(asked), &|| look(spin, REST));
        if taken.is_err() {
            job.rewind();
        }
        Ok(taken.unwrap_or(false))
    }

    fn may_be_joined(&self, job: &ReadJob) -> bool {
        job.is_joinable()
    }

    /// Takes small answers that are on their way.
    fn run_until(&self, job: &ReadJob, until: Instant) -> Result<bool> {
        if !job.is_joinable() {
            return Ok(false);
        }
        let begun = job.unpark().and_then(|begun| begun.downcast().ok());
        let Some(asked) = begun else {
            return Ok(false);
        };
        let wake = job.wake()?;
        let until = Until {
            deadline: until,
            wake: Some(wake.as_fd()),
        };
        let patience = || {
            let left = until.deadline.saturating_duration_since(Instant::now());
            Patience {
                spin: self.spin.min(left),
                ..until.patience()
            }
        };
        self.take_small(job, asked, &patience)
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
        SMALL_BYTES
    }
}
