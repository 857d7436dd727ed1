//! kvferry hands a sequence's KV cache and recurrent state from the process that prefilled it to
//! the process that decodes it.
//!
//! The product is the C ABI in [`ffi`]; everything below it is the core. `docs/architecture.md`
//! says which module may use which.

pub mod error;
pub mod ids;
pub mod memory;
pub mod copy;
pub mod layout;
pub mod plan;
