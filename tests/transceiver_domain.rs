//! Agreement of ranks: votes with decision bytes, and collective exchange. Ranks are transceivers
//! in one process; skew, loss and death are injected.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

mod transceiver_fake;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use kvferry::agent::Outcome;
use kvferry::bail;
use kvferry::error::Status;
use kvferry::transceiver::{
    Cancel, Checked, Config, Consensus, Group, RequestResult, ResultKind, Side, Transceiver,
};
use transceiver_fake::*;

/// What one rank told its engine.
type Told = (u64, ResultKind, Outcome, Status, bool);

fn told(results: &[RequestResult]) -> Vec<Told> {
    results
        .iter()
        .map(|r| (r.key.request, r.kind, r.outcome, r.cause, r.memory_safe))
        .collect()
}

fn succeeded(request: u64) -> Told {
    (
        request,
        ResultKind::Ended,
        Outcome::Done,
        Status::KVF_OK,
        true,
    )
}

// -- votes -----------------------------------------------------------------------------------

struct Votes {
    domain: Arc<FakeDomain>,
    ranks: Vec<Half>,
}

impl Votes {
    fn new(side: Side, world: u32, instant: bool) -> Self {
        Self::with(side, world, instant, Duration::from_secs(60))
    }

    fn with(side: Side, world: u32, instant: bool, limit: Duration) -> Self {
        let domain = FakeDomain::new(world, instant);
        let ranks = (0..world).map(|rank| {
            let port = FakePort::default();
            *port.0.domain.lock().unwrap() = Some(domain.clone());
            port.0.rank.store(rank, Ordering::SeqCst);
            let config = Config {
                consensus: Consensus::Votes,
                domain: 77,
                world,
                rank,
                context_limit: limit,
                generation_limit: limit,
                ..Config::default()
            };
            Half {
                side,
                fake: port.0.clone(),
                t: Arc::new(Transceiver::with_port(port, config).unwrap()),
            }
        });
        Self {
            ranks: ranks.collect(),
            domain,
        }
    }

    fn begin(&self, request: u64) {
        for rank in &self.ranks {
            rank.begin(request).unwrap();
        }
    }

    fn leader(&self) -> (Checked, Vec<RequestResult>) {
        self.ranks[0].check_with(Some(0), None, usize::MAX)
    }

    fn apply(&self, rank: usize, decision: &[u8]) -> Vec<RequestResult> {
        let mut out = Vec::new();
        if !decision.is_empty() {
            let checked = self.ranks[rank].t.apply(decision, usize::MAX, &mut out);
            assert_eq!(checked.unwrap().status, Status::KVF_OK);
        }
        out
    }

    /// One iteration of the engine: the leader's status call, the broadcast, everybody's apply.
    fn iterate(&self) -> Vec<Told> {
        let (checked, out) = self.leader();
        let expected = told(&out);
        for rank in 1..self.ranks.len() {
            assert_eq!(
                told(&self.apply(rank, &checked.decision)),
                expected,
                "rank {rank}"
            );
        }
        expected
    }
}

fn on_both_domains(world: u32, test: impl Fn(Votes)) {
    for side in Side::ALL {
        test(Votes::new(side, world, true));
    }
}

#[test]
fn a_request_is_reported_by_all_ranks_once_all_have_it() {
    on_both_domains(3, |v| {
        v.begin(1);
        v.ranks[1].fake.op(1).end(done());
        v.ranks[0].fake.op(1).end(done());
        assert_eq!(v.iterate(), vec![]);
        assert!(!v.ranks[1].fd_readable());
        v.ranks[2].fake.op(1).end(done());
        assert!(v.ranks[0].fd_readable(), "a decision is ready");
        assert!(v.ranks[1].t.has_inflight(key(1)), "only a decision frees");
        assert_eq!(v.iterate(), vec![succeeded(1)]);
        assert!(
            v.ranks
                .iter()
                .all(|r| !r.t.has_inflight(key(1)) && !r.fd_readable())
        );
    });
}

#[test]
fn results_carry_each_ranks_own_numbers() {
    let v = Votes::new(Side::Generation, 2, true);
    v.begin(1);
    v.ranks[0].fake.op(1).end(done());
    let mut end = done();
    end.bytes = 512;
    v.ranks[1].fake.op(1).end(end);
    let (checked, out) = v.leader();
    assert_eq!((out[0].bytes, out[0].user_data), (4096, 1001));
    let out = v.apply(1, &checked.decision);
    assert_eq!((out[0].bytes, out[0].user_data), (512, 1001));
}

