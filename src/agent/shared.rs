//! What the callers' threads, the workers and the control thread of one agent share.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Instant;

use tokio::sync::mpsc;

use super::api::{AgentConfig, Event};
use super::control::Command;
use super::group::Board;
use super::import_cell::ImportCell;
use super::log::Log;
use super::metadata::EngineInfo;
use super::peers::Routes;
use super::pools::{PoolEntry, Pools};
use super::serving::DataConnections;
use super::slots::Slots;
use super::source::PublicationCell;
use super::ucx::Ucx;
use crate::bail;
use crate::cuda::Devices;
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::layout::{Invariants, Layout};
use crate::memory::LeaseTable;
use crate::observe::metrics::Metrics;
use crate::runtime::{EventQueue, Wake, Workers};
use crate::session::{End, Now};

/// Everything of an agent that is not the control thread's alone.
pub(super) struct Shared {
    pub config: AgentConfig,
    pub incarnation: Incarnation,
    pub process: [u8; 16],
    pub host: String,
    pub address: std::net::SocketAddr,
    start: Instant,
    pub events: Arc<EventQueue<Event>>,
    pub leases: Arc<LeaseTable>,
    pub commands: mpsc::UnboundedSender<Command>,
    pub workers: Workers,
    pub data: DataConnections,
    pub ucx: Ucx,
    pub devices: Arc<Devices>,
    pub groups: Mutex<Board>,
    pub log: Log,
    pub metrics: Metrics,
    next_id: AtomicU64,
    next_pool: AtomicU32,
    /// New operations are refused (drain, shutdown, caught panic).
    pub closed: AtomicBool,
    /// Whether the caller waited for the last import of which a share was left to it.
    pub callers_wait: AtomicBool,
    /// Readable from the shutdown on, for our threads that wait for a peer on nobody's behalf.
    pub closing: Arc<Wake>,
    state: Mutex<State>,
}

/// Registrations.
#[derive(Default)]
pub(super) struct State {
    pub pools: Pools,
    pub layout: Option<Arc<Layout>>,
    /// Pools under the views of each group of the layout, ascending.
    group_pools: Vec<Vec<u32>>,
    pub engine: Option<Arc<OwnEngine>>,
    pub slots: Slots,
    pub routes: Routes,
    /// Imports that were not ended inside their begin call, to find the unsafe ones.
    pub running: Vec<Weak<ImportCell>>,
    /// Publications that are not ended, to fail them if the control thread breaks.
    pub published: BTreeMap<u64, Weak<PublicationCell>>,
    /// Publications that have not ended, transfers that are not safe.
    pub live: u64,
}

/// The engine that this agent is a rank of.
pub(super) struct OwnEngine {
    pub info: Arc<EngineInfo>,
    pub metadata: Vec<u8>,
    pub invariants: Invariants,
    /// Our place in `info.ranks`.
    pub index: usize,
}

impl Shared {
    #[allow(clippy::too_many_arguments)] // made in one place
    pub fn new(
        config: AgentConfig,
        incarnation: Incarnation,
        address: std::net::SocketAddr,
        events: Arc<EventQueue<Event>>,
        leases: Arc<LeaseTable>,
        commands: mpsc::UnboundedSender<Command>,
        workers: Workers,
        log: Log,
    ) -> Result<Self> {
        let metrics = Metrics::new(&config.name)?;
        let closing = Wake::new().map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "eventfd", &e))?;
        Ok(Self {
            config,
            incarnation,
            process: process_id()?,
            host: host_id(),
            address,
            start: Instant::now(),
            events,
            leases,
            commands,
            workers,
            data: DataConnections::default(),
            ucx: Ucx::default(),
            devices: Arc::default(),
            groups: Mutex::default(),
            log,
            metrics,
            next_id: AtomicU64::new(1),
            next_pool: AtomicU32::new(1),
            closed: AtomicBool::new(false),
            callers_wait: AtomicBool::new(true),
            closing: Arc::new(closing),
            state: Mutex::default(),
        })
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn now(&self) -> Now {
        self.start.elapsed()
    }

    pub fn instant(&self, at: Now) -> Instant {
        self.start + at
    }

    pub fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    pub fn new_pool_id(&self) -> u32 {
        self.next_pool.fetch_add(1, Ordering::Relaxed)
    }

    pub fn send(&self, command: Command) {
        // The control thread ends only with the agent; then there is nothing left to do.
        let _ = self.commands.send(command);
    }

    /// The control thread is gone: everything that handles can see fails.
    pub fn fail_everything(&self, text: &str) {
        let end = End::new(Status::KVF_ERR_INTERNAL, text);
        let state = self.lock();
        for cell in state.running.iter().filter_map(Weak::upgrade) {
            cell.cell.end(end.clone());
        }
        for cell in state.published.values().filter_map(Weak::upgrade) {
            cell.cell.end(end.clone());
        }
        drop(state);
        super::group::fail_all(self, &end);
    }

    pub fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            bail!(
                KVF_ERR_SHUTDOWN,
                "agent {} is draining or has shut down",
                self.config.name
            );
        }
        Ok(())
    }
}

