//! The x86-64 kernels: one loop, for vectors of 16, 32 and 64 bytes, with and without streaming
//! stores.

use std::arch::x86_64::{
    __m128i, __m256i, __m512i, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch, _mm_sfence,
    _mm_storeu_si128, _mm_stream_si128, _mm256_loadu_si256, _mm256_storeu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_stream_si512,
};
use std::ptr::copy_nonoverlapping;

use super::rows::{LEAD, Row};
use super::{Kernel, plain};

/// Bytes of a cache line: what a streaming store must fill whole to be worth it.
const LINE: usize = 64;

/// Aligned runs up to this are prefetched whole while the run before is copied; of longer ones only
/// the beginning is: the rest is a stream that the hardware prefetcher follows better alone (8 to
/// 13 % from 64 KiB on, measured on Zen 4 without AVX-512).
const WHOLE: usize = 16 << 10;

/// Runs below this are short: what surrounds the copy of each (a call, peeling to alignment) counts.
const SHORT: usize = 1024;

/// A vector register.
trait Vector: Copy {
    /// # Safety
    /// `size_of::<Self>()` readable bytes at `src`; the processor has this vector.
    unsafe fn load(src: *const u8) -> Self;
    /// # Safety
    /// `size_of::<Self>()` writable bytes at `dst`; the processor has this vector.
    unsafe fn store(self, dst: *mut u8);
    /// # Safety
    /// As [`Vector::store`], and `dst` is a multiple of that.
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
vector!(
    __m256i,
    _mm256_loadu_si256,
    _mm256_storeu_si256,
    _mm256_stream_si256
);
vector!(
    __m512i,
    _mm512_loadu_si512,
    _mm512_storeu_si512,
    _mm512_stream_si512
);

macro_rules! kernel {
    ($fn:ident, $const:ident, $name:literal, $vector:ty, $stream:literal, $feature:literal) => {
        #[target_feature(enable = $feature)]
        unsafe fn $fn(rows: &[Row], later: &[Row]) {
            for (row, next) in rows.iter().zip(later) {
                // SAFETY: the caller's promise, passed on.
                unsafe { copy::<$vector, $stream>(row, next) }
            }
        }
        const $const: Kernel = Kernel {
            name: $name,
            copy: $fn,
            streams: $stream,
        };
    };
}
kernel!(cached_sse2, CACHED_SSE2, "sse2", __m128i, false, "sse2");
kernel!(
    stream_sse2,
    STREAM_SSE2,
    "sse2 streaming",
    __m128i,
    true,
    "sse2"
);
kernel!(cached_avx2, CACHED_AVX2, "avx2", __m256i, false, "avx2");
kernel!(
    stream_avx2,
    STREAM_AVX2,
    "avx2 streaming",
    __m256i,
    true,
    "avx2"
);
kernel!(
    cached_avx512,
    CACHED_AVX512,
    "avx512",
    __m512i,
    false,
    "avx512f"
);
kernel!(
    stream_avx512,
    STREAM_AVX512,
    "avx512 streaming",
    __m512i,
    true,
    "avx512f"
);

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

/// Every kernel that this processor can run.
#[cfg(test)]
pub(super) fn kernels() -> Vec<Kernel> {
    let mut all = vec![CACHED_SSE2, STREAM_SSE2];
    if is_x86_feature_detected!("avx2") {
        all.extend([CACHED_AVX2, STREAM_AVX2]);
    }
    if is_x86_feature_detected!("avx512f") {
        all.extend([CACHED_AVX512, STREAM_AVX512]);
    }
    all
}

/// Makes streaming stores visible before every later store.
pub(super) fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() }
}

impl Row {
    /// The part from the run `skip` on; empty beyond the end.
    #[inline(always)]
    fn tail(&self, skip: usize) -> Row {
        Row {
            src: self.src.wrapping_add(skip.wrapping_mul(self.src_stride)),
            dst: self.dst.wrapping_add(skip.wrapping_mul(self.dst_stride)),
            count: self.count.saturating_sub(skip),
            ..*self
        }
    }

    /// The first `count` runs at most.
    #[inline(always)]
    fn head(&self, count: usize) -> Row {
        Row {
            count: self.count.min(count),
            ..*self
        }
    }
}

/// Copies `row`; prefetches up to [`LEAD`] bytes ahead, into `next` where the row ends.
///
/// # Safety
/// The processor has `V`; every run of `row` is readable at the source and writable at the
/// destination; the two do not overlap. `next` is only prefetched.
#[inline(always)]
unsafe fn copy<V: Vector, const STREAM: bool>(row: &Row, next: &Row) {
    let whole_lines = row.run.is_multiple_of(LINE)
        && (!STREAM || (row.dst.addr() | row.dst_stride).is_multiple_of(LINE));
    // SAFETY: the caller's promise, passed on.
    unsafe {
        if whole_lines && (row.run < SHORT || STREAM && row.run <= WHOLE) {
            short::<V, STREAM>(row, next);
        } else if STREAM && row.run >= SHORT {
            long::<V>(row, next);
        } else {
            // Lines that a run fills in part must not be streamed, and for long runs that stay in
            // the cache nothing beat memcpy.
            plain::copy(row);
        }
    }
}

/// Runs of whole lines, each prefetched whole, [`LEAD`] bytes ahead.
///
/// The loops hold so little that the processor's window spans several runs: that, more than
/// anything, decides how many lines are in flight.
///
/// # Safety
/// As [`copy`]; the run is a multiple of [`LINE`] and, to stream, so are `dst` and its stride.
#[inline(always)]
unsafe fn short<V: Vector, const STREAM: bool>(row: &Row, next: &Row) {
    let ahead = if row.bytes() <= LEAD {
        row.count
    } else {
        (LEAD / row.run).clamp(1, row.count)
    };
    let inside = row.count - ahead;
    let last = row.tail(inside);
    // Without a next row the lines just copied are prefetched, which costs next to nothing.
    let next = if next.count > 0 { next } else { &last };
    // SAFETY: both are parts of the row.
    unsafe {
        whole_lines::<V, STREAM>(&row.head(inside), &row.tail(ahead));
        whole_lines::<V, STREAM>(&last, next);
    }
}

