//! How bytes get from a peer's memory into ours.
//!
//! One [`DataPath`] per (peer, memory kind). It runs on kvferry's worker threads, inside a `begin`
//! call for a small job, or on a caller's thread that waits for the job, and pulls its work from the shared [`ReadJob`], so that several
//! workers can serve one job and a cancel is seen between two pieces.

pub mod device;
pub mod inproc;
pub mod pieces;
pub mod shm;
mod span;
pub mod tcp;
pub mod ucx;

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result, Status};
use crate::memory::Pool;
use crate::observe::fault;
use crate::plan::{Batch, Binding, Cursor};
use crate::runtime::Wake;
use crate::wire;

/// Where a publication's lease word is and what it says while the lease holds.
pub use crate::memory::Lease as LeaseRef;

/// Longest piece that is copied without looking at the cancel flag, in bytes.
pub const PIECE_BYTES: u64 = 4 << 20;

/// How far a job has been handed out.
#[derive(Debug, Default)]
struct Position {
    binding: usize,
    cursor: Cursor,
    taken: u64,
}

/// Makes what a source must know, out of tables that others have too.
type MakeRequest = Box<dyn FnOnce() -> wire::DataOpen + Send>;

/// What a path has begun with a job.
struct Parked {
    begun: Box<dyn Any + Send>,
    joinable: bool,
    /// See [`ReadJob::begun_by`].
    by: Option<Arc<dyn DataPath>>,
}

impl fmt::Debug for Parked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parked")
            .field("joinable", &self.joinable)
            .finish_non_exhaustive()
    }
}

/// The part of a transfer that reads from one source agent under one lease.
#[derive(Debug)]
pub struct ReadJob {
    bindings: Vec<Binding>,
    bytes: u64,
    position: Mutex<Position>,
    pools: BTreeMap<u32, Arc<Pool>>,
    lease: LeaseRef,
    workers: AtomicU64,
    cancelled: AtomicBool,
    /// Set with `cancelled`, for who waits on a socket; made when first needed.
    wake: OnceLock<Wake>,
    moved: AtomicU64,
    /// What a source must know to derive the same copies, for paths through a socket; only those
    /// have it made.
    request: LazyLock<wire::DataOpen, MakeRequest>,
    /// A source said that its lease did not hold.
    lease_lost: AtomicBool,
    /// A device may still write the job's memory.
    unquiet: AtomicBool,
    /// The deviation `cuda_attest_early` of test builds.
    attested_early: AtomicBool,
    /// See [`Self::park`].
    parked: Mutex<Option<Parked>>,
}

impl ReadJob {
    /// A job over all `bindings`, writing into our `pools`.
    pub fn new(
        bindings: Vec<Binding>,
        pools: BTreeMap<u32, Arc<Pool>>,
        lease: LeaseRef,
        request: impl FnOnce() -> wire::DataOpen + Send + 'static,
    ) -> Self {
        Self {
            bytes: bindings.iter().map(Binding::bytes).sum(),
            bindings,
            position: Mutex::default(),
            pools,
            lease,
            workers: AtomicU64::new(1),
            cancelled: AtomicBool::new(false),
            wake: OnceLock::new(),
            moved: AtomicU64::new(0),
            request: LazyLock::new(Box::new(request)),
            lease_lost: AtomicBool::new(false),
            unquiet: AtomicBool::new(false),
            attested_early: AtomicBool::new(false),
            parked: Mutex::default(),
        }
    }

    /// Keeps what a path has begun with the job, for the thread that goes on with it; dropped with
    /// the job if none does. `joinable`: [`DataPath::run_until`] may.
    pub fn park(&self, begun: Box<dyn Any + Send>, joinable: bool) {
        *self.parked() = Some(Parked {
            begun,
            joinable,
            by: None,
        });
    }

    /// What [`Self::park`] was given last.
    pub fn unpark(&self) -> Option<Box<dyn Any + Send>> {
        Some(self.parked().take()?.begun)
    }

    /// Whether something is parked that [`DataPath::run_until`] may go on with.
    pub fn is_joinable(&self) -> bool {
        self.parked().as_ref().is_some_and(|parked| parked.joinable)
    }

    /// What is parked is this path's, and of no use for another one.
    pub fn begun_by(&self, path: &Arc<dyn DataPath>) {
        if let Some(parked) = &mut *self.parked() {
            parked.by = Some(path.clone());
        }
    }

