//! Messages about one handoff.

use prost::Message;

use super::TicketEntry;

/// A publication whose stream has come so far.
#[derive(Clone, PartialEq, Message)]
pub struct Readable {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// Request and attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct KeyMessage {
    /// Request id.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}

/// A reader's first contact.
#[derive(Clone, PartialEq, Message)]
pub struct Claim {
    /// What it reads.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication; 0 = the reader has no ticket of this rank: answer with [`Published`],
    /// now or when it is published.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// Answer to a claim without an epoch.
#[derive(Clone, PartialEq, Message)]
pub struct Published {
    /// What was asked for.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// This rank's entry.
    #[prost(message, optional, tag = "2")]
    pub entry: Option<TicketEntry>,
}

/// The reader is alive.
#[derive(Clone, PartialEq, Message)]
pub struct Renew {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// The reader's end.
#[derive(Clone, PartialEq, Message)]
pub struct Finished {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// A `kvf_status`: `KVF_OK`, or why not.
    #[prost(sint32, tag = "3")]
    pub status: i32,
    /// Bytes that the reader took from this source.
    #[prost(uint64, tag = "4")]
    pub bytes: u64,
}

/// The source has noted a [`Finished`].
#[derive(Clone, PartialEq, Message)]
pub struct FinishedAck {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// The source's end.
#[derive(Clone, PartialEq, Message)]
pub struct Ended {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication; 0 = the claim named none.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// A `kvf_status`.
    #[prost(sint32, tag = "3")]
    pub status: i32,
    /// For people.
    #[prost(string, tag = "4")]
    pub text: String,
}

/// A sender's part of a push: the receiver fetches it into the slots it offered.
#[derive(Clone, PartialEq, Message)]
pub struct Push {
    /// The receiver's offer.
    #[prost(uint64, tag = "1")]
    pub offer: u64,
    /// The sender's ticket.
    #[prost(bytes = "vec", tag = "2")]
    pub ticket: Vec<u8>,
}

/// An offer is over.
#[derive(Clone, PartialEq, Message)]
pub struct OfferEnded {
    /// The receiver's offer.
    #[prost(uint64, tag = "1")]
    pub offer: u64,
    /// Request and attempt of the push.
    #[prost(message, optional, tag = "2")]
    pub key: Option<KeyMessage>,
    /// The sender's publication.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// A `kvf_status`.
    #[prost(sint32, tag = "4")]
    pub status: i32,
    /// For people.
    #[prost(string, tag = "5")]
    pub text: String,
}
