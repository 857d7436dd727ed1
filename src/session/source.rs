//! The source's side: one publication from offer to end.
//!
//! Safety rests on one order: [`Action::Revoke`] comes before [`Action::End`], so the lease word
//! is gone before the engine hears that its slots are safe; a reader that was still copying finds
//! the word gone after its last byte and reports `expired`, never wrong bytes.
//!
//! `docs/protocol.md` has this machine as a table.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{End, Now};
use crate::error::Status::{self, *};
use crate::ids::{Consumer, Incarnation};

/// What happens to a publication.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// A reader begins. `expected`: every reader of its engine that the plan sends to us; for one
    /// that is already known to be dead, [`Event::PeerLost`] follows.
    Claimed {
        /// Who.
        consumer: Consumer,
        /// Everybody who must finish.
        expected: Vec<Consumer>,
    },
    /// A reader, or somebody holding the ticket of a queued request, is alive.
    Renewed(Consumer),
    /// A reader has finished, in success or failure; its [`Event::Claimed`] went before.
    Finished(Consumer, Status),
    /// This side takes the offer back (release, a push's deadline or cancel).
    Withdrawn(End),
    /// An agent died, went silent or was replaced.
    PeerLost(Incarnation, End),
    /// The agent ends.
    Shutdown,
    /// Time has passed.
    Tick,
}

/// What must be done, in this order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Clear the lease word.
    Revoke,
    /// Tell a reader that its notice was noted.
    Ack(Consumer),
    /// Tell a reader that has not finished why there is nothing to read any more.
    Tell(Consumer, End),
    /// Report the end; the slots are safe.
    End(End),
}

/// Where one reader stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Reader {
    /// Expected, not seen.
    Awaited,
    /// Has contacted us.
    Reading,
    /// Has finished with this status.
    Finished(i32),
    /// Was declared dead before it had finished. If it comes back, it is too late.
    Lost(i32),
}

impl Reader {
    /// Nothing more is expected of it.
    fn is_over(self) -> bool {
        matches!(self, Self::Finished(_) | Self::Lost(_))
    }
}

/// One publication.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Publication {
    readers: BTreeMap<Consumer, Reader>,
    claim_deadline: Now,
    /// Of the whole: a push's.
    deadline: Option<Now>,
    lease: Duration,
    lease_deadline: Option<Now>,
    ended: Option<End>,
}

impl Publication {
    /// A publication that waits `claim` for its first reader and `lease` between signs of life.
    pub fn new(now: Now, claim: Duration, lease: Duration) -> Self {
        Self {
            readers: BTreeMap::new(),
            claim_deadline: now + claim,
            deadline: None,
            lease,
            lease_deadline: None,
            ended: None,
        }
    }

    /// A publication that somebody was told to fetch: it ends `limit` after `now`, fetched or not.
    pub fn push(now: Now, limit: Duration, lease: Duration) -> Self {
        Self {
            deadline: Some(now + limit),
            ..Self::new(now, limit, lease)
        }
    }

    /// When [`Event::Tick`] is due; `None` after the end.
    pub fn next_deadline(&self) -> Option<Now> {
        let due = self.lease_deadline.unwrap_or(self.claim_deadline);
        match self.ended {
            Some(_) => None,
            None => Some(self.deadline.map_or(due, |deadline| due.min(deadline))),
        }
    }

    /// How it ended.
    pub fn ended(&self) -> Option<&End> {
        self.ended.as_ref()
    }

    /// A reader has been seen.
    pub fn claimed(&self) -> bool {
        self.lease_deadline.is_some()
    }

    /// (finished or lost, expected) readers.
    pub fn progress(&self) -> (u32, u32) {
        let finished = self.readers.values().filter(|r| r.is_over()).count();
        (finished as u32, self.readers.len() as u32)
    }

    /// Whether `agent` is one of the readers that have not finished.
    pub fn awaits(&self, agent: Incarnation) -> bool {
        self.ended.is_none()
            && self
                .readers
                .iter()
                .any(|(c, r)| c.incarnation == agent && !r.is_over())
    }

    /// Whether this reader's end has been noted: another word of it changes nothing.
    pub fn noted(&self, consumer: Consumer) -> bool {
        self.readers.get(&consumer).is_some_and(|r| r.is_over())
    }

