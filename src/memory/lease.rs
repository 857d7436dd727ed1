//! Lease words: one per publication, in a small shared page.
//!
//! A word is `generation << 1 | valid`. The source clears `valid` *before* it tells its engine that
//! slots may change; a reader looks at the word after its last byte. Both orders are fenced, so a
//! reader that finds its generation valid has read nothing that was written later.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use super::Mapping;
use super::memfd::{PageSize, Sealed};
use crate::bail;
use crate::error::{Error, Result, Status};

/// Bytes of the random value at the head of a table, which proves to a reader that it reaches the
/// right memory of the right process.
pub const NONCE_BYTES: usize = 16;

/// Bytes before the first word; one cache line.
pub const LEASE_HEAD_BYTES: u64 = 64;

/// A granted word: where it is and what it says while the lease holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Lease {
    /// Index in the source agent's lease table.
    pub index: u32,
    /// Generation that the word must still carry; never 0.
    pub generation: u64,
}

impl Lease {
    /// What the word says while the lease holds.
    pub fn word(self) -> u64 {
        self.generation << 1 | 1
    }

    /// Bytes from the table's start to the word.
    pub fn offset(self) -> u64 {
        LEASE_HEAD_BYTES + u64::from(self.index) * 8
    }
}

/// The source's table. Readers map its file or read its address.
pub struct LeaseTable {
    sealed: Sealed,
    capacity: u32,
    nonce: [u8; NONCE_BYTES],
    unused: Mutex<Unused>,
}

#[derive(Default)]
struct Unused {
    /// Words that were granted before.
    freed: Vec<u32>,
    /// The first word that never was.
    fresh: u32,
}

impl LeaseTable {
    /// A table of `capacity` words and a fresh nonce.
    ///
    /// # Errors
    /// As for [`super::Pool::create_shared`]; `KVF_ERR_SYSTEM` if there are no random bytes.
    pub fn create(capacity: u32) -> Result<Self> {
        if capacity == 0 {
            bail!(KVF_ERR_INVALID_ARGUMENT, "a lease table of 0 words");
        }
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|err| {
            Error::new(
                Status::KVF_ERR_SYSTEM,
                format!("no random bytes for the lease table: {err}"),
            )
        })?;
        let bytes = LEASE_HEAD_BYTES + u64::from(capacity) * 8;
        let sealed = Sealed::create("kvferry-leases", bytes, None, PageSize::Base)?;
        // SAFETY: the head is inside our writable mapping and no peer has seen the file yet.
        unsafe {
            sealed
                .region()
                .base()
                .as_ptr()
                .copy_from_nonoverlapping(nonce.as_ptr(), NONCE_BYTES);
        }
        Ok(Self {
            sealed,
            capacity,
            nonce,
            unused: Mutex::default(),
        })
    }

    /// Makes a word valid with a generation that it never had.
    ///
    /// # Errors
    /// `KVF_ERR_LIMIT` when all words are granted.
    pub fn grant(&self) -> Result<Lease> {
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        let index = match unused.freed.pop() {
            Some(index) => index,
            None if unused.fresh < self.capacity => {
                unused.fresh += 1;
                unused.fresh - 1
            }
            None => bail!(
                KVF_ERR_LIMIT,
                "all {} leases are in use; publish again when a publication has ended",
                self.capacity
            ),
        };
        let word = self.word(index);
        let lease = Lease {
            index,
            generation: (word.load(Ordering::Relaxed) >> 1) + 1,
        };
        word.store(lease.word(), Ordering::Release);
        Ok(lease)
    }

    /// Ends a lease; true if it held until now. When this returns, no reader can attest a byte
    /// that is written from now on.
    pub fn revoke(&self, lease: Lease) -> bool {
        if lease.index >= self.capacity {
            return false;
        }
        let mut unused = self.unused.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = self
            .word(lease.index)
            .compare_exchange(
                lease.word(),
                lease.generation << 1,
                Ordering::AcqRel,
                Ordering::Relaxed,
            )
            .is_ok();
        // Keeps the engine's next stores to the slots, streaming ones included, behind the word.
        fence(Ordering::SeqCst);
        if ended {
            unused.freed.push(lease.index);
        }
        ended
    }

    /// Whether the lease holds, for readers in this process: call it after the last byte.
    pub fn holds(&self, lease: Lease) -> bool {
        fence(Ordering::Acquire);
        lease.index < self.capacity
            && self.word(lease.index).load(Ordering::Relaxed) == lease.word()
    }

    /// Number of words.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The random value at the table's head.
    pub fn nonce(&self) -> [u8; NONCE_BYTES] {
        self.nonce
    }

    /// The file to send to a peer on this host.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.sealed.fd()
    }

    /// Length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        LEASE_HEAD_BYTES + u64::from(self.capacity) * 8
    }

    /// Address of the table in this process, for a peer that reads it through the kernel; a word
    /// is [`Lease::offset`] bytes behind it.
    pub fn address(&self) -> u64 {
        self.sealed.region().base().as_ptr().addr() as u64
    }

    /// `index` must be below the capacity.
    fn word(&self, index: u32) -> &AtomicU64 {
        debug_assert!(index < self.capacity);
        // SAFETY: the head is 64 bytes, the base page-aligned, so the word is aligned and inside
        // the mapping, which lives as long as `self`; all of this process's accesses are atomic
        // and peers can only read.
        unsafe { word_at(self.sealed.region().base().as_ptr(), index) }
    }
}

