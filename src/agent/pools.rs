//! An agent's registered pools: by id, by address, and which are being taken back.
//!
//! Adding and finding one costs O(log n); engines that register every tensor have thousands.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::device_pools::Exported;
use crate::bail;
use crate::cuda::{Context, DeviceMemory};
use crate::error::Result;
use crate::ids::Incarnation;
use crate::memory::Pool;

/// A registered pool.
pub(super) struct PoolEntry {
    pub pool: Arc<Pool>,
    /// Operations that may touch it.
    pub users: u64,
    /// Taken back, with the user data of its event: no new operation.
    leaving: Option<u64>,
    /// "May be freed now" was said.
    released: bool,
    /// Its handle is gone: forgotten as soon as it is released.
    forget: bool,
    /// Device memory, and who else may have it mapped.
    pub exported: Exported,
}

impl PoolEntry {
    pub fn is_leaving(&self) -> bool {
        self.leaving.is_some()
    }

    pub fn is_released(&self) -> bool {
        self.released
    }
}

#[derive(Default)]
pub(super) struct Pools {
    by_id: BTreeMap<u32, PoolEntry>,
    /// First address of each pool that has not been released. They are disjoint.
    by_base: BTreeMap<usize, u32>,
    /// Taken back, not yet released.
    leaving: BTreeSet<u32>,
    /// Contexts of device pools that have not been released, and how many each has.
    contexts: BTreeMap<Context, usize>,
}

impl Pools {
    /// Adds a pool under its own id; with `memory` if it lies on a device.
    ///
    /// # Errors
    /// `KVF_ERR_DUPLICATE` naming the pool that it overlaps.
    pub fn add(&mut self, pool: Pool, memory: Option<DeviceMemory>) -> Result<u32> {
        let (id, base) = (pool.id(), pool.base().addr());
        // All are disjoint: if any overlaps, so does the last that begins before our end.
        let end = base.saturating_add(usize::try_from(pool.bytes()).unwrap_or(usize::MAX));
        if let Some((_, near)) = self.by_base.range(..end).next_back()
            && let Some(other) = self.by_id.get(near)
            && other.pool.overlaps(&pool)
        {
            bail!(
                KVF_ERR_DUPLICATE,
                "{} bytes at {:p} overlap pool {near}",
                pool.bytes(),
                pool.base()
            );
        }
        self.by_base.insert(base, id);
        if let Some(context) = device_context(&pool) {
            *self.contexts.entry(context).or_default() += 1;
        }
        let entry = PoolEntry {
            pool: Arc::new(pool),
            users: 0,
            leaving: None,
            released: false,
            forget: false,
            exported: Exported {
                memory,
                ..Exported::default()
            },
        };
        self.by_id.insert(id, entry);
        Ok(id)
    }

    pub fn get(&self, id: u32) -> Option<&PoolEntry> {
        self.by_id.get(&id)
    }

    /// Contexts of device pools.
    pub fn contexts(&self) -> impl Iterator<Item = Context> {
        self.contexts.keys().copied()
    }

    pub fn get_mut(&mut self, id: u32) -> Option<&mut PoolEntry> {
        self.by_id.get_mut(&id)
    }

    /// No new operation may use the pool; `forget`: its handle is gone.
    pub fn leave(&mut self, id: u32, user_data: u64, forget: bool) {
        if let Some(entry) = self.by_id.get_mut(&id)
            && !entry.released
        {
            entry.leaving = Some(user_data);
            entry.forget |= forget;
            self.leaving.insert(id);
        }
    }

    /// Takes [`Self::leave`] back, unless the pool was released meanwhile; its user data.
    pub fn stay(&mut self, id: u32) -> Option<u64> {
        let entry = self.by_id.get_mut(&id).filter(|e| !e.released)?;
        let user_data = entry.leaving.take()?;
        entry.exported.asked = false;
        entry.pool.reopen();
        self.leaving.remove(&id);
        Some(user_data)
    }

    /// Pools that are leaving and that no operation uses, with their user data.
    pub fn leaving_unused(&self) -> Vec<(u32, Arc<Pool>, u64)> {
        let unused = self.leaving.iter().filter_map(|id| {
            let entry = self.by_id.get(id).filter(|e| e.users == 0)?;
            Some((*id, entry.pool.clone(), entry.leaving?))
        });
        unused.collect()
    }

    /// Who still has to unmap the pool, each named once; `None`: nobody has it mapped.
    pub fn ask_holders(&mut self, id: u32) -> Option<Vec<Incarnation>> {
        let entry = self.by_id.get_mut(&id)?;
        if !entry.is_held() {
            return None;
        }
        let asked = std::mem::replace(&mut entry.exported.asked, true);
        let holders = entry.exported.holders.keys().filter(|_| !asked);
        Some(holders.copied().collect())
    }

    /// Lets go of readers whose processes have ended.
    pub fn drop_dead_holders(&mut self) {
        self.by_id
            .values_mut()
            .for_each(PoolEntry::drop_dead_holders);
    }

    /// Whether this reader may have a pool mapped.
    pub fn are_held_by(&self, agent: Incarnation) -> bool {
        let mut pools = self.by_id.values();
        pools.any(|entry| entry.exported.holders.contains_key(&agent))
    }

