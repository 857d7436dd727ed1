//! Between the consensus machines and their bytes.

use crate::agent::Outcome;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::session::collective::{Ballot, Verdict};
use crate::session::votes::{Batch, Decision, Ending, Entry, Vote};
use crate::wire::votes::{Decisions, Line, Lists};
use crate::{bail, err};

use super::api::Side;

/// Bytes of a decision without results.
pub const DECISION_HEAD: usize = 64;
/// Bytes that each result adds to a decision at most.
pub const DECISION_ENTRY: usize = 48;

const DONE: u32 = 1;
const ENDED: u32 = 2;
const QUIET: u32 = 3;
const CANCEL: u32 = 4;

pub(super) fn outcome_from(number: u32) -> Outcome {
    match number {
        1 => Outcome::Done,
        3 => Outcome::Cancelled,
        4 => Outcome::CancelledByPeer,
        5 => Outcome::Expired,
        6 => Outcome::Declined,
        // Whatever a newer rank calls it, it is not a success.
        _ => Outcome::Failed,
    }
}

fn line(key: Key, kind: u32) -> Line {
    Line {
        request: key.request,
        attempt: key.attempt,
        kind,
        ..Line::default()
    }
}

fn with_ending(mut line: Line, ending: Ending) -> Line {
    line.outcome = ending.outcome;
    line.cause = ending.cause as i32;
    line
}

fn key_of(line: &Line) -> Key {
    Key {
        request: line.request,
        attempt: line.attempt,
    }
}

fn ending_of(line: &Line) -> Ending {
    Ending {
        outcome: line.outcome,
        cause: Status::from_code(line.cause).unwrap_or(Status::KVF_ERR_TRANSFER),
    }
}

pub(super) fn vote_line(key: Key, vote: Vote) -> Line {
    match vote {
        Vote::Done => line(key, DONE),
        Vote::Quiet => line(key, QUIET),
        Vote::Ended(ending) => with_ending(line(key, ENDED), ending),
        Vote::Cancel(ending) => with_ending(line(key, CANCEL), ending),
    }
}

/// A vote; `None` for a kind of a newer library.
pub(super) fn vote_of(line: &Line) -> Option<(Key, Vote)> {
    let vote = match line.kind {
        DONE => Vote::Done,
        ENDED => Vote::Ended(ending_of(line)),
        QUIET => Vote::Quiet,
        CANCEL => Vote::Cancel(ending_of(line)),
        _ => return None,
    };
    Some((key_of(line), vote))
}

pub(super) fn decisions(domain: u64, side: Side, batch: &Batch) -> Decisions {
    Decisions {
        domain,
        side: side as u32,
        from: batch.from,
        entries: batch
            .entries
            .iter()
            .map(|entry| match entry.decision {
                Decision::Succeeded => line(entry.key, DONE),
                Decision::Reclaim => line(entry.key, QUIET),
                Decision::Ended { ending, rank } => {
                    let mut line = with_ending(line(entry.key, ENDED), ending);
                    line.rank = rank;
                    line
                }
            })
            .collect(),
    }
}

/// # Errors
/// An entry of a kind that this library does not know: nothing of the batch can be applied.
pub(super) fn batch_of(decisions: &Decisions) -> Result<Batch> {
    let entries = decisions.entries.iter().map(|line| {
        let decision = match line.kind {
            DONE => Decision::Succeeded,
            QUIET => Decision::Reclaim,
            ENDED => Decision::Ended {
                ending: ending_of(line),
                rank: line.rank,
            },
            kind => {
                return Err(err!(
                    KVF_ERR_ABI_MISMATCH,
                    "decision of kind {kind} about {}; run the same kvferry on every rank",
                    key_of(line)
                ));
            }
        };
        Ok(Entry {
            key: key_of(line),
            decision,
        })
    });
    Ok(Batch {
        from: decisions.from,
        entries: entries.collect::<Result<_>>()?,
    })
}

pub(super) fn lists(domain: u64, side: Side, round: u64, ballot: &Ballot) -> Lists {
    let verdicts = |verdicts: &[Verdict]| {
        verdicts
            .iter()
            .map(|v| {
                let mut line = with_ending(line(v.key, ENDED), v.ending);
                line.rank = v.rank;
                line
            })
            .collect()
    };
    let keys = |keys: &[Key], kind| keys.iter().map(|k| line(*k, kind)).collect();
    Lists {
        domain,
        side: side as u32,
        round,
        cancelled: verdicts(&ballot.cancelled),
        failed: verdicts(&ballot.failed),
        completed: keys(&ballot.completed, DONE),
        quiet: keys(&ballot.quiet, QUIET),
    }
}

