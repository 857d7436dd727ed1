//! Status calls, cancel and the life of a request on one rank, on both sides, with injected
//! outcomes. Names in brackets are the published cases that a test re-expresses (docs/mirrors.md).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod transceiver_fake;

use std::time::Duration;

use kvferry::agent::Outcome;
use kvferry::err;
use kvferry::error::Status;
use kvferry::transceiver::{Cancel, Config, Consensus, ResultKind, Side, Transceiver};
use transceiver_fake::*;

const ALL: Option<u32> = None;

// -- the seven bounded-polling cases ---------------------------------------------------------

/// [poll clamp: empty]
#[test]
fn nothing_in_flight_returns_at_once_whatever_is_asked_for() {
    on_both_sides(|h| {
        for at_least in [Some(0), Some(1), Some(u32::MAX), ALL] {
            let ((status, out), took) = timed(|| h.check(at_least, 10_000));
            assert_eq!((status, out), (Status::KVF_OK, vec![]));
            assert!(took < Duration::from_millis(100), "{took:?}");
        }
        // The same once requests have come and gone.
        h.begin(1).unwrap();
        h.fake.op(1).end(done());
        assert_eq!(h.sweep().len(), 1);
        let ((status, out), took) = timed(|| h.check(ALL, 10_000));
        assert_eq!((status, out), (Status::KVF_OK, vec![]));
        assert!(took < Duration::from_millis(100), "{took:?}");
    });
}

/// [poll clamp: above count]
#[test]
fn a_target_above_what_is_in_flight_is_clamped() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.begin(2).unwrap();
        h.fake.op(1).end(done());
        h.fake.op(2).end(done());
        let ((status, out), took) = timed(|| h.check(Some(100), 10_000));
        assert_eq!((status, out.len()), (Status::KVF_OK, 2));
        assert!(took < Duration::from_millis(500), "{took:?}");
    });
}

/// [poll clamp: waits in-flight]
#[test]
fn a_request_in_flight_is_waited_for_and_wakes_the_call() {
    for at_least in [Some(1), ALL] {
        on_both_sides(|h| {
            h.begin(1).unwrap();
            let op = h.fake.op(1);
            let ending = later(50, move || op.end(done()));
            let ((status, out), took) = timed(|| h.check(at_least, 10_000));
            ending.join().unwrap();
            assert_eq!((status, out.len()), (Status::KVF_OK, 1));
            assert!(took >= Duration::from_millis(40), "{took:?}");
            assert!(took < Duration::from_secs(5), "{took:?}");
        });
    }
}

/// [poll clamp: deadline; bounded_poll_keeps_not_ready_session_queued]
#[test]
fn the_deadline_ends_the_wait_and_keeps_the_request() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let ((status, out), took) = timed(|| h.check(Some(1), 100));
        assert_eq!((status, out), (Status::KVF_TIMED_OUT, vec![]));
        assert!(took >= Duration::from_millis(90), "{took:?}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert!(h.t.has_inflight(key(1)));
        h.fake.op(1).end(done());
        assert_eq!(h.sweep().len(), 1);
    });
}

/// [poll clamp: failed counts; zero_budget_processes_task_level_failure]
#[test]
fn failed_and_cancelled_requests_count_towards_the_target() {
    on_both_sides(|h| {
        (1..=3).for_each(|r| h.begin(r).unwrap());
        h.fake.op(1).end(failed());
        h.t.cancel(key(2));
        let ((status, out), took) = timed(|| h.check(Some(2), 10_000));
        assert_eq!(status, Status::KVF_OK);
        assert!(took < Duration::from_millis(100), "{took:?}");
        let ends: Vec<_> = out.iter().map(|r| (r.key, r.outcome, r.cause)).collect();
        assert_eq!(
            ends,
            vec![
                (key(1), Outcome::Failed, Status::KVF_ERR_TRANSFER),
                (key(2), Outcome::Cancelled, Status::KVF_ERR_CANCELLED),
            ]
        );
        assert!(h.t.has_inflight(key(3)));
    });
}

