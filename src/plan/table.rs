//! Block tables of a request: checked, paired by ordinal, neighbours joined.

use std::collections::BTreeMap;

use super::form::Segment;
use super::meeting::{Meeting, Side};
use crate::error::{Error, Result};
use crate::{bail, err};

/// Index of the first entry that is neither -1 nor a slot below `limit`.
///
/// Tables have thousands of entries and are checked on the caller's thread: one look at all of
/// them without a branch, and a second one only if something is wrong. The same below.
pub fn unknown_slot(slots: &[i32], limit: u32) -> Option<usize> {
    let limit = limit.min(1 << 31);
    let unknown = |slot: &i32| (*slot as u32).wrapping_add(1) > limit;
    match slots.iter().fold(false, |any, slot| any | unknown(slot)) {
        true => slots.iter().position(unknown),
        false => None,
    }
}

/// The first two entries that are the same slot, in a table without unknown slots.
pub fn slot_twice(slots: &[i32], limit: u32) -> Option<(usize, usize)> {
    if slots.len() <= FEW {
        let pairs = (0..slots.len()).flat_map(|i| (0..i).map(move |first| (first, i)));
        let mut held = pairs.filter(|(_, i)| slots[*i] >= 0);
        return held.find(|(first, i)| slots[*first] == slots[*i]);
    }
    // A place for each slot, after one for -1, which may be there often.
    let place = |slot: &i32| (slot.wrapping_add(1) as u32 as usize, *slot >= 0);
    let places = slots.iter().map(place);
    let twice = match limit {
        ..=BYTES_BELOW => {
            let mut seen = vec![0u8; limit as usize + 1];
            let mut twice = 0;
            for (place, held) in places {
                if let Some(byte) = seen.get_mut(place) {
                    twice |= *byte;
                    *byte = u8::from(held);
                }
            }
            twice != 0
        }
        _ => {
            let mut seen = vec![0u64; limit as usize / 64 + 1];
            let mut twice = 0;
            for (place, held) in places {
                if let Some(word) = seen.get_mut(place / 64) {
                    twice |= *word >> (place % 64) & 1;
                    *word |= u64::from(held) << (place % 64);
                }
            }
            twice != 0
        }
    };
    if !twice {
        return None;
    }
    let mut first = BTreeMap::new();
    let mut held = slots.iter().enumerate().filter(|(_, slot)| **slot != -1);
    held.find_map(|(i, slot)| Some((first.insert(slot, i)?, i)))
}

/// So many entries are compared with each other: a place for each slot would cost more, and a small
/// pull waits for it.
const FEW: usize = 16;

/// With so many slots at most, a byte for each is as well as free, and faster than a bit, which
/// has to wait for its neighbour's.
const BYTES_BELOW: u32 = 1 << 16;

/// Ids must be slots that the views have, none twice.
pub(super) fn check_ids(slots: &[i32], limit: u32) -> Result<()> {
    if let Some(entry) = unknown_slot(slots, limit) {
        bail!(
            KVF_ERR_OUT_OF_RANGE,
            "entry {entry} of the table is slot {}; the view has {limit}",
            slots[entry]
        );
    }
    if let Some((first, second)) = slot_twice(slots, limit) {
        bail!(
            KVF_ERR_DUPLICATE,
            "entries {first} and {second} of the table are both slot {}",
            slots[second]
        );
    }
    Ok(())
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

/// Whole fine blocks of a request, in token order.
#[derive(Debug)]
pub(super) enum Segments {
    /// Source and destination slots of equal blocks of which none continues the one before it.
    /// That is the rule, and the less is written about them the better.
    Single(Vec<(u32, u32)>),
    Joined(Vec<Segment>),
}

impl Segments {
    pub fn len(&self) -> usize {
        match self {
            Self::Single(pairs) => pairs.len(),
            Self::Joined(segments) => segments.len(),
        }
    }

    pub fn get(&self, at: usize) -> Option<Segment> {
        match self {
            Self::Single(pairs) => pairs.get(at).map(|(src, dst)| Segment::new(*src, *dst, 1)),
            Self::Joined(segments) => segments.get(at).copied(),
        }
    }
}

/// Walks the common blocks of two tables and joins neighbours.
pub(super) struct Walk<'a> {
    pub src: Table<'a>,
    pub dst: Table<'a>,
    pub src_is_coarse: bool,
    pub ratio: u32,
}

