//! Bytes through UCX: `ucp_get` out of the peer's registered memory.
//!
//! [`Library`] is libucp, opened when it is first needed. `ucx_sys` holds the declarations of its
//! calls, made by `scripts/ucx-bindings`.

mod endpoint;
mod engine;
mod flight;
mod library;
mod path;
mod progress;
mod signals;
mod ucx_sys;

pub use engine::{Config, Engine, hardware_rma, has_card};
pub use flight::Region;
pub use library::{LIBRARY_VARIABLE, Library};
pub use path::{Source, UcxPath};

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
