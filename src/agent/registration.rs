//! What an agent is told once: its pools, its layout, its engine.

use std::sync::Arc;
use std::time::Duration;

use super::control::Command;
use super::shared::OwnEngine;
use super::{Agent, metadata};
use crate::bail;
use crate::error::{Result, Status};
use crate::layout::{self, Invariants, Layout};
use crate::memory::{PageSize, Pool};

impl Agent {
    /// Makes a shareable host pool; returns its id. `page_size` 0 = the system's choice.
    ///
    /// # Errors
    /// `KVF_ERR_NO_MEMORY`, or `KVF_ERR_INVALID_ARGUMENT` for sizes that cannot be.
    pub fn create_pool(&self, bytes: u64, numa_node: Option<u32>, page_size: u64) -> Result<u32> {
        self.shared.check_open()?;
        let id = self.shared.new_pool_id();
        let pool = Pool::create_shared(id, bytes, numa_node, PageSize::from_bytes(page_size)?)?;
        self.add_pool(pool)
    }

    /// Registers the engine's memory; returns the pool's id.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for memory that is not there, `KVF_ERR_DUPLICATE` for memory that
    /// overlaps another pool.
    ///
    /// # Safety
    /// The memory must stay valid until `PoolReleased` for this pool.
    pub unsafe fn register_pool(&self, base: *mut u8, bytes: u64) -> Result<u32> {
        self.shared.check_open()?;
        let id = self.shared.new_pool_id();
        // SAFETY: passed on to the caller.
        let pool = unsafe { Pool::register(id, base, bytes)? };
        self.add_pool(pool)
    }

    fn add_pool(&self, pool: Pool) -> Result<u32> {
        self.add_pool_with(pool, None)
    }

    pub(super) fn add_pool_with(
        &self,
        pool: Pool,
        memory: Option<crate::cuda::DeviceMemory>,
    ) -> Result<u32> {
        self.shared.lock().pools.add(pool, memory)
    }

    /// First byte of a pool and its length.
    ///
    /// # Errors
    /// `KVF_ERR_NOT_FOUND`.
    pub fn pool_memory(&self, pool: u32) -> Result<(*mut u8, u64)> {
        match self.shared.lock().pools.get(pool) {
            Some(entry) => Ok((entry.pool.base(), entry.pool.bytes())),
            None => bail!(KVF_ERR_NOT_FOUND, "no pool {pool}"),
        }
    }

    /// Takes a pool back: no new operation may name it; ends with a `PoolReleased` event when no
    /// transfer or publication uses it any more, at the latest at the deadline (then with
    /// `KVF_ERR_DEADLINE`: not free, and registered as before).
    ///
    /// # Errors
    /// `KVF_ERR_NOT_FOUND`, or `KVF_ERR_STATE` if it is being taken back already.
    pub fn unregister_pool(&self, pool: u32, deadline: Duration, user_data: u64) -> Result<()> {
        let until = self.shared.now().saturating_add(deadline);
        let mut state = self.shared.lock();
        match state.pools.get(pool) {
            None => bail!(KVF_ERR_NOT_FOUND, "no pool {pool}"),
            Some(entry) if entry.is_released() => {
                bail!(KVF_ERR_STATE, "pool {pool} has been released: destroy it")
            }
            Some(entry) if entry.is_leaving() => {
                bail!(KVF_ERR_STATE, "pool {pool} is being unregistered already")
            }
            Some(_) => state.pools.leave(pool, user_data, false),
        }
        drop(state);
        self.shared
            .send(Command::UnregisterPool(pool, until, user_data));
        Ok(())
    }

    /// `KVF_OK` = may be freed, `KVF_IN_PROGRESS` = being taken back, `KVF_ERR_BUSY` = registered.
    pub fn pool_status(&self, pool: u32) -> Status {
        match self.shared.lock().pools.get(pool) {
            None => Status::KVF_ERR_NOT_FOUND,
            Some(entry) if entry.is_released() => Status::KVF_OK,
            Some(entry) if entry.is_leaving() => Status::KVF_IN_PROGRESS,
            Some(_) => Status::KVF_ERR_BUSY,
        }
    }