impl fmt::Debug for LeaseTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseTable")
            .field("capacity", &self.capacity)
            .finish_non_exhaustive() // the nonce is nobody else's business
    }
}

/// The reader's view of a peer's table.
#[derive(Debug)]
pub struct LeaseView {
    mapping: Mapping,
    capacity: u32,
}

impl LeaseView {
    /// A view of the table in a mapped file.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` if the file has no room for a word.
    pub fn new(mapping: Mapping) -> Result<Self> {
        let capacity = mapping.bytes().saturating_sub(LEASE_HEAD_BYTES) / 8;
        if capacity == 0 {
            bail!(
                KVF_ERR_PROTOCOL,
                "a lease table of {} bytes holds no word",
                mapping.bytes()
            );
        }
        Ok(Self {
            mapping,
            capacity: u32::try_from(capacity).unwrap_or(u32::MAX),
        })
    }

    /// Whether the lease holds: call it after the last byte.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` if the table has no such word.
    pub fn holds(&self, lease: Lease) -> Result<bool> {
        if lease.index >= self.capacity {
            bail!(
                KVF_ERR_PROTOCOL,
                "lease {} of a table of {}",
                lease.index,
                self.capacity
            );
        }
        // SAFETY: as in `LeaseTable::word`, inside the mapping. The pages are read-only here,
        // which a relaxed load of 8 bytes may be done on; the fence gives the order.
        let word = unsafe { word_at(self.mapping.base(), lease.index) };
        fence(Ordering::Acquire);
        Ok(word.load(Ordering::Relaxed) == lease.word())
    }

    /// The random value at the table's head.
    pub fn nonce(&self) -> [u8; NONCE_BYTES] {
        // SAFETY: the head is inside the mapping; a peer that writes it meanwhile changes which
        // bytes are copied and nothing else.
        unsafe {
            self.mapping
                .base()
                .cast::<[u8; NONCE_BYTES]>()
                .read_volatile()
        }
    }
}

/// The word with this index.
///
/// # Safety
/// `base` must be aligned to 8 and mapped for the head and `index + 1` words during `'a`.
unsafe fn word_at<'a>(base: *const u8, index: u32) -> &'a AtomicU64 {
    let offset = LEASE_HEAD_BYTES as usize + index as usize * 8;
    // SAFETY: by this function's contract.
    unsafe { &*base.add(offset).cast::<AtomicU64>() }
}
