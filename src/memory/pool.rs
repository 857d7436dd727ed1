//! Memory of this process that transfers read from or write to.

use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::check;
use super::memfd::{PageSize, Sealed, system_page};
use crate::bail;
use crate::error::Result;
use crate::observe::fault;

/// Who made a pool's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PoolKind {
    /// kvferry: a sealed memfd that peers on this host map.
    Shared,
    /// The engine; peers on this host read it through the kernel.
    Registered,
    /// The engine, on a CUDA device: this process cannot address it.
    Device,
}

/// How a device reaches a pool: memory of its own, or host memory that is pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnDevice {
    /// Number of the device.
    pub device: u32,
    /// The `CUcontext` that it belongs to.
    pub context: usize,
    /// First byte as the device addresses it.
    pub address: u64,
}

/// What is undone before a pool's memory may be freed.
type Pin = Box<dyn std::fmt::Debug + Send + Sync>;

/// A registered memory range. Shared memory is unmapped when the pool is dropped; registered
/// memory stays the engine's.
#[derive(Debug)]
pub struct Pool {
    id: u32,
    base: NonNull<u8>,
    bytes: u64,
    page_bytes: u64,
    on_device: Option<OnDevice>,
    kind: PoolKind,
    // Before the memory: fields are dropped in this order.
    pin: Mutex<Option<Pin>>,
    shared: Option<Sealed>,
    gate: Mutex<Gate>,
}

/// Who reads the pool from this process right now (copies inside it, data connections).
#[derive(Default)]
struct Gate {
    readers: u32,
    closed: bool,
    on_idle: Option<Box<dyn FnOnce() + Send>>,
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Gate({} readers, closed {})", self.readers, self.closed)
    }
}

/// Keeps a pool open for one piece.
pub type Entered<'a> = Guard<&'a Pool>;

/// See [`Entered`] and [`Pool::enter_shared`].
#[derive(Debug)]
pub struct Guard<P: Deref<Target = Pool>> {
    pool: P,
}

impl<P: Deref<Target = Pool>> Drop for Guard<P> {
    fn drop(&mut self) {
        let mut gate = self.pool.gate();
        gate.readers -= 1;
        if gate.readers == 0
            && gate.closed
            && let Some(on_idle) = gate.on_idle.take()
        {
            drop(gate);
            on_idle();
        }
    }
}

// SAFETY: a Pool is an address range with an owner; the memory belongs to the process, not to a
// thread (`register`'s contract), and unmapping works from any thread.
unsafe impl Send for Pool {}
// SAFETY: no method reads or writes the range; whoever uses the raw base answers for the access.
unsafe impl Sync for Pool {}

impl Pool {
    /// Makes a pool of `bytes` zero bytes in shared memory, every page present, sealed.
    /// `numa_node` binds its pages.
    ///
    /// # Errors
    /// `KVF_ERR_NO_MEMORY` when memory (machine, NUMA node, control group, reserved huge pages)
    /// does not suffice, `KVF_ERR_INVALID_ARGUMENT` for 0 bytes or an unknown node,
    /// `KVF_ERR_UNSUPPORTED` where the kernel refuses memfds, seals, the page size or the binding.
    pub fn create_shared(
        id: u32,
        bytes: u64,
        numa_node: Option<u32>,
        pages: PageSize,
    ) -> Result<Self> {
        let sealed = Sealed::create(&format!("kvferry-pool-{id}"), bytes, numa_node, pages)?;
        Ok(Self {
            id,
            base: sealed.region().base(),
            bytes,
            page_bytes: pages.bytes(),
            on_device: None,
            kind: PoolKind::Shared,
            pin: Mutex::default(),
            shared: Some(sealed),
            gate: Mutex::default(),
        })
    }

