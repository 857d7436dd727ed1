//! What the agent's source side does around the machine.

use super::*;
use kvferry::session::source::{Action, Event};

impl World {
    fn source(&mut self, index: u8) -> &mut Source {
        &mut self.sources[usize::from(index)]
    }

    /// Slots for a publication of this source: the lowest free one, with `share` also those of
    /// the first live publication.
    pub(crate) fn free_source_slots(&self, config: &Config, index: u8) -> Option<Vec<u8>> {
        let source = &self.sources[usize::from(index)];
        let used = |s: u8| {
            source
                .publications
                .iter()
                .any(|p| p.ticket.slots.contains(&s))
        };
        let free = (0..config.slots).find(|s| !used(*s))?;
        let mut slots = vec![free];
        if config.share
            && let Some(first) = source.publications.first()
        {
            slots.extend(&first.ticket.slots);
            slots.sort_unstable();
            slots.dedup();
        }
        Some(slots)
    }

    pub(crate) fn publish(&mut self, config: &Config, index: u8, request: u8) {
        let Some(slots) = self.free_source_slots(config, index) else {
            return;
        };
        let peer = self.source_peer(index);
        self.versions += 1;
        let (now, version) = (self.clock, self.versions);
        let source = self.source(index);
        source.published += 1;
        let used: BTreeSet<u8> = (source.publications.iter())
            .flat_map(|p| p.ticket.slots.clone())
            .collect();
        let memory = &mut source.memories[usize::from(peer.life)];
        memory.leases.push(true);
        for slot in slots.iter().filter(|s| !used.contains(s)) {
            memory.slots[usize::from(*slot)] = version;
        }
        let ticket = Ticket {
            source: peer,
            request,
            epoch: memory.leases.len() as u8,
            versions: slots
                .iter()
                .map(|s| memory.slots[usize::from(*s)])
                .collect(),
            slots,
        };
        let machine = Publication::new(now, config.claim, config.lease);
        let timer = machine.next_deadline();
        source.publications.push(Published {
            ticket: ticket.clone(),
            machine,
            timer,
            succeeded: BTreeSet::new(),
            expected: BTreeSet::new(),
            last_contact: now,
        });
        let waiting: Vec<(u8, Peer)> = source.awaiting.iter().copied().collect();
        source.awaiting.retain(|(r, _)| *r != request);
        self.tickets.insert((index, request), ticket.clone());
        for (_, reader) in waiting.into_iter().filter(|(r, _)| *r == request) {
            self.claimed(config, peer, reader, &ticket);
            self.send(config, peer, reader, Body::Published(ticket.clone()));
        }
    }

    pub(crate) fn publication_event(
        &mut self,
        config: &Config,
        index: u8,
        epoch: u8,
        event: Event,
        now: Now,
    ) {
        let me = self.source_peer(index);
        let life = usize::from(me.life);
        let source = self.source(index);
        let Some(at) = (source.publications.iter()).position(|p| p.ticket.epoch == epoch) else {
            return;
        };
        let contact = matches!(
            event,
            Event::Claimed { .. } | Event::Renewed(_) | Event::Finished(..)
        );
        let publication = &mut source.publications[at];
        if contact {
            publication.last_contact = now;
        }
        let request = publication.ticket.request;
        let actions = publication.machine.on(event, now);
        publication.timer = publication.machine.next_deadline();
        if contact && config.bug == Some(Bug::TimerNotReArmed) {
            publication.timer = None;
        }
        let mut ends = 0;
        for action in actions {
            match action {
                Action::Revoke if config.bug == Some(Bug::EndBeforeRevoke) => {
                    self.source(index).unrevoked.insert(epoch);
                }
                Action::Revoke => {
                    self.source(index).memories[life].leases[usize::from(epoch) - 1] = false;
                }
                Action::Ack(to) => {
                    let to = Peer::of(to.incarnation);
                    self.send(config, me, to, Body::Ack { request, epoch });
                }
                Action::Tell(to, end) => {
                    let status = end.status as i32;
                    let body = Body::Ended {
                        request,
                        epoch,
                        status,
                    };
                    self.send(config, me, Peer::of(to.incarnation), body);
                }
                Action::End(end) => {
                    ends += 1;
                    self.publication_ended(index, at, &end);
                }
            }
        }
        if ends > 1 {
            self.breaks(property::ENDS_ONCE);
        }
    }

    /// The engine hears of the end. It overwrites its slots at once, which is the worst it can do.
    fn publication_ended(&mut self, index: u8, at: usize, end: &End) {
        let life = usize::from(self.source_peer(index).life);
        let source = self.source(index);
        let ended = source.publications.remove(at);
        let used: BTreeSet<u8> = (source.publications.iter())
            .flat_map(|p| p.ticket.slots.clone())
            .collect();
        for slot in ended.ticket.slots.iter().filter(|s| !used.contains(s)) {
            source.memories[life].slots[usize::from(*slot)] = 0;
        }
        if end.is_ok() {
            self.seen.insert("a publication succeeds");
            if !ended.expected.is_subset(&ended.succeeded) {
                self.breaks(property::ALL_FINISHED);
            }
        } else if end.status == Status::KVF_ERR_EXPIRED {
            self.seen.insert("a publication expires");
        }
    }

