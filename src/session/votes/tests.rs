use super::*;
use proptest::prelude::*;

const CANCELLED: Ending = Ending {
    outcome: 3,
    cause: Status::KVF_ERR_CANCELLED,
};
const FAILED: Ending = Ending {
    outcome: 2,
    cause: Status::KVF_ERR_TRANSFER,
};
const LATE: Ending = Ending {
    outcome: 5,
    cause: Status::KVF_ERR_DEADLINE,
};
const LOST: Ending = Ending {
    outcome: 2,
    cause: Status::KVF_ERR_PEER_LOST,
};
const LIMIT: Now = Now::from_secs(60);

fn key(request: u64) -> Key {
    Key {
        request,
        attempt: 0,
    }
}

fn at(seconds: u64) -> Now {
    Now::from_secs(seconds)
}

fn leader(world: u32) -> Leader {
    let (late, lost) = (LATE, LOST);
    Leader::new(world, LIMIT, Endings { late, lost })
}

fn decisions(leader: &mut Leader) -> Vec<(u64, Decision)> {
    let batch = leader.take(usize::MAX);
    batch
        .entries
        .iter()
        .map(|e| (e.key.request, e.decision))
        .collect()
}

fn ended(ending: Ending, rank: u32) -> Decision {
    Decision::Ended { ending, rank }
}

#[test]
fn success_needs_every_rank_and_reclaims_at_once() {
    let mut l = leader(3);
    l.vote(0, key(1), Vote::Done, at(0));
    l.vote(2, key(1), Vote::Done, at(0));
    assert_eq!(decisions(&mut l), vec![]);
    l.vote(1, key(1), Vote::Done, at(1));
    assert_eq!(decisions(&mut l), vec![(1, Decision::Succeeded)]);
    assert_eq!((l.live(), l.next_deadline()), (0, None));
}

#[test]
fn the_first_failure_decides_and_quiet_of_all_reclaims() {
    let mut l = leader(2);
    l.vote(0, key(1), Vote::Done, at(0));
    l.vote(1, key(1), Vote::Ended(FAILED), at(0));
    assert_eq!(decisions(&mut l), vec![(1, ended(FAILED, 1))]);
    l.vote(0, key(1), Vote::Cancel(CANCELLED), at(0));
    assert_eq!(decisions(&mut l), vec![], "rank 1 is not quiet");
    l.vote(1, key(1), Vote::Quiet, at(5));
    assert_eq!(decisions(&mut l), vec![(1, Decision::Reclaim)]);
}

#[test]
fn a_cancel_that_comes_first_beats_the_last_success() {
    let mut l = leader(2);
    l.vote(0, key(1), Vote::Done, at(0));
    l.vote(0, key(1), Vote::Cancel(CANCELLED), at(0));
    l.vote(1, key(1), Vote::Done, at(0));
    assert_eq!(
        decisions(&mut l),
        vec![(1, ended(CANCELLED, 0)), (1, Decision::Reclaim)]
    );
}

#[test]
fn a_cancel_that_comes_after_the_end_changes_nothing_until_its_rank_has_seen_the_end() {
    let mut l = leader(2);
    l.vote(0, key(1), Vote::Done, at(0));
    l.vote(1, key(1), Vote::Done, at(0));
    // Rank 1 proposed this before the broadcast reached it.
    l.vote(1, key(1), Vote::Cancel(CANCELLED), at(0));
    assert_eq!(decisions(&mut l), vec![(1, Decision::Succeeded)]);
    assert_eq!((l.live(), l.ignored()), (0, 1));
    // And this one after it: it means the next use of the id.
    l.ack(1, 1);
    l.vote(1, key(1), Vote::Cancel(CANCELLED), at(0));
    assert_eq!(decisions(&mut l), vec![(1, ended(CANCELLED, 1))]);
}

#[test]
fn a_rank_that_lags_is_named_at_the_deadline() {
    let mut l = leader(3);
    l.vote(0, key(1), Vote::Done, at(10));
    l.vote(2, key(1), Vote::Done, at(12));
    assert_eq!(l.next_deadline(), Some(at(70)));
    l.expire(at(69));
    assert_eq!(decisions(&mut l), vec![]);
    l.expire(at(70));
    assert_eq!(decisions(&mut l), vec![(1, ended(LATE, 1))]);
    assert_eq!(l.next_deadline(), None, "quiet has no deadline");
    l.vote(1, key(1), Vote::Done, at(80));
    assert_eq!(decisions(&mut l), vec![(1, Decision::Reclaim)]);
}

