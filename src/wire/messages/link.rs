//! Messages about the link itself, and those between the ranks of one engine.

use prost::Message;

/// A connection's first message: small, so that a stranger costs little. See [`crate::wire::opening`].
#[derive(Clone, PartialEq, Message)]
pub struct Open {
    /// [`super::PROTOCOL`].
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// 1 control link, 2 data connection.
    #[prost(uint32, tag = "2")]
    pub purpose: u32,
    /// The connecting agent.
    #[prost(bytes = "vec", tag = "3")]
    pub incarnation: Vec<u8>,
    /// The agent that must answer.
    #[prost(bytes = "vec", tag = "4")]
    pub target: Vec<u8>,
    /// 32 bytes that were never used before.
    #[prost(bytes = "vec", tag = "5")]
    pub nonce: Vec<u8>,
    /// The connecting agent has a pre-shared key.
    #[prost(bool, tag = "6")]
    pub keyed: bool,
    /// The connecting agent's name, for people; cut when it is long.
    #[prost(string, tag = "7")]
    pub name: String,
}

/// The answering side's nonce, if both have a key.
#[derive(Clone, PartialEq, Message)]
pub struct Challenge {
    /// 32 bytes that were never used before.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// The connecting side's proof.
#[derive(Clone, PartialEq, Message)]
pub struct Proof {
    /// HMAC-SHA256, 32 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub mac: Vec<u8>,
}

/// The connection is open.
#[derive(Clone, PartialEq, Message)]
pub struct Accepted {
    /// The answering side's proof, HMAC-SHA256; empty if neither side has a key.
    #[prost(bytes = "vec", tag = "1")]
    pub mac: Vec<u8>,
}

/// Who connects; its incarnation and whom it means are in [`Open`].
#[derive(Clone, PartialEq, Message)]
pub struct Hello {
    /// Its global rank.
    #[prost(uint32, tag = "4")]
    pub rank: u32,
    /// Metadata of its engine.
    #[prost(bytes = "vec", tag = "5")]
    pub engine: Vec<u8>,
    /// Its name.
    #[prost(string, tag = "6")]
    pub name: String,
}

/// The answering agent.
#[derive(Clone, PartialEq, Message)]
pub struct Welcome {
    /// [`super::PROTOCOL`].
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// The answering agent.
    #[prost(bytes = "vec", tag = "2")]
    pub incarnation: Vec<u8>,
}

/// Why the answering agent does not want to talk.
#[derive(Clone, PartialEq, Message)]
pub struct Refuse {
    /// A `kvf_status`.
    #[prost(sint32, tag = "1")]
    pub status: i32,
    /// For people.
    #[prost(string, tag = "2")]
    pub text: String,
}

/// Nothing to say.
#[derive(Clone, PartialEq, Message)]
pub struct Heartbeat {
    /// Counts up; for captures.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
}

/// Orderly end.
#[derive(Clone, PartialEq, Message)]
pub struct Goodbye {
    /// For people.
    #[prost(string, tag = "1")]
    pub text: String,
}

/// Bytes between ranks of one engine.
#[derive(Clone, PartialEq, Message)]
pub struct GroupMessage {
    /// Who they are for.
    #[prost(uint64, tag = "1")]
    pub channel: u64,
    /// The bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
    /// Place among the sender's messages to this rank, from 1; 0: only an acknowledgement.
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
    /// Everything up to this place has come.
    #[prost(uint64, tag = "4")]
    pub acked: u64,
    /// The sender's last message on this channel.
    #[prost(bool, tag = "5")]
    pub leaves: bool,
}
