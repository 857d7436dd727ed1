//! A rank's kvferry object: registrations, peers, publications, transfers.
//!
//! [`Agent`], [`Peer`], [`Publication`] and [`Transfer`] are what the C ABI and the transceiver
//! use; all may be used from any thread.

mod api;

use std::os::fd::RawFd;
use std::time::Duration;

pub use api::*;

use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::layout::Layout;

/// Receives log lines: level (1 error, 2 warning, 3 info, 4 debug) and text.
pub type LogSink = Box<dyn Fn(u32, &str) + Send + Sync>;

/// What an observer is told, on a kvferry thread or inside the call that ended the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The operation has its outcome.
    Ended,
    /// Its slots may be reused (never before `Ended`).
    MemorySafe,
}

/// Called for each notice instead of queueing events. Must not block and must not call the agent
/// that it observes.
pub type Observer = std::sync::Arc<dyn Fn(Notice) + Send + Sync>;

/// One rank's agent. Dropping it ends it without waiting.
#[derive(Debug)]
pub struct Agent {}

impl Agent {
    /// Makes an agent and starts its threads.
    ///
    /// # Errors
    /// Bad configuration, or the system refused sockets, memory or threads.
    pub fn create(_config: AgentConfig, _log: Option<(u32, LogSink)>) -> Result<Self> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Readable exactly while there is an event to take. Owned by the agent.
    pub fn event_fd(&self) -> RawFd {
        -1
    }
    /// Moves up to `cap` events out; true: more are left.
    pub fn take_events(&self, _out: &mut Vec<Event>, _cap: usize) -> bool {
        false
    }
    /// Makes a shareable host pool; returns its id.
    pub fn create_pool(
        &self,
        _bytes: u64,
        _numa_node: Option<u32>,
        _page_size: u64,
    ) -> Result<u32> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Registers the engine's memory; returns the pool's id.
    ///
    /// # Safety
    /// The memory must stay valid until `PoolReleased` for this pool.
    pub unsafe fn register_pool(&self, _base: *mut u8, _bytes: u64) -> Result<u32> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// First byte of a pool and its length.
    pub fn pool_memory(&self, _pool: u32) -> Result<(*mut u8, u64)> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Takes a pool back: no new operation may name it; ends with a `PoolReleased` event when no
    /// transfer or publication uses it any more, at the latest at the deadline (then with
    /// `KVF_ERR_DEADLINE`: not free yet).
    pub fn unregister_pool(&self, _pool: u32, _deadline: Duration, _user_data: u64) -> Result<()> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// `KVF_IN_PROGRESS` until a pool that was taken back may be freed.
    pub fn pool_status(&self, _pool: u32) -> Status {
        Status::KVF_ERR_NOT_FOUND
    }
    /// Says what this rank holds; once, before metadata and operations.
    pub fn set_layout(&self, _layout: Layout) -> Result<()> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// This rank's metadata, for [`Self::set_engine`].
    pub fn metadata(&self) -> Result<Vec<u8>> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Joins all ranks' metadata (ours among them, in order of rank) into this agent's engine.
    pub fn set_engine(&self, _ranks: &[Vec<u8>]) -> Result<()> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// The engine's metadata, the same bytes on every rank; for the other side's `add_peer`.
    pub fn engine_metadata(&self) -> Result<Vec<u8>> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Adds a remote engine: checks that it fits, plans, and starts connecting.
    pub fn add_peer(&self, _engine_metadata: &[u8], _user_data: u64) -> Result<Peer> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Offers slots under a lease.
    pub fn publish(&self, _desc: PublishDesc) -> Result<Publication> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// [`Self::publish`], with an observer in place of events.
    pub fn publish_observed(&self, _desc: PublishDesc, _observer: Observer) -> Result<Publication> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// [`Self::import_begin`], with an observer in place of events.
    pub fn import_observed(
        &self,
        _peer: &Peer,
        _desc: ImportDesc,
        _observer: Observer,
    ) -> Result<Transfer> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Renews the lease of a ticket whose request is still queued here.
    pub fn hold_ticket(&self, _peer: &Peer, _ticket: &[u8]) -> Result<()> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Tells the source that a ticket will not be used.
    pub fn decline_ticket(&self, _peer: &Peer, _ticket: &[u8], _cause: Status) -> Result<()> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Fetches what a ticket offers into our slots. Never blocks.
    pub fn import_begin(&self, _peer: &Peer, _desc: ImportDesc) -> Result<Transfer> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Refuses new operations and waits until the running ones have ended.
    pub fn drain(&self, _timeout: Duration) -> Result<()> {
        bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }
    /// Slots that ended transfers may still touch: (transfer id, group, slot).
    pub fn quarantine(&self) -> Vec<(u64, u32, u32)> {
        Vec::new()
    }
    /// Ends the agent: everything still running fails with `KVF_ERR_SHUTDOWN`, peers are told,
    /// threads are joined within the time-out. Returns what is still in quarantine as an error.
    pub fn shutdown(&self, _timeout: Duration) -> Result<()> {
        Ok(())
    }
}

