//! Random walks through the world of `session_world`: lossy network, crashes, restarts, false
//! suspicions, cancels, slots in several publications; after each step everything that must hold
//! is checked, and at the end everything must come to an end by time alone.
//!
//! `KVFERRY_SEQUENCES` sets the number of walks; `scripts/test --long` runs 10 000.

mod session_world;

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::{Config as RunnerConfig, TestRunner};
use session_world::{Bug, Config, KINDS, Step, World, property};

const STEPS: usize = 50;

fn config() -> impl Strategy<Value = Config> {
    let base = Config {
        publishes: 6,
        imports: 6,
        crashes: 1,
        restarts: 1,
        suspicions: 1,
        cancels: true,
        timed: true,
        claim: Duration::from_secs(40),
        lease: Duration::from_secs(12),
        deadline: Duration::from_secs(20),
        ..Config::two_peers()
    };
    (
        1..=2u8,
        1..=2u8,
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(move |(sources, readers, ask, share, calm)| Config {
            sources,
            readers,
            ask,
            share,
            crashes: u8::from(!calm),
            suspicions: u8::from(!calm),
            ..base
        })
}

/// Weights of the kinds of steps, in the order of `Step::kind`.
const WEIGHTS: [u32; KINDS] = [4, 5, 12, 12, 2, 2, 1, 1];

fn choices() -> impl Strategy<Value = Vec<(usize, u16)>> {
    let kinds = WEIGHTS.iter().enumerate();
    let kinds: Vec<_> = kinds.map(|(kind, weight)| (*weight, Just(kind))).collect();
    let kind = proptest::strategy::Union::new_weighted(kinds);
    proptest::collection::vec((kind, any::<u16>()), STEPS)
}

/// One walk; what rare things it met.
fn walk(
    config: &Config,
    choices: &[(usize, u16)],
) -> Result<BTreeSet<&'static str>, TestCaseError> {
    let mut world = World::new(config);
    let mut story = Vec::new();
    for (kind, choice) in choices {
        let all = world.steps(config);
        let mut steps: Vec<&Step> = all.iter().filter(|s| s.kind() == *kind).collect();
        if steps.is_empty() {
            steps = all.iter().collect();
        }
        let step = steps[usize::from(*choice) % steps.len()].clone();
        apply(config, &mut world, step, &mut story)?;
    }
    // From here on every message is lost. Copies return, deadlines pass.
    world.network.clear();
    let longest = config.claim.max(config.lease).max(config.deadline);
    for _ in 0..3 {
        let copies = |w: &World| {
            let copying = |s: &Step| matches!(s, Step::Copy(..) | Step::CopyReturns(..));
            w.steps(config).into_iter().find(copying)
        };
        apply(config, &mut world, Step::Advance(longest), &mut story)?;
        while let Some(step) = copies(&world) {
            apply(config, &mut world, step, &mut story)?;
        }
        world.network.clear();
    }
    prop_assert!(
        world.idle(),
        "something never ends: {:#?}\nafter {:?}",
        world,
        story
    );
    Ok(world.seen)
}

fn apply(
    config: &Config,
    world: &mut World,
    step: Step,
    story: &mut Vec<Step>,
) -> Result<(), TestCaseError> {
    story.push(step.clone());
    world.apply(config, step);
    let broken = world.violations(config);
    prop_assert!(broken.is_empty(), "{:?} broken by {:#?}", broken, story);
    Ok(())
}

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(RunnerConfig {
        cases,
        failure_persistence: None,
        ..RunnerConfig::default()
    })
}

fn sequences() -> u32 {
    let given = std::env::var("KVFERRY_SEQUENCES").ok();
    given.and_then(|n| n.parse().ok()).unwrap_or(1000)
}

#[test]
fn random_walks_keep_every_promise() {
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let walks = (config(), choices());
    let result = runner(sequences()).run(&walks, |(config, choices)| {
        seen.borrow_mut().extend(walk(&config, &choices)?);
        Ok(())
    });
    if let Err(e) = result {
        panic!("{e}");
    }
    for rare in [
        "an import succeeds",
        "a publication succeeds",
        "a publication expires",
        "a copy finds its lease ended",
        "an import ends before its copy",
        "an agent crashes",
    ] {
        assert!(seen.borrow().contains(rare), "no walk in which {rare}");
    }
}

/// The walks are worth something: they find what the model checker finds.
#[test]
fn random_walks_find_seeded_bugs() {
    for (bug, by) in [
        (Bug::EpochCheckRemoved, property::ALL_FINISHED),
        (Bug::AttestationSkipped, property::RIGHT_BYTES),
        (Bug::ReleasedOnFirstOfTwoConsumers, property::ALL_FINISHED),
        (Bug::EndBeforeRevoke, property::RIGHT_BYTES),
        (Bug::FreedOnTimeOut, property::NO_LIVE_WRITER),
        (
            Bug::MemorySafeBeforeTheCopyStopped,
            property::NO_LIVE_WRITER,
        ),
        (Bug::NoticeNotRepeated, property::NOTICE),
        (Bug::TimerNotReArmed, property::DEADLINE),
        (Bug::FailureTakenForSuccess, property::ALL_FINISHED),
    ] {
        let walks = (config(), choices());
        let runner_config = RunnerConfig {
            cases: 3000,
            max_shrink_iters: 0,
            failure_persistence: None,
            ..RunnerConfig::default()
        };
        let found = TestRunner::new(runner_config).run(&walks, |(config, choices)| {
            let config = Config {
                bug: Some(bug),
                ..config
            };
            walk(&config, &choices).map(|_| ())
        });
        match found {
            Err(e) => assert!(e.to_string().contains(by), "{bug:?}: {e}"),
            Ok(()) => panic!("{bug:?} was not found"),
        }
    }
}
