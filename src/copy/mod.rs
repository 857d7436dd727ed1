//! The copy loops: strided runs, with streaming stores chosen at run time.
//!
//! A batch is flattened into [`rows::Row`]s (one contiguous run, repeated along one axis). Each row
//! goes to a kernel together with a row that comes [`rows::LEAD`] bytes later, so that the kernel can
//! prefetch across the gaps where the hardware prefetcher loses the thread: reads scattered over a
//! pool are bound by latency, not by bandwidth.
//!
//! Batches of [`STREAM_FROM`] bytes and more are written with non-temporal stores, which do not read
//! the destination lines first and leave the caches to the engine; smaller ones stay in the cache,
//! because their consumer reads them at once.
//!
//! This is one of the few rooms that hold `unsafe`: every access goes through raw pointers, because
//! the source may be another process's memory, which may change under the copy.

mod plain;
mod rows;
#[cfg(test)]
mod tests;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

use rows::Row;

/// One axis of a strided copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Dim {
    /// Repetitions, at least 1.
    pub count: usize,
    /// Bytes between them at the source.
    pub src: usize,
    /// Bytes between them at the destination.
    pub dst: usize,
}

/// Where a copy starts.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// First source byte.
    pub src: *const u8,
    /// First destination byte.
    pub dst: *mut u8,
}

/// A strided copy, done at each of its places in turn: `run` bytes, repeated over `dims` (outermost
/// first).
#[derive(Clone, Copy, Debug)]
pub struct Strided<'a> {
    /// Contiguous bytes.
    pub run: usize,
    /// Axes.
    pub dims: &'a [Dim],
    /// Where.
    pub places: &'a [Place],
}

impl Strided<'_> {
    /// Bytes this copy writes; saturates, since an absurd count must not wrap to a small one.
    fn bytes(&self) -> usize {
        self.dims
            .iter()
            .map(|dim| dim.count)
            .fold(self.run, usize::saturating_mul)
            .saturating_mul(self.places.len())
    }
}

/// Batches of at least this many bytes are written with streaming stores.
///
/// Measured on Zen 4 (1 MiB of L2): streaming copies faster at every size, but a consumer that reads
/// the bytes at once pays for it; from about here the sum of the two is within a few per cent.
#[cfg_attr(
    not(all(target_arch = "x86_64", not(miri))),
    allow(dead_code, reason = "the fallback has one kernel for all sizes")
)]
const STREAM_FROM: u64 = 512 << 10;

/// One way to copy.
#[derive(Clone, Copy)]
struct Kernel {
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "tests name the kernel that failed")
    )]
    name: &'static str,
    /// Copies the rows; of those that come later (the second list, as long) it only prefetches.
    copy: unsafe fn(&[Row], &[Row]),
    /// Whether its stores need a fence before anything that tells others about them.
    streams: bool,
}

/// Runs a batch of copies in order; when it returns, all stores are globally visible.
///
/// Another process may write the source at the same time: bytes are copied raw, never borrowed.
/// Axes of any number are accepted; a copy with a zero `run` or `count` moves nothing.
///
/// # Safety
/// Every source byte must be readable and every destination byte writable for the whole call; the
/// two must not overlap.
pub unsafe fn run(batch: &[Strided<'_>]) {
    let total = batch
        .iter()
        .fold(0usize, |sum, copy| sum.saturating_add(copy.bytes()));
    // SAFETY: the caller's promise, passed on.
    unsafe { run_part(batch, total as u64) }
}

/// As [`run`], for a batch that is part of `whole` bytes: those decide between streaming and cached
/// stores, however the parts are cut.
///
/// # Safety
/// As [`run`].
pub unsafe fn run_part(batch: &[Strided<'_>], whole: u64) {
    // SAFETY: the caller's promise, passed on; `pick` only offers what this processor can do.
    unsafe { run_with(pick(whole), batch) }
}

/// Runs a batch with one kernel.
///
/// # Safety
/// As [`run`]; the kernel must be one that this processor supports.
unsafe fn run_with(kernel: Kernel, batch: &[Strided<'_>]) {
    rows::each(batch, |rows, later| {
        // SAFETY: rows lie inside their `Strided`, which the caller vouches for.
        unsafe { (kernel.copy)(rows, later) }
    });
    if kernel.streams {
        fence();
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn pick(whole: u64) -> Kernel {
    x86_64::pick(whole >= STREAM_FROM)
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn pick(_whole: u64) -> Kernel {
    plain::KERNEL
}

/// Orders streaming stores before every later store of this thread.
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn fence() {
    x86_64::fence();
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
fn fence() {}
