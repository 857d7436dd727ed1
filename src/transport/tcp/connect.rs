//! Making connections: TCP, and Unix sockets by their abstract names.

use std::io;
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::stream::{Stream, Until};

impl Stream {
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

#[cfg(test)]
mod tests {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};

    use std::time::Instant;

    use super::*;
    use crate::error::Status;

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
