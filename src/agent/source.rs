//! The control thread's table of publications: events in, actions of the session machine out.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::api::TransferInfo;
use super::cells::Cell;
use super::control::{Control, Timer};
use super::gates::Gated;
use super::metadata;
use super::notices::Finished;
use super::peers::PeerShared;
use super::slots::GroupSlots;
use super::ticket::key;
use crate::cuda::Gate;
use crate::error::Status;
use crate::ids::{Epoch, Incarnation, Key, PublicationId};
use crate::memory::Lease;
use crate::observe::Times;
use crate::observe::fault;
use crate::session::source::{Action, Event, Publication};
use crate::session::{End, Now};
use crate::wire::{self, Body, TicketEntry};

/// What a publication's handle and the control thread share besides the [`Cell`].
#[derive(Debug)]
pub(super) struct PublicationCell {
    pub cell: Cell,
    pub id: PublicationId,
    pub lease: Lease,
    pub entry: TicketEntry,
    pub ticket: Vec<u8>,
    /// Readers: seen (bit 31), finished and expected, for `info`.
    pub claimed: AtomicU32,
    pub readers_done: AtomicU32,
    pub readers_expected: AtomicU32,
    /// Bytes that readers say they took.
    pub bytes: AtomicU64,
    /// First reader's contact, last reader's end.
    pub times: Times,
    /// What the caller's stream held is done.
    pub readable: AtomicBool,
}

impl PublicationCell {
    /// Fills in what a push adds to its outcome.
    pub fn describe(&self, info: &mut TransferInfo) {
        info.bytes = self.bytes.load(Ordering::Relaxed);
        info.bytes_total = info.bytes;
        info.first_byte_ns = self.times.first_ns();
        info.last_byte_ns = self.times.last_ns();
    }
}

/// A publication on its way to the control thread.
pub(super) struct NewPublication {
    pub cell: Arc<PublicationCell>,
    pub lease: Lease,
    pub entry: TicketEntry,
    pub slots: Vec<GroupSlots>,
    pub pools: Vec<u32>,
    pub groups: Vec<usize>,
    pub claim: Duration,
    pub lease_time: Duration,
    /// The push offer that this publication answers.
    pub push: Option<(Incarnation, u64)>,
    /// Not to be read before it is open.
    pub gate: Option<Gate>,
}

pub(super) struct Entry {
    pub new: NewPublication,
    pub machine: Publication,
    /// Readers that wait for the gate.
    pub waiting: Vec<Incarnation>,
}

#[derive(Default)]
pub(super) struct Publications {
    pub entries: HashMap<PublicationId, Entry>,
    /// The newest publication of a key.
    pub by_key: HashMap<Key, Epoch>,
    /// Readers that asked for a key before it was published.
    pub awaiting: HashMap<Key, Vec<Incarnation>>,
    /// Agents that were lost and have not come back, and why: their engines' other ranks may
    /// still claim, and must not wait for them.
    pub lost: BTreeMap<Incarnation, End>,
}

/// Lost agents that are remembered.
const MAX_LOST: usize = 1024;

impl Publications {
    pub fn forget_awaiting(&mut self, key: Key) {
        self.awaiting.remove(&key);
    }

    /// Ends every cell without the machines: the control thread itself is broken.
    pub fn fail_all(&self, end: &End) {
        for entry in self.entries.values() {
            entry.new.cell.cell.end(end.clone());
        }
    }

    fn ids_awaiting(&self, agent: Incarnation) -> Vec<PublicationId> {
        let awaits = |(_, entry): &(&PublicationId, &Entry)| entry.machine.awaits(agent);
        let ids = self.entries.iter().filter(awaits);
        ids.map(|(id, _)| *id).collect()
    }
}

impl Control {
    pub fn publish(&mut self, mut new: NewPublication) {
        let (id, now) = (new.cell.id, self.shared.now());
        let machine = match new.push {
            Some(_) => Publication::push(now, new.claim, new.lease_time),
            None => Publication::new(now, new.claim, new.lease_time),
        };
        self.timers
            .set(Timer::Publication(id), machine.next_deadline());
        self.publications.by_key.insert(id.key, id.epoch);
        let (push, gate) = (new.push, new.gate.take());
        let waiting = Vec::new();
        let entry = Entry {
            new,
            machine,
            waiting,
        };
        self.publications.entries.insert(id, entry);
        if let Some(gate) = gate {
            self.hold_gate(Gated::Publication(id), gate);
        }
        if let Some((receiver, offer)) = push {
            self.send_push(id, receiver, offer);
        }
        for agent in self
            .publications
            .awaiting
            .remove(&id.key)
            .unwrap_or_default()
        {
            self.timers.set(Timer::Awaiting(id.key), None);
            self.claimed(agent, id);
            self.send_published(agent, id);
        }
    }

    fn send_push(&mut self, id: PublicationId, receiver: Incarnation, offer: u64) {
        let ticket = match self.publications.entries.get(&id) {
            Some(entry) => entry.new.cell.ticket.clone(),
            None => return,
        };
        self.queue_push(receiver, id, wire::Push { offer, ticket });
    }

