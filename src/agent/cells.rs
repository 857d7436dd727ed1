//! What a handle and the control thread share about one operation; `models/` checks this file
//! with loom.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::api::{Event, EventKind, Outcome};
use crate::error::Status;
use crate::ids::Key;
use crate::runtime::EventQueue;
use crate::runtime::sync::{AtomicI32, Condvar, Mutex, MutexGuard};
use crate::session::End;

/// What an observer is told, on a kvferry thread or inside the call that ended the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The operation has its outcome.
    Ended,
    /// Its slots may be reused (never before `Ended`).
    MemorySafe,
}

/// Called for each notice instead of queueing events. Must not block and must not call the agent
/// that it observes.
pub type Observer = Arc<dyn Fn(Notice) + Send + Sync>;

/// Outcome and safety of one operation, with everything needed to wait for them.
pub(super) struct Cell {
    pub id: u64,
    pub key: Key,
    pub user_data: u64,
    ended_kind: EventKind,
    /// `KVF_IN_PROGRESS`, then the final status; read without the lock.
    status: AtomicI32,
    state: Mutex<State>,
    changed: Condvar,
    events: Arc<EventQueue<Event>>,
}

#[derive(Default)]
struct State {
    end: Option<End>,
    safe: bool,
    observer: Option<Observer>,
    /// Events in the queue that are withdrawn with the last handle.
    queued: Vec<u64>,
    /// Dropped after the outcome is set: streams that wait for it go on.
    until_end: Vec<Box<dyn Send>>,
    abandoned: bool,
    /// Threads in [`Cell::wait`]; nobody else is woken, which would cost a system call.
    waiting: u32,
}

impl Cell {
    pub fn new(
        id: u64,
        key: Key,
        user_data: u64,
        ended_kind: EventKind,
        events: Arc<EventQueue<Event>>,
        observer: Option<Observer>,
    ) -> Self {
        Self {
            id,
            key,
            user_data,
            ended_kind,
            status: AtomicI32::new(Status::KVF_IN_PROGRESS as i32),
            state: Mutex::new(State {
                observer,
                ..State::default()
            }),
            changed: Condvar::new(),
            events,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The status now; lock-free.
    pub fn poll(&self) -> Status {
        Status::from_code(self.status.load(Ordering::Acquire)).unwrap_or(Status::KVF_ERR_INTERNAL)
    }

    /// (outcome, cause, safe, text)
    pub fn look(&self) -> (Outcome, Status, bool, String) {
        let state = self.lock();
        match &state.end {
            None => (
                Outcome::Pending,
                Status::KVF_IN_PROGRESS,
                false,
                String::new(),
            ),
            Some(end) => (
                outcome(end.status),
                end.status,
                state.safe,
                end.text.clone(),
            ),
        }
    }

    /// Whether somebody is told of the outcome.
    pub fn is_observed(&self) -> bool {
        self.lock().observer.is_some()
    }

    /// Waits for the outcome.
    pub fn wait(&self, timeout: Duration) -> Status {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        while state.end.is_none() {
            let left = match deadline {
                Some(at) => at.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            if left.is_zero() {
                return Status::KVF_TIMED_OUT;
            }
            state.waiting += 1;
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
        drop(state);
        self.poll()
    }

    /// Records the outcome; only the first one counts.
    pub fn end(&self, end: End) {
        let mut state = self.lock();
        if state.end.is_some() {
            return;
        }
        let status = end.status;
        state.end = Some(end);
        self.status.store(status as i32, Ordering::Release);
        state.until_end.clear();
        self.wake(&state);
        self.tell(state, Notice::Ended, self.ended_kind, status);
    }

    /// Keeps something until the outcome is set; drops it at once if it is.
    pub fn keep_until_end(&self, kept: Box<dyn Send>) {
        let mut state = self.lock();
        if state.end.is_none() {
            state.until_end.push(kept);
        }
    }

    /// Records that the slots may be reused. `quietly`: the outcome's own notice implies it.
    pub fn make_safe(&self, quietly: bool) {
        let mut state = self.lock();
        if state.safe {
            return;
        }
        state.safe = true;
        self.wake(&state);
        if !quietly {
            let status = Status::from_code(self.status.load(Ordering::Relaxed));
            let status = status.unwrap_or(Status::KVF_ERR_INTERNAL);
            self.tell(state, Notice::MemorySafe, EventKind::MemorySafe, status);
        }
    }

    /// Outcome and safety at once: one notice, whose look finds both.
    pub fn end_safe(&self, end: End) {
        let mut state = self.lock();
        if state.end.is_some() {
            drop(state);
            return self.make_safe(false);
        }
        let status = end.status;
        state.end = Some(end);
        state.safe = true;
        self.status.store(status as i32, Ordering::Release);
        state.until_end.clear();
        self.wake(&state);
        self.tell(state, Notice::Ended, self.ended_kind, status);
    }

    fn wake(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    fn tell(
        &self,
        mut state: MutexGuard<'_, State>,
        notice: Notice,
        kind: EventKind,
        status: Status,
    ) {
        match state.observer.clone() {
            Some(observer) => {
                drop(state);
                observer(notice);
            }
            None if state.abandoned => {}
            None => {
                let number = self.events.push(Event {
                    kind,
                    object: self.id,
                    user_data: self.user_data,
                    key: self.key,
                    status,
                });
                state.queued.push(number);
            }
        }
    }

    /// The last handle is gone: nobody wants its events any more.
    pub fn abandon(&self) {
        let mut state = self.lock();
        state.abandoned = true;
        state.observer = None;
        for number in std::mem::take(&mut state.queued) {
            self.events.withdraw(number);
        }
    }
}

impl std::fmt::Debug for Cell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cell")
            .field("id", &self.id)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

/// The outcome that a final status stands for.
pub(super) fn outcome(status: Status) -> Outcome {
    match status {
        Status::KVF_OK => Outcome::Done,
        Status::KVF_ERR_CANCELLED => Outcome::Cancelled,
        Status::KVF_ERR_CANCELLED_BY_PEER => Outcome::CancelledByPeer,
        Status::KVF_ERR_EXPIRED | Status::KVF_ERR_DEADLINE => Outcome::Expired,
        Status::KVF_ERR_DECLINED => Outcome::Declined,
        _ => Outcome::Failed,
    }
}
