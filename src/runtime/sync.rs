//! The lock types of what `models/` checks with loom, which brings its own.

pub use std::sync::atomic::AtomicI32;
pub use std::sync::{Condvar, Mutex, MutexGuard};
