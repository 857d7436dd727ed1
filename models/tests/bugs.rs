//! Protocol bugs, each caught by the property that it breaks: the checks are worth something.
//! The worlds are those of `handoff.rs`, or parts of them, in which nothing breaks without a bug.

use kvferry_models::checks::find;
use kvferry_models::world::{Bug, Config, property};

const PEERS: Config = Config {
    requests: 1,
    slots: 1,
    crashes: 0,
    restarts: 0,
    ..Config::two_peers()
};

const TWO_READERS: Config = Config {
    readers: 2,
    publishes: 1,
    imports: 1,
    ..PEERS
};

const TWO_SOURCES: Config = Config {
    sources: 2,
    publishes: 1,
    imports: 1,
    ..PEERS
};

fn caught(bug: Bug, by: &'static str, config: Config) {
    let bug = Some(bug);
    let report = find(Config { bug, ..config }, by);
    let story = report.failed.iter().find(|(name, _)| *name == by);
    let Some((_, story)) = story else {
        panic!("{bug:?} is not caught by \"{by}\": {report:?}");
    };
    println!("{bug:?} breaks \"{by}\": {story}");
}

#[test]
fn epoch_check_removed() {
    let by = property::ALL_FINISHED;
    caught(Bug::EpochCheckRemoved, by, PEERS);
}

#[test]
fn incarnation_check_removed() {
    let restarted = Config {
        crashes: 1,
        restarts: 1,
        requests: 2,
        ..PEERS
    };
    let by = property::RIGHT_BYTES;
    caught(Bug::IncarnationCheckRemoved, by, restarted);
}

#[test]
fn attestation_skipped() {
    caught(Bug::AttestationSkipped, property::RIGHT_BYTES, PEERS);
}

#[test]
fn released_on_first_of_two_consumers() {
    let by = property::ALL_FINISHED;
    caught(Bug::ReleasedOnFirstOfTwoConsumers, by, TWO_READERS);
}

#[test]
fn end_before_revoke() {
    caught(Bug::EndBeforeRevoke, property::RIGHT_BYTES, PEERS);
}

#[test]
fn freed_on_time_out() {
    caught(Bug::FreedOnTimeOut, property::NO_LIVE_WRITER, PEERS);
}

#[test]
fn memory_safe_before_the_copy_stopped() {
    let by = property::NO_LIVE_WRITER;
    let cancelled = Config {
        cancels: true,
        ..PEERS
    };
    caught(Bug::MemorySafeBeforeTheCopyStopped, by, cancelled);
}

#[test]
fn started_after_the_end() {
    let asked = Config {
        ask: true,
        ..TWO_SOURCES
    };
    caught(Bug::StartedAfterTheEnd, property::NO_LIVE_WRITER, asked);
}

#[test]
fn notice_not_repeated() {
    caught(Bug::NoticeNotRepeated, property::NOTICE, PEERS);
}

#[test]
fn timer_not_re_armed() {
    caught(Bug::TimerNotReArmed, property::DEADLINE, PEERS);
}

#[test]
fn failure_taken_for_success() {
    let by = property::ALL_FINISHED;
    caught(Bug::FailureTakenForSuccess, by, PEERS);
}

#[test]
fn success_of_the_first_job() {
    caught(Bug::SuccessOfFirstJob, property::RIGHT_BYTES, TWO_SOURCES);
}
