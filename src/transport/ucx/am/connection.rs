//! A reader at its source: what it asks, and the answers that are on their way to it.
//!
//! A thread of the agent serves it; the progress thread brings the asks and takes the answers. At most
//! [`WINDOW`] messages are with UCX, so that a reader that does not take them costs no more than those.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::message::{END, Head, Kind, Message};
use super::{KEY_BYTES, MESSAGE_BYTES};
use crate::error::Result;
use crate::transport::pieces::{self, Carrier, Ranges, Serving, Source, Walk};
use crate::transport::ucx::progress::{Order, Queue, refuse};
use crate::wire::{Decoder, MAX_FRAME};

/// Messages of one reader that UCX has.
const WINDOW: usize = 8;
/// Most bytes of asks that wait: a reader of ours keeps to a few for each of its jobs.
const MAX_WAITING: usize = 4 * MAX_FRAME;

/// One reader.
pub struct Connection {
    /// What it showed.
    pub token: [u8; KEY_BYTES],
    /// What answers begin with.
    pub(super) secret: [u8; KEY_BYTES],
    /// Of its hello.
    job: u64,
    pub(in crate::transport::ucx) endpoint: u64,
    queue: Arc<Queue>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    asks: VecDeque<Vec<u8>>,
    waiting: usize,
    on_their_way: usize,
    /// Buffers for more.
    spare: Vec<Vec<u8>>,
    ended: Option<String>,
}

impl Connection {
    pub(in crate::transport::ucx) fn new(
        hello: &super::incoming::Hello,
        endpoint: u64,
        queue: Arc<Queue>,
    ) -> Self {
        Self {
            token: hello.token,
            secret: hello.secret,
            job: hello.job,
            endpoint,
            queue,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks came; false: too many.
    pub(super) fn ask(&self, frames: &[u8]) -> bool {
        let mut state = self.state();
        if state.ended.is_some() {
            return true;
        }
        state.waiting += frames.len();
        if state.waiting > MAX_WAITING {
            drop(state);
            self.end(format!("more than {MAX_WAITING} bytes of requests wait"));
            return false;
        }
        state.asks.push_back(frames.to_vec());
        self.changed.notify_all();
        true
    }

    /// A message is with UCX no more.
    pub(super) fn sent(&self, buffer: Vec<u8>) {
        let mut state = self.state();
        let full = state.on_their_way == WINDOW;
        state.on_their_way -= 1;
        state.spare.push(buffer);
        if full {
            self.changed.notify_all(); // else nobody waits for room
        }
    }

    /// Ends it: its thread goes.
    pub fn end(&self, why: String) {
        self.state().ended.get_or_insert(why);
        self.changed.notify_all();
    }

    /// Serves the reader on the calling thread until one of both has ended: first the proof that the
    /// data path works, which is `nonce`, then whatever it asks for.
    ///
    /// # Errors
    /// As for sockets: the connection broke, or the reader does not speak the protocol.
    pub fn serve(
        self: &Arc<Self>,
        nonce: &[u8],
        source: &dyn Source,
        limits: Serving,
    ) -> Result<()> {
        let server = Server {
            connection: self,
            limits,
        };
        let greeted = server.send(|data| {
            data.extend_from_slice(nonce);
            self.head(self.job, 0, true)
        });
        let outcome = greeted
            .map_err(|e| crate::err!(KVF_ERR_PEER_LOST, "data connection: {e}"))
            .and_then(|()| pieces::serve(&server, source, limits.stall));
        self.end("served".into());
        // So that a reader that still lives need not find out by itself. It is lost with a reader that
        // takes nothing any more.
        let end = Message::new(Kind::Answer, &self.head(END, 0, true).encode(), Vec::new());
        self.order(Order::Send(self.endpoint, end));
        self.order(Order::Disconnect(self.clone()));
        outcome
    }

    fn order(&self, order: Order) {
        if let Some(order) = self.queue.push(order) {
            refuse(order);
        }
    }

    fn head(&self, job: u64, offset: u64, last: bool) -> Head {
        Head {
            secret: self.secret,
            job,
            offset,
            status: 0,
            last,
            held: last,
        }
    }

    /// Waits until `ready` gives something; `None`: `limit` has passed.
    fn wait<T>(
        &self,
        limit: Option<Duration>,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let begin = Instant::now();
        let mut state = self.state();
        loop {
            if let Some(why) = &state.ended {
                return Err(io::Error::other(why.clone()));
            }
            if let Some(found) = ready(&mut state) {
                return Ok(Some(found));
            }
            state = match limit.map(|limit| limit.saturating_sub(begin.elapsed())) {
                None => self
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return Ok(None),
                Some(left) => {
                    self.changed
                        .wait_timeout(state, left)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
        }
    }
}

/// The serving thread's side.
struct Server<'a> {
    connection: &'a Arc<Connection>,
    limits: Serving,
}

impl Server<'_> {
    /// Sends a message once the window has room for it; `fill` appends the data and gives the head.
    fn send(&self, fill: impl FnOnce(&mut Vec<u8>) -> Head) -> io::Result<()> {
        let room = self.connection.wait(Some(self.limits.stall), |state| {
            (state.on_their_way < WINDOW).then(|| {
                state.on_their_way += 1;
                state.spare.pop()
            })
        })?;
        let Some(spare) = room else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        let mut data = spare.unwrap_or_default();
        data.clear();
        let head = fill(&mut data);
        let mut message = Message::new(Kind::Answer, &head.encode(), data);
        message.of = Some(self.connection.clone());
        let order = Order::Send(self.connection.endpoint, message);
        self.connection.order(order);
        Ok(())
    }
}

impl Carrier for Server<'_> {
    fn hear(&self, decoder: &mut Decoder, wait: bool) -> io::Result<bool> {
        let limit = (!wait).then_some(Duration::ZERO);
        let frames = self.connection.wait(limit, |state| {
            let frames = state.asks.pop_front()?;
            state.waiting -= frames.len();
            Some(frames)
        })?;
        decoder.push(&frames.unwrap_or_default());
        Ok(true)
    }

    unsafe fn answer(
        &self,
        job: u64,
        bytes: u64,
        ranges: &mut Ranges,
        held: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let (mut offset, mut at) = (0, Walk::default());
        loop {
            let next = (bytes - offset).min(MESSAGE_BYTES as u64);
            let mut head = self.connection.head(job, offset, offset + next == bytes);
            self.send(|data| {
                // SAFETY: readable by contract.
                unsafe { ranges.read(&mut at, next as usize, data) };
                head.held = head.last && held();
                head
            })?;
            offset += next;
            if offset == bytes {
                return Ok(());
            }
        }
    }

    fn refuse(&self, job: u64, status: i32, text: &[u8]) -> io::Result<()> {
        let head = Head {
            status,
            ..self.connection.head(job, 0, true)
        };
        self.send(|data| {
            data.extend_from_slice(text);
            head
        })
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}