    /// Before a path runs the job: starts over if another one has begun with it. A peer's path may be
    /// made anew between the begin call and the worker, or be one of another kind.
    pub fn goes_to(&self, path: &Arc<dyn DataPath>) {
        let by = self.parked().as_ref().map(|parked| parked.by.clone());
        if by.is_some_and(|by| by.is_none_or(|by| !Arc::ptr_eq(&by, path))) {
            self.rewind();
        }
    }

    fn parked(&self) -> MutexGuard<'_, Option<Parked>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts over. Only while no thread works on the job.
    pub fn rewind(&self) {
        drop(self.unpark());
        *self.position.lock().unwrap_or_else(PoisonError::into_inner) = Position::default();
        self.moved.store(0, Ordering::Relaxed);
    }

    /// Bytes that the whole job moves.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Says how many workers will serve the job; 1 as long as nobody does.
    pub fn shared_by(&self, workers: usize) {
        self.workers.store(workers.max(1) as u64, Ordering::Relaxed);
    }

    /// Appends the next pieces to `out`: about half of one worker's part of what is left, so that
    /// several end at about the same time, however late one of them started or how often it was
    /// held up; at least `least` bytes if there are as many, at most [`PIECE_BYTES`]. False:
    /// nothing is left, or the job was cancelled.
    pub fn next(&self, least: u64, out: &mut Batch) -> bool {
        let mut position = self.position();
        let share = match self.workers.load(Ordering::Relaxed) {
            1 => PIECE_BYTES,
            workers => self.bytes.saturating_sub(position.taken) / (2 * workers),
        };
        let most = share.max(least).min(PIECE_BYTES);
        self.take(&mut position, |_| most, out).is_some()
    }

    /// As [`Self::next`], at most as many bytes as `most` says for the binding that they are of.
    pub fn next_of(&self, most: impl Fn(&Binding) -> u64, out: &mut Batch) -> bool {
        self.take(&mut self.position(), most, out).is_some()
    }

    /// Appends the next pieces to `out`, together at most `max_bytes`; tells where they begin:
    /// index of the binding and position in it. `None` as [`Self::next`]'s false.
    pub fn next_at(&self, max_bytes: u64, out: &mut Batch) -> Option<(usize, Cursor)> {
        self.take(&mut self.position(), |_| max_bytes, out)
    }

    fn position(&self) -> MutexGuard<'_, Position> {
        if self.moved() > 0 {
            fault::point("mid_copy");
        }
        self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(
        &self,
        at: &mut Position,
        most: impl Fn(&Binding) -> u64,
        out: &mut Batch,
    ) -> Option<(usize, Cursor)> {
        while !self.is_cancelled()
            && let Some(binding) = self.bindings.get(at.binding)
        {
            let begin = (at.binding, at.cursor);
            let taken = binding.take(&mut at.cursor, most(binding), out);
            if taken > 0 {
                at.taken += taken;
                return Some(begin);
            }
            (at.binding, at.cursor) = (at.binding + 1, Cursor::default());
        }
        None
    }

    /// Strided patterns that the whole job consists of.
    pub fn patterns(&self) -> u64 {
        self.bindings.iter().map(Binding::patterns).sum()
    }

    /// Our pool with this id.
    pub fn pool(&self, id: u32) -> Option<&Arc<Pool>> {
        self.pools.get(&id)
    }

