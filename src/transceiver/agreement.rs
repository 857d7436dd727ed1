//! How the table's requests are voted on, decided and reclaimed.

use std::collections::BTreeSet;

use super::api::ResultKind;
use super::request::{Decided, Request};
use super::table::{CANCELLED, Table};
use crate::agent::Outcome;
use crate::error::Status;
use crate::ids::Key;
use crate::session::Now;
use crate::session::collective::{Ballot, Verdict};
use crate::session::votes::{Batch, Decision, Ending, Vote};

impl Table {
    /// Passes what is new about a request on to whoever decides.
    pub(super) fn advance(&mut self, key: Key, now: Now) {
        self.vote(key);
        let Some(request) = self.requests.get(&key).filter(|r| r.started) else {
            return;
        };
        if request.reclaim_due && request.quiet.is_some() {
            return self.reclaim(key);
        }
        if !self.domain.decides_alone() || self.unsettled && request.decided.is_none() {
            return;
        }
        if let (None, Some((end, _))) = (request.decided, &request.end) {
            let ending = Ending {
                outcome: end.outcome as u32,
                cause: end.cause,
            };
            self.decide(key, ending, self.rank, now);
        }
        let reclaim = self
            .requests
            .get(&key)
            .is_some_and(|r| r.decided.is_some() && r.quiet.is_some());
        if reclaim {
            self.reclaim(key);
        }
    }

    /// Votes on a request as far as it is known and not voted on yet.
    pub(super) fn vote(&mut self, key: Key) {
        let Some(request) = self.requests.get_mut(&key) else {
            return;
        };
        if !request.started && !request.foreign {
            return;
        }
        let quiet = request.quiet;
        if let Some((end, at)) = &request.end
            && !request.voted_end
        {
            let done = end.outcome == Outcome::Done;
            // A success whose memory is still in use is none yet.
            if !done || quiet.is_some() {
                request.voted_end = true;
                request.voted_quiet |= done;
                let vote = if done {
                    Vote::Done
                } else {
                    Vote::Ended(Ending {
                        outcome: end.outcome as u32,
                        cause: end.cause,
                    })
                };
                self.domain.vote(key, vote, *at);
            }
        }
        if let Some(at) = quiet
            && !request.voted_quiet
        {
            request.voted_quiet = true;
            self.domain.vote(key, Vote::Quiet, at);
        }
        self.note(key);
    }

    /// Takes an OUTCOME.
    pub(super) fn decide(&mut self, key: Key, ending: Ending, rank: u32, now: Now) {
        let at = now;
        let decided = Some(Decided { ending, rank, at });
        match self.requests.get_mut(&key) {
            Some(request) if request.decided.is_some() => return,
            Some(request) => {
                request.decided = decided;
                if request.end.is_none() {
                    // Over for everybody: what still runs here must stop.
                    request.cancel = true;
                    self.cancels.extend(request.op.clone());
                }
                self.wake = true;
                if request.waited_for {
                    return;
                }
            }
            None => {
                let mut request = Request::new(self.next_serial, now);
                self.next_serial += 1;
                request.foreign = true;
                request.quiet = Some(now);
                request.decided = decided;
                self.requests.insert(key, request);
                self.open += 1;
                self.vote(key);
            }
        }
        self.ready.push_back((key, ResultKind::Ended));
        self.ready_ended += 1;
        self.wake = true;
    }

    /// Takes a RECLAIM. A rank that was given up by the others and lives gets one while its own
    /// memory is in use: its own quiet is then waited for.
    pub(super) fn reclaim(&mut self, key: Key) {
        let Some(request) = self.requests.get_mut(&key).filter(|r| !r.reclaimed) else {
            return;
        };
        if request.quiet.is_none() {
            request.reclaim_due = true;
            return;
        }
        request.reclaimed = true;
        self.news.remove(&key);
        if request.reported {
            self.ready.push_back((key, ResultKind::MemorySafe));
        }
        self.wake = true;
    }

