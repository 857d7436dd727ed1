//! One side's requests: what is known of each, what there is to report. No threads, no clock.
//!
//! A request goes through: called, started, ended here, decided (by this rank alone or by the
//! domain), reported, and, at any point after its local end, quiet here and reclaimed (quiet on
//! every rank). It leaves the table when both its end and its safety have been reported.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use super::api::{Cancel, Record, RequestResult, ResultKind, Side};
use super::codec;
use super::domain::Domain;
use super::port::{Notice, Operation};
use super::request::Request;
use crate::agent::Outcome;
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::session::Now;
use crate::session::votes::{Batch, Ending, Vote};

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
enum Parked {
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

    /// The request has something to say in the next exchange.
    pub(super) fn note(&mut self, key: Key) {
        if self.domain.is_collective() {
            self.news.insert(key);
        }
        self.wake = true;
    }

    // -- results out ------------------------------------------------------------------------

    /// Moves up to `max` results out. For a leader, call [`Self::draw`] first.
    pub(super) fn take(&mut self, max: usize, out: &mut Vec<RequestResult>) {
        for _ in 0..max {
            let Some((key, kind)) = self.ready.pop_front() else {
                return;
            };
            if kind == ResultKind::Ended {
                self.ready_ended -= 1;
                self.open -= 1;
            }
            out.extend(self.report(key, kind));
        }
    }

    /// Leader: makes up to `max` results, counting those that wait already, from its log; returns
    /// the log's part for the followers.
    pub(super) fn draw(&mut self, max: usize, now: Now) -> Option<Batch> {
        let batch = self.domain.draw(max.saturating_sub(self.ready.len()))?;
        self.apply(&batch, now);
        Some(batch)
    }

    /// The end of a request that its caller waits for.
    pub(super) fn take_waited(&mut self, key: Key, serial: u64) -> Option<RequestResult> {
        let request = self.requests.get(&key)?;
        if request.serial != serial || request.decided.is_none() {
            return None;
        }
        self.report(key, ResultKind::Ended)
    }

    /// The caller no longer waits: a status call will report the request.
    pub(super) fn stop_waiting(&mut self, key: Key, serial: u64) {
        if let Some(request) = self.requests.get_mut(&key)
            && request.serial == serial
            && request.waited_for
        {
            request.waited_for = false;
            self.open += 1;
            if request.decided.is_some() {
                self.ready.push_back((key, ResultKind::Ended));
                self.ready_ended += 1;
            }
        }
    }

    fn report(&mut self, key: Key, kind: ResultKind) -> Option<RequestResult> {
        let request = self.requests.get_mut(&key)?;
        let decided = request.decided?;
        request.reported = true;
        let result = RequestResult {
            key,
            user_data: request.user_data,
            kind,
            outcome: codec::outcome_from(decided.ending.outcome),
            cause: decided.ending.cause,
            memory_safe: request.reclaimed,
            rank: decided.rank,
            bytes: request.end.as_ref().map_or(0, |(end, _)| end.bytes),
            elapsed_ns: request.elapsed_ns(),
        };
        if request.reclaimed {
            self.close(key, decided.at);
        }
        Some(result)
    }

    fn close(&mut self, key: Key, now: Now) {
        let Some(request) = self.requests.remove(&key) else {
            return;
        };
        self.news.remove(&key);
        if let (true, Some(decided)) = (request.foreign, request.decided) {
            self.park(key, Parked::Decided(decided.ending, decided.rank), now);
        }
        let record = request.record(key, self.side, self.rank);
        self.records.push_back((record, request.op));
        if self.records.len() > self.max_records
            && let Some((_, op)) = self.records.pop_front()
        {
            self.dropped.extend(op);
        }
    }

    /// What is known of a request, also some time after its end; the operation adds its texts.
    pub(super) fn record(&self, key: Key) -> Option<(Record, Operated)> {
        if let Some(request) = self.requests.get(&key) {
            let record = request.record(key, self.side, self.rank);
            return Some((record, request.op.clone()));
        }
        let mut records = self.records.iter().rev();
        records.find(|(record, _)| record.key == key).cloned()
    }

    /// Records of ended requests, oldest first.
    pub(super) fn kept_records(&self) -> Vec<Record> {
        self.records
            .iter()
            .map(|(record, _)| record.clone())
            .collect()
    }

    /// The operation of a request that is not over.
    pub(super) fn operation(&self, key: Key) -> Operated {
        self.requests.get(&key)?.op.clone()
    }

    /// Everything that holds an operation, for the end of the transceiver.
    pub(super) fn empty(&mut self) {
        let live = self.requests.drain().filter_map(|(_, r)| r.op);
        self.dropped.extend(live);
        let kept = self.records.drain(..).filter_map(|(_, op)| op);
        self.dropped.extend(kept);
    }

    // -- counts -----------------------------------------------------------------------------

    /// Requests in the table: not ended, or not safe, or not reported.
    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Requests whose end no status call has reported.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Whether a status call has anything to look at.
    pub(super) fn idle(&self) -> bool {
        self.open == 0 && self.domain.live() == 0
    }

    /// Notices that came twice or after everything was over.
    pub(super) fn late_notices(&self) -> u64 {
        self.late_notices
    }

    /// Ends that a status call would report now.
    pub(super) fn ready_ended(&self) -> usize {
        self.ready_ended + self.domain.ready_ended()
    }

    /// Results of either kind that can be taken.
    pub(super) fn ready(&self) -> usize {
        self.ready.len() + self.domain.ready()
    }

    /// Whether a status call has something to give, if only what [`Self::settle`] makes.
    pub(super) fn has_news(&self) -> bool {
        self.ready() > 0 || self.unsettled && self.open > self.ready_ended
    }

    /// Requests that have ended on this rank, in collective mode not yet agreed on.
    pub(super) fn ended_here(&self) -> usize {
        self.news
            .iter()
            .filter(|key| {
                let request = self.requests.get(key);
                request.is_some_and(|r| r.decided.is_none() && (r.end.is_some() || r.cancel))
            })
            .count()
    }

    /// Whether memory of this request may still be in use, or its result is outstanding.
    pub(super) fn in_flight(&self, key: Key) -> bool {
        self.requests.get(&key).is_some_and(|r| !r.reclaimed)
    }

    /// Requests whose memory this rank may still touch.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// Cancels whatever runs here.
    pub(super) fn cancel_all(&mut self, now: Now) {
        let keys: BTreeSet<Key> = self.requests.keys().copied().collect();
        for key in keys {
            self.propose_cancel(key, now);
        }
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

    fn park(&mut self, key: Key, what: Parked, now: Now) {
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