#[test]
fn a_followers_status_call_never_waits() {
    let v = Votes::new(Side::Generation, 2, true);
    v.begin(1);
    let ((status, out), took) = timed(|| v.ranks[1].check(None, 10_000));
    assert_eq!((status, out), (Status::KVF_OK, vec![]));
    assert!(took < Duration::from_millis(100), "{took:?}");
}

#[test]
fn the_leader_waits_for_the_domain() {
    let v = Votes::new(Side::Generation, 2, true);
    v.begin(1);
    v.ranks[0].fake.op(1).end(done());
    let op = v.ranks[1].fake.op(1);
    let ending = later(40, move || op.end(done()));
    let ((checked, out), took) =
        timed(|| v.ranks[0].check_with(Some(1), Some(Duration::from_secs(10)), usize::MAX));
    ending.join().unwrap();
    assert_eq!(
        (checked.status, told(&out)),
        (Status::KVF_OK, vec![succeeded(1)])
    );
    assert!(took >= Duration::from_millis(30), "{took:?}");
}

#[test]
fn one_ranks_failure_ends_it_everywhere_and_memory_waits_for_all() {
    on_both_domains(3, |v| {
        v.begin(1);
        v.begin(2);
        let slow = v.ranks[2].fake.op(1);
        slow.hold();
        v.ranks[0].fake.op(1).end(done());
        v.ranks[1].fake.op(1).end(failed());
        let ended = (
            1,
            ResultKind::Ended,
            Outcome::Failed,
            Status::KVF_ERR_TRANSFER,
            false,
        );
        assert_eq!(v.iterate(), vec![ended]);
        // The decision stops what still runs.
        assert_eq!(slow.cancels.load(Ordering::SeqCst), 1);
        assert_eq!(v.iterate(), vec![]);
        assert!(v.ranks[0].t.has_inflight(key(1)), "rank 2 is still writing");
        slow.end(ended_not_safe());
        assert_eq!(v.iterate(), vec![]);
        slow.quiet();
        let safe = (
            1,
            ResultKind::MemorySafe,
            Outcome::Failed,
            Status::KVF_ERR_TRANSFER,
            true,
        );
        assert_eq!(v.iterate(), vec![safe]);
        assert!(
            v.ranks
                .iter()
                .all(|r| !r.t.has_inflight(key(1)) && r.t.has_inflight(key(2)))
        );
    });
}

fn ended_not_safe() -> kvferry::transceiver::port::End {
    ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, false)
}

#[test]
fn the_failing_rank_is_named() {
    let v = Votes::new(Side::Generation, 3, true);
    v.begin(1);
    v.ranks[2].fake.op(1).end(failed());
    v.ranks[0].fake.op(1).end(done());
    v.ranks[1].fake.op(1).end(done());
    let (checked, out) = v.leader();
    assert_eq!(out[0].rank, 2);
    assert_eq!(v.apply(1, &checked.decision)[0].rank, 2);
    assert_eq!(v.ranks[1].t.record(key(1)).unwrap().rank, 2);
}

#[test]
fn a_cancel_is_a_proposal_and_the_logs_order_decides() {
    on_both_domains(2, |v| {
        // Rank 1's cancel comes before rank 1's own success is known anywhere.
        v.begin(1);
        v.ranks[0].fake.op(1).end(done());
        v.ranks[1].fake.op(1).hold();
        assert_eq!(v.ranks[1].t.cancel(key(1)), Cancel::Pending);
        v.ranks[1].fake.op(1).end(done());
        let cancelled = (
            1,
            ResultKind::Ended,
            Outcome::Cancelled,
            Status::KVF_ERR_CANCELLED,
            true,
        );
        assert_eq!(v.iterate(), vec![cancelled]);
        // Too late: the log says success already, though rank 1 has not seen it.
        v.begin(2);
        v.ranks[0].fake.op(2).end(done());
        v.ranks[1].fake.op(2).end(done());
        assert_eq!(v.ranks[1].t.cancel(key(2)), Cancel::Pending);
        assert_eq!(v.iterate(), vec![succeeded(2)]);
        assert_eq!(v.iterate(), vec![]);
        // The late cancel does not hit the next use of the key.
        v.begin(2);
        v.ranks[0].fake.op(2).end(done());
        v.ranks[1].fake.op(2).end(done());
        assert_eq!(v.iterate(), vec![succeeded(2)]);
    });
}

