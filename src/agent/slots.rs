//! Who uses which slot: publications read it, at most one transfer writes it.

use std::collections::BTreeMap;

use crate::bail;
use crate::error::Result;
use crate::ids::Key;
use crate::layout::{Group, Layout};
use crate::plan::unknown_slot;

/// Set in a word whose slot is the destination of a transfer; the other bits are its id. Without
/// it the word counts publications.
const WRITER: u64 = 1 << 63;

/// One word for each slot of each group.
#[derive(Debug, Default)]
pub(super) struct Slots {
    groups: Vec<Vec<u64>>,
    /// Keys of the writers, to name them.
    writers: BTreeMap<u64, Key>,
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

impl Slots {
    /// All slots of the layout, free.
    pub fn new(layout: &Layout) -> Self {
        let count = |g: &Group| g.views.iter().map(|v| v.slots).min().unwrap_or(0);
        Self {
            groups: layout
                .groups
                .iter()
                .map(|g| vec![0; count(g) as usize])
                .collect(),
            writers: BTreeMap::new(),
        }
    }

    /// Makes `transfer` the writer of all the slots, or changes nothing.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`, `KVF_ERR_DUPLICATE`, or `KVF_ERR_SLOT_BUSY` naming the holder.
    pub fn begin_write(&mut self, transfer: u64, key: Key, slots: &[GroupSlots]) -> Result<()> {
        let word = WRITER | transfer;
        for (at, (group, list)) in slots.iter().enumerate() {
            let words = self.words(*group);
            // Thousands of slots while the lock is held: nothing else in this loop.
            let refused = list
                .iter()
                .position(|slot| match words.get_mut(*slot as usize) {
                    Some(held) if *held == 0 => {
                        *held = word;
                        false
                    }
                    _ => true,
                });
            if let Some(i) = refused {
                let held = self.word(*group, list[i]).map(|held| *held);
                self.undo_write(&slots[..at], (*group, &list[..i]));
                let (held, slot) = (held?, list[i]);
                if held == word {
                    bail!(
                        KVF_ERR_DUPLICATE,
                        "slot {slot} of group {group} is given twice as a destination"
                    );
                }
                bail!(
                    KVF_ERR_SLOT_BUSY,
                    "slot {slot} of group {group} is {}",
                    self.describe(held)
                );
            }
        }
        self.writers.insert(transfer, key);
        Ok(())
    }

    fn undo_write(&mut self, whole: &[GroupSlots], part: (u32, &[u32])) {
        let parts = whole.iter().map(|(g, l)| (*g, l.as_slice()));
        for (group, list) in parts.chain([part]) {
            for slot in list {
                if let Ok(held) = self.word(group, *slot) {
                    *held = 0;
                }
            }
        }
    }

    /// Frees the slots of a transfer.
    pub fn end_write(&mut self, transfer: u64, slots: &[GroupSlots]) {
        for (group, list) in slots {
            let words = self.words(*group);
            for slot in list {
                if let Some(held) = words.get_mut(*slot as usize)
                    && *held == WRITER | transfer
                {
                    *held = 0;
                }
            }
        }
        self.writers.remove(&transfer);
    }

    /// Adds a reader to all the slots, or changes nothing.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`, or `KVF_ERR_SLOT_BUSY` naming the writing transfer.
    pub fn begin_read(&mut self, slots: &[GroupSlots]) -> Result<()> {
        for (group, list) in slots {
            let words = self.words(*group);
            let is_free = |slot: &u32| {
                words
                    .get(*slot as usize)
                    .is_some_and(|held| held & WRITER == 0)
            };
            if let Some(slot) = list.iter().find(|slot| !is_free(slot)) {
                let held = *self.word(*group, *slot)?;
                bail!(
                    KVF_ERR_SLOT_BUSY,
                    "slot {slot} of group {group} is {}",
                    self.describe(held)
                );
            }
        }
        for (group, list) in slots {
            let words = self.words(*group);
            for slot in list {
                if let Some(held) = words.get_mut(*slot as usize) {
                    *held += 1;
                }
            }
        }
        Ok(())
    }

    /// Takes a reader from the slots.
    pub fn end_read(&mut self, slots: &[GroupSlots]) {
        for (group, list) in slots {
            let words = self.words(*group);
            for slot in list {
                if let Some(held) = words.get_mut(*slot as usize)
                    && *held & WRITER == 0
                {
                    *held = held.saturating_sub(1);
                }
            }
        }
    }

