//! The session machines, one rule at a time. `docs/protocol.md` has them as tables.

#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use kvferry::error::Status::{self, *};
use kvferry::ids::{Consumer, Incarnation};
use kvferry::session::End;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn agent(n: u8) -> Incarnation {
    Incarnation([n; 16])
}

fn rank(n: u8) -> Consumer {
    Consumer {
        incarnation: agent(n),
        rank: u32::from(n),
    }
}

fn why(status: Status) -> End {
    End::new(status, "why")
}

mod source {
    use super::*;
    use kvferry::session::source::{Action, Event, Publication};

    const CLAIM: Duration = Duration::from_secs(300);
    const LEASE: Duration = Duration::from_secs(30);

    fn publication() -> Publication {
        Publication::new(s(0), CLAIM, LEASE)
    }

    fn claim(p: &mut Publication, who: u8, all: &[u8], now: Duration) -> Vec<Action> {
        let expected = all.iter().map(|n| rank(*n)).collect();
        let consumer = rank(who);
        p.on(Event::Claimed { consumer, expected }, now)
    }

    /// Statuses of `Action::End` and `Action::Tell`, after a check of the order.
    fn ended(actions: &[Action]) -> (Status, Vec<(Consumer, Status)>) {
        let revoke = actions.iter().position(|a| *a == Action::Revoke).unwrap();
        let told = actions.iter().filter_map(|a| match a {
            Action::Tell(to, end) => Some((*to, end.status)),
            _ => None,
        });
        let told = told.collect();
        match actions.last() {
            Some(Action::End(end)) => {
                assert!(
                    revoke < actions.len() - 1,
                    "revoked before the end: {actions:?}"
                );
                (end.status, told)
            }
            other => panic!("not an end: {other:?}"),
        }
    }

    #[test]
    fn a_push_ends_at_its_deadline_whatever_its_reader_does() {
        let mut p = Publication::push(s(0), s(60), LEASE);
        claim(&mut p, 1, &[1], s(50));
        assert_eq!(p.next_deadline(), Some(s(60)));
        assert_eq!(p.on(Event::Renewed(rank(1)), s(59)), []);
        let end = ended(&p.on(Event::Tick, s(60)));
        assert_eq!(end, (KVF_ERR_DEADLINE, vec![(rank(1), KVF_ERR_DEADLINE)]));
        // A lease that is shorter ends it before; nobody who comes, as any publication.
        let mut p = Publication::push(s(0), s(60), LEASE);
        claim(&mut p, 1, &[1], s(5));
        assert_eq!(p.next_deadline(), Some(s(35)));
        let end = ended(&p.on(Event::Tick, s(35)));
        assert_eq!(end, (KVF_ERR_EXPIRED, vec![(rank(1), KVF_ERR_EXPIRED)]));
        let mut p = Publication::push(s(0), s(60), LEASE);
        assert_eq!(ended(&p.on(Event::Tick, s(60))), (KVF_ERR_EXPIRED, vec![]));
    }

    #[test]
    fn without_a_reader_the_claim_deadline_ends_it() {
        let mut p = publication();
        assert_eq!(p.next_deadline(), Some(CLAIM));
        assert_eq!(p.on(Event::Tick, s(299)), []);
        assert_eq!(ended(&p.on(Event::Tick, s(300))), (KVF_ERR_EXPIRED, vec![]));
        assert_eq!(p.next_deadline(), None);
    }

    #[test]
    fn the_first_contact_starts_the_lease_and_signs_of_life_move_it() {
        let mut p = publication();
        assert_eq!(claim(&mut p, 1, &[1], s(100)), []);
        assert_eq!(p.next_deadline(), Some(s(130)));
        p.on(Event::Renewed(rank(1)), s(120));
        assert_eq!(p.next_deadline(), Some(s(150)));
        let end = ended(&p.on(Event::Tick, s(150)));
        assert_eq!(end, (KVF_ERR_EXPIRED, vec![(rank(1), KVF_ERR_EXPIRED)]));
    }

    #[test]
    fn a_held_ticket_is_a_contact_of_somebody_who_is_not_expected() {
        let mut p = publication();
        p.on(Event::Renewed(rank(9)), s(10));
        assert_eq!((p.progress(), p.next_deadline()), ((0, 0), Some(s(40))));
        claim(&mut p, 1, &[1], s(20));
        let end = ended(&p.on(Event::Finished(rank(1), KVF_OK), s(21)));
        assert_eq!(end, (KVF_OK, vec![]), "the holder is not waited for");
    }

