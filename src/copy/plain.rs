//! The copy for any processor: one `memcpy` per run.

use super::rows::Row;

/// `memcpy` per run, without prefetch.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
pub(super) const KERNEL: super::Kernel = super::Kernel {
    name: "memcpy",
    copy: |rows, _| {
        for row in rows {
            // SAFETY: a kernel is called with the promise that `copy` asks for.
            unsafe { copy(row) }
        }
    },
    streams: false,
};

/// # Safety
/// Every run of `row` must be readable at the source and writable at the destination, and the two
/// must not overlap.
pub(super) unsafe fn copy(row: &Row) {
    let (mut src, mut dst) = (row.src, row.dst);
    for _ in 0..row.count {
        // SAFETY: the caller vouches for every run of the row.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, row.run) };
        src = src.wrapping_add(row.src_stride);
        dst = dst.wrapping_add(row.dst_stride);
    }
}
