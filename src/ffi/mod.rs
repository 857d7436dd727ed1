//! The C ABI: every `extern "C"` function and `#[repr(C)]` type, one file per object.
//!
//! A function here checks pointers, builds views, calls the core and translates the result;
//! there is no logic. The rules that hold for every function are written once, in `docs/abi.md`;
//! a doc comment says only what differs.
//!
//! How to add one: write the function out (cbindgen does not see what a macro makes), its body in
//! [`boundary::guard`], its structs through [`structs`] with an `abi_struct!` line, then run
//! `KVF_UPDATE_HEADER=1 cargo test --test header`.

#![allow(non_camel_case_types)] // the C names are the names
#![allow(rustdoc::broken_intra_doc_links)] // Doxygen's `@param[out]` is no link

mod agent;
pub(crate) mod boundary;
pub(crate) mod checks;
mod cuda;
mod engine;
mod event;
pub(crate) mod handle;
mod import;
mod layout;
mod log;
mod peer;
mod plan;
mod pool;
mod publication;
mod push;
mod status;
#[allow(dead_code)] // a tool box: each object's file takes its part
pub(crate) mod structs;
mod testing;
mod transceiver;
mod transceiver_config;
mod transceiver_push;
mod transceiver_record;
mod transceiver_request;
mod transceiver_status;
mod transfer;
mod version;

pub use crate::error::kvf_status;
pub use agent::*;
pub use cuda::*;
pub use engine::*;
pub use event::*;
pub use import::*;
pub use layout::*;
pub use log::*;
pub use peer::*;
pub use plan::*;
pub use pool::*;
pub use publication::*;
pub use push::*;
pub use status::*;
#[cfg(feature = "testing")]
pub use testing::*;
pub use transceiver::*;
pub use transceiver_config::*;
pub use transceiver_push::*;
pub use transceiver_record::*;
pub use transceiver_request::*;
pub use transceiver_status::*;
pub use transfer::*;
pub use version::*;
