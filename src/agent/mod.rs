//! A rank's kvferry object: registrations, peers, publications, transfers.
//!
//! [`Agent`], [`Peer`], [`Publication`] and [`Transfer`] are what the C ABI and the transceiver
//! use; all may be used from any thread. The callers' threads check arguments and mark slots; the
//! control thread owns the session machines ([`control`]); workers copy ([`copying`]).

mod api;
mod begin;
mod cells;
mod control;
mod copying;
mod count;
mod device_pools;
mod gates;
mod group;
mod handshake;
mod link;
mod log;
mod metadata;
mod notices;
mod offer;
mod offers;
mod opening;
mod paths;
mod peers;
mod pools;
mod publish;
mod reader;
mod remote;
mod serving;
mod setup;
mod shared;
mod slots;
mod source;
mod ticket;
mod ucx;

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use api::*;
pub use cells::{Notice, Observer};
pub use device_pools::cuda_info;
pub use group::GroupEvents;
pub use log::LogSink;

pub use crate::cuda::CallerStream;

use crate::bail;
use crate::error::{Result, Status};
use crate::ids::{Epoch, Key, PublicationId};
use crate::layout::{self, Invariants, Layout};
use crate::memory::{PageSize, Pool};
use crate::observe::metrics::Levels;
use crate::plan::{Plan, Policy};
use crate::runtime::Thread;
use crate::session::End;
use begin::ImportCell;
use control::Command;
use notices::Finished;
use peers::{PeerShared, Route};
use shared::{OwnEngine, Shared};
use source::PublicationCell;

/// Locks what no panic can leave half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One rank's agent. Dropping it ends it, waiting a second at most.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    control: Mutex<Option<Thread>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent({})", self.config.name)
    }
}

impl Agent {
    /// Makes an agent and starts its threads.
    ///
    /// # Errors
    /// Bad configuration, or the system refused sockets, memory or threads.
    pub fn create(config: AgentConfig, log: Option<(u32, LogSink)>) -> Result<Self> {
        let (shared, thread) = setup::start(config, log)?;
        Ok(Self {
            shared,
            control: Mutex::new(Some(thread)),
        })
    }

    /// Readable exactly while there is an event to take. Owned by the agent.
    pub fn event_fd(&self) -> RawFd {
        self.shared.events.raw_fd()
    }

    /// Moves up to `cap` events out; true: more are left.
    pub fn take_events(&self, out: &mut Vec<Event>, cap: usize) -> bool {
        self.shared.events.take(out, cap)
    }

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

    fn add_pool_with(&self, pool: Pool, memory: Option<crate::cuda::DeviceMemory>) -> Result<u32> {
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

    /// Adds a remote engine: checks that it fits, plans, and starts connecting.
    ///
    /// # Errors
    /// `KVF_ERR_INCOMPATIBLE` naming the field and both values, and what is wrong with the bytes.
    pub fn add_peer(&self, engine_metadata: &[u8], user_data: u64) -> Result<Peer> {
        self.shared.check_open()?;
        let own = self.shared.lock().engine()?;
        let engine = metadata::decode_engine(engine_metadata, &own.invariants)?;
        if engine.index_of(self.shared.incarnation).is_some() {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "this is our own engine's metadata"
            );
        }
        let plan = Plan::new(&engine.layouts(), &own.info.layouts(), Policy::Spread);
        // Who reads from us is spoken to as well: a push starts at our side.
        let back = Plan::new(&own.info.layouts(), &engine.layouts(), Policy::Spread);
        // One direction is enough: a window may be narrower at the destination, which then is
        // never a source.
        let plan = match (plan, &back) {
            (Err(e), Err(_)) => return Err(e),
            (plan, _) => plan.map(Arc::new),
        };
        let mut needed = Vec::new();
        if let Ok(plan) = &plan {
            needed.extend(plan.into_destination(own.index).map(|p| p.src));
        }
        if let Ok(back) = &back {
            needed.extend(back.out_of_source(own.index).map(|p| p.dst));
        }
        needed.sort_unstable();
        needed.dedup();
        let routes = engine.ranks.iter().map(|r| self.route(r)).collect();
        let shared = Arc::new(PeerShared {
            id: self.shared.new_id(),
            user_data,
            engine: Arc::new(engine),
            plan,
            routes,
            needed,
        });
        self.shared.send(Command::AddPeer(shared.clone()));
        Ok(Peer {
            shared,
            agent: self.shared.clone(),
        })
    }