    #[test]
    fn all_expected_readers_must_finish() {
        let mut p = publication();
        claim(&mut p, 1, &[1, 2], s(1));
        let ack = p.on(Event::Finished(rank(1), KVF_OK), s(2));
        assert_eq!((ack, p.progress()), (vec![Action::Ack(rank(1))], (1, 2)));
        let end = ended(&p.on(Event::Finished(rank(2), KVF_OK), s(3)));
        assert_eq!(end, (KVF_OK, vec![]));
    }

    #[test]
    fn one_of_two_readers_fails_and_the_other_is_still_served() {
        let mut p = publication();
        claim(&mut p, 1, &[1, 2], s(1));
        p.on(Event::Finished(rank(1), KVF_ERR_CANCELLED), s(2));
        assert_eq!(p.ended(), None);
        let end = ended(&p.on(Event::Finished(rank(2), KVF_OK), s(3)));
        assert_eq!(end, (KVF_ERR_CANCELLED_BY_PEER, vec![]));
    }

    #[test]
    fn a_declined_ticket_ends_it_as_declined() {
        let mut p = publication();
        claim(&mut p, 1, &[1], s(1));
        let end = ended(&p.on(Event::Finished(rank(1), KVF_ERR_DECLINED), s(1)));
        assert_eq!(end, (KVF_ERR_DECLINED, vec![]));
    }

    #[test]
    fn the_first_verdict_counts_and_repetitions_are_only_acknowledged() {
        let mut p = publication();
        claim(&mut p, 1, &[1, 2], s(1));
        assert!(!p.noted(rank(1)));
        p.on(Event::Finished(rank(1), KVF_OK), s(2));
        assert!(p.noted(rank(1)));
        let again = p.on(Event::Finished(rank(1), KVF_ERR_TRANSFER), s(20));
        assert_eq!(again, [Action::Ack(rank(1))]);
        // Neither the repetition nor a late claim of it keeps the lease alive for the other one.
        claim(&mut p, 1, &[1, 2], s(21));
        p.on(Event::Renewed(rank(1)), s(22));
        assert_eq!(p.next_deadline(), Some(s(32)));
        let end = ended(&p.on(Event::Finished(rank(2), KVF_OK), s(23)));
        assert_eq!(end.0, KVF_OK);
    }

    #[test]
    fn release_revokes_tells_the_readers_and_is_idempotent() {
        let mut p = publication();
        claim(&mut p, 1, &[1, 2, 3], s(1));
        p.on(Event::Finished(rank(3), KVF_OK), s(1));
        let end = ended(&p.on(Event::Withdrawn(why(KVF_ERR_CANCELLED)), s(2)));
        let told = vec![
            (rank(1), KVF_ERR_CANCELLED_BY_PEER),
            (rank(2), KVF_ERR_CANCELLED_BY_PEER),
        ];
        assert_eq!(end, (KVF_ERR_CANCELLED, told));
        assert_eq!(p.on(Event::Withdrawn(why(KVF_ERR_CANCELLED)), s(3)), []);
        assert_eq!(p.on(Event::Tick, s(9999)), []);
    }

    #[test]
    fn a_lost_reader_is_no_longer_waited_for() {
        let mut p = publication();
        claim(&mut p, 1, &[1, 2], s(1));
        assert!(p.awaits(agent(2)));
        assert_eq!(
            p.on(Event::PeerLost(agent(2), why(KVF_ERR_PEER_LOST)), s(2)),
            []
        );
        assert!(!p.awaits(agent(2)));
        let end = ended(&p.on(Event::Finished(rank(1), KVF_OK), s(3)));
        assert_eq!(
            end,
            (KVF_ERR_PEER_LOST, vec![]),
            "the engine hears that not all got it"
        );
    }

    #[test]
    fn a_reader_that_was_declared_lost_and_comes_back_is_too_late() {
        let mut p = publication();
        claim(&mut p, 1, &[1, 2], s(1));
        p.on(Event::PeerLost(agent(2), why(KVF_ERR_PEER_LOST)), s(2));
        let actions = claim(&mut p, 2, &[1, 2], s(20));
        assert!(
            matches!(&actions[..], [Action::Tell(to, end)]
                if *to == rank(2) && end.status == KVF_ERR_PEER_LOST),
            "{actions:?}"
        );
        assert_eq!(p.next_deadline(), Some(s(31)), "it renews nothing");
        let late = p.on(Event::Finished(rank(2), KVF_OK), s(21));
        assert_eq!(late, [Action::Ack(rank(2))]);
        let end = ended(&p.on(Event::Finished(rank(1), KVF_OK), s(22)));
        assert_eq!(end.0, KVF_ERR_PEER_LOST);
    }