    /// Takes entries of the domain's log in.
    pub(super) fn apply(&mut self, batch: &Batch, now: Now) {
        for entry in &batch.entries {
            match entry.decision {
                Decision::Succeeded => {
                    let done = Ending {
                        outcome: Outcome::Done as u32,
                        cause: Status::KVF_OK,
                    };
                    self.decide(entry.key, done, self.rank, now);
                    self.reclaim(entry.key);
                }
                Decision::Ended { ending, rank } => self.decide(entry.key, ending, rank, now),
                Decision::Reclaim => self.reclaim(entry.key),
            }
        }
    }

    /// The leader of our domain is gone: what it has decided stands, the rest fails. Decisions
    /// that still travel in the engine's broadcast count too, so the rest fails only when the
    /// engine asks for results ([`Self::settle`]).
    pub(super) fn leader_lost(&mut self, now: Now) {
        if !self.domain.lose_leader() {
            return;
        }
        self.unsettled = true;
        let keys: BTreeSet<Key> = self.requests.keys().copied().collect();
        for key in keys {
            if self.requests.get(&key).is_some_and(|r| r.decided.is_some()) {
                self.advance(key, now);
            }
        }
        self.wake = true;
    }

    /// The engine has applied what it had of a lost leader: the rest fails now.
    pub(super) fn settle(&mut self, now: Now) {
        if !std::mem::take(&mut self.unsettled) {
            return;
        }
        let lost = Ending {
            outcome: Outcome::Failed as u32,
            cause: Status::KVF_ERR_GROUP_LOST,
        };
        let keys: BTreeSet<Key> = self.requests.keys().copied().collect();
        for key in keys {
            self.decide(key, lost, 0, now);
            self.advance(key, now);
        }
        self.wake = true;
    }

    /// What this rank says in the next exchange. Costs what is new, not what is in flight.
    pub(super) fn ballot(&self) -> Ballot {
        let mut ballot = Ballot::default();
        for key in &self.news {
            let Some(request) = self.requests.get(key) else {
                continue;
            };
            let verdict = |ending| Verdict {
                key: *key,
                ending,
                rank: self.rank,
            };
            if request.decided.is_none() {
                match &request.end {
                    Some((end, _)) if end.outcome == Outcome::Done => {
                        if request.cancel {
                            ballot.cancelled.push(verdict(CANCELLED));
                        } else if request.quiet.is_some() {
                            ballot.completed.push(*key);
                        }
                    }
                    Some((end, _)) => {
                        let ending = Ending {
                            outcome: end.outcome as u32,
                            cause: end.cause,
                        };
                        if matches!(end.outcome, Outcome::Cancelled | Outcome::CancelledByPeer) {
                            ballot.cancelled.push(verdict(ending));
                        } else {
                            ballot.failed.push(verdict(ending));
                        }
                    }
                    None if request.cancel => ballot.cancelled.push(verdict(CANCELLED)),
                    None => {}
                }
            }
            if request.quiet.is_some() && !request.reclaimed {
                ballot.quiet.push(*key);
            }
        }
        ballot
    }

    /// Takes what the domain agreed on, in ascending order of keys.
    pub(super) fn commit(&mut self, agreed: &Ballot, now: Now) {
        let done = Ending {
            outcome: Outcome::Done as u32,
            cause: Status::KVF_OK,
        };
        let ended = agreed.cancelled.iter().chain(&agreed.failed);
        let ended = ended.map(|v| (v.key, v.ending, v.rank));
        let completed = agreed.completed.iter().map(|key| (*key, done, self.rank));
        let mut all: Vec<_> = ended.chain(completed).collect();
        all.sort_by_key(|(key, ..)| *key);
        for (key, ending, rank) in all {
            self.decide(key, ending, rank, now);
        }
        for key in &agreed.quiet {
            if self.requests.get(key).is_some_and(|r| r.decided.is_some()) {
                self.reclaim(*key);
            }
        }
    }
}