    /// The route to a remote agent: the one that other handles use, unless that one is dead.
    fn route(&self, rank: &metadata::RankInfo) -> Arc<Route> {
        let mut state = self.shared.lock();
        if let Some(route) = state
            .routes
            .get(&rank.incarnation)
            .and_then(|r| r.upgrade())
            && !matches!(route.get(), Some(Err(_)))
        {
            return route;
        }
        let route = Arc::new(Route::new(rank.incarnation, rank.name.clone()));
        state.routes.retain(|_, r| r.strong_count() > 0);
        state
            .routes
            .insert(rank.incarnation, Arc::downgrade(&route));
        route
    }

    /// Offers slots under a lease.
    ///
    /// # Errors
    /// Groups, slots and tokens out of range or given twice, `KVF_ERR_SLOT_BUSY` naming the writer,
    /// `KVF_ERR_LIMIT` for too much aux data or too many publications. Nothing is changed then.
    pub fn publish(&self, desc: PublishDesc) -> Result<Publication> {
        self.publish_observed(desc, None)
    }

    /// As [`Self::publish`]; notices go to the observer instead of the event queue.
    ///
    /// # Errors
    /// As for [`Self::publish`].
    pub fn publish_observed(
        &self,
        desc: PublishDesc,
        observer: Option<Observer>,
    ) -> Result<Publication> {
        let shared = publish::publish(&self.shared, desc, None, observer)?;
        Ok(Publication {
            shared,
            agent: self.shared.clone(),
        })
    }

    /// Renews the lease of a ticket whose request is still queued here.
    ///
    /// # Errors
    /// A ticket that is none, or of another engine.
    pub fn hold_ticket(&self, peer: &Peer, ticket: &[u8]) -> Result<()> {
        self.shared.check_open()?;
        let held = self.sources(peer, ticket, Status::KVF_OK)?;
        self.shared.send(Command::Hold(peer.shared.clone(), held));
        Ok(())
    }

    /// Tells the sources that a ticket will not be used.
    ///
    /// # Errors
    /// As for [`Self::hold_ticket`]; `KVF_ERR_INVALID_ARGUMENT` if `cause` is not an error.
    pub fn decline_ticket(&self, peer: &Peer, ticket: &[u8], cause: Status) -> Result<()> {
        self.shared.check_open()?;
        if (cause as i32) >= 0 {
            bail!(KVF_ERR_INVALID_ARGUMENT, "cause {cause:?} is not an error");
        }
        let told = self.sources(peer, ticket, Status::KVF_ERR_DECLINED)?;
        self.shared.send(Command::Tell(told));
        Ok(())
    }

