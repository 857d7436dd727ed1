//! A non-blocking stream socket, used by one thread at a time, with waits that can be woken.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::null;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Status};
use crate::runtime::{STALL_AFTER, stalled};
use crate::transport::pieces::Ranges;

/// Most ranges in one call (UIO_MAXIOV).
const MAX_RANGES: usize = 1024;

/// A connected socket.
#[derive(Debug)]
pub struct Stream {
    pub(super) fd: OwnedFd,
}

/// How a thread waits for a socket: it looks again and again for `spin`, then sleeps until there
/// is something, `wake` is readable, or `deadline` has passed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience<'a> {
    pub spin: Duration,
    pub wake: Option<BorrowedFd<'a>>,
    /// Of one wait, not of the whole transfer.
    pub stall: Option<Duration>,
}

/// How long something of several waits may take: until a time, or until `wake` is readable.
#[derive(Clone, Copy, Debug)]
pub struct Until<'a> {
    /// The end.
    pub deadline: Instant,
    /// The earlier end.
    pub wake: Option<BorrowedFd<'a>>,
}

impl Until<'_> {
    pub(super) fn patience(&self) -> Patience<'_> {
        Patience {
            spin: Duration::ZERO,
            wake: self.wake,
            stall: Some(self.deadline.saturating_duration_since(Instant::now())),
        }
    }
}

