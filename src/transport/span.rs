//! What the paths on one host share: checking a pattern against both pools, and running patterns
//! whose source this process can address.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::copy::{self, Strided};
use crate::error::Result;
use crate::memory::{Mapping, Pool};
use crate::plan::{Batch, Pattern, Place};
use crate::transport::ReadJob;
use crate::{bail, err};

/// A readable range of this process that is not written through.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    base: *const u8,
    bytes: u64,
    owner: PhantomData<&'a ()>,
}

impl<'a> From<&'a Pool> for Source<'a> {
    fn from(pool: &'a Pool) -> Self {
        Self {
            base: pool.base(),
            bytes: pool.bytes(),
            owner: PhantomData,
        }
    }
}

impl<'a> From<&'a Mapping> for Source<'a> {
    fn from(mapping: &'a Mapping) -> Self {
        Self {
            base: mapping.base(),
            bytes: mapping.bytes(),
            owner: PhantomData,
        }
    }
}

/// Fewest bytes of one turn of a worker that copies: far more than asking for it costs, far less
/// than a transfer may be held up by the last turn.
pub(super) const COPY_BYTES: u64 = 256 << 10;

/// Longer than any piece takes: whoever has less time takes the smallest ones.
const MANY_PIECES: Duration = Duration::from_millis(20);

/// How long it is until then; zero: it is over.
pub(super) fn time_left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}

/// As [`ReadJob::next`], for a thread that has so much time left.
pub(super) fn next(job: &ReadJob, least: u64, left: Duration, out: &mut Batch) -> bool {
    match left < MANY_PIECES {
        true => job.next_of(|_| least, out),
        false => job.next(least, out),
    }
}

/// The error for a pool id that one side does not have.
pub(super) fn unknown_pool(side: &str, id: u32) -> crate::error::Error {
    err!(KVF_ERR_TRANSFER, "{side} has no pool {id}")
}

/// Checks that every byte of the pattern is inside both pools; returns how many it moves.
///
/// # Errors
/// `KVF_ERR_TRANSFER` naming pool, range and size: such a pattern was never proven by a plan.
pub(super) fn check(pattern: &Pattern, src_bytes: u64, dst_bytes: u64) -> Result<u64> {
    check_all(pattern, &[pattern.place()], src_bytes, dst_bytes)
}

/// As [`check`], for one shape at many places; returns how many bytes all of them move together.
///
/// # Errors
/// As for [`check`], for the first place that is wrong.
pub(super) fn check_all(
    shape: &Pattern,
    places: &[Place],
    src_bytes: u64,
    dst_bytes: u64,
) -> Result<u64> {
    let Some(extent) = Extent::of(shape) else {
        bail!(KVF_ERR_TRANSFER, "a copy of {shape:?} overflows");
    };
    if extent.bytes == 0 {
        return Ok(0);
    }
    let outside = |offset: u64, len: u64, bytes: u64| offset > bytes || len > bytes - offset;
    let wrong = |place: &&Place| {
        outside(place.src, extent.src, src_bytes) || outside(place.dst, extent.dst, dst_bytes)
    };
    if let Some(place) = places.iter().find(wrong) {
        if outside(place.src, extent.src, src_bytes) {
            bail!(
                KVF_ERR_TRANSFER,
                "a copy reads {} bytes from offset {} of the peer's pool {}, which has {src_bytes}",
                extent.src,
                place.src,
                shape.src_pool
            );
        }
        bail!(
            KVF_ERR_TRANSFER,
            "a copy writes {} bytes from offset {} of our pool {}, which has {dst_bytes}",
            extent.dst,
            place.dst,
            shape.dst_pool
        );
    }
    match extent.bytes.checked_mul(places.len() as u64) {
        Some(bytes) => Ok(bytes),
        None => bail!(
            KVF_ERR_TRANSFER,
            "{} copies of {shape:?} overflow",
            places.len()
        ),
    }
}

/// The host cannot write there; only a path that knows devices can.
///
/// # Errors
/// `KVF_ERR_INTERNAL`.
pub(super) fn refuse_device(pool: &Pool) -> Result<()> {
    if pool.is_device() {
        bail!(
            KVF_ERR_INTERNAL,
            "pool {} is device memory, which the host cannot copy to",
            pool.id()
        );
    }
    Ok(())
}