#[test]
fn a_dead_rank_fails_what_it_had_not_voted_on_and_what_comes_later() {
    let mut l = leader(2);
    l.vote(1, key(1), Vote::Done, at(0));
    l.open(key(2), at(0));
    l.lose(Some(1));
    assert_eq!(decisions(&mut l), vec![(2, ended(LOST, 1))]);
    l.vote(0, key(1), Vote::Done, at(1));
    l.vote(0, key(2), Vote::Quiet, at(1));
    l.vote(0, key(3), Vote::Done, at(1));
    assert_eq!(
        decisions(&mut l),
        vec![
            (1, Decision::Succeeded),
            (2, Decision::Reclaim),
            (3, ended(LOST, 1)),
            (3, Decision::Reclaim)
        ]
    );
    l.vote(1, key(4), Vote::Done, at(1));
    assert_eq!((decisions(&mut l), l.ignored()), (vec![], 1));
}

#[test]
fn the_log_is_kept_until_the_slowest_live_rank_has_applied_it() {
    let mut l = leader(3);
    for request in 0..4 {
        (0..3).for_each(|rank| l.vote(rank, key(request), Vote::Done, at(0)));
    }
    assert_eq!(l.take(3).entries.len(), 3);
    assert_eq!((l.ready(), l.retained()), (1, 4));
    l.ack(0, 3);
    l.ack(1, 2);
    assert_eq!(l.retained(), 4, "rank 2 has applied nothing");
    l.ack(2, 9);
    assert_eq!(
        l.retained(),
        4,
        "nobody can have applied what was not given out"
    );
    l.ack(2, 1);
    assert_eq!(l.retained(), 3);
    assert_eq!(l.since(0), None);
    assert_eq!(l.since(1).unwrap().entries.len(), 2);
    l.lose(Some(2));
    assert_eq!(l.retained(), 2);
}

#[test]
fn a_request_that_could_not_start_is_forgotten_unless_others_voted() {
    let mut l = leader(2);
    l.open(key(1), at(0));
    l.forget(key(1));
    assert_eq!((l.live(), l.next_deadline()), (0, None));
    l.vote(1, key(1), Vote::Done, at(0));
    l.forget(key(1));
    assert_eq!(l.live(), 1);
}

#[test]
fn a_gap_applies_nothing_and_a_repetition_is_harmless() {
    let entry = Entry {
        key: key(1),
        decision: Decision::Succeeded,
    };
    let entries = [entry; 3];
    let mut f = Follower::default();
    let batch = |from, n: usize| Batch {
        from,
        entries: entries.iter().take(n).copied().collect(),
    };
    assert_eq!(f.apply(&batch(0, 2)).unwrap().len(), 2);
    let gap = Gap {
        expected: 2,
        got: 3,
    };
    assert_eq!(f.apply(&batch(3, 1)), Err(gap));
    assert_eq!(f.next(), 2);
    assert_eq!(f.apply(&batch(0, 2)).unwrap().len(), 0);
    assert_eq!(f.apply(&batch(1, 3)).unwrap().len(), 2);
    assert_eq!(f.next(), 4);
}

/// One rank of a simulated engine, with its ordered channel to the leader.
#[derive(Default)]
struct Rank {
    follower: Follower,
    dead: bool,
    out: VecDeque<Result<(Key, Vote), u64>>,
    inbox: VecDeque<Batch>,
    /// Uses of each key so far, and where the current one stands.
    uses: BTreeMap<Key, (u32, Use)>,
    /// What this rank was told: (key, use) -> decisions.
    told: BTreeMap<(Key, u32), Vec<Decision>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Use {
    Running,
    EndedNotQuiet,
    Quiet,
    Over,
}

struct Engine {
    leader: Leader,
    ranks: Vec<Rank>,
    now: Now,
}

impl Engine {
    fn new(world: u32) -> Self {
        Self {
            leader: leader(world),
            ranks: (0..world).map(|_| Rank::default()).collect(),
            now: at(0),
        }
    }

    fn start(&mut self, rank: usize, key: Key) {
        let r = &mut self.ranks[rank];
        let (uses, stage) = r.uses.entry(key).or_insert((0, Use::Over));
        if *stage == Use::Over {
            *uses += 1;
            *stage = Use::Running;
        }
    }

    fn act(&mut self, rank: usize, key: Key, action: u8) {
        let r = &mut self.ranks[rank];
        let Some((_, stage)) = r.uses.get_mut(&key) else {
            return;
        };
        let vote = match (action, *stage) {
            (0..=2, Use::Running) => (Vote::Done, Use::Quiet),
            (3, Use::Running) => (Vote::Ended(FAILED), Use::EndedNotQuiet),
            (4, Use::EndedNotQuiet) => (Vote::Quiet, Use::Quiet),
            (5, Use::Running | Use::Quiet | Use::EndedNotQuiet) => {
                (Vote::Cancel(CANCELLED), *stage)
            }
            _ => return,
        };
        *stage = vote.1;
        r.out.push_back(Ok((key, vote.0)));
    }

