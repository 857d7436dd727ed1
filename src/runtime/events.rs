//! A queue of events and a file descriptor that is readable exactly while the queue is not empty.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::level::{Level, Leveled};
use crate::error::{Error, Result, Status};

/// Events not taken yet, in order.
///
/// The descriptor is an eventfd: written on empty to non-empty, read on non-empty to empty, both
/// under the queue's lock, so that its level is the queue's state. Callers only poll it.
#[derive(Debug)]
pub struct EventQueue<T>(Leveled<T, EventFd>);

#[derive(Debug)]
struct EventFd(OwnedFd);

impl Level for EventFd {
    fn raise(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes. It cannot fail: the counter is 0 here.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn lower(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes. It cannot block: the descriptor is non-blocking.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
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
        // SAFETY: `fd` was just made and nobody else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self(Leveled::new(EventFd(fd))))
    }

    /// The descriptor; owned by the queue.
    pub fn raw_fd(&self) -> RawFd {
        self.0.level.0.as_raw_fd()
    }

    /// Appends an event; its number is for [`Self::withdraw`].
    pub fn push(&self, event: T) -> u64 {
        self.0.push(event)
    }

    /// Takes an event back, if nobody has taken it yet: its object is gone.
    pub fn withdraw(&self, number: u64) {
        self.0.withdraw(number);
    }

    /// Moves up to `cap` events to `out`; true: more are left.
    pub fn take(&self, out: &mut Vec<T>, cap: usize) -> bool {
        self.0.take(out, cap)
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
