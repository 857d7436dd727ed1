//! Who uses which slot: publications read it, at most one transfer writes it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bail;
use crate::error::Result;
use crate::ids::Key;
use crate::layout::{Group, Layout};
use crate::plan::unknown_slot;

/// The slots of each group.
#[derive(Debug, Default)]
pub(super) struct Slots {
    groups: Vec<Uses>,
    /// What transfers write. A slot does not name its writer, which is looked for here when it
    /// stands in somebody's way.
    writers: BTreeMap<u64, Writer>,
}

/// How the slots of one group are used. Thousands of them are looked up in one call, with caches
/// that a copy has emptied: that is why there are bits beside the counts.
#[derive(Debug, Default)]
struct Uses {
    written: Bits,
    /// Slots whose count is not 0.
    read: Bits,
    /// Publications.
    readers: Vec<u32>,
}

#[derive(Debug)]
struct Writer {
    key: Key,
    slots: Arc<[GroupSlots]>,
}

/// One bit for each slot.
#[derive(Debug, Default)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: usize) -> Self {
        Self(vec![0; count.div_ceil(64)])
    }

    /// The word of a slot and its bit there; a bit beyond the last slot is nobody's.
    #[inline]
    fn of(&mut self, slot: u32) -> Option<(&mut u64, u64)> {
        let word = self.0.get_mut(slot as usize / 64)?;
        Some((word, 1 << (slot % 64)))
    }

    #[inline]
    fn get(&self, slot: u32) -> bool {
        let word = self.0.get(slot as usize / 64);
        word.is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    #[inline]
    fn set(&mut self, slot: u32) {
        if let Some((word, bit)) = self.of(slot) {
            *word |= bit;
        }
    }

    #[inline]
    fn clear(&mut self, slot: u32) {
        if let Some((word, bit)) = self.of(slot) {
            *word &= !bit;
        }
    }
}

/// Slots of one group, `-1` entries left out.
pub(super) type GroupSlots = (u32, Vec<u32>);

/// The slots of a table, without its holes.
pub(super) fn held_slots(table: &[i32]) -> Vec<u32> {
    let mut slots: Vec<u32> = table.iter().map(|slot| *slot as u32).collect();
    // Holes are the exception, and looking for them is cheaper than taking them out.
    if (slots.iter().fold(0, |all, slot| all | slot) as i32) < 0 {
        slots.retain(|slot| *slot as i32 >= 0);
    }
    slots
}

/// A table must not begin after the last block of its tokens: that is a forgotten or mixed-up
/// number, and nothing of it would ever be read. One without entries may begin where they end.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` with the numbers.
pub(super) fn check_first(
    group: u32,
    held: &Group,
    first_ordinal: u64,
    slots: &[i32],
    token_end: u64,
) -> Result<()> {
    let blocks = token_end.div_ceil(u64::from(held.tokens_per_slot().max(1)));
    let owned = |ordinal| held.ordinals.owned_below(ordinal);
    let past_all = first_ordinal > 0 && first_ordinal >= blocks && !slots.is_empty();
    if past_all || owned(first_ordinal) > owned(blocks) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "group {group}: a table of {} slots from block ordinal {first_ordinal} on, but the \
             {token_end} tokens end with the {blocks} blocks of {} tokens before it",
            slots.len(),
            held.tokens_per_slot()
        );
    }
    Ok(())
}

impl Uses {
    fn new(count: usize) -> Self {
        Self {
            written: Bits::new(count),
            read: Bits::new(count),
            readers: vec![0; count],
        }
    }

    fn count(&self) -> usize {
        self.readers.len()
    }

    /// Makes the slots written, up to the first one that may not be, whose place is told.
    fn write(&mut self, slots: &[u32]) -> Option<usize> {
        let count = self.count();
        // Thousands of slots while the lock is held: nothing else in this loop.
        slots.iter().position(|slot| {
            let free = (*slot as usize) < count && !self.read.get(*slot);
            match self.written.of(*slot) {
                Some((word, bit)) if free && *word & bit == 0 => {
                    *word |= bit;
                    false
                }
                _ => true,
            }
        })
    }

    fn unwrite(&mut self, slots: &[u32]) {
        for slot in slots {
            self.written.clear(*slot);
        }
    }
}

impl Slots {
    /// All slots of the layout, free.
    pub fn new(layout: &Layout) -> Self {
        let count = |g: &Group| g.views.iter().map(|v| v.slots).min().unwrap_or(0);
        let groups = layout.groups.iter();
        Self {
            groups: groups.map(|g| Uses::new(count(g) as usize)).collect(),
            writers: BTreeMap::new(),
        }
    }

