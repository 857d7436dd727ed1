//! Gets on their way: what a worker hands over and how it hears of their end.
//!
//! A worker makes one [`Flight`] for its part of a job and hands over batches of gets under it. The
//! progress thread posts them and calls [`Batch::over`] once for each get, from UCX's callback or
//! itself; the last one of a batch rings the flight's bell. Memory that a get may write is kept by
//! the worker until every batch of its flight is over.

use std::cell::UnsafeCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Status};
use crate::observe::fault;
use crate::runtime::{Bell, wait_readable};
use crate::transport::ucx::library::Library;

/// A registered range of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Region {
    /// The lease table.
    Leases,
    /// A pool, by id.
    Pool(u32),
    /// A few bytes of device memory that nobody else uses.
    Scratch,
}

/// One read: `bytes` at the peer's address `remote` to `local`.
#[derive(Clone, Copy, Debug)]
pub struct Get {
    pub local: *mut u8,
    pub remote: u64,
    pub bytes: u64,
    /// The peer's range that holds `remote`.
    pub from: Region,
    /// Our registered range that holds `local`, if one does.
    pub to: Option<Region>,
}

// SAFETY: an address and numbers; the worker that made it keeps the memory (module documentation).
unsafe impl Send for Get {}

/// Where a lease word and a nonce are read to: 3 words.
pub const LANDING_WORDS: usize = 3;

/// One worker's gets.
#[derive(Debug)]
pub struct Flight {
    bell: Bell,
    /// Batches handed over, batches that are over.
    begun: AtomicU64,
    landed: AtomicU64,
    /// The bell is rung from this many landed batches on.
    ring_at: AtomicU64,
    /// Gets that are not over.
    gets: AtomicU64,
    /// Bytes of batches that are over without an error.
    bytes: AtomicU64,
    /// Gets that are not posted yet are dropped.
    stop: AtomicBool,
    error: Mutex<Option<Error>>,
    /// Written by gets of the lease table. It lives as long as any of them, since each holds the
    /// flight.
    landing: UnsafeCell<[u64; LANDING_WORDS]>,
}

// SAFETY: `landing` is written by UCX only and read (`Flight::landed_words`) only after every batch
// is over, which the atomics order; the rest is Sync by itself.
unsafe impl Sync for Flight {}

impl Flight {
    /// Nothing handed over yet.
    ///
    /// # Errors
    /// `KVF_ERR_SYSTEM`: no more file descriptors.
    pub fn new() -> Result<Arc<Self>> {
        let bell = Bell::new().map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "eventfd", &e))?;
        Ok(Arc::new(Self {
            bell,
            begun: AtomicU64::new(0),
            landed: AtomicU64::new(0),
            ring_at: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            error: Mutex::new(None),
            landing: UnsafeCell::new([0; LANDING_WORDS]),
        }))
    }

    /// Batches that are not over.
    pub fn in_flight(&self) -> u64 {
        // `begun` is changed by the asking thread only.
        self.begun.load(Ordering::Relaxed) - self.landed.load(Ordering::Acquire)
    }

    /// Gets of batches that are not over.
    pub fn gets(&self) -> u64 {
        self.gets.load(Ordering::Relaxed)
    }

    /// Bytes that have arrived since the last call.
    pub fn take_bytes(&self) -> u64 {
        self.bytes.swap(0, Ordering::AcqRel)
    }

    /// Gets that are not posted yet will not be.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Whether [`Self::stop`] was called, or a get failed.
    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// The first error.
    pub fn take_error(&self) -> Option<Error> {
        self.error().take()
    }

    fn error(&self) -> std::sync::MutexGuard<'_, Option<Error>> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an error and stops the flight.
    pub fn fail(&self, e: Error) {
        self.error().get_or_insert(e);
        self.stop();
        self.bell.ring();
    }

    /// Counts a batch of so many gets that is about to be handed over.
    pub fn begin(&self, gets: usize) {
        self.gets.fetch_add(gets as u64, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
    }

    /// A batch of so many gets is over.
    pub fn land(&self, gets: usize) {
        self.gets.fetch_sub(gets as u64, Ordering::Relaxed);
        // SeqCst: either this sees the waiter's `ring_at`, or the waiter sees this batch landed.
        let landed = self.landed.fetch_add(1, Ordering::SeqCst) + 1;
        if landed >= self.ring_at.load(Ordering::SeqCst) || self.is_stopped() {
            self.bell.ring();
        }
    }

    /// Sleeps until at most `left` batches are in flight, one has failed or `wake` is readable, at
    /// most until `deadline`; false: it has passed. May return early.
    pub fn wait(&self, left: u64, wake: Option<BorrowedFd<'_>>, deadline: Option<Instant>) -> bool {
        let time = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        if time.is_some_and(|time| time.is_zero()) {
            return false;
        }
        let enough = self.begun.load(Ordering::Relaxed).saturating_sub(left);
        self.ring_at.store(enough, Ordering::SeqCst);
        if self.landed.load(Ordering::SeqCst) >= enough {
            return true;
        }
        if wait_readable([Some(self.bell.as_fd()), wake], time).is_err() {
            // Unheard of; then slowly instead of not at all.
            std::thread::sleep(Duration::from_millis(1));
        }
        self.bell.clear();
        true
    }

    /// Address of the landing words.
    pub fn landing(&self) -> *mut u8 {
        self.landing.get().cast()
    }

    /// What gets have written to the landing words; `None` while any is on its way.
    pub fn landed_words(&self) -> Option<[u64; LANDING_WORDS]> {
        // SAFETY: nothing writes them any more, and `in_flight` has acquired what was written.
        (self.in_flight() == 0).then(|| unsafe { *self.landing.get() })
    }
}

