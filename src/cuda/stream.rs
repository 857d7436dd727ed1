//! Streams of the engine, and events on them.

use std::ptr::null_mut;

use cudarc::driver::sys::{CUcontext, CUevent, CUevent_flags, CUstream};

use super::current::Current;
use super::table::{NOT_READY, SUCCESS};
use super::{Context, Driver};
use crate::bail;
use crate::error::Result;

/// A `CUstream` of the caller: a stream of its own, or one of the default streams by their
/// numbers in the driver's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallerStream(usize);

impl CallerStream {
    /// `None` for NULL, which means "no stream".
    pub fn new(stream: *mut std::ffi::c_void) -> Option<Self> {
        (!stream.is_null()).then(|| Self(stream.expose_provenance()))
    }

    pub(super) fn raw(self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.0)
    }

    /// 1 = `CU_STREAM_LEGACY`, 2 = `CU_STREAM_PER_THREAD`.
    fn is_default(self) -> bool {
        matches!(self.0, 1 | 2)
    }

    /// The stream's context: of a default stream, the calling thread's current one.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for what the driver does not take for a stream, for a default
    /// stream of a thread without a context, and for a context that is not in `allowed` (empty =
    /// any); `KVF_ERR_UNSUPPORTED` without a driver and for a stream that is being captured.
    pub fn context(self, allowed: &[Context]) -> Result<Context> {
        let driver = Driver::get()?;
        let mut raw: CUcontext = null_mut();
        let code = if self.is_default() {
            // SAFETY: writes one pointer.
            unsafe { (driver.table.ctx_current)(&mut raw) }
        } else {
            // SAFETY: writes one pointer; the stream is live by the caller's contract.
            unsafe { (driver.table.stream_context)(self.raw(), &mut raw) }
        };
        if code != SUCCESS {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "stream {:#x} is no stream of the CUDA driver: cuStreamGetCtx: {}",
                self.0,
                driver.name(code)
            );
        }
        if raw.is_null() {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the default stream {} belongs to the thread's current context, and this thread \
                 has none: call cudaSetDevice or cuCtxSetCurrent first, or give a stream",
                self.0
            );
        }
        let mut context = Context::new(raw, 0);
        let current = Current::push(driver, context)?;
        let mut device = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (driver.table.ctx_device)(&mut device) };
        driver.check(code, "cuCtxGetDevice")?;
        self.refuse_capture(driver)?;
        drop(current);
        context.device = device.unsigned_abs();
        if !allowed.is_empty() && !allowed.contains(&context) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "stream {:#x} is in a context of device {} in which none of the pools concerned \
                 was allocated (device {}): give a stream of the memory's context",
                self.0,
                context.device,
                allowed[0].device
            );
        }
        Ok(context)
    }

    fn refuse_capture(self, driver: &Driver) -> Result<()> {
        let Some(capturing) = driver.table.stream_capturing else {
            return Ok(());
        };
        let mut state = 0;
        // SAFETY: writes one integer; the stream is live.
        let code = unsafe { capturing(self.raw(), &mut state) };
        driver.check(code, format_args!("stream {:#x}", self.0))?;
        if state != 0 {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "stream {:#x} is being captured into a graph, which is not served yet",
                self.0
            );
        }
        Ok(())
    }
}

/// An event of ours in a context of the engine.
#[derive(Debug)]
pub(super) struct Event {
    driver: &'static Driver,
    context: Context,
    raw: usize,
}

impl Event {
    /// Marks what `stream` holds so far.
    pub fn record(driver: &'static Driver, context: Context, stream: CUstream) -> Result<Self> {
        let event = Self::new(driver, context)?;
        event.mark(stream)?;
        Ok(event)
    }

    /// An event that marks nothing yet.
    pub fn new(driver: &'static Driver, context: Context) -> Result<Self> {
        let _current = Current::push(driver, context)?;
        let mut raw: CUevent = null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one pointer.
        let code = unsafe { (driver.table.event_create)(&mut raw, flags) };
        driver.check(code, "cuEventCreate")?;
        Ok(Self {
            driver,
            context,
            raw: raw.expose_provenance(),
        })
    }

    /// As [`Self::record`], with an event that is there.
    pub fn mark(&self, stream: CUstream) -> Result<()> {
        let _current = Current::push(self.driver, self.context)?;
        // SAFETY: our event and a live stream of the same context.
        let code = unsafe { (self.driver.table.event_record)(self.raw(), stream) };
        self.driver.check(code, "cuEventRecord")
    }

    pub fn raw(&self) -> CUevent {
        std::ptr::with_exposed_provenance_mut(self.raw)
    }

    /// Whether everything before it is done.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: the context has failed, and nothing of it will run any more.
    pub fn is_done(&self) -> Result<bool> {
        let _current = Current::push(self.driver, self.context)?;
        // SAFETY: our event.
        match unsafe { (self.driver.table.event_query)(self.raw()) } {
            NOT_READY => Ok(false),
            code => self.driver.check(code, "cuEventQuery").map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = Current::push(self.driver, self.context) {
            // SAFETY: ours, destroyed once; the driver keeps it until waits on it are over.
            unsafe { (self.driver.table.event_destroy)(self.raw()) };
        }
    }
}
