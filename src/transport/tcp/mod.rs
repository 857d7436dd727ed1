//! Bytes through a stream socket: TCP, or a Unix socket where shared memory is refused.
//!
//! The reader never sends addresses. It names its slots once ([`crate::wire::DataOpen`]), from which the
//! source derives the very same copies out of its own publication, and then asks for pieces of
//! them by position ([`crate::wire::DataRead`]), several at a time. The source answers each with a head,
//! the bytes in the order of the copies, and a trailer that says whether the lease held after the
//! last byte had been handed to the kernel.
//!
//! Answer head, little-endian: status (4), bytes of error text (4), bytes of data (8). Trailer: 1
//! if the lease held (4).

mod client;
mod server;
mod stream;

pub use client::{Connect, TcpPath};
pub use server::{Opened, Serving, Source, serve};
pub use stream::{Stream, Until};

/// Bytes asked for at a time: what one gathered send takes.
const BATCH_BYTES: u64 = 1 << 20;
/// Batches that are asked for before the first one has come.
const PIPELINE: usize = 4;
const HEAD_BYTES: usize = 16;
const TRAILER_BYTES: usize = 4;
/// Longest error text that is looked at.
const MAX_TEXT: usize = 4096;
