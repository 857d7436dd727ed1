//! Agreement of an engine's ranks by votes: a leader orders verdicts into a log, followers apply
//! it.
//!
//! Each rank votes on each request once with its outcome and once when its memory is quiet. The
//! leader turns votes into two entries per request: the OUTCOME (the first failure or cancel, or
//! success of all) and RECLAIM (quiet on every rank). The order of the log is the only order: a
//! vote that arrives after the OUTCOME changes nothing. Entries travel in whatever the engine
//! broadcasts anyway, so a follower can see that one is missing and must then apply nothing.
//!
//! Why a key can be used again without an epoch: a rank uses a key anew only after it applied the
//! last entry of the old use, which needed that rank's quiet vote. Only a cancel can come later;
//! it is told from one for the new use by what its rank had acknowledged when it sent it (votes
//! and acknowledgements of one rank must arrive in the order in which they were sent).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::Now;
use crate::error::Status;
use crate::ids::Key;

/// How a request ended that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ending {
    /// Number of the outcome in the C ABI (failed, cancelled, ...); only passed on here.
    pub outcome: u32,
    /// Why.
    pub cause: Status,
}

/// What one rank says about one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vote {
    /// All bytes of this rank are there, and nothing touches its memory any more.
    Done,
    /// This rank's part ended otherwise; its memory may still be touched.
    Ended(Ending),
    /// Nothing touches this rank's memory any more.
    Quiet,
    /// This rank was asked to cancel: a proposal, which loses against an earlier OUTCOME.
    Cancel(Ending),
}

/// What the log says about one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decision {
    /// Every rank has its bytes and every rank's memory is quiet: OUTCOME and RECLAIM in one.
    Succeeded,
    /// OUTCOME: the request ended otherwise. RECLAIM follows when every rank is quiet.
    Ended {
        /// How.
        ending: Ending,
        /// The rank whose vote, or whose missing vote, decided.
        rank: u32,
    },
    /// RECLAIM: every rank's memory is quiet.
    Reclaim,
}

/// One position of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    /// The request.
    pub key: Key,
    /// What was decided.
    pub decision: Decision,
}

/// A run of entries, as it is broadcast.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Batch {
    /// Position of the first entry.
    pub from: u64,
    /// The entries in order.
    pub entries: Vec<Entry>,
}

/// Endings that the leader itself hands out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Endings {
    /// A rank did not vote before the request's deadline.
    pub late: Ending,
    /// A rank died before it had voted.
    pub lost: Ending,
}

/// The leader's machine: votes in, log out.
#[derive(Debug)]
pub struct Leader {
    world: u32,
    limit: Now,
    endings: Endings,
    tallies: BTreeMap<Key, Tally>,
    deadlines: BTreeSet<(Now, Key)>,
    log: VecDeque<Entry>,
    /// Position of `log[0]`.
    base: u64,
    /// Entries below this position were given out.
    taken: u64,
    /// OUTCOME entries at or above it.
    endings_ready: usize,
    /// What each rank has applied; a lost rank no longer holds the log back.
    acked: Vec<u64>,
    /// Position of the last entry of requests in the kept log that are over.
    closed: BTreeMap<Key, u64>,
    lost: Ranks,
    ignored: u64,
}

#[derive(Debug)]
struct Tally {
    done: Ranks,
    quiet: Ranks,
    decided: bool,
    deadline: Now,
}

impl Leader {
    /// A leader of `world` ranks; a request is decided at most `limit` after the first vote on it.
    pub fn new(world: u32, limit: Now, endings: Endings) -> Self {
        Self {
            world,
            limit,
            endings,
            tallies: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            log: VecDeque::new(),
            base: 0,
            taken: 0,
            endings_ready: 0,
            acked: vec![0; world as usize],
            closed: BTreeMap::new(),
            lost: Ranks::new(world),
            ignored: 0,
        }
    }

    /// A request is known here: its deadline starts, even if nobody ever votes on it.
    pub fn open(&mut self, key: Key, now: Now) {
        let (world, deadline) = (self.world, now + self.limit);
        if self.tallies.contains_key(&key) {
            return;
        }
        self.deadlines.insert((deadline, key));
        let tally = Tally {
            done: Ranks::new(world),
            quiet: Ranks::new(world),
            decided: false,
            deadline,
        };
        self.tallies.insert(key, tally);
        // A rank that is dead already will never vote.
        if let Some(rank) = self.lost.first() {
            self.decide(key, self.endings.lost, rank);
        }
    }