/// [poll clamp: completed despite peer]
#[test]
fn a_completed_request_is_reported_while_another_is_pending() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.begin(2).unwrap();
        h.fake.op(2).end(done());
        let ((status, out), took) = timed(|| h.check(Some(1), 10_000));
        assert_eq!((status, out.len()), (Status::KVF_OK, 1));
        assert_eq!((out[0].key, out[0].user_data), (key(2), 1002));
        assert!(took < Duration::from_millis(100), "{took:?}");
    });
}

/// [poll clamp: pump-driven; bounded_poll_reaps_completion]: theirs completes because the call
/// pumps; ours because the operation's own thread says so, with no status call in between.
#[test]
fn completion_needs_no_status_call() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        assert!(!h.fd_readable());
        later(1, move || op.end(done())).join().unwrap();
        assert!(h.fd_readable());
        assert!(
            !h.t.has_inflight(key(1)),
            "its memory is free before anybody asked"
        );
        assert_eq!(h.sweep().len(), 1);
        assert!(!h.fd_readable());
    });
}

// -- waits -----------------------------------------------------------------------------------

/// [block_all_uses_blocking_wait]
#[test]
fn all_waits_for_everything_in_flight_with_one_deadline() {
    on_both_sides(|h| {
        (1..=3).for_each(|r| h.begin(r).unwrap());
        let ops: Vec<_> = (1..=3).map(|r| h.fake.op(r)).collect();
        let ending = later(20, move || {
            for op in ops {
                op.end(done());
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let (status, out) = h.check(ALL, 10_000);
        ending.join().unwrap();
        assert_eq!((status, out.len()), (Status::KVF_OK, 3));
        // Progress does not renew the deadline.
        (1..=9).for_each(|r| h.begin(r).unwrap());
        let ops: Vec<_> = (1..=9).map(|r| h.fake.op(r)).collect();
        let ending = later(0, move || {
            for op in ops {
                std::thread::sleep(Duration::from_millis(30));
                op.end(done());
            }
        });
        let ((status, out), took) = timed(|| h.check(ALL, 100));
        ending.join().unwrap();
        assert_eq!(status, Status::KVF_TIMED_OUT);
        assert!((1..9).contains(&out.len()), "{} ended", out.len());
        assert!(took < Duration::from_millis(250), "{took:?}");
    });
}

/// [timeout_retains_session_and_request]
#[test]
fn a_time_out_can_be_repeated_and_releases_nothing() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        for _ in 0..2 {
            assert_eq!(h.check(Some(1), 10), (Status::KVF_TIMED_OUT, vec![]));
        }
        assert_eq!(
            h.fake
                .op(1)
                .cancels
                .load(std::sync::atomic::Ordering::SeqCst),
            0
        );
        assert!(h.t.has_inflight(key(1)));
    });
}

/// [wires_separate_timeouts]
#[test]
fn a_call_without_a_time_out_takes_its_sides_own() {
    let config = || Config {
        context_poll: Duration::from_millis(40),
        generation_poll: Duration::from_millis(160),
        ..Config::default()
    };
    on_both_sides_with(config, |h| {
        h.begin(1).unwrap();
        let ((checked, _), took) = timed(|| h.check_with(Some(1), None, 8));
        assert_eq!(checked.status, Status::KVF_TIMED_OUT);
        let expected = match h.side {
            Side::Context => 40..120,
            Side::Generation => 160..1000,
        };
        assert!(expected.contains(&took.as_millis()), "{took:?}");
    });
}

#[test]
fn an_interrupt_ends_a_wait_from_any_thread() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.begin(2).unwrap();
        h.fake.op(2).end(done());
        let t = h.t.clone();
        let interrupting = later(30, move || t.interrupt());
        let ((status, out), took) = timed(|| h.check(ALL, 10_000));
        interrupting.join().unwrap();
        assert_eq!((status, out.len()), (Status::KVF_INTERRUPTED, 1));
        assert!(took < Duration::from_secs(5), "{took:?}");
        // It is used up.
        assert_eq!(h.check(Some(1), 20).0, Status::KVF_TIMED_OUT);
    });
}