    fn find(&self, config: &Config, me: Peer, request: u8, epoch: u8) -> Option<Ticket> {
        let any_epoch = epoch == 0 || config.bug == Some(Bug::EpochCheckRemoved);
        let publications = &self.sources[usize::from(me.index)].publications;
        (publications.iter().map(|p| &p.ticket))
            .find(|t| t.request == request && (any_epoch || t.epoch == epoch))
            .cloned()
    }

    fn claimed(&mut self, config: &Config, me: Peer, reader: Peer, ticket: &Ticket) {
        let index = me.index;
        // The claiming engine as it is now: the claimant, and the other ranks' newest lives.
        let all: BTreeSet<Peer> = (0..config.readers)
            .map(|r| {
                if r == reader.index {
                    reader
                } else {
                    self.reader_peer(r)
                }
            })
            .collect();
        let publications = &mut self.sources[usize::from(index)].publications;
        if let Some(found) = (publications.iter_mut()).find(|p| p.ticket.epoch == ticket.epoch) {
            found.expected.extend(&all);
        }
        let mut expected: Vec<_> = all.iter().map(|p| p.consumer()).collect();
        if config.bug == Some(Bug::ReleasedOnFirstOfTwoConsumers) {
            expected.clear();
        }
        let source = self.source(index);
        source.lost.remove(&reader);
        let lost: Vec<Peer> = all.intersection(&source.lost).copied().collect();
        let (consumer, now) = (reader.consumer(), self.clock);
        let event = Event::Claimed { consumer, expected };
        self.publication_event(config, index, ticket.epoch, event, now);
        for peer in lost {
            let event = Event::PeerLost(peer.incarnation(), end(Status::KVF_ERR_PEER_LOST));
            self.publication_event(config, index, ticket.epoch, event, now);
        }
    }

    pub(crate) fn source_hears(&mut self, config: &Config, message: Message) {
        let Message { from, to: me, body } = message;
        let unknown = |request, epoch| Body::Ended {
            request,
            epoch,
            status: Status::KVF_ERR_EXPIRED as i32,
        };
        match body {
            Body::Claim { request, epoch } => match self.find(config, me, request, epoch) {
                Some(ticket) => {
                    self.claimed(config, me, from, &ticket);
                    if epoch == 0 {
                        self.send(config, me, from, Body::Published(ticket));
                    }
                }
                None if epoch == 0 => {
                    self.source(me.index).awaiting.insert((request, from));
                }
                None => self.send(config, me, from, unknown(request, epoch)),
            },
            Body::Renew { request, epoch } => match self.find(config, me, request, epoch) {
                Some(ticket) => {
                    let event = Event::Renewed(from.consumer());
                    self.publication_event(config, me.index, ticket.epoch, event, self.clock);
                }
                None => self.send(config, me, from, unknown(request, epoch)),
            },
            Body::Finished {
                request,
                epoch,
                status,
            } => match self.find(config, me, request, epoch) {
                Some(ticket) => {
                    let status = match config.bug {
                        Some(Bug::FailureTakenForSuccess) => Status::KVF_OK,
                        _ => Status::from_code(status).unwrap_or(Status::KVF_ERR_INTERNAL),
                    };
                    self.claimed(config, me, from, &ticket);
                    let event = Event::Finished(from.consumer(), status);
                    self.publication_event(config, me.index, ticket.epoch, event, self.clock);
                }
                None => self.send(config, me, from, Body::Ack { request, epoch }),
            },
            Body::Published(_) | Body::Ack { .. } | Body::Ended { .. } => {}
        }
    }

    /// Whether a reader's end still makes a difference to a publication.
    pub(crate) fn source_needs(&self, id: PublicationId, reader: Peer) -> bool {
        self.lives(id.source)
            && self.sources[usize::from(id.source.index)]
                .publications
                .iter()
                .filter(|p| p.ticket.request == id.request)
                .any(|p| match id.epoch {
                    0 => true,
                    epoch => p.ticket.epoch == epoch && !p.machine.noted(reader.consumer()),
                })
    }

    pub(crate) fn source_loses(&mut self, config: &Config, index: u8, peer: Peer) {
        let source = self.source(index);
        source.lost.insert(peer);
        source.awaiting.retain(|(_, p)| *p != peer);
        let epochs: Vec<u8> = source.publications.iter().map(|p| p.ticket.epoch).collect();
        for epoch in epochs {
            let event = Event::PeerLost(peer.incarnation(), end(Status::KVF_ERR_PEER_LOST));
            self.publication_event(config, index, epoch, event, self.clock);
        }
    }
}
