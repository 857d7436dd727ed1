//! Bytes through a stream socket: TCP, or a Unix socket where shared memory is refused.
//!
//! The source answers each ask ([`super::pieces`]) with a head, the bytes in the order of the copies,
//! and a trailer that says whether the lease held after the last byte had been handed to the kernel.
//!
//! Answer head, little-endian: status (4), bytes of error text (4), bytes of data (8). Trailer: 1
//! if the lease held (4).

mod client;
mod connect;
mod server;
mod stream;

#[cfg(test)]
#[cfg(not(miri))]
mod tests;

pub use client::{Connect, TcpPath};
pub use server::serve;
pub use stream::{Stream, Until};

const HEAD_BYTES: usize = 16;
const TRAILER_BYTES: usize = 4;
