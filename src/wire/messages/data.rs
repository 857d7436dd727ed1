//! Messages on data connections.

use prost::Message;

use super::KeyMessage;

/// What an open data connection is for: which control link it belongs to.
#[derive(Clone, PartialEq, Message)]
pub struct DataHello {
    /// The token of the [`super::Memory`] message.
    #[prost(bytes = "vec", tag = "3")]
    pub token: Vec<u8>,
    /// Over UCX: what answers are to begin with.
    #[prost(bytes = "vec", tag = "4")]
    pub secret: Vec<u8>,
    /// Over UCX: of the reader's worker.
    #[prost(bytes = "vec", tag = "5")]
    pub address: Vec<u8>,
    /// Over UCX: the number that the answer to this bears.
    #[prost(uint64, tag = "6")]
    pub job: u64,
    /// Over UCX: the connections that there were do not answer; make a new one.
    #[prost(bool, tag = "7")]
    pub anew: bool,
}

/// What a reader reads on a data connection: enough for the source to derive the same copies.
#[derive(Clone, PartialEq, Message)]
pub struct DataOpen {
    /// Number of the job on this connection.
    #[prost(uint64, tag = "1")]
    pub job: u64,
    /// Request and attempt.
    #[prost(message, optional, tag = "2")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Paged groups, then states, in the reader's order.
    #[prost(message, repeated, tag = "4")]
    pub parts: Vec<DataPart>,
}

/// One group or state of a reader.
#[derive(Clone, PartialEq, Message)]
pub struct DataPart {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// A state slot, not a paged group.
    #[prost(bool, tag = "2")]
    pub state: bool,
    /// The reader's slots; see [`crate::wire::pack_slots`].
    #[prost(bytes = "vec", tag = "3")]
    pub slots: Vec<u8>,
    /// Block ordinal from which `slots` counts.
    #[prost(uint64, tag = "4")]
    pub first_ordinal: u64,
    /// First wanted token.
    #[prost(uint64, tag = "5")]
    pub skip_token: u64,
    /// End of the wanted tokens; of a state: as of which token.
    #[prost(uint64, tag = "6")]
    pub token_end: u64,
}

/// Some pieces of an opened job, please.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct DataRead {
    /// Number of the job on this connection.
    #[prost(uint64, tag = "1")]
    pub job: u64,
    /// Index of the binding.
    #[prost(uint32, tag = "2")]
    pub binding: u32,
    /// Position in it: piece, segment, bytes taken.
    #[prost(uint64, tag = "3")]
    pub piece: u64,
    /// See `piece`.
    #[prost(uint64, tag = "4")]
    pub segment: u64,
    /// See `piece`.
    #[prost(uint64, tag = "5")]
    pub taken: u64,
    /// As many bytes as this at most.
    #[prost(uint64, tag = "6")]
    pub max_bytes: u64,
}

/// The job is over.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct DataClose {
    /// Number of the job on this connection.
    #[prost(uint64, tag = "1")]
    pub job: u64,
}
