//! A reader's job: where the answers to come are written, under one lock.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::KEY_BYTES;
use super::incoming::{Dropped, Taken};
use super::message::Head;
use crate::err;
use crate::error::{Error, Result, Status};
use crate::runtime::{Bell, wait_readable};
use crate::transport::pieces::{MAX_TEXT, Ranges, Walk, refusal};

/// What has been asked for. Answers come in the order of the asks, and each in the order of its bytes:
/// UCX sends eager messages of an endpoint over one lane.
pub struct Channel {
    pub number: u64,
    pub endpoint: u64,
    pub secret: [u8; KEY_BYTES],
    bell: Bell,
    /// Batches that are in place.
    done: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    expected: VecDeque<Batch>,
    lease_lost: bool,
    error: Option<Error>,
}

struct Batch {
    ranges: Ranges,
    bytes: u64,
    /// Bytes in place.
    have: u64,
    at: Walk,
}

impl Channel {
    /// # Errors
    /// `KVF_ERR_SYSTEM`: no more file descriptors.
    pub fn new(number: u64, endpoint: u64, secret: [u8; KEY_BYTES]) -> Result<Self> {
        let bell = Bell::new().map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "eventfd", &e))?;
        Ok(Self {
            number,
            endpoint,
            secret,
            bell,
            done: AtomicU64::new(0),
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Expects a batch of so many bytes.
    ///
    /// # Safety
    /// The ranges must be writable, and nobody may hold references to them, until the batch is in
    /// place or the channel is closed.
    pub unsafe fn expect(&self, ranges: Ranges, bytes: u64) {
        self.state().expected.push_back(Batch {
            ranges,
            bytes,
            have: 0,
            at: Walk::default(),
        });
    }

    /// An answer came.
    pub fn take(&self, head: &Head, data: &[u8]) -> Taken {
        let mut state = self.state();
        if head.secret != self.secret {
            return Err(Dropped::Stranger);
        }
        if state.error.is_some() {
            return Err(Dropped::Late);
        }
        let Some(batch) = state.expected.front_mut() else {
            return Err(Dropped::Late);
        };
        if head.status != 0 {
            let text = &data[..data.len().min(MAX_TEXT)];
            self.fail_locked(&mut state, refusal(head.status, text));
            return Ok(());
        }
        let end = head.offset.checked_add(data.len() as u64);
        if head.offset != batch.have
            || end.is_none_or(|end| end > batch.bytes || (head.last && end < batch.bytes))
        {
            let e = err!(
                KVF_ERR_PROTOCOL,
                "the source sends {} bytes at {} where {} to {} were expected",
                data.len(),
                head.offset,
                batch.have,
                batch.bytes
            );
            self.fail_locked(&mut state, e);
            return Err(Dropped::Garbage);
        }
        // SAFETY: by the contract of `expect`; the lock is held.
        unsafe { batch.ranges.write(&mut batch.at, data) };
        batch.have += data.len() as u64;
        if head.last {
            state.expected.pop_front();
            state.lease_lost |= !head.held;
            self.done.fetch_add(1, Ordering::Release);
            self.bell.ring();
        }
        Ok(())
    }

    /// Ends it with an error: nothing more is written.
    pub fn fail(&self, e: Error) {
        self.fail_locked(&mut self.state(), e);
    }

    fn fail_locked(&self, state: &mut State, e: Error) {
        state.expected.clear();
        state.error.get_or_insert(e);
        self.bell.ring();
    }

    /// Batches that are in place.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// Why it has ended.
    pub fn error(&self) -> Option<Error> {
        self.state().error.clone()
    }

    /// Whether the lease was lost for a batch that is in place.
    pub fn lease_lost(&self) -> bool {
        self.state().lease_lost
    }

    /// Sleeps until another batch is in place, the channel has an error, `wake` is readable or `limit`
    /// has passed. May return early. It is the engine's thread that spins, if any: two that look for
    /// the same thing would keep each other from it where cores are few.
    ///
    /// # Errors
    /// `KVF_ERR_SYSTEM`: the kernel cannot watch the descriptors.
    pub fn wait(&self, wake: Option<BorrowedFd<'_>>, limit: Option<Duration>) -> Result<()> {
        wait_readable([Some(self.bell.as_fd()), wake], limit)
            .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "poll", &e))?;
        self.bell.clear();
        Ok(())
    }
}
