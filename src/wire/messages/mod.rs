//! The messages. Field numbers are never reused; a newer peer's unknown fields are skipped.

mod data;
mod handoff;
mod link;
mod memory;
mod metadata;
mod ticket;

use prost::{Message, Oneof};

pub use data::*;
pub use handoff::*;
pub use link::*;
pub use memory::*;
pub use metadata::*;
pub use ticket::*;

/// Protocol version that both sides must share.
pub const PROTOCOL: u32 = 2;

/// One control message.
#[derive(Clone, PartialEq, Message)]
pub struct Frame {
    /// What it says.
    #[prost(
        oneof = "Body",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 30, 31, 32, 33, 40, 41, 42"
    )]
    pub body: Option<Body>,
}

/// The kinds of control messages.
#[derive(Clone, PartialEq, Oneof)]
pub enum Body {
    /// Control link, once it is open: who connects.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// The answer to a hello.
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    /// The other answer; the link is closed after it.
    #[prost(message, tag = "3")]
    Refuse(Refuse),
    /// A reader wants to map the other side's memory.
    #[prost(message, tag = "4")]
    MemoryRequest(MemoryRequest),
    /// What can be mapped; file descriptors travel beside it.
    #[prost(message, tag = "5")]
    Memory(Memory),
    /// Nothing to say, still alive.
    #[prost(message, tag = "6")]
    Heartbeat(Heartbeat),
    /// A reader has begun (or, unanswered so far, wants to know what was published).
    #[prost(message, tag = "7")]
    Claim(Claim),
    /// What was published under a key.
    #[prost(message, tag = "8")]
    Published(Published),
    /// A reader is still at it, or still has the request queued.
    #[prost(message, tag = "9")]
    Renew(Renew),
    /// A reader has finished, in success or failure. Re-sent until acknowledged.
    #[prost(message, tag = "10")]
    Finished(Finished),
    /// The source has noted it.
    #[prost(message, tag = "11")]
    FinishedAck(FinishedAck),
    /// The source's publication ended before this reader had finished.
    #[prost(message, tag = "12")]
    Ended(Ended),
    /// A sender's slots for an offer: please fetch them.
    #[prost(message, tag = "13")]
    Push(Push),
    /// The receiver's answer to a push that it cannot serve, or the end of its offer.
    #[prost(message, tag = "14")]
    OfferEnded(OfferEnded),
    /// The agent is leaving in an orderly way.
    #[prost(message, tag = "15")]
    Goodbye(Goodbye),
    /// Opaque bytes for another room (consensus votes).
    #[prost(message, tag = "16")]
    Group(GroupMessage),
    /// Data connection, once it is open: what for.
    #[prost(message, tag = "17")]
    DataHello(DataHello),
    /// Data connection: a job begins.
    #[prost(message, tag = "18")]
    DataOpen(DataOpen),
    /// Data connection: send these pieces.
    #[prost(message, tag = "19")]
    DataRead(DataRead),
    /// Data connection: a job is over.
    #[prost(message, tag = "20")]
    DataClose(DataClose),
    /// First message of whoever connects, on every connection.
    #[prost(message, tag = "30")]
    Open(Open),
    /// Prove that you know the key.
    #[prost(message, tag = "31")]
    Challenge(Challenge),
    /// The proof of who connects.
    #[prost(message, tag = "32")]
    Proof(Proof),
    /// The connection is open; with the answering side's proof.
    #[prost(message, tag = "33")]
    Accepted(Accepted),
    /// What was published may be read: the source's stream has come so far.
    #[prost(message, tag = "40")]
    Readable(Readable),
    /// The source wants to free a pool that the reader has mapped.
    #[prost(message, tag = "41")]
    Unmap(Unmap),
    /// The reader has unmapped it.
    #[prost(message, tag = "42")]
    Unmapped(Unmap),
}