    /// Feeds a publication's machine and does what it says.
    pub fn publication_event(&mut self, id: PublicationId, event: Event) {
        let now = self.shared.now();
        let Some(entry) = self.publications.entries.get_mut(&id) else {
            return;
        };
        let actions = entry.machine.on(event, now);
        let cell = entry.new.cell.clone();
        let (done, expected) = entry.machine.progress();
        cell.claimed
            .store(u32::from(entry.machine.claimed()), Ordering::Relaxed);
        cell.readers_done.store(done, Ordering::Relaxed);
        cell.readers_expected.store(expected, Ordering::Relaxed);
        let (next, lease) = (entry.machine.next_deadline(), entry.new.lease);
        self.timers.set(Timer::Publication(id), next);
        for action in actions {
            match action {
                Action::Revoke => {
                    self.shared.leases.revoke(lease);
                    fault::point("after_revoke");
                }
                Action::Ack(consumer) => self.ack(consumer.incarnation, id),
                Action::Tell(consumer, end) => self.tell_ended(consumer.incarnation, id, &end),
                Action::End(end) => self.publication_ended(id, end),
            }
        }
    }

    fn publication_ended(&mut self, id: PublicationId, end: End) {
        let Some(entry) = self.publications.entries.remove(&id) else {
            return;
        };
        if self.publications.by_key.get(&id.key) == Some(&id.epoch) {
            self.publications.by_key.remove(&id.key);
        }
        self.drop_push(id);
        if end.status != Status::KVF_OK && entry.machine.claimed() {
            self.shared.ucx.suspect();
        }
        self.gates.remove(&Gated::Publication(id));
        {
            let mut state = self.shared.lock();
            state.slots.end_read(&entry.new.slots);
            state.published.remove(&id.epoch.0);
        }
        self.shared.log.debug(format_args!(
            "publication of {} ended: {:?} {}",
            id.key, end.status, end.text
        ));
        // The word was revoked before: readers can be given nothing any more.
        self.shared
            .count_publication(entry.new.push.is_some(), &end);
        entry.new.cell.cell.end_safe(end);
        self.operation_ended(&entry.new.pools);
    }

    pub fn ack(&self, agent: Incarnation, id: PublicationId) {
        fault::point("before_ack");
        let ack = wire::FinishedAck {
            key: Some(id.key.into()),
            epoch: id.epoch.0,
        };
        self.send_to(agent, Body::FinishedAck(ack));
    }

    pub fn tell_ended(&self, agent: Incarnation, id: PublicationId, end: &End) {
        let ended = wire::Ended {
            key: Some(id.key.into()),
            epoch: id.epoch.0,
            status: end.status as i32,
            text: end.text.clone(),
        };
        self.send_to(agent, Body::Ended(ended));
    }

    pub fn publication_id(&self, key: Key, epoch: u64) -> PublicationId {
        PublicationId {
            source: self.shared.incarnation,
            key,
            epoch: Epoch(epoch),
        }
    }

    /// A request of this side is still queued: renew what its ticket names.
    pub fn hold(&mut self, peer: &PeerShared, held: &[Finished]) {
        debug_assert!(held.len() <= peer.routes.len());
        for finished in held {
            let (key, epoch) = (Some(finished.id.key.into()), finished.id.epoch.0);
            let body = match epoch {
                // Not known yet: a claim renews as well.
                0 => Body::Claim(wire::Claim { key, epoch }),
                _ => Body::Renew(wire::Renew { key, epoch }),
            };
            self.send_to(finished.id.source, body);
        }
    }

    /// An agent died: its publications no longer wait for it.
    pub fn readers_lost(&mut self, agent: Incarnation, end: &End) {
        self.publications.lost.insert(agent, end.clone());
        if self.publications.lost.len() > MAX_LOST {
            self.publications.lost.pop_first();
        }
        for id in self.publications.ids_awaiting(agent) {
            self.publication_event(id, Event::PeerLost(agent, end.clone()));
        }
        for waiting in self.publications.awaiting.values_mut() {
            waiting.retain(|a| *a != agent);
        }
    }

    /// The agent ends: every publication with it.
    pub fn end_publications(&mut self) {
        let ids: Vec<PublicationId> = self.publications.entries.keys().copied().collect();
        for id in ids {
            self.publication_event(id, Event::Shutdown);
        }
    }

    /// The receiver of a push ended its offer without a transfer.
    pub fn on_offer_ended(&mut self, agent: Incarnation, ended: &wire::OfferEnded) {
        let id = self.publication_id(key(ended.key), ended.epoch);
        let answers = self.publications.entries.get(&id).is_some_and(|entry| {
            let push = entry.new.push;
            push.is_some_and(|(receiver, offer)| receiver == agent && offer == ended.offer)
        });
        if answers {
            let status = match metadata::status(ended.status) {
                Status::KVF_ERR_CANCELLED => Status::KVF_ERR_CANCELLED_BY_PEER,
                other => other,
            };
            let text = format!("the receiver ended its offer: {}", ended.text);
            self.publication_event(id, Event::Withdrawn(End::new(status, text)));
        }
    }

    /// Time now, for callers in this folder.
    pub fn now(&self) -> Now {
        self.shared.now()
    }
}
