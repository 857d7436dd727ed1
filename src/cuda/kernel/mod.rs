//! The gather/scatter kernel: any number of strided copies in one launch.
//!
//! `copy_patterns.h` is the kernel; `scripts/ptx` makes [`PTX`] of it, which the driver compiles for
//! its device. A [`Table`] says what is copied; it may lie in pinned host memory.
//!
//! No lists of runs: a head-slice reshard, a permutation of blocks or an exchange of token and head
//! axes is one shape, and a piece for each block.

mod loaded;
#[cfg(test)]
mod tests;

use std::ffi::CStr;

use super::{Dim, MAX_DIMS};
use crate::error::Result;
use crate::{bail, err};

pub(super) use loaded::{Kernel, Kernels};

/// The kernel, for every device of compute capability 7.0 and later; any driver of CUDA 12 reads it.
pub static PTX: &CStr =
    match CStr::from_bytes_with_nul(concat!(include_str!("copy_patterns.ptx"), "\0").as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    };

/// Its name in the PTX.
pub const ENTRY: &CStr = c"kvf_copy_patterns";

/// Threads of a block. No shared memory is used.
pub const THREADS: u32 = 256;

/// Bytes of a piece, unless there would be more than [`MAX_PIECES`] of one shape.
const PIECE_BYTES: u32 = 16 << 10;

/// Pieces of one shape at one place.
const MAX_PIECES: u32 = 1024;

/// Blocks for each multiprocessor: as many as are resident at once.
const BLOCKS_EACH: u32 = 8;

/// Shapes stay below: the kernel counts in 32 bits.
const MAX_SHAPE: u64 = 1 << 31;

/// As `kvf_kernel::Dim`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Axis {
    src: u64,
    dst: u64,
    count: u32,
    reserved: u32,
}

/// As `kvf_kernel::Shape`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shape {
    run: u32,
    bytes: u32,
    rank: u32,
    reserved: u32,
    dims: [Axis; MAX_DIMS],
}

/// As `kvf_kernel::Piece`.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Piece {
    src: u64,
    dst: u64,
    begin: u32,
    end: u32,
    shape: u32,
    reserved: u32,
}

/// Arguments of a launch, in the kernel's order, and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Device address of the shapes.
    pub shapes: u64,
    /// Device address of the pieces.
    pub pieces: u64,
    /// Number of pieces.
    pub piece_count: u32,
    /// Blocks of the grid, each of [`THREADS`] threads. Not an argument.
    pub blocks: u32,
}

/// What one launch copies. Kept by its user: filling it again allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Table {
    shapes: Vec<Shape>,
    pieces: Vec<Piece>,
}

impl Table {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets all copies.
    pub fn clear(&mut self) {
        self.shapes.clear();
        self.pieces.clear();
    }

    /// Whether there is nothing to launch.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Adds a copy of `run` bytes from `src` to `dst`, repeated over `dims` (outermost first; a count
    /// of 0 makes it empty). Addresses are the device's. Copies of one launch run in any order and
    /// must not overlap.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` for more than [`MAX_DIMS`] axes, or for more pieces than one launch can
    /// number; the table is of no use then.
    pub fn push(&mut self, src: u64, dst: u64, run: u64, dims: &[Dim]) -> Result<()> {
        if dims.len() > MAX_DIMS {
            let axes = dims.len();
            bail!(
                KVF_ERR_TRANSFER,
                "a copy has {axes} axes; the kernel takes {MAX_DIMS}"
            );
        }
        let bytes = dims
            .iter()
            .try_fold(run, |bytes, dim| bytes.checked_mul(dim.count));
        match bytes {
            Some(0) => Ok(()),
            Some(1..MAX_SHAPE) => self.push_shape(src, dst, &shape(run, dims)),
            Some(_) => self.push_parts(src, dst, run, dims),
            None => Err(err!(KVF_ERR_TRANSFER, "a copy has 2^64 bytes or more")),
        }
    }

