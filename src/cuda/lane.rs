//! A stream of ours in a context of the engine, with a pinned buffer: copies, and waiting for
//! them with a limit.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUstream, CUstream_flags};

use super::current::Current;
use super::kernel::{Kernel, Kernels, Table};
use super::pinned::Staging;
use super::stream::Event;
use super::table::{NOT_READY, SUCCESS};
use super::{Context, Driver};
use crate::bail;
use crate::error::Result;
use crate::observe::fault;

/// Axes of a [`struct@Copy`].
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

impl Copy {
    fn axes(&self) -> &[Dim] {
        &self.dims[..usize::from(self.rank).min(MAX_DIMS)]
    }

    fn runs(&self) -> u64 {
        let counts = self.axes().iter().map(|dim| dim.count);
        counts.fold(1, u64::saturating_mul)
    }
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

/// From so many runs on a batch goes through the kernel: each copy of its own costs the host some
/// microseconds.
const KERNEL_FROM: u64 = 8;

/// First size of the buffer for the kernel's table.
const TABLE_BYTES: usize = 64 << 10;

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
    kernels: Arc<Kernels>,
    /// `Some(None)` where it cannot be loaded: every run is a copy of its own then.
    kernel: Option<Option<Arc<Kernel>>>,
    table: Table,
    /// Where the kernel reads the table, and its size.
    table_buffer: Option<(Staging, usize)>,
    /// The device may still read it.
    table_in_use: bool,
    /// Nothing was enqueued since a wait has said that all is done.
    quiet: bool,
}

impl Lane {
    pub(super) fn new(
        driver: &'static Driver,
        context: Context,
        kernels: Arc<Kernels>,
    ) -> Result<Self> {
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
            kernels,
            kernel: None,
            table: Table::new(),
            table_buffer: None,
            table_in_use: false,
            quiet: true,
        })
    }

    /// The context whose memory it copies.
    pub fn context(&self) -> Context {
        self.context
    }

    pub(super) fn raw(&self) -> CUstream {
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

    /// Enqueues copies, in order, until `stop` says so: looked at where each run is a call.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the driver's reason, `KVF_ERR_CANCELLED`; what was enqueued before
    /// still runs.
    ///
    /// # Safety
    /// Both sides of every copy must be valid, and not be read or written otherwise, until a wait
    /// has said [`Waited::Done`].
    pub unsafe fn copy(&mut self, copies: &[Copy], stop: &dyn Fn() -> bool) -> Result<()> {
        let _current = Current::push(self.driver, self.context)?;
        self.quiet = false;
        // The kernel cannot reach memory of another context.
        let near = || copies.iter().filter(|copy| copy.from.is_none());
        let runs = near().fold(0u64, |runs, copy| runs.saturating_add(copy.runs()));
        let kernel = match runs >= KERNEL_FROM && !self.table_in_use {
            true => self.kernel(),
            false => None,
        };
        let launched = kernel.is_some();
        if let Some(kernel) = kernel {
            self.table.clear();
            for copy in near() {
                self.table.push(copy.src, copy.dst, copy.run, copy.axes())?;
            }
            // SAFETY: passed on to the caller.
            unsafe { self.launch(&kernel) }?;
        }
        for copy in copies
            .iter()
            .filter(|copy| !launched || copy.from.is_some())
        {
            // SAFETY: passed on to the caller.
            unsafe { self.copy_runs(copy, stop) }?;
        }
        Ok(())
    }

    fn kernel(&mut self) -> Option<Arc<Kernel>> {
        let (driver, context, kernels) = (self.driver, self.context, &self.kernels);
        let kernel = self
            .kernel
            .get_or_insert_with(|| kernels.get(driver, context));
        kernel.clone()
    }

    /// Copies what the table says.
    unsafe fn launch(&mut self, kernel: &Kernel) -> Result<()> {
        let bytes = self.table.bytes();
        let buffer = match self.table_buffer.take() {
            Some((buffer, room)) if room >= bytes => (buffer, room),
            _ => {
                let room = bytes.next_power_of_two().max(TABLE_BYTES);
                (Staging::new(self.driver, self.context, room)?, room)
            }
        };
        let (buffer, room) = self.table_buffer.insert(buffer);
        // SAFETY: the buffer is ours alone and that large; the device reads it only after this.
        let memory = unsafe { std::slice::from_raw_parts_mut(buffer.base(), *room) };
        self.table.write(memory)?;
        let launch = self.table.launch(buffer.device(), kernel.multiprocessors);
        self.table_in_use = true;
        // SAFETY: the table stays as it is while it is in use; the rest is the caller's.
        unsafe { kernel.launch(&launch, self.raw()) }
    }

    unsafe fn copy_runs(&self, copy: &Copy, stop: &dyn Fn() -> bool) -> Result<()> {
        let dims = copy.axes();
        for number in 0..copy.runs() {
            if stop() {
                bail!(KVF_ERR_CANCELLED, "cancelled while copies were enqueued");
            }
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
        if fault::deviates("cuda_no_event_wait") {
            return Ok(());
        }
        let _current = Current::push(self.driver, self.context)?;
        self.quiet = false;
        // SAFETY: our stream and a live event.
        let code = unsafe { (self.driver.table.stream_wait_event)(self.raw(), event.raw(), 0) };
        self.driver.check(code, "cuStreamWaitEvent")
    }

    /// Has `call` called by a thread of the driver when everything enqueued so far is done; never,
    /// if the context fails before.
    pub(super) fn call(&mut self, call: Box<dyn FnOnce() + Send>) -> Result<()> {
        let _current = Current::push(self.driver, self.context)?;
        self.quiet = false;
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
        drop(done);
        self.mark_idle();
        Ok(Waited::Done)
    }

    /// Says that the lane is idle, as [`Self::is_idle`] has told.
    pub(super) fn mark_idle(&mut self) {
        self.table_in_use = false;
        self.quiet = true;
    }

    /// Whether everything is known to be done. The driver may say so a little later: it does not
    /// count the call that told us.
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet
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
        self.table_buffer = None;
        self.kernel = None;
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