/// A remote engine.
#[derive(Debug)]
pub struct Peer {}

impl Peer {
    /// Names the peer in events.
    pub fn id(&self) -> u64 {
        0
    }
    /// Whether and how it can be used.
    pub fn info(&self) -> PeerInfo {
        PeerInfo {
            status: Status::KVF_ERR_UNSUPPORTED,
            ranks: 0,
            ranks_ready: 0,
            transport: "",
            text: String::new(),
        }
    }
    /// Waits until all needed ranks are ready: `KVF_OK`, `KVF_TIMED_OUT`, or why not.
    pub fn wait(&self, _timeout: Duration) -> Status {
        Status::KVF_ERR_UNSUPPORTED
    }
    /// Forgets the peer: its running operations fail.
    pub fn remove(&self) {}
}

/// An offer of slots. Dropping it detaches: the offer stays until it ends.
#[derive(Debug)]
pub struct Publication {}

impl Publication {
    /// Names the publication in events.
    pub fn id(&self) -> u64 {
        0
    }
    /// What it is about.
    pub fn key(&self) -> Key {
        Key::default()
    }
    /// The bytes that travel with the request.
    pub fn ticket(&self) -> &[u8] {
        &[]
    }
    /// Looks at it.
    pub fn info(&self) -> PublicationInfo {
        PublicationInfo {
            outcome: Outcome::Pending,
            cause: Status::KVF_IN_PROGRESS,
            memory_safe: false,
            claimed: false,
            readers_done: 0,
            readers_expected: 0,
        }
    }
    /// Takes the offer back; idempotent. Ends with `PublicationEnded`.
    pub fn release(&self) {}
    /// Waits until it has ended.
    pub fn wait(&self, _timeout: Duration) -> Status {
        Status::KVF_ERR_UNSUPPORTED
    }
}

/// A running or ended import, pull or push. Dropping a running one cancels and detaches it.
#[derive(Debug)]
pub struct Transfer {}

impl Transfer {
    /// Names the transfer in events.
    pub fn id(&self) -> u64 {
        0
    }
    /// What it is about.
    pub fn key(&self) -> Key {
        Key::default()
    }
    /// `KVF_IN_PROGRESS`, `KVF_OK`, or the error it ended with. Lock-free.
    pub fn poll(&self) -> Status {
        Status::KVF_ERR_UNSUPPORTED
    }
    /// Waits for the outcome: as `poll`, or `KVF_TIMED_OUT`.
    pub fn wait(&self, _timeout: Duration) -> Status {
        Status::KVF_ERR_UNSUPPORTED
    }
    /// Asks for its end; idempotent. The outcome tells whether it came first.
    pub fn cancel(&self) {}
    /// Looks at it.
    pub fn info(&self) -> TransferInfo {
        TransferInfo {
            outcome: Outcome::Pending,
            cause: Status::KVF_ERR_UNSUPPORTED,
            memory_safe: false,
            bytes: 0,
            bytes_total: 0,
            submitted: 0,
            elapsed_ns: 0,
            transport: "",
            parts: Vec::new(),
        }
    }
    /// What went wrong, for people; empty if nothing did.
    pub fn error_text(&self) -> String {
        String::new()
    }
    /// The bytes that the publisher attached.
    pub fn aux(&self) -> Vec<u8> {
        Vec::new()
    }
}