#[test]
fn an_interrupt_just_before_a_wait_ends_it_too_and_only_a_wait_uses_it_up() {
    on_both_sides(|h| {
        h.t.interrupt();
        h.t.interrupt();
        assert_eq!(
            h.check(Some(1), 10_000),
            (Status::KVF_OK, vec![]),
            "no wait"
        );
        h.begin(1).unwrap();
        assert_eq!(h.sweep(), vec![], "no wait");
        let ((status, _), took) = timed(|| h.check(Some(1), 10_000));
        assert_eq!(status, Status::KVF_INTERRUPTED);
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(h.check(Some(1), 20).0, Status::KVF_TIMED_OUT);
    });
}

#[test]
fn one_interrupt_ends_all_waits_that_run() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let h = std::sync::Arc::new(h);
        let waits: Vec<_> = (0..3)
            .map(|_| {
                let h = h.clone();
                std::thread::spawn(move || h.check(Some(1), 10_000).0)
            })
            .collect();
        std::thread::sleep(Duration::from_millis(50));
        h.t.interrupt();
        for wait in waits {
            assert_eq!(wait.join().unwrap(), Status::KVF_INTERRUPTED);
        }
    });
}

#[test]
fn a_new_request_never_waits_behind_a_status_call() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let h = std::sync::Arc::new(h);
        let waiting = {
            let h = h.clone();
            std::thread::spawn(move || h.check(Some(1), 10_000))
        };
        std::thread::sleep(Duration::from_millis(30));
        let (begun, took) = timed(|| h.begin(2));
        begun.unwrap();
        assert!(took < Duration::from_millis(20), "{took:?}");
        // And what it brings counts for the running call.
        h.fake.op(2).end(done());
        let (status, out) = waiting.join().unwrap();
        assert_eq!((status, out[0].key), (Status::KVF_OK, key(2)));
    });
}

// -- results ---------------------------------------------------------------------------------

#[test]
fn what_does_not_fit_stays_for_the_next_call() {
    on_both_sides(|h| {
        for request in 1..=5 {
            h.begin(request).unwrap();
            h.fake.op(request).end(done());
        }
        let (checked, out) = h.check_with(Some(0), None, 2);
        assert!(checked.more);
        assert_eq!(
            out.iter().map(|r| r.key).collect::<Vec<_>>(),
            [key(1), key(2)]
        );
        assert!(h.fd_readable());
        let (checked, out) = h.check_with(ALL, None, 0);
        assert!(checked.more && out.is_empty());
        let (checked, out) = h.check_with(Some(1), None, 3);
        assert!(!checked.more);
        assert_eq!(out.len(), 3);
        assert!(!h.fd_readable());
    });
}

#[test]
fn the_outcome_is_in_the_result() {
    let outcomes = [
        (Outcome::Done, Status::KVF_OK),
        (Outcome::Failed, Status::KVF_ERR_PEER_LOST),
        (Outcome::CancelledByPeer, Status::KVF_ERR_CANCELLED_BY_PEER),
        (Outcome::Expired, Status::KVF_ERR_EXPIRED),
        (Outcome::Declined, Status::KVF_ERR_DECLINED),
        (Outcome::Expired, Status::KVF_ERR_DEADLINE),
    ];
    on_both_sides(|h| {
        for (request, (outcome, cause)) in (1..).zip(outcomes) {
            h.begin(request).unwrap();
            h.fake.op(request).end(ended(outcome, cause, true));
            let out = h.sweep();
            assert_eq!(out.len(), 1);
            let r = out[0];
            assert_eq!((r.outcome, r.cause, r.memory_safe), (outcome, cause, true));
            assert_eq!(
                (r.key, r.user_data, r.kind),
                (key(request), request + 1000, ResultKind::Ended)
            );
        }
    });
}

#[test]
fn a_request_is_reported_once_as_ended_and_once_as_safe_if_that_comes_later() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        op.end(ended(Outcome::Failed, Status::KVF_ERR_PEER_LOST, false));
        let out = h.sweep();
        assert_eq!(
            (out.len(), out[0].kind, out[0].memory_safe),
            (1, ResultKind::Ended, false)
        );
        assert!(h.t.has_inflight(key(1)));
        // Nothing is waited for: its end was reported.
        assert_eq!(h.check(ALL, 10_000), (Status::KVF_OK, vec![]));
        assert!(!h.fd_readable());
        op.quiet();
        assert!(h.fd_readable());
        let out = h.sweep();
        assert_eq!(
            (out.len(), out[0].kind, out[0].memory_safe),
            (1, ResultKind::MemorySafe, true)
        );
        assert_eq!(
            (out[0].outcome, out[0].cause),
            (Outcome::Failed, Status::KVF_ERR_PEER_LOST)
        );
        assert!(!h.t.has_inflight(key(1)));
        assert_eq!(h.sweep(), vec![]);
    });
}

