//! The transceiver's descriptor: readable exactly while either side has a result to take.

use std::os::fd::RawFd;
use std::sync::{Mutex, PoisonError};

use super::api::Side;
use crate::error::Result;
use crate::runtime::EventQueue;

/// One token in an event queue stands for "there is something".
#[derive(Debug)]
pub(super) struct Signal {
    queue: EventQueue<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ready: [bool; 2],
    token: Option<u64>,
}

impl Signal {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            queue: EventQueue::new()?,
            state: Mutex::new(State::default()),
        })
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.queue.raw_fd()
    }

    /// Says whether a side has results. Call it under that side's lock, when it changes.
    pub(super) fn set(&self, side: Side, ready: bool) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(flag) = state.ready.get_mut(side as usize) {
            *flag = ready;
        }
        match (state.ready.contains(&true), state.token) {
            (true, None) => state.token = Some(self.queue.push(())),
            (false, Some(token)) => {
                self.queue.withdraw(token);
                state.token = None;
            }
            _ => {}
        }
    }
}