    /// The rank that opened a request could not start it and nobody else knows it.
    pub fn forget(&mut self, key: Key) {
        if let Some(tally) = self.tallies.get(&key)
            && tally.done.is_empty()
            && tally.quiet.is_empty()
            && !tally.decided
        {
            self.deadlines.remove(&(tally.deadline, key));
            self.tallies.remove(&key);
        }
    }

    /// Takes a vote in. Votes of lost or unknown ranks, and repeated ones, are counted and ignored.
    pub fn vote(&mut self, rank: u32, key: Key, vote: Vote, now: Now) {
        let acked = self.acked.get(rank as usize).copied().unwrap_or_default();
        let late = self.closed.get(&key).is_some_and(|over| *over >= acked);
        if rank >= self.world || self.lost.has(rank) || late {
            self.ignored += 1;
            return;
        }
        self.open(key, now);
        let Some(tally) = self.tallies.get_mut(&key) else {
            return;
        };
        match vote {
            Vote::Done => {
                if !tally.done.add(rank) {
                    self.ignored += 1;
                }
                tally.quiet.add(rank);
                if !tally.decided && tally.done.is_full() {
                    tally.decided = true;
                    self.push(key, Decision::Succeeded);
                    self.close(key);
                    return;
                }
            }
            Vote::Quiet => {
                if !tally.quiet.add(rank) {
                    self.ignored += 1;
                }
            }
            Vote::Ended(ending) | Vote::Cancel(ending) => self.decide(key, ending, rank),
        }
        self.reclaim_if_quiet(key);
    }

    /// A rank died: what it has not voted on fails, what it has voted on goes on. Its own memory
    /// died with it, so that nobody waits for its quiet votes. `None`: all but the leader.
    pub fn lose(&mut self, rank: Option<u32>) {
        match rank {
            Some(rank) => self.lose_one(rank),
            None => (1..self.world).for_each(|rank| self.lose_one(rank)),
        }
    }

    fn lose_one(&mut self, rank: u32) {
        if rank >= self.world || !self.lost.add(rank) {
            return;
        }
        let keys: Vec<Key> = self.tallies.keys().copied().collect();
        for key in keys {
            if self.tallies.get(&key).is_some_and(|t| !t.done.has(rank)) {
                self.decide(key, self.endings.lost, rank);
            }
            self.reclaim_if_quiet(key);
        }
        self.trim();
    }

    /// Decides what is past its deadline: the first rank without a vote is named.
    pub fn expire(&mut self, now: Now) {
        while let Some(&(deadline, key)) = self.deadlines.first() {
            if deadline > now {
                return;
            }
            let missing = self
                .tallies
                .get(&key)
                .and_then(|t| t.done.first_missing())
                .unwrap_or_default();
            self.decide(key, self.endings.late, missing);
            self.deadlines.remove(&(deadline, key));
            self.reclaim_if_quiet(key);
        }
    }

    /// When [`Self::expire`] has something to do next.
    pub fn next_deadline(&self) -> Option<Now> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Entries that [`Self::take`] has not given out yet.
    pub fn ready(&self) -> usize {
        self.log
            .len()
            .saturating_sub((self.taken - self.base) as usize)
    }

    /// OUTCOME entries that [`Self::take`] has not given out yet.
    pub fn ready_endings(&self) -> usize {
        self.endings_ready
    }

    /// Gives out up to `max` entries, in order, each once.
    pub fn take(&mut self, max: usize) -> Batch {
        let skip = (self.taken - self.base) as usize;
        let entries: Vec<Entry> = self.log.iter().skip(skip).take(max).copied().collect();
        let from = self.taken;
        self.taken += entries.len() as u64;
        self.endings_ready -= entries
            .iter()
            .filter(|e| e.decision != Decision::Reclaim)
            .count();
        Batch { from, entries }
    }

    /// A rank has applied everything below `position`; what all have applied is dropped.
    pub fn ack(&mut self, rank: u32, position: u64) {
        let taken = self.taken;
        if let Some(acked) = self.acked.get_mut(rank as usize)
            && position <= taken
            && position > *acked
        {
            *acked = position;
            self.trim();
        }
    }

    /// Entries kept because some rank has not acknowledged them.
    pub fn retained(&self) -> usize {
        self.log.len()
    }

