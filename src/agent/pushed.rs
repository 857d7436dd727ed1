//! The control thread hears of pushes: what a receive waits for becomes jobs of it.

use std::sync::Arc;

use super::control::Control;
use super::count::saved_bytes;
use super::lock;
use super::reader::NewJob;
use super::ticket::{decode_ticket, entry_of, key};
use super::wants::{check_prefix, resolve_ends};
use crate::error::Error;
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::session::End;
use crate::session::reader::Event;
use crate::wire::{self, Body};

impl Control {
    /// A sender's push for one of our offers came in.
    pub fn on_push(&mut self, agent: Incarnation, push: &wire::Push) {
        let ticket = match decode_ticket(push.ticket.clone()) {
            Ok(ticket) => ticket,
            Err(e) => {
                return self
                    .shared
                    .log
                    .warn(format_args!("push from {agent:?}: {e}"));
            }
        };
        let Some(entry) = entry_of(&ticket, agent).cloned() else {
            return;
        };
        if let Err(e) = self.push_arrived(agent, push.offer, &ticket, &entry) {
            let ended = wire::OfferEnded {
                offer: push.offer,
                key: ticket.key,
                epoch: entry.epoch,
                status: e.status as i32,
                text: e.text,
            };
            self.send_to(agent, Body::OfferEnded(ended));
        }
    }

    fn push_arrived(
        &mut self,
        agent: Incarnation,
        offer: u64,
        ticket: &wire::Ticket,
        entry: &wire::TicketEntry,
    ) -> Result<(), Error> {
        let Some(id) = self.offer_import(offer) else {
            return self.answer_ended_offer(agent, offer, ticket, entry);
        };
        let Some(import) = self.imports.get(&id) else {
            return Ok(());
        };
        if let Some(sender) = &import.new.sender
            && sender.engine.id().0[..] != ticket.engine[..]
        {
            crate::bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} is received from engine {:?}; this push is from another one",
                key(ticket.key),
                sender.engine.id()
            );
        }
        let known = !import.new.jobs.is_empty();
        self.ask_memory(agent);
        if !known {
            let senders = self.inward_pairs(agent, ticket.dp_rank)?;
            let own = self.shared.lock().engine()?;
            let layout = &own.info.ranks[own.index].layout;
            let sender = senders.first().map(|(route, _)| route.name.clone());
            let Some(import) = self.imports.get_mut(&id) else {
                return Ok(());
            };
            let fits = check_prefix(import.new.wants.prefix_tag, ticket)
                .and_then(|()| resolve_ends(Arc::make_mut(&mut import.new.wants), ticket));
            *lock(&import.new.cell.aux) = ticket.aux.clone();
            let saved = saved_bytes(&import.new.wants, layout, ticket);
            if saved > 0 {
                // Once, here: jobs are known from now on.
                let _ = import
                    .new
                    .cell
                    .saved
                    .set((sender.unwrap_or_default(), saved));
            }
            for (route, pair) in senders {
                let id = PublicationId {
                    source: route.incarnation,
                    key: key(ticket.key),
                    epoch: Epoch(0),
                };
                import.new.routes.push(route);
                import.new.jobs.push(NewJob {
                    pair,
                    id,
                    job: None,
                    parts: Vec::new(),
                    gated: false,
                    started: false,
                });
            }
            import.machine.expect(import.new.jobs.len());
            if let Err(e) = fits {
                // The sender hears of it; our side must not wait for a push that cannot come.
                let end = End::new(e.status, e.text.clone());
                self.import_event(id, Event::SourceLost(0, end));
                return Err(e);
            }
        }
        let Some(import) = self.imports.get(&id) else {
            return Ok(());
        };
        let at = import.new.jobs.iter().position(|j| j.id.source == agent);
        match at {
            Some(at) if import.new.jobs[at].job.is_none() => self.resolve_job(id, at, entry),
            Some(_) => {}
            None => crate::bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "source rank {} moves nothing to this rank",
                entry.rank
            ),
        }
        Ok(())
    }
}