    /// Notices for all sources that a ticket concerns.
    fn sources(&self, peer: &Peer, ticket: &[u8], status: Status) -> Result<Vec<Finished>> {
        let ticket = ticket::decode_ticket(ticket)?;
        let peer = &peer.shared;
        if ticket.engine != peer.engine.id().0 {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the ticket of {} is from another engine than the peer",
                ticket::key(ticket.key)
            );
        }
        let own = self.shared.lock().engine()?;
        let pairs = peer.inward()?.sources_of(own.index, ticket.dp_rank)?;
        let finished = pairs.map(|pair| {
            let source = peer.engine.ranks[pair.src].incarnation;
            let epoch = ticket::entry_of(&ticket, source).map_or(0, |e| e.epoch);
            Finished {
                id: PublicationId {
                    source,
                    key: ticket::key(ticket.key),
                    epoch: Epoch(epoch),
                },
                status,
                bytes: 0,
                lease: Duration::from_nanos(ticket.lease_ns),
            }
        });
        Ok(finished.collect())
    }

    /// Fetches what a ticket offers into our slots. Never blocks.
    ///
    /// # Errors
    /// Everything that is wrong with the arguments; nothing is changed then. What goes wrong later
    /// is the transfer's outcome.
    pub fn import_begin(&self, peer: &Peer, desc: ImportDesc) -> Result<Transfer> {
        self.import_observed(peer, desc, None)
    }

    /// As [`Self::import_begin`]; notices go to the observer instead of the event queue.
    ///
    /// # Errors
    /// As for [`Self::import_begin`].
    pub fn import_observed(
        &self,
        peer: &Peer,
        desc: ImportDesc,
        observer: Option<Observer>,
    ) -> Result<Transfer> {
        let cell = begin::import(&self.shared, &peer.shared, desc, observer)?;
        Ok(Transfer {
            kind: TransferKind::Import(cell),
            agent: self.shared.clone(),
        })
    }

    /// Offers slots to a sender; [`Transfer::offer`] has the bytes for it. With a `sender` only
    /// that engine may push, and the receive fails when it is lost. Never blocks.
    ///
    /// # Errors
    /// As for [`Self::import_begin`].
    pub fn receive_begin(
        &self,
        sender: Option<&Peer>,
        desc: ReceiveDesc,
        observer: Option<Observer>,
    ) -> Result<Transfer> {
        let sender = sender.map(|peer| &peer.shared);
        let (cell, offer) = offer::receive(&self.shared, sender, desc, observer)?;
        Ok(Transfer {
            kind: TransferKind::Receive(cell, offer),
            agent: self.shared.clone(),
        })
    }

    /// Answers an offer: the receiver fetches what it wants of these slots. Never blocks.
    ///
    /// # Errors
    /// As for [`Self::publish`], and what does not fit the offer.
    pub fn push_begin(
        &self,
        peer: &Peer,
        offer: &[u8],
        desc: PublishDesc,
        deadline: Duration,
        observer: Option<Observer>,
    ) -> Result<Transfer> {
        let cell = offer::push(&self.shared, &peer.shared, offer, desc, deadline, observer)?;
        Ok(Transfer {
            kind: TransferKind::Push(cell),
            agent: self.shared.clone(),
        })
    }

    /// Refuses new operations and waits until the running ones have ended and the peers know.
    ///
    /// # Errors
    /// `KVF_ERR_DEADLINE` with the number that still runs; new operations stay refused.
    pub fn drain(&self, timeout: Duration) -> Result<()> {
        self.shared.closed.store(true, Ordering::Release);
        let (done, wait) = tokio::sync::oneshot::channel();
        let until = self.shared.now().saturating_add(timeout);
        self.shared.send(Command::Drain(until, done));
        if wait.blocking_recv() == Ok(true) {
            return Ok(());
        }
        let live = self.shared.lock().live;
        bail!(
            KVF_ERR_DEADLINE,
            "{live} publications and transfers are still running after {timeout:?}"
        );
    }

    /// Slots that ended transfers may still touch: (transfer id, group, slot).
    pub fn quarantine(&self) -> Vec<(u64, u32, u32)> {
        let cells: Vec<Arc<ImportCell>> = {
            let mut state = self.shared.lock();
            state.running.retain(|cell| cell.strong_count() > 0);
            state.running.iter().filter_map(|c| c.upgrade()).collect()
        };
        let mut held = Vec::new();
        for cell in cells {
            let (outcome, _, safe, _) = cell.cell.look();
            if outcome != Outcome::Pending && !safe {
                for (group, slots) in &cell.slots {
                    held.extend(slots.iter().map(|slot| (cell.cell.id, *group, *slot)));
                }
            }
        }
        held
    }

    /// Metrics of this agent in Prometheus' text format.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL`: they cannot be written as text (a bug).
    pub fn metrics_text(&self) -> Result<String> {
        let held = self.quarantine();
        let mut transfers: Vec<u64> = held.iter().map(|(transfer, ..)| *transfer).collect();
        transfers.dedup();
        let (leases, operations) = {
            let state = self.shared.lock();
            (state.published.len() as u64, state.live)
        };
        self.shared.metrics.text(&Levels {
            leases,
            quarantined_transfers: transfers.len() as u64,
            quarantined_slots: held.len() as u64,
            operations,
        })
    }

    /// Ends the agent: everything still running fails with `KVF_ERR_SHUTDOWN`, peers are told,
    /// threads are joined within the time-out.
    ///
    /// # Errors
    /// `KVF_ERR_DEADLINE`: a thread is still busy and was left behind; its slots are still in use.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        let Some(thread) = lock(&self.control).take() else {
            return Ok(());
        };
        let deadline = Instant::now()
            .checked_add(timeout)
            .unwrap_or_else(|| Instant::now() + Duration::from_secs(3600));
        self.shared.closed.store(true, Ordering::Release);
        shared::unregister(self.shared.incarnation);
        let (done, _ended) = tokio::sync::oneshot::channel();
        self.shared.send(Command::Shutdown(done));
        let control = thread.join_until(deadline);
        let workers = self.shared.workers.close(deadline);
        let data = self.shared.data.close(deadline);
        let ucx = self.shared.ucx.close(deadline);
        self.shared.devices.close();
        if !control || !workers || !data || !ucx {
            bail!(
                KVF_ERR_DEADLINE,
                "agent {}: a thread is still busy after {timeout:?} and was left behind",
                self.shared.config.name
            );
        }
        Ok(())
    }

    /// Ends what a forked child has of an agent: nothing runs there.
    pub fn abandon_in_child(&self) {
        let thread = lock(&self.control).take();
        std::mem::forget(thread);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !crate::observe::marks::forked() {
            let _ = self.shutdown(Duration::from_secs(1));
        }
    }
}

