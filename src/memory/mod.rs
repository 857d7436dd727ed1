//! Registered memory ranges and shareable pools.
//!
//! * [`Pool`]: memory of this process that transfers read from or write to, either made by kvferry
//!   (a sealed memfd that peers may map) or owned by the engine.
//! * [`Mapping`]: a peer's shared pool, read-only in this process.
//! * [`LeaseTable`] / [`LeaseView`]: the words that say whether a publication's slots still hold
//!   what was published, on the source's and on the reader's side.
//!
//! Bytes that another process may change are only ever reached through raw pointers and atomics;
//! no reference to them is formed.

mod available;
mod check;
mod lease;
mod mapping;
mod memfd;
mod pool;
mod region;

pub use lease::{LEASE_HEAD_BYTES, Lease, LeaseTable, LeaseView, NONCE_BYTES};
pub use mapping::Mapping;
pub use memfd::PageSize;
pub use pool::{Entered, Guard, OnDevice, Pool, PoolKind};

#[cfg(test)]
mod lease_tests;
#[cfg(test)]
mod tests;
