//! Pinned host memory: staging buffers of ours, and the engine's memory pinned at its wish.

use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

use super::current::Current;
use super::table::HOST_MEMORY_ALREADY_REGISTERED;
use super::{Context, Driver};
use crate::bail;
use crate::error::Result;

/// `CU_MEMHOSTALLOC_*` and `CU_MEMHOSTREGISTER_*` have the same numbers.
pub(super) const PORTABLE: u32 = 1;
pub(super) const DEVICE_MAP: u32 = 2;

/// A buffer of ours that the host and every device can use.
#[derive(Debug)]
pub(super) struct Staging {
    driver: &'static Driver,
    context: Context,
    base: NonNull<u8>,
    device: u64,
}

// SAFETY: an address range that belongs to the process; whoever uses the address answers for it.
unsafe impl Send for Staging {}

impl Staging {
    /// # Errors
    /// `KVF_ERR_NO_MEMORY`.
    pub fn new(driver: &'static Driver, context: Context, bytes: usize) -> Result<Self> {
        let _current = Current::push(driver, context)?;
        let mut base: *mut c_void = null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (driver.table.host_alloc)(&mut base, bytes, PORTABLE | DEVICE_MAP) };
        driver.check(code, format_args!("cuMemHostAlloc of {bytes} bytes"))?;
        let Some(base) = NonNull::new(base.cast::<u8>()) else {
            bail!(KVF_ERR_NO_MEMORY, "cuMemHostAlloc gave address 0");
        };
        let mut staging = Self {
            driver,
            context,
            base,
            device: 0,
        };
        staging.device = device_address(driver, base.as_ptr())?;
        Ok(staging)
    }

    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The same memory for kernels and copies.
    pub fn device(&self) -> u64 {
        self.device
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Ok(_current) = Current::push(self.driver, self.context) {
            // SAFETY: ours, freed once.
            unsafe { (self.driver.table.host_free)(self.base.as_ptr().cast()) };
        }
    }
}

/// The address that devices use, in the current context.
pub(super) fn device_address(driver: &Driver, base: *mut u8) -> Result<u64> {
    let mut device = 0;
    // SAFETY: writes one address; the driver checks that the memory is pinned.
    let code = unsafe { (driver.table.host_pointer)(&mut device, base.cast(), 0) };
    driver.check(code, "cuMemHostGetDevicePointer")?;
    Ok(device)
}

/// Host memory of the engine, pinned; unpinned when dropped.
#[derive(Debug)]
pub struct PinnedRange {
    driver: &'static Driver,
    context: Context,
    base: usize,
    device: u64,
}

impl PinnedRange {
    /// Pins `bytes` bytes at `base` for copies of every context.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` without a driver, `KVF_ERR_DUPLICATE` if it is pinned already,
    /// `KVF_ERR_NO_MEMORY`.
    ///
    /// # Safety
    /// The memory must stay mapped until the value is dropped.
    pub unsafe fn new(context: Context, base: *mut u8, bytes: u64) -> Result<Self> {
        let driver = Driver::get()?;
        let _current = Current::push(driver, context)?;
        let flags = PORTABLE | DEVICE_MAP;
        // SAFETY: memory that stays mapped, by the caller's contract.
        let code = unsafe { (driver.table.host_register)(base.cast(), bytes as usize, flags) };
        if code == HOST_MEMORY_ALREADY_REGISTERED {
            bail!(
                KVF_ERR_DUPLICATE,
                "{bytes} bytes at {base:p} are pinned already: register the pool without \
                 KVF_POOL_PINNED"
            );
        }
        driver.check(
            code,
            format_args!("cuMemHostRegister of {bytes} bytes at {base:p}"),
        )?;
        let mut range = Self {
            driver,
            context,
            base: base.expose_provenance(),
            device: 0,
        };
        range.device = device_address(driver, base)?;
        Ok(range)
    }

    /// The first byte as devices address it.
    pub fn device(&self) -> u64 {
        self.device
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        if let Ok(_current) = Current::push(self.driver, self.context) {
            let base: *mut c_void = std::ptr::with_exposed_provenance_mut(self.base);
            // SAFETY: pinned by `new`, unpinned once.
            unsafe { (self.driver.table.host_unregister)(base) };
        }
    }
}
