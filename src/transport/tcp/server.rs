//! The source's end: one named thread for each data connection.

use std::cell::RefCell;
use std::io;

use super::HEAD_BYTES;
use super::stream::{Patience, Stream};
use crate::error::Result;
use crate::transport::pieces::{self, Carrier, Ranges, Serving, Source, Walk};
use crate::wire::Decoder;

/// Answers up to this many bytes are one message: a copy costs less than two more calls, and the
/// reader is woken once.
const ONE_MESSAGE: u64 = 32 << 10;

/// Serves a connection, whose hello has been answered, until its end.
///
/// # Errors
/// The connection broke, or its reader does not speak the protocol.
pub fn serve(stream: &Stream, source: &dyn Source, limits: Serving) -> Result<()> {
    let connection = Connection {
        stream,
        limits,
        buffer: RefCell::new(vec![0; 64 << 10]),
    };
    pieces::serve(&connection, source, limits.stall)
}

struct Connection<'a> {
    stream: &'a Stream,
    limits: Serving,
    buffer: RefCell<Vec<u8>>,
}

impl Connection<'_> {
    fn patience(&self) -> Patience<'_> {
        Patience {
            spin: self.limits.spin,
            wake: None,
            stall: Some(self.limits.stall),
        }
    }
}

impl Carrier for Connection<'_> {
    fn hear(&self, decoder: &mut Decoder, wait: bool) -> io::Result<bool> {
        let patience = Patience {
            stall: None, // shutting the socket down wakes us
            ..self.patience()
        };
        let mut bytes = self.buffer.borrow_mut();
        let n = match wait {
            true => self.stream.receive_next(&mut bytes, patience)?,
            false => self.stream.receive_available(&mut bytes)?,
        };
        decoder.push(&bytes[..n]);
        Ok(n > 0)
    }

    unsafe fn answer(
        &self,
        _: u64,
        bytes: u64,
        ranges: &mut Ranges,
        held: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let mut head = [0; HEAD_BYTES];
        head[8..].copy_from_slice(&bytes.to_le_bytes());
        let mut trailer = || u32::from(held()).to_le_bytes();
        if bytes <= ONE_MESSAGE {
            let mut whole = head.to_vec();
            // SAFETY: readable by contract.
            unsafe { ranges.read(&mut Walk::default(), bytes as usize, &mut whole) };
            whole.extend_from_slice(&trailer());
            return self.stream.send(&whole, self.patience());
        }
        self.stream.send(&head, self.patience())?;
        // SAFETY: as above.
        unsafe { self.stream.send_ranges(ranges, self.patience()) }?;
        self.stream.send(&trailer(), self.patience())
    }

    fn refuse(&self, _: u64, status: i32, text: &[u8]) -> io::Result<()> {
        let mut out = Vec::with_capacity(HEAD_BYTES + text.len());
        out.extend_from_slice(&status.to_le_bytes());
        out.extend_from_slice(&(text.len() as u32).to_le_bytes());
        out.extend_from_slice(&0u64.to_le_bytes());
        out.extend_from_slice(text);
        self.stream.send(&out, self.patience())
    }
}
