//! The x86-64 kernels: one loop, for vectors of 16, 32 and 64 bytes, with and without streaming
//! stores.

use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _MM_HINT_NTA, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_sfence,
    _mm_storeu_si128, _mm_stream_si128, _mm256_loadu_si256, _mm256_storeu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512,
};

use super::Kernel;
use super::rows::Row;

/// Bytes of a cache line: what a streaming store must fill whole to be worth it.
const LINE: usize = 64;

pub static LEAD: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(4096);

/// A vector register.
trait Vector: Copy {
    const BYTES: usize = size_of::<Self>();
    /// # Safety
    /// `Self::BYTES` readable bytes at `src`; the processor has this vector.
    unsafe fn load(src: *const u8) -> Self;
    /// # Safety
    /// `Self::BYTES` writable bytes at `dst`; the processor has this vector.
    unsafe fn store(self, dst: *mut u8);
    /// # Safety
    /// As [`Vector::store`], and `dst` is a multiple of `Self::BYTES`.
    unsafe fn stream(self, dst: *mut u8);
}

macro_rules! vector {
    ($type:ty, $load:ident, $store:ident, $stream:ident) => {
        impl Vector for $type {
            #[inline(always)]
            unsafe fn load(src: *const u8) -> Self {
                // SAFETY: the trait's contract.
                unsafe { $load(src.cast()) }
            }
            #[inline(always)]
            unsafe fn store(self, dst: *mut u8) {
                // SAFETY: the trait's contract.
                unsafe { $store(dst.cast(), self) }
            }
            #[inline(always)]
            unsafe fn stream(self, dst: *mut u8) {
                // SAFETY: the trait's contract.
                unsafe { $stream(dst.cast(), self) }
            }
        }
    };
}
vector!(__m128i, _mm_loadu_si128, _mm_storeu_si128, _mm_stream_si128);
vector!(__m256i, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256);
vector!(__m512i, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512);

macro_rules! kernel {
    ($fn:ident, $const:ident, $name:literal, $vector:ty, $stream:literal, $feature:literal) => {
        #[target_feature(enable = $feature)]
        unsafe fn $fn(row: &Row, next: &Row) {
            // SAFETY: the caller's promise, passed on.
            unsafe { copy::<$vector, $stream>(row, next) }
        }
        pub(super) const $const: Kernel = Kernel {
            name: $name,
            copy: $fn,
            streams: $stream,
        };
    };
}
kernel!(cached_sse2, CACHED_SSE2, "sse2", __m128i, false, "sse2");
kernel!(stream_sse2, STREAM_SSE2, "sse2 streaming", __m128i, true, "sse2");
kernel!(cached_avx2, CACHED_AVX2, "avx2", __m256i, false, "avx2");
kernel!(stream_avx2, STREAM_AVX2, "avx2 streaming", __m256i, true, "avx2");
kernel!(cached_avx512, CACHED_AVX512, "avx512", __m512i, false, "avx512f");
kernel!(stream_avx512, STREAM_AVX512, "avx512 streaming", __m512i, true, "avx512f");

/// The best kernel of this processor.
pub(super) fn pick(stream: bool) -> Kernel {
    let (cached, streaming) = if is_x86_feature_detected!("avx512f") {
        (CACHED_AVX512, STREAM_AVX512)
    } else if is_x86_feature_detected!("avx2") {
        (CACHED_AVX2, STREAM_AVX2)
    } else {
        (CACHED_SSE2, STREAM_SSE2)
    };
    if stream { streaming } else { cached }
}

/// Makes streaming stores visible before every later store.
pub(super) fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() }
}