/// Bytes from a pattern's first to behind its last byte on either side, and bytes moved.
struct Extent {
    src: u64,
    dst: u64,
    bytes: u64,
}

impl Extent {
    fn of(pattern: &Pattern) -> Option<Self> {
        let mut extent = Self {
            src: pattern.run,
            dst: pattern.run,
            bytes: pattern.run,
        };
        for dim in pattern.dims.get(..usize::from(pattern.rank))? {
            extent.bytes = extent.bytes.checked_mul(dim.count)?;
            let steps = dim.count.saturating_sub(1);
            extent.src = extent.src.checked_add(dim.src.checked_mul(steps)?)?;
            extent.dst = extent.dst.checked_add(dim.dst.checked_mul(steps)?)?;
        }
        Some(extent)
    }
}

/// The contiguous runs of a pattern, in order, as (source, destination) offsets from its start.
/// Only for a pattern that [`check`] has accepted with more than 0 bytes.
pub(super) struct Runs<'a> {
    pattern: &'a Pattern,
    index: [u64; crate::plan::MAX_DIMS],
    src: u64,
    dst: u64,
    done: bool,
}

impl<'a> Runs<'a> {
    pub(super) fn new(pattern: &'a Pattern) -> Self {
        Self::at(pattern, pattern.place())
    }

    /// The runs of the same copy at another place.
    pub(super) fn at(shape: &'a Pattern, place: Place) -> Self {
        Self {
            pattern: shape,
            index: [0; crate::plan::MAX_DIMS],
            src: place.src,
            dst: place.dst,
            done: false,
        }
    }
}

impl Iterator for Runs<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        if self.done {
            return None;
        }
        let at = (self.src, self.dst);
        let dims = &self.pattern.dims[..usize::from(self.pattern.rank)];
        for (dim, index) in dims.iter().zip(&mut self.index).rev() {
            *index += 1;
            if *index < dim.count {
                self.src += dim.src;
                self.dst += dim.dst;
                return Some(at);
            }
            self.src -= dim.src * (dim.count - 1);
            self.dst -= dim.dst * (dim.count - 1);
            *index = 0;
        }
        self.done = true;
        Some(at)
    }
}

/// Buffers of [`copy_batch`], kept from one batch to the next.
#[derive(Default)]
pub(super) struct Scratch {
    dims: Vec<copy::Dim>,
    places: Vec<copy::Place>,
    checked: Vec<Checked>,
}

/// A checked shape: its bytes, axes and places.
struct Checked {
    run: usize,
    dims: Range<usize>,
    places: Range<usize>,
}