/// A remote engine. Dropping it does not remove it.
#[derive(Debug)]
pub struct Peer {
    shared: Arc<PeerShared>,
    agent: Arc<Shared>,
}

impl Peer {
    /// Names the peer in events.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// Whether and how it can be used.
    pub fn info(&self) -> PeerInfo {
        self.shared.info()
    }

    /// Waits until all needed ranks are ready: `KVF_OK`, `KVF_TIMED_OUT`, or why not.
    pub fn wait(&self, timeout: Duration) -> Status {
        self.shared.wait(timeout)
    }

    /// Forgets the peer: imports from it fail.
    pub fn remove(&self) {
        self.agent.send(Command::RemovePeer(self.shared.id));
    }
}

/// An offer of slots. Dropping it detaches: the offer stays until it ends.
#[derive(Debug)]
pub struct Publication {
    shared: Arc<PublicationCell>,
    agent: Arc<Shared>,
}

impl Publication {
    /// Names the publication in events.
    pub fn id(&self) -> u64 {
        self.shared.cell.id
    }

    /// What it is about.
    pub fn key(&self) -> Key {
        self.shared.cell.key
    }

    /// The bytes that travel with the request.
    pub fn ticket(&self) -> &[u8] {
        &self.shared.ticket
    }

    /// Looks at it.
    pub fn info(&self) -> PublicationInfo {
        let (outcome, cause, memory_safe, _) = self.shared.cell.look();
        PublicationInfo {
            outcome,
            cause,
            memory_safe,
            claimed: self.shared.claimed.load(Ordering::Relaxed) != 0,
            readers_done: self.shared.readers_done.load(Ordering::Relaxed),
            readers_expected: self.shared.readers_expected.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            first_byte_ns: self.shared.times.first_ns(),
            last_byte_ns: self.shared.times.last_ns(),
        }
    }

