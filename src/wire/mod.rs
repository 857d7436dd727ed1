//! Bytes between agents: framed control messages, engine metadata, tickets.
//!
//! Everything is length-prefixed, versioned and bounded; unknown fields are skipped (prost). No
//! I/O here, and no meaning: the agent converts messages to its own types.

mod frame;
mod messages;
mod slots;
pub mod votes;

pub use frame::{Decoder, MAX_FRAME, encode};
pub use messages::*;
pub use slots::{pack_slots, unpack_slots};
