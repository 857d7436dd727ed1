//! A rank's kvferry object: registrations, peers, publications, transfers.
//!
//! [`Agent`], [`Peer`], [`Publication`] and [`Transfer`] are what the C ABI and the transceiver
//! use; all may be used from any thread. The callers' threads check arguments and mark slots; the
//! control thread owns the session machines ([`control`]); workers copy ([`copying`]).

mod api;
mod begin;
mod cells;
mod claims;
mod control;
mod copying;
mod count;
mod device_pools;
mod gates;
mod group;
mod handles;
mod handshake;
mod import_cell;
mod layout_wire;
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
mod pushed;
mod reach;
mod reader;
mod registration;
mod remote;
mod serving;
mod setup;
mod shared;
mod slots;
mod source;
mod ticket;
mod ucx;
mod wants;

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use api::*;
pub use cells::{Notice, Observer};
pub use device_pools::cuda_info;
pub use group::GroupEvents;
pub use handles::{Peer, Publication, Transfer};
pub use log::LogSink;

pub use crate::cuda::CallerStream;

use crate::bail;
use crate::error::{Result, Status};
use crate::ids::{Epoch, PublicationId};
use crate::observe::metrics::Levels;
use crate::plan::{Plan, Policy};
use crate::runtime::Thread;
use control::Command;
use handles::TransferKind;
use import_cell::ImportCell;
use notices::Finished;
use peers::PeerShared;
use shared::Shared;

/// Longest wait for threads of ours that have nothing to do any more. Each ends at once when it gets
/// its turn, the control thread after its goodbyes, so that this only shows where one hangs.
const OWN_THREADS: Duration = Duration::from_secs(5);

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

    /// Adds a remote engine: checks that it fits, plans, and starts connecting.
    ///
    /// # Errors
    /// `KVF_ERR_INCOMPATIBLE` naming the field and both values, and what is wrong with the bytes;
    /// `KVF_ERR_INVALID_ARGUMENT` if another peer has other metadata of the same agents.
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
        // One lock for the routes and the command: a removal comes wholly before or after.
        let mut state = self.shared.lock();
        let engine = state.routes.known(engine)?;
        let ranks = engine.ranks.iter();
        let routes = ranks.map(|r| state.routes.take(r, &engine)).collect();
        let shared = Arc::new(PeerShared {
            id: self.shared.new_id(),
            user_data,
            engine,
            plan,
            routes,
            needed,
            removed: AtomicBool::new(false),
        });
        self.shared.send(Command::AddPeer(shared.clone()));
        drop(state);
        Ok(Peer {
            shared,
            agent: self.shared.clone(),
        })
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
        let ticket = ticket::decode_ticket(ticket.to_vec())?;
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
                for (group, slots) in &*cell.slots {
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
    /// threads are joined. The time-out bounds the wait for copies that were running; without any
    /// it does not matter.
    ///
    /// # Errors
    /// `KVF_ERR_DEADLINE`: a thread is still busy and was left behind; its slots are still in use.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        let Some(thread) = lock(&self.control).take() else {
            return Ok(());
        };
        let from_now = |time| {
            let now = Instant::now();
            now.checked_add(time)
                .unwrap_or_else(|| now + Duration::from_secs(3600))
        };
        let deadline = from_now(timeout);
        self.shared.closed.store(true, Ordering::Release);
        self.shared.closing.set();
        shared::unregister(self.shared.incarnation);
        let (done, _ended) = tokio::sync::oneshot::channel();
        self.shared.send(Command::Shutdown(done));
        let own = || deadline.max(from_now(OWN_THREADS));
        let control = thread.join_until(own());
        // Operations without a running copy have been ended by it.
        let copying = !control || self.shared.lock().live > 0;
        let workers = self
            .shared
            .workers
            .close(if copying { deadline } else { own() });
        let data = self.shared.data.close(own());
        let ucx = self.shared.ucx.close(own());
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
