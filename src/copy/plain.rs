//! The copy for any processor: one `memcpy` per run.

use super::Kernel;
use super::rows::Row;

/// `memcpy` per run, without prefetch.
pub(super) const KERNEL: Kernel = Kernel {
    name: "memcpy",
    copy,
    streams: false,
};

/// # Safety
/// Every run of `row` must be readable at the source and writable at the destination.
unsafe fn copy(row: &Row, _next: &Row) {
    let (mut src, mut dst) = (row.src, row.dst);
    for _ in 0..row.count {
        // SAFETY: the caller vouches for every run of the row, and that the sides do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, row.run) };
        src = src.wrapping_add(row.src_stride);
        dst = dst.wrapping_add(row.dst_stride);
    }
}