/// Copies a batch whose source pools this process can address; returns the bytes written. `whole`
/// is the size of the job it belongs to, which decides how it is copied.
///
/// Nothing is copied before the whole batch has been checked.
///
/// # Errors
/// `KVF_ERR_TRANSFER` for an unknown pool, a range outside of its pool, or a destination that is
/// also a source.
pub(super) fn copy_batch<'p, 'a>(
    batch: impl Iterator<Item = (&'p Pattern, &'p [Place])> + Clone,
    source: impl Fn(u32) -> Option<Source<'a>>,
    job_pool: impl Fn(u32) -> Option<&'a Pool>,
    whole: u64,
    scratch: &mut Scratch,
) -> Result<u64> {
    scratch.dims.clear();
    scratch.places.clear();
    scratch.checked.clear();
    let mut bytes = 0;
    let mut shared_range = false;
    // Neighbouring shapes mostly use the same two pools.
    let mut known: Option<(u32, u32, Source<'a>, &'a Pool)> = None;
    for (shape, places) in batch.clone() {
        let (src, dst) = match known {
            Some((src_id, dst_id, src, dst))
                if (src_id, dst_id) == (shape.src_pool, shape.dst_pool) =>
            {
                (src, dst)
            }
            _ => {
                let src = source(shape.src_pool)
                    .ok_or_else(|| unknown_pool("the peer", shape.src_pool))?;
                let dst = job_pool(shape.dst_pool)
                    .ok_or_else(|| unknown_pool("this side", shape.dst_pool))?;
                refuse_device(dst)?;
                known = Some((shape.src_pool, shape.dst_pool, src, dst));
                shared_range |= overlap(
                    (src.base.addr() as u64, src.bytes),
                    (dst.base().addr() as u64, dst.bytes()),
                );
                (src, dst)
            }
        };
        let moved = check_all(shape, places, src.bytes, dst.bytes())?;
        if moved == 0 {
            continue;
        }
        bytes += moved;
        // All lossless: `check_all` has bounded them by the size of a mapped range.
        let (first_dim, first_place) = (scratch.dims.len(), scratch.places.len());
        scratch
            .dims
            .extend(shape.axes().iter().map(|dim| copy::Dim {
                count: dim.count as usize,
                src: dim.src as usize,
                dst: dim.dst as usize,
            }));
        scratch
            .places
            .extend(places.iter().map(|place| copy::Place {
                src: src.base.wrapping_add(place.src as usize),
                dst: dst.base().wrapping_add(place.dst as usize),
            }));
        scratch.checked.push(Checked {
            run: shape.run as usize,
            dims: first_dim..scratch.dims.len(),
            places: first_place..scratch.places.len(),
        });
    }
    if shared_range {
        refuse_overlap(batch, &source, &job_pool)?;
    }
    let of = |checked: &Checked| Strided {
        run: checked.run,
        dims: &scratch.dims[checked.dims.clone()],
        places: &scratch.places[checked.places.clone()],
    };
    let strided: Vec<Strided<'_>> = scratch.checked.iter().map(of).collect();
    // SAFETY: `check_all` has put every byte inside its pool or mapping, which the callers' borrows
    // keep; pools are readable and writable by `Pool`'s contract, mappings readable by `Mapping`'s.
    // Source and destination are disjoint: either their ranges have no address in common or
    // `refuse_overlap` has compared the runs.
    unsafe { copy::run_part(&strided, whole) };
    Ok(bytes)
}

/// Whether two (start, length) ranges have an address in common.
pub(super) fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

/// Compares all source runs with all destination runs of a checked batch. Only for the rare case
/// of one range registered on both sides; interleaved strides make the extents useless there.
fn refuse_overlap<'p, 'a>(
    batch: impl Iterator<Item = (&'p Pattern, &'p [Place])>,
    source: &impl Fn(u32) -> Option<Source<'a>>,
    job_pool: &impl Fn(u32) -> Option<&'a Pool>,
) -> Result<()> {
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    for (shape, places) in batch {
        let (Some(src), Some(dst)) = (source(shape.src_pool), job_pool(shape.dst_pool)) else {
            continue;
        };
        if check_all(shape, places, src.bytes, dst.bytes())? == 0 {
            continue;
        }
        for place in places {
            for (from, to) in Runs::at(shape, *place) {
                reads.push((src.base.addr() as u64 + from, shape.run));
                writes.push((dst.base().addr() as u64 + to, shape.run));
            }
        }
    }
    refuse_common(reads, writes)
}

/// Compares (start, length) ranges that a batch reads with those that it writes.
///
/// # Errors
/// `KVF_ERR_TRANSFER` if one is both.
pub(super) fn refuse_common(mut reads: Vec<(u64, u64)>, mut writes: Vec<(u64, u64)>) -> Result<()> {
    reads.sort_unstable();
    writes.sort_unstable();
    let mut reads = reads.iter().peekable();
    for write in writes {
        while let Some(read) = reads.next_if(|read| read.0 + read.1 <= write.0) {
            let _ = read; // ends before this write begins, so before all later ones
        }
        if let Some(read) = reads.peek()
            && overlap(**read, write)
        {
            bail!(
                KVF_ERR_TRANSFER,
                "a copy would write {} bytes at {:#x} that it also reads; publish and pull disjoint slots",
                write.1,
                write.0
            );
        }
    }
    Ok(())
}

impl fmt::Debug for Source<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{}", self.base, self.bytes)
    }
}

#[cfg(test)]
pub(super) mod tests;
