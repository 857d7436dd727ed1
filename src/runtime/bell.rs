//! A descriptor that is rung again and again, for threads that wait in `poll`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::workers::{STALL_AFTER, can_stall, stalled};

/// Readable from [`Bell::ring`] until [`Bell::clear`].
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// Not rung.
    ///
    /// # Errors
    /// No more file descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd has no memory arguments.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made and nobody else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Wakes whoever waits, or the next one to wait.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight readable bytes; a full counter is as readable as we want it.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Takes back every ring so far: look for what it announced afterwards.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // SAFETY: eight writable bytes. It cannot block: the descriptor is non-blocking.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Waits until one of two descriptors is readable, at most `limit` (`None`: without limit). A worker
/// that waits long lets another one take its place.
///
/// # Errors
/// The kernel cannot watch them.
pub fn wait_readable(fds: [Option<BorrowedFd<'_>>; 2], limit: Option<Duration>) -> io::Result<()> {
    let mut polled = fds.map(|fd| libc::pollfd {
        fd: fd.map_or(-1, |fd| fd.as_raw_fd()),
        events: libc::POLLIN,
        revents: 0,
    });
    let mut poll = |limit: Option<Duration>| {
        let timeout = match limit {
            Some(limit) => i32::try_from(limit.as_millis() + 1).unwrap_or(i32::MAX),
            None => -1,
        };
        // SAFETY: two pollfds that live here; a negative descriptor is ignored.
        match unsafe { libc::poll(polled.as_mut_ptr(), 2, timeout) } {
            n if n < 0 => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => Ok(true),
                e => Err(e),
            },
            n => Ok(n > 0),
        }
    };
    if !can_stall() {
        return poll(limit).map(|_| ());
    }
    let soon = limit.map_or(STALL_AFTER, |limit| limit.min(STALL_AFTER));
    let rest = limit.map(|limit| limit - soon);
    if poll(Some(soon))? || rest.is_some_and(|rest| rest.is_zero()) {
        return Ok(());
    }
    stalled(|| poll(rest)).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn rings_are_kept_until_they_are_cleared() {
        let bell = Bell::new().unwrap();
        bell.ring();
        bell.ring();
        let begin = Instant::now();
        for _ in 0..2 {
            wait_readable([None, Some(bell.as_fd())], Some(Duration::from_secs(20))).unwrap();
        }
        bell.clear();
        assert!(begin.elapsed() < Duration::from_secs(10));
        wait_readable([Some(bell.as_fd()), None], Some(Duration::from_millis(2))).unwrap();
        assert!(begin.elapsed() >= Duration::from_millis(2));
    }
}