    #[test]
    fn a_peer_that_never_came_is_nobodys_loss() {
        let mut p = publication();
        let lost = Event::PeerLost(agent(1), why(KVF_ERR_PEER_LOST));
        assert_eq!(p.on(lost, s(2)), []);
        assert_eq!(p.next_deadline(), Some(CLAIM));
    }

    #[test]
    fn late_notices_are_answered_and_change_nothing() {
        let mut p = publication();
        claim(&mut p, 1, &[1], s(1));
        p.on(Event::Finished(rank(1), KVF_OK), s(2));
        let before = p.clone();
        assert_eq!(
            p.on(Event::Finished(rank(1), KVF_OK), s(3)),
            [Action::Ack(rank(1))]
        );
        for actions in [
            claim(&mut p, 2, &[1, 2], s(3)),
            p.on(Event::Renewed(rank(2)), s(3)),
        ] {
            assert!(
                matches!(&actions[..], [Action::Tell(to, end)]
                    if *to == rank(2) && end.status == KVF_ERR_EXPIRED),
                "{actions:?}"
            );
        }
        assert_eq!(
            p.on(Event::PeerLost(agent(1), why(KVF_ERR_PEER_LOST)), s(4)),
            []
        );
        assert_eq!(p.on(Event::Shutdown, s(4)), []);
        assert_eq!(p, before);
    }

    #[test]
    fn shutdown_tells_the_readers() {
        let mut p = publication();
        claim(&mut p, 1, &[1], s(1));
        let end = ended(&p.on(Event::Shutdown, s(2)));
        let told = vec![(rank(1), KVF_ERR_CANCELLED_BY_PEER)];
        assert_eq!(end, (KVF_ERR_SHUTDOWN, told));
    }
}

mod reader {
    use super::*;
    use kvferry::session::reader::{Action, Event, Import};

    fn import(jobs: usize) -> Import {
        Import::new(s(0), jobs, s(60), s(5))
    }

    fn running(jobs: usize) -> Import {
        let mut i = import(jobs);
        for job in 0..jobs {
            assert_eq!(i.on(Event::Ready(job), s(0)), [Action::Start(job)]);
        }
        i
    }

    #[test]
    fn parts_start_when_they_can_and_end_together() {
        let mut i = import(2);
        assert_eq!(i.on(Event::Ready(1), s(0)), [Action::Start(1)]);
        assert_eq!(i.on(Event::Stopped(1, End::ok()), s(1)), []);
        assert_eq!(i.on(Event::Ready(1), s(1)), [], "never twice");
        assert_eq!(i.on(Event::Ready(0), s(2)), [Action::Start(0)]);
        assert_eq!(
            i.on(Event::Stopped(0, End::ok()), s(3)),
            [
                Action::Outcome(End::ok()),
                Action::Tell(0, End::ok()),
                Action::Tell(1, End::ok()),
                Action::MemorySafe
            ]
        );
        assert_eq!(i.next_deadline(), None);
    }

    #[test]
    fn a_failure_stops_the_others_and_memory_is_safe_when_they_have_stopped() {
        let mut i = running(3);
        let end = why(KVF_ERR_TRANSFER);
        assert_eq!(
            i.on(Event::Stopped(1, end.clone()), s(1)),
            [
                Action::Stop(0),
                Action::Stop(2),
                Action::Outcome(end.clone()),
                Action::Tell(0, end.clone()),
                Action::Tell(1, end.clone()),
                Action::Tell(2, end.clone()),
            ]
        );
        assert!(!i.is_safe());
        assert_eq!(i.on(Event::Stopped(0, End::ok()), s(2)), []);
        assert_eq!(
            i.on(Event::Stopped(2, why(KVF_ERR_CANCELLED)), s(3)),
            [Action::MemorySafe]
        );
        assert_eq!(i.outcome(), Some(&end), "the first cause stays");
    }

