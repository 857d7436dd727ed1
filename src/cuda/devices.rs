//! What one agent has on all devices: its lanes and the words that streams wait for.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::kernel::Kernels;
use super::words::Words;
use super::{CallerStream, Context, Driver, Lane, Word};
use crate::error::Result;

/// An agent's streams and buffers, made when needed and kept until [`Self::close`].
#[derive(Debug, Default)]
pub struct Devices {
    inner: Mutex<Inner>,
    kernels: Arc<Kernels>,
    words: Words,
}

#[derive(Debug, Default)]
struct Inner {
    free: Vec<Lane>,
    /// Given back while something was still enqueued.
    busy: Vec<Lane>,
    closed: bool,
}

impl Devices {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane of that context that nobody else uses.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` without a driver, `KVF_ERR_TRANSFER` with the driver's reason.
    pub fn lane(&self, context: Context) -> Result<Lane> {
        let driver = Driver::get()?;
        let mut inner = self.lock();
        let (idle, busy) = inner.busy.drain(..).partition(|l| l.is_idle() == Ok(true));
        inner.busy = busy;
        let mut idle: Vec<Lane> = idle;
        idle.iter_mut().for_each(Lane::mark_idle);
        inner.free.extend(idle);
        let known = inner.free.iter().position(|l| l.context() == context);
        match known {
            Some(at) => Ok(inner.free.swap_remove(at)),
            None => {
                drop(inner);
                Lane::new(driver, context, self.kernels.clone())
            }
        }
    }

    /// Takes a lane back; it may still hold work that touches nobody's memory.
    pub fn give_back(&self, lane: Lane) {
        let mut inner = self.lock();
        if inner.closed {
            drop(inner);
            drop(lane);
        } else if lane.is_quiet() {
            inner.free.push(lane);
        } else {
            inner.busy.push(lane);
        }
    }

    /// Makes `stream` wait until the word is dropped, and gives the word.
    ///
    /// # Errors
    /// As for [`CallerStream::context`]; `KVF_ERR_UNSUPPORTED` on a device without stream memory
    /// operations.
    pub fn stream_wait(&self, stream: CallerStream) -> Result<Word> {
        self.words.stream_wait(stream)
    }

    /// Frees everything; lanes that are still in use, when they are given back.
    pub fn close(&self) {
        let lanes = {
            let mut inner = self.lock();
            inner.closed = true;
            let inner = &mut *inner;
            (
                std::mem::take(&mut inner.free),
                std::mem::take(&mut inner.busy),
            )
        };
        drop(lanes);
        self.kernels.clear();
        self.words.close();
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        self.close();
    }
}