impl Stream {
    /// Takes a connected socket and makes it non-blocking.
    ///
    /// # Errors
    /// The descriptor is no socket.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: fcntl with integers only, on a descriptor that we own.
        let ok = unsafe {
            let flags = libc::fcntl(fd.as_raw_fd(), libc::F_GETFL);
            flags >= 0 && libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
        };
        if !ok {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { fd })
    }

    /// Open, and nothing has come that nobody asked for.
    pub(super) fn is_quiet(&self) -> bool {
        let mut byte = 0u8;
        // SAFETY: one writable byte.
        let n = unsafe {
            libc::recv(
                self.fd.as_raw_fd(),
                (&raw mut byte).cast(),
                1,
                libc::MSG_DONTWAIT | libc::MSG_PEEK,
            )
        };
        n < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock
    }

    /// Looks for at most `spin` whether something has come (or the stream's end).
    pub(super) fn comes_within(&self, spin: Duration) -> bool {
        let patience = Patience {
            spin,
            wake: None,
            stall: Some(Duration::ZERO),
        };
        self.wait(patience, false).is_ok()
    }

    /// Receives what comes next, at least one byte; 0 = the stream has ended.
    pub(super) fn receive_next(
        &self,
        bytes: &mut [u8],
        patience: Patience<'_>,
    ) -> io::Result<usize> {
        loop {
            // SAFETY: the borrowed slice with its length.
            let n = unsafe {
                libc::recv(
                    self.fd.as_raw_fd(),
                    bytes.as_mut_ptr().cast(),
                    bytes.len(),
                    libc::MSG_DONTWAIT,
                )
            };
            if let Ok(n) = usize::try_from(n) {
                return Ok(n);
            }
            match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock => self.wait(patience, false)?,
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            }
        }
    }

    /// Ends both directions; a thread that waits on the socket is woken.
    pub fn shutdown(&self) {
        // SAFETY: a descriptor that we own.
        unsafe { libc::shutdown(self.fd.as_raw_fd(), libc::SHUT_RDWR) };
    }

    pub(super) fn send(&self, bytes: &[u8], patience: Patience<'_>) -> io::Result<()> {
        let mut range = [libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        }];
        // SAFETY: the range is the borrowed slice, which is only read.
        unsafe { self.transfer(&mut range, patience, true) }
    }

    pub(super) fn receive(&self, bytes: &mut [u8], patience: Patience<'_>) -> io::Result<()> {
        let mut range = [libc::iovec {
            iov_base: bytes.as_mut_ptr().cast(),
            iov_len: bytes.len(),
        }];
        // SAFETY: the range is the borrowed slice.
        unsafe { self.transfer(&mut range, patience, false) }
    }

    /// Sends everything.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the system's reason.
    pub fn send_all(&self, bytes: &[u8], until: Until<'_>) -> Result<()> {
        self.send(bytes, until.patience())
            .map_err(|e| Error::os(Status::KVF_ERR_TRANSFER, "send", &e))
    }

    /// Fills `bytes`.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the system's reason, the stream's end included.
    pub fn receive_exact(&self, bytes: &mut [u8], until: Until<'_>) -> Result<()> {
        let failed = |e: io::Error| Error::os(Status::KVF_ERR_TRANSFER, "receive", &e);
        let mut at = 0;
        while at < bytes.len() {
            // What is left of the time is of the whole, not of each wait.
            self.receive(&mut bytes[at..=at], until.patience())
                .map_err(failed)?;
            at += 1;
            if at < bytes.len() {
                at += self.receive_available(&mut bytes[at..]).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// What is there, without waiting; 0 = nothing, or the end (which the next wait finds).
    pub(super) fn receive_available(&self, bytes: &mut [u8]) -> io::Result<usize> {
        // SAFETY: the borrowed slice with its length.
        let n = unsafe {
            libc::recv(
                self.fd.as_raw_fd(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT,
            )
        };
        match usize::try_from(n) {
            Ok(n) => Ok(n),
            Err(_) => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::WouldBlock
                    || e.kind() == io::ErrorKind::Interrupted =>
                {
                    Ok(0)
                }
                e => Err(e),
            },
        }
    }

    /// Sends all ranges, in order.
    ///
    /// # Safety
    /// All ranges must be readable; another process may write them meanwhile.
    pub(super) unsafe fn send_ranges(
        &self,
        ranges: &mut Ranges,
        patience: Patience<'_>,
    ) -> io::Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.transfer(ranges.as_iovecs(), patience, true) }
    }

    /// Fills all ranges, in order.
    ///
    /// # Safety
    /// All ranges must be writable; nobody may hold references to them.
    pub(super) unsafe fn receive_ranges(
        &self,
        ranges: &mut Ranges,
        patience: Patience<'_>,
    ) -> io::Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.transfer(ranges.as_iovecs(), patience, false) }
    }

    /// # Safety
    /// As for `send_ranges` or `receive_ranges`.
    unsafe fn transfer(
        &self,
        mut ranges: &mut [libc::iovec],
        patience: Patience<'_>,
        send: bool,
    ) -> io::Result<()> {
        // Empty ones: the kernel would have nothing to do, and wait for it.
        ranges = skip(ranges, 0);
        while !ranges.is_empty() {
            // SAFETY: an all-zero msghdr is a valid, empty one.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = ranges.as_mut_ptr();
            message.msg_iovlen = ranges.len().min(MAX_RANGES) as _;
            let fd = self.fd.as_raw_fd();
            // SAFETY: the ranges by contract; the kernel writes nothing else.
            let n = unsafe {
                if send {
                    libc::sendmsg(
                        fd,
                        &raw const message,
                        libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                    )
                } else {
                    libc::recvmsg(fd, &raw mut message, libc::MSG_DONTWAIT)
                }
            };
            match usize::try_from(n) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => ranges = skip(ranges, n),
                Err(_) => {
                    let err = io::Error::last_os_error();
                    match err.kind() {
                        io::ErrorKind::WouldBlock => self.wait(patience, send)?,
                        io::ErrorKind::Interrupted => {}
                        _ => return Err(err),
                    }
                }
            }
        }
        Ok(())
    }

    /// Waits until there is room to send, or something has come.
    pub(super) fn wait(&self, patience: Patience<'_>, send: bool) -> io::Result<()> {
        let events = if send { libc::POLLOUT } else { libc::POLLIN };
        let begin = Instant::now();
        loop {
            let waited = begin.elapsed();
            let left = patience.stall.map(|stall| stall.saturating_sub(waited));
            let timeout = match left {
                _ if waited < patience.spin => Some(Duration::ZERO),
                Some(left) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                _ if waited < patience.spin + STALL_AFTER => {
                    Some(left.map_or(STALL_AFTER, |left| left.min(STALL_AFTER)))
                }
                left => left,
            };
            let timeout = timeout.map(|timeout| libc::timespec {
                tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
                tv_nsec: timeout.subsec_nanos().into(),
            });
            let timeout = timeout.as_ref().map_or(null(), std::ptr::from_ref);
            let mut polled = [
                libc::pollfd {
                    fd: self.fd.as_raw_fd(),
                    events,
                    revents: 0,
                },
                libc::pollfd {
                    fd: patience.wake.map_or(-1, |fd| fd.as_raw_fd()),
                    events: libc::POLLIN,
                    revents: 0,
                },
            ];
            // SAFETY: two pollfds and a time that live here; a negative descriptor is ignored.
            let mut poll = || unsafe { libc::ppoll(polled.as_mut_ptr(), 2, timeout, null()) };
            let n = match waited < patience.spin + STALL_AFTER {
                true => poll(),
                false => stalled(poll),
            };
            if n < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return Err(io::Error::last_os_error());
            }
            if n > 0 && polled[1].revents != 0 {
                return Err(io::Error::other("cancelled"));
            }
            if n > 0 && polled[0].revents != 0 {
                return Ok(());
            }
        }
    }
}

impl From<Stream> for OwnedFd {
    fn from(stream: Stream) -> Self {
        stream.fd
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The ranges behind the first `n` bytes.
fn skip(mut ranges: &mut [libc::iovec], mut n: usize) -> &mut [libc::iovec] {
    while let Some(first) = ranges.first_mut() {
        if n < first.iov_len {
            first.iov_base = first.iov_base.cast::<u8>().wrapping_add(n).cast();
            first.iov_len -= n;
            break;
        }
        n -= first.iov_len;
        ranges = &mut ranges[1..];
    }
    ranges
}
