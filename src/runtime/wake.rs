//! A descriptor that becomes readable once, for threads that wait in `poll`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Readable from the first [`Wake::set`] on, for good.
#[derive(Debug)]
pub struct Wake {
    fd: OwnedFd,
}

impl Wake {
    /// Not set.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd has no memory arguments.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: `fd` was just made and nobody else owns it.
            fd: unsafe { OwnedFd::from_raw_fd(fd) },
        })
    }

    /// Wakes everybody who waits, now and later.
    pub fn set(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes; a full counter is as readable as we want it.
        unsafe { libc::write(self.fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
