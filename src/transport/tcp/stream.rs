//! A non-blocking stream socket, used by one thread at a time, with waits that can be woken.

use std::io;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Status};
use crate::runtime::{STALL_AFTER, stalled};
use crate::transport::pieces::Ranges;

/// Most ranges in one call (UIO_MAXIOV).
const MAX_RANGES: usize = 1024;

/// A connected socket.
#[derive(Debug)]
pub struct Stream {
    fd: OwnedFd,
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
    fn patience(&self) -> Patience<'_> {
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

    /// Connects to a TCP port. Small messages are sent at once.
    ///
    /// # Errors
    /// The system's; `TimedOut`; "cancelled" when woken.
    pub fn connect_tcp(to: &SocketAddr, until: Until<'_>) -> io::Result<Self> {
        let (family, address) = match to {
            SocketAddr::V4(to) => (libc::AF_INET, Address::V4(address_v4(to))),
            SocketAddr::V6(to) => (libc::AF_INET6, Address::V6(address_v6(to))),
        };
        let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: integers only.
        let fd = unsafe { libc::socket(family, flags, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else has.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let one: libc::c_int = 1;
        set_option(fd.as_fd(), libc::IPPROTO_TCP, libc::TCP_NODELAY, &one)?;
        let (address, len): (*const libc::sockaddr, usize) = match &address {
            Address::V4(a) => (std::ptr::from_ref(a).cast(), size_of_val(a)),
            Address::V6(a) => (std::ptr::from_ref(a).cast(), size_of_val(a)),
        };
        // SAFETY: an address of this length, which lives during the call.
        let done = unsafe { libc::connect(fd.as_raw_fd(), address, len as libc::socklen_t) };
        let stream = Self { fd };
        if done == 0 {
            return Ok(stream);
        }
        match io::Error::last_os_error() {
            e if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            e => return Err(e),
        }
        stream.wait(until.patience(), true)?;
        match stream.take_error()? {
            Some(e) => Err(e),
            None => Ok(stream),
        }
    }

    /// What went wrong since the last look.
    fn take_error(&self) -> io::Result<Option<io::Error>> {
        let mut error: libc::c_int = 0;
        let mut len = size_of_val(&error) as libc::socklen_t;
        // SAFETY: an int that lives during the call, with its size.
        let done = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_ERROR,
                (&raw mut error).cast(),
                &raw mut len,
            )
        };
        match (done, error) {
            (0, 0) => Ok(None),
            (0, error) => Ok(Some(io::Error::from_raw_os_error(error))),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Connects to an abstract Unix socket. That takes time only while its backlog is full: an
    /// agent that is stopped, or a flood; then at most `timeout`, without one none.
    ///
    /// # Errors
    /// The system's; `WouldBlock` for a backlog that is full and stays so.
    pub fn connect_unix(name: &[u8], timeout: Option<Duration>) -> io::Result<Self> {
        // SAFETY: all-zero is a valid sockaddr_un.
        let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // An abstract name begins with a zero byte.
        if name.len() >= address.sun_path.len() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        for (to, from) in address.sun_path[1..].iter_mut().zip(name) {
            *to = *from as libc::c_char;
        }
        let head = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1;
        let flags =
            libc::SOCK_STREAM | libc::SOCK_CLOEXEC | timeout.map_or(libc::SOCK_NONBLOCK, |_| 0);
        // SAFETY: integers only.
        let fd = unsafe { libc::socket(libc::AF_UNIX, flags, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor that nobody else has.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        if let Some(timeout) = timeout {
            let limit = libc::timeval {
                tv_sec: timeout.as_secs() as libc::time_t,
                // Zero would be no limit.
                tv_usec: libc::suseconds_t::from(timeout.subsec_micros().max(1)),
            };
            set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_SNDTIMEO, &limit)?;
        }
        // SAFETY: the address lives here; the length covers the name and what is before it.
        let done = unsafe {
            libc::connect(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                (head + name.len()) as libc::socklen_t,
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        Self::new(fd)
    }

    /// Lets the kernel ask an idle TCP peer every `every` whether it still has the connection, and
    /// end it after `silence` without an answer. Without effect on a Unix socket.
    pub fn watch_peer(&self, every: Duration, silence: Duration) {
        let whole = |n: u128| libc::c_int::try_from(n).unwrap_or(libc::c_int::MAX).max(1);
        let every = whole(u128::from(every.as_secs()));
        let options = [
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, every),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, every),
            // Also of what was sent and is not acknowledged.
            (
                libc::IPPROTO_TCP,
                libc::TCP_USER_TIMEOUT,
                whole(silence.as_millis()),
            ),
        ];
        for (level, name, value) in options {
            // What the kernel refuses is left out: deadlines hold without it.
            let _ = set_option(self.fd.as_fd(), level, name, &value);
        }
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

    fn wait(&self, patience: Patience<'_>, send: bool) -> io::Result<()> {
        let events = if send { libc::POLLOUT } else { libc::POLLIN };
        let begin = Instant::now();
        loop {
            let waited = begin.elapsed();
            let left = patience.stall.map(|stall| stall.saturating_sub(waited));
            let timeout = match left {
                _ if waited < patience.spin => 0,
                Some(left) if left.is_zero() => return Err(io::ErrorKind::TimedOut.into()),
                _ if waited < patience.spin + STALL_AFTER => STALL_AFTER.as_millis() as i32,
                Some(left) => i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX),
                None => -1,
            };
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
            // SAFETY: two pollfds that live here; a negative descriptor is ignored.
            let mut poll = || unsafe { libc::poll(polled.as_mut_ptr(), 2, timeout) };
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

/// An address as the kernel takes it.
enum Address {
    V4(libc::sockaddr_in),
    V6(libc::sockaddr_in6),
}

fn address_v4(to: &SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: to.port().to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from_ne_bytes(to.ip().octets()),
        },
        sin_zero: [0; 8],
    }
}

fn address_v6(to: &SocketAddrV6) -> libc::sockaddr_in6 {
    libc::sockaddr_in6 {
        sin6_family: libc::AF_INET6 as libc::sa_family_t,
        sin6_port: to.port().to_be(),
        sin6_flowinfo: to.flowinfo(),
        sin6_addr: libc::in6_addr {
            s6_addr: to.ip().octets(),
        },
        sin6_scope_id: to.scope_id(),
    }
}

fn set_option<T: Copy>(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: &T,
) -> io::Result<()> {
    // SAFETY: the value is borrowed, and its size is given.
    let done = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
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

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use super::*;

    #[test]
    fn a_connection_attempt_ends_with_its_answer_its_time_or_when_it_is_woken() {
        let wake = crate::runtime::Wake::new().unwrap();
        let until = |limit: u64| Until {
            deadline: Instant::now() + Duration::from_millis(limit),
            wake: Some(wake.as_fd()),
        };
        for local in ["127.0.0.1:0", "[::1]:0"] {
            let listener = std::net::TcpListener::bind(local).unwrap();
            let address = listener.local_addr().unwrap();
            let stream = Stream::connect_tcp(&address, until(20_000)).unwrap();
            let (mut other, _) = listener.accept().unwrap();
            std::io::Write::write_all(&mut other, b"there").unwrap();
            let mut bytes = [0; 5];
            stream.receive_exact(&mut bytes, until(20_000)).unwrap();
            assert_eq!(&bytes, b"there");
            let e = stream.receive_exact(&mut bytes, until(5)).unwrap_err();
            assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
            drop((listener, other));
            let e = Stream::connect_tcp(&address, until(20_000)).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
        }
        // A listener whose backlog is full does not answer.
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: an integer, on a socket that lives.
        unsafe { libc::listen(socket.as_raw_fd(), 0) };
        let address = socket.local_addr().unwrap();
        let mut waiting = Vec::new();
        let late = loop {
            match Stream::connect_tcp(&address, until(100)) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
        };
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        wake.set();
        let woken = Stream::connect_tcp(&address, until(20_000)).unwrap_err();
        assert_eq!(woken.to_string(), "cancelled");
    }

    #[test]
    fn a_full_backlog_is_waited_for_no_longer_than_was_said() {
        let name = format!("kvferry-test-backlog-{}", std::process::id()).into_bytes();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let mut waiting = Vec::new();
        let full = loop {
            match Stream::connect_unix(&name, None) {
                Ok(stream) => waiting.push(stream),
                Err(e) => break e,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let limit = Duration::from_millis(30);
        let e = Stream::connect_unix(&name, Some(limit)).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::WouldBlock);
        listener.accept().unwrap();
        Stream::connect_unix(&name, Some(limit)).unwrap();
        drop(listener);
        let e = Stream::connect_unix(&name, None).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
    }
}
