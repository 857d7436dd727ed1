//! "I have finished": told to each source until it answers, or until its publication has ended
//! anyway. When to repeat and when to give up is [`crate::session::notice`]'s decision.

use std::collections::HashMap;
use std::time::Duration;

use super::control::{Control, Timer};
use super::ticket::key;
use crate::error::Status;
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::session::notice::{Action, Event, Notice};
use crate::wire::{self, Body};

/// A reader's end, for one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finished {
    /// Epoch 0: this source's publication is not known yet; it is asked for first.
    pub id: PublicationId,
    pub status: Status,
    pub bytes: u64,
    /// The publication's lease.
    pub lease: Duration,
}

#[derive(Default)]
pub(super) struct Notices {
    open: HashMap<PublicationId, (Finished, Notice)>,
}

impl Notices {
    /// Whether every source knows. One that has not even published (epoch 0) has nothing to
    /// release, so it keeps nobody waiting.
    pub fn is_empty(&self) -> bool {
        self.open.keys().all(|id| id.epoch == Epoch(0))
    }

    /// Whether something is still to be told to this agent.
    pub fn any_for(&self, agent: Incarnation) -> bool {
        self.open.keys().any(|id| id.source == agent)
    }

    fn ids_for(&self, agent: Incarnation) -> Vec<PublicationId> {
        let ids = self.open.keys().copied();
        ids.filter(|id| id.source == agent).collect()
    }
}

impl Control {
    pub fn tell_finished(&mut self, finished: Finished) {
        let id = finished.id;
        if !self.remotes.contains_key(&id.source) {
            return self.check_idle(); // the source is gone, and its publication with it
        }
        let claim = self.shared.config.timeouts.claim;
        let notice = Notice::new(self.now(), claim, finished.lease);
        self.timers.set(Timer::Notice(id), notice.next_deadline());
        self.notices.open.insert(id, (finished, notice));
        self.send_notice(id);
    }

    /// Feeds a notice's machine and does what it says; false: there is no such notice.
    pub fn notice_event(&mut self, id: PublicationId, event: Event) -> bool {
        let now = self.now();
        let Some((_, notice)) = self.notices.open.get_mut(&id) else {
            return false;
        };
        let action = notice.on(event, now);
        self.timers.set(Timer::Notice(id), notice.next_deadline());
        match action {
            Some(Action::Send) => self.send_notice(id),
            Some(Action::Close) => {
                self.notices.open.remove(&id);
                self.check_idle();
            }
            None => {}
        }
        true
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

    /// The source answered.
    pub fn on_finished_ack(&mut self, agent: Incarnation, ack: &wire::FinishedAck) {
        let id = PublicationId {
            source: agent,
            key: key(ack.key),
            epoch: Epoch(ack.epoch),
        };
        self.notice_event(id, Event::Acknowledged);
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
    pub fn repeat_notices(&mut self, agent: Incarnation) {
        for id in self.notices.ids_for(agent) {
            self.notice_event(id, Event::Linked);
        }
    }

    /// Nobody to tell any more.
    pub fn drop_notices(&mut self, agent: Incarnation) {
        for id in self.notices.ids_for(agent) {
            self.notice_event(id, Event::SourceLost);
        }
    }

    fn check_idle(&mut self) {
        if self.notices.is_empty() && !self.drains.is_empty() {
            self.shared.send(super::control::Command::Idle);
        }
    }
}
