//! What readers say about our publications: that they begin, go on, and have finished. And which
//! readers a publication expects.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::control::{Control, Timer};
use super::metadata;
use super::ticket::key;
use crate::error::Status;
use crate::ids::{Consumer, Incarnation, PublicationId};
use crate::observe::metrics::Notice;
use crate::plan::{Plan, Policy};
use crate::session::End;
use crate::session::source::Event;
use crate::wire::{self, Body};

impl Control {
    /// A reader's claim came in.
    pub fn on_claim(&mut self, agent: Incarnation, claim: &wire::Claim) {
        let key = key(claim.key);
        if claim.epoch != 0 {
            let id = self.publication_id(key, claim.epoch);
            return self.claimed(agent, id);
        }
        match self.publications.by_key.get(&key) {
            Some(epoch) => {
                let id = self.publication_id(key, epoch.0);
                self.claimed(agent, id);
                self.send_published(agent, id);
            }
            None => {
                let waiting = self.publications.awaiting.entry(key).or_default();
                if !waiting.contains(&agent) {
                    waiting.push(agent);
                }
                let until = self.shared.now() + self.shared.config.timeouts.claim;
                self.timers.set(Timer::Awaiting(key), Some(until));
            }
        }
    }

    pub fn claimed(&mut self, agent: Incarnation, id: PublicationId) {
        let Some(consumer) = self.consumer(agent) else {
            return;
        };
        if self.publications.entries.contains_key(&id) {
            let expected = self.expected(agent, id);
            self.publication_claimed(id, consumer, expected);
            self.answer_gated(agent, id);
        } else {
            self.publications_unknown(agent, id, Notice::Claim);
        }
    }

    fn publication_claimed(
        &mut self,
        id: PublicationId,
        consumer: Consumer,
        expected: Vec<Consumer>,
    ) {
        self.publications.lost.remove(&consumer.incarnation); // it speaks
        if let Some(entry) = self.publications.entries.get(&id) {
            entry.new.cell.times.copying();
        }
        let lost = |c: &Consumer| {
            let end = self.publications.lost.get(&c.incarnation)?;
            Some((c.incarnation, end.clone()))
        };
        let lost: Vec<_> = expected.iter().filter_map(lost).collect();
        self.publication_event(id, Event::Claimed { consumer, expected });
        for (agent, end) in lost {
            self.publication_event(id, Event::PeerLost(agent, end));
        }
    }

    /// What the publication's stream held is done: whoever waited may read.
    pub fn publication_readable(&mut self, id: PublicationId) {
        let Some(entry) = self.publications.entries.get_mut(&id) else {
            return;
        };
        entry.new.cell.readable.store(true, Ordering::Release);
        for agent in std::mem::take(&mut entry.waiting) {
            self.send_readable(agent, id);
        }
    }

    /// A reader whose ticket says that it has to wait hears when it need not.
    fn answer_gated(&mut self, agent: Incarnation, id: PublicationId) {
        let Some(entry) = self.publications.entries.get_mut(&id) else {
            return;
        };
        if !entry.new.entry.gated {
            return;
        }
        if entry.new.cell.readable.load(Ordering::Acquire) {
            self.send_readable(agent, id);
        } else if !entry.waiting.contains(&agent) {
            entry.waiting.push(agent);
        }
    }

    fn send_readable(&self, agent: Incarnation, id: PublicationId) {
        let readable = wire::Readable {
            key: Some(id.key.into()),
            epoch: id.epoch.0,
        };
        self.send_to(agent, Body::Readable(readable));
    }

    /// A late or wrong notice: counted, answered, without effect.
    fn publications_unknown(&self, agent: Incarnation, id: PublicationId, notice: Notice) {
        self.count_late(agent, notice);
        self.shared.log.debug(format_args!(
            "a notice about an unknown publication of {} epoch {}",
            id.key, id.epoch.0
        ));
        let text = "no such publication: it has ended";
        self.tell_ended(agent, id, &End::new(Status::KVF_ERR_EXPIRED, text));
    }

    fn consumer(&self, agent: Incarnation) -> Option<Consumer> {
        let remote = self.remotes.get(&agent)?;
        Some(Consumer {
            incarnation: agent,
            rank: remote.rank(),
        })
    }

