//! The handoff protocol as a [stateright] model: the library's own session machines in the world
//! that the random tests use too.

#[path = "../../tests/session_world/mod.rs"]
pub mod world;

pub mod checks;

use stateright::{Model, Property};
use world::{Config, Step, World, property};

/// A world of a given size.
#[derive(Clone, Debug)]
pub struct Handoff(pub Config);

impl Model for Handoff {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(&self.0)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        *steps = world.steps(&self.0);
    }

    fn next_state(&self, world: &World, step: Step) -> Option<World> {
        let mut next = world.clone();
        next.apply(&self.0, step);
        next.seen.clear();
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn holds(model: &Handoff, world: &World, name: &str) -> bool {
            !world.violations(&model.0).contains(name)
        }
        vec![
            Property::always(property::RIGHT_BYTES, |m, w| {
                holds(m, w, property::RIGHT_BYTES)
            }),
            Property::always(property::NO_LIVE_WRITER, |m, w| {
                holds(m, w, property::NO_LIVE_WRITER)
            }),
            Property::always(property::ENDS_ONCE, |m, w| holds(m, w, property::ENDS_ONCE)),
            Property::always(property::DEADLINE, |m, w| holds(m, w, property::DEADLINE)),
            Property::always(property::ALL_FINISHED, |m, w| {
                holds(m, w, property::ALL_FINISHED)
            }),
            Property::always(property::NOTICE, |m, w| holds(m, w, property::NOTICE)),
        ]
    }
}
