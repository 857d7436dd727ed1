//! A message on its way out, and the head of an answer.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Connection, KEY_BYTES};
use crate::transport::ucx::library::Library;
use crate::transport::ucx::ucx_sys::{self as sys, ucs_status_t};

/// What a message is: UCX's number of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A reader introduces itself: a frame with [`crate::wire::DataHello`], no head.
    Hello = 1,
    /// Whole frames of a reader, or nothing: it goes; the head is its token and its secret.
    Ask = 2,
    /// Of a source: [`Head`] and bytes.
    Answer = 3,
}

pub const HEAD_BYTES: usize = 40;

/// In place of a job: the source ends the connection.
pub const END: u64 = 0;

/// Head of an answer, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The reader's.
    pub secret: [u8; KEY_BYTES],
    /// Which of its jobs.
    pub job: u64,
    /// Where the bytes begin in their batch.
    pub offset: u64,
    /// Not zero: a refusal, whose text follows.
    pub status: i32,
    /// The batch ends here.
    pub last: bool,
    /// With `last`: the lease held after every byte of the batch had been read.
    pub held: bool,
}

impl Head {
    pub fn encode(&self) -> [u8; HEAD_BYTES] {
        let mut out = [0; HEAD_BYTES];
        out[..16].copy_from_slice(&self.secret);
        out[16..24].copy_from_slice(&self.job.to_le_bytes());
        out[24..32].copy_from_slice(&self.offset.to_le_bytes());
        out[32..36].copy_from_slice(&self.status.to_le_bytes());
        let flags = u32::from(self.last) | u32::from(self.held) << 1;
        out[36..].copy_from_slice(&flags.to_le_bytes());
        out
    }

    /// `None`: not a head of ours.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; HEAD_BYTES] = bytes.try_into().ok()?;
        let (secret, rest) = bytes.split_first_chunk()?;
        let (job, rest) = rest.split_first_chunk()?;
        let (offset, rest) = rest.split_first_chunk()?;
        let (status, rest) = rest.split_first_chunk()?;
        let flags = u32::from_le_bytes(rest.try_into().ok()?);
        (flags < 4).then_some(Self {
            secret: *secret,
            job: u64::from_le_bytes(*job),
            offset: u64::from_le_bytes(*offset),
            status: i32::from_le_bytes(*status),
            last: flags & 1 != 0,
            held: flags & 2 != 0,
        })
    }
}

/// A message of ours. It stays where it is until UCX has sent it.
pub struct Message {
    pub kind: Kind,
    pub head: Vec<u8>,
    pub data: Vec<u8>,
    /// Whose window it counts in.
    pub of: Option<Arc<Connection>>,
    on_its_way: Option<OnItsWay>,
}

struct OnItsWay {
    ucx: &'static Library,
    /// Counts what UCX has of the endpoint.
    posted: Arc<AtomicUsize>,
}

impl Message {
    pub fn new(kind: Kind, head: &[u8], data: Vec<u8>) -> Box<Self> {
        Box::new(Self {
            kind,
            head: head.to_vec(),
            data,
            of: None,
            on_its_way: None,
        })
    }

    /// Gives it to UCX. Only on the progress thread.
    ///
    /// # Safety
    /// The endpoint must be open.
    pub unsafe fn post(
        mut self: Box<Self>,
        ucx: &'static Library,
        ep: sys::ucp_ep_h,
        posted: &Arc<AtomicUsize>,
    ) -> std::result::Result<(), ucs_status_t> {
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_CALLBACK
            | sys::UCP_OP_ATTR_FIELD_USER_DATA
            | sys::UCP_OP_ATTR_FIELD_FLAGS;
        params.cb.send = Some(sent);
        // A rendezvous would leave the reader with a request that writes its memory.
        params.flags = sys::UCP_AM_SEND_FLAG_EAGER;
        posted.fetch_add(1, Ordering::Relaxed);
        self.on_its_way = Some(OnItsWay {
            ucx,
            posted: posted.clone(),
        });
        let kind = self.kind as u32;
        let (head, head_bytes) = (self.head.as_ptr(), self.head.len());
        let (data, data_bytes) = (self.data.as_ptr(), self.data.len());
        let message = Box::into_raw(self);
        params.user_data = message.cast();
        // SAFETY: the endpoint is open by contract; head and data are the message's, which stays
        // until UCX has called `sent` or is done with it here.
        let request = unsafe {
            ucx.ucp_am_send_nbx(
                ep,
                kind,
                head.cast(),
                head_bytes,
                data.cast(),
                data_bytes,
                &raw const params,
            )
        };
        let status = match request.addr() as isize {
            0 => sys::UCS_OK,
            // As UCS_PTR_IS_ERR: the last hundred addresses are statuses.
            error @ -100..0 => error as ucs_status_t,
            _ => return Ok(()), // `sent` will be called
        };
        // SAFETY: made above, and UCX did not keep it.
        unsafe { Box::from_raw(message) }.over();
        match status {
            sys::UCS_OK => Ok(()),
            status => Err(status),
        }
    }

    /// It was sent, or never will be.
    #[allow(clippy::boxed_local)] // as it travels everywhere
    pub fn over(mut self: Box<Self>) {
        if let Some(way) = self.on_its_way.take() {
            way.posted.fetch_sub(1, Ordering::Relaxed);
        }
        if let Some(connection) = self.of.take() {
            connection.sent(self.data);
        }
    }
}

/// UCX's call when a message that it took is over. If it failed, so will its endpoint.
unsafe extern "C" fn sent(request: *mut c_void, _: ucs_status_t, message: *mut c_void) {
    // SAFETY: `post` made it from a Box, once for each message.
    let message = unsafe { Box::from_raw(message.cast::<Message>()) };
    let ucx = message.on_its_way.as_ref().map(|way| way.ucx);
    message.over();
    if let Some(ucx) = ucx {
        // SAFETY: UCX allows it inside the callback, and nobody else has the request.
        unsafe { ucx.ucp_request_free(request) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_survives_and_garbage_is_none() {
        let head = Head {
            secret: [7; KEY_BYTES],
            job: 1 << 40,
            offset: 3 << 20,
            status: -17,
            last: true,
            held: false,
        };
        let bytes = head.encode();
        assert_eq!(Head::decode(&bytes), Some(head));
        assert_eq!(Head::decode(&bytes[1..]), None);
        assert_eq!(Head::decode(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(Head::decode(&[0xff; HEAD_BYTES]), None);
        assert_eq!(Head::decode(&[]), None);
    }
}