#[test]
fn an_end_that_is_safe_before_it_is_taken_is_reported_once() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        op.end(ended(Outcome::Failed, Status::KVF_ERR_PEER_LOST, false));
        op.quiet();
        let out = h.sweep();
        assert_eq!(
            (out.len(), out[0].kind, out[0].memory_safe),
            (1, ResultKind::Ended, true)
        );
        assert_eq!(h.sweep(), vec![]);
    });
}

#[test]
fn repeated_notices_are_counted_and_ignored() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        op.end(done());
        op.end(failed());
        op.quiet();
        let out = h.sweep();
        assert_eq!((out.len(), out[0].outcome), (1, Outcome::Done));
        op.end(failed());
        assert_eq!(h.sweep(), vec![]);
        assert_eq!(h.t.late_notices(), 3);
    });
}

#[test]
fn an_operation_that_ends_inside_its_begin_is_reported() {
    on_both_sides(|h| {
        *h.fake.inline.lock().unwrap() = Some(done());
        h.begin(1).unwrap();
        assert_eq!(h.sweep().len(), 1);
    });
}

// -- keys ------------------------------------------------------------------------------------

#[test]
fn a_key_is_refused_while_in_use_and_can_be_used_again_after_its_end() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let refused = h.begin(1).unwrap_err();
        assert_eq!(refused.status, Status::KVF_ERR_DUPLICATE);
        assert!(refused.text.contains("request 1"), "{refused}");
        assert_eq!(h.fake.begun(), 1);
        let first = h.fake.op(1);
        first.end(done());
        assert_eq!(
            h.begin(1).unwrap_err().status,
            Status::KVF_ERR_DUPLICATE,
            "not taken yet"
        );
        assert_eq!(h.sweep().len(), 1);
        h.begin(1).unwrap();
        // News of the first use do not touch the second.
        first.end(failed());
        assert_eq!(h.sweep(), vec![]);
        h.fake.op(1).end(done());
        assert_eq!(h.sweep()[0].outcome, Outcome::Done);
    });
}

#[test]
fn a_key_whose_memory_is_not_safe_stays_in_use() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.fake
            .op(1)
            .end(ended(Outcome::Failed, Status::KVF_ERR_PEER_LOST, false));
        h.sweep();
        assert_eq!(h.begin(1).unwrap_err().status, Status::KVF_ERR_DUPLICATE);
        h.fake.op(1).quiet();
        h.sweep();
        h.begin(1).unwrap();
    });
}

#[test]
fn a_refused_call_changes_nothing() {
    on_both_sides(|h| {
        *h.fake.refuse.lock().unwrap() = Some(err!(KVF_ERR_SLOT_BUSY, "slot 3 is busy"));
        let refused = h.begin(1).unwrap_err();
        assert_eq!(
            (refused.status, refused.text.as_str()),
            (Status::KVF_ERR_SLOT_BUSY, "slot 3 is busy")
        );
        assert!(!h.t.has_inflight(key(1)));
        assert_eq!(h.check(ALL, 10_000), (Status::KVF_OK, vec![]));
        h.begin(1).unwrap();
    });
}

#[test]
fn a_ticket_of_another_key_is_refused() {
    let h = half(Side::Generation, Config::default());
    let mut request = receive_request(1);
    request.key = key(2);
    let refused = h.t.request_and_receive_async(&(), request).unwrap_err();
    assert_eq!(refused.status, Status::KVF_ERR_INVALID_ARGUMENT);
    assert!(refused.text.contains("request 1") && refused.text.contains("request 2"));
    assert_eq!(h.fake.begun(), 0);
}

