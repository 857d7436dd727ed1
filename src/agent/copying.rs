//! The threads that copy: a job on workers, on callers that wait for it, or inside the call that
//! begins it; and its end.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::control::Command;
use super::import_cell::{Decider, ImportCell};
use super::lock;
use super::peers::Route;
use super::remote::naming;
use super::shared::Shared;
use crate::error::{Error, Status};
use crate::observe::{Times, fault, marks};
use crate::session::End;
use crate::transport::{DataPath, ReadJob};

/// Copies less than this are not worth a second worker, in bytes.
const SHARE_BYTES: u64 = 512 << 10;

/// Workers may be called for jobs up to this size by the call that begins them.
const EARLY_BYTES: u64 = 256 << 10;

/// One job of an import, in shares: each is worked on by a worker, or by a caller's thread that
/// waits for the import.
pub(super) struct Run {
    /// The job's place in its import.
    at: usize,
    /// The import has no other job: when this one is done, it is.
    alone: bool,
    priority: i32,
    path: Arc<dyn DataPath>,
    job: Arc<ReadJob>,
    route: Arc<Route>,
    /// When the first share was begun, since the transfer was.
    queued: OnceLock<Duration>,
    /// Whether a caller's thread may take a share.
    joinable: bool,
    /// Shares that no thread has begun.
    open: AtomicUsize,
    /// Workers that were called for a share and have not come.
    called: AtomicUsize,
    /// Shares that have not ended.
    left: AtomicUsize,
    failed: Mutex<Option<Error>>,
}

impl Run {
    pub fn new(
        at: usize,
        alone: bool,
        priority: i32,
        job: Arc<ReadJob>,
        path: Arc<dyn DataPath>,
        route: Arc<Route>,
    ) -> Self {
        job.goes_to(&path);
        Self {
            at,
            alone,
            priority,
            path,
            job,
            route,
            queued: OnceLock::new(),
            joinable: false,
            open: AtomicUsize::new(1),
            called: AtomicUsize::new(0),
            left: AtomicUsize::new(1),
            failed: Mutex::new(None),
        }
    }

    /// Gives the job, which moves bytes of `parts`, to as many workers as are worth it.
    pub fn submit(self, shared: &Arc<Shared>, cell: &Arc<ImportCell>, parts: &[usize]) {
        let run = self.divide(shared, cell, parts);
        run.call_workers(shared, cell, 0);
    }

    /// As [`Self::submit`], by the call that begins the import, which the control thread hears of
    /// by `tell` before it hears of its end. Waking a worker would lengthen that call: it is done
    /// here only for a small job whose caller will hardly wait for it. Otherwise that caller does it
    /// when it waits, or the control thread when it comes to the import.
    pub fn submit_early(
        self,
        shared: &Arc<Shared>,
        cell: &Arc<ImportCell>,
        parts: &[usize],
        tell: impl FnOnce(),
    ) {
        let run = self.divide(shared, cell, parts);
        let waits = run.joinable && shared.callers_wait.load(Ordering::Relaxed);
        let later = waits || run.job.bytes() > EARLY_BYTES;
        tell();
        if !later {
            run.call_workers(shared, cell, 0);
        }
    }

    fn divide(mut self, shared: &Shared, cell: &ImportCell, parts: &[usize]) -> Arc<Self> {
        cell.submit(parts, self.path.name());
        let workers = shared.workers.count().min(self.path.most_workers()) as u64;
        let shares = self.job.bytes().div_ceil(SHARE_BYTES).clamp(1, workers) as usize;
        self.job.shared_by(shares);
        // With an affinity the caller has said where copies are to be made; who observes is told.
        let may_wait = shared.config.affinity.is_empty() && !cell.cell.is_observed();
        self.joinable = may_wait && self.path.may_be_joined(&self.job);
        (self.open, self.left) = (AtomicUsize::new(shares), AtomicUsize::new(shares));
        let run = Arc::new(self);
        lock(&cell.runs).push(run.clone());
        run
    }

    /// Whether a caller's thread may take a share now.
    pub fn is_open(&self) -> bool {
        self.joinable && self.open.load(Ordering::SeqCst) > 0
    }

    /// Begins a share, if there is one.
    fn take_share(&self) -> bool {
        let less = |open: usize| open.checked_sub(1);
        self.open
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
            .is_ok()
    }

    /// Calls workers for the shares that nobody has begun and no worker was called for, but for
    /// `kept` of them; whether there were any.
    pub fn call_workers(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        cell: &Arc<ImportCell>,
        kept: usize,
    ) -> bool {
        let mut any = false;
        // A worker says that it has come before it looks for a share: either it finds the one that
        // is counted here, or it is not counted.
        while self.called.load(Ordering::SeqCst) + kept < self.open.load(Ordering::SeqCst) {
            any = true;
            self.called.fetch_add(1, Ordering::SeqCst);
            // The queue must not keep the job, and with it pools, when others have ended it.
            let (run, agent, cell) = (Arc::downgrade(self), shared.clone(), cell.clone());
            shared.workers.submit(self.priority, move || {
                let Some(run) = run.upgrade() else { return };
                run.called.fetch_sub(1, Ordering::SeqCst);
                if run.take_share()
                    && let Some(end) = run.work(&cell)
                {
                    run.over(&agent, &cell, end);
                }
            });
        }
        any
    }

