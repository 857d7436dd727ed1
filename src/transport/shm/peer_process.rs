//! Which process is at the other end of a Unix stream, and whether it still lives.

use std::io;
use std::mem;
use std::num::NonZeroI32;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::bail;
use crate::error::{Error, Result, Status};

/// The process that connected to, or listens at, the other end of a Unix stream.
///
/// Its pid and user come from the kernel, never from what the peer says. The pidfd keeps naming
/// this very process, so that a recycled pid is noticed.
#[derive(Debug)]
pub struct PeerProcess {
    pid: Option<NonZeroI32>,
    pidfd: OwnedFd,
}

impl PeerProcess {
    /// Identifies the peer of a connected stream.
    ///
    /// The peer must run under our effective user id, root being no exception: a mapped pool and
    /// `process_vm_readv` hand over whole caches, and what one user's engine holds is nobody
    /// else's. Both sides check, so neither can be talked into it.
    ///
    /// # Errors
    /// `KVF_ERR_AUTH` for another user's process, `KVF_ERR_PEER_LOST` if it has ended,
    /// `KVF_ERR_UNSUPPORTED` if the kernel cannot name it.
    pub fn of_stream(stream: BorrowedFd<'_>) -> Result<Self> {
        let cred: libc::ucred = socket_option(stream, libc::SO_PEERCRED).map_err(|err| {
            Error::os(
                Status::KVF_ERR_UNSUPPORTED,
                "SO_PEERCRED of the peer's Unix stream",
                &err,
            )
        })?;
        // SAFETY: geteuid has no preconditions.
        let own = unsafe { libc::geteuid() };
        if cred.uid != own {
            bail!(
                KVF_ERR_AUTH,
                "process {} runs as user {}, this one as {own}; shared memory is for processes of one user, use tcp",
                cred.pid,
                cred.uid
            );
        }
        // 0: the process lives in a pid namespace that ours does not contain.
        let pid = NonZeroI32::new(cred.pid).filter(|pid| pid.get() > 0);
        Ok(Self {
            pid,
            pidfd: pidfd(stream, pid)?,
        })
    }

    /// The pid as this process's namespace numbers it; `None` from outside of it.
    pub fn pid(&self) -> Option<i32> {
        self.pid.map(NonZeroI32::get)
    }

    /// Whether the process has not ended. True after a look at its memory through its pid proves
    /// that the pid meant this process all the time.
    pub fn is_alive(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.pidfd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        loop {
            // SAFETY: one pollfd, which lives here.
            match unsafe { libc::poll(&mut poll, 1, 0) } {
                0 => return true,
                // A poll that fails otherwise cannot prove life.
                n if n > 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted => {
                    return false;
                }
                _ => {}
            }
        }
    }

    /// "process 123" for messages.
    pub(super) fn describe(&self) -> String {
        match self.pid {
            Some(pid) => format!("process {pid}"),
            None => "a process of another pid namespace".into(),
        }
    }
}

/// The pidfd: readable once the process has ended. Borrow it for an event loop; it is closed with
/// the peer.
impl AsFd for PeerProcess {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

impl AsRawFd for PeerProcess {
    fn as_raw_fd(&self) -> RawFd {
        self.pidfd.as_raw_fd()
    }
}

/// A handle on the peer itself (Linux 6.5), or else on whoever has its pid now. In the second case
/// the peer may have ended and its pid may be somebody else's; the nonce that is read through the
/// data path before its first use finds that out.
fn pidfd(stream: BorrowedFd<'_>, pid: Option<NonZeroI32>) -> Result<OwnedFd> {
    let fd = match socket_option::<RawFd>(stream, libc::SO_PEERPIDFD) {
        Ok(fd) => Ok(fd),
        Err(err) if err.raw_os_error() == Some(libc::ENOPROTOOPT) => match pid {
            Some(pid) => pidfd_open(pid),
            None => Err(err),
        },
        Err(err) => Err(err),
    };
    match fd {
        // SAFETY: a new descriptor that nobody else owns; the kernel makes pidfds CLOEXEC.
        Ok(fd) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        Err(err) => {
            let status = match err.raw_os_error() {
                Some(libc::ESRCH | libc::EINVAL | libc::ENODATA) => Status::KVF_ERR_PEER_LOST,
                _ => Status::KVF_ERR_UNSUPPORTED,
            };
            Err(Error::os(
                status,
                format!("pidfd of process {}", pid.map_or(0, NonZeroI32::get)),
                &err,
            ))
        }
    }
}

fn pidfd_open(pid: NonZeroI32) -> io::Result<RawFd> {
    // SAFETY: pidfd_open takes two integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid.get(), 0) };
    match RawFd::try_from(fd) {
        Ok(fd) if fd >= 0 => Ok(fd),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Reads a fixed-size socket option.
fn socket_option<T: Copy>(stream: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = mem::MaybeUninit::<T>::zeroed();
    let mut len = mem::size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`.
    let rc = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            value.as_mut_ptr().cast(),
            &mut len,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    if len as usize != mem::size_of::<T>() {
        return Err(io::Error::other(format!(
            "socket option {name} has {len} bytes"
        )));
    }
    // SAFETY: the kernel has written all of it, and only plain integers are asked for.
    Ok(unsafe { value.assume_init() })
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

    #[test]
    fn a_peer_in_this_process_is_this_process() {
        let name = format!("kvferry-peer-process-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let near = UnixStream::connect_addr(&address).unwrap();
        let (far, _) = listener.accept().unwrap();
        for stream in [&near, &far] {
            let peer = PeerProcess::of_stream(stream.as_fd()).unwrap();
            assert_eq!(peer.pid(), Some(std::process::id() as i32));
            assert!(peer.is_alive());
        }
    }

    #[test]
    fn a_stream_that_is_not_unix_is_refused() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let err = PeerProcess::of_stream(stream.as_fd()).unwrap_err();
        assert!(
            matches!(
                err.status,
                Status::KVF_ERR_AUTH | Status::KVF_ERR_UNSUPPORTED
            ),
            "{err:?}"
        );
    }

    #[test]
    fn pidfd_open_serves_kernels_without_the_socket_option() {
        let mut child = std::process::Command::new("sleep")
            .arg("30")
            .spawn()
            .unwrap();
        let pid = NonZeroI32::new(child.id() as i32).unwrap();
        // SAFETY: a new descriptor.
        let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd_open(pid).unwrap()) };
        let peer = PeerProcess {
            pid: Some(pid),
            pidfd,
        };
        assert!(peer.is_alive());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!peer.is_alive());
    }
}