impl Walk<'_> {
    /// Walks fine blocks `[begin, end)`; returns those that both own, and how many they are.
    pub fn run(&self, m: &Meeting, begin: u64, end: u64) -> Result<(Segments, u64)> {
        if m.period == 1 {
            return Ok((self.run_equal(begin, end)?, end - begin));
        }
        let (src_step, dst_step) = m.entries_per_period();
        let (mut segments, mut blocks) = (Vec::new(), 0);
        for period in begin / m.period..end.div_ceil(m.period) {
            let at = period * m.period;
            for phase in &m.phases {
                let block = at + phase.at;
                if block < begin || block >= end {
                    continue;
                }
                let src = period * src_step + phase.src - self.src.before;
                let dst = period * dst_step + phase.dst - self.dst.before;
                self.join(src, dst, phase.sub, &mut segments)?;
                blocks += 1;
            }
        }
        Ok((Segments::Joined(segments), blocks))
    }

    /// The common case: equal blocks, and both sides own all of them.
    fn run_equal(&self, begin: u64, end: u64) -> Result<Segments> {
        let of = |t: &Table<'_>| (begin - t.before) as usize..(end - t.before) as usize;
        let src = &self.src.slots[of(&self.src)];
        let dst = &self.dst.slots[of(&self.dst)];
        let holes = |table: &[i32]| table.iter().fold(0, |all, slot| all | slot) < 0;
        if holes(src) || holes(dst) {
            let hole = src.iter().zip(dst).position(|(s, d)| (*s | *d) < 0);
            let hole = hole.unwrap_or_default();
            let at = |t: &Table<'_>| begin - t.before + hole as u64;
            return Err(match src[hole] {
                ..0 => self.src.hole(at(&self.src), "source"),
                _ => self.dst.hole(at(&self.dst), "destination"),
            });
        }
        let follow = |table: &[i32]| table[1] - table[0] == 1;
        let steps = src.windows(2).map(follow).zip(dst.windows(2).map(follow));
        let joined = steps.map(|(src, dst)| src & dst);
        let joins: u32 = joined.clone().map(u32::from).sum();
        if joins == 0 {
            let pairs = src.iter().zip(dst).map(|(s, d)| (*s as u32, *d as u32));
            return Ok(Segments::Single(pairs.collect()));
        }
        let mut segments = Vec::with_capacity(src.len() - joins as usize);
        let mut first = 0;
        for (at, joined) in joined.chain([false]).enumerate() {
            if !joined {
                let (s, d) = (src[first] as u32, dst[first] as u32);
                segments.push(Segment::new(s, d, (at + 1 - first) as u32));
                first = at + 1;
            }
        }
        Ok(Segments::Joined(segments))
    }

    /// Adds one fine block: table entries and its place in the coarser block.
    #[inline]
    fn join(&self, src: u64, dst: u64, sub: u32, to: &mut Vec<Segment>) -> Result<()> {
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
        if let Some(last) = to.last_mut()
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
            to.pop();
        }
        // A whole coarse block may continue the whole blocks before it.
        if new.len == self.ratio
            && let Some(last) = to.last_mut()
            && last.len == self.ratio
            && last.coarse + last.count == new.coarse
            && last.fine + last.count * self.ratio == new.fine
        {
            last.count += 1;
            return Ok(());
        }
        to.push(new);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_slot_is_found() {
        assert_eq!(unknown_slot(&[-1, 0, 3, -1], 4), None);
        assert_eq!(unknown_slot(&[0, 4], 4), Some(1));
        assert_eq!(unknown_slot(&[-1, 3, -2], 4), Some(2));
        assert_eq!(unknown_slot(&[0, i32::MIN], u32::MAX), Some(1));
        assert_eq!(unknown_slot(&[i32::MAX], u32::MAX), None);
        assert_eq!(unknown_slot(&[], 0), None);
        assert_eq!(unknown_slot(&[-1], 0), None);
    }

    #[test]
    fn a_slot_given_twice_is_found_however_many_there_are() {
        for limit in [70, BYTES_BELOW, BYTES_BELOW + 1, 1 << 20] {
            let last = limit as i32 - 1;
            let mut table: Vec<i32> = (0..64).rev().chain([-1, last, -1, -1]).collect();
            assert_eq!(slot_twice(&table, limit), None, "{limit}");
            table.push(last);
            assert_eq!(slot_twice(&table, limit), Some((65, 68)), "{limit}");
            table[3] = 0;
            assert_eq!(slot_twice(&table, limit), Some((3, 63)), "{limit}");
        }
        assert_eq!(slot_twice(&[], 0), None);
        assert_eq!(slot_twice(&[-1, -1, 3, -1], 4), None);
        assert_eq!(slot_twice(&[-1, 2, 3, -1, 3, 2], 4), Some((2, 4)));
        assert_eq!(slot_twice(&[0, 0], 4), Some((0, 1)));
        let many: Vec<i32> = (0..FEW as i32).chain([0]).collect();
        for len in [FEW, FEW + 1] {
            let twice = (len > FEW).then_some((0, FEW));
            assert_eq!(slot_twice(&many[..len], 99), twice);
        }
    }
}