#[test]
fn a_gap_applies_nothing_and_the_missing_bytes_heal_it() {
    let v = Votes::new(Side::Generation, 2, true);
    let mut decisions = Vec::new();
    for request in 1..=2 {
        v.begin(request);
        v.ranks.iter().for_each(|r| r.fake.op(request).end(done()));
        decisions.push(v.leader().0.decision);
    }
    let mut out = Vec::new();
    let lost = v.ranks[1].t.apply(&decisions[1], 8, &mut out).unwrap_err();
    assert_eq!(lost.status, Status::KVF_ERR_GROUP_LOST);
    assert!(lost.text.contains("decisions 0 to 0"), "{lost}");
    assert!(out.is_empty() && v.ranks[1].t.has_inflight(key(2)));
    assert_eq!(told(&v.apply(1, &decisions[0])), vec![succeeded(1)]);
    assert_eq!(told(&v.apply(1, &decisions[1])), vec![succeeded(2)]);
    // Repeated bytes are harmless, at the leader too.
    assert_eq!(v.apply(1, &decisions[0]), vec![]);
    assert_eq!(v.apply(0, &decisions[1]), vec![]);
}

#[test]
fn bytes_that_are_no_decision_of_this_domain_are_refused() {
    let v = Votes::new(Side::Generation, 2, true);
    v.begin(1);
    v.ranks.iter().for_each(|r| r.fake.op(1).end(done()));
    let decision = v.leader().0.decision;
    let refused = |bytes: &[u8]| {
        v.ranks[1]
            .t
            .apply(bytes, 8, &mut Vec::new())
            .unwrap_err()
            .status
    };
    assert_eq!(refused(b"hello"), Status::KVF_ERR_INVALID_ARGUMENT);
    assert_eq!(
        refused(&decision[..decision.len() - 1]),
        Status::KVF_ERR_INVALID_ARGUMENT
    );
    let other = Votes::with(Side::Generation, 1, true, Duration::from_secs(60));
    let stranger = half(
        Side::Generation,
        Config {
            consensus: Consensus::Votes,
            domain: 78,
            ..Config::default()
        },
    );
    let refused = stranger.t.apply(&decision, 8, &mut Vec::new()).unwrap_err();
    assert_eq!(refused.status, Status::KVF_ERR_INVALID_ARGUMENT);
    assert!(refused.text.contains("domain 77"), "{refused}");
    drop(other);
}

#[test]
fn a_small_result_array_splits_the_decision_at_the_leader_and_the_rest_at_a_follower() {
    let v = Votes::new(Side::Generation, 2, true);
    for request in 1..=5 {
        v.begin(request);
        v.ranks.iter().for_each(|r| r.fake.op(request).end(done()));
    }
    let (first, out) = v.ranks[0].check_with(Some(0), None, 2);
    assert_eq!(
        (first.more, told(&out)),
        (true, vec![succeeded(1), succeeded(2)])
    );
    assert!(v.ranks[0].fd_readable());
    assert_eq!(told(&v.apply(1, &first.decision)), told(&out));
    let (rest, out) = v.ranks[0].check_with(Some(0), None, 9);
    assert_eq!((rest.more, out.len()), (false, 3));
    let mut out = Vec::new();
    let checked = v.ranks[1].t.apply(&rest.decision, 1, &mut out).unwrap();
    assert_eq!((checked.more, told(&out)), (true, vec![succeeded(3)]));
    assert!(v.ranks[1].fd_readable());
    let checked = v.ranks[1].t.apply(&[], 9, &mut out).unwrap();
    assert_eq!((checked.more, out.len()), (false, 3));
    assert!(!v.ranks[1].fd_readable());
}

#[test]
fn the_decision_buffer_bounds_the_results() {
    let v = Votes::new(Side::Generation, 2, true);
    assert_eq!(
        v.ranks[1].t.results_within(0),
        Ok(usize::MAX),
        "followers make none"
    );
    assert_eq!(v.ranks[0].t.results_within(64 + 3 * 48), Ok(3));
    let short = v.ranks[0].t.results_within(64).unwrap_err();
    assert_eq!(short.status, Status::KVF_ERR_OUT_OF_RANGE);
}