/// Adds a weak reference, dropping dead ones when their number has doubled.
pub(super) fn remember<T>(list: &mut Vec<Weak<T>>, item: &Arc<T>) {
    if list.len() == list.capacity() {
        list.retain(|weak| weak.strong_count() > 0);
        list.reserve(list.len() + 64);
    }
    list.push(Arc::downgrade(item));
}

impl State {
    /// Our engine.
    pub fn engine(&self) -> Result<Arc<OwnEngine>> {
        match &self.engine {
            Some(engine) => Ok(engine.clone()),
            None => bail!(
                KVF_ERR_STATE,
                "the agent has no engine yet: call kvf_agent_set_layout and kvf_engine_create first"
            ),
        }
    }

    /// Takes the layout, which has been checked.
    pub fn set_layout(&mut self, layout: Layout) {
        let pools = |group: &crate::layout::Group| {
            let tensors = group.views.iter().flat_map(|v| &v.tensors);
            let mut pools: Vec<u32> = tensors.map(|t| t.pool).collect();
            pools.sort_unstable();
            pools.dedup();
            pools
        };
        self.group_pools = layout.groups.iter().map(pools).collect();
        self.slots = Slots::new(&layout);
        self.layout = Some(Arc::new(layout));
    }

    /// Pools under the views of these groups, ascending.
    pub fn pools_of(&self, groups: impl Iterator<Item = u32>) -> Vec<u32> {
        let lists: Vec<_> = groups
            .filter_map(|g| self.group_pools.get(g as usize))
            .collect();
        let mut all = lists.iter().copied().flatten().copied().collect::<Vec<_>>();
        if lists.len() > 1 {
            all.sort_unstable();
            all.dedup();
        }
        all
    }

    /// The pools that a peer may read: those under the layout, ascending. What else is registered
    /// is none of its business, and may be a lot.
    pub fn layout_pools(&self) -> impl Iterator<Item = &PoolEntry> {
        let ids = self.pools_of(0..self.group_pools.len() as u32);
        ids.into_iter().filter_map(|id| self.pools.get(id))
    }

    /// As [`Self::layout_pools`], each to be changed.
    pub fn each_layout_pool(&mut self, mut with: impl FnMut(&mut PoolEntry)) {
        for id in self.pools_of(0..self.group_pools.len() as u32) {
            if let Some(entry) = self.pools.get_mut(id) {
                with(entry);
            }
        }
    }

    /// Counts one more operation on the pools, or changes nothing.
    pub fn use_pools(&mut self, pools: &[u32]) -> Result<()> {
        for id in pools {
            if self.pools.get(*id).is_none_or(PoolEntry::is_leaving) {
                bail!(
                    KVF_ERR_STATE,
                    "pool {id} is being unregistered: no new operation may use it"
                );
            }
        }
        for id in pools {
            if let Some(entry) = self.pools.get_mut(*id) {
                entry.users += 1;
            }
        }
        self.live += 1;
        Ok(())
    }

    /// Takes an operation from the pools; true: one that is leaving has no users any more.
    pub fn leave_pools(&mut self, pools: &[u32]) -> bool {
        self.live = self.live.saturating_sub(1);
        let mut free = self.live == 0;
        for id in pools {
            if let Some(entry) = self.pools.get_mut(*id) {
                entry.users = entry.users.saturating_sub(1);
                free |= entry.users == 0 && entry.is_leaving();
            }
        }
        free
    }
}

/// Agents of this process, for copies inside it.
static AGENTS: RwLock<Option<HashMap<Incarnation, Weak<Shared>>>> = RwLock::new(None);

/// Makes an agent findable in its process.
pub(super) fn register(shared: &Arc<Shared>) {
    let mut agents = AGENTS.write().unwrap_or_else(PoisonError::into_inner);
    agents
        .get_or_insert_default()
        .insert(shared.incarnation, Arc::downgrade(shared));
}

pub(super) fn unregister(incarnation: Incarnation) {
    let mut agents = AGENTS.write().unwrap_or_else(PoisonError::into_inner);
    if let Some(agents) = agents.as_mut() {
        agents.remove(&incarnation);
    }
}

/// An agent of this process.
pub(super) fn find(incarnation: Incarnation) -> Option<Arc<Shared>> {
    let agents = AGENTS.read().unwrap_or_else(PoisonError::into_inner);
    agents.as_ref()?.get(&incarnation)?.upgrade()
}

/// 16 random bytes from the kernel.
pub(super) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    match getrandom::fill(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(e) => bail!(KVF_ERR_SYSTEM, "no random numbers from the kernel: {e}"),
    }
}

/// Random id of this process, made with its first agent.
fn process_id() -> Result<[u8; 16]> {
    static ID: Mutex<Option<[u8; 16]>> = Mutex::new(None);
    let mut id = ID.lock().unwrap_or_else(PoisonError::into_inner);
    match *id {
        Some(id) => Ok(id),
        None => Ok(*id.insert(random()?)),
    }
}

/// Identity of the running kernel: equal on two sides means "try the Unix socket", no more.
fn host_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}
