//! The gather/scatter kernel: any number of strided copies in one launch.
//!
//! `copy_patterns.h` is the kernel; `scripts/ptx` makes [`PTX`] of it, which the driver compiles for
//! its device. A [`Table`] says what is copied; its bytes must lie where the device reads them, device
//! memory for speed: every chunk looks its piece up.
//!
//! No lists of runs: a head-slice reshard, a permutation of blocks or an exchange of token and head
//! axes is one shape and one piece per block.

#[cfg(test)]
mod tests;

use std::ffi::CStr;

use crate::error::Result;
use crate::{bail, err};

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

/// Bytes that a block copies between two looks into the table.
pub const CHUNK_BYTES: u32 = 16 << 10;

/// Axes of a shape.
pub const MAX_DIMS: usize = 5;

/// Blocks for each multiprocessor: as many as are resident at once.
const BLOCKS_EACH: u32 = 8;

/// Pieces stay below: the kernel counts in 32 bits.
const MAX_PIECE: u64 = 1 << 31;

/// A repetition: so many times, so many bytes apart on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Repetitions; 0 makes the whole copy empty.
    pub count: u64,
    /// Bytes between them where it is read.
    pub src: u64,
    /// Bytes between them where it is written.
    pub dst: u64,
}

/// As `kvf_kernel::Dim`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Dim {
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
    dims: [Dim; MAX_DIMS],
}

/// As `kvf_kernel::Piece`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Piece {
    src: u64,
    dst: u64,
    first_chunk: u32,
    shape: u32,
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
    /// Number of chunks.
    pub chunk_count: u32,
    /// Blocks of the grid, each of [`THREADS`] threads. Not an argument.
    pub blocks: u32,
}

/// What one launch copies. Kept by its user: filling it again allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct Table {
    shapes: Vec<Shape>,
    pieces: Vec<Piece>,
    chunks: u32,
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
        self.chunks = 0;
    }

    /// Whether there is nothing to launch.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Number of pieces.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Adds a copy of `run` bytes from `src` to `dst`, repeated over `axes` (outermost first).
    /// Addresses are the device's. Copies of one launch run in any order and must not overlap.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` for more than [`MAX_DIMS`] axes, or for more than one launch can number;
    /// nothing was added then that would be needed: clear the table.
    pub fn push(&mut self, src: u64, dst: u64, run: u64, axes: &[Axis]) -> Result<()> {
        if axes.len() > MAX_DIMS {
            bail!(
                KVF_ERR_TRANSFER,
                "a copy has {} axes; the kernel takes {MAX_DIMS}",
                axes.len()
            );
        }
        let bytes = axes
            .iter()
            .try_fold(run, |bytes, axis| bytes.checked_mul(axis.count));
        let bytes = bytes.ok_or_else(|| err!(KVF_ERR_TRANSFER, "a copy has 2^64 bytes or more"))?;
        match bytes {
            0 => Ok(()),
            1..MAX_PIECE => self.push_piece(src, dst, run, axes),
            _ => self.push_parts(src, dst, run, axes),
        }
    }

    /// Cuts a copy along its outermost axis, or its run.
    fn push_parts(&mut self, src: u64, dst: u64, run: u64, axes: &[Axis]) -> Result<()> {
        let Some((outer, inner)) = axes.split_first() else {
            let part = MAX_PIECE / 2;
            let outer = Axis {
                count: run / part,
                src: part,
                dst: part,
            };
            let done = outer.count * part;
            self.push_parts(src, dst, part, &[outer])?;
            return self.push(src + done, dst + done, run - done, &[]);
        };
        let each: u64 = inner
            .iter()
            .fold(run, |bytes, axis| bytes.saturating_mul(axis.count));
        let at_once = ((MAX_PIECE - 1) / each).max(1);
        let mut from = 0;
        while from < outer.count {
            let count = at_once.min(outer.count - from);
            let (src, dst) = (src + from * outer.src, dst + from * outer.dst);
            if count == 1 {
                self.push(src, dst, run, inner)?;
            } else {
                let mut part = [Axis {
                    count: 1,
                    src: 0,
                    dst: 0,
                }; MAX_DIMS];
                part[..axes.len()].copy_from_slice(axes);
                part[0].count = count;
                self.push_piece(src, dst, run, &part[..axes.len()])?;
            }
            from += count;
        }
        Ok(())
    }

    fn push_piece(&mut self, src: u64, dst: u64, run: u64, axes: &[Axis]) -> Result<()> {
        let shape = shape(run, axes);
        let chunks = shape.bytes.div_ceil(CHUNK_BYTES);
        let Some(end) = self.chunks.checked_add(chunks) else {
            bail!(
                KVF_ERR_TRANSFER,
                "one launch copies at most 2^32 chunks of {CHUNK_BYTES} bytes"
            );
        };
        // The blocks of a request come in a few shapes, mostly one after the other.
        let known = self.shapes.iter().rev().take(8).position(|s| *s == shape);
        let index = match known {
            Some(back) => self.shapes.len() - 1 - back,
            None => {
                self.shapes.push(shape);
                self.shapes.len() - 1
            }
        };
        self.pieces.push(Piece {
            src,
            dst,
            first_chunk: self.chunks,
            shape: index as u32,
        });
        self.chunks = end;
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
        let (shapes, pieces) = (raw(&self.shapes), raw(&self.pieces));
        let Some((first, rest)) = to.split_at_mut_checked(shapes.len()) else {
            bail!(
                KVF_ERR_TRANSFER,
                "no room for a table of {} bytes",
                self.bytes()
            );
        };
        let Some(second) = rest.get_mut(..pieces.len()) else {
            bail!(
                KVF_ERR_TRANSFER,
                "no room for a table of {} bytes",
                self.bytes()
            );
        };
        first.copy_from_slice(shapes);
        second.copy_from_slice(pieces);
        Ok(())
    }

    /// The launch of a table that was written to the device address `at`, a multiple of 8.
    pub fn launch(&self, at: u64, multiprocessors: u32) -> Launch {
        Launch {
            shapes: at,
            pieces: at + size_of_val(&self.shapes[..]) as u64,
            piece_count: self.pieces.len() as u32,
            chunk_count: self.chunks,
            blocks: self
                .chunks
                .min(multiprocessors.max(1).saturating_mul(BLOCKS_EACH)),
        }
    }
}

/// The shape of less than [`MAX_PIECE`] bytes, without axes that change nothing.
fn shape(run: u64, axes: &[Axis]) -> Shape {
    let mut shape = Shape {
        run: run as u32,
        ..Shape::default()
    };
    let mut used: [Dim; MAX_DIMS] = Default::default();
    let mut rank = 0;
    for axis in axes.iter().rev().filter(|axis| axis.count != 1) {
        if rank == 0 && axis.src == u64::from(shape.run) && axis.dst == axis.src {
            shape.run *= axis.count as u32;
            continue;
        }
        used[rank] = Dim {
            src: axis.src,
            dst: axis.dst,
            count: axis.count as u32,
            reserved: 0,
        };
        rank += 1;
    }
    shape.bytes = used[..rank]
        .iter()
        .fold(shape.run, |bytes, dim| bytes * dim.count);
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
