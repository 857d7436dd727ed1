//! Bytes between agents: framed control messages, engine metadata, tickets.
//!
//! Everything is length-prefixed, versioned and bounded; unknown fields are skipped (prost). No
//! I/O here, and no meaning: the agent converts messages to its own types.

mod auth;
mod frame;
mod messages;
pub mod opening;
mod slots;
pub mod votes;

pub use auth::{AUTH_KEY_MAX, AUTH_KEY_MIN, AuthKey};
pub use frame::{Decoder, MAX_FRAME, decode, encode};
pub use messages::*;
pub use slots::{pack_slots, unpack_slots};