    /// Takes note of the engine's own memory.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for NULL, 0 bytes, a range that wraps around, or one with an
    /// address that is not mapped readable and writable (the text names the first).
    ///
    /// # Safety
    /// The range must stay mapped, readable and writable from any thread until the pool has been
    /// dropped.
    pub unsafe fn register(id: u32, base: *mut u8, bytes: u64) -> Result<Self> {
        let Some(base) = NonNull::new(base) else {
            bail!(KVF_ERR_INVALID_ARGUMENT, "pool {id}: base is NULL");
        };
        if bytes == 0 {
            bail!(KVF_ERR_INVALID_ARGUMENT, "pool {id}: 0 bytes");
        }
        let start = base.as_ptr().addr();
        let len = match usize::try_from(bytes) {
            Ok(len) if isize::try_from(bytes).is_ok() && start.checked_add(len).is_some() => len,
            _ => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "pool {id}: {bytes} bytes from {start:#x} wrap around the address space"
            ),
        };
        // Miri has no list of mappings; it checks every access by itself.
        if !cfg!(miri) {
            check::readable_and_writable(start, len)
                .map_err(|err| err.context(format_args!("pool {id}")))?;
        }
        Ok(Self {
            id,
            base,
            bytes,
            page_bytes: if cfg!(miri) { 4096 } else { system_page() },
            on_device: None,
            kind: PoolKind::Registered,
            pin: Mutex::default(),
            shared: None,
            gate: Mutex::default(),
        })
    }

    /// Takes note of memory on a device, which the caller has checked. [`Self::base`] is its
    /// address there: nothing of this process may read or write it.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for address 0.
    pub fn on_a_device(id: u32, bytes: u64, place: OnDevice) -> Result<Self> {
        let base = std::ptr::with_exposed_provenance_mut(place.address as usize);
        let Some(base) = NonNull::new(base) else {
            bail!(KVF_ERR_INVALID_ARGUMENT, "pool {id}: base is NULL");
        };
        Ok(Self {
            id,
            base,
            bytes,
            page_bytes: if cfg!(miri) { 4096 } else { system_page() },
            on_device: Some(place),
            kind: PoolKind::Device,
            pin: Mutex::default(),
            shared: None,
            gate: Mutex::default(),
        })
    }

    /// A range of this process for the length of a copy, unchecked.
    ///
    /// # Safety
    /// As for [`Self::register`].
    pub unsafe fn passing(id: u32, base: NonNull<u8>, bytes: u64) -> Self {
        Self {
            id,
            base,
            bytes,
            page_bytes: 1,
            on_device: None,
            kind: PoolKind::Registered,
            pin: Mutex::default(),
            shared: None,
            gate: Mutex::default(),
        }
    }

    /// Notes that the pool is pinned; `pin` is dropped by [`Self::unpin`], at the latest with the
    /// pool.
    #[must_use]
    pub fn pinned(mut self, place: OnDevice, pin: Pin) -> Self {
        self.on_device = Some(place);
        self.pin = Mutex::new(Some(pin));
        self
    }

    /// Undoes [`Self::pinned`], before "may be freed" is said. No copy may be running.
    pub fn unpin(&self) {
        if fault::deviates("cuda_keep_pin") {
            return;
        }
        let pin = self
            .pin
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(pin);
    }

    /// How a device reaches the pool; `None`: not at all.
    pub fn on_device(&self) -> Option<OnDevice> {
        self.on_device
    }

    /// Whether it is memory of a device.
    pub fn is_device(&self) -> bool {
        self.kind == PoolKind::Device
    }

    fn gate(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a reader of this process in for one piece; `None`: the pool is closed.
    pub fn enter(&self) -> Option<Entered<'_>> {
        let mut gate = self.gate();
        if gate.closed {
            return None;
        }
        gate.readers += 1;
        Some(Guard { pool: self })
    }

    /// As [`Self::enter`]; the guard keeps the pool too.
    pub fn enter_shared(self: &Arc<Self>) -> Option<Guard<Arc<Self>>> {
        std::mem::forget(self.enter()?); // counted: the new guard takes over
        Some(Guard { pool: self.clone() })
    }

    /// Lets no reader in any more. True: none is inside either, so no thread of this process
    /// touches the memory; false: `on_idle` is called when the last one has left.
    pub fn close(&self, on_idle: impl FnOnce() + Send + 'static) -> bool {
        let mut gate = self.gate();
        gate.closed = true;
        if gate.readers > 0 {
            gate.on_idle = Some(Box::new(on_idle));
        }
        gate.readers == 0
    }

    /// Takes [`Self::close`] back.
    pub fn reopen(&self) {
        let mut gate = self.gate();
        gate.closed = false;
        gate.on_idle = None;
    }

    /// The agent's id of the pool.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// First byte. Valid for [`Self::bytes`] bytes while the pool exists; of a device pool an
    /// address that only the device can use.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Length in bytes, as asked for.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Who made the memory.
    pub fn kind(&self) -> PoolKind {
        self.kind
    }

    /// The file to send to a peer that maps the pool; `None` for the engine's own memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref().map(Sealed::fd)
    }

    /// Page size that was asked for, in bytes; the system's for registered memory.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Whether the two pools have an address in common.
    pub fn overlaps(&self, other: &Self) -> bool {
        let range = |pool: &Self| {
            let start = pool.base.as_ptr().addr() as u64;
            (start, start + pool.bytes)
        };
        let ((a, a_end), (b, b_end)) = (range(self), range(other));
        a < b_end && b < a_end
    }
}
