//! File descriptors over a Unix stream (SCM_RIGHTS).
//!
//! Single non-blocking system calls; an event loop repeats them when they would block.

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Most descriptors in one message, the kernel's own limit (SCM_MAX_FD).
pub const MAX_FDS: usize = 253;

/// Room for a control message of [`MAX_FDS`] descriptors, aligned for its header.
#[repr(align(8))]
struct Control([u8; 2048]);

const FD_BYTES: usize = mem::size_of::<RawFd>();
const _: () = assert!(FD_BYTES * MAX_FDS + 64 <= 2048 && mem::align_of::<libc::cmsghdr>() <= 8);

fn control_space(fds: usize) -> usize {
    // SAFETY: CMSG_SPACE is arithmetic; `fds` is at most MAX_FDS.
    unsafe { libc::CMSG_SPACE((fds * FD_BYTES) as u32) as usize }
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

/// Sends the start of `bytes`, and all of `fds` with its first byte; returns how many bytes went.
/// The rest is then sent without descriptors. The descriptors stay the caller's.
///
/// # Errors
/// `WouldBlock`: nothing was sent. `InvalidInput`: no bytes to carry the descriptors, or more than
/// [`MAX_FDS`]. Never raises SIGPIPE.
pub fn try_send(stream: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > MAX_FDS {
        return Err(invalid(format!(
            "{} descriptors in one message of at most {MAX_FDS}",
            fds.len()
        )));
    }
    if bytes.is_empty() && !fds.is_empty() {
        return Err(invalid("descriptors need a byte to travel with".into()));
    }
    let mut control = Control([0; 2048]);
    let mut data = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: all-zero is a valid, empty msghdr.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &mut data;
    message.msg_iovlen = 1;
    if !fds.is_empty() {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control_space(fds.len()) as _;
        let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        // SAFETY: the buffer is aligned, zeroed and has room for this one header and its data.
        unsafe {
            let head = libc::CMSG_FIRSTHDR(&message);
            (*head).cmsg_level = libc::SOL_SOCKET;
            (*head).cmsg_type = libc::SCM_RIGHTS;
            (*head).cmsg_len = libc::CMSG_LEN((raw.len() * FD_BYTES) as u32) as _;
            ptr::copy_nonoverlapping(
                raw.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(head),
                raw.len() * FD_BYTES,
            );
        }
    }
    loop {
        // SAFETY: the message points at buffers that live here; the kernel only reads them.
        let sent = unsafe {
            libc::sendmsg(
                stream.as_raw_fd(),
                &message,
                libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
            )
        };
        match usize::try_from(sent) {
            Ok(sent) => return Ok(sent),
            Err(_) => {
                let err = io::Error::last_os_error();
                if err.kind() != io::ErrorKind::Interrupted {
                    return Err(err);
                }
            }
        }
    }
}

/// Receives bytes into `buf` and the descriptors that came with them (CLOEXEC); 0 bytes: the
/// stream has ended.
///
/// # Errors
/// `WouldBlock`: nothing there. `InvalidData`: the peer sent more than `max_fds` descriptors; those
/// that arrived are closed and the bytes are lost, so the stream is of no more use.
/// `InvalidInput`: an empty `buf`, or `max_fds` above [`MAX_FDS`].
pub fn try_recv(
    stream: BorrowedFd<'_>,
    buf: &mut [u8],
    max_fds: usize,
) -> io::Result<(usize, Vec<OwnedFd>)> {
    if buf.is_empty() || max_fds > MAX_FDS {
        return Err(invalid(format!(
            "receiving {max_fds} descriptors with {} bytes",
            buf.len()
        )));
    }
    let mut control = Control([0; 2048]);
    let mut data = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: all-zero is a valid, empty msghdr.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &mut data;
    message.msg_iovlen = 1;
    if max_fds > 0 {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control_space(max_fds) as _;
    }
    let received = loop {
        // SAFETY: the message points at buffers that live here, with their true lengths.
        let received = unsafe {
            libc::recvmsg(
                stream.as_raw_fd(),
                &mut message,
                libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT,
            )
        };
        match usize::try_from(received) {
            Ok(received) => break received,
            Err(_) => {
                let err = io::Error::last_os_error();
                if err.kind() != io::ErrorKind::Interrupted {
                    return Err(err);
                }
            }
        }
    };
    // Owned first, so that every refusal below closes them.
    let fds = take_fds(&message);
    if message.msg_flags & libc::MSG_CTRUNC != 0 || fds.len() > max_fds {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the peer sent more than {max_fds} descriptors"),
        ));
    }
    Ok((received, fds))
}