#[test]
fn a_rank_that_lags_fails_the_request_at_its_limit_and_others_go_on() {
    let v = Votes::with(Side::Generation, 3, true, Duration::from_millis(80));
    v.begin(1);
    v.ranks[2].fake.op(1).hold();
    v.ranks[0].fake.op(1).end(done());
    v.ranks[1].fake.op(1).end(done());
    let ((checked, out), took) =
        timed(|| v.ranks[0].check_with(Some(1), Some(Duration::from_secs(10)), usize::MAX));
    assert!(
        (Duration::from_millis(40)..Duration::from_secs(2)).contains(&took),
        "{took:?}"
    );
    assert_eq!(
        (out[0].outcome, out[0].cause),
        (Outcome::Failed, Status::KVF_ERR_DEADLINE)
    );
    assert_eq!((out[0].rank, out[0].memory_safe), (2, false));
    for rank in 1..3 {
        assert_eq!(told(&v.apply(rank, &checked.decision)), told(&out));
    }
    v.begin(2);
    v.ranks.iter().for_each(|r| r.fake.op(2).end(done()));
    assert_eq!(v.iterate(), vec![succeeded(2)]);
}

#[test]
fn a_dead_rank_fails_what_it_owed_and_what_it_gave_stands() {
    on_both_domains(3, |v| {
        v.begin(1);
        v.begin(2);
        v.ranks[2].fake.op(1).end(done());
        v.domain.kill(2);
        for rank in &v.ranks[..2] {
            rank.fake.op(1).end(done());
            rank.fake.op(2).hold();
        }
        let (checked, out) = v.leader();
        let lost = (
            2,
            ResultKind::Ended,
            Outcome::Failed,
            Status::KVF_ERR_PEER_LOST,
            false,
        );
        assert_eq!(told(&out), vec![lost, succeeded(1)]);
        assert_eq!(out[0].rank, 2);
        assert_eq!(told(&v.apply(1, &checked.decision)), told(&out));
        // Its memory died with it; that of the living is waited for.
        v.ranks[0]
            .fake
            .op(2)
            .end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true));
        assert_eq!(v.leader().1, vec![]);
        v.ranks[1]
            .fake
            .op(2)
            .end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true));
        assert_eq!(v.leader().1[0].kind, ResultKind::MemorySafe);
    });
}

#[test]
fn when_the_leader_dies_undecided_requests_fail_and_decided_ones_stand() {
    on_both_domains(3, |v| {
        v.begin(1);
        v.begin(2);
        v.begin(3);
        v.ranks.iter().for_each(|r| r.fake.op(1).end(done()));
        let decision = v.leader().0.decision;
        assert_eq!(told(&v.apply(1, &decision)), vec![succeeded(1)]);
        v.ranks[1].fake.op(2).end(done());
        v.ranks[1].fake.op(3).hold();
        v.domain.kill(0);
        let ((status, out), took) = timed(|| v.ranks[1].check(None, 10_000));
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert_eq!(status, Status::KVF_OK);
        let lost = |request, safe| {
            (
                request,
                ResultKind::Ended,
                Outcome::Failed,
                Status::KVF_ERR_GROUP_LOST,
                safe,
            )
        };
        assert_eq!(told(&out), vec![lost(2, true), lost(3, false)]);
        assert_eq!(out[0].rank, 0);
        // Safety is then this rank's own to know.
        v.ranks[1]
            .fake
            .op(3)
            .end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true));
        assert_eq!(v.ranks[1].sweep()[0].kind, ResultKind::MemorySafe);
        assert_eq!(
            v.ranks[1].begin(4).unwrap_err().status,
            Status::KVF_ERR_GROUP_LOST
        );
        // The same at rank 2, which had not seen the decision about request 1: a broadcast that
        // did not arrive everywhere is the engine's loss too.
        let outcomes: Vec<_> = v.ranks[2]
            .check(None, 10_000)
            .1
            .iter()
            .map(|r| r.cause)
            .collect();
        assert_eq!(outcomes, vec![Status::KVF_ERR_GROUP_LOST; 3]);
    });
}

