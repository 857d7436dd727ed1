//! Flattens a strided copy into rows. Pointer arithmetic only: nothing here touches memory.

use super::{Dim, Place, Strided};

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
    let mut source = Source {
        batch,
        current: Rows::NONE,
    };
    let mut rows = [Row::EMPTY; CHUNK];
    let mut held = source.fill(&mut rows);
    // Batches are mostly uniform: the first row tells how many make up the lead.
    let lead = (LEAD / rows[0].bytes().max(1)).clamp(1, LEAD_ROWS);
    while held == CHUNK {
        let ready = CHUNK - lead;
        copy(&rows[..ready], &rows[lead..]);
        rows.copy_within(ready.., 0);
        held = lead + source.fill(&mut rows[lead..]);
    }
    let mut later = [Row::EMPTY; CHUNK];
    let ahead = held.saturating_sub(lead);
    later[..ahead].copy_from_slice(&rows[held - ahead..held]);
    copy(&rows[..held], &later[..held]);
}

/// The rows of a batch.
struct Source<'a> {
    batch: &'a [Strided<'a>],
    current: Rows<'a>,
}

impl Source<'_> {
    /// Fills `rows` from the front; returns how many there were.
    fn fill(&mut self, rows: &mut [Row]) -> usize {
        let mut filled = 0;
        loop {
            filled += self.current.fill(&mut rows[filled..]);
            let ([next, rest @ ..], true) = (self.batch, filled < rows.len()) else {
                return filled;
            };
            (self.current, self.batch) = (Rows::new(next), rest);
        }
    }
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

/// The rows of one strided copy at all its places, in order; none of them is empty.
///
/// The innermost axis becomes the row, the next one is stepped with a counter, and the axes outside
/// those two are found from a linear index: any number of axes, no allocation, and the divisions
/// are paid once per round of the middle axis.
pub(super) struct Rows<'a> {
    row: Row,
    middle: Dim,
    outer: &'a [Dim],
    /// Rounds of the middle axis at one place; 0: nothing is left.
    rounds: usize,
    /// Those places that are not begun.
    places: &'a [Place],
    origin: Place,
    /// Rows left of this round, and the round's index; none left: the next place is to begin.
    left: usize,
    round: usize,
}

impl<'a> Rows<'a> {
    /// No rows.
    const NONE: Rows<'static> = Rows {
        row: Row::EMPTY,
        middle: Dim {
            count: 0,
            src: 0,
            dst: 0,
        },
        outer: &[],
        rounds: 0,
        places: &[],
        origin: Place {
            src: std::ptr::null(),
            dst: std::ptr::null_mut(),
        },
        left: 0,
        round: 0,
    };

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
        let rounds = dims
            .iter()
            .fold(1usize, |count, axis| count.saturating_mul(axis.count));
        let empty = run == 0 || inner.count == 0 || middle.count == 0 || rounds == 0;
        Rows {
            row: Row {
                run,
                count: inner.count,
                src_stride: inner.src,
                dst_stride: inner.dst,
                ..Row::EMPTY
            },
            middle,
            outer: dims,
            rounds,
            places: if empty { &[] } else { copy.places },
            round: rounds, // of no place yet
            ..Rows::NONE
        }
    }

    /// Fills `rows` from the front; returns how many there were.
    fn fill(&mut self, rows: &mut [Row]) -> usize {
        if self.middle.count == 1 && self.rounds == 1 {
            // The common case, a row at each place.
            let count = rows.len().min(self.places.len());
            let (now, later) = self.places.split_at(count);
            for (row, place) in rows.iter_mut().zip(now) {
                *row = Row {
                    src: place.src,
                    dst: place.dst,
                    ..self.row
                };
            }
            self.places = later;
            return count;
        }
        rows.iter_mut()
            .zip(self)
            .map(|(row, next)| *row = next)
            .count()
    }

    /// Moves to the first row of the next round, at the next place if need be; false: there is none.
    fn step(&mut self) -> bool {
        self.round = self.round.saturating_add(1);
        if self.round >= self.rounds {
            let Some((next, later)) = self.places.split_first() else {
                return false;
            };
            (self.origin, self.places, self.round) = (*next, later, 0);
        }
        let Place { mut src, mut dst } = self.origin;
        let mut index = self.round;
        for axis in self.outer.iter().rev() {
            // No axis is empty here: there would be no places.
            let at = index % axis.count;
            index /= axis.count;
            src = src.wrapping_add(at.wrapping_mul(axis.src));
            dst = dst.wrapping_add(at.wrapping_mul(axis.dst));
        }
        (self.row.src, self.row.dst) = (src, dst);
        self.left = self.middle.count;
        true
    }
}

impl Iterator for Rows<'_> {
    type Item = Row;

    fn next(&mut self) -> Option<Row> {
        if self.left == 0 && !self.step() {
            return None;
        }
        let row = self.row;
        self.left -= 1;
        self.row.src = row.src.wrapping_add(self.middle.src);
        self.row.dst = row.dst.wrapping_add(self.middle.dst);
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