#[test]
fn a_receive_without_a_deadline_gets_the_transceivers() {
    let config = Config {
        transfer: Duration::from_secs(7),
        ..Config::default()
    };
    let h = half(Side::Generation, config);
    h.begin(1).unwrap();
    let mut request = receive_request(2);
    request.import.deadline = Duration::from_secs(2);
    h.t.request_and_receive_async(&(), request).unwrap();
    let deadlines = h.fake.deadlines.lock().unwrap();
    assert_eq!(*deadlines, [Duration::from_secs(7), Duration::from_secs(2)]);
}

// -- cancel ----------------------------------------------------------------------------------

/// [retires_quiesced_cancelled_session]: theirs is in neither list; ours is reported, once.
#[test]
fn a_cancelled_request_is_reported_as_cancelled_once() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        assert_eq!(
            h.t.cancel(key(1)),
            Cancel::Over,
            "it ended inside the cancel"
        );
        assert_eq!(h.t.cancel(key(1)), Cancel::Over);
        let out = h.sweep();
        assert_eq!(out.len(), 1);
        assert_eq!(
            (out[0].outcome, out[0].cause),
            (Outcome::Cancelled, Status::KVF_ERR_CANCELLED)
        );
        assert!(out[0].memory_safe);
        assert_eq!(h.sweep(), vec![]);
    });
}

/// [retains_terminal_session_during_write]
#[test]
fn a_cancel_stays_visible_until_the_memory_is_quiet() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        op.hold();
        assert_eq!(h.t.cancel(key(1)), Cancel::Pending);
        assert_eq!(h.t.cancel(key(1)), Cancel::Pending);
        assert_eq!(
            op.cancels.load(std::sync::atomic::Ordering::SeqCst),
            1,
            "asked once"
        );
        assert_eq!(h.sweep(), vec![], "a copy may still be running");
        assert!(h.t.has_inflight(key(1)));
        op.end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, false));
        assert_eq!(h.sweep()[0].outcome, Outcome::Cancelled);
        assert_eq!(h.t.cancel(key(1)), Cancel::Pending);
        op.quiet();
        assert_eq!(h.t.cancel(key(1)), Cancel::Over);
        assert_eq!(h.sweep()[0].kind, ResultKind::MemorySafe);
    });
}

#[test]
fn a_cancel_that_comes_too_late_changes_nothing() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.fake.op(1).end(done());
        assert_eq!(h.t.cancel(key(1)), Cancel::Over);
        assert_eq!(h.sweep()[0].outcome, Outcome::Done);
    });
}

#[test]
fn a_remote_cancel_is_told_from_ours() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.fake.op(1).end(ended(
            Outcome::CancelledByPeer,
            Status::KVF_ERR_CANCELLED_BY_PEER,
            true,
        ));
        let r = h.sweep()[0];
        assert_eq!(
            (r.outcome, r.cause),
            (Outcome::CancelledByPeer, Status::KVF_ERR_CANCELLED_BY_PEER)
        );
    });
}

#[test]
fn a_cancel_for_an_unknown_key_hits_the_request_when_it_comes() {
    on_both_sides(|h| {
        assert_eq!(h.t.cancel(key(1)), Cancel::Remembered);
        assert!(!h.t.has_inflight(key(1)));
        if h.side == Side::Generation {
            // Even one that would have completed inside its begin.
            *h.fake.inline.lock().unwrap() = Some(done());
        }
        h.begin(1).unwrap();
        let out = h.sweep();
        assert_eq!((out.len(), out[0].outcome), (1, Outcome::Cancelled));
        assert!(out[0].memory_safe);
        match h.side {
            Side::Context => assert_eq!(h.fake.begun(), 1, "published and taken back"),
            Side::Generation => {
                assert_eq!(h.fake.begun(), 0, "never begun");
                let declined = h.fake.declined.lock().unwrap();
                assert_eq!(*declined, [(key(1), Status::KVF_ERR_CANCELLED)]);
            }
        }
        *h.fake.inline.lock().unwrap() = None;
        // It is used up.
        h.begin(1).unwrap();
        assert_eq!(h.sweep(), vec![]);
    });
}

