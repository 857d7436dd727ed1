//! Messages: the reader asks, the source answers ([`crate::transport::pieces`]), by UCX's active messages.
//!
//! Nothing is registered and no address crosses the wire. A reader's hello carries the token that the
//! source gave it over the control link, its own UCX address and a secret; asks carry the token, answers
//! the secret, so that strangers who reach the port can neither ask nor answer.
//!
//! Answers are cut into messages of one eager fragment each, which UCX hands over where it received them;
//! the callback copies them into place. So the destination is written under its [`Channel`]'s lock only,
//! and whoever closes the channel knows that it is quiet, whatever the peer does.

mod channel;
mod connection;
mod incoming;
mod message;
mod path;
mod small;

pub use connection::Connection;
pub use incoming::{Accept, Hello, Incoming};
pub use message::Message;
pub use path::{MessagePath, MessageSource};

use channel::Channel;

/// Bytes of a token, of a secret.
pub const KEY_BYTES: usize = 16;

/// Bytes of the destination that one message carries at most.
const MESSAGE_BYTES: usize = 256 << 10;

/// Segment size of UCX's TCP, for [`MESSAGE_BYTES`] with all headers: with its own, smaller one a message
/// would be cut into fragments, assembled and copied once more.
pub const SEGMENT: &str = "260k";

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