    #[test]
    fn a_time_out_never_implies_safety() {
        let mut i = running(1);
        let actions = i.on(Event::Tick, s(60));
        assert!(!actions.contains(&Action::MemorySafe), "{actions:?}");
        assert_eq!(i.outcome().map(|e| e.status), Some(KVF_ERR_DEADLINE));
        assert_eq!(i.on(Event::Tick, s(9999)), []);
        assert_eq!(
            i.on(Event::Stopped(0, End::ok()), s(9999)),
            [Action::MemorySafe]
        );
    }

    #[test]
    fn a_job_that_never_started_needs_no_proof() {
        let mut i = import(2);
        let actions = i.on(Event::Cancel, s(1));
        assert_eq!(actions.last(), Some(&Action::MemorySafe));
        assert_eq!(i.outcome().map(|e| e.status), Some(KVF_ERR_CANCELLED));
        assert_eq!(
            i.on(Event::Ready(0), s(2)),
            [],
            "nothing starts after the end"
        );
        assert_eq!(i.on(Event::Cancel, s(2)), []);
    }

    #[test]
    fn a_lost_source_matters_until_its_bytes_are_attested() {
        let mut i = running(2);
        i.on(Event::Stopped(0, End::ok()), s(1));
        assert_eq!(i.on(Event::SourceLost(0, why(KVF_ERR_PEER_LOST)), s(2)), []);
        let actions = i.on(Event::SourceLost(1, why(KVF_ERR_EXPIRED)), s(2));
        assert_eq!(actions[0], Action::Stop(1));
        assert_eq!(i.outcome().map(|e| e.status), Some(KVF_ERR_EXPIRED));
    }

    #[test]
    fn renewals_go_to_every_source_until_the_end() {
        let mut i = running(2);
        i.on(Event::Stopped(0, End::ok()), s(1));
        assert_eq!(i.next_deadline(), Some(s(5)));
        assert_eq!(
            i.on(Event::Tick, s(5)),
            [Action::Renew(0), Action::Renew(1)]
        );
        // A late tick asks for one renewal, not for those that were missed.
        assert_eq!(
            i.on(Event::Tick, s(31)),
            [Action::Renew(0), Action::Renew(1)]
        );
        assert_eq!(i.next_deadline(), Some(s(36)));
    }

    #[test]
    fn a_receive_learns_its_sources_once() {
        let mut i = import(0);
        assert_eq!(i.on(Event::Ready(0), s(0)), []);
        i.expect(2);
        i.expect(5);
        assert_eq!(i.on(Event::Ready(1), s(1)), [Action::Start(1)]);
        assert_eq!(i.on(Event::Ready(2), s(1)), []);
    }

    #[test]
    fn shutdown_ends_it() {
        let mut i = running(1);
        i.on(Event::Shutdown, s(1));
        assert_eq!(i.outcome().map(|e| e.status), Some(KVF_ERR_SHUTDOWN));
        assert!(!i.is_safe());
    }
}

mod notice {
    use super::*;
    use kvferry::session::notice::{Action, Event, Notice};

    #[test]
    fn it_is_repeated_until_the_sources_longer_deadline() {
        let mut n = Notice::new(s(100), s(300), s(30));
        for at in (105..400).step_by(5) {
            assert_eq!(n.next_deadline(), Some(s(at)));
            assert_eq!(n.on(Event::Tick, s(at) - Duration::from_nanos(1)), None);
            assert_eq!(n.on(Event::Tick, s(at)), Some(Action::Send));
        }
        assert_eq!(n.next_deadline(), Some(s(400)));
        assert_eq!(n.on(Event::Tick, s(400)), Some(Action::Close));
        assert_eq!(n.next_deadline(), None);
    }

    #[test]
    fn a_lease_longer_than_the_claim_deadline_counts() {
        let mut n = Notice::new(s(0), s(2), s(60));
        assert_eq!(n.on(Event::Tick, s(59)), Some(Action::Send));
        assert_eq!(n.next_deadline(), Some(s(60)));
    }

    #[test]
    fn a_new_link_repeats_it_at_once() {
        let mut n = Notice::new(s(0), s(300), s(30));
        assert_eq!(n.on(Event::Linked, s(1)), Some(Action::Send));
        assert_eq!(n.next_deadline(), Some(s(6)));
    }

    #[test]
    fn an_answer_closes_it_once() {
        for event in [Event::Acknowledged, Event::Ended, Event::SourceLost] {
            let mut n = Notice::new(s(0), s(300), s(30));
            assert_eq!(n.on(event, s(1)), Some(Action::Close));
            for event in [event, Event::Linked, Event::Tick] {
                assert_eq!(n.on(event, s(999)), None);
            }
        }
    }
}
