//! Pools of device memory: registering, offering to readers in other processes, taking back.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::control::{Command, Control};
use super::pools::PoolEntry;
use super::shared::Shared;
use super::{Agent, gates};
use crate::cuda::{Context, DeviceMemory, Driver, Handle, Mapping, PinnedRange, Uuid};
use crate::error::Result;
use crate::ids::Incarnation;
use crate::memory::{OnDevice, PageSize, Pool};
use crate::observe::fault;
use crate::transport::device::MappedPool;
use crate::transport::shm::PeerProcess;
use crate::wire::{self, Body};
use crate::{bail, err};

/// One line about the CUDA driver.
///
/// # Errors
/// `KVF_ERR_UNSUPPORTED` with the reason why there is none.
pub fn cuda_info() -> Result<String> {
    Ok(Driver::get()?.describe())
}

impl Agent {
    /// Registers the engine's memory on a device; returns the pool's id.
    ///
    /// # Errors
    /// As for [`DeviceMemory::find`]; `KVF_ERR_DUPLICATE` for memory that overlaps another pool.
    ///
    /// # Safety
    /// The memory must stay allocated until `PoolReleased` for this pool.
    pub unsafe fn register_device_pool(&self, base: u64, bytes: u64, device: u32) -> Result<u32> {
        self.shared.check_open()?;
        let found = DeviceMemory::find(base, bytes, device)?;
        let place = OnDevice {
            device,
            context: found.context.handle(),
            address: base,
        };
        let pool = Pool::on_a_device(self.shared.new_pool_id(), bytes, place)?;
        self.add_pool_with(pool, Some(found))
    }

    /// As [`Agent::create_pool`], pinned for copies to and from devices.
    ///
    /// # Errors
    /// As there, and as for [`PinnedRange::new`].
    pub fn create_pinned_pool(&self, bytes: u64, node: Option<u32>, page_size: u64) -> Result<u32> {
        self.shared.check_open()?;
        let pages = PageSize::from_bytes(page_size)?;
        let context = self.pinning_context()?;
        let pool = Pool::create_shared(self.shared.new_pool_id(), bytes, node, pages)?;
        // SAFETY: the pool's own memory, which is unmapped after the pin is dropped.
        let pool = unsafe { pin(pool, context) }?;
        self.add_pool_with(pool, None)
    }

    /// As [`Agent::register_pool`], pinned for copies to and from devices.
    ///
    /// # Errors
    /// As there, and as for [`PinnedRange::new`].
    ///
    /// # Safety
    /// As there.
    pub unsafe fn register_pinned_pool(&self, base: *mut u8, bytes: u64) -> Result<u32> {
        self.shared.check_open()?;
        let context = self.pinning_context()?;
        // SAFETY: passed on to the caller; unpinned before "may be freed" is said.
        let pool = unsafe {
            pin(
                Pool::register(self.shared.new_pool_id(), base, bytes)?,
                context,
            )
        };
        self.add_pool_with(pool?, None)
    }

    fn pinning_context(&self) -> Result<Context> {
        let known = self.shared.contexts().first().copied();
        match known.map_or_else(Context::current, |context| Ok(Some(context)))? {
            Some(context) => Ok(context),
            None => bail!(
                KVF_ERR_STATE,
                "pinning needs a CUDA context: register a device pool first, or call \
                 cudaSetDevice (cuCtxSetCurrent) on this thread"
            ),
        }
    }
}

unsafe fn pin(pool: Pool, context: Context) -> Result<Pool> {
    // SAFETY: passed on to the caller.
    let range = unsafe { PinnedRange::new(context, pool.base(), pool.bytes()) }?;
    let place = OnDevice {
        device: context.device,
        context: context.handle(),
        address: range.device(),
    };
    Ok(pool.pinned(place, Box::new(range)))
}

/// What a device pool's entry keeps.
#[derive(Debug, Default)]
pub(super) struct Exported {
    /// `None`: host memory.
    pub memory: Option<DeviceMemory>,
    /// Readers that may have the memory mapped. It must not be freed before they have unmapped it
    /// or their processes have ended.
    pub holders: BTreeMap<Incarnation, Arc<PeerProcess>>,
    /// The holders were asked to unmap it.
    pub asked: bool,
}

impl PoolEntry {
    /// Whether another process may have the memory mapped.
    pub fn is_held(&mut self) -> bool {
        self.drop_dead_holders();
        !self.exported.holders.is_empty() && !fault::deviates("cuda_no_unmap_wait")
    }

    /// Lets go of processes that have ended, each of which costs a descriptor.
    pub fn drop_dead_holders(&mut self) {
        let holders = &mut self.exported.holders;
        holders.retain(|_, process| process.is_alive());
    }

    /// What is told to a reader; with a process, it may map the memory from now on.
    pub fn announce(
        &mut self,
        agent: Incarnation,
        process: Option<&Arc<PeerProcess>>,
    ) -> Option<wire::DeviceMemory> {
        // Also those that were lost while they lived and have ended since.
        self.drop_dead_holders();
        let memory = self.exported.memory.as_ref()?;
        let offset = (self.pool.base() as u64).saturating_sub(memory.allocation);
        let (handle, reason) = match (&memory.export, process) {
            _ if self.is_leaving() => (Vec::new(), "it is being unregistered".into()),
            (_, None) => (Vec::new(), "another host, or no Unix socket to it".into()),
            (Err(reason), _) => (Vec::new(), reason.clone()),
            (Ok(handle), Some(process)) => {
                self.exported.holders.insert(agent, process.clone());
                (handle.to_vec(), String::new())
            }
        };
        Some(wire::DeviceMemory {
            uuid: memory.uuid.to_vec(),
            handle,
            offset,
            reason,
        })
    }
}

