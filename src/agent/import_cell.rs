//! What an import's handle, the workers and the control thread share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::api::{Outcome, PartInfo, PartKind, PartState, TransferInfo};
use super::cells::Cell;
use super::copying::Run;
use super::lock;
use super::shared::Shared;
use super::slots::GroupSlots;
use crate::error::Status;
use crate::observe::Times;
use crate::observe::metrics::Operation;
use crate::session::End;
use crate::transport::ReadJob;

/// Who waits for less than some pieces of a copy take does not begin one.
const A_PIECE: Duration = Duration::from_millis(1);
/// In place of a time-out that no clock can hold.
const A_LONG_TIME: Duration = Duration::from_secs(3600);

/// One import or receive.
#[derive(Debug)]
pub(super) struct ImportCell {
    pub cell: Cell,
    /// Group, kind, whether anything is wanted.
    pub parts: Vec<(u32, PartKind, bool)>,
    /// Bytes of each part, over all sources that are bound.
    pub part_bytes: Mutex<Vec<u64>>,
    pub jobs: Mutex<Vec<Arc<ReadJob>>>,
    /// Bytes that the jobs before [`Self::settle`] have moved.
    pub settled: AtomicU64,
    /// For each part: bytes of it were given to a data path.
    pub submitted: Mutex<Vec<bool>>,
    pub transport: Mutex<&'static str>,
    pub aux: Mutex<Vec<u8>>,
    pub slots: Arc<[GroupSlots]>,
    pub pools: Vec<u32>,
    pub times: Arc<Times>,
    pub elapsed_ns: AtomicU64,
    /// Import or receive, for the metrics.
    pub kind: Operation,
    /// From whom, and how many bytes, a prefix saved; not set if none.
    pub saved: OnceLock<(String, u64)>,
    /// See [`Self::decide`].
    pub decider: OnceLock<Decider>,
    /// Jobs that threads are at work on, or were called for.
    pub runs: Mutex<Vec<Arc<Run>>>,
}

/// Who gives an import its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decider {
    /// The control thread, by its session machine.
    Control,
    /// The worker, or the caller in its place, whose copy was the whole import, and was attested.
    Worker,
}

impl ImportCell {
    /// A job of these parts goes to a data path.
    pub fn submit(&self, parts: &[usize], transport: &'static str) {
        let mut submitted = lock(&self.submitted);
        for part in parts {
            submitted[*part] = true;
        }
        *lock(&self.transport) = transport;
    }

    /// The first to ask decides: true for it, then and later.
    pub fn decide(&self, who: Decider) -> bool {
        *self.decider.get_or_init(|| who) == who
    }

    /// Waits for the outcome. Who has time for it takes the place of a worker, which saves the time
    /// to wake it.
    pub fn wait(self: &Arc<Self>, shared: &Arc<Shared>, timeout: Duration) -> Status {
        if timeout < A_PIECE || self.cell.poll() != Status::KVF_IN_PROGRESS {
            return self.cell.wait(timeout);
        }
        shared.callers_wait.store(true, Ordering::Relaxed);
        let begin = Instant::now();
        let until = begin.checked_add(timeout);
        let until = until.unwrap_or(begin + A_LONG_TIME);
        while let Some(run) = self.open_run()
            && Instant::now() < until
        {
            run.call_workers(shared, self, 1); // this thread is one
            if !run.join(shared, self, until) {
                break;
            }
        }
        self.cell.wait(timeout.saturating_sub(begin.elapsed()))
    }

    fn open_run(&self) -> Option<Arc<Run>> {
        lock(&self.runs).iter().find(|run| run.is_open()).cloned()
    }

    /// The slots may be written by others again; before that is said to anybody.
    pub fn free_slots(&self, shared: &Shared) {
        shared.lock().slots.end_write(self.cell.id);
    }

    /// Counts and tells the outcome; `safe`: also that the slots may be reused.
    pub fn report(&self, shared: &Shared, end: End, safe: bool) {
        self.ended_now();
        shared.count_import(self, &end);
        if safe {
            self.cell.end_safe(end);
        } else {
            self.cell.end(end);
        }
    }

    /// Lets go of the jobs, and with them of the pools: nothing is copied any more.
    pub fn settle(&self) {
        let runs = std::mem::take(&mut *lock(&self.runs));
        let jobs = {
            let mut jobs = lock(&self.jobs);
            let moved = jobs.iter().map(|job| job.moved()).sum();
            self.settled.fetch_add(moved, Ordering::Relaxed);
            std::mem::take(&mut *jobs)
        };
        // Not under the locks: with its last job a pool's memory may be unmapped.
        drop((runs, jobs));
    }

    pub fn ended_now(&self) {
        let ns = self.times.elapsed().as_nanos().max(1) as u64;
        let _ = self
            .elapsed_ns
            .compare_exchange(0, ns, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Fills in what an import adds to its outcome.
    pub fn describe(&self, info: &mut TransferInfo) {
        let submitted = lock(&self.submitted);
        info.submitted = submitted.iter().filter(|s| **s).count() as u32;
        drop(submitted);
        info.elapsed_ns = self.elapsed_ns.load(Ordering::Relaxed);
        info.first_byte_ns = self.times.first_ns();
        info.last_byte_ns = self.times.last_ns();
        info.transport = *lock(&self.transport);
        let bytes = lock(&self.part_bytes).clone();
        info.bytes_total = bytes.iter().sum();
        info.bytes = match info.outcome {
            Outcome::Done => info.bytes_total,
            _ => {
                let jobs = lock(&self.jobs);
                let moved = jobs.iter().map(|j| j.moved()).sum::<u64>();
                moved + self.settled.load(Ordering::Relaxed)
            }
        };
        // What a part moves is known once its sources are; that it moves nothing, before.
        let state = |wanted: bool, bytes: u64| match info.outcome {
            _ if !wanted => PartState::NotNeeded,
            Outcome::Pending => PartState::InProgress,
            Outcome::Done if bytes == 0 => PartState::NotNeeded,
            Outcome::Done => PartState::Done,
            _ => PartState::Failed,
        };
        let cause = |state| match state {
            PartState::Failed => info.cause,
            _ => Status::KVF_OK,
        };
        let parts = self.parts.iter().zip(bytes);
        info.parts = parts
            .map(|((group, kind, wanted), bytes)| PartInfo {
                group: *group,
                kind: *kind,
                state: state(*wanted, bytes),
                cause: cause(state(*wanted, bytes)),
                bytes,
            })
            .collect();
    }
}