    /// Everything from `position` that was given out already, for a rank that lost a broadcast;
    /// `None` if that is no longer kept, which cannot be for a rank's own acknowledged position.
    pub fn since(&self, position: u64) -> Option<Batch> {
        let skip = position.checked_sub(self.base)? as usize;
        let upto = (self.taken - self.base) as usize;
        (skip <= upto).then(|| Batch {
            from: position,
            entries: self.log.iter().take(upto).skip(skip).copied().collect(),
        })
    }

    /// Votes that came twice, late, or from a rank that was declared lost.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Requests that are not decided, or decided and not quiet.
    pub fn live(&self) -> usize {
        self.tallies.len()
    }

    fn decide(&mut self, key: Key, ending: Ending, rank: u32) {
        match self.tallies.get_mut(&key) {
            Some(tally) if !tally.decided => {
                tally.decided = true;
                self.deadlines.remove(&(tally.deadline, key));
                self.push(key, Decision::Ended { ending, rank });
            }
            Some(_) => self.ignored += 1,
            None => {}
        }
    }

    fn reclaim_if_quiet(&mut self, key: Key) {
        let Some(tally) = self.tallies.get(&key) else {
            return;
        };
        if tally.decided && (0..self.world).all(|r| tally.quiet.has(r) || self.lost.has(r)) {
            self.push(key, Decision::Reclaim);
            self.close(key);
        }
    }

    fn push(&mut self, key: Key, decision: Decision) {
        self.endings_ready += usize::from(decision != Decision::Reclaim);
        self.log.push_back(Entry { key, decision });
    }

    /// The entry just pushed was the request's last.
    fn close(&mut self, key: Key) {
        let last = self.base + self.log.len() as u64 - 1;
        self.closed.insert(key, last);
        if let Some(tally) = self.tallies.remove(&key) {
            self.deadlines.remove(&(tally.deadline, key));
        }
    }

    fn trim(&mut self) {
        let lowest = (0..self.world)
            .filter(|r| !self.lost.has(*r))
            .filter_map(|r| self.acked.get(r as usize).copied())
            .min()
            .unwrap_or(self.taken)
            .min(self.taken);
        while self.base < lowest
            && let Some(entry) = self.log.pop_front()
        {
            if self.closed.get(&entry.key) == Some(&self.base) {
                self.closed.remove(&entry.key);
            }
            self.base += 1;
        }
    }
}

/// A batch starts behind what a follower expects: something was not broadcast to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    /// The follower's next position.
    pub expected: u64,
    /// The batch's first position.
    pub got: u64,
}

/// A follower's machine: batches in, new entries out.
#[derive(Debug, Default)]
pub struct Follower {
    next: u64,
}

impl Follower {
    /// The entries of a batch that are new here; a repeated batch gives none.
    ///
    /// # Errors
    /// [`Gap`]; nothing changed.
    pub fn apply<'a>(&mut self, batch: &'a Batch) -> Result<&'a [Entry], Gap> {
        if batch.from > self.next {
            return Err(Gap {
                expected: self.next,
                got: batch.from,
            });
        }
        let known = usize::try_from(self.next - batch.from).unwrap_or(usize::MAX);
        let new = batch.entries.get(known..).unwrap_or_default();
        self.next += new.len() as u64;
        Ok(new)
    }

    /// Everything below this position was applied: what the next acknowledgement says.
    pub fn next(&self) -> u64 {
        self.next
    }
}

/// A set of ranks of a fixed world.
#[derive(Debug)]
struct Ranks {
    world: u32,
    count: u32,
    bits: Vec<u64>,
}

impl Ranks {
    fn new(world: u32) -> Self {
        Self {
            world,
            count: 0,
            bits: vec![0; world.div_ceil(64) as usize],
        }
    }

    fn has(&self, rank: u32) -> bool {
        self.bits
            .get((rank / 64) as usize)
            .is_some_and(|word| word >> (rank % 64) & 1 == 1)
    }

    /// False if it was there already.
    fn add(&mut self, rank: u32) -> bool {
        if rank >= self.world || self.has(rank) {
            return false;
        }
        if let Some(word) = self.bits.get_mut((rank / 64) as usize) {
            *word |= 1 << (rank % 64);
            self.count += 1;
        }
        true
    }

    fn is_full(&self) -> bool {
        self.count == self.world
    }

    fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn first(&self) -> Option<u32> {
        (0..self.world).find(|r| self.has(*r))
    }

    fn first_missing(&self) -> Option<u32> {
        (0..self.world).find(|r| !self.has(*r))
    }
}

#[cfg(test)]
mod tests;
