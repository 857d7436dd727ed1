//! Bytes through UCX: messages, or gets where a card reads the peer's memory by itself.
//!
//! [`Library`] is libucp, opened when it is first needed. `ucx_sys` holds the declarations of its
//! calls, made by `scripts/ucx-bindings`.

mod am;
mod endpoint;
mod engine;
mod library;
mod progress;
mod rma;
mod signals;
mod ucx_sys;
mod workers;

pub use am::{Accept, Connection, MessagePath, MessageSource};
pub use engine::{Config, Engine, hardware_rma, has_card, knows_cuda};
pub use library::{LIBRARY_VARIABLE, Library};
pub use rma::{DEVICE_LANES, Region, Source, SourcePool, UcxPath};

#[cfg(test)]
#[cfg(not(miri))]
pub(crate) mod tests;
