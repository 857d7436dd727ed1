//! A range of this process's address space that is unmapped when dropped.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};

/// A mapping owned by this value.
#[derive(Debug)]
pub(super) struct Region {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a Region is an address range; unmapping it is allowed from any thread, and it gives out
// nothing but raw pointers, whose users answer for their own accesses.
unsafe impl Send for Region {}
// SAFETY: as above; no method reads or writes the mapped bytes.
unsafe impl Sync for Region {}

impl Region {
    /// Maps the first `len` bytes of a file, shared.
    pub(super) fn map_shared(fd: BorrowedFd<'_>, len: usize, writable: bool) -> io::Result<Self> {
        let mut protection = libc::PROT_READ;
        if writable {
            protection |= libc::PROT_WRITE;
        }
        // SAFETY: a new mapping at an address the kernel chooses replaces nothing.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Self { base, len }),
            None => Err(io::Error::other("mmap gave address 0")),
        }
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// `madvise` over the whole range.
    pub(super) fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        loop {
            // SAFETY: the range is ours; the advices used here change no contents.
            let rc = unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, advice) };
            if rc == 0 {
                return Ok(());
            }
            let err = io::Error::last_os_error();
            if err.kind() != io::ErrorKind::Interrupted {
                return Err(err);
            }
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map_shared` and nobody else unmaps it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
