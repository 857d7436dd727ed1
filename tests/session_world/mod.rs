//! A world of sources and readers that drive the session machines as the agent does, over a bad
//! network, with crashes, restarts and false suspicions. Slots carry versions, so that "success
//! implies the right bytes" can be checked. The random tests and the model checker share it.
//!
//! Time is one of two kinds. *Timed* (random tests): one clock, which jumps; whatever is due
//! fires. *Untimed* (model checker): machines always see time zero, and any armed deadline may
//! fire at any moment, which covers every clock skew, stopped process and slow network.

#![allow(dead_code, missing_docs)]

mod reader;
mod source;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry::error::Status;
use kvferry::ids::{Consumer, Incarnation};
use kvferry::session::notice::Notice;
use kvferry::session::reader::Import;
use kvferry::session::source::Publication;
use kvferry::session::{End, Now};

pub use step::{KINDS, Step};

/// A protocol bug that the world can be given: the machines stay, what is around them goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A source matches notices by key alone.
    EpochCheckRemoved,
    /// A reader trusts whoever answers at a source's address.
    IncarnationCheckRemoved,
    /// A reader does not look at the lease word after its last byte.
    AttestationSkipped,
    /// A source waits only for readers that it has heard of.
    ReleasedOnFirstOfTwoConsumers,
    /// A source tells its engine that slots are safe and clears the lease word later.
    EndBeforeRevoke,
    /// A reader frees its slots when its deadline passes.
    FreedOnTimeOut,
    /// A reader frees its slots with every outcome.
    MemorySafeBeforeTheCopyStopped,
    /// A copy that becomes possible is started even after the import's end.
    StartedAfterTheEnd,
    /// A reader tells its end once and forgets it.
    NoticeNotRepeated,
    /// A sign of life stops a publication's timer.
    TimerNotReArmed,
    /// A reader's end is taken for a success.
    FailureTakenForSuccess,
    /// A job's success ends the whole import.
    SuccessOfFirstJob,
}

/// What must hold in every state; the names are what a failing check prints.
pub mod property {
    pub const RIGHT_BYTES: &str = "success implies the right bytes";
    pub const NO_LIVE_WRITER: &str = "no reusable slot has a live writer";
    pub const ENDS_ONCE: &str = "every operation ends exactly once";
    pub const DEADLINE: &str = "nothing waits past its deadline";
    pub const ALL_FINISHED: &str =
        "a publication succeeds only when every expected reader has finished in success";
    pub const NOTICE: &str = "a notice ends only when its source needs it no more";
    pub const ALL: [&str; 6] = [
        RIGHT_BYTES,
        NO_LIVE_WRITER,
        ENDS_ONCE,
        DEADLINE,
        ALL_FINISHED,
        NOTICE,
    ];
}

/// Size of a world.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub sources: u8,
    pub readers: u8,
    pub requests: u8,
    pub slots: u8,
    /// Publications of each source, over all its lives.
    pub publishes: u8,
    /// Imports of each reader, over all its lives.
    pub imports: u8,
    /// The ticket names the first source's slots only; the others are asked.
    pub ask: bool,
    /// Publications may share slots.
    pub share: bool,
    pub crashes: u8,
    pub restarts: u8,
    /// Times that a living peer may be declared dead.
    pub suspicions: u8,
    /// Callers may cancel and release.
    pub cancels: bool,
    pub timed: bool,
    pub claim: Duration,
    pub lease: Duration,
    pub deadline: Duration,
    pub bug: Option<Bug>,
}

impl Config {
    /// Two peers, two requests, two slots, one crash, one restart, untimed.
    pub const fn two_peers() -> Self {
        Self {
            sources: 1,
            readers: 1,
            requests: 2,
            slots: 2,
            publishes: 2,
            imports: 2,
            ask: false,
            share: false,
            crashes: 1,
            restarts: 1,
            suspicions: 0,
            cancels: false,
            timed: false,
            claim: Duration::from_secs(6),
            lease: Duration::from_secs(6),
            // Shorter than a sixth of the lease: no renewals, whose number would be unbounded.
            deadline: Duration::from_millis(500),
            bug: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    Source,
    Reader,
}

/// One lifetime of one agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    pub side: Side,
    pub index: u8,
    pub life: u8,
}

impl Peer {
    pub fn incarnation(self) -> Incarnation {
        let mut id = [0; 16];
        id[..3].copy_from_slice(&[self.side as u8, self.index, self.life]);
        Incarnation(id)
    }