    /// Works on a share on the calling thread, which waits for the import; what is left then goes
    /// to a worker. False: it has no more time, or the agent has shut down.
    pub fn join(
        self: Arc<Self>,
        shared: &Arc<Shared>,
        cell: &Arc<ImportCell>,
        until: Instant,
    ) -> bool {
        /// As on a worker's thread.
        struct Panics<'a>(&'a Shared);
        impl Drop for Panics<'_> {
            fn drop(&mut self) {
                self.0.send(Command::Panicked(marks::last_panic()));
            }
        }
        if !self.take_share() {
            return true; // somebody was faster
        }
        let panics = Panics(shared);
        let worked = shared.workers.join_in(|| self.work_until(cell, until));
        let goes_on = match worked {
            Some(Worked::Last(end)) => {
                self.over(shared, cell, end);
                true
            }
            Some(Worked::Share) => true,
            Some(Worked::Late) => {
                self.open.fetch_add(1, Ordering::SeqCst);
                self.call_workers(shared, cell, 0);
                false
            }
            None => false, // its imports have ended
        };
        std::mem::forget(panics);
        goes_on
    }

    /// One worker's share; the last one to return gets the job's end.
    fn work(&self, cell: &ImportCell) -> Option<End> {
        let leave = Leave(self);
        self.queued.get_or_init(|| cell.times.copying());
        let outcome = self.path.run(&self.job);
        std::mem::forget(leave);
        self.share_over(cell, outcome)
    }

    /// As [`Self::work`], but not for longer than until then.
    fn work_until(&self, cell: &ImportCell, until: Instant) -> Worked {
        let leave = Leave(self);
        self.queued.get_or_init(|| cell.times.copying());
        let outcome = self.path.run_until(&self.job, until);
        std::mem::forget(leave);
        let outcome = match outcome {
            Ok(true) => Ok(()),
            Ok(false) => return Worked::Late,
            Err(e) => Err(e),
        };
        match self.share_over(cell, outcome) {
            Some(end) => Worked::Last(end),
            None => Worked::Share,
        }
    }

    fn share_over(&self, cell: &ImportCell, outcome: Result<(), Error>) -> Option<End> {
        if let Err(e) = outcome {
            self.job.cancel();
            lock(&self.failed).get_or_insert(e);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return None;
        }
        cell.times.copied();
        Some(finish(
            &*self.path,
            &self.job,
            lock(&self.failed).take(),
            &self.route.name,
        ))
    }

    /// Reports the end: success of the whole import at once, so that the caller need not wait for
    /// the control thread; all else is for its machine to judge.
    fn over(self: Arc<Self>, shared: &Shared, cell: &ImportCell, end: End) {
        let queued = self.queued.get().copied().unwrap_or_default();
        let (peer, path) = (&self.route.name, &*self.path);
        shared.count_read(peer, path, &self.job, &cell.times, queued, &end);
        let (id, at, unquiet) = (cell.cell.id, self.at, self.job.is_unquiet());
        let whole = self.alone && end.is_ok() && !unquiet;
        // Before anybody hears of the end: who does may free the pools.
        lock(&cell.runs).retain(|run| !Arc::ptr_eq(run, &self));
        drop(self);
        if whole && cell.decide(Decider::Worker) {
            cell.free_slots(shared);
            cell.report(shared, end.clone(), true);
        }
        shared.send(match unquiet {
            false => Command::Stopped(id, at, end),
            true => Command::Stuck(id, at, end),
        });
    }
}

/// What came of a share on a caller's thread.
enum Worked {
    /// It was the last one: the job's end.
    Last(End),
    /// Others are at work on theirs.
    Share,
    /// There may be more to do.
    Late,
}

/// A panic must not leave the job without an end.
struct Leave<'a>(&'a Run);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.job.cancel();
        self.0.left.fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").finish_non_exhaustive()
    }
}

/// Runs a whole job on the calling thread; `None`: another one has to go on with it.
pub(super) fn run_inline(
    path: &Arc<dyn DataPath>,
    job: &ReadJob,
    times: &Times,
    peer: &str,
) -> Option<End> {
    let failed = match path.run_at_once(job) {
        Ok(true) => None,
        Ok(false) => {
            job.begun_by(path);
            return None;
        }
        Err(e) => Some(e),
    };
    times.copied();
    Some(finish(&**path, job, failed, peer))
}

/// After the last byte: did the lease hold?
fn finish(path: &dyn DataPath, job: &ReadJob, failed: Option<Error>, peer: &str) -> End {
    if let Some(e) = failed {
        return naming(End::new(e.status, e.text), peer);
    }
    if job.moved() < job.bytes() {
        let text = format!("stopped after {} of {} bytes", job.moved(), job.bytes());
        return naming(End::new(Status::KVF_ERR_CANCELLED, text), peer);
    }
    fault::point("before_attest");
    let attested = path.attest(job);
    fault::point("after_attest");
    match attested {
        Ok(true) => End::ok(),
        Ok(false) if fault::deviates("skip_attest") => End::ok(),
        Ok(false) => {
            let text = format!(
                "the publication had ended before the last of {} bytes was attested: its lease ran \
                 out, it was released, or its readers had finished",
                job.bytes()
            );
            naming(End::new(Status::KVF_ERR_EXPIRED, text), peer)
        }
        Err(e) => naming(End::new(e.status, e.text), peer),
    }
}
