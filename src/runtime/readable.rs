//! Waiting on a descriptor that is no socket.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Waits, on a tokio runtime, until `fd` is readable.
///
/// # Errors
/// The event loop cannot watch the descriptor.
pub async fn readable(fd: OwnedFd) -> io::Result<()> {
    // SAFETY: the OwnedFd moves into the AsyncFd, so the descriptor stays open, and this one, for
    // as long as it is registered.
    let fd = unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?;
    fd.readable().await.map(|_| ())
}