    /// Cuts a copy along its outermost axis, or its run.
    fn push_parts(&mut self, src: u64, dst: u64, run: u64, dims: &[Dim]) -> Result<()> {
        let Some((outer, inner)) = dims.split_first() else {
            let part = MAX_SHAPE / 2;
            let count = run / part;
            let done = count * part;
            let outer = Dim {
                count,
                src: part,
                dst: part,
            };
            self.push_parts(src, dst, part, &[outer])?;
            return self.push(src + done, dst + done, run - done, &[]);
        };
        let each = inner
            .iter()
            .fold(run, |bytes, dim| bytes.saturating_mul(dim.count));
        let at_once = ((MAX_SHAPE - 1) / each).max(1);
        let mut from = 0;
        while from < outer.count {
            let count = at_once.min(outer.count - from);
            let (src, dst) = (src + from * outer.src, dst + from * outer.dst);
            if count == 1 {
                self.push(src, dst, run, inner)?;
            } else {
                let mut part = [Dim::default(); MAX_DIMS];
                part[..dims.len()].copy_from_slice(dims);
                part[0].count = count;
                self.push_shape(src, dst, &shape(run, &part[..dims.len()]))?;
            }
            from += count;
        }
        Ok(())
    }

    fn push_shape(&mut self, src: u64, dst: u64, shape: &Shape) -> Result<()> {
        // The blocks of a request come in a few shapes, mostly one after the other.
        let known = self.shapes.iter().rev().take(8).position(|s| s == shape);
        let index = match known {
            Some(back) => self.shapes.len() - 1 - back,
            None => {
                self.shapes.push(*shape);
                self.shapes.len() - 1
            }
        };
        let each = shape
            .bytes
            .div_ceil(MAX_PIECES)
            .next_multiple_of(16)
            .max(PIECE_BYTES);
        let pieces = (0..shape.bytes).step_by(each as usize).map(|begin| Piece {
            src,
            dst,
            begin,
            end: shape.bytes.min(begin + each),
            shape: index as u32,
            reserved: 0,
        });
        self.pieces.extend(pieces);
        if u32::try_from(self.pieces.len()).is_err() {
            bail!(KVF_ERR_TRANSFER, "one launch copies at most 2^32 pieces");
        }
        Ok(())
    }

    /// Bytes that [`Self::write`] needs.
    pub fn bytes(&self) -> usize {
        size_of_val(&self.shapes[..]) + size_of_val(&self.pieces[..])
    }

    /// Writes the table as the kernel reads it.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` if `to` is smaller than [`Self::bytes`].
    pub fn write(&self, to: &mut [u8]) -> Result<()> {
        let (pieces, shapes) = (raw(&self.pieces), raw(&self.shapes));
        if to.len() < self.bytes() {
            bail!(
                KVF_ERR_TRANSFER,
                "no room for a table of {} bytes",
                self.bytes()
            );
        }
        let (first, rest) = to.split_at_mut(pieces.len());
        first.copy_from_slice(pieces);
        rest[..shapes.len()].copy_from_slice(shapes);
        Ok(())
    }

    /// The launch of a table that was written to the device address `at`, a multiple of 16.
    pub fn launch(&self, at: u64, multiprocessors: u32) -> Launch {
        let pieces = self.pieces.len() as u32;
        Launch {
            shapes: at + size_of_val(&self.pieces[..]) as u64,
            pieces: at,
            piece_count: pieces,
            blocks: pieces.min(multiprocessors.max(1).saturating_mul(BLOCKS_EACH)),
        }
    }
}

/// The shape of less than [`MAX_SHAPE`] bytes, without axes that change nothing.
fn shape(run: u64, dims: &[Dim]) -> Shape {
    let mut shape = Shape {
        run: run as u32,
        ..Shape::default()
    };
    let mut used = [Axis::default(); MAX_DIMS];
    let mut rank = 0;
    for dim in dims.iter().rev().filter(|dim| dim.count != 1) {
        if rank == 0 && dim.src == u64::from(shape.run) && dim.dst == dim.src {
            shape.run *= dim.count as u32;
            continue;
        }
        used[rank] = Axis {
            src: dim.src,
            dst: dim.dst,
            count: dim.count as u32,
            reserved: 0,
        };
        rank += 1;
    }
    shape.bytes = used[..rank]
        .iter()
        .fold(shape.run, |bytes, axis| bytes * axis.count);
    shape.rank = rank as u32;
    for (to, from) in shape.dims.iter_mut().zip(used[..rank].iter().rev()) {
        *to = *from;
    }
    shape
}

/// A type without padding, any bytes of which are readable.
trait Plain: Copy {}
impl Plain for Shape {}
impl Plain for Piece {}

fn raw<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` types are all integers, without padding; the bytes live as long as `values`.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}