    /// Checks that a slot exists.
    pub fn check(&self, group: u32, slot: i64) -> Result<()> {
        let Some(words) = self.groups.get(group as usize) else {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {group} of a layout with {} groups",
                self.groups.len()
            );
        };
        if usize::try_from(slot).is_ok_and(|slot| slot < words.len()) {
            return Ok(());
        }
        bail!(
            KVF_ERR_OUT_OF_RANGE,
            "slot {slot} of group {group}, which has {} slots",
            words.len()
        );
    }

    /// Slots of a group.
    pub fn count(&self, group: u32) -> u32 {
        let words = self.groups.get(group as usize).map_or(0, Vec::len);
        u32::try_from(words).unwrap_or(u32::MAX)
    }

    /// Checks that all slots of a table exist; -1 is none.
    pub fn check_table(&self, group: u32, slots: &[i32]) -> Result<()> {
        match unknown_slot(slots, self.count(group)) {
            Some(entry) => self.check(group, i64::from(slots[entry])),
            None => Ok(()),
        }
    }

    fn words(&mut self, group: u32) -> &mut [u64] {
        self.groups
            .get_mut(group as usize)
            .map_or(&mut [], Vec::as_mut_slice)
    }

    fn word(&mut self, group: u32, slot: u32) -> Result<&mut u64> {
        self.check(group, i64::from(slot))?;
        match self
            .groups
            .get_mut(group as usize)
            .and_then(|g| g.get_mut(slot as usize))
        {
            Some(word) => Ok(word),
            None => bail!(KVF_ERR_OUT_OF_RANGE, "slot {slot} of group {group}"),
        }
    }

    fn describe(&self, held: u64) -> String {
        if held & WRITER == 0 {
            return format!("in {held} publication(s); wait for their end or release them");
        }
        let transfer = held & !WRITER;
        match self.writers.get(&transfer) {
            Some(key) => format!("the destination of transfer {transfer} ({key})"),
            None => format!("the destination of transfer {transfer}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status::*;

    fn slots() -> Slots {
        Slots {
            groups: vec![vec![0; 4], vec![0; 2]],
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
        s.begin_write(12, KEY, &[(0, vec![1, 2]), (1, vec![0])])
            .unwrap();
        let err = s.begin_write(13, KEY, &[(0, vec![3, 2])]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
        assert_eq!(
            err.text,
            "slot 2 of group 0 is the destination of transfer 12 (request 7 attempt 1)"
        );
        // The refused call left slot 3 free.
        s.begin_write(14, KEY, &[(0, vec![3])]).unwrap();
        s.end_write(12, &[(0, vec![1, 2]), (1, vec![0])]);
        s.begin_write(15, KEY, &[(0, vec![2])]).unwrap();
    }

    #[test]
    fn a_slot_given_twice_is_refused_and_all_stay_free() {
        let mut s = slots();
        let err = s.begin_write(1, KEY, &[(0, vec![1, 3, 1])]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_DUPLICATE);
        s.begin_write(2, KEY, &[(0, vec![1, 3])]).unwrap();
    }

    #[test]
    fn readers_are_counted_and_exclude_writers() {
        let mut s = slots();
        s.begin_read(&[(0, vec![1, 1])]).unwrap();
        s.end_read(&[(0, vec![1])]);
        let err = s.begin_write(1, KEY, &[(0, vec![1])]).unwrap_err();
        assert!(err.text.contains("in 1 publication(s)"), "{err}");
        s.end_read(&[(0, vec![1])]);
        s.begin_write(1, KEY, &[(0, vec![1])]).unwrap();
        let err = s.begin_read(&[(0, vec![0, 1])]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
        s.begin_write(2, KEY, &[(0, vec![0])]).unwrap();
    }

    #[test]
    fn ranges_are_checked() {
        let mut s = slots();
        let err = s.begin_write(1, KEY, &[(0, vec![0, 4])]).unwrap_err();
        assert_eq!(err.status, KVF_ERR_OUT_OF_RANGE);
        assert_eq!(err.text, "slot 4 of group 0, which has 4 slots");
        assert_eq!(
            s.begin_read(&[(2, vec![0])]).unwrap_err().status,
            KVF_ERR_OUT_OF_RANGE
        );
        s.begin_write(2, KEY, &[(0, vec![0])]).unwrap();
    }
}
