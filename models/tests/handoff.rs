//! Exhaustive checks.
use std::time::Instant;

use kvferry_models::Handoff;
use kvferry_models::world::Config;
use stateright::{Checker, Model};

fn exhaust(name: &str, config: Config) {
    let started = Instant::now();
    let checker = Handoff(config).checker().threads(2).spawn_bfs().join();
    println!(
        "{name}: {} states, {} unique, {:?}",
        checker.state_count(),
        checker.unique_state_count(),
        started.elapsed()
    );
    checker.assert_properties();
}

#[test]
fn two_peers() {
    exhaust("two peers", Config::two_peers());
}
