//! Reading another process's memory through the kernel (`process_vm_readv`).

use std::fs;
use std::io;
use std::mem;
use std::ptr;

use super::PeerProcess;
use crate::err;
use crate::error::{Error, Result, Status};
use crate::transport::PIECE_BYTES;

/// Most ranges in one call on either side, the kernel's limit (UIO_MAXIOV).
const MAX_RANGES: usize = 1024;

/// Remote and local ranges of the next call. The two lists name the same bytes in the same order
/// but are cut differently: neighbours are merged on each side by itself.
#[derive(Default)]
pub(super) struct Window {
    remote: Vec<libc::iovec>,
    local: Vec<libc::iovec>,
    bytes: usize,
}

impl Window {
    /// Adds as much of a run as has room; returns how many bytes that was (0: read first).
    pub(super) fn push(&mut self, remote: u64, local: *mut u8, len: u64) -> usize {
        let remote: *mut libc::c_void = ptr::without_provenance_mut(remote as usize);
        let local: *mut libc::c_void = local.cast();
        let room = (PIECE_BYTES - self.bytes as u64).min(len) as usize;
        let joins = |list: &[libc::iovec], base: *mut libc::c_void| {
            list.last()
                .is_some_and(|last| last.iov_base.addr() + last.iov_len == base.addr())
        };
        let (join_remote, join_local) = (joins(&self.remote, remote), joins(&self.local, local));
        if room == 0
            || (!join_remote && self.remote.len() == MAX_RANGES)
            || (!join_local && self.local.len() == MAX_RANGES)
        {
            return 0;
        }
        for (list, base, join) in [
            (&mut self.remote, remote, join_remote),
            (&mut self.local, local, join_local),
        ] {
            match list.last_mut() {
                Some(last) if join => last.iov_len += room,
                _ => list.push(libc::iovec {
                    iov_base: base,
                    iov_len: room,
                }),
            }
        }
        self.bytes += room;
        room
    }

    /// Reads everything and empties the window; returns the bytes read. `place` names a remote
    /// address in messages.
    ///
    /// # Errors
    /// See [`explain`]. What was read before stays.
    ///
    /// # Safety
    /// All local ranges must be writable; nobody may hold references to them.
    pub(super) unsafe fn read(
        &mut self,
        peer: &PeerProcess,
        place: impl Fn(u64) -> String,
    ) -> Result<u64> {
        let bytes = mem::take(&mut self.bytes);
        let (mut remote, mut local) = (&mut self.remote[..], &mut self.local[..]);
        let mut left = bytes;
        let outcome = loop {
            if left == 0 {
                break Ok(bytes as u64);
            }
            // SAFETY: by this function's contract; remote addresses are the kernel's to check.
            match unsafe { read_once(peer, remote, local) } {
                // A prefix was readable: the next call starts at the byte that was not.
                Ok(n) if n > 0 && n <= left => {
                    left -= n;
                    remote = skip(remote, n);
                    local = skip(local, n);
                }
                outcome => {
                    let err = outcome.err().unwrap_or_else(|| {
                        io::Error::from_raw_os_error(libc::EFAULT) // 0 bytes of some
                    });
                    let at = remote
                        .first()
                        .map_or(0, |range| range.iov_base.addr() as u64);
                    break Err(explain(peer, &err, &place(at), left));
                }
            }
        };
        self.remote.clear();
        self.local.clear();
        outcome
    }
}