#[test]
fn a_publication_cancelled_in_advance_is_cancelled_even_if_it_ended_at_once() {
    let h = half(Side::Context, Config::default());
    h.t.cancel(key(1));
    *h.fake.inline.lock().unwrap() = Some(done());
    h.begin(1).unwrap();
    assert_eq!(h.sweep()[0].outcome, Outcome::Cancelled);
}

#[test]
fn a_remembered_cancel_expires() {
    let config = || Config {
        cancel_memory: Duration::from_millis(30),
        ..Config::default()
    };
    on_both_sides_with(config, |h| {
        assert_eq!(h.t.cancel(key(1)), Cancel::Remembered);
        std::thread::sleep(Duration::from_millis(60));
        h.begin(1).unwrap();
        h.fake.op(1).end(done());
        assert_eq!(h.sweep()[0].outcome, Outcome::Done);
    });
}

#[test]
fn a_cancel_that_hit_one_side_does_not_wait_for_the_other() {
    let h = half(Side::Context, Config::default());
    h.t.cancel(key(1));
    h.begin(1).unwrap();
    h.t.request_and_receive_async(&(), receive_request(1))
        .unwrap();
    assert!(h.fake.declined.lock().unwrap().is_empty());
    // And a cancel of a key that one side has is not remembered for the other.
    h.begin(2).unwrap();
    h.t.cancel(key(2));
    h.t.request_and_receive_async(&(), receive_request(2))
        .unwrap();
    assert!(h.fake.declined.lock().unwrap().is_empty());
}

// -- the rest --------------------------------------------------------------------------------

/// [sync_receive_marks_request_complete]
#[test]
fn a_blocking_receive_returns_its_own_end() {
    let h = half(Side::Generation, Config::default());
    h.begin(1).unwrap();
    let fake = h.fake.clone();
    let ending = later(30, move || {
        fake.op(1).end(done());
        fake.op(2).end(done());
    });
    let r =
        h.t.request_and_receive_sync(&(), receive_request(2))
            .unwrap();
    ending.join().unwrap();
    assert_eq!(
        (r.key, r.outcome, r.memory_safe),
        (key(2), Outcome::Done, true)
    );
    let out = h.sweep();
    assert_eq!(
        out.iter().map(|r| r.key).collect::<Vec<_>>(),
        [key(1)],
        "not reported twice"
    );
    assert!(h.t.check_gen_transfer_complete());
}

#[test]
fn a_blocking_receive_that_failed_says_why_and_reports_its_safety_later() {
    let h = half(Side::Generation, Config::default());
    *h.fake.inline.lock().unwrap() = Some(ended(Outcome::Failed, Status::KVF_ERR_PEER_LOST, false));
    let r =
        h.t.request_and_receive_sync(&(), receive_request(1))
            .unwrap();
    assert_eq!(
        (r.outcome, r.cause, r.memory_safe),
        (Outcome::Failed, Status::KVF_ERR_PEER_LOST, false)
    );
    assert_eq!(h.check(ALL, 10_000), (Status::KVF_OK, vec![]));
    assert!(!h.t.check_gen_transfer_complete());
    h.fake.op(1).quiet();
    assert_eq!(h.sweep()[0].kind, ResultKind::MemorySafe);
    assert!(h.t.check_gen_transfer_complete());
}

#[test]
fn a_status_call_does_not_wait_for_a_blocking_receive() {
    let h = std::sync::Arc::new(half(Side::Generation, Config::default()));
    let receiving = {
        let t = h.t.clone();
        std::thread::spawn(move || t.request_and_receive_sync(&(), receive_request(1)))
    };
    while h.fake.begun() == 0 {
        std::thread::yield_now();
    }
    assert_eq!(h.check(ALL, 10_000), (Status::KVF_OK, vec![]));
    assert_eq!(h.t.cancel(key(1)), Cancel::Over);
    assert_eq!(
        receiving.join().unwrap().unwrap().outcome,
        Outcome::Cancelled
    );
}

/// [sync/async_receive_marks_request_complete]
#[test]
fn generation_is_complete_when_nothing_is_in_flight_and_nothing_unreported() {
    let h = half(Side::Generation, Config::default());
    assert!(h.t.check_gen_transfer_complete());
    h.begin(1).unwrap();
    assert!(!h.t.check_gen_transfer_complete());
    h.fake.op(1).end(done());
    assert!(!h.t.check_gen_transfer_complete(), "not reported yet");
    h.sweep();
    assert!(h.t.check_gen_transfer_complete());
}