#[test]
fn a_limit_is_noticed_without_a_status_call() {
    for side in Side::ALL {
        let v = Votes::with(side, 3, true, Duration::from_millis(50));
        v.begin(1);
        v.ranks[0].begin(2).unwrap();
        // One alarm for the first limit, not one per request.
        let asked = v.ranks[0].fake.alarms.lock().unwrap().clone();
        assert_eq!(asked.len(), 1);
        assert!(asked[0] <= Duration::from_millis(50), "{asked:?}");
        v.ranks.iter().for_each(|r| r.fake.op(1).end(done()));
        assert_eq!(v.iterate(), vec![succeeded(1)]);
        v.ranks[0].fake.op(2).end(done());
        assert!(!v.ranks[0].fd_readable());
        std::thread::sleep(Duration::from_millis(60));
        v.domain.alarm(0);
        assert!(v.ranks[0].fd_readable());
        let (_, out) = v.leader();
        assert_eq!((out[0].key, out[0].rank), (key(2), 1));
        assert_eq!(out[0].cause, Status::KVF_ERR_DEADLINE);
    }
}

#[test]
fn decisions_that_travel_while_the_leader_dies_stand() {
    on_both_domains(3, |v| {
        v.begin(1);
        v.begin(2);
        v.ranks.iter().for_each(|r| r.fake.op(1).end(done()));
        let decision = v.leader().0.decision;
        v.domain.kill(0);
        // There is something to take, but what the engine still has comes first.
        for rank in 1..3 {
            assert!(v.ranks[rank].fd_readable());
            assert_eq!(told(&v.apply(rank, &decision)), vec![succeeded(1)]);
            assert!(v.ranks[rank].fd_readable());
            let mut out = Vec::new();
            v.ranks[rank].t.apply(&[], 8, &mut out).unwrap();
            let causes: Vec<_> = out.iter().map(|r| (r.key, r.cause)).collect();
            assert_eq!(causes, vec![(key(2), Status::KVF_ERR_GROUP_LOST)]);
        }
    });
}

#[test]
fn a_rank_that_was_given_up_and_lives_keeps_its_own_memory() {
    on_both_domains(3, |v| {
        v.begin(1);
        v.ranks[2].fake.op(1).hold();
        v.domain.kill(2);
        let (outcome, _) = v.leader();
        v.ranks[1].fake.op(1).end(failed());
        v.ranks[0].fake.op(1).end(failed());
        let (reclaim, out) = v.leader();
        assert_eq!(out[0].kind, ResultKind::MemorySafe);
        // The others' RECLAIM does not speak for it.
        let out = v.apply(2, &outcome.decision);
        assert_eq!((out.len(), out[0].memory_safe), (1, false));
        assert_eq!(v.apply(2, &reclaim.decision), vec![]);
        assert!(v.ranks[2].t.has_inflight(key(1)));
        v.ranks[2].fake.op(1).end(failed());
        let out = v.ranks[2].sweep();
        assert_eq!(out[0].kind, ResultKind::MemorySafe);
        assert!(!v.ranks[2].t.has_inflight(key(1)));
    });
}

#[test]
fn a_request_that_was_ended_before_it_came_is_refused_once() {
    on_both_domains(2, |v| {
        v.ranks[0].begin(1).unwrap();
        v.ranks[0].t.cancel(key(1));
        let cancelled = (
            1,
            ResultKind::Ended,
            Outcome::Cancelled,
            Status::KVF_ERR_CANCELLED,
            false,
        );
        let (checked, out) = v.leader();
        assert_eq!(told(&out), vec![cancelled]);
        let out = v.apply(1, &checked.decision);
        assert_eq!(told(&out), vec![cancelled]);
        assert_eq!(out[0].user_data, 0, "it never came here");
        let refused = v.ranks[1].begin(1).unwrap_err();
        assert_eq!(refused.status, Status::KVF_ERR_STATE);
        assert!(refused.text.contains("KVF_ERR_CANCELLED"), "{refused}");
        let safe = (
            1,
            ResultKind::MemorySafe,
            Outcome::Cancelled,
            Status::KVF_ERR_CANCELLED,
            true,
        );
        assert_eq!(v.iterate(), vec![safe]);
        // Also when it comes after all that, but only once.
        assert_eq!(
            v.ranks[1].begin(1).unwrap_err().status,
            Status::KVF_ERR_STATE
        );
        v.begin(1);
        v.ranks.iter().for_each(|r| r.fake.op(1).end(done()));
        assert_eq!(v.iterate(), vec![succeeded(1)]);
    });
}

