//! Tickets and offers: the bytes that travel with a request.

use prost::Message;
use prost::bytes::Bytes;

use crate::error::Result;
use crate::ids::{Incarnation, Key};
use crate::wire::{self, KeyMessage, OFFER_MAGIC, TICKET_HEAD, TICKET_MAGIC};
use crate::{bail, err};

/// Longest ticket or offer that is looked at.
const MAX_BYTES: usize = 8 << 20;
/// Version of both formats.
const MAJOR: u8 = 1;

impl From<Key> for KeyMessage {
    fn from(key: Key) -> Self {
        Self {
            request: key.request,
            attempt: key.attempt,
        }
    }
}

impl From<KeyMessage> for Key {
    fn from(key: KeyMessage) -> Self {
        Self {
            request: key.request,
            attempt: key.attempt,
        }
    }
}

/// The key of a message, all of which have one.
pub(super) fn key(message: Option<KeyMessage>) -> Key {
    message.map(Key::from).unwrap_or_default()
}

pub(super) fn encode_ticket(ticket: &wire::Ticket) -> Vec<u8> {
    encode(TICKET_MAGIC, ticket)
}

pub(super) fn encode_offer(offer: &wire::Offer) -> Vec<u8> {
    encode(OFFER_MAGIC, offer)
}

fn encode(magic: [u8; 4], message: &impl Message) -> Vec<u8> {
    let mut out = Vec::with_capacity(TICKET_HEAD + message.encoded_len());
    out.extend_from_slice(&magic);
    out.push(MAJOR);
    out.extend_from_slice(&(message.encoded_len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    message.encode_raw(&mut out);
    let sum = crc32fast::hash(&out[TICKET_HEAD..]);
    out[9..TICKET_HEAD].copy_from_slice(&sum.to_le_bytes());
    out
}

/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for bytes that are no ticket, `KVF_ERR_ABI_MISMATCH` for a ticket of
/// another major version.
pub(super) fn decode_ticket(bytes: impl Into<Bytes>) -> Result<wire::Ticket> {
    decode("ticket", TICKET_MAGIC, bytes.into())
}

/// As [`decode_ticket`], for an offer.
pub(super) fn decode_offer(bytes: &[u8]) -> Result<wire::Offer> {
    decode("offer", OFFER_MAGIC, Bytes::copy_from_slice(bytes))
}

fn decode<M: Message + Default>(what: &str, magic: [u8; 4], bytes: Bytes) -> Result<M> {
    let Some((head, _)) = bytes.split_at_checked(TICKET_HEAD) else {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{} bytes are no {what}",
            bytes.len()
        );
    };
    if head[..4] != magic || bytes.len() > MAX_BYTES {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{} bytes are no {what}: they do not start as one does",
            bytes.len()
        );
    }
    if head[4] != MAJOR {
        bail!(
            KVF_ERR_ABI_MISMATCH,
            "the {what} has version {}, this library reads {MAJOR}",
            head[4]
        );
    }
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let len = number(5) as usize;
    let body = bytes.slice(TICKET_HEAD..);
    if len != body.len() {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the {what} of {} bytes says it has {len}: it was cut or damaged",
            body.len()
        );
    }
    // A changed slot number would still decode, and the reader take another request's block.
    if crc32fast::hash(&body) != number(9) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the {what} of {len} bytes is damaged: its checksum does not fit"
        );
    }
    M::decode(body).map_err(|e| err!(KVF_ERR_INVALID_ARGUMENT, "damaged {what}: {e}"))
}

/// The entry of one source rank.
pub(super) fn entry_of(ticket: &wire::Ticket, source: Incarnation) -> Option<&wire::TicketEntry> {
    ticket
        .entries
        .iter()
        .find(|entry| entry.incarnation == source.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status::*;
    use proptest::prelude::*;

    #[test]
    fn a_cut_or_foreign_ticket_is_refused() {
        let ticket = wire::Ticket {
            aux: vec![7; 20],
            ..wire::Ticket::default()
        };
        let bytes = encode_ticket(&ticket);
        assert_eq!(decode_ticket(bytes.clone()).unwrap(), ticket);
        for cut in 0..bytes.len() {
            let err = decode_ticket(bytes[..cut].to_vec()).unwrap_err();
            assert_eq!(err.status, KVF_ERR_INVALID_ARGUMENT, "{cut}: {err}");
        }
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            decode_ticket(changed).expect_err("a changed bit");
        }
        assert_eq!(
            decode_offer(&bytes).unwrap_err().status,
            KVF_ERR_INVALID_ARGUMENT
        );
        let mut newer = bytes;
        newer[4] = 2;
        assert_eq!(
            decode_ticket(newer).unwrap_err().status,
            KVF_ERR_ABI_MISMATCH
        );
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut ticket = TICKET_MAGIC.to_vec();
            ticket.push(MAJOR);
            ticket.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            ticket.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
            ticket.extend_from_slice(&bytes);
            let _ = decode_ticket(ticket);
            let _ = decode_ticket(bytes);
        }
    }
}
