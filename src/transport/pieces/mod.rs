//! Reading by asking: the part that sockets and UCX's messages share.
//!
//! The reader never sends addresses. It names its slots once ([`crate::wire::DataOpen`]), from which the
//! source derives the very same copies out of its own publication, and then asks for pieces of
//! them by position ([`crate::wire::DataRead`]), several at a time. The source answers each with the
//! bytes in the order of the copies, and then says whether the lease held after the last one had been
//! read. How the answers travel is each transport's: a [`Carrier`].

mod ranges;
mod reader;
mod source;

pub(in crate::transport) use ranges::{Ranges, Walk};
pub(in crate::transport) use reader::{Asking, Placed, place, refusal};
pub(in crate::transport) use source::{Carrier, serve};
pub use source::{Opened, Serving, Source};

/// Bytes asked for at a time: what one gathered send takes.
pub(in crate::transport) const BATCH_BYTES: u64 = 1 << 20;
/// Batches that are asked for before the first one has come.
pub(in crate::transport) const PIPELINE: usize = 4;
/// Longest error text that is sent or looked at.
pub(in crate::transport) const MAX_TEXT: usize = 4096;