/// Gets that were handed over together.
pub struct Batch {
    /// For UCX's callback.
    pub ucx: &'static Library,
    pub flight: Arc<Flight>,
    /// Gets that are not over.
    open: AtomicUsize,
    gets: usize,
    bytes: u64,
    /// Gets that UCX has at this endpoint, of all batches.
    posted: Arc<AtomicUsize>,
}

impl Batch {
    /// Of a batch that is no copy, in bytes.
    const SMALL: u64 = LANDING_WORDS as u64 * 8;

    /// Of `gets`, at least one, under a flight that has begun it; `posted` counts what UCX has of
    /// the endpoint.
    pub fn new(
        ucx: &'static Library,
        flight: &Arc<Flight>,
        gets: &[Get],
        posted: Arc<AtomicUsize>,
    ) -> Arc<Self> {
        Arc::new(Self {
            ucx,
            flight: flight.clone(),
            open: AtomicUsize::new(gets.len()),
            gets: gets.len(),
            bytes: gets.iter().map(|get| get.bytes).sum(),
            posted,
        })
    }

    /// Counts a get that UCX has taken and will end with a call of ours.
    pub fn posted(&self) {
        self.posted.fetch_add(1, Ordering::Relaxed);
    }

    /// A get that UCX had taken is over.
    pub fn returned(&self) {
        self.posted.fetch_sub(1, Ordering::Relaxed);
        self.over(1);
    }

    /// `count` gets are over, or were never posted.
    pub fn over(&self, count: usize) {
        if count > 0 && self.open.fetch_sub(count, Ordering::AcqRel) == count {
            self.land();
        }
    }

    /// Whether every get is over.
    pub fn is_over(&self) -> bool {
        self.open.load(Ordering::Acquire) == 0
    }

    /// UCX is gone and with it whatever could still have ended a get.
    pub fn abandon(&self) {
        if self.open.swap(0, Ordering::AcqRel) > 0 {
            self.land();
        }
    }

    fn land(&self) {
        if !self.flight.is_stopped() {
            self.flight.bytes.fetch_add(self.bytes, Ordering::AcqRel);
        }
        self.flight.land(self.gets);
        if self.flight.in_flight() > 0 && self.bytes > Self::SMALL {
            fault::point("mid_copy");
        }
    }
}