/// Takes possession of all descriptors of a received message.
fn take_fds(message: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled the control buffer and set its length; the macros walk inside.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !head.is_null() {
        // SAFETY: `head` is a header inside the buffer.
        let (level, kind, len) =
            unsafe { ((*head).cmsg_level, (*head).cmsg_type, (*head).cmsg_len) };
        if level == libc::SOL_SOCKET && kind == libc::SCM_RIGHTS {
            // SAFETY: arithmetic only.
            let head_len = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = len.saturating_sub(head_len) / FD_BYTES;
            // SAFETY: the data behind the header, `count` descriptors long.
            let first = unsafe { libc::CMSG_DATA(head) }.cast::<RawFd>();
            for i in 0..count {
                // SAFETY: the i-th descriptor, new in this process and owned by nobody else.
                fds.push(unsafe { OwnedFd::from_raw_fd(first.add(i).read_unaligned()) });
            }
        }
        // SAFETY: as for CMSG_FIRSTHDR.
        head = unsafe { libc::CMSG_NXTHDR(message, head) };
    }
    fds
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, UnixStream) {
        let (a, b) = UnixStream::pair().unwrap();
        a.set_nonblocking(true).unwrap();
        b.set_nonblocking(true).unwrap();
        (a, b)
    }

    /// Write ends of pipes and the read ends that tell when every copy of them is closed.
    fn pipes(n: usize) -> Vec<(io::PipeReader, io::PipeWriter)> {
        (0..n).map(|_| io::pipe().unwrap()).collect()
    }

    #[test]
    fn descriptors_arrive_with_their_bytes_and_close_on_exec() {
        let (a, b) = pair();
        let [(mut reader, writer)] = <[_; 1]>::try_from(pipes(1)).unwrap();
        assert_eq!(
            try_send(a.as_fd(), b"pool", &[writer.as_fd(), writer.as_fd()]).unwrap(),
            4
        );
        drop(writer);
        let mut buf = [0; 16];
        let (n, mut fds) = try_recv(b.as_fd(), &mut buf, 2).unwrap();
        assert_eq!((&buf[..n], fds.len()), (&b"pool"[..], 2));
        for fd in &fds {
            // SAFETY: reads the flags of an open descriptor.
            let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
            assert_ne!(flags & libc::FD_CLOEXEC, 0);
        }
        File::from(fds.remove(0)).write_all(b"x").unwrap();
        drop(fds);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all, b"x");
    }

    #[test]
    fn too_many_descriptors_are_refused_and_closed() {
        for (sent, max) in [(1, 0), (2, 1), (3, 2), (253, 252), (253, 1)] {
            let (a, b) = pair();
            let mut pipes = pipes(1);
            let (mut reader, writer) = pipes.remove(0);
            let fds = vec![writer.as_fd(); sent];
            try_send(a.as_fd(), b"z", &fds).unwrap();
            drop(fds);
            drop(writer);
            let err = try_recv(b.as_fd(), &mut [0; 8], max).unwrap_err();
            assert_eq!(err.kind(), io::ErrorKind::InvalidData, "{sent} of {max}");
            // End of file at once: no copy of the write end has survived.
            let mut rest = Vec::new();
            reader.read_to_end(&mut rest).unwrap();
            assert!(rest.is_empty());
        }
    }

    #[test]
    fn the_most_descriptors_pass() {
        let (a, b) = pair();
        let (_, writer) = pipes(1).remove(0);
        let fds = vec![writer.as_fd(); MAX_FDS];
        try_send(a.as_fd(), b"z", &fds).unwrap();
        let (_, received) = try_recv(b.as_fd(), &mut [0; 8], MAX_FDS).unwrap();
        assert_eq!(received.len(), MAX_FDS);
        let one_more = vec![writer.as_fd(); MAX_FDS + 1];
        let err = try_send(a.as_fd(), b"z", &one_more).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn nothing_blocks_and_a_closed_stream_is_an_error_not_a_signal() {
        let (a, b) = pair();
        let err = try_recv(b.as_fd(), &mut [0; 8], 1).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::WouldBlock);
        let full = loop {
            if let Err(err) = try_send(a.as_fd(), &[7; 65536], &[]) {
                break err;
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        drop(b);
        let err = try_send(a.as_fd(), b"z", &[]).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::BrokenPipe);
        let (c, d) = pair();
        drop(c);
        assert_eq!(try_recv(d.as_fd(), &mut [0; 8], 1).unwrap().0, 0);
    }

    #[test]
    fn descriptors_need_a_byte() {
        let (a, _b) = pair();
        let err = try_send(a.as_fd(), b"", &[a.as_fd()]).unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::InvalidInput);
    }
}
