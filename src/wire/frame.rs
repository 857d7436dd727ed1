//! A frame is a little-endian `u32` length and one `Frame` message.

use prost::Message;

use super::Frame;
use crate::bail;
use crate::error::Result;

/// Longest frame in bytes. A hello with the metadata of a large engine is well below it.
pub const MAX_FRAME: usize = 16 << 20;

/// Appends `frame` with its length to `out`.
///
/// # Errors
/// `KVF_ERR_LIMIT`: the message is longer than a peer would accept.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) -> Result<()> {
    let len = frame.encoded_len();
    if len > MAX_FRAME {
        bail!(
            KVF_ERR_LIMIT,
            "a control message of {len} bytes is over the limit of {MAX_FRAME}"
        );
    }
    out.extend_from_slice(&(len as u32).to_le_bytes());
    out.reserve(len);
    frame.encode_raw(out);
    Ok(())
}

/// Decodes what follows a frame's length.
///
/// # Errors
/// `KVF_ERR_PROTOCOL`: not a message of ours.
pub fn decode(body: &[u8]) -> Result<Frame> {
    match Frame::decode(body) {
        Ok(frame) => Ok(frame),
        Err(e) => bail!(
            KVF_ERR_PROTOCOL,
            "a frame of {} bytes is not decodable: {e}",
            body.len()
        ),
    }
}

/// Cuts a byte stream into frames. Memory grows with the bytes that have arrived, never with a
/// length that a peer merely claims.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    limit: usize,
}

impl Decoder {
    /// A decoder that refuses frames over `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self {
            buffer: Vec::new(),
            limit,
        }
    }

    /// Changes the limit, when the peer is better known.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Adds bytes that arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if it is there.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL`: too long or not decodable; the stream cannot be used any more.
    pub fn next_frame(&mut self) -> Result<Option<Frame>> {
        let Some(head) = self.buffer.first_chunk::<4>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*head) as usize;
        if len > self.limit {
            bail!(
                KVF_ERR_PROTOCOL,
                "a frame of {len} bytes is over the limit of {}",
                self.limit
            );
        }
        let Some(body) = self.buffer.get(4..4 + len) else {
            return Ok(None);
        };
        let frame = decode(body)?;
        self.buffer.drain(..4 + len);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Body, Heartbeat};
    use super::*;
    use proptest::prelude::*;

    fn heartbeat(sequence: u64) -> Frame {
        Frame {
            body: Some(Body::Heartbeat(Heartbeat { sequence })),
        }
    }

    #[test]
    fn frames_survive_any_cutting() {
        let mut bytes = Vec::new();
        for i in 0..5 {
            encode(&heartbeat(i), &mut bytes).unwrap();
        }
        for cut in 1..bytes.len() {
            let mut decoder = Decoder::new(MAX_FRAME);
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.push(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    seen.push(frame);
                }
            }
            assert_eq!(seen, (0..5).map(heartbeat).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_claimed_length_over_the_limit_is_refused_before_it_arrives() {
        let mut decoder = Decoder::new(100);
        decoder.push(&101u32.to_le_bytes());
        let err = decoder.next_frame().unwrap_err();
        assert_eq!(err.status, crate::error::Status::KVF_ERR_PROTOCOL);
        assert_eq!(err.text, "a frame of 101 bytes is over the limit of 100");
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::new(64);
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
    }
}
