//! kvferry hands a sequence's KV cache and recurrent state from the process that prefilled it to
//! the process that decodes it.
//!
//! The product is the C ABI in [`ffi`]; everything below it is the core. `docs/architecture.md`
//! says which module may use which.

pub mod agent;
pub mod copy;
pub mod cuda;
pub mod error;
pub mod ffi;
pub mod ids;
pub mod layout;
pub mod memory;
pub mod observe;
pub mod plan;
pub mod runtime;
pub mod session;
pub mod transceiver;
pub mod transport;
pub mod wire;