    /// Takes a pool back for good: as [`Self::unregister_pool`] without a deadline, and the pool is
    /// forgotten when it is released. `KVF_OK` = released now, `KVF_IN_PROGRESS` = still used.
    pub fn discard_pool(&self, pool: u32, user_data: u64) -> Status {
        let (told, ucx_is_done) = std::sync::mpsc::channel();
        let mut state = self.shared.lock();
        let Some(entry) = state.pools.get_mut(pool) else {
            return Status::KVF_OK;
        };
        let mut idle = entry.is_released();
        if !idle && entry.users == 0 && !entry.is_held() {
            let shared = self.shared.clone();
            idle = entry.pool.close(move || shared.send(Command::Idle));
            let shared = self.shared.clone();
            let released = move || {
                shared.send(Command::Idle);
                let _ = told.send(());
            };
            if idle && !self.shared.ucx.release(pool, released) {
                // Our own thread, not a peer: it takes as long as the card needs for the pages.
                drop(state);
                idle = ucx_is_done.recv_timeout(Duration::from_secs(1)).is_ok();
                state = self.shared.lock();
            }
        }
        match state.pools.get(pool) {
            Some(entry) if !idle || (entry.users > 0 && !entry.is_released()) => {
                state.pools.leave(pool, user_data, true);
                drop(state);
                // It may have become idle meanwhile; other processes are asked to unmap it.
                self.shared.send(Command::Idle);
                Status::KVF_IN_PROGRESS
            }
            _ => {
                let entry = state.pools.remove(pool);
                drop(state);
                drop(entry); // unmapping is not for the lock
                Status::KVF_OK
            }
        }
    }

    /// Forgets a pool that was released; a shared pool's memory is unmapped.
    ///
    /// # Errors
    /// `KVF_ERR_BUSY` if it was not released.
    pub fn forget_pool(&self, pool: u32) -> Result<()> {
        let entry = {
            let mut state = self.shared.lock();
            match state.pools.get(pool) {
                None => bail!(KVF_ERR_NOT_FOUND, "no pool {pool}"),
                Some(entry) if !entry.is_released() => bail!(
                    KVF_ERR_BUSY,
                    "pool {pool} is registered: unregister it and wait until it may be freed"
                ),
                Some(_) => state.pools.remove(pool),
            }
        };
        drop(entry);
        Ok(())
    }

    /// Says what this rank holds; once, before metadata and operations. An empty fingerprint is
    /// replaced by the agent's.
    ///
    /// # Errors
    /// `KVF_ERR_STATE` if one is set, else what [`layout::validate`] finds.
    pub fn set_layout(&self, mut layout: Layout) -> Result<()> {
        if layout.fingerprint.is_empty() {
            layout
                .fingerprint
                .clone_from(&self.shared.config.fingerprint);
        }
        let mut state = self.shared.lock();
        if state.layout.is_some() {
            bail!(KVF_ERR_STATE, "the agent has a layout; it is set once");
        }
        layout::validate(&layout, &|id| state.pools.get(id).map(|e| e.pool.bytes()))?;
        state.set_layout(layout);
        Ok(())
    }

    /// This rank's metadata, for [`Self::set_engine`].
    ///
    /// # Errors
    /// `KVF_ERR_STATE` without a layout.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        let state = self.shared.lock();
        let Some(layout) = &state.layout else {
            bail!(
                KVF_ERR_STATE,
                "no layout yet: call kvf_agent_set_layout first"
            );
        };
        let rank = metadata::RankInfo {
            incarnation: self.shared.incarnation,
            name: self.shared.config.name.clone(),
            process: self.shared.process,
            host: self.shared.host.clone(),
            address: Some(self.shared.address),
            layout: (**layout).clone(),
        };
        let pools = state.layout_pools().map(|e| crate::wire::PoolMemory {
            id: e.pool.id(),
            bytes: e.pool.bytes(),
            address: 0,
            mappable: e.pool.fd().is_some(),
            device: None,
        });
        metadata::encode_agent(&metadata::Announced {
            rank: &rank,
            pools: pools.collect(),
        })
    }

    /// Joins all ranks' metadata (ours among them, in any order) into this agent's engine.
    ///
    /// # Errors
    /// `KVF_ERR_STATE` if one is set; bytes that are no metadata; ranks that contradict each other
    /// or together miss a layer, head, section or ordinal.
    pub fn set_engine(&self, ranks: &[Vec<u8>]) -> Result<()> {
        let (info, metadata) = metadata::join(ranks)?;
        let mut state = self.shared.lock();
        if state.engine.is_some() {
            bail!(KVF_ERR_STATE, "the agent has an engine; it is set once");
        }
        let Some(index) = info.index_of(self.shared.incarnation) else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "this agent's own metadata is not among the {} given",
                ranks.len()
            );
        };
        let invariants = Invariants::of(&info.layouts())?;
        state.engine = Some(Arc::new(OwnEngine {
            info: Arc::new(info),
            metadata,
            invariants,
            index,
        }));
        Ok(())
    }

    /// The engine's metadata, the same bytes on every rank; for the other side's `add_peer`.
    ///
    /// # Errors
    /// `KVF_ERR_STATE` without an engine.
    pub fn engine_metadata(&self) -> Result<Vec<u8>> {
        Ok(self.shared.lock().engine()?.metadata.clone())
    }
}