#[test]
fn shutdown_cancels_what_runs_and_ends_waits() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        h.begin(2).unwrap();
        h.fake.op(2).hold();
        let h = std::sync::Arc::new(h);
        let waiting = {
            let h = h.clone();
            std::thread::spawn(move || h.check(ALL, 10_000))
        };
        std::thread::sleep(Duration::from_millis(30));
        let busy = h.t.shutdown(Duration::from_millis(20)).unwrap_err();
        assert_eq!(busy.status, Status::KVF_ERR_BUSY);
        let (status, mut out) = waiting.join().unwrap();
        assert_eq!(status, Status::KVF_INTERRUPTED);
        assert_eq!(h.begin(3).unwrap_err().status, Status::KVF_ERR_SHUTDOWN);
        h.fake
            .op(2)
            .end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true));
        h.t.shutdown(Duration::ZERO).unwrap();
        out.extend(h.sweep());
        assert_eq!(out.len(), 2);
        assert!(out.iter().all(|r| r.outcome == Outcome::Cancelled));
    });
}

#[test]
fn shutdown_ends_a_blocking_receive() {
    let h = half(Side::Generation, Config::default());
    let receiving = {
        let t = h.t.clone();
        std::thread::spawn(move || t.request_and_receive_sync(&(), receive_request(1)))
    };
    while h.fake.begun() == 0 {
        std::thread::yield_now();
    }
    h.fake.op(1).hold();
    assert!(h.t.shutdown(Duration::from_millis(10)).is_err());
    let refused = receiving.join().unwrap().unwrap_err();
    assert_eq!(refused.status, Status::KVF_ERR_SHUTDOWN);
    h.fake
        .op(1)
        .end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true));
    assert_eq!(h.sweep()[0].outcome, Outcome::Cancelled);
}

#[test]
fn drain_lets_what_runs_finish() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        assert_eq!(h.t.drain(Duration::from_millis(20)), Status::KVF_TIMED_OUT);
        assert_eq!(h.begin(2).unwrap_err().status, Status::KVF_ERR_SHUTDOWN);
        let op = h.fake.op(1);
        let ending = later(20, move || op.end(done()));
        assert_eq!(h.t.drain(Duration::from_secs(10)), Status::KVF_OK);
        ending.join().unwrap();
        assert_eq!(h.sweep()[0].outcome, Outcome::Done);
    });
}

#[test]
fn dropping_a_transceiver_cancels_and_later_notices_are_harmless() {
    on_both_sides(|h| {
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        op.hold();
        drop(h.t);
        assert_eq!(op.cancels.load(std::sync::atomic::Ordering::SeqCst), 1);
        op.end(failed());
    });
}

#[test]
fn records_follow_a_request_beyond_its_end() {
    let config = || Config {
        records: 2,
        ..Config::default()
    };
    on_both_sides_with(config, |h| {
        assert_eq!(h.t.record(key(1)), None);
        h.begin(1).unwrap();
        let r = h.t.record(key(1)).unwrap();
        assert_eq!(
            (r.outcome, r.cause, r.ended_ns),
            (Outcome::Pending, Status::KVF_IN_PROGRESS, 0)
        );
        std::thread::sleep(Duration::from_millis(2));
        h.fake.op(1).end(done());
        let elapsed = h.sweep()[0].elapsed_ns;
        let r = h.t.record(key(1)).unwrap();
        assert_eq!(
            (r.side, r.outcome, r.cause),
            (h.side, Outcome::Done, Status::KVF_OK)
        );
        assert_eq!((r.bytes, r.bytes_total, r.transport), (4096, 4096, "fake"));
        assert!(r.ended_ns >= 2_000_000 && r.ended_ns == elapsed, "{r:?}");
        assert!(
            r.safe_ns == r.ended_ns && r.decided_ns >= r.ended_ns,
            "{r:?}"
        );
        assert_eq!(r.aux, [7, 8, 9]);
        assert_eq!(r.text, "text of the operation");
        for request in 2..=3 {
            h.begin(request).unwrap();
            h.fake.op(request).end(done());
            h.sweep();
        }
        assert_eq!(h.t.record(key(1)), None, "only the last two are kept");
    });
}

