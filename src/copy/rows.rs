//! Flattens a strided copy into rows. Pointer arithmetic only: nothing here touches memory.

use super::{Dim, Strided};

/// Bytes that prefetching leads the copy by: enough to keep the line fill buffers busy across a
/// page walk, little enough to stay in L1 and L2.
pub(super) const LEAD: usize = 4096;

/// Rows that prefetching leads by at most, when they are tiny.
const LEAD_ROWS: usize = 8;

/// Rows laid out at a time.
const CHUNK: usize = 32;

/// Calls `copy(rows, later)` for all rows of a batch, in order and some at a time. `later[i]` is
/// the row that comes [`LEAD`] bytes after `rows[i]`, to be prefetched: empty beyond the end.
///
/// In chunks, because what finding a row writes to the stack would stand between the streaming
/// stores of two rows in the processor's store queue, and that costs a third of the speed of 4 KiB
/// blocks.
pub(super) fn each(batch: &[Strided<'_>], mut copy: impl FnMut(&[Row], &[Row])) {
    let mut source = batch.iter().flat_map(Rows::new);
    let mut rows = [Row::EMPTY; CHUNK];
    let mut held = fill(&mut rows, &mut source);
    // Batches are mostly uniform: the first row tells how many make up the lead.
    let lead = (LEAD / rows[0].bytes().max(1)).clamp(1, LEAD_ROWS);
    while held == CHUNK {
        let ready = CHUNK - lead;
        copy(&rows[..ready], &rows[lead..]);
        rows.copy_within(ready.., 0);
        held = lead + fill(&mut rows[lead..], &mut source);
    }
    let mut later = [Row::EMPTY; CHUNK];
    let ahead = held.saturating_sub(lead);
    later[..ahead].copy_from_slice(&rows[held - ahead..held]);
    copy(&rows[..held], &later[..held]);
}

/// Fills `rows` from the front; returns how many there were.
fn fill(rows: &mut [Row], source: &mut impl Iterator<Item = Row>) -> usize {
    rows.iter_mut()
        .zip(source)
        .map(|(row, next)| *row = next)
        .count()
}

/// `run` bytes, repeated `count` times along one axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub src: *const u8,
    pub dst: *mut u8,
    pub run: usize,
    pub count: usize,
    pub src_stride: usize,
    pub dst_stride: usize,
}

impl Row {
    /// What follows the last row.
    pub const EMPTY: Row = Row {
        src: std::ptr::null(),
        dst: std::ptr::null_mut(),
        run: 0,
        count: 0,
        src_stride: 0,
        dst_stride: 0,
    };

    /// Bytes it writes.
    pub fn bytes(&self) -> usize {
        self.run.saturating_mul(self.count)
    }
}

/// The rows of one strided copy, in order; none of them is empty.
///
/// The innermost axis becomes the row, the next one is stepped with a counter, and the axes outside
/// those two are found from a linear index: any number of axes, no allocation, and the divisions
/// are paid once per round of the middle axis.
pub(super) struct Rows<'a> {
    row: Row,
    origin: (*const u8, *mut u8),
    middle: Dim,
    middle_left: usize,
    outer: &'a [Dim],
    outer_at: usize,
    outer_count: usize,
}

impl<'a> Rows<'a> {
    pub fn new(copy: &Strided<'a>) -> Self {
        let mut run = copy.run;
        let mut dims = copy.dims;
        // An axis whose repetitions touch on both sides only makes the run longer.
        while let [outer @ .., axis] = dims
            && (axis.count == 1 || (axis.src == run && axis.dst == run))
        {
            run = run.saturating_mul(axis.count);
            dims = outer;
        }
        let mut inner = pop(&mut dims);
        // The same one level up: two axes that continue each other are one longer axis.
        while let [outer @ .., axis] = dims
            && (axis.count == 1
                || (axis.src == inner.src.wrapping_mul(inner.count)
                    && axis.dst == inner.dst.wrapping_mul(inner.count)))
        {
            inner.count = inner.count.saturating_mul(axis.count);
            dims = outer;
        }
        let middle = pop(&mut dims);
        let outer_count = dims
            .iter()
            .fold(1usize, |count, axis| count.saturating_mul(axis.count));
        let empty = run == 0 || inner.count == 0 || middle.count == 0;
        Rows {
            row: Row {
                src: copy.src,
                dst: copy.dst,
                run,
                count: inner.count,
                src_stride: inner.src,
                dst_stride: inner.dst,
            },
            origin: (copy.src, copy.dst),
            middle,
            middle_left: middle.count,
            outer: dims,
            outer_at: 0,
            outer_count: if empty { 0 } else { outer_count },
        }
    }

    /// Moves to the first row of the next outer index.
    fn step_outer(&mut self) {
        self.outer_at += 1;
        if self.outer_at >= self.outer_count {
            return;
        }
        let (mut src, mut dst) = self.origin;
        let mut index = self.outer_at;
        for axis in self.outer.iter().rev() {
            // No axis is empty here: `outer_count` would be 0.
            let at = index % axis.count;
            index /= axis.count;
            src = src.wrapping_add(at.wrapping_mul(axis.src));
            dst = dst.wrapping_add(at.wrapping_mul(axis.dst));
        }
        self.row.src = src;
        self.row.dst = dst;
        self.middle_left = self.middle.count;
    }
}

impl Iterator for Rows<'_> {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        if self.outer_at >= self.outer_count {
            return None;
        }
        let row = self.row;
        self.middle_left -= 1;
        if self.middle_left == 0 {
            self.step_outer();
        } else {
            self.row.src = row.src.wrapping_add(self.middle.src);
            self.row.dst = row.dst.wrapping_add(self.middle.dst);
        }
        Some(row)
    }
}

/// Takes the innermost axis off; without one, a single repetition.
fn pop(dims: &mut &[Dim]) -> Dim {
    match *dims {
        [outer @ .., axis] => {
            *dims = outer;
            *axis
        }
        [] => Dim {
            count: 1,
            src: 0,
            dst: 0,
        },
    }
}
