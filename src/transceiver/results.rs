//! What a table gives: results, records, counts.

use super::api::{Record, RequestResult, ResultKind};
use super::codec;
use super::table::{Operated, Parked, Table};
use crate::ids::Key;
use crate::session::Now;
use crate::session::votes::Batch;

impl Table {
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
}
