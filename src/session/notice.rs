//! "I have finished": what a reader tells one source until it answers.
//!
//! A notice is repeated at intervals and on every new link. It is given up when the source cannot
//! be waiting for it any more: each of the source's two deadlines (claim, lease) ends by itself,
//! so after the longer one the publication is over without the notice.

use std::time::Duration;

use super::Now;

/// What happens to a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The link to the source is new: whatever was sent on the old one may be lost.
    Linked,
    /// The source has noted it.
    Acknowledged,
    /// The source's publication has ended, with or without us.
    Ended,
    /// The source is gone.
    SourceLost,
    /// Time has passed.
    Tick,
}

/// What must be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send it, again.
    Send,
    /// Forget it.
    Close,
}

/// One notice that was sent and not answered yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Notice {
    every: Duration,
    next: Now,
    give_up: Now,
    open: bool,
}

impl Notice {
    /// A notice about a publication with these deadlines; it is sent for the first time now.
    pub fn new(now: Now, claim: Duration, lease: Duration) -> Self {
        let every = (lease / 6).max(Duration::from_millis(1));
        let give_up = now + claim.max(lease);
        Self {
            every,
            next: (now + every).min(give_up),
            give_up,
            open: true,
        }
    }

    /// When [`Event::Tick`] is due; `None` after [`Action::Close`].
    pub fn next_deadline(&self) -> Option<Now> {
        self.open.then_some(self.next)
    }

    /// Takes one event. Nothing happens after [`Action::Close`].
    pub fn on(&mut self, event: Event, now: Now) -> Option<Action> {
        if !self.open {
            return None;
        }
        let over = match event {
            Event::Acknowledged | Event::Ended | Event::SourceLost => true,
            Event::Linked => false,
            Event::Tick if now < self.next => return None,
            Event::Tick => now >= self.give_up,
        };
        if over {
            self.open = false;
            return Some(Action::Close);
        }
        self.next = (now + self.every).min(self.give_up);
        Some(Action::Send)
    }
}