/// One call; `EINTR` is repeated.
///
/// # Safety
/// As for [`Window::read`].
unsafe fn read_once(
    peer: &PeerProcess,
    remote: &[libc::iovec],
    local: &[libc::iovec],
) -> io::Result<usize> {
    let Some(pid) = peer.pid() else {
        return Err(io::Error::from_raw_os_error(libc::ENOSYS));
    };
    loop {
        // SAFETY: by the contract; the kernel checks the remote side.
        let n = unsafe {
            libc::process_vm_readv(
                pid,
                local.as_ptr(),
                local.len() as libc::c_ulong,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        match usize::try_from(n) {
            Ok(n) => return Ok(n),
            Err(_) => {
                let err = io::Error::last_os_error();
                if err.kind() != io::ErrorKind::Interrupted {
                    return Err(err);
                }
            }
        }
    }
}

/// The ranges behind the first `n` bytes.
fn skip(ranges: &mut [libc::iovec], mut n: usize) -> &mut [libc::iovec] {
    let mut whole = 0;
    while let Some(range) = ranges.get(whole)
        && range.iov_len <= n
    {
        n -= range.iov_len;
        whole += 1;
    }
    let rest = &mut ranges[whole..];
    if let Some(range) = rest.first_mut() {
        range.iov_base = range.iov_base.wrapping_byte_add(n);
        range.iov_len -= n;
    }
    rest
}

/// Reads the bytes at two addresses in one call, the second after the first.
///
/// # Errors
/// See [`explain`].
pub(super) fn read_pair<const A: usize, const B: usize>(
    peer: &PeerProcess,
    at: (u64, u64),
    what: &str,
) -> Result<([u8; A], [u8; B])> {
    let (mut a, mut b) = ([0; A], [0; B]);
    let mut window = Window::default();
    window.push(at.0, a.as_mut_ptr(), A as u64);
    window.push(at.1, b.as_mut_ptr(), B as u64);
    // SAFETY: the local ranges are `a` and `b`, whose only borrows have become the pointers.
    unsafe { window.read(peer, |_| what.to_owned()) }?;
    Ok((a, b))
}

/// What a failed call means: `KVF_ERR_PEER_LOST` if the process has ended, `KVF_ERR_UNSUPPORTED`
/// with what to do if the kernel does not allow it, `KVF_ERR_TRANSFER` naming the place otherwise.
fn explain(peer: &PeerProcess, err: &io::Error, place: &str, left: usize) -> Error {
    let what = format!(
        "process_vm_readv of {} at {place} ({left} bytes left)",
        peer.describe()
    );
    match err.raw_os_error() {
        Some(libc::ESRCH) => Error::os(Status::KVF_ERR_PEER_LOST, what, err),
        // Not allowed, or filtered or left out of the kernel.
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => {
            Error::new(Status::KVF_ERR_UNSUPPORTED, refusal(peer, &what, err))
        }
        // A dying process loses its memory before it is seen to have ended.
        _ if !peer.is_alive() => Error::os(Status::KVF_ERR_PEER_LOST, what, err),
        Some(libc::EFAULT) => err!(
            KVF_ERR_TRANSFER,
            "{what}: the memory is not mapped there any more, in the peer or here; unregister a pool before freeing it"
        ),
        _ => Error::os(Status::KVF_ERR_TRANSFER, what, err),
    }
}

fn refusal(peer: &PeerProcess, what: &str, err: &io::Error) -> String {
    const INSTEAD: &str =
        "or take the cache's memory from kvf_host_pool_create, which is mapped instead";
    if peer.pid().is_none() {
        return format!(
            "{what}: no pid; share one pid namespace between the containers, {INSTEAD}"
        );
    }
    let yama = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let how = match (err.raw_os_error(), yama.trim()) {
        (Some(libc::ENOSYS), _) => {
            "the kernel or a seccomp filter has no process_vm_readv; allow the call".to_owned()
        }
        (_, scope @ ("1" | "2" | "3")) => format!(
            "yama's ptrace_scope is {scope}; set kernel.yama.ptrace_scope=0, or (at 1) let the source process call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY), or (below 3) grant CAP_SYS_PTRACE"
        ),
        _ => "the processes differ in user, capabilities or container; grant CAP_SYS_PTRACE, or run both in one container"
            .to_owned(),
    };
    format!("{what}: {err}: {how}, {INSTEAD}")
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    fn this_process() -> PeerProcess {
        // A pair's credentials are its maker's.
        let (stream, _other) = UnixStream::pair().unwrap();
        PeerProcess::of_stream(stream.as_fd()).unwrap()
    }

    fn list(ranges: &[libc::iovec]) -> Vec<(usize, usize)> {
        ranges
            .iter()
            .map(|range| (range.iov_base.addr(), range.iov_len))
            .collect()
    }

    #[test]
    fn neighbours_merge_on_each_side_by_itself() {
        let at = |address: usize| ptr::without_provenance_mut(address);
        let mut window = Window::default();
        assert_eq!(window.push(1000, at(50), 10), 10);
        assert_eq!(window.push(1010, at(90), 5), 5);
        assert_eq!(window.push(2000, at(95), 7), 7);
        assert_eq!(list(&window.remote), [(1000, 15), (2000, 7)]);
        assert_eq!(list(&window.local), [(50, 10), (90, 12)]);
    }

    #[test]
    fn a_window_is_full_at_1024_ranges_or_4_mib() {
        let at = |address: usize| ptr::without_provenance_mut(address);
        let mut window = Window::default();
        for i in 0..1024 {
            assert_eq!(window.push(0x10_0000 + i * 10, at(i as usize), 1), 1);
        }
        assert_eq!((window.remote.len(), window.local.len()), (1024, 1));
        assert_eq!(window.push(0, at(1024), 1), 0, "a new remote range");
        let end = 0x10_0000 + 1023 * 10 + 1;
        assert_eq!(window.push(end, at(1024), 8 << 20), (4 << 20) - 1024);
        assert_eq!(window.push(end + (4 << 20) - 1024, at(4 << 20), 1), 0);
        assert_eq!(window.remote.len(), 1024);
    }

    #[test]
    fn a_cut_call_goes_on_where_it_stopped() {
        let range = |base: usize, len| libc::iovec {
            iov_base: ptr::without_provenance_mut(base),
            iov_len: len,
        };
        for (n, expected) in [
            (0, vec![(100, 10), (200, 20), (300, 5)]),
            (9, vec![(109, 1), (200, 20), (300, 5)]),
            (10, vec![(200, 20), (300, 5)]),
            (11, vec![(201, 19), (300, 5)]),
            (30, vec![(300, 5)]),
            (35, vec![]),
        ] {
            let mut ranges = [range(100, 10), range(200, 20), range(300, 5)];
            assert_eq!(list(skip(&mut ranges, n)), expected, "{n}");
        }
    }

    #[test]
    fn two_places_are_read_in_one_call() {
        let peer = this_process();
        let (a, b) = (*b"0123456789abcdef", 0x0102_0304_0506_0708u64.to_ne_bytes());
        let at = (a.as_ptr().addr() as u64, b.as_ptr().addr() as u64);
        let read: ([u8; 16], [u8; 8]) = read_pair(&peer, at, "here").unwrap();
        assert_eq!(read, (a, b));
        let err = read_pair::<16, 8>(&peer, (at.0, 8), "nowhere").unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_TRANSFER);
        assert!(err.text.contains("nowhere (8 bytes left)"), "{err}");
    }

    #[test]
    fn each_refusal_has_its_status_and_a_way_out() {
        let peer = this_process();
        for (errno, status, part) in [
            (libc::ESRCH, Status::KVF_ERR_PEER_LOST, "process"),
            (libc::EPERM, Status::KVF_ERR_UNSUPPORTED, "CAP_SYS_PTRACE"),
            (libc::ENOSYS, Status::KVF_ERR_UNSUPPORTED, "seccomp"),
            (libc::EFAULT, Status::KVF_ERR_TRANSFER, "not mapped there"),
            (libc::ENOMEM, Status::KVF_ERR_TRANSFER, "allocate"),
        ] {
            let err = explain(&peer, &io::Error::from_raw_os_error(errno), "pool 3", 9);
            assert_eq!(err.status, status, "{err}");
            assert!(err.text.contains(part), "{err}");
            assert!(err.text.contains("pool 3 (9 bytes left)"), "{err}");
            if status == Status::KVF_ERR_UNSUPPORTED {
                assert!(err.text.contains("kvf_host_pool_create"), "{err}");
            }
        }
    }
}