/// Copies `row` line by line, prefetching the same places of `coming`.
///
/// # Safety
/// As [`short`].
#[inline(always)]
unsafe fn whole_lines<V: Vector, const STREAM: bool>(row: &Row, coming: &Row) {
    let (mut src, mut dst, mut later) = (row.src, row.dst, coming.src);
    for _ in 0..row.count {
        let mut at = 0;
        while at < row.run {
            // Into L2: of scattered lines, L1's fill buffers hold too few.
            prefetch::<_MM_HINT_T1>(later.wrapping_add(at));
            // SAFETY: the line lies inside this run.
            unsafe { line::<V, STREAM>(dst.add(at), src.add(at)) };
            at += LINE;
        }
        src = src.wrapping_add(row.src_stride);
        dst = dst.wrapping_add(row.dst_stride);
        later = later.wrapping_add(coming.src_stride);
    }
}

/// Streams long runs, at any alignment.
///
/// # Safety
/// As [`copy`].
#[inline(always)]
unsafe fn long<V: Vector>(row: &Row, next: &Row) {
    for i in 0..row.count {
        let (run, rest) = (row.tail(i), row.tail(i + 1));
        let coming = match (rest.count, next.count) {
            (0, 0) => run.src,
            (0, _) => next.src,
            _ => rest.src,
        };
        // Up to the last LEAD bytes of a long run, itself lies ahead; then the next one does. The
        // seam is at a destination line, so that it is written whole.
        let seam = if run.run > WHOLE { run.run - LEAD } else { 0 };
        let seam = seam.saturating_sub(run.dst.wrapping_add(seam).addr() % LINE);
        // SAFETY: both parts lie inside this run.
        unsafe {
            if seam > 0 {
                // See WHOLE.
                stream::<V, false>(run.dst, run.src, seam, run.src);
            }
            stream::<V, true>(run.dst.add(seam), run.src.add(seam), run.run - seam, coming);
        }
    }
}

/// Streams `bytes`; with `AHEAD` as many are prefetched at `coming`.
///
/// # Safety
/// As [`copy`], for one run.
#[inline(always)]
unsafe fn stream<V: Vector, const AHEAD: bool>(
    mut dst: *mut u8,
    mut src: *const u8,
    mut bytes: usize,
    mut coming: *const u8,
) {
    // SAFETY: every access is inside `bytes`, which shrinks as the pointers advance; after the head
    // `dst` is a multiple of LINE.
    unsafe {
        let head = (dst.addr().wrapping_neg() % LINE).min(bytes);
        if head > 0 {
            copy_nonoverlapping(src, dst, head);
            dst = dst.add(head);
            src = src.add(head);
            bytes -= head;
        }
        while bytes >= 4 * LINE {
            for i in 0..if AHEAD { 4 } else { 0 } {
                prefetch::<_MM_HINT_T1>(coming.wrapping_add(i * LINE));
            }
            for i in 0..4 {
                line::<V, true>(dst.add(i * LINE), src.add(i * LINE));
            }
            dst = dst.add(4 * LINE);
            src = src.add(4 * LINE);
            coming = coming.wrapping_add(4 * LINE);
            bytes -= 4 * LINE;
        }
        while bytes >= LINE {
            if AHEAD {
                prefetch::<_MM_HINT_T1>(coming);
            }
            line::<V, true>(dst, src);
            dst = dst.add(LINE);
            src = src.add(LINE);
            coming = coming.wrapping_add(LINE);
            bytes -= LINE;
        }
        if bytes > 0 {
            copy_nonoverlapping(src, dst, bytes);
        }
    }
}

#[inline(always)]
fn prefetch<const HINT: i32>(at: *const u8) {
    // SAFETY: a prefetch is a hint; it never faults, whatever the address.
    unsafe { _mm_prefetch::<HINT>(at.cast()) }
}

/// Copies one line: all of it is loaded before anything is stored.
///
/// # Safety
/// As [`copy`], for [`LINE`] bytes; to stream, `dst` is a multiple of [`LINE`].
#[inline(always)]
unsafe fn line<V: Vector, const STREAM: bool>(dst: *mut u8, src: *const u8) {
    let size = size_of::<V>();
    let count = const { LINE / size_of::<V>() };
    // Written out: a closure is compiled without the processor's features unless it happens to be
    // inlined, and then every vector goes through memory.
    // SAFETY: `count` vectors are a line, and `at` stays inside it.
    unsafe {
        let at = [0, 1 % count, 2 % count, 3 % count];
        let a = V::load(src);
        let b = V::load(src.add(at[1] * size));
        let c = V::load(src.add(at[2] * size));
        let d = V::load(src.add(at[3] * size));
        put::<V, STREAM>(a, dst);
        if count > 1 {
            put::<V, STREAM>(b, dst.add(size));
        }
        if count > 2 {
            put::<V, STREAM>(c, dst.add(2 * size));
            put::<V, STREAM>(d, dst.add(3 * size));
        }
    }
}

/// Stores one vector.
///
/// # Safety
/// As [`line()`], for one vector.
#[inline(always)]
unsafe fn put<V: Vector, const STREAM: bool>(vector: V, dst: *mut u8) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        if STREAM {
            vector.stream(dst);
        } else {
            vector.store(dst);
        }
    }
}
