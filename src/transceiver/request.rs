//! One request, as its side's table knows it.

use std::sync::Arc;

use super::api::{Record, Side};
use super::codec;
use super::port::{End, Operation};
use crate::agent::Outcome;
use crate::error::Status;
use crate::ids::Key;
use crate::session::Now;
use crate::session::votes::Ending;

/// An OUTCOME.
#[derive(Clone, Copy)]
pub(super) struct Decided {
    pub ending: Ending,
    pub rank: u32,
    pub at: Now,
}

/// What is known of a request here.
pub(super) struct Request {
    pub serial: u64,
    pub user_data: u64,
    pub queued: Now,
    pub op: Option<Arc<dyn Operation>>,
    pub started: bool,
    /// Never called here: the domain decided it before it came.
    pub foreign: bool,
    /// A blocked caller takes the end, not a status call.
    pub waited_for: bool,
    pub cancel: bool,
    /// The cancel was here first, so the outcome is cancelled whatever the operation says.
    pub cancel_first: bool,
    pub end: Option<(End, Now)>,
    pub quiet: Option<Now>,
    pub voted_cancel: bool,
    pub voted_end: bool,
    pub voted_quiet: bool,
    pub decided: Option<Decided>,
    pub reclaimed: bool,
    /// The domain says so, but this rank is not quiet.
    pub reclaim_due: bool,
    pub reported: bool,
}

impl Request {
    pub fn new(serial: u64, now: Now) -> Self {
        Self {
            serial,
            user_data: 0,
            queued: now,
            op: None,
            started: false,
            foreign: false,
            waited_for: false,
            cancel: false,
            cancel_first: false,
            end: None,
            quiet: None,
            voted_cancel: false,
            voted_end: false,
            voted_quiet: false,
            decided: None,
            reclaimed: false,
            reclaim_due: false,
            reported: false,
        }
    }

    pub fn elapsed_ns(&self) -> u64 {
        self.end.as_ref().map_or(0, |(_, at)| self.since_call(*at))
    }

    pub fn since_call(&self, at: Now) -> u64 {
        nanos(at.saturating_sub(self.queued))
    }

    pub fn record(&self, key: Key, side: Side, rank: u32) -> Record {
        let end = self.end.as_ref().map(|(end, _)| end);
        let by_other = self.decided.filter(|d| d.rank != rank);
        Record {
            key,
            side,
            outcome: match (&self.decided, end) {
                (Some(decided), _) => codec::outcome_from(decided.ending.outcome),
                (None, Some(end)) => end.outcome,
                (None, None) => Outcome::Pending,
            },
            cause: match (&self.decided, end) {
                (Some(decided), _) => decided.ending.cause,
                (None, Some(end)) => end.cause,
                (None, None) => Status::KVF_IN_PROGRESS,
            },
            rank: self.decided.map_or(rank, |d| d.rank),
            text: by_other.map_or_else(String::new, |d| {
                format!("rank {} of the domain: {:?}", d.rank, d.ending.cause)
            }),
            queued_ns: nanos(self.queued),
            first_byte_ns: end.map_or(0, |end| end.first_byte_ns),
            last_byte_ns: end.map_or(0, |end| end.last_byte_ns),
            ended_ns: self.elapsed_ns(),
            safe_ns: self.quiet.map_or(0, |at| self.since_call(at)),
            decided_ns: self.decided.map_or(0, |d| self.since_call(d.at)),
            bytes: end.map_or(0, |end| end.bytes),
            bytes_total: end.map_or(0, |end| end.bytes_total),
            transport: end.map_or("", |end| end.transport),
            aux: Vec::new(),
        }
    }
}

fn nanos(span: Now) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
