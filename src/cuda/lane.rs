//! A stream of ours in a context of the engine, with a pinned buffer: copies, and waiting for
//! them with a limit.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUstream, CUstream_flags};

use super::current::Current;
use super::pinned::Staging;
use super::stream::Event;
use super::table::{NOT_READY, SUCCESS};
use super::{Context, Driver};
use crate::error::Result;

/// Axes of a [`Copy`].
pub const MAX_DIMS: usize = 5;

/// One axis: `count` repetitions, so many bytes apart on either side.
#[derive(Clone, Copy, Debug, Default)]
pub struct Dim {
    /// Repetitions, at least 1.
    pub count: u64,
    /// Bytes between them at the source.
    pub src: u64,
    /// Bytes between them at the destination.
    pub dst: u64,
}

/// A strided copy between addresses that the lane's context can use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copy {
    /// First byte written.
    pub dst: u64,
    /// First byte read.
    pub src: u64,
    /// Contiguous bytes.
    pub run: u64,
    /// Axes, outermost first.
    pub dims: [Dim; MAX_DIMS],
    /// Axes in use.
    pub rank: u8,
    /// Set if the source is memory of another context.
    pub from: Option<Context>,
}

/// How a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// Everything enqueued is done.
    Done,
    /// Not yet.
    Late,
}

/// How often a wait asks the driver whether the context still works.
const QUERY_EVERY: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
struct Signal {
    done: Mutex<u64>,
    changed: Condvar,
}

/// A stream and a buffer, used by one thread at a time.
#[derive(Debug)]
pub struct Lane {
    driver: &'static Driver,
    context: Context,
    stream: usize,
    signal: Arc<Signal>,
    marked: u64,
    staging: Option<Staging>,
    /// Bytes of the buffer.
    staging_bytes: usize,
}

impl Lane {
    pub(super) fn new(driver: &'static Driver, context: Context) -> Result<Self> {
        let _current = Current::push(driver, context)?;
        let mut stream: CUstream = null_mut();
        // Not ordered against the engine's legacy default stream in either direction.
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one pointer.
        let code = unsafe { (driver.table.stream_create)(&mut stream, flags) };
        driver.check(code, "cuStreamCreate")?;
        Ok(Self {
            driver,
            context,
            stream: stream.expose_provenance(),
            signal: Arc::default(),
            marked: 0,
            staging: None,
            staging_bytes: 0,
        })
    }

    /// The context whose memory it copies.
    pub fn context(&self) -> Context {
        self.context
    }