/// [rejects_unset_timeout]
#[test]
fn what_is_not_served_or_contradicts_is_refused() {
    let refused = |config: Config| Transceiver::with_port(FakePort::default(), config).unwrap_err();
    let unset = Config {
        transfer: Duration::ZERO,
        ..Config::default()
    };
    let error = refused(unset);
    assert_eq!(error.status, Status::KVF_ERR_INVALID_ARGUMENT);
    assert!(error.text.contains("transfer time-out"), "{error}");
    let alone = Config {
        world: 2,
        ..Config::default()
    };
    assert_eq!(refused(alone).status, Status::KVF_ERR_INVALID_ARGUMENT);
    let outside = Config {
        world: 2,
        rank: 2,
        consensus: Consensus::Votes,
        ..Config::default()
    };
    assert_eq!(refused(outside).status, Status::KVF_ERR_OUT_OF_RANGE);
    let mute = Config {
        consensus: Consensus::Collective,
        ..Config::default()
    };
    assert_eq!(refused(mute).status, Status::KVF_ERR_INVALID_ARGUMENT);
    let unreachable = Config {
        world: 2,
        consensus: Consensus::Votes,
        ..Config::default()
    };
    assert_eq!(refused(unreachable).status, Status::KVF_ERR_UNSUPPORTED);

    let h = half(Side::Context, Config::default());
    assert_eq!(
        h.t.respond_and_send_layer_wise().unwrap_err().status,
        Status::KVF_ERR_UNSUPPORTED
    );
    assert_eq!(
        h.t.prepare_context_requests().unwrap_err().status,
        Status::KVF_ERR_UNSUPPORTED
    );
    assert_eq!(
        h.t.apply(b"x", 1, &mut vec![]).unwrap_err().status,
        Status::KVF_ERR_STATE
    );
}

#[test]
fn any_thread_may_call_anything() {
    const REQUESTS: u64 = 2000;
    on_both_sides(|h| {
        let h = std::sync::Arc::new(h);
        let begin = |from: u64| {
            let h = h.clone();
            std::thread::spawn(move || {
                for request in (from..REQUESTS).step_by(2) {
                    h.begin(request).unwrap();
                    let op = h.fake.op(request);
                    match request % 5 {
                        0 => op.end(failed()),
                        1 => drop(h.t.cancel(key(request))),
                        2 => {
                            op.end(ended(Outcome::Failed, Status::KVF_ERR_PEER_LOST, false));
                            op.quiet();
                        }
                        _ => op.end(done()),
                    }
                    if request % 64 == 0 {
                        h.t.interrupt();
                    }
                }
            })
        };
        let beginners = [begin(0), begin(1)];
        let take = || {
            let h = h.clone();
            std::thread::spawn(move || {
                let mut ended = Vec::new();
                let mut safe = Vec::new();
                let mut idle = 0;
                while idle < 50 {
                    let (_, out) = h.check_with(Some(3), Some(Duration::from_millis(20)), 16);
                    idle = if out.is_empty() { idle + 1 } else { 0 };
                    if out.is_empty() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    for r in out {
                        match r.kind {
                            ResultKind::Ended => ended.push(r.key.request),
                            ResultKind::MemorySafe => safe.push(r.key.request),
                        }
                        if r.kind == ResultKind::Ended && r.memory_safe {
                            safe.push(r.key.request);
                        }
                    }
                }
                (ended, safe)
            })
        };
        let takers = [take(), take()];
        beginners.into_iter().for_each(|t| t.join().unwrap());
        let (mut ended, mut safe) = (Vec::new(), Vec::new());
        for taker in takers {
            let (e, s) = taker.join().unwrap();
            ended.extend(e);
            safe.extend(s);
        }
        ended.sort_unstable();
        safe.sort_unstable();
        let all: Vec<u64> = (0..REQUESTS).collect();
        assert_eq!(ended, all);
        assert_eq!(safe, all);
        assert!(!h.fd_readable());
    });
}
