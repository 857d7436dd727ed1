//! Making an engine's context current for the length of a few calls.

use std::ptr::null_mut;

use cudarc::driver::sys::CUcontext;

use super::Driver;
use crate::error::Result;
use crate::observe::fault;

/// An engine's context and the device that it is on. Never ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Context {
    /// The `CUcontext`.
    raw: usize,
    /// Its device.
    pub device: u32,
}

impl Context {
    pub(super) fn new(raw: CUcontext, device: u32) -> Self {
        Self {
            raw: raw.expose_provenance(),
            device,
        }
    }

    /// The context of this handle, which was a [`Self::handle`].
    pub fn from_handle(handle: usize, device: u32) -> Self {
        Self {
            raw: handle,
            device,
        }
    }

    /// The `CUcontext` as a number.
    pub fn handle(self) -> usize {
        self.raw
    }

    /// The calling thread's context; `None` if it has none.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` without a driver.
    pub fn current() -> Result<Option<Self>> {
        let driver = Driver::get()?;
        let mut raw: CUcontext = null_mut();
        // SAFETY: writes one pointer.
        let code = unsafe { (driver.table.ctx_current)(&mut raw) };
        driver.check(code, "cuCtxGetCurrent")?;
        if raw.is_null() {
            return Ok(None);
        }
        let mut device = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (driver.table.ctx_device)(&mut device) };
        driver.check(code, "cuCtxGetDevice")?;
        Ok(Some(Self::new(raw, device.unsigned_abs())))
    }

    /// Makes it the calling thread's until the result is dropped, which must be the last one made.
    ///
    /// # Errors
    /// The context is none any more, or there is no driver.
    pub fn enter(self) -> Result<Current> {
        Current::push(Driver::get()?, self)
    }

    pub(super) fn raw(self) -> CUcontext {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }
}

/// While it lives, the context is the calling thread's; then the one before is again.
#[derive(Debug)]
pub struct Current {
    driver: &'static Driver,
}

impl Current {
    /// # Errors
    /// The context is none any more, or has failed.
    pub(super) fn push(driver: &'static Driver, context: Context) -> Result<Self> {
        // SAFETY: a context that the driver or the engine named; the driver checks it.
        let code = unsafe { (driver.table.ctx_push)(context.raw()) };
        driver.check(code, "cuCtxPushCurrent")?;
        Ok(Self { driver })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if fault::deviates("cuda_keep_context") {
            return;
        }
        let mut popped = null_mut();
        // SAFETY: pushed by `push`; writes one pointer.
        unsafe { (self.driver.table.ctx_pop)(&mut popped) };
    }
}