    /// Takes one event.
    pub fn on(&mut self, event: Event, now: Now) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.ended.is_some() {
            self.after_the_end(event, &mut actions);
            return actions;
        }
        match event {
            Event::Claimed { consumer, expected } => {
                for reader in expected {
                    self.readers.entry(reader).or_insert(Reader::Awaited);
                }
                self.readers.entry(consumer).or_insert(Reader::Awaited);
                self.contact(consumer, true, now, &mut actions);
            }
            Event::Renewed(consumer) => self.contact(consumer, false, now, &mut actions),
            Event::Finished(consumer, status) => {
                let state = self.readers.entry(consumer).or_insert(Reader::Awaited);
                actions.push(Action::Ack(consumer));
                // The first verdict counts; a repetition is only acknowledged.
                if !state.is_over() {
                    *state = Reader::Finished(status as i32);
                    self.renew(now);
                    self.end_if_all_finished(&mut actions);
                }
            }
            Event::Withdrawn(end) => {
                let told = match end.status {
                    KVF_ERR_CANCELLED => KVF_ERR_CANCELLED_BY_PEER,
                    other => other,
                };
                let told = End::new(told, end.text.clone());
                self.end(end, told, &mut actions);
            }
            Event::Shutdown => {
                let end = End::new(KVF_ERR_SHUTDOWN, "the source's agent has shut down");
                let told = End::new(KVF_ERR_CANCELLED_BY_PEER, end.text.clone());
                self.end(end, told, &mut actions);
            }
            Event::PeerLost(agent, end) => {
                for (consumer, state) in &mut self.readers {
                    if consumer.incarnation == agent && !state.is_over() {
                        *state = Reader::Lost(end.status as i32);
                    }
                }
                self.end_if_all_finished(&mut actions);
            }
            Event::Tick => self.tick(now, &mut actions),
        }
        actions
    }

    /// A sign of life. One of a reader that has finished, late or repeated, counts for nothing;
    /// one that was declared dead hears that it is too late.
    fn contact(&mut self, from: Consumer, reads: bool, now: Now, actions: &mut Vec<Action>) {
        match self.readers.get_mut(&from) {
            Some(Reader::Finished(_)) => return,
            Some(Reader::Lost(_)) => {
                let end = End::new(
                    KVF_ERR_PEER_LOST,
                    "the source had declared this reader lost",
                );
                actions.push(Action::Tell(from, end));
                return;
            }
            Some(state) if reads => *state = Reader::Reading,
            Some(_) | None => {}
        }
        self.renew(now);
    }

    fn renew(&mut self, now: Now) {
        self.lease_deadline = Some(now + self.lease);
    }

    fn tick(&mut self, now: Now, actions: &mut Vec<Action>) {
        let overdue = self.deadline.is_some_and(|at| now >= at);
        let end = match self.lease_deadline {
            Some(_) if overdue => End::new(
                KVF_ERR_DEADLINE,
                "the push's deadline passed while it was fetched",
            ),
            Some(at) if now >= at => End::new(
                KVF_ERR_EXPIRED,
                format!(
                    "the lease of {:?} ended: no renewal from a reader",
                    self.lease
                ),
            ),
            None if now >= self.claim_deadline => {
                End::new(KVF_ERR_EXPIRED, "no reader came before the claim deadline")
            }
            _ => return,
        };
        self.end(end.clone(), end, actions);
    }

    fn end_if_all_finished(&mut self, actions: &mut Vec<Action>) {
        let mut first_failure = None;
        for state in self.readers.values() {
            match state {
                Reader::Finished(0) => {}
                Reader::Finished(code) | Reader::Lost(code) => {
                    first_failure = first_failure.or(Some(*code))
                }
                Reader::Awaited | Reader::Reading => return,
            }
        }
        if self.readers.is_empty() {
            return;
        }
        let end = match first_failure.map(Status::from_code) {
            None => End::ok(),
            Some(status) => {
                let status = match status.unwrap_or(KVF_ERR_TRANSFER) {
                    KVF_ERR_CANCELLED => KVF_ERR_CANCELLED_BY_PEER,
                    other => other,
                };
                End::new(status, "a reader finished without success")
            }
        };
        self.end(end.clone(), end, actions);
    }

    fn end(&mut self, end: End, told: End, actions: &mut Vec<Action>) {
        actions.push(Action::Revoke);
        for (consumer, state) in &self.readers {
            if matches!(state, Reader::Awaited | Reader::Reading) {
                actions.push(Action::Tell(*consumer, told.clone()));
            }
        }
        self.ended = Some(end.clone());
        actions.push(Action::End(end));
    }

    /// Late notices change nothing; a reader that waits for an answer gets one.
    fn after_the_end(&self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Finished(consumer, _) => actions.push(Action::Ack(consumer)),
            Event::Claimed { consumer, .. } | Event::Renewed(consumer) => {
                let end = self.ended.clone().unwrap_or_else(End::ok);
                let told = if end.is_ok() {
                    End::new(KVF_ERR_EXPIRED, "all expected readers have finished")
                } else if end.status == KVF_ERR_CANCELLED {
                    End::new(KVF_ERR_CANCELLED_BY_PEER, end.text)
                } else {
                    end
                };
                actions.push(Action::Tell(consumer, told));
            }
            _ => {}
        }
    }
}
