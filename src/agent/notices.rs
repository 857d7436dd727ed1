//! "I have finished": told to each source until it answers, or until its lease has ended anyway.

use std::collections::HashMap;
use std::time::Duration;

use super::control::{Control, Timer};
use super::ticket::key;
use crate::error::Status;
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::session::Now;
use crate::wire::{self, Body};

/// A reader's end, for one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    /// Epoch 0: this source's publication is not known yet; it is asked for first.
    pub id: PublicationId,
    pub status: Status,
    pub bytes: u64,
    /// For how long it is worth telling.
    pub lease: Duration,
}

#[derive(Default)]
pub(super) struct Notices {
    open: HashMap<PublicationId, (Finished, Now)>,
}

impl Notices {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Whether something is still to be told to this agent.
    pub fn any_for(&self, agent: Incarnation) -> bool {
        self.open.keys().any(|id| id.source == agent)
    }
}

/// Without an answer a notice is repeated after this time (and whenever the link is new).
const REPEAT: Duration = Duration::from_secs(5);

impl Control {
    pub fn tell_finished(&mut self, finished: Finished) {
        let now = self.now();
        self.notices
            .open
            .insert(finished.id, (finished, now + finished.lease));
        self.timers
            .set(Timer::Notice(finished.id), Some(now + REPEAT));
        self.send_notice(finished.id);
    }

    fn send_notice(&self, id: PublicationId) {
        let Some((finished, _)) = self.notices.open.get(&id) else {
            return;
        };
        let key = Some(id.key.into());
        let body = if id.epoch == Epoch(0) {
            Body::Claim(wire::Claim { key, epoch: 0 })
        } else {
            Body::Finished(wire::Finished {
                key,
                epoch: id.epoch.0,
                status: finished.status as i32,
                bytes: finished.bytes,
            })
        };
        self.send_to(id.source, body);
    }

    pub fn notice_due(&mut self, id: PublicationId) {
        let now = self.now();
        match self.notices.open.get(&id) {
            Some((_, give_up)) if now < *give_up => {
                self.timers.set(Timer::Notice(id), Some(now + REPEAT));
                self.send_notice(id);
            }
            _ => self.close_notice(id),
        }
    }

    fn close_notice(&mut self, id: PublicationId) {
        self.notices.open.remove(&id);
        self.timers.set(Timer::Notice(id), None);
        self.check_idle();
    }

    /// The source answered.
    pub fn on_finished_ack(&mut self, agent: Incarnation, ack: &wire::FinishedAck) {
        self.close_notice(PublicationId {
            source: agent,
            key: key(ack.key),
            epoch: Epoch(ack.epoch),
        });
    }

    /// A source said what it has published under a key: a notice that waited for it can go.
    pub fn resolve_notice(&mut self, agent: Incarnation, published: &wire::Published) {
        let Some(entry) = &published.entry else {
            return;
        };
        let unknown = PublicationId {
            source: agent,
            key: key(published.key),
            epoch: Epoch(0),
        };
        if let Some((mut finished, _)) = self.notices.open.remove(&unknown) {
            self.timers.set(Timer::Notice(unknown), None);
            finished.id.epoch = Epoch(entry.epoch);
            self.tell_finished(finished);
        }
    }

    /// A new link: everything that was not acknowledged is told again.
    pub fn repeat_notices(&self, agent: Incarnation) {
        for id in self.notices.open.keys().filter(|id| id.source == agent) {
            self.send_notice(*id);
        }
    }

    /// Nobody to tell any more.
    pub fn drop_notices(&mut self, agent: Incarnation) {
        let ids: Vec<PublicationId> = self.notices.open.keys().copied().collect();
        for id in ids.into_iter().filter(|id| id.source == agent) {
            self.close_notice(id);
        }
    }

    fn check_idle(&mut self) {
        if self.notices.is_empty() && !self.drains.is_empty() {
            self.shared.send(super::control::Command::Idle);
        }
    }
}
