//! Threads, timers, the event queue and its file descriptor.

mod events;
mod level;
mod readable;
pub(crate) mod sync;
mod thread;
mod wake;
mod workers;

pub use events::EventQueue;
pub use readable::readable;
pub use thread::{Thread, check_affinity, spawn};
pub use wake::Wake;
pub use workers::{Workers, stalled};