/// Copies `row`, prefetching up to [`LEAD`] bytes ahead, into `next` where the row ends.
///
/// # Safety
/// The processor has `V`; every run of `row` is readable at the source and writable at the
/// destination; the two do not overlap. `next` is only prefetched.
#[inline(always)]
unsafe fn copy<V: Vector, const STREAM: bool>(row: &Row, next: &Row) {
    let lead = LEAD.load(std::sync::atomic::Ordering::Relaxed);
    let run = row.run;
    // Runs that fit into the lead are prefetched whole, so many ahead; of longer ones the first
    // bytes are, while the one before them ends.
    let ahead = (lead / run.max(1)).clamp(1, row.count);
    let (mut src, mut dst) = (row.src, row.dst);
    for i in 0..row.count {
        let mut later = i + ahead;
        let coming = if later < row.count {
            row.src.wrapping_add(later * row.src_stride)
        } else {
            later -= row.count;
            if later < next.count {
                next.src.wrapping_add(later * next.src_stride)
            } else {
                src
            }
        };
        // SAFETY: both parts lie inside this run.
        unsafe {
            let first = run.saturating_sub(lead);
            if first > 0 {
                contiguous::<V, STREAM>(dst, src, first, src.wrapping_add(lead));
            }
            contiguous::<V, STREAM>(dst.add(first), src.add(first), run - first, coming);
        }
        src = src.wrapping_add(row.src_stride);
        dst = dst.wrapping_add(row.dst_stride);
    }
}

/// Copies `bytes`, prefetching as many at `coming`.
///
/// # Safety
/// As [`copy`], for one run.
#[inline(always)]
unsafe fn contiguous<V: Vector, const STREAM: bool>(
    mut dst: *mut u8,
    mut src: *const u8,
    mut bytes: usize,
    mut coming: *const u8,
) {
    // SAFETY: every access is inside `bytes`, which only shrinks as the pointers advance.
    unsafe {
        if STREAM {
            let head = dst.align_offset(LINE).min(bytes);
            if head > 0 {
                prefetch::<STREAM>(coming);
                std::ptr::copy_nonoverlapping(src, dst, head);
                dst = dst.add(head);
                src = src.add(head);
                coming = coming.wrapping_add(head);
                bytes -= head;
            }
        }
        while bytes >= 4 * LINE {
            for line in 0..4 {
                prefetch::<STREAM>(coming.wrapping_add(line * LINE));
            }
            lines::<V, STREAM, 4>(dst, src);
            dst = dst.add(4 * LINE);
            src = src.add(4 * LINE);
            coming = coming.wrapping_add(4 * LINE);
            bytes -= 4 * LINE;
        }
        while bytes >= LINE {
            prefetch::<STREAM>(coming);
            lines::<V, STREAM, 1>(dst, src);
            dst = dst.add(LINE);
            src = src.add(LINE);
            coming = coming.wrapping_add(LINE);
            bytes -= LINE;
        }
        if bytes > 0 {
            prefetch::<STREAM>(coming);
            std::ptr::copy_nonoverlapping(src, dst, bytes);
        }
    }
}

#[inline(always)]
fn prefetch<const STREAM: bool>(at: *const u8) {
    // SAFETY: a prefetch is a hint; it never faults, whatever the address.
    unsafe {
        if STREAM {
            _mm_prefetch::<_MM_HINT_NTA>(at.cast());
        } else {
            _mm_prefetch::<_MM_HINT_T0>(at.cast());
        }
    }
}

/// Copies `N` lines: all loads, then all stores.
///
/// # Safety
/// As [`copy`], for `N * LINE` bytes; to stream, `dst` is a multiple of [`LINE`].
#[inline(always)]
unsafe fn lines<V: Vector, const STREAM: bool, const N: usize>(dst: *mut u8, src: *const u8) {
    for line in 0..N {
        for at in (0..LINE).step_by(V::BYTES) {
            let at = line * LINE + at;
            // SAFETY: `at + V::BYTES <= N * LINE`, and a multiple of `V::BYTES`.
            unsafe {
                let v = V::load(src.add(at));
                if STREAM {
                    v.stream(dst.add(at));
                } else {
                    v.store(dst.add(at));
                }
            }
        }
    }
}