    /// Takes the offer back; idempotent. Ends with `PublicationEnded`.
    pub fn release(&self) {
        let end = End::new(Status::KVF_ERR_CANCELLED, "released by the source's engine");
        self.agent.send(Command::Withdraw(self.shared.id, end));
    }

    /// Waits until it has ended.
    pub fn wait(&self, timeout: Duration) -> Status {
        self.shared.cell.wait(timeout)
    }

    /// What went wrong, for people; empty if nothing did.
    pub fn error_text(&self) -> String {
        self.shared.cell.look().3
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.shared.cell.abandon();
    }
}

/// A running or ended import, receive or push. Dropping a running one cancels and detaches it.
#[derive(Debug)]
pub struct Transfer {
    kind: TransferKind,
    agent: Arc<Shared>,
}

#[derive(Debug)]
enum TransferKind {
    Import(Arc<ImportCell>),
    /// With its offer's bytes.
    Receive(Arc<ImportCell>, Vec<u8>),
    Push(Arc<PublicationCell>),
}

impl Transfer {
    fn cell(&self) -> &cells::Cell {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => &import.cell,
            TransferKind::Push(push) => &push.cell,
        }
    }

    /// Names the transfer in events.
    pub fn id(&self) -> u64 {
        self.cell().id
    }

    /// What it is about.
    pub fn key(&self) -> Key {
        self.cell().key
    }

    /// `KVF_IN_PROGRESS`, `KVF_OK`, or the error it ended with. Lock-free.
    pub fn poll(&self) -> Status {
        self.cell().poll()
    }

    /// Waits for the outcome: as `poll`, or `KVF_TIMED_OUT`.
    pub fn wait(&self, timeout: Duration) -> Status {
        self.cell().wait(timeout)
    }

    /// Makes a stream wait until the transfer has its outcome, without a block on the host.
    ///
    /// # Errors
    /// A stream that is none or is captured; `KVF_ERR_UNSUPPORTED` without stream memory operations.
    pub fn stream_wait(&self, stream: CallerStream) -> Result<()> {
        // Before the word is there, so that a bad stream is refused in any case.
        stream.context(&[])?;
        if self.poll() == Status::KVF_IN_PROGRESS {
            let word = self.agent.devices.stream_wait(stream)?;
            self.cell().keep_until_end(Box::new(word));
        }
        Ok(())
    }

    /// Asks for its end; idempotent. The outcome tells whether it came first.
    pub fn cancel(&self) {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                self.agent.send(Command::Cancel(import.cell.id))
            }
            TransferKind::Push(push) => {
                let end = End::new(Status::KVF_ERR_CANCELLED, "cancelled by this side");
                self.agent.send(Command::Withdraw(push.id, end));
            }
        }
    }

    /// Looks at it.
    pub fn info(&self) -> TransferInfo {
        let (outcome, cause, memory_safe, _) = self.cell().look();
        let mut info = TransferInfo {
            outcome,
            cause,
            memory_safe,
            bytes: 0,
            bytes_total: 0,
            submitted: 0,
            elapsed_ns: 0,
            first_byte_ns: 0,
            last_byte_ns: 0,
            transport: "",
            parts: Vec::new(),
        };
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                import.describe(&mut info)
            }
            TransferKind::Push(push) => push.describe(&mut info),
        }
        info
    }

    /// What went wrong, for people; empty if nothing did.
    pub fn error_text(&self) -> String {
        self.cell().look().3
    }

    /// The bytes that a sender needs to push into this receive; `None` for other transfers.
    pub fn offer(&self) -> Option<&[u8]> {
        match &self.kind {
            TransferKind::Receive(_, offer) => Some(offer),
            _ => None,
        }
    }

    /// The bytes that the publisher attached.
    pub fn aux(&self) -> Vec<u8> {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                lock(&import.aux).clone()
            }
            TransferKind::Push(_) => Vec::new(),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.cell().abandon();
        if self.poll() == Status::KVF_IN_PROGRESS {
            self.cancel();
        }
    }
}
