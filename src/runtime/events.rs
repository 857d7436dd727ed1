//! A queue of events and a file descriptor that is readable exactly while the queue is not empty.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result, Status};

/// Events not taken yet, in order.
///
/// The descriptor is an eventfd: written on empty to non-empty, read on non-empty to empty, both
/// under the queue's lock, so that its level is the queue's state. Callers only poll it.
#[derive(Debug)]
pub struct EventQueue<T> {
    fd: OwnedFd,
    queue: Mutex<Queue<T>>,
}

#[derive(Debug)]
struct Queue<T> {
    next: u64,
    events: BTreeMap<u64, T>,
}

impl<T> EventQueue<T> {
    /// An empty queue.
    ///
    /// # Errors
    /// `KVF_ERR_SYSTEM`: no more file descriptors.
    pub fn new() -> Result<Self> {
        // SAFETY: eventfd has no memory arguments.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            let err = io::Error::last_os_error();
            return Err(Error::os(Status::KVF_ERR_SYSTEM, "eventfd", &err));
        }
        Ok(Self {
            // SAFETY: `fd` was just made and nobody else owns it.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
            queue: Mutex::new(Queue {
                next: 1,
                events: BTreeMap::new(),
            }),
        })
    }

    /// The descriptor; owned by the queue.
    pub fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Appends an event; its number is for [`Self::withdraw`].
    pub fn push(&self, event: T) -> u64 {
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        if queue.events.is_empty() {
            self.signal();
        }
        queue.events.insert(number, event);
        number
    }

    /// Takes an event back, if nobody has taken it yet: its object is gone.
    pub fn withdraw(&self, number: u64) {
        let mut queue = self.lock();
        if queue.events.remove(&number).is_some() && queue.events.is_empty() {
            self.clear();
        }
    }

    /// Moves up to `cap` events to `out`; true: more are left.
    pub fn take(&self, out: &mut Vec<T>, cap: usize) -> bool {
        let mut queue = self.lock();
        let before = queue.events.len();
        for _ in 0..cap {
            match queue.events.pop_first() {
                Some((_, event)) => out.push(event),
                None => break,
            }
        }
        if before > 0 && queue.events.is_empty() {
            self.clear();
        }
        !queue.events.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn signal(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. It cannot fail: the counter is 0 here.
        unsafe { libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes. It cannot block: the descriptor is non-blocking.
        unsafe { libc::read(self.fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    fn readable(queue: &EventQueue<u32>) -> bool {
        let mut poll = libc::pollfd {
            fd: queue.raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    #[test]
    fn the_descriptor_is_readable_exactly_while_there_are_events() {
        let queue = EventQueue::new().unwrap();
        assert!(!readable(&queue));
        queue.push(1);
        queue.push(2);
        assert!(readable(&queue));
        let mut out = Vec::new();
        assert!(queue.take(&mut out, 1), "one is left");
        assert!(readable(&queue));
        assert!(!queue.take(&mut out, 9));
        assert!(!readable(&queue));
        assert_eq!(out, [1, 2]);
    }

    #[test]
    fn a_withdrawn_event_is_never_taken() {
        let queue = EventQueue::new().unwrap();
        let first = queue.push(1);
        let second = queue.push(2);
        queue.withdraw(first);
        assert!(readable(&queue));
        queue.withdraw(second);
        queue.withdraw(second);
        assert!(!readable(&queue));
        let mut out = Vec::new();
        assert!(!queue.take(&mut out, 9));
        assert_eq!(out, [0; 0]);
    }

    #[test]
    fn taking_none_changes_nothing() {
        let queue = EventQueue::new().unwrap();
        queue.push(7);
        assert!(queue.take(&mut Vec::new(), 0));
        assert!(readable(&queue));
    }
}