    fn deliver(&mut self, rank: usize) {
        match self.ranks[rank].out.pop_front() {
            Some(Ok((key, vote))) => self.leader.vote(rank as u32, key, vote, self.now),
            Some(Err(position)) => self.leader.ack(rank as u32, position),
            None => {}
        }
    }

    fn broadcast(&mut self, max: usize) {
        let batch = self.leader.take(max);
        for rank in &mut self.ranks {
            rank.inbox.push_back(batch.clone());
        }
    }

    fn apply(&mut self, rank: usize) {
        let r = &mut self.ranks[rank];
        let Some(batch) = r.inbox.pop_front() else {
            return;
        };
        let entries: Vec<Entry> = r.follower.apply(&batch).unwrap().to_vec();
        for entry in entries {
            // A decision about a use that this rank has not started starts and ends it here.
            let (uses, stage) = r.uses.entry(entry.key).or_insert((0, Use::Over));
            if *stage == Use::Over {
                *uses += 1;
                *stage = Use::Running;
            }
            r.told
                .entry((entry.key, *uses))
                .or_default()
                .push(entry.decision);
            match entry.decision {
                Decision::Ended { .. } if *stage == Use::Running => {
                    // Nothing is running here any more: cancelled locally and quiet.
                    *stage = Use::Quiet;
                    r.out.push_back(Ok((entry.key, Vote::Quiet)));
                }
                Decision::Ended { .. } => {}
                Decision::Succeeded | Decision::Reclaim => {
                    assert!(*stage == Use::Quiet, "reclaimed while in use");
                    *stage = Use::Over;
                }
            }
        }
        r.out.push_back(Err(r.follower.next()));
    }

    fn kill(&mut self, rank: usize) {
        self.ranks[rank].dead = true;
        self.leader.lose(Some(rank as u32));
    }

    /// Lets everything that is on its way arrive, and every late request expire.
    fn settle(&mut self) {
        for _ in 0..6 {
            for rank in 0..self.ranks.len() {
                if self.ranks[rank].dead {
                    continue;
                }
                let keys: Vec<Key> = self.ranks[rank].uses.keys().copied().collect();
                keys.into_iter().for_each(|k| self.act(rank, k, 4));
                while !self.ranks[rank].out.is_empty() {
                    self.deliver(rank);
                }
            }
            self.now += LIMIT;
            self.leader.expire(self.now);
            self.broadcast(usize::MAX);
            for rank in 0..self.ranks.len() {
                while !self.ranks[rank].dead && !self.ranks[rank].inbox.is_empty() {
                    self.apply(rank);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever the skew and whoever dies: every rank is told the same, in the same order, each
    /// use of a key ends once and is reclaimed once, and nothing is left behind.
    #[test]
    fn ranks_agree(
        world in 1..6u32,
        steps in proptest::collection::vec((0..6usize, 0..3u64, 0..14u8), 0..400),
        deaths in proptest::collection::vec((0..400usize, 1..6usize), 0..2),
    ) {
        let mut engine = Engine::new(world);
        for (i, (rank, request, what)) in steps.into_iter().enumerate() {
            for (when, victim) in &deaths {
                if *when == i && *victim < world as usize {
                    engine.kill(*victim);
                }
            }
            let rank = rank % world as usize;
            if engine.ranks[rank].dead {
                continue;
            }
            engine.now += Now::from_secs(1);
            match what {
                0..=5 => engine.act(rank, key(request), what),
                6 | 7 => engine.start(rank, key(request)),
                8 | 9 => engine.deliver(rank),
                10 => engine.broadcast(2),
                11 => engine.leader.expire(engine.now),
                _ => engine.apply(rank),
            }
        }
        engine.settle();
        prop_assert_eq!(engine.leader.live(), 0);
        prop_assert_eq!(engine.leader.retained(), 0, "every live rank has acknowledged all");
        let mut reference = None;
        for rank in engine.ranks.iter().filter(|r| !r.dead) {
            let told = reference.get_or_insert(&rank.told);
            prop_assert_eq!(*told, &rank.told);
            for ((key, _), decisions) in &rank.told {
                let ok = matches!(
                    decisions.as_slice(),
                    [Decision::Succeeded] | [Decision::Ended { .. }, Decision::Reclaim]
                );
                prop_assert!(ok, "{}: {:?}", key, decisions);
            }
        }
    }
}