#[test]
fn a_blocking_receive_is_refused_where_ranks_agree() {
    let v = Votes::new(Side::Generation, 2, true);
    let refused = v.ranks[0]
        .t
        .request_and_receive_sync(&(), receive_request(1))
        .unwrap_err();
    assert_eq!(refused.status, Status::KVF_ERR_UNSUPPORTED);
}

/// A small generator, so that a failing run can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// Leader and followers report the same ids in the same iteration, whatever the skew.
#[test]
fn votes_agree_over_many_iterations_with_random_skew() {
    const WORLD: usize = 8;
    const ITERATIONS: u64 = 10_000;
    let v = Votes::new(Side::Generation, WORLD as u32, false);
    let mut random = Random(0x5eed_2026);
    let mut running: Vec<(u64, Vec<bool>)> = Vec::new();
    let mut ended = 0;
    let mut next = 0;
    for _ in 0..ITERATIONS {
        if running.len() < 12 {
            v.begin(next);
            running.push((next, vec![false; WORLD]));
            next += 1;
        }
        for _ in 0..4 {
            let at = random.below(running.len() as u64) as usize;
            let rank = random.below(WORLD as u64) as usize;
            let (request, finished) = &mut running[at];
            if std::mem::replace(&mut finished[rank], true) {
                continue;
            }
            let op = v.ranks[rank].fake.op(*request);
            match random.below(20) {
                0 => op.end(failed()),
                1 => drop(v.ranks[rank].t.cancel(key(*request))),
                _ => op.end(done()),
            }
        }
        v.domain.deliver(random.below(WORLD as u64) as u32);
        let reported = v.iterate();
        ended += reported.iter().filter(|t| t.1 == ResultKind::Ended).count();
        let over: Vec<u64> = reported.iter().filter(|t| t.4).map(|t| t.0).collect();
        running.retain(|(request, _)| !over.contains(request));
        for rank in &v.ranks {
            over.iter()
                .for_each(|request| assert!(!rank.t.has_inflight(key(*request))));
        }
    }
    assert!(ended > 1000, "{ended} requests ended");
}

// -- collective ------------------------------------------------------------------------------

/// The all-gather of an engine of tensor x pipeline ranks, on threads.
struct Exchange {
    tensor: usize,
    pipeline: usize,
    board: Vec<Mutex<Vec<u8>>>,
    /// One barrier per group: tensor groups by stage, then pipeline groups by tensor rank.
    barriers: Vec<Barrier>,
    calls: AtomicU32,
}

impl Exchange {
    fn new(tensor: usize, pipeline: usize) -> Arc<Self> {
        let tensor_groups = (0..pipeline).map(|_| Barrier::new(tensor));
        let pipeline_groups = (0..tensor).map(|_| Barrier::new(pipeline));
        Arc::new(Self {
            tensor,
            pipeline,
            board: (0..tensor * pipeline).map(|_| Mutex::default()).collect(),
            barriers: tensor_groups.chain(pipeline_groups).collect(),
            calls: AtomicU32::new(0),
        })
    }

    fn gather(&self, rank: usize, group: Group, mine: &[u8]) -> Vec<Vec<u8>> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let (stage, column) = (rank / self.tensor, rank % self.tensor);
        let (members, barrier): (Vec<usize>, usize) = match group {
            Group::Tensor => {
                let first = stage * self.tensor;
                ((first..first + self.tensor).collect(), stage)
            }
            Group::Pipeline => {
                let all = (0..self.pipeline).map(|s| s * self.tensor + column);
                (all.collect(), self.pipeline + column)
            }
        };
        *self.board[rank].lock().unwrap() = mine.to_vec();
        self.barriers[barrier].wait();
        let all = members
            .iter()
            .map(|m| self.board[*m].lock().unwrap().clone());
        let all = all.collect();
        self.barriers[barrier].wait();
        all
    }

    fn rank(self: &Arc<Self>, side: Side, rank: usize) -> Half {
        let exchange = self.clone();
        let config = Config {
            consensus: Consensus::Collective,
            world: (self.tensor * self.pipeline) as u32,
            rank: rank as u32,
            tensor_ranks: self.tensor as u32,
            pipeline_ranks: self.pipeline as u32,
            gather: Some(Box::new(move |group, mine| {
                Ok(exchange.gather(rank, group, mine))
            })),
            ..Config::default()
        };
        half(side, config)
    }
}

