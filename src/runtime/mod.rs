//! Threads, timers, the event queue and its file descriptor.

mod events;
pub mod marks;
mod thread;
mod workers;

pub use events::EventQueue;
pub use thread::{Thread, check_affinity, spawn};
pub use workers::Workers;
