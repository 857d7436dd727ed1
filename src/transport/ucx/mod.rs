//! Bytes through UCX: `ucp_get` out of the peer's registered memory.
//!
//! [`Library`] is libucp, opened when it is first needed. `ucx_sys` holds the declarations of its
//! calls, made by `scripts/ucx-bindings`.

mod library;
mod signals;
mod ucx_sys;

pub use library::{LIBRARY_VARIABLE, Library};

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