    /// Every reader of this agent's engine that the plan sends to us for this publication. A push
    /// answers one receiver's offer, so it has one reader.
    fn expected(&mut self, agent: Incarnation, id: PublicationId) -> Vec<Consumer> {
        let (Some(plan), Some(remote), Some(entry)) = (
            self.outward_plan(agent),
            self.remotes.get(&agent),
            self.publications.entries.get(&id),
        ) else {
            return Vec::new();
        };
        if entry.new.push.is_some() {
            return Vec::new();
        }
        let Some(own) = self.shared.lock().engine.clone() else {
            return Vec::new();
        };
        let ranks = &remote.engine.ranks;
        let dp = remote.dp_rank();
        plan.consumers(own.index, dp, &entry.new.groups)
            .filter_map(|i| ranks.get(i))
            .map(|rank| Consumer {
                incarnation: rank.incarnation,
                rank: rank.layout.coordinates.global_rank,
            })
            .collect()
    }

    /// The plan from our engine to the engine of this agent.
    fn outward_plan(&mut self, agent: Incarnation) -> Option<Arc<Plan>> {
        let engine = self.remotes.get(&agent)?.engine.clone();
        if let Some(plan) = self.outward.get(&engine.id()) {
            return Some(plan.clone());
        }
        let own = self.shared.lock().engine.clone()?;
        match Plan::new(&own.info.layouts(), &engine.layouts(), Policy::Spread) {
            Ok(plan) => {
                let plan = Arc::new(plan);
                self.outward.insert(engine.id(), plan.clone());
                Some(plan)
            }
            Err(e) => {
                self.shared
                    .log
                    .warn(format_args!("no plan for the reading engine: {e}"));
                None
            }
        }
    }

    pub fn send_published(&self, agent: Incarnation, id: PublicationId) {
        if let Some(entry) = self.publications.entries.get(&id) {
            let mut ours = entry.new.entry.clone();
            ours.gated = !entry.new.cell.readable.load(Ordering::Acquire);
            let published = wire::Published {
                key: Some(id.key.into()),
                entry: Some(ours),
            };
            self.send_to(agent, Body::Published(published));
        }
    }

    /// A reader's renewal came in.
    pub fn on_renew(&mut self, agent: Incarnation, renew: &wire::Renew) {
        let id = self.publication_id(key(renew.key), renew.epoch);
        match self.consumer(agent) {
            Some(consumer) if self.publications.entries.contains_key(&id) => {
                self.publication_event(id, Event::Renewed(consumer));
            }
            _ => self.publications_unknown(agent, id, Notice::Renew),
        }
    }

    /// A reader's end came in.
    pub fn on_finished(&mut self, agent: Incarnation, finished: &wire::Finished) {
        let id = self.publication_id(key(finished.key), finished.epoch);
        let status = match finished.status {
            0 => Status::KVF_OK,
            code => metadata::status(code),
        };
        if status != Status::KVF_OK {
            self.shared.ucx.suspect();
        }
        let Some(consumer) = self.consumer(agent) else {
            return;
        };
        if !self.publications.entries.contains_key(&id) {
            self.count_late(agent, Notice::Finished);
            // Acknowledged all the same, so that the reader stops telling.
            return self.ack(agent, id);
        }
        // A reader that moved nothing may finish without ever having claimed.
        if let Some(entry) = self.publications.entries.get(&id)
            && !entry.machine.noted(consumer)
        {
            entry.new.cell.times.copying(); // if it never claimed
            entry.new.cell.times.copied();
            let bytes = &entry.new.cell.bytes;
            bytes.fetch_add(finished.bytes, Ordering::Relaxed);
            if status == Status::KVF_OK
                && let Some(remote) = self.remotes.get(&agent)
            {
                let peer = &remote.route.name;
                self.shared.metrics.sent(peer, finished.bytes);
            }
        } else {
            self.count_late(agent, Notice::Finished);
        }
        let expected = self.expected(agent, id);
        self.publication_claimed(id, consumer, expected);
        self.publication_event(id, Event::Finished(consumer, status));
    }
}
