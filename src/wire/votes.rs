//! Bytes of the consensus: ballots from ranks to the leader, decisions that the engine
//! broadcasts, and the lists of a collective exchange.
//!
//! Decisions leave the library and come back through the engine, so they carry their own head:
//! four bytes that say what they are and one version byte.

use prost::Message;

use crate::error::Result;
use crate::{bail, err};

/// Longest accepted message; 65536 entries fit.
pub const MAX_BYTES: usize = 4 << 20;

const VERSION: u8 = 1;

/// A message with its own head.
pub trait Headed: Message + Default {
    /// The first four bytes.
    const MAGIC: [u8; 4];
    /// What it is called in errors.
    const NAME: &'static str;

    /// Head and body.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(5 + self.encoded_len());
        bytes.extend_from_slice(&Self::MAGIC);
        bytes.push(VERSION);
        bytes.extend_from_slice(&self.encode_to_vec());
        bytes
    }

    /// Reads what [`Self::to_bytes`] wrote.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT`: other bytes, cut or too long; `KVF_ERR_ABI_MISMATCH`: written
    /// by a version that does not fit.
    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > MAX_BYTES {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} of {} bytes, the longest is {MAX_BYTES}",
                Self::NAME,
                bytes.len()
            );
        }
        let Some((magic, [version, body @ ..])) = bytes.split_first_chunk::<4>() else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} of {} bytes is cut; pass all bytes that the status call returned",
                Self::NAME,
                bytes.len()
            );
        };
        if *magic != Self::MAGIC {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "expected {}, which starts with {:02x?}, got bytes that start with {magic:02x?}",
                Self::NAME,
                Self::MAGIC
            );
        }
        if *version != VERSION {
            bail!(
                KVF_ERR_ABI_MISMATCH,
                "{} of version {version}, this library reads version {VERSION}; run the same \
                 kvferry on every rank",
                Self::NAME
            );
        }
        Self::decode(body).map_err(|e| {
            err!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} cannot be read: {e}",
                Self::NAME
            )
        })
    }
}

/// A vote, an entry of the log or a line of a list.
#[derive(Clone, PartialEq, Message)]
pub struct Line {
    /// Request id.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    /// What it says; the numbers are the transceiver's.
    #[prost(uint32, tag = "3")]
    pub kind: u32,
    /// Number of the outcome, where there is one.
    #[prost(uint32, tag = "4")]
    pub outcome: u32,
    /// Status number of the cause, where there is one.
    #[prost(sint32, tag = "5")]
    pub cause: i32,
    /// The deciding rank, where there is one.
    #[prost(uint32, tag = "6")]
    pub rank: u32,
}

/// A rank's votes, in the order in which it cast them.
#[derive(Clone, PartialEq, Message)]
pub struct Votes {
    /// Scheduling domain.
    #[prost(uint64, tag = "1")]
    pub domain: u64,
    /// Rank inside the domain.
    #[prost(uint32, tag = "2")]
    pub rank: u32,
    /// 0 context, 1 generation.
    #[prost(uint32, tag = "3")]
    pub side: u32,
    /// The rank has applied every entry below this position.
    #[prost(uint64, tag = "4")]
    pub acked: u64,
    /// The votes.
    #[prost(message, repeated, tag = "5")]
    pub votes: Vec<Line>,
}

impl Headed for Votes {
    const MAGIC: [u8; 4] = *b"KVFV";
    const NAME: &'static str = "a vote message";
}

/// A run of the leader's log.
#[derive(Clone, PartialEq, Message)]
pub struct Decisions {
    /// Scheduling domain.
    #[prost(uint64, tag = "1")]
    pub domain: u64,
    /// 0 context, 1 generation.
    #[prost(uint32, tag = "2")]
    pub side: u32,
    /// Position of the first entry.
    #[prost(uint64, tag = "3")]
    pub from: u64,
    /// The entries.
    #[prost(message, repeated, tag = "4")]
    pub entries: Vec<Line>,
}

impl Headed for Decisions {
    const MAGIC: [u8; 4] = *b"KVFD";
    const NAME: &'static str = "a decision";
}

/// A rank's or a group's lists in a collective exchange.
#[derive(Clone, PartialEq, Message)]
pub struct Lists {
    /// Scheduling domain.
    #[prost(uint64, tag = "1")]
    pub domain: u64,
    /// 0 context, 1 generation.
    #[prost(uint32, tag = "2")]
    pub side: u32,
    /// Number of the exchange, so that ranks out of step are seen.
    #[prost(uint64, tag = "3")]
    pub round: u64,
    /// Cancelled requests.
    #[prost(message, repeated, tag = "4")]
    pub cancelled: Vec<Line>,
    /// Failed requests.
    #[prost(message, repeated, tag = "5")]
    pub failed: Vec<Line>,
    /// Completed requests.
    #[prost(message, repeated, tag = "6")]
    pub completed: Vec<Line>,
    /// Quiet requests.
    #[prost(message, repeated, tag = "7")]
    pub quiet: Vec<Line>,
}

impl Headed for Lists {
    const MAGIC: [u8; 4] = *b"KVFL";
    const NAME: &'static str = "a collective list";
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    fn decisions() -> Decisions {
        Decisions {
            domain: 3,
            side: 1,
            from: 1 << 40,
            entries: vec![Line {
                request: u64::MAX,
                attempt: 2,
                kind: 1,
                outcome: 2,
                cause: -24,
                rank: 5,
            }],
        }
    }

    #[test]
    fn decisions_come_back_as_they_were() {
        let bytes = decisions().to_bytes();
        assert_eq!(&bytes[..5], b"KVFD\x01");
        assert_eq!(Decisions::from_bytes(&bytes).unwrap(), decisions());
    }

    #[test]
    fn other_bytes_are_refused_with_their_reason() {
        let bytes = decisions().to_bytes();
        let refused = |bytes: &[u8]| Decisions::from_bytes(bytes).unwrap_err();
        assert!(refused(&bytes[..4]).text.contains("cut"));
        assert_eq!(
            refused(&bytes[..bytes.len() - 1]).status,
            Status::KVF_ERR_INVALID_ARGUMENT
        );
        let mut newer = bytes.clone();
        newer[4] = 9;
        assert_eq!(refused(&newer).status, Status::KVF_ERR_ABI_MISMATCH);
        assert!(
            refused(&Votes::default().to_bytes())
                .text
                .starts_with("expected a decision")
        );
        assert_eq!(
            refused(&vec![0; MAX_BYTES + 1]).status,
            Status::KVF_ERR_INVALID_ARGUMENT
        );
    }

    #[test]
    fn fields_of_a_newer_library_are_skipped() {
        let mut bytes = decisions().to_bytes();
        bytes.extend_from_slice(&[0xF8, 0x06, 0x01]); // field 111, varint
        assert_eq!(Decisions::from_bytes(&bytes).unwrap(), decisions());
    }
}
