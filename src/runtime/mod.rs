//! Threads, timers, the event queue and its file descriptor.

mod bell;
mod events;
mod level;
mod readable;
pub(crate) mod sync;
mod thread;
mod wake;
mod workers;

pub use bell::{Bell, wait_readable};
pub use events::EventQueue;
pub use readable::readable;
pub use thread::{Thread, check_affinity, spawn};
pub use wake::Wake;
pub use workers::{STALL_AFTER, Workers, can_stall, stalled};
