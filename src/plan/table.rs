//! Block tables of a request: checked, paired by ordinal, neighbours joined.

use std::collections::BTreeMap;

use super::form::Segment;
use super::meeting::{Meeting, Side};
use crate::error::{Error, Result};
use crate::{bail, err};

/// Ids must be slots that the views have, none twice.
pub(super) fn check_ids(slots: &[i32], limit: u32) -> Result<()> {
    let mut seen = vec![0u64; limit.div_ceil(64) as usize];
    // Thousands of entries on the caller's thread: who was seen before is found out afterwards.
    let mut twice = 0;
    for slot in slots {
        let id = *slot as u32;
        if let Some(word) = seen.get_mut((id / 64) as usize)
            && id < limit
        {
            twice |= *word >> (id % 64) & 1;
            *word |= 1 << (id % 64);
        } else if *slot != -1 {
            let entry = slots.iter().position(|s| s == slot).unwrap_or_default();
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "entry {entry} of the table is slot {slot}; the view has {limit}"
            );
        }
    }
    match twice {
        0 => Ok(()),
        _ => Err(given_twice(slots)),
    }
}

/// Error for a table with a slot that is there twice.
fn given_twice(slots: &[i32]) -> Error {
    let mut first = BTreeMap::new();
    let mut held = slots.iter().enumerate().filter(|(_, slot)| **slot != -1);
    let pair = held.find_map(|(i, slot)| Some((first.insert(slot, i)?, i, slot)));
    let (first, second, slot) = pair.unwrap_or((0, 0, &-1));
    err!(
        KVF_ERR_DUPLICATE,
        "entries {first} and {second} of the table are both slot {slot}"
    )
}

/// One side's table.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    slots: &'a [i32],
    side: Side,
    first_ordinal: u64,
    /// Owned blocks before the first entry.
    before: u64,
}

impl<'a> Table<'a> {
    pub fn new(slots: &'a [i32], first_ordinal: u64, side: Side) -> Self {
        Self {
            slots,
            side,
            first_ordinal,
            before: side.ordinals.owned_below(first_ordinal),
        }
    }

    /// Checks that there is an entry for every owned block of fine blocks `[begin, last)`.
    pub fn covers(&self, begin: u64, last: u64, exact: bool) -> Result<()> {
        let owned = |ordinal| self.side.ordinals.owned_below(ordinal);
        let end = last.div_ceil(self.side.ratio);
        let first = begin / self.side.ratio;
        if owned(first) < self.before && owned(end) > owned(first) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the table starts at block ordinal {}, but blocks from ordinal {first} on are needed",
                self.first_ordinal
            );
        }
        let (needed, given) = (
            owned(end).saturating_sub(self.before),
            self.slots.len() as u64,
        );
        if given < needed || (exact && given != needed) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the table has {given} entries; owned block ordinals {}..{end} need {}{needed}",
                self.first_ordinal,
                if exact { "exactly " } else { "at least " }
            );
        }
        Ok(())
    }

    /// Error for an entry that says "not held".
    fn hole(&self, entry: u64, side: &str) -> Error {
        let o = self.side.ordinals;
        let ordinal = (self.before + entry) * u64::from(o.stride) + u64::from(o.offset);
        err!(
            KVF_ERR_INVALID_ARGUMENT,
            "{side} table entry {entry} (block ordinal {ordinal}) is -1, but its tokens are to be moved"
        )
    }
}

/// Walks the common blocks of two tables and joins neighbours.
pub(super) struct Walk<'a> {
    pub src: Table<'a>,
    pub dst: Table<'a>,
    pub src_is_coarse: bool,
    pub ratio: u32,
    pub segments: &'a mut Vec<Segment>,
}

impl Walk<'_> {
    /// Walks fine blocks `[begin, end)`; returns how many both own.
    pub fn run(&mut self, m: &Meeting, begin: u64, end: u64) -> Result<u64> {
        if m.period == 1 {
            return self.run_equal(begin, end);
        }
        let (src_step, dst_step) = m.entries_per_period();
        let mut blocks = 0;
        for period in begin / m.period..end.div_ceil(m.period) {
            let at = period * m.period;
            for phase in &m.phases {
                let block = at + phase.at;
                if block < begin || block >= end {
                    continue;
                }
                let src = period * src_step + phase.src - self.src.before;
                let dst = period * dst_step + phase.dst - self.dst.before;
                self.join(src, dst, phase.sub)?;
                blocks += 1;
            }
        }
        Ok(blocks)
    }

    /// The common case: equal blocks, and both sides own all of them.
    fn run_equal(&mut self, begin: u64, end: u64) -> Result<u64> {
        let of = |t: &Table<'_>| (begin - t.before) as usize..(end - t.before) as usize;
        let src = &self.src.slots[of(&self.src)];
        let dst = &self.dst.slots[of(&self.dst)];
        let mut next = (0, 0); // slots that continue the last segment
        for (i, (s, d)) in src.iter().zip(dst).enumerate() {
            if (*s | *d) < 0 {
                let at = |t: &Table<'_>| begin - t.before + i as u64;
                return Err(match *s {
                    ..0 => self.src.hole(at(&self.src), "source"),
                    _ => self.dst.hole(at(&self.dst), "destination"),
                });
            }
            let (coarse, fine) = (*d as u32, *s as u32);
            match self.segments.last_mut() {
                Some(last) if next == (coarse, fine) => last.count += 1,
                _ => {
                    if self.segments.capacity() == 0 {
                        // Room for tables without any neighbours, which are the rule.
                        self.segments.reserve_exact(src.len());
                    }
                    self.segments.push(Segment {
                        coarse,
                        fine,
                        sub: 0,
                        len: 1,
                        count: 1,
                    });
                }
            }
            next = (coarse + 1, fine + 1);
        }
        Ok(end - begin)
    }

    /// Adds one fine block: table entries and its place in the coarser block.
    #[inline]
    fn join(&mut self, src: u64, dst: u64, sub: u32) -> Result<()> {
        let s = self.src.slots[src as usize];
        let d = self.dst.slots[dst as usize];
        if s < 0 {
            return Err(self.src.hole(src, "source"));
        }
        if d < 0 {
            return Err(self.dst.hole(dst, "destination"));
        }
        let (coarse, fine) = if self.src_is_coarse { (s, d) } else { (d, s) };
        let (coarse, fine) = (coarse as u32, fine as u32);
        let mut new = Segment {
            coarse,
            fine,
            sub,
            len: 1,
            count: 1,
        };
        if let Some(last) = self.segments.last_mut()
            && last.len < self.ratio
            && last.coarse == coarse
            && last.sub + last.len == sub
            && last.fine + last.len == fine
        {
            last.len += 1;
            if last.len < self.ratio {
                return Ok(());
            }
            new = *last;
            self.segments.pop();
        }
        // A whole coarse block may continue the whole blocks before it.
        if new.len == self.ratio
            && let Some(last) = self.segments.last_mut()
            && last.len == self.ratio
            && last.coarse + last.count == new.coarse
            && last.fine + last.count * self.ratio == new.fine
        {
            last.count += 1;
            return Ok(());
        }
        self.segments.push(new);
        Ok(())
    }
}
