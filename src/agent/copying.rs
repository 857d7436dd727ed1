//! The threads that copy: a job on workers, or inside the call that begins it, and its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use super::control::Command;
use super::import_cell::{Decider, ImportCell};
use super::lock;
use super::peers::Route;
use super::remote::naming;
use super::shared::Shared;
use crate::error::{Error, Status};
use crate::observe::{Times, fault};
use crate::session::End;
use crate::transport::{DataPath, ReadJob};

/// Copies less than this are not worth a second worker, in bytes.
const SHARE_BYTES: u64 = 512 << 10;

/// One job, on one or several workers.
pub(super) struct Run {
    cell: Arc<ImportCell>,
    /// The job's place in its import.
    at: usize,
    /// The import has no other job: when this one is done, it is.
    alone: bool,
    path: Arc<dyn DataPath>,
    job: Arc<ReadJob>,
    route: Arc<Route>,
    /// When the first worker began, since the transfer did.
    queued: OnceLock<Duration>,
    left: AtomicUsize,
    failed: Mutex<Option<Error>>,
}

impl Run {
    pub fn new(
        cell: &Arc<ImportCell>,
        at: usize,
        alone: bool,
        job: Arc<ReadJob>,
        path: Arc<dyn DataPath>,
        route: Arc<Route>,
    ) -> Self {
        Self {
            cell: cell.clone(),
            at,
            alone,
            path,
            job,
            route,
            queued: OnceLock::new(),
            left: AtomicUsize::new(1),
            failed: Mutex::new(None),
        }
    }

    /// Gives the job, which moves bytes of `parts`, to as many workers as are worth it.
    pub fn submit(mut self, shared: &Arc<Shared>, parts: &[usize], priority: i32) {
        self.cell.submit(parts, self.path.name());
        let workers = shared.workers.count().min(self.path.most_workers()) as u64;
        let share = self.job.bytes().div_ceil(SHARE_BYTES).clamp(1, workers) as usize;
        self.job.shared_by(share);
        self.left = AtomicUsize::new(share);
        let run = Arc::new(self);
        for _ in 0..share {
            let (run, shared) = (run.clone(), shared.clone());
            shared.clone().workers.submit(priority, move || {
                if let Some(end) = run.work() {
                    run.over(&shared, end);
                }
            });
        }
    }

    /// One worker's part; the last one to return gets the job's end.
    fn work(&self) -> Option<End> {
        // A panic must not leave the job without an end.
        struct Leave<'a>(&'a Run);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.job.cancel();
                    self.0.left.fetch_sub(1, Ordering::AcqRel);
                }
            }
        }
        let leave = Leave(self);
        self.queued.get_or_init(|| self.cell.times.copying());
        if let Err(e) = self.path.run(&self.job) {
            self.job.cancel();
            lock(&self.failed).get_or_insert(e);
        }
        std::mem::forget(leave);
        if self.left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return None;
        }
        self.cell.times.copied();
        Some(finish(
            &*self.path,
            &self.job,
            lock(&self.failed).take(),
            &self.route.name,
        ))
    }

    /// Reports the end: success of the whole import at once, so that the caller need not wait for
    /// the control thread; all else is for its machine to judge.
    fn over(self: Arc<Self>, shared: &Shared, end: End) {
        let queued = self.queued.get().copied().unwrap_or_default();
        let (peer, path, cell) = (&self.route.name, &*self.path, self.cell.clone());
        shared.count_read(peer, path, &self.job, &cell.times, queued, &end);
        let (id, at, unquiet) = (cell.cell.id, self.at, self.job.is_unquiet());
        let whole = self.alone && end.is_ok() && !unquiet;
        // Before anybody hears of the end: who does may free the pools.
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

/// Runs a whole job on the calling thread; `None`: it has to go on on a worker.
pub(super) fn run_inline(
    path: &dyn DataPath,
    job: &ReadJob,
    times: &Times,
    peer: &str,
) -> Option<End> {
    let failed = match path.run_at_once(job) {
        Ok(true) => None,
        Ok(false) => return None,
        Err(e) => Some(e),
    };
    times.copied();
    Some(finish(path, job, failed, peer))
}

/// After the last byte: did the lease hold?
fn finish(path: &dyn DataPath, job: &ReadJob, failed: Option<Error>, peer: &str) -> End {
    if let Some(e) = failed {
        return naming(End::new(e.status, e.text), peer);
    }
    if job.moved() < job.bytes() {
        return End::new(
            Status::KVF_ERR_CANCELLED,
            format!("stopped after {} of {} bytes", job.moved(), job.bytes()),
        );
    }
    fault::point("before_attest");
    let attested = path.attest(job);
    fault::point("after_attest");
    match attested {
        Ok(true) => End::ok(),
        Ok(false) if fault::deviates("skip_attest") => End::ok(),
        Ok(false) => End::new(
            Status::KVF_ERR_EXPIRED,
            format!(
                "the publication had ended before the last of {} bytes was attested: its lease ran \
                 out, it was released, or its readers had finished",
                job.bytes()
            ),
        ),
        Err(e) => naming(End::new(e.status, e.text), peer),
    }
}