    /// Makes `transfer` the writer of all the slots, or changes nothing.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`, `KVF_ERR_DUPLICATE`, or `KVF_ERR_SLOT_BUSY` naming the holder.
    pub fn begin_write(
        &mut self,
        transfer: u64,
        key: Key,
        slots: &Arc<[GroupSlots]>,
    ) -> Result<()> {
        for (at, (group, list)) in slots.iter().enumerate() {
            let Some(uses) = self.groups.get_mut(*group as usize) else {
                self.unwrite(&slots[..at]);
                return self.check(*group, 0);
            };
            if let Some(i) = uses.write(list) {
                uses.unwrite(&list[..i]);
                self.unwrite(&slots[..at]);
                let slot = list[i];
                self.check(*group, i64::from(slot))?;
                if given_before(slots, at, i) {
                    bail!(
                        KVF_ERR_DUPLICATE,
                        "slot {slot} of group {group} is given twice as a destination"
                    );
                }
                return self.busy(*group, slot);
            }
        }
        let slots = slots.clone();
        self.writers.insert(transfer, Writer { key, slots });
        Ok(())
    }

    fn unwrite(&mut self, slots: &[GroupSlots]) {
        for (group, list) in slots {
            if let Some(uses) = self.groups.get_mut(*group as usize) {
                uses.unwrite(list);
            }
        }
    }

    /// Frees the slots of a transfer; once.
    pub fn end_write(&mut self, transfer: u64) {
        if let Some(writer) = self.writers.remove(&transfer) {
            self.unwrite(&writer.slots);
        }
    }

    /// Adds a reader to all the slots, or changes nothing.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`, or `KVF_ERR_SLOT_BUSY` naming the writing transfer.
    pub fn begin_read(&mut self, slots: &[GroupSlots]) -> Result<()> {
        for (group, list) in slots {
            let uses = self.groups.get(*group as usize);
            let readable = |slot: &u32| {
                uses.is_some_and(|u| (*slot as usize) < u.count() && !u.written.get(*slot))
            };
            if let Some(slot) = list.iter().find(|slot| !readable(slot)) {
                self.check(*group, i64::from(*slot))?;
                return self.busy(*group, *slot);
            }
        }
        for (group, list) in slots {
            let Some(uses) = self.groups.get_mut(*group as usize) else {
                continue;
            };
            for slot in list {
                if let Some(readers) = uses.readers.get_mut(*slot as usize) {
                    *readers += 1;
                    uses.read.set(*slot);
                }
            }
        }
        Ok(())
    }

    /// Takes a reader from the slots.
    pub fn end_read(&mut self, slots: &[GroupSlots]) {
        for (group, list) in slots {
            let Some(uses) = self.groups.get_mut(*group as usize) else {
                continue;
            };
            for slot in list {
                if let Some(readers) = uses.readers.get_mut(*slot as usize) {
                    *readers = readers.saturating_sub(1);
                    if *readers == 0 {
                        uses.read.clear(*slot);
                    }
                }
            }
        }
    }

    /// Checks that a slot exists.
    pub fn check(&self, group: u32, slot: i64) -> Result<()> {
        let Some(uses) = self.groups.get(group as usize) else {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {group} of a layout with {} groups",
                self.groups.len()
            );
        };
        if usize::try_from(slot).is_ok_and(|slot| slot < uses.count()) {
            return Ok(());
        }
        bail!(
            KVF_ERR_OUT_OF_RANGE,
            "slot {slot} of group {group}, which has {} slots",
            uses.count()
        );
    }

    /// Slots of a group.
    pub fn count(&self, group: u32) -> u32 {
        let count = self.groups.get(group as usize).map_or(0, Uses::count);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Checks that all slots of a table exist; -1 is none.
    pub fn check_table(&self, group: u32, slots: &[i32]) -> Result<()> {
        match unknown_slot(slots, self.count(group)) {
            Some(entry) => self.check(group, i64::from(slots[entry])),
            None => Ok(()),
        }
    }

    /// Names who uses a slot.
    fn busy(&self, group: u32, slot: u32) -> Result<()> {
        let readers = self.groups.get(group as usize).map(|uses| &uses.readers);
        match readers.and_then(|readers| readers.get(slot as usize)) {
            Some(0) | None => {}
            Some(n) => bail!(
                KVF_ERR_SLOT_BUSY,
                "slot {slot} of group {group} is in {n} publication(s); wait for their end or \
                 release them"
            ),
        }
        let writes = |writer: &Writer| {
            let mut lists = writer.slots.iter();
            lists.any(|(of, list)| *of == group && list.contains(&slot))
        };
        match self.writers.iter().find(|(_, writer)| writes(writer)) {
            Some((transfer, Writer { key, .. })) => bail!(
                KVF_ERR_SLOT_BUSY,
                "slot {slot} of group {group} is the destination of transfer {transfer} ({key})"
            ),
            None => bail!(
                KVF_ERR_INTERNAL,
                "slot {slot} of group {group} is written by nobody"
            ),
        }
    }
}