    /// All of them.
    pub fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.values()
    }

    /// The lease word to check after the last byte.
    pub fn lease(&self) -> LeaseRef {
        self.lease
    }

    /// Makes every worker stop after its current piece.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::SeqCst);
        if let Some(wake) = self.wake.get() {
            wake.set();
        }
    }

    /// Readable once the job is cancelled.
    ///
    /// # Errors
    /// `KVF_ERR_SYSTEM`: no more file descriptors.
    pub fn wake(&self) -> Result<&Wake> {
        if self.wake.get().is_none() {
            let wake = Wake::new().map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "eventfd", &e))?;
            let _ = self.wake.set(wake); // another worker may have been faster
        }
        match self.wake.get() {
            Some(wake) => {
                // A cancel that came before the descriptor was there has not set it.
                if self.is_cancelled() {
                    wake.set();
                }
                Ok(wake)
            }
            None => crate::bail!(KVF_ERR_INTERNAL, "a descriptor that was made is not there"),
        }
    }

    /// What a source must know to derive the same copies.
    pub fn request(&self) -> &wire::DataOpen {
        &self.request
    }

    /// Notes that the source's lease did not hold for a piece.
    pub fn lose_lease(&self) {
        self.lease_lost.store(true, Ordering::Release);
    }

    /// Whether the source's lease was lost for a piece.
    pub fn lease_lost(&self) -> bool {
        self.lease_lost.load(Ordering::Acquire)
    }

    /// Notes that a device could not be stopped: the job's memory is never safe again.
    pub fn mark_unquiet(&self) {
        self.unquiet.store(true, Ordering::Release);
    }

    /// Whether a device may still write the job's memory although every `run` has returned.
    pub fn is_unquiet(&self) -> bool {
        self.unquiet.load(Ordering::Acquire)
    }

    fn attest_early(&self) {
        self.attested_early.store(true, Ordering::Release);
    }

    fn attested_early(&self) -> bool {
        self.attested_early.load(Ordering::Acquire)
    }

    /// Whether somebody called [`Self::cancel`].
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::SeqCst)
    }

    /// Counts bytes as written.
    pub fn add_moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes written so far.
    pub fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }
}

/// One way to read one peer's memory.
pub trait DataPath: Send + Sync {
    /// Name as in `KVFERRY_TRANSPORTS` (`inproc`, `shm`, ...).
    fn name(&self) -> &'static str;

    /// Why this way was chosen, for people.
    fn reason(&self) -> String;

    /// Copies pieces of the job until [`ReadJob::next`] gives no more. When it returns, whether in
    /// success or failure, this thread and what it has started touch the job's memory no more; a
    /// path that cannot make sure of that calls [`ReadJob::mark_unquiet`]. Called by several
    /// workers at once.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`, `KVF_ERR_UNSUPPORTED` or `KVF_ERR_PEER_LOST` with operation, bytes and
    /// the system's reason; the other workers are stopped by the caller.
    fn run(&self, job: &ReadJob) -> Result<()>;

    /// After every `run` of the job has returned: did the lease hold throughout?
    ///
    /// # Errors
    /// As for [`Self::run`].
    fn attest(&self, job: &ReadJob) -> Result<bool>;

    /// Workers that may be in [`Self::run`] of one job at once.
    fn most_workers(&self) -> usize {
        usize::MAX
    }

    /// Pools of the source that are mapped here and that it must not free.
    fn mapped(&self) -> usize {
        0
    }

    /// Lets go of a pool of the source that is mapped here, when the last copy from it has ended.
    /// False: it is not mapped.
    fn unmap(&self, pool: u32) -> bool {
        let _ = pool;
        false
    }

    /// Jobs up to this many bytes may be run by the thread that begins them, by
    /// [`Self::run_at_once`].
    fn inline_bytes(&self) -> u64;

    /// As [`Self::run`], on the thread that begins a small job and that must not wait for the
    /// peer. False: the peer's answer is on its way, and [`Self::run`] goes on with it; no memory
    /// was touched.
    ///
    /// # Errors
    /// As for [`Self::run`].
    fn run_at_once(&self, job: &ReadJob) -> Result<bool> {
        self.run(job).map(|()| true)
    }

    /// Whether a thread of the caller that waits for the job may take a worker's place in it, by
    /// [`Self::run_until`].
    fn may_be_joined(&self, job: &ReadJob) -> bool {
        let _ = job;
        false
    }

    /// As [`Self::run`], on such a thread, and no longer than until then or for one more piece.
    /// False: there may be more to do, by [`Self::run`].
    ///
    /// # Errors
    /// As for [`Self::run`].
    fn run_until(&self, job: &ReadJob, until: Instant) -> Result<bool> {
        let _ = (job, until);
        Ok(false)
    }

    /// Whether the source must have heard of the reader before the first byte is read, so that it
    /// knows what may still be read when it takes its memory back.
    fn needs_claim(&self) -> bool {
        false
    }

    /// Whether [`Self::run_at_once`] may give false.
    fn has_to_ask(&self) -> bool {
        false
    }

    /// False: no transfer can succeed through it any more; the agent asks the peer for its memory
    /// again and makes a new path.
    fn is_usable(&self) -> bool {
        true
    }
}
