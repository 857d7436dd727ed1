//! One side's requests: what is known of each, what there is to report. No threads, no clock.
//!
//! A request goes through: called, started, ended here, decided (by this rank alone or by the
//! domain), reported, and, at any point after its local end, quiet here and reclaimed (quiet on
//! every rank). It leaves the table when both its end and its safety have been reported.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::api::{Cancel, Record, ResultKind, Side};
use super::domain::Domain;
use super::port::{Notice, Operation};
use super::request::Request;
use crate::agent::Outcome;
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::session::Now;
use crate::session::votes::{Ending, Vote};

/// Cancels and foreign decisions that wait for a request; the oldest goes first.
const MAX_PARKED: usize = 65536;

pub(super) const CANCELLED: Ending = Ending {
    outcome: Outcome::Cancelled as u32,
    cause: Status::KVF_ERR_CANCELLED,
};

/// A request on its way into the table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Begun {
    /// Tells uses of one key apart: notices carry it.
    pub serial: u64,
    /// A cancel was here before it.
    pub cancelled: bool,
}

#[derive(Clone, Copy)]
pub(super) enum Parked {
    Cancel,
    Decided(Ending, u32),
}

/// Asked for texts and aux bytes only once the table is unlocked: it may take the agent's locks.
pub(super) type Operated = Option<Arc<dyn Operation>>;

/// One side's requests.
pub(super) struct Table {
    pub(super) side: Side,
    pub(super) rank: u32,
    pub(super) cancel_memory: Now,
    pub(super) max_records: usize,
    pub(super) domain: Domain,
    pub(super) requests: HashMap<Key, Request>,
    pub(super) ready: VecDeque<(Key, ResultKind)>,
    pub(super) ready_ended: usize,
    /// Requests whose end no status call has reported.
    pub(super) open: usize,
    /// Requests whose memory this rank may still touch.
    pub(super) running: usize,
    /// Requests with something to say in the next exchange.
    pub(super) news: BTreeSet<Key>,
    parked: HashMap<Key, (Now, Parked)>,
    parked_order: VecDeque<(Now, Key)>,
    pub(super) records: VecDeque<(Record, Operated)>,
    pub(super) next_serial: u64,
    /// No new requests.
    pub(super) closed: bool,
    /// Waits end.
    pub(super) stopped: bool,
    pub(super) interrupts: u64,
    pub(super) interrupts_seen: u64,
    /// A waiter may have something to see.
    pub(super) wake: bool,
    /// The leader is lost, and the engine has not asked for results since.
    pub(super) unsettled: bool,
    /// Operations to cancel, and ones to drop, once the table is unlocked.
    pub(super) cancels: Vec<Arc<dyn Operation>>,
    pub(super) dropped: Vec<Arc<dyn Operation>>,
    /// Notices that belong to nothing in the table.
    pub(super) late_notices: u64,
}

impl Table {
    pub(super) fn new(
        side: Side,
        rank: u32,
        cancel_memory: Now,
        max_records: usize,
        domain: Domain,
    ) -> Self {
        Self {
            side,
            rank,
            cancel_memory,
            max_records,
            domain,
            requests: HashMap::new(),
            ready: VecDeque::new(),
            ready_ended: 0,
            open: 0,
            running: 0,
            news: BTreeSet::new(),
            parked: HashMap::new(),
            parked_order: VecDeque::new(),
            records: VecDeque::new(),
            next_serial: 1,
            closed: false,
            stopped: false,
            interrupts: 0,
            interrupts_seen: 0,
            wake: false,
            unsettled: false,
            cancels: Vec::new(),
            dropped: Vec::new(),
            late_notices: 0,
        }
    }

    // -- requests in ------------------------------------------------------------------------