/// A member's lists, if it is in the same exchange as we are.
///
/// # Errors
/// `KVF_ERR_GROUP_LOST`: another domain, side or round.
pub(super) fn ballot_of(lists: &Lists, domain: u64, side: Side, round: u64) -> Result<Ballot> {
    if (lists.domain, lists.side, lists.round) != (domain, side as u32, round) {
        bail!(
            KVF_ERR_GROUP_LOST,
            "exchange {round} of the {} side in domain {domain} met exchange {} of side {} in \
             domain {}; every rank must make the same status calls in the same order",
            side.name(),
            lists.round,
            lists.side,
            lists.domain
        );
    }
    let verdicts = |lines: &[Line]| {
        lines
            .iter()
            .map(|line| Verdict {
                key: key_of(line),
                ending: ending_of(line),
                rank: line.rank,
            })
            .collect()
    };
    let keys = |lines: &[Line]| lines.iter().map(key_of).collect();
    Ok(Ballot {
        cancelled: verdicts(&lists.cancelled),
        failed: verdicts(&lists.failed),
        completed: keys(&lists.completed),
        quiet: keys(&lists.quiet),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::votes::Headed;

    #[test]
    fn the_longest_decision_fits_the_promised_bytes() {
        let ending = Ending {
            outcome: u32::MAX,
            cause: Status::KVF_ERR_INTERNAL,
        };
        let rank = u32::MAX;
        let key = Key {
            request: u64::MAX,
            attempt: u32::MAX,
        };
        let decision = Decision::Ended { ending, rank };
        let from = u64::MAX;
        for count in [0, 1, 1000] {
            let entries = vec![Entry { key, decision }; count];
            let message = decisions(u64::MAX, Side::Generation, &Batch { from, entries });
            let most = DECISION_HEAD + count * DECISION_ENTRY;
            assert!(message.to_bytes().len() <= most, "{count} entries");
        }
    }

    #[test]
    fn votes_entries_and_ballots_come_back_as_they_were() {
        let ending = Ending {
            outcome: Outcome::Expired as u32,
            cause: Status::KVF_ERR_DEADLINE,
        };
        let key = Key {
            request: 1 << 50,
            attempt: 7,
        };
        for vote in [
            Vote::Done,
            Vote::Quiet,
            Vote::Ended(ending),
            Vote::Cancel(ending),
        ] {
            assert_eq!(vote_of(&vote_line(key, vote)), Some((key, vote)));
        }
        let entries = [
            Decision::Succeeded,
            Decision::Reclaim,
            Decision::Ended { ending, rank: 5 },
        ];
        let entries = entries.map(|decision| Entry { key, decision }).to_vec();
        let batch = Batch { from: 9, entries };
        assert_eq!(batch_of(&decisions(3, Side::Context, &batch)), Ok(batch));
        let ballot = Ballot {
            cancelled: vec![Verdict {
                key,
                ending,
                rank: 2,
            }],
            failed: vec![],
            completed: vec![key],
            quiet: vec![key, key],
        };
        let sent = lists(3, Side::Context, 4, &ballot);
        assert_eq!(ballot_of(&sent, 3, Side::Context, 4), Ok(ballot));
        for (domain, side, round) in [
            (2, Side::Context, 4),
            (3, Side::Generation, 4),
            (3, Side::Context, 5),
        ] {
            let lost = ballot_of(&sent, domain, side, round).unwrap_err();
            assert_eq!(lost.status, Status::KVF_ERR_GROUP_LOST);
        }
    }

    #[test]
    fn kinds_of_a_newer_library_are_never_applied() {
        let mut vote = vote_line(Key::default(), Vote::Done);
        vote.kind = 9;
        assert_eq!(vote_of(&vote), None);
        let decisions = Decisions {
            entries: vec![vote],
            ..Decisions::default()
        };
        let refused = batch_of(&decisions).unwrap_err();
        assert_eq!(refused.status, Status::KVF_ERR_ABI_MISMATCH);
    }
}
