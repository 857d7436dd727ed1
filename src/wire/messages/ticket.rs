//! Tickets and offers, which travel through the engines' hands.

use prost::Message;
use prost::bytes::Bytes;

use super::KeyMessage;

/// Bytes at the start of a ticket.
pub const TICKET_MAGIC: [u8; 4] = *b"KVFT";
/// Bytes at the start of an offer.
pub const OFFER_MAGIC: [u8; 4] = *b"KVFO";
/// Bytes before the message of a ticket or offer: magic, version, its length, its CRC-32.
pub const TICKET_HEAD: usize = 13;

/// What travels with a request.
#[derive(Clone, PartialEq, Message)]
pub struct Ticket {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// The publishing engine.
    #[prost(bytes = "vec", tag = "2")]
    pub engine: Vec<u8>,
    /// Which attention-data-parallel index of it.
    #[prost(uint32, tag = "3")]
    pub dp_rank: u32,
    /// At least the publishing rank's entry; others are asked for theirs.
    #[prost(message, repeated, tag = "4")]
    pub entries: Vec<TicketEntry>,
    /// The caller's bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub aux: Vec<u8>,
    /// Hash of the last block before the published ones; 0 = none.
    #[prost(uint64, tag = "6")]
    pub prefix_tag: u64,
    /// Lease, in nanoseconds: how often a reader must renew.
    #[prost(uint64, tag = "7")]
    pub lease_ns: u64,
}

/// One source rank's publication.
#[derive(Clone, PartialEq, Message)]
pub struct TicketEntry {
    /// Global rank.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// The agent.
    #[prost(bytes = "vec", tag = "2")]
    pub incarnation: Vec<u8>,
    /// Which publication of the key.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Lease word.
    #[prost(uint32, tag = "4")]
    pub lease_index: u32,
    /// What it says while the lease holds.
    #[prost(uint64, tag = "5")]
    pub lease_generation: u64,
    /// Paged groups.
    #[prost(message, repeated, tag = "6")]
    pub groups: Vec<TicketGroup>,
    /// State slots.
    #[prost(message, repeated, tag = "7")]
    pub states: Vec<TicketState>,
    /// Not to be read before the source has sent [`super::Readable`]; a claim asks for it.
    #[prost(bool, tag = "20")]
    pub gated: bool,
}

/// Blocks of one group.
#[derive(Clone, PartialEq, Message)]
pub struct TicketGroup {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// Block of each owned ordinal, -1 = not held; see [`crate::wire::pack_slots`]. A part of the ticket
    /// it came in: a table is long, and the caller waits.
    #[prost(bytes = "bytes", tag = "2")]
    pub slots: Bytes,
    /// First valid token.
    #[prost(uint64, tag = "3")]
    pub token_begin: u64,
    /// End of the valid tokens.
    #[prost(uint64, tag = "4")]
    pub token_end: u64,
    /// Block ordinal from which `slots` counts.
    #[prost(uint64, tag = "5")]
    pub first_ordinal: u64,
}

/// One state slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct TicketState {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// Slot.
    #[prost(sint32, tag = "2")]
    pub slot: i32,
    /// After this many tokens.
    #[prost(uint64, tag = "3")]
    pub as_of_token: u64,
}

/// A receiver's slots, on their way to the sender.
#[derive(Clone, PartialEq, Message)]
pub struct Offer {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// The receiving engine.
    #[prost(bytes = "vec", tag = "2")]
    pub engine: Vec<u8>,
    /// The receiving rank.
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    /// The receiving agent.
    #[prost(bytes = "vec", tag = "4")]
    pub incarnation: Vec<u8>,
    /// Its id of the offer.
    #[prost(uint64, tag = "5")]
    pub offer: u64,
    /// What it wants.
    #[prost(message, repeated, tag = "6")]
    pub groups: Vec<OfferGroup>,
    /// Groups of the states it wants.
    #[prost(uint32, repeated, tag = "7")]
    pub states: Vec<u32>,
}

/// Tokens that a receiver wants of one group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct OfferGroup {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// First wanted token.
    #[prost(uint64, tag = "2")]
    pub skip_token: u64,
    /// End of the wanted tokens.
    #[prost(uint64, tag = "3")]
    pub token_end: u64,
}
