//! The handoff protocol, exhausted: every interleaving, loss, duplication and reordering of
//! messages, every moment at which a deadline may pass, crashes and restarts.
//!
//! The sizes are those that a busy machine with two cores does in about a minute each. The larger
//! ones are `#[ignore]`d and belong to the label `long`.

use std::time::Instant;

use kvferry_models::checks;
use kvferry_models::world::Config;

fn exhaust(name: &str, config: Config) {
    let started = Instant::now();
    let report = checks::exhaust(config);
    println!(
        "{name}: {} states in {:?}",
        report.states,
        started.elapsed()
    );
    for (property, story) in &report.failed {
        panic!("{name}: \"{property}\" does not hold after {story}");
    }
    assert!(
        report.states > 10_000,
        "{name}: too tame, {} states",
        report.states
    );
}

/// Two peers, two requests, two slots, one crash, one restart.
#[test]
fn two_peers_two_requests_two_slots_one_crash_one_restart() {
    exhaust("two peers", Config::two_peers());
}

/// The same with a living peer that is declared dead, and callers that cancel and release.
#[test]
fn suspicion_cancel_and_release() {
    exhaust(
        "suspicion",
        Config {
            requests: 1,
            slots: 1,
            cancels: true,
            suspicions: 1,
            ..Config::two_peers()
        },
    );
}

/// Two ranks read one publication.
#[test]
fn two_readers() {
    exhaust("two readers", TWO_READERS);
}

/// One rank reads from two; the second one's slots are not in the ticket.
#[test]
fn two_sources() {
    exhaust("two sources", TWO_SOURCES);
}

const TWO_READERS: Config = Config {
    readers: 2,
    requests: 1,
    slots: 1,
    publishes: 1,
    imports: 1,
    suspicions: 1,
    restarts: 0,
    ..Config::two_peers()
};

const TWO_SOURCES: Config = Config {
    sources: 2,
    requests: 1,
    slots: 1,
    publishes: 1,
    imports: 1,
    ask: true,
    ..Config::two_peers()
};

#[test]
fn a_slot_in_two_publications() {
    let shared = Config {
        share: true,
        cancels: true,
        crashes: 0,
        restarts: 0,
        ..Config::two_peers()
    };
    exhaust("shared slots", shared);
}

#[test]
fn two_peers_with_a_key_published_again() {
    let again = Config {
        publishes: 3,
        crashes: 0,
        restarts: 0,
        ..Config::two_peers()
    };
    exhaust("published again", again);
}

#[test]
#[ignore = "long"]
fn long_two_peers_with_keys_published_and_imported_thrice() {
    let thrice = Config {
        slots: 1,
        publishes: 3,
        imports: 3,
        crashes: 0,
        restarts: 0,
        ..Config::two_peers()
    };
    exhaust("published thrice", thrice);
}

/// About 13 minutes on two cores, and 11 GB.
#[test]
#[ignore = "long"]
fn long_two_readers_crash_and_restart() {
    let larger = Config {
        restarts: 1,
        imports: 2,
        ..TWO_READERS
    };
    exhaust("two readers, restarted", larger);
}
