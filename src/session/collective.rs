//! Agreement of an engine's ranks by exchange: each rank says what it knows, all compute the same.
//!
//! One batched exchange per group, tensor-parallel then pipeline. Because unions and
//! intersections are associative, two stages give what one exchange over all ranks would.

use std::collections::{BTreeMap, BTreeSet};

use super::votes::Ending;
use crate::ids::Key;

/// An ending and the rank it comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The request.
    pub key: Key,
    /// How it ended there.
    pub ending: Ending,
    /// The rank that says so.
    pub rank: u32,
}

/// What one rank, or one group after its exchange, says.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ballot {
    /// Requests that were cancelled.
    pub cancelled: Vec<Verdict>,
    /// Requests that failed otherwise.
    pub failed: Vec<Verdict>,
    /// Requests whose bytes have all arrived.
    pub completed: Vec<Key>,
    /// Requests whose memory nothing touches any more.
    pub quiet: Vec<Key>,
}

/// What a group agrees on: cancelled = union; failed = union without cancelled; completed =
/// intersection without either; quiet = intersection. All lists ascend by key; of several
/// endings of one request the first rank's counts. No ballot at all agrees on nothing.
pub fn merge(ballots: &[Ballot]) -> Ballot {
    let mut cancelled: BTreeMap<Key, Verdict> = BTreeMap::new();
    let mut failed: BTreeMap<Key, Verdict> = BTreeMap::new();
    for ballot in ballots {
        for verdict in &ballot.cancelled {
            cancelled.entry(verdict.key).or_insert(*verdict);
        }
        for verdict in &ballot.failed {
            failed.entry(verdict.key).or_insert(*verdict);
        }
    }
    failed.retain(|key, _| !cancelled.contains_key(key));
    let mut completed = intersection(ballots.iter().map(|b| &b.completed));
    completed.retain(|key| !cancelled.contains_key(key) && !failed.contains_key(key));
    Ballot {
        cancelled: cancelled.into_values().collect(),
        failed: failed.into_values().collect(),
        completed: completed.into_iter().collect(),
        quiet: intersection(ballots.iter().map(|b| &b.quiet))
            .into_iter()
            .collect(),
    }
}

fn intersection<'a>(mut lists: impl Iterator<Item = &'a Vec<Key>>) -> BTreeSet<Key> {
    let mut common: BTreeSet<Key> = lists.next().into_iter().flatten().copied().collect();
    for list in lists {
        let list: BTreeSet<Key> = list.iter().copied().collect();
        common.retain(|key| list.contains(key));
    }
    common
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;
    use proptest::prelude::*;

    fn key(request: u64) -> Key {
        Key {
            request,
            attempt: 0,
        }
    }

    fn verdict(request: u64, rank: u32) -> Verdict {
        Verdict {
            key: key(request),
            ending: Ending {
                outcome: 2 + rank,
                cause: Status::KVF_ERR_TRANSFER,
            },
            rank,
        }
    }

    #[test]
    fn cancelled_and_failed_are_unions_completed_and_quiet_intersections() {
        let one = Ballot {
            cancelled: vec![verdict(1, 0)],
            failed: vec![verdict(2, 0)],
            completed: vec![key(3), key(4), key(5)],
            quiet: vec![key(1), key(4)],
        };
        let two = Ballot {
            cancelled: vec![verdict(2, 1)],
            failed: vec![verdict(5, 1)],
            completed: vec![key(4), key(5), key(1)],
            quiet: vec![key(4)],
        };
        assert_eq!(
            merge(&[one, two]),
            Ballot {
                cancelled: vec![verdict(1, 0), verdict(2, 1)],
                failed: vec![verdict(5, 1)],
                completed: vec![key(4)],
                quiet: vec![key(4)],
            }
        );
    }

    #[test]
    fn a_rank_that_says_nothing_holds_completion_back_but_not_failure() {
        let one = Ballot {
            failed: vec![verdict(1, 0)],
            completed: vec![key(2)],
            ..Ballot::default()
        };
        let merged = merge(&[one, Ballot::default()]);
        assert_eq!(merged.failed, vec![verdict(1, 0)]);
        assert_eq!(merged.completed, vec![]);
        assert_eq!(merge(&[]), Ballot::default());
    }

    fn any_ballot(rank: u32) -> impl Strategy<Value = Ballot> {
        // Per request: 0 silent, 1 cancelled, 2 failed, 3 completed; and quiet or not.
        proptest::collection::vec((0..4u8, any::<bool>()), 6).prop_map(move |requests| {
            let mut ballot = Ballot::default();
            for (request, (state, quiet)) in (0u64..).zip(requests) {
                match state {
                    1 => ballot.cancelled.push(verdict(request, rank)),
                    2 => ballot.failed.push(verdict(request, rank)),
                    3 => ballot.completed.push(key(request)),
                    _ => {}
                }
                if quiet {
                    ballot.quiet.push(key(request));
                }
            }
            ballot
        })
    }

    proptest! {
        /// Two stages agree with one exchange over the world, on every rank.
        #[test]
        fn tensor_then_pipeline_equals_one_exchange(
            ballots in (0..8u32).map(any_ballot).collect::<Vec<_>>()
        ) {
            let stages: Vec<Ballot> = ballots.chunks(4).map(merge).collect();
            prop_assert_eq!(merge(&stages), merge(&ballots));
        }
    }
}