/// Runs every rank's part of a test on its own thread and compares what they were told.
fn collective(
    tensor: usize,
    pipeline: usize,
    body: impl Fn(usize, Half) -> Vec<Vec<Told>> + Send + Sync,
) -> Vec<Vec<Told>> {
    let exchange = Exchange::new(tensor, pipeline);
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..tensor * pipeline)
            .map(|rank| {
                let (exchange, body) = (&exchange, &body);
                scope.spawn(move || body(rank, exchange.rank(Side::Generation, rank)))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for (rank, told) in all.iter().enumerate() {
        assert_eq!(*told, all[0], "rank {rank}");
    }
    all.into_iter().next().unwrap()
}

/// [consensus_outcome_uses_single_batched_allgather; ctx_tp / ctx_pp
/// consensus_does_not_complete_when_peer_times_out]
#[test]
fn unions_of_failures_and_intersections_of_successes_in_one_exchange_per_group() {
    let iterations = collective(2, 2, |rank, h| {
        (1..=4).for_each(|r| h.begin(r).unwrap());
        // 1: done on all. 2: done on all but rank 3. 3: failed on rank 2. 4: cancelled on rank 1.
        h.fake.op(1).end(done());
        if rank != 3 {
            h.fake.op(2).end(done());
        }
        match rank {
            2 => h.fake.op(3).end(failed()),
            _ => h.fake.op(3).hold(),
        }
        h.fake.op(4).hold();
        if rank == 1 {
            h.t.cancel(key(4));
        }
        let mut all = vec![told(&h.sweep())];
        if rank == 3 {
            h.fake.op(2).end(done());
        }
        all.push(told(&h.sweep()));
        // What still ran was stopped by the decision; quiet of all makes it safe.
        let cancelled = ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true);
        if rank != 2 {
            assert_eq!(h.fake.op(3).cancels.load(Ordering::SeqCst), 1);
            h.fake.op(3).end(cancelled.clone());
        }
        all.push(told(&h.sweep()));
        assert!(h.t.has_inflight(key(4)));
        h.fake.op(4).end(cancelled);
        all.push(told(&h.sweep()));
        assert!(!h.t.has_inflight(key(4)));
        all
    });
    let end = ResultKind::Ended;
    let safe = ResultKind::MemorySafe;
    let (failed, transfer) = (Outcome::Failed, Status::KVF_ERR_TRANSFER);
    let (cancelled, by_us) = (Outcome::Cancelled, Status::KVF_ERR_CANCELLED);
    assert_eq!(
        iterations,
        vec![
            vec![
                succeeded(1),
                (3, end, failed, transfer, false),
                (4, end, cancelled, by_us, false)
            ],
            vec![succeeded(2)],
            vec![(3, safe, failed, transfer, true)],
            vec![(4, safe, cancelled, by_us, true)],
        ]
    );
}

/// [skips_consensus_when_never_sent; gen_transfer_status_enters_consensus_when_sync_required]
#[test]
fn nobody_exchanges_before_the_first_request_and_everybody_ever_after() {
    let exchange = Exchange::new(1, 1);
    let counted = Arc::new(AtomicU32::new(0));
    let count = counted.clone();
    let config = Config {
        consensus: Consensus::Collective,
        world: 2,
        tensor_ranks: 2,
        gather: Some(Box::new(move |_, mine| {
            count.fetch_add(1, Ordering::SeqCst);
            Ok(vec![mine.to_vec(), mine.to_vec()])
        })),
        ..Config::default()
    };
    drop(exchange);
    let h = half(Side::Generation, config);
    assert_eq!(h.sweep(), vec![]);
    assert_eq!(counted.load(Ordering::SeqCst), 0);
    // Even a refused first request counts: the other ranks' may have been accepted.
    *h.fake.refuse.lock().unwrap() = Some(kvferry::err!(KVF_ERR_SLOT_BUSY, "busy"));
    h.begin(1).unwrap_err();
    assert_eq!(h.sweep(), vec![]);
    assert_eq!(
        counted.load(Ordering::SeqCst),
        1,
        "with nothing in flight here"
    );
    // One exchange per call, the other side's calls skip.
    let ((status, _), took) = timed(|| h.check(Some(5), 10_000));
    assert_eq!(
        (status, counted.load(Ordering::SeqCst)),
        (Status::KVF_OK, 2)
    );
    assert!(took < Duration::from_millis(100), "{took:?}");
    let mut out = Vec::new();
    h.t.check_context_transfer_status(Some(0), None, 9, &mut out)
        .unwrap();
    assert_eq!(counted.load(Ordering::SeqCst), 2);
}

