//! Push: the receiver offers slots, the sender names its own, and the receiver fetches. On one
//! host, and over tcp, no process ever writes another one's memory.
//!
//! A sender's push is a publication plus a message to the receiver, repeated on every new link
//! until the publication has ended. A receive is an import whose jobs come with those messages.

use std::collections::HashMap;
use std::sync::Arc;

use super::control::Control;
use super::notices::Finished;
use super::peers::Route;
use super::reader::NewImport;
use super::shared::Shared;
use super::ticket::key;
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::plan::{Pair, Plan, Policy};
use crate::session::source::Event;
use crate::session::{End, reader};
use crate::wire::{self, Body};

#[derive(Default)]
pub(super) struct Offers {
    /// Offer id (the import's id) to the status it ended with; `None` = still open.
    receives: HashMap<u64, Option<Status>>,
    /// Pushes that the receiver may not have heard of.
    pushes: HashMap<PublicationId, (Incarnation, wire::Push)>,
    /// Plans from other engines to ours, for pushes.
    inward: HashMap<Incarnation, Arc<Plan>>,
}

impl Offers {
    /// Opens an offer.
    pub fn open(&mut self, offer: u64, ended: Option<Status>) {
        self.receives.insert(offer, ended);
    }

    /// No rank of the engine is known any more.
    pub fn engine_lost(&mut self, engine: Incarnation) {
        self.inward.remove(&engine);
    }
}

impl Control {
    /// The import behind an open offer.
    pub fn offer_import(&self, offer: u64) -> Option<u64> {
        match self.offers.receives.get(&offer) {
            Some(None) => Some(offer),
            _ => None,
        }
    }

    /// Receives that wait for a push of this agent's engine.
    pub fn receives_from(&self, agent: Incarnation) -> Vec<u64> {
        let waits = |new: &NewImport| {
            let sender = new.sender.as_ref().filter(|_| new.jobs.is_empty());
            sender.is_some_and(|sender| sender.engine.index_of(agent).is_some())
        };
        let waiting = self.imports.iter().filter(|(_, i)| waits(&i.new));
        waiting.map(|(id, _)| *id).collect()
    }

    /// Ends a receive that nobody can send to any more. One attention-DP index of the sender
    /// pushes, and nobody has said which: any with all its ranks alive will do.
    pub fn look_for_senders(&mut self, id: u64) {
        let lost = self
            .imports
            .get(&id)
            .and_then(|i| no_sender(&self.shared, &i.new));
        if let Some(end) = lost {
            self.import_event(id, reader::Event::NoSender(end));
        }
    }

    /// An import has ended and is safe; if it was a receive, its offer is over.
    pub fn offer_over(&mut self, id: u64) {
        self.offers.receives.remove(&id);
    }

    /// A push came for an offer that is over: one that wanted nothing was a success.
    pub fn answer_ended_offer(
        &mut self,
        agent: Incarnation,
        offer: u64,
        ticket: &wire::Ticket,
        entry: &wire::TicketEntry,
    ) -> Result<()> {
        match self.offers.receives.get(&offer) {
            Some(Some(Status::KVF_OK)) => {
                self.tell_finished(Finished {
                    id: PublicationId {
                        source: agent,
                        key: key(ticket.key),
                        epoch: Epoch(entry.epoch),
                    },
                    status: Status::KVF_OK,
                    bytes: 0,
                    lease: self.shared.config.timeouts.lease,
                });
                Ok(())
            }
            _ => {
                self.count_late(agent, crate::observe::metrics::Notice::Push);
                bail!(
                    KVF_ERR_EXPIRED,
                    "{}: offer {offer} has ended at the receiver",
                    key(ticket.key)
                )
            }
        }
    }

    /// Routes and pairs of all senders of this agent's engine that move something to us.
    pub fn inward_pairs(
        &mut self,
        agent: Incarnation,
        dp: u32,
    ) -> Result<Vec<(Arc<Route>, Arc<Pair>)>> {
        let own = self.shared.lock().engine()?;
        let Some(remote) = self.remotes.get(&agent) else {
            bail!(KVF_ERR_PEER_LOST, "the sender is gone");
        };
        let engine = remote.engine.clone();
        let plan = match self.offers.inward.get(&engine.id()) {
            Some(plan) => plan.clone(),
            None => {
                let plan = Plan::new(&engine.layouts(), &own.info.layouts(), Policy::Spread)?;
                let plan = Arc::new(plan);
                self.offers.inward.insert(engine.id(), plan.clone());
                plan
            }
        };
        let mut senders = Vec::new();
        for pair in plan.sources_of(own.index, dp)? {
            let route = self.remote(&engine, pair.src).route.clone();
            self.ask_memory(route.incarnation);
            senders.push((route, pair.clone()));
        }
        Ok(senders)
    }

    /// Tells a receiver of a push, now and on each new link.
    pub fn queue_push(&mut self, receiver: Incarnation, id: PublicationId, push: wire::Push) {
        self.send_to(receiver, Body::Push(push.clone()));
        self.offers.pushes.insert(id, (receiver, push));
    }

    /// A publication has ended.
    pub fn drop_push(&mut self, id: PublicationId) {
        self.offers.pushes.remove(&id);
    }

    /// A new link.
    pub fn repeat_pushes(&self, agent: Incarnation) {
        for (receiver, push) in self.offers.pushes.values() {
            if *receiver == agent {
                self.send_to(agent, Body::Push(push.clone()));
            }
        }
    }

    /// The receiver is gone: pushes to it have failed.
    pub fn drop_pushes_to(&mut self, agent: Incarnation, end: &End) {
        let to =
            |(_, (receiver, _)): &(&PublicationId, &(Incarnation, wire::Push))| *receiver == agent;
        let ids: Vec<PublicationId> = self
            .offers
            .pushes
            .iter()
            .filter(to)
            .map(|(id, _)| *id)
            .collect();
        for id in ids {
            self.publication_event(id, Event::Withdrawn(end.clone()));
        }
    }
}

/// Why nobody can send to a receive whose sender is known.
fn no_sender(shared: &Shared, new: &NewImport) -> Option<End> {
    let sender = new.sender.as_ref().filter(|_| new.jobs.is_empty())?;
    let (plan, own) = (sender.inward().ok()?, shared.lock().engine().ok()?);
    let lost = |pair: &Arc<Pair>| sender.routes[pair.src].get().and_then(Result::err);
    let mut reason = None;
    for dp in plan.src_dps() {
        let found = plan.sources_of(own.index, *dp).ok()?.find_map(lost);
        reason = Some(found?);
    }
    reason.map(|e| End::new(e.status, e.text))
}
