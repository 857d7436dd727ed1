//! Runs the checker and reports in words.

use std::collections::BTreeSet;
use std::fmt::Write;

use stateright::{Checker, HasDiscoveries, Model};

use crate::Handoff;
use crate::world::{Config, World};

/// What a run found.
#[derive(Debug)]
pub struct Report {
    /// Different states that were visited.
    pub states: usize,
    /// Names of the properties that failed, with the steps that lead there.
    pub failed: Vec<(&'static str, String)>,
}

impl Report {
    /// The names alone.
    pub fn names(&self) -> BTreeSet<&'static str> {
        self.failed.iter().map(|(name, _)| *name).collect()
    }
}

/// Visits every state of a world, or stops at the first property that fails.
pub fn exhaust(config: Config) -> Report {
    let threads = std::thread::available_parallelism().map_or(2, |n| n.get());
    run(config, HasDiscoveries::AnyFailures, threads)
}

/// Visits the states of a world until this property fails, in a shortest story.
pub fn find(config: Config, property: &'static str) -> Report {
    run(config, HasDiscoveries::AnyOf([property].into()), 1)
}

fn run(config: Config, finish: HasDiscoveries, threads: usize) -> Report {
    let checker = Handoff(config)
        .checker()
        .threads(threads)
        .finish_when(finish)
        .spawn_bfs()
        .join();
    let failed = checker
        .discoveries()
        .into_iter()
        .map(|(name, path)| (name, story(config, path.into_actions())))
        .collect();
    Report {
        states: checker.unique_state_count(),
        failed,
    }
}

/// The steps of a path, each with what is broken after it.
fn story(config: Config, steps: Vec<crate::world::Step>) -> String {
    let mut world = World::new(&config);
    let mut text = String::new();
    for step in steps {
        let _ = write!(text, "\n  {step:?}");
        if let crate::world::Step::Deliver(at) = step {
            let _ = write!(text, " = {:?}", world.network[at]);
        }
        world.apply(&config, step);
        let broken = world.violations(&config);
        if !broken.is_empty() {
            let _ = write!(text, "\n    breaks {broken:?}");
        }
    }
    text
}