    /// Enters a request.
    ///
    /// # Errors
    /// The key is in use, was ended by the domain before it came, or nothing is taken any more.
    pub(super) fn begin(
        &mut self,
        key: Key,
        user_data: u64,
        waited_for: bool,
        now: Now,
    ) -> Result<Begun> {
        if self.closed {
            bail!(
                KVF_ERR_SHUTDOWN,
                "{key}: the transceiver takes no new requests"
            );
        }
        if self.domain.lost() {
            bail!(
                KVF_ERR_GROUP_LOST,
                "{key}: the leader of this rank's domain is gone; restart the engine's ranks"
            );
        }
        self.forget_parked(now);
        if let Some(request) = self.requests.get(&key) {
            if let (true, Some(decided)) = (request.foreign, request.decided) {
                return self.refuse_foreign(key, decided.ending, decided.rank);
            }
            bail!(
                KVF_ERR_DUPLICATE,
                "{key} is in use on the {} side; take its last result first, or use a new attempt",
                self.side.name()
            );
        }
        let cancelled = match self.parked.remove(&key) {
            Some((_, Parked::Decided(ending, rank))) => {
                return self.refuse_foreign(key, ending, rank);
            }
            Some((_, Parked::Cancel)) => true,
            None => false,
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        let request = Request {
            user_data,
            waited_for,
            cancel: cancelled,
            cancel_first: cancelled,
            ..Request::new(serial, now)
        };
        self.requests.insert(key, request);
        self.open += usize::from(!waited_for);
        self.running += 1;
        self.domain.open(key, now);
        Ok(Begun { serial, cancelled })
    }

    fn refuse_foreign<T>(&self, key: Key, ending: Ending, rank: u32) -> Result<T> {
        bail!(
            KVF_ERR_STATE,
            "{key}: the domain ended this request before it came to rank {}: rank {rank}, {:?}; \
             it was reported already, use a new attempt",
            self.rank,
            ending.cause
        )
    }

    /// The request's call failed: it was never there.
    pub(super) fn abort(&mut self, key: Key, serial: u64) {
        if let Some(request) = self.requests.get(&key)
            && request.serial == serial
        {
            self.running -= 1;
            // The domain may have decided it meanwhile: then it is one that never came here.
            if request.decided.is_some() {
                if let Some(request) = self.requests.get_mut(&key) {
                    request.foreign = true;
                    request.quiet = Some(request.queued);
                }
                self.vote(key);
                return;
            }
            self.open -= usize::from(!request.waited_for);
            self.requests.remove(&key);
            self.domain.forget(key);
        }
    }

    /// The request's operation runs (or ran already: its notices were kept for this moment).
    pub(super) fn started(
        &mut self,
        key: Key,
        serial: u64,
        op: Option<Arc<dyn Operation>>,
        now: Now,
    ) {
        let Some(request) = self.requests.get_mut(&key).filter(|r| r.serial == serial) else {
            self.dropped.extend(op);
            return;
        };
        request.started = true;
        request.op = op;
        if request.cancel {
            if request.decided.is_some() && request.end.is_none() {
                // The domain ended it while it was being started.
                self.cancels.extend(request.op.clone());
            }
            self.propose_cancel(key, now);
        }
        self.advance(key, now);
    }

    /// News of an operation.
    pub(super) fn notice(&mut self, key: Key, serial: u64, notice: Notice, now: Now) {
        let Some(request) = self.requests.get_mut(&key).filter(|r| r.serial == serial) else {
            self.late_notices += 1;
            return;
        };
        match notice {
            Notice::Ended(_) if request.end.is_some() => self.late_notices += 1,
            Notice::MemorySafe if request.quiet.is_some() => self.late_notices += 1,
            Notice::Ended(mut end) => {
                if request.cancel_first {
                    end.outcome = Outcome::Cancelled;
                    end.cause = Status::KVF_ERR_CANCELLED;
                }
                if end.memory_safe && request.quiet.is_none() {
                    request.quiet = Some(now);
                    self.running -= 1;
                }
                request.end = Some((end, now));
            }
            Notice::MemorySafe => {
                request.quiet = Some(now);
                self.running -= 1;
            }
        }
        self.advance(key, now);
    }

    /// Cancels a request, or remembers the cancel for one that has not come yet.
    pub(super) fn cancel(&mut self, key: Key, now: Now) -> Cancel {
        if self.requests.contains_key(&key) {
            self.propose_cancel(key, now);
            return self.cancel_state(key);
        }
        self.forget_parked(now);
        self.park(key, Parked::Cancel, now);
        Cancel::Remembered
    }

    pub(super) fn cancel_state(&self, key: Key) -> Cancel {
        match self.requests.get(&key) {
            Some(request) if !request.reclaimed => Cancel::Pending,
            _ => Cancel::Over,
        }
    }

    fn propose_cancel(&mut self, key: Key, now: Now) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        if request.decided.is_some() || request.voted_cancel {
            return;
        }
        request.cancel = true;
        if request.started {
            request.voted_cancel = true;
            if request.end.is_none() {
                self.cancels.extend(request.op.clone());
            }
            self.domain.vote(key, Vote::Cancel(CANCELLED), now);
            self.note(key);
        }
    }

    /// Cancels whatever runs here.
    pub(super) fn cancel_all(&mut self, now: Now) {
        let keys: BTreeSet<Key> = self.requests.keys().copied().collect();
        for key in keys {
            self.propose_cancel(key, now);
        }
    }

    /// The request has something to say in the next exchange.
    pub(super) fn note(&mut self, key: Key) {
        if self.domain.is_collective() {
            self.news.insert(key);
        }
        self.wake = true;
    }

    // -- interrupts -------------------------------------------------------------------------

    /// Ends the waits that run, or the next one.
    pub(super) fn interrupt(&mut self) {
        self.interrupts += 1;
        self.wake = true;
    }

    /// What a wait remembers at its start.
    pub(super) fn interrupt_mark(&self) -> u64 {
        self.interrupts_seen
    }

    /// Whether a wait that began at `mark` was interrupted; it then counts as ended.
    pub(super) fn interrupted(&mut self, mark: u64) -> bool {
        if self.interrupts == mark {
            return false;
        }
        self.interrupts_seen = self.interrupts;
        true
    }

    /// The cancel hit the other side.
    pub(super) fn unpark(&mut self, key: Key) {
        if let Some((_, Parked::Cancel)) = self.parked.get(&key) {
            self.parked.remove(&key);
        }
    }

    // -- parked -----------------------------------------------------------------------------

    pub(super) fn park(&mut self, key: Key, what: Parked, now: Now) {
        let until = now + self.cancel_memory;
        self.parked.insert(key, (until, what));
        self.parked_order.push_back((until, key));
        while self.parked_order.len() > MAX_PARKED {
            self.pop_parked();
        }
    }

    fn forget_parked(&mut self, now: Now) {
        while self.parked_order.front().is_some_and(|(at, _)| *at <= now) {
            self.pop_parked();
        }
    }

    fn pop_parked(&mut self) {
        if let Some((until, key)) = self.parked_order.pop_front()
            && self.parked.get(&key).is_some_and(|(at, _)| *at == until)
        {
            self.parked.remove(&key);
        }
    }
}