    fn raw(&self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.stream)
    }

    /// A pinned buffer of at least `bytes` bytes: its address for the host and for the device. The
    /// same one each time, unless a larger one is needed.
    ///
    /// # Errors
    /// `KVF_ERR_NO_MEMORY`.
    pub fn staging(&mut self, bytes: usize) -> Result<(*mut u8, u64)> {
        if self.staging_bytes < bytes {
            self.staging = None;
            self.staging_bytes = 0;
        }
        let staging = match self.staging.take() {
            Some(staging) => staging,
            None => Staging::new(self.driver, self.context, bytes)?,
        };
        self.staging_bytes = self.staging_bytes.max(bytes);
        let staging = self.staging.insert(staging);
        Ok((staging.base(), staging.device()))
    }

    /// Enqueues copies, in order.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the driver's reason; what was enqueued before still runs.
    ///
    /// # Safety
    /// Both sides of every copy must be valid, and not be read or written otherwise, until a wait
    /// has said [`Waited::Done`].
    pub unsafe fn copy(&mut self, copies: &[Copy]) -> Result<()> {
        let _current = Current::push(self.driver, self.context)?;
        for copy in copies {
            // SAFETY: passed on to the caller.
            unsafe { self.copy_runs(copy) }?;
        }
        Ok(())
    }

    unsafe fn copy_runs(&self, copy: &Copy) -> Result<()> {
        let dims = &copy.dims[..usize::from(copy.rank).min(MAX_DIMS)];
        let runs: u64 = dims.iter().map(|dim| dim.count).product();
        for number in 0..runs {
            let (mut left, mut src, mut dst) = (number, copy.src, copy.dst);
            for dim in dims.iter().rev() {
                let at = left % dim.count;
                left /= dim.count;
                src += at * dim.src;
                dst += at * dim.dst;
            }
            // SAFETY: valid on both sides by the caller's contract.
            unsafe { self.copy_run(dst, src, copy.run, copy.from) }?;
        }
        Ok(())
    }

    unsafe fn copy_run(&self, dst: u64, src: u64, run: u64, from: Option<Context>) -> Result<()> {
        let (table, stream) = (&self.driver.table, self.raw());
        let code = match (from, table.copy_peer) {
            (Some(from), Some(copy_peer)) => {
                let ours = self.context.raw();
                // SAFETY: valid on both sides by the caller's contract.
                unsafe { copy_peer(dst, ours, src, from.raw(), run as usize, stream) }
            }
            // SAFETY: as above.
            _ => unsafe { (table.copy)(dst, src, run as usize, stream) },
        };
        self.driver.check(
            code,
            format_args!(
                "copying {run} bytes from {src:#x} to {dst:#x} on device {}",
                self.context.device
            ),
        )
    }

    /// Lets later work wait for an event of an engine's stream.
    pub(super) fn wait_for(&mut self, event: &Event) -> Result<()> {
        let _current = Current::push(self.driver, self.context)?;
        // SAFETY: our stream and a live event.
        let code = unsafe { (self.driver.table.stream_wait_event)(self.raw(), event.raw(), 0) };
        self.driver.check(code, "cuStreamWaitEvent")
    }

    /// Has `call` called by a thread of the driver when everything enqueued so far is done; never,
    /// if the context fails before.
    pub(super) fn call(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        let _current = Current::push(self.driver, self.context)?;
        let data = Box::into_raw(Box::new(call));
        // SAFETY: `called` takes the box, once.
        let code =
            unsafe { (self.driver.table.launch_host)(self.raw(), Some(called), data.cast()) };
        if code != SUCCESS {
            // SAFETY: refused, so nobody else has the box.
            drop(unsafe { Box::from_raw(data) });
        }
        self.driver.check(code, "cuLaunchHostFunc")
    }

    /// Makes [`Self::wait`] wait for what was enqueued so far.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the driver's reason.
    pub fn mark(&mut self) -> Result<()> {
        let signal = self.signal.clone();
        // First, so that a wait asks the driver if it refuses the call.
        self.marked += 1;
        self.call(Box::new(move || {
            *signal.done.lock().unwrap_or_else(PoisonError::into_inner) += 1;
            signal.changed.notify_all();
        }))
    }

    /// Waits until the last mark is reached, `until` at most.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: the context has failed, and nothing is known about what was enqueued.
    pub fn wait(&mut self, until: Instant) -> Result<Waited> {
        let signal = self.signal.clone();
        let mut done = signal.done.lock().unwrap_or_else(PoisonError::into_inner);
        while *done < self.marked {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Waited::Late);
            }
            let waited = signal.changed.wait_timeout(done, left.min(QUERY_EVERY));
            let (now, time) = waited.unwrap_or_else(PoisonError::into_inner);
            done = now;
            // The driver calls nobody back in a context that has failed.
            if time.timed_out() && *done < self.marked && self.is_idle()? {
                *done = self.marked;
            }
        }
        Ok(Waited::Done)
    }

    /// Whether everything enqueued is done.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: the context has failed.
    pub fn is_idle(&self) -> Result<bool> {
        let _current = Current::push(self.driver, self.context)?;
        // SAFETY: our stream.
        match unsafe { (self.driver.table.stream_query)(self.raw()) } {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            code => {
                let device = self.context.device;
                self.driver.check(
                    code,
                    format_args!("the context of device {device} has failed"),
                )?;
                Ok(true)
            }
        }
    }

    /// Gives it up with everything it holds, because the device may still use it.
    pub fn abandon(self) {
        std::mem::forget(self);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.staging = None;
        if let Ok(_current) = Current::push(self.driver, self.context) {
            // SAFETY: ours, destroyed once.
            unsafe { (self.driver.table.stream_destroy)(self.raw()) };
        }
    }
}

unsafe extern "C" fn called(data: *mut c_void) {
    // SAFETY: `Lane::call`'s box, given to the driver once.
    let call = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
    // Into the driver nothing may unwind; whoever waits asks the stream as well.
    let _ = catch_unwind(AssertUnwindSafe(*call));
}