/// Whether the slot at `i` of the list at `at` was named before it.
fn given_before(slots: &[GroupSlots], at: usize, i: usize) -> bool {
    let (group, list) = &slots[at];
    let mut whole = slots[..at].iter().filter(|(of, _)| of == group);
    list[..i].contains(&list[i]) || whole.any(|(_, earlier)| earlier.contains(&list[i]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status::*;

    fn slots() -> Slots {
        Slots {
            groups: vec![Uses::new(4), Uses::new(2)],
            writers: BTreeMap::new(),
        }
    }

    const KEY: Key = Key {
        request: 7,
        attempt: 1,
    };

    #[test]
    fn a_destination_has_one_writer_and_names_it() {
        let mut s = slots();
        s.begin_write(12, KEY, &[(0, vec![1, 2]), (1, vec![0])].into())
            .unwrap();
        let err = s
            .begin_write(13, KEY, &[(0, vec![3, 2])].into())
            .unwrap_err();
        assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
        assert_eq!(
            err.text,
            "slot 2 of group 0 is the destination of transfer 12 (request 7 attempt 1)"
        );
        // The refused call left slot 3 free.
        s.begin_write(14, KEY, &[(0, vec![3])].into()).unwrap();
        s.end_write(12);
        s.begin_write(15, KEY, &[(0, vec![2])].into()).unwrap();
    }

    #[test]
    fn what_was_written_and_read_is_free_afterwards() {
        let mut s = slots();
        let all = [(0, vec![0, 1, 2, 3])];
        s.begin_write(1, KEY, &all.clone().into()).unwrap();
        s.end_write(1);
        // One is written again, one read twice, one is refused together with one that is in use.
        s.begin_write(2, KEY, &[(0, vec![0])].into()).unwrap();
        s.begin_read(&[(0, vec![1])]).unwrap();
        s.begin_read(&[(0, vec![1])]).unwrap();
        let err = s
            .begin_write(3, KEY, &[(0, vec![2, 0])].into())
            .unwrap_err();
        assert!(err.text.contains("the destination of transfer 2"), "{err}");
        let err = s
            .begin_write(3, KEY, &[(0, vec![3, 3])].into())
            .unwrap_err();
        assert_eq!(err.status, KVF_ERR_DUPLICATE);
        let err = s.begin_read(&[(0, vec![0])]).unwrap_err();
        assert!(err.text.contains("the destination of transfer 2"), "{err}");
        let err = s.begin_write(3, KEY, &[(0, vec![1])].into()).unwrap_err();
        assert!(err.text.contains("in 2 publication(s)"), "{err}");
        s.begin_write(3, KEY, &[(0, vec![2, 3])].into()).unwrap();
        s.end_write(2);
        s.end_write(3);
        s.end_read(&[(0, vec![1, 1])]);
        s.begin_write(4, KEY, &all.into()).unwrap();
        assert_eq!(s.writers.len(), 1);
    }

    #[test]
    fn a_slot_given_twice_is_refused_and_all_stay_free() {
        let mut s = slots();
        let err = s
            .begin_write(1, KEY, &[(0, vec![1, 3, 1])].into())
            .unwrap_err();
        assert_eq!(err.status, KVF_ERR_DUPLICATE);
        s.begin_write(2, KEY, &[(0, vec![1, 3])].into()).unwrap();
    }

    #[test]
    fn readers_are_counted_and_exclude_writers() {
        let mut s = slots();
        s.begin_read(&[(0, vec![1, 1])]).unwrap();
        s.end_read(&[(0, vec![1])]);
        let err = s.begin_write(1, KEY, &[(0, vec![1])].into()).unwrap_err();
        assert!(err.text.contains("in 1 publication(s)"), "{err}");
        s.end_read(&[(0, vec![1])]);
        s.begin_write(1, KEY, &[(0, vec![1])].into()).unwrap();
        let err = s.begin_read(&[(0, vec![0, 1])]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
        s.begin_write(2, KEY, &[(0, vec![0])].into()).unwrap();
    }

    #[test]
    fn ranges_are_checked() {
        let mut s = slots();
        for (group, slot) in [(0, 63), (0, 64), (0, u32::MAX), (1, 2), (2, 0)] {
            let err = s
                .begin_write(1, KEY, &[(0, vec![3]), (group, vec![slot])].into())
                .unwrap_err();
            assert_eq!(err.status, KVF_ERR_OUT_OF_RANGE, "{err}");
            let err = s.begin_read(&[(0, vec![3]), (group, vec![slot])]);
            assert_eq!(err.unwrap_err().status, KVF_ERR_OUT_OF_RANGE);
        }
        // All stayed free.
        s.begin_write(1, KEY, &[(0, vec![3])].into()).unwrap();
        s.end_write(1);
        let err = s
            .begin_write(1, KEY, &[(0, vec![0, 4])].into())
            .unwrap_err();
        assert_eq!(err.status, KVF_ERR_OUT_OF_RANGE);
        assert_eq!(err.text, "slot 4 of group 0, which has 4 slots");
        assert_eq!(
            s.begin_read(&[(2, vec![0])]).unwrap_err().status,
            KVF_ERR_OUT_OF_RANGE
        );
        s.begin_write(2, KEY, &[(0, vec![0])].into()).unwrap();
    }
}