    pub fn of(incarnation: Incarnation) -> Self {
        let [side, index, life, ..] = incarnation.0;
        let side = if side == Side::Source as u8 {
            Side::Source
        } else {
            Side::Reader
        };
        Self { side, index, life }
    }

    pub fn consumer(self) -> Consumer {
        Consumer {
            incarnation: self.incarnation(),
            rank: u32::from(self.index),
        }
    }
}

/// One publication, as a reader knows it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    pub source: Peer,
    pub request: u8,
    /// 0: not known.
    pub epoch: u8,
    pub slots: Vec<u8>,
    /// What the slots held when they were published. Only the checks look at it.
    pub versions: Vec<u8>,
}

impl Ticket {
    pub fn id(&self) -> PublicationId {
        PublicationId {
            source: self.source,
            request: self.request,
            epoch: self.epoch,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PublicationId {
    pub source: Peer,
    pub request: u8,
    pub epoch: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Body {
    Claim { request: u8, epoch: u8 },
    Published(Ticket),
    Renew { request: u8, epoch: u8 },
    Finished { request: u8, epoch: u8, status: i32 },
    Ack { request: u8, epoch: u8 },
    Ended { request: u8, epoch: u8, status: i32 },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub from: Peer,
    pub to: Peer,
    pub body: Body,
}

/// Memory of one life of a source; it survives that life, as a mapping does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Memory {
    /// Version in each slot; 0 = somebody else's bytes.
    pub slots: Vec<u8>,
    /// Lease word of each epoch (from 1).
    pub leases: Vec<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Published {
    pub ticket: Ticket,
    pub machine: Publication,
    pub timer: Option<Now>,
    /// Readers that have told their success.
    pub succeeded: BTreeSet<Peer>,
    pub expected: BTreeSet<Peer>,
    pub last_contact: Now,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    pub life: u8,
    pub alive: bool,
    pub published: u8,
    pub memories: Vec<Memory>,
    pub publications: Vec<Published>,
    pub awaiting: BTreeSet<(u8, Peer)>,
    pub lost: BTreeSet<Peer>,
    /// Epochs whose lease word is still to be cleared (a bug).
    pub unrevoked: BTreeSet<u8>,
}

/// One job of an import.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Job {
    pub source: Peer,
    /// `None`: the source has been asked.
    pub ticket: Option<Ticket>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Importing {
    pub request: u8,
    pub jobs: Vec<Job>,
    pub slots: Vec<u8>,
    pub machine: Import,
    pub timer: Option<Now>,
    pub deadline: Now,
    pub outcome: Option<Status>,
}

/// A worker that copies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Copying {
    pub import: u8,
    pub job: usize,
    pub ticket: Ticket,
    pub slots: Vec<u8>,
    pub read: bool,
    pub stop: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reader {
    pub life: u8,
    pub alive: bool,
    pub begun: u8,
    pub imports: BTreeMap<u8, Importing>,
    pub copies: Vec<Copying>,
    /// Which import holds each slot.
    pub writers: Vec<Option<u8>>,
    /// Version that came from each source, for each slot.
    pub memory: Vec<Vec<u8>>,
    pub notices: BTreeMap<PublicationId, (Status, Notice)>,
    pub lost: BTreeSet<Peer>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub clock: Now,
    pub sources: Vec<Source>,
    pub readers: Vec<Reader>,
    /// Untimed: a set, from which messages are delivered again and again, or never. Timed: a bag.
    pub network: Vec<Message>,
    /// The newest ticket of each (source, request), as the orchestrator passes it on.
    pub tickets: BTreeMap<(u8, u8), Ticket>,
    pub versions: u8,
    pub crashes: u8,
    pub restarts: u8,
    pub suspicions: u8,
    /// Properties that did not hold at some step.
    pub broken: BTreeSet<&'static str>,
    /// Rare things that have happened, for checks that the world is not too tame.
    pub seen: BTreeSet<&'static str>,
}

impl World {
    pub fn new(config: &Config) -> Self {
        let memory = Memory {
            slots: vec![0; config.slots.into()],
            leases: Vec::new(),
        };
        let source = Source {
            life: 0,
            alive: true,
            published: 0,
            memories: vec![memory],
            publications: Vec::new(),
            awaiting: BTreeSet::new(),
            lost: BTreeSet::new(),
            unrevoked: BTreeSet::new(),
        };
        let reader = Reader {
            life: 0,
            alive: true,
            begun: 0,
            imports: BTreeMap::new(),
            copies: Vec::new(),
            writers: vec![None; config.slots.into()],
            memory: vec![vec![0; config.sources.into()]; config.slots.into()],
            notices: BTreeMap::new(),
            lost: BTreeSet::new(),
        };
        Self {
            clock: Duration::ZERO,
            sources: vec![source; config.sources.into()],
            readers: vec![reader; config.readers.into()],
            network: Vec::new(),
            tickets: BTreeMap::new(),
            versions: 0,
            crashes: 0,
            restarts: 0,
            suspicions: 0,
            broken: BTreeSet::new(),
            seen: BTreeSet::new(),
        }
    }

    pub fn source_peer(&self, index: u8) -> Peer {
        Peer {
            side: Side::Source,
            index,
            life: self.sources[usize::from(index)].life,
        }
    }

    pub fn reader_peer(&self, index: u8) -> Peer {
        Peer {
            side: Side::Reader,
            index,
            life: self.readers[usize::from(index)].life,
        }
    }

    /// Whether this life of an agent goes on.
    pub fn lives(&self, peer: Peer) -> bool {
        let index = usize::from(peer.index);
        match peer.side {
            Side::Source => self.sources[index].life == peer.life && self.sources[index].alive,
            Side::Reader => self.readers[index].life == peer.life && self.readers[index].alive,
        }
    }

    pub(crate) fn send(&mut self, config: &Config, from: Peer, to: Peer, body: Body) {
        if !self.lives(to) {
            return;
        }
        let message = Message { from, to, body };
        if config.timed {
            if self.network.len() < 64 {
                self.network.push(message);
            }
        } else if let Err(at) = self.network.binary_search(&message) {
            self.network.insert(at, message);
        }
    }

    pub(crate) fn breaks(&mut self, property: &'static str) {
        self.broken.insert(property);
    }

    /// Names the properties that do not hold now, or did not at some step before.
    pub fn violations(&self, config: &Config) -> BTreeSet<&'static str> {
        let mut broken = self.broken.clone();
        for reader in &self.readers {
            for copy in &reader.copies {
                let held = |s: &u8| reader.writers[usize::from(*s)] == Some(copy.import);
                if !copy.slots.iter().all(held) {
                    broken.insert(property::NO_LIVE_WRITER);
                }
            }
            for (id, import) in &reader.imports {
                let late = config.timed && self.clock > import.deadline;
                if import.outcome.is_none() && (import.timer.is_none() || late) {
                    broken.insert(property::DEADLINE);
                }
                let running = reader.copies.iter().any(|c| c.import == *id);
                if import.outcome.is_some() && !running {
                    broken.insert(property::DEADLINE); // nobody will say that it is safe
                }
            }
            let untimed = |(_, n): &(Status, Notice)| n.next_deadline().is_none();
            if reader.notices.values().any(untimed) {
                broken.insert(property::DEADLINE);
            }
        }
        for publication in self.sources.iter().flat_map(|s| &s.publications) {
            let limit = publication.last_contact + config.claim.max(config.lease);
            if publication.timer.is_none() || config.timed && self.clock > limit {
                broken.insert(property::DEADLINE);
            }
        }
        broken
    }

    /// Nothing is under way any more.
    pub fn idle(&self) -> bool {
        self.sources.iter().all(|s| s.publications.is_empty())
            && self
                .readers
                .iter()
                .all(|r| r.imports.is_empty() && r.copies.is_empty() && r.notices.is_empty())
    }
}

pub(crate) fn end(status: Status) -> End {
    match status {
        Status::KVF_OK => End::ok(),
        status => End::new(status, ""),
    }
}
