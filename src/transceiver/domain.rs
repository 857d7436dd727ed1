//! How one side's requests come to be decided: here, by votes, or by exchange.

use std::collections::VecDeque;

use super::codec;
use crate::err;
use crate::error::Result;
use crate::ids::Key;
use crate::session::Now;
use crate::session::votes::{Batch, Follower, Leader, Vote};
use crate::wire::votes::Votes;

/// The decider of one side.
pub(super) enum Domain {
    /// This rank.
    Single,
    /// This rank, for the domain.
    Leader(Box<Leader>),
    /// The leader, by broadcasts.
    Follower(Voter),
    /// All ranks together.
    Collective,
}

/// A follower and what it has to tell the leader.
#[derive(Default)]
pub(super) struct Voter {
    follower: Follower,
    /// Votes of one message were cast at the same position of the log.
    outbox: VecDeque<Votes>,
    leader_lost: bool,
}

impl Domain {
    /// A request's end here is its decision.
    pub(super) fn decides_alone(&self) -> bool {
        match self {
            Self::Single => true,
            Self::Follower(voter) => voter.leader_lost,
            Self::Leader(_) | Self::Collective => false,
        }
    }

    pub(super) fn is_collective(&self) -> bool {
        matches!(self, Self::Collective)
    }

    /// Decisions come by `apply` only: there is nothing to wait for in a status call.
    pub(super) fn follows(&self) -> bool {
        matches!(self, Self::Follower(_))
    }

    /// Whether the domain cannot decide any more.
    pub(super) fn lost(&self) -> bool {
        matches!(self, Self::Follower(voter) if voter.leader_lost)
    }

    pub(super) fn open(&mut self, key: Key, now: Now) {
        if let Self::Leader(leader) = self {
            leader.open(key, now);
        }
    }

    pub(super) fn forget(&mut self, key: Key) {
        if let Self::Leader(leader) = self {
            leader.forget(key);
        }
    }

    /// This rank's vote.
    pub(super) fn vote(&mut self, key: Key, vote: Vote, now: Now) {
        match self {
            Self::Leader(leader) => leader.vote(0, key, vote, now),
            Self::Follower(voter) if !voter.leader_lost => {
                let acked = voter.follower.next();
                let line = codec::vote_line(key, vote);
                match voter.outbox.back_mut() {
                    Some(message) if message.acked == acked => message.votes.push(line),
                    _ => voter.outbox.push_back(Votes {
                        acked,
                        votes: vec![line],
                        ..Votes::default()
                    }),
                }
            }
            _ => {}
        }
    }

    /// Whether there is a message for the leader.
    pub(super) fn has_outgoing(&self) -> bool {
        matches!(self, Self::Follower(voter) if !voter.outbox.is_empty())
    }

    /// The next message for the leader.
    pub(super) fn outgoing(&mut self) -> Option<Votes> {
        match self {
            Self::Follower(voter) => voter.outbox.pop_front(),
            _ => None,
        }
    }

    /// Another rank's message, at the leader.
    pub(super) fn incoming(&mut self, rank: u32, message: &Votes, now: Now) {
        let Self::Leader(leader) = self else {
            return;
        };
        // First the position: it tells what the votes are about.
        leader.ack(rank, message.acked);
        for line in &message.votes {
            if let Some((key, vote)) = codec::vote_of(line) {
                leader.vote(rank, key, vote, now);
            }
        }
    }

    /// The new entries of a broadcast, at a follower; none at the leader, who has them.
    ///
    /// # Errors
    /// `KVF_ERR_GROUP_LOST`: broadcasts before this one are missing; nothing changed.
    pub(super) fn admit(&mut self, batch: &Batch) -> Result<Batch> {
        let Self::Follower(voter) = self else {
            return Ok(Batch::default());
        };
        let from = voter.follower.next();
        let entries = voter.follower.apply(batch).map_err(|gap| {
            err!(
                KVF_ERR_GROUP_LOST,
                "decisions {} to {} never came here, this one starts at {}; nothing was applied, \
                 stop this iteration on every rank",
                gap.expected,
                gap.got.saturating_sub(1),
                gap.got
            )
        })?;
        let entries = entries.to_vec();
        if !entries.is_empty() && !voter.leader_lost {
            // Tells the leader even if this rank has nothing to vote on.
            voter.outbox.push_back(Votes {
                acked: voter.follower.next(),
                ..Votes::default()
            });
        }
        Ok(Batch { from, entries })
    }

    /// Takes up to `max` entries out of the leader's log.
    pub(super) fn draw(&mut self, max: usize) -> Option<Batch> {
        let Self::Leader(leader) = self else {
            return None;
        };
        let batch = leader.take(max);
        leader.ack(0, batch.from + batch.entries.len() as u64);
        (!batch.entries.is_empty()).then_some(batch)
    }

    /// Leader: decides what is past its limit. Returns when to look again.
    pub(super) fn expire(&mut self, now: Now) -> Option<Now> {
        if let Self::Leader(leader) = self {
            leader.expire(now);
        }
        self.next_deadline()
    }

    /// Leader: when a limit passes next.
    pub(super) fn next_deadline(&self) -> Option<Now> {
        match self {
            Self::Leader(leader) => leader.next_deadline(),
            _ => None,
        }
    }

    /// Leader: a rank died; `None`: all others.
    pub(super) fn lose_rank(&mut self, rank: Option<u32>) {
        if let Self::Leader(leader) = self {
            leader.lose(rank);
        }
    }

    /// Follower: the leader died. False if that was known, or if this is no follower.
    pub(super) fn lose_leader(&mut self) -> bool {
        let Self::Follower(voter) = self else {
            return false;
        };
        voter.outbox.clear();
        !std::mem::replace(&mut voter.leader_lost, true)
    }

    pub(super) fn ready(&self) -> usize {
        match self {
            Self::Leader(leader) => leader.ready(),
            _ => 0,
        }
    }

    pub(super) fn ready_ended(&self) -> usize {
        match self {
            Self::Leader(leader) => leader.ready_endings(),
            _ => 0,
        }
    }

    /// Requests of the domain that are known here only by their votes, or not yet reclaimed.
    pub(super) fn live(&self) -> usize {
        match self {
            Self::Leader(leader) => leader.live(),
            _ => 0,
        }
    }
}