impl Control {
    /// Hears of the end of a process that may have pools mapped: also after its agent was lost, since
    /// a process that is only silent still has them.
    pub fn watch_holder(&mut self, agent: Incarnation, process: &PeerProcess) {
        // Without a descriptor the pools are released at the latest with the next reader.
        let Ok(pidfd) = process.as_fd().try_clone_to_owned() else {
            return;
        };
        let commands = self.shared.commands.clone();
        let task = tokio::spawn(async move {
            if crate::runtime::readable(pidfd).await.is_ok() {
                let _ = commands.send(Command::HolderEnded(agent));
            }
        });
        if let Some(before) = self.holders.insert(agent, task.abort_handle()) {
            before.abort();
        }
    }

    /// An agent was lost. What it has mapped it may have until its process ends.
    pub fn holder_lost(&mut self, agent: Incarnation) {
        let mut state = self.shared.lock();
        state.pools.drop_dead_holders();
        if !state.pools.are_held_by(agent)
            && let Some(watcher) = self.holders.remove(&agent)
        {
            watcher.abort();
        }
    }

    /// A process that may have had pools mapped has ended.
    pub fn holder_ended(&mut self, agent: Incarnation) {
        self.holders.remove(&agent);
        self.shared.lock().pools.drop_dead_holders();
        self.release_pools();
    }

    /// Asks the readers of these pools to unmap them.
    pub fn ask_to_unmap(&self, asked: Vec<(Incarnation, u32)>) {
        for (agent, pool) in asked {
            self.send_to(agent, Body::Unmap(wire::Unmap { pool }));
        }
    }

    /// A source wants to free a pool.
    pub fn on_unmap(&mut self, agent: Incarnation, pool: u32) {
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        match remote.route.get() {
            // Answered when the last copy from it has ended.
            Some(Ok(path)) if path.unmap(pool) => {}
            // A worker may be mapping it right now.
            None if remote.memory_asked.is_some() => remote.unmap.push(pool),
            _ => self.unmapped(agent, pool),
        }
    }

    /// A pool of a source is no longer mapped here.
    pub fn unmapped(&self, agent: Incarnation, pool: u32) {
        self.send_to(agent, Body::Unmapped(wire::Unmap { pool }));
    }

    /// A reader has unmapped a pool of ours.
    pub fn on_unmapped(&mut self, agent: Incarnation, pool: u32) {
        if let Some(entry) = self.shared.lock().pools.get_mut(pool) {
            entry.exported.holders.remove(&agent);
        }
        self.release_pools();
    }
}

/// Opens the device pools that a source on this host has announced.
///
/// # Errors
/// `KVF_ERR_UNSUPPORTED` with the reason why they cannot be mapped here.
pub(super) fn map(
    shared: &Arc<Shared>,
    agent: Incarnation,
    memory: &wire::Memory,
) -> Result<BTreeMap<u32, Arc<MappedPool>>> {
    let mut pools = BTreeMap::new();
    // Several pools may lie in one allocation.
    let mut opened: BTreeMap<&[u8], Arc<Mapping>> = BTreeMap::new();
    for pool in &memory.pools {
        let Some(device) = &pool.device else { continue };
        let place = |e: crate::error::Error| e.context(format_args!("pool {}", pool.id));
        let mapping = match opened.get(&device.handle[..]) {
            Some(mapping) => mapping.clone(),
            None => Arc::new(open(shared, device).map_err(place)?),
        };
        opened.insert(&device.handle, mapping.clone());
        let end = device.offset.checked_add(pool.bytes);
        if end.is_none_or(|end| end > mapping.bytes()) {
            bail!(
                KVF_ERR_PROTOCOL,
                "pool {}: {} bytes at offset {} of an allocation of {}",
                pool.id,
                pool.bytes,
                device.offset,
                mapping.bytes()
            );
        }
        let (id, commands) = (pool.id, shared.commands.clone());
        let gone = move || {
            let _ = commands.send(Command::Unmapped(agent, id));
        };
        let mapped = MappedPool::new(mapping, device.offset, pool.bytes, Box::new(gone));
        pools.insert(pool.id, Arc::new(mapped));
    }
    Ok(pools)
}

fn open(shared: &Shared, device: &wire::DeviceMemory) -> Result<Mapping> {
    if device.handle.is_empty() {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "the source does not export it: {}",
            device.reason
        );
    }
    let handle: Handle = device.handle.as_slice().try_into().map_err(|_| {
        err!(
            KVF_ERR_PROTOCOL,
            "a handle of {} bytes",
            device.handle.len()
        )
    })?;
    let uuid: Uuid = device.uuid.as_slice().try_into().map_err(|_| {
        err!(
            KVF_ERR_PROTOCOL,
            "a device id of {} bytes",
            device.uuid.len()
        )
    })?;
    // Without device memory of our own there is no context: a process that does not use CUDA
    // does not start to.
    let contexts = shared.contexts();
    let same = contexts.iter().find(|c| gates::is_device(**c, &uuid));
    let Some(context) = same.or(contexts.first()) else {
        bail!(KVF_ERR_UNSUPPORTED, "no device pool on this side");
    };
    Mapping::open(*context, &uuid, &handle)
}