#[test]
fn a_failed_exchange_commits_nothing_and_can_be_repeated() {
    let broken = Arc::new(AtomicU32::new(1));
    let flag = broken.clone();
    let config = Config {
        consensus: Consensus::Collective,
        world: 2,
        tensor_ranks: 2,
        gather: Some(Box::new(move |_, mine| {
            if flag.load(Ordering::SeqCst) == 1 {
                bail!(KVF_ERR_GROUP_LOST, "rank 1 is gone");
            }
            let members = 2 - flag.load(Ordering::SeqCst) as usize / 2;
            Ok(vec![mine.to_vec(); members])
        })),
        ..Config::default()
    };
    let h = half(Side::Generation, config);
    h.begin(1).unwrap();
    h.fake.op(1).end(done());
    let check = || {
        let mut out = Vec::new();
        h.t.check_gen_transfer_status(Some(0), None, 9, &mut out)
            .map(|_| out)
    };
    let lost = check().unwrap_err();
    assert_eq!(lost.status, Status::KVF_ERR_GROUP_LOST);
    assert!(
        lost.text.contains("rank 1 is gone") && lost.text.contains("Tensor"),
        "{lost}"
    );
    broken.store(2, Ordering::SeqCst);
    let short = check().unwrap_err();
    assert!(short.text.contains("1 lists for 2 ranks"), "{short}");
    broken.store(0, Ordering::SeqCst);
    assert_eq!(told(&check().unwrap()), vec![succeeded(1)]);
}

#[test]
fn a_local_wait_before_the_exchange_only_where_it_was_agreed() {
    for (agreed, at_least) in [(false, 0), (true, 40)] {
        let config = Config {
            consensus: Consensus::Collective,
            world: 2,
            tensor_ranks: 2,
            gather: Some(Box::new(|_, mine| Ok(vec![mine.to_vec(); 2]))),
            wait_before_gather: agreed,
            ..Config::default()
        };
        let h = half(Side::Generation, config);
        h.begin(1).unwrap();
        let op = h.fake.op(1);
        let ending = later(60, move || op.end(done()));
        let ((status, out), took) = timed(|| h.check(Some(1), 10_000));
        ending.join().unwrap();
        assert_eq!((status, out.len()), (Status::KVF_OK, usize::from(agreed)));
        assert!(took >= Duration::from_millis(at_least), "{took:?}");
        assert!(agreed || took < Duration::from_millis(40), "{took:?}");
    }
}

#[test]
fn collective_ranks_agree_over_many_iterations_with_random_skew() {
    let iterations = collective(4, 2, |rank, h| {
        // What is begun is the same on all ranks; when and how it ends is each rank's own.
        let mut random = Random(0xfeed_0001 + rank as u64);
        let mut begun = 0;
        let mut running: Vec<(u64, bool)> = Vec::new();
        let mut all = Vec::new();
        for _ in 0..2_000 {
            if running.len() < 8 {
                h.begin(begun).unwrap();
                running.push((begun, false));
                begun += 1;
            }
            let at = random.below(running.len() as u64) as usize;
            if !std::mem::replace(&mut running[at].1, true) {
                let request = running[at].0;
                match random.below(30) {
                    0 => h.fake.op(request).end(failed()),
                    1 => drop(h.t.cancel(key(request))),
                    _ => h.fake.op(request).end(done()),
                }
            }
            let reported = told(&h.sweep());
            running.retain(|(request, _)| !reported.iter().any(|t| t.0 == *request && t.4));
            all.push(reported);
        }
        all
    });
    let ended = iterations
        .iter()
        .flatten()
        .filter(|t| t.1 == ResultKind::Ended)
        .count();
    assert!(ended > 100, "{ended} requests ended");
}