    /// "May be freed now" is said: its addresses may be registered again. The entry if nobody can
    /// ask for it any more, to be dropped outside of the lock, since that may unmap.
    #[must_use = "dropped outside of the lock"]
    pub fn release(&mut self, id: u32) -> Option<PoolEntry> {
        self.leaving.remove(&id);
        let entry = self.by_id.get_mut(&id)?;
        entry.released = true;
        entry.pool.unpin();
        self.by_base.remove(&entry.pool.base().addr());
        let context = device_context(&entry.pool);
        leave_context(&mut self.contexts, context);
        match entry.forget {
            true => self.by_id.remove(&id),
            false => None,
        }
    }

    /// Forgets a pool. To be dropped outside of the lock, since that may unmap.
    #[must_use = "dropped outside of the lock"]
    pub fn remove(&mut self, id: u32) -> Option<PoolEntry> {
        let entry = self.by_id.remove(&id)?;
        self.leaving.remove(&id);
        if !entry.released {
            entry.pool.unpin();
            self.by_base.remove(&entry.pool.base().addr());
            leave_context(&mut self.contexts, device_context(&entry.pool));
        }
        Some(entry)
    }
}

fn device_context(pool: &Pool) -> Option<Context> {
    let place = pool.on_device().filter(|_| pool.is_device())?;
    Some(Context::from_handle(place.context, place.device))
}

fn leave_context(contexts: &mut BTreeMap<Context, usize>, context: Option<Context>) {
    if let Some(context) = context
        && let Some(count) = contexts.get_mut(&context)
    {
        *count -= 1;
        if *count == 0 {
            contexts.remove(&context);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status::*;

    /// `bytes` of memory from which pools are cut, by offset.
    struct Memory(Vec<u8>);

    impl Memory {
        fn new(bytes: usize) -> Self {
            Self(vec![0; bytes])
        }

        fn pool(&mut self, id: u32, at: usize, bytes: u64) -> Pool {
            assert!(at + bytes as usize <= self.0.len());
            // SAFETY: inside the buffer, which outlives the test's pools; nobody touches them.
            unsafe { Pool::register(id, self.0.as_mut_ptr().add(at), bytes) }.unwrap()
        }
    }

    #[test]
    fn overlaps_are_found_from_every_side_and_neighbours_are_fine() {
        let mut memory = Memory::new(1 << 16);
        let mut pools = Pools::default();
        for (id, at, bytes) in [
            (1, 1000, 100),
            (2, 1100, 50),
            (3, 5000, 1000),
            (4, 900, 100),
        ] {
            assert_eq!(pools.add(memory.pool(id, at, bytes), None).unwrap(), id);
        }
        for (at, bytes, with) in [
            (1000, 100, 1), // the same
            (1050, 1, 1),
            (0, 901, 4),
            (999, 1, 4),
            (1149, 1, 2),
            (1100, 3901, 3), // begins with pool 2, reaches into pool 3: the last is named
            (5999, 5000, 3),
            (0, 1 << 16, 3),
        ] {
            let err = pools.add(memory.pool(9, at, bytes), None).unwrap_err();
            assert_eq!(err.status, KVF_ERR_DUPLICATE);
            let named = format!("overlap pool {with}");
            assert!(err.text.ends_with(&named), "{at} {bytes}: {err}");
        }
        assert_eq!(pools.by_id.len(), 4);
        for (id, at, bytes) in [(10, 0, 900), (11, 1150, 3850), (12, 6000, 1)] {
            assert_eq!(pools.add(memory.pool(id, at, bytes), None).unwrap(), id);
        }
    }

    #[test]
    fn released_addresses_may_be_registered_again() {
        let mut memory = Memory::new(4096);
        let mut pools = Pools::default();
        pools.add(memory.pool(1, 0, 4096), None).unwrap();
        pools.leave(1, 77, false);
        assert!(pools.get(1).unwrap().is_leaving());
        // Not yet: somebody may be reading.
        let err = pools.add(memory.pool(2, 0, 64), None).unwrap_err();
        assert_eq!(err.status, KVF_ERR_DUPLICATE);
        let unused = pools.leaving_unused();
        assert_eq!((unused.len(), unused[0].0, unused[0].2), (1, 1, 77));
        assert!(pools.release(1).is_none()); // its handle can still ask
        assert!(pools.get(1).unwrap().is_released());
        pools.add(memory.pool(2, 0, 64), None).unwrap();
        // Forgetting the old one leaves the new one's address taken.
        assert!(pools.remove(1).is_some());
        let err = pools.add(memory.pool(3, 32, 1), None).unwrap_err();
        assert!(err.text.ends_with("overlap pool 2"), "{err}");
    }

    #[test]
    fn a_used_pool_stays_and_one_without_a_handle_is_forgotten() {
        let mut memory = Memory::new(4096);
        let mut pools = Pools::default();
        pools.add(memory.pool(1, 0, 4096), None).unwrap();
        pools.get_mut(1).unwrap().users = 1;
        pools.leave(1, 5, false);
        assert!(pools.leaving_unused().is_empty());
        assert_eq!(pools.stay(1), Some(5));
        assert_eq!(pools.stay(1), None);
        assert!(!pools.get(1).unwrap().is_leaving());
        pools.leave(1, 6, true);
        pools.get_mut(1).unwrap().users = 0;
        assert_eq!(pools.leaving_unused().len(), 1);
        assert!(pools.release(1).is_some());
        assert!(pools.get(1).is_none());
        pools.add(memory.pool(2, 0, 4096), None).unwrap();
    }
}
