//! What can happen next.

use super::*;
use kvferry::session::{notice, reader, source};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    Publish(u8, u8),
    /// The engine takes a publication back: (source, epoch).
    Withdraw(u8, u8),
    Begin(u8, u8),
    Cancel(u8, u8),
    Copy(u8, usize),
    CopyReturns(u8, usize),
    /// The lease word is cleared at last (a bug).
    Revoke(u8, u8),
    Deliver(usize),
    Drop(usize),
    Duplicate(usize),
    /// Untimed: an armed deadline passes.
    PublicationDue(u8, u8),
    ImportDue(u8, u8),
    NoticeDue(u8, PublicationId),
    /// Timed: the clock jumps, everything that is due fires.
    Advance(Duration),
    /// A new link between a reader and a source.
    Relinked(u8, Peer),
    Crash(Peer),
    Restart(Side, u8),
    /// An agent hears of the death of another one's life; (who, whom).
    Lose(Peer, Peer),
}

/// Kinds of steps, so that random tests can choose a kind first.
pub const KINDS: usize = 8;

impl Step {
    pub fn kind(&self) -> usize {
        match self {
            Self::Publish(..) => 0,
            Self::Begin(..) => 1,
            Self::Copy(..) | Self::CopyReturns(..) => 2,
            Self::Deliver(_) => 3,
            Self::Drop(_) | Self::Duplicate(_) => 4,
            Self::Advance(_)
            | Self::PublicationDue(..)
            | Self::ImportDue(..)
            | Self::NoticeDue(..)
            | Self::Revoke(..) => 5,
            Self::Withdraw(..) | Self::Cancel(..) | Self::Relinked(..) => 6,
            Self::Crash(_) | Self::Restart(..) | Self::Lose(..) => 7,
        }
    }
}

impl World {
    /// All steps that are possible now.
    pub fn steps(&self, config: &Config) -> Vec<Step> {
        let mut steps = Vec::new();
        for index in 0..config.sources {
            self.source_steps(config, index, &mut steps);
        }
        for index in 0..config.readers {
            self.reader_steps(config, index, &mut steps);
        }
        for at in 0..self.network.len() {
            steps.push(Step::Deliver(at));
            if config.timed {
                steps.push(Step::Drop(at));
                steps.push(Step::Duplicate(at));
            }
        }
        if config.timed {
            for share in [1, 4, 12] {
                steps.push(Step::Advance(config.lease / 12 * share));
            }
            steps.push(Step::Advance(Duration::from_millis(1)));
        }
        self.death_steps(config, &mut steps);
        steps
    }

    fn source_steps(&self, config: &Config, index: u8, steps: &mut Vec<Step>) {
        let source = &self.sources[usize::from(index)];
        if !source.alive {
            return;
        }
        for request in 0..config.requests {
            let live = source
                .publications
                .iter()
                .any(|p| p.ticket.request == request);
            if !live
                && source.published < config.publishes
                && self.free_source_slots(config, index).is_some()
            {
                steps.push(Step::Publish(index, request));
            }
        }
        for publication in &source.publications {
            let epoch = publication.ticket.epoch;
            if config.cancels {
                steps.push(Step::Withdraw(index, epoch));
            }
            if !config.timed && publication.timer.is_some() {
                steps.push(Step::PublicationDue(index, epoch));
            }
        }
        for epoch in &source.unrevoked {
            steps.push(Step::Revoke(index, *epoch));
        }
    }

    fn reader_steps(&self, config: &Config, index: u8, steps: &mut Vec<Step>) {
        let reader = &self.readers[usize::from(index)];
        if !reader.alive {
            return;
        }
        for request in 0..config.requests {
            let same = reader.imports.values().any(|i| i.request == request);
            if !same
                && reader.begun < config.imports
                && let Some(jobs) = self.jobs_for(config, request)
                && let count = jobs[0].ticket.as_ref().map_or(1, |t| t.slots.len())
                && self.free_reader_slots(index, count).is_some()
            {
                steps.push(Step::Begin(index, request));
            }
        }
        for (id, import) in &reader.imports {
            if config.cancels && import.outcome.is_none() {
                steps.push(Step::Cancel(index, *id));
            }
            if !config.timed && import.timer.is_some() {
                steps.push(Step::ImportDue(index, *id));
            }
        }
        for (at, copy) in reader.copies.iter().enumerate() {
            if !copy.read {
                // Also when it shall stop: the piece under way is finished first.
                steps.push(Step::Copy(index, at));
            }
            if copy.read || copy.stop {
                steps.push(Step::CopyReturns(index, at));
            }
        }
        let me = self.reader_peer(index);
        for id in reader.notices.keys() {
            if config.timed {
                steps.push(Step::Relinked(index, id.source));
            } else if !self.source_needs(*id, me) {
                // The only coupling of two clocks: both of the source's deadlines are over when
                // a notice is given up.
                steps.push(Step::NoticeDue(index, *id));
            }
        }
    }

    fn death_steps(&self, config: &Config, steps: &mut Vec<Step>) {
        let mut all: Vec<Peer> = (0..config.sources).map(|i| self.source_peer(i)).collect();
        all.extend((0..config.readers).map(|i| self.reader_peer(i)));
        for peer in &all {
            if self.lives(*peer) {
                if self.crashes < config.crashes {
                    steps.push(Step::Crash(*peer));
                }
            } else if self.restarts < config.restarts {
                steps.push(Step::Restart(peer.side, peer.index));
            }
        }
        for who in all.iter().filter(|p| self.lives(**p)) {
            for whom in all.iter().filter(|p| p.side != who.side) {
                let lost = match who.side {
                    Side::Source => &self.sources[usize::from(who.index)].lost,
                    Side::Reader => &self.readers[usize::from(who.index)].lost,
                };
                for life in 0..=whom.life {
                    let whom = Peer { life, ..*whom };
                    let suspicion = self.lives(whom);
                    if !lost.contains(&whom) && (!suspicion || self.suspicions < config.suspicions)
                    {
                        steps.push(Step::Lose(*who, whom));
                    }
                }
            }
        }
    }

    pub fn apply(&mut self, config: &Config, step: Step) {
        let now = self.clock;
        match step {
            Step::Publish(index, request) => self.publish(config, index, request),
            Step::Withdraw(index, epoch) => {
                let event = source::Event::Withdrawn(end(Status::KVF_ERR_CANCELLED));
                self.publication_event(config, index, epoch, event, now);
            }
            Step::Begin(index, request) => self.begin(config, index, request),
            Step::Cancel(index, id) => {
                self.import_event(config, index, id, reader::Event::Cancel, now);
            }
            Step::Copy(index, at) => self.copy(config, index, at),
            Step::CopyReturns(index, at) => self.copy_returns(config, index, at),
            Step::Revoke(index, epoch) => {
                let source = &mut self.sources[usize::from(index)];
                source.unrevoked.remove(&epoch);
                let memory = &mut source.memories[usize::from(source.life)];
                memory.leases[usize::from(epoch) - 1] = false;
            }
            Step::Deliver(at) => self.deliver(config, at),
            Step::Drop(at) => drop(self.network.remove(at)),
            Step::Duplicate(at) => {
                if self.network.len() < 64 {
                    self.network.push(self.network[at].clone());
                }
            }
            Step::PublicationDue(index, epoch) => self.publication_due(config, index, epoch),
            Step::ImportDue(index, id) => self.import_due(config, index, id),
            Step::NoticeDue(index, id) => {
                let late = config.claim.max(config.lease);
                self.notice_event(config, index, id, notice::Event::Tick, late);
            }
            Step::Advance(by) => {
                self.clock += by;
                self.fire(config);
            }
            Step::Relinked(index, source) => {
                let ids: Vec<_> = self.reader(index).notices.keys().copied().collect();
                for id in ids.into_iter().filter(|id| id.source == source) {
                    self.notice_event(config, index, id, notice::Event::Linked, now);
                }
            }
            Step::Crash(peer) => self.crash(peer),
            Step::Restart(side, index) => self.restart(config, side, index),
            Step::Lose(who, whom) => {
                if self.lives(whom) {
                    self.suspicions += 1;
                }
                match who.side {
                    Side::Source => self.source_loses(config, who.index, whom),
                    Side::Reader => self.reader_loses(config, who.index, whom),
                }
            }
        }
    }

    fn deliver(&mut self, config: &Config, at: usize) {
        let message = if config.timed {
            self.network.remove(at)
        } else {
            self.network[at].clone()
        };
        if self.lives(message.to) {
            match message.to.side {
                Side::Source => self.source_hears(config, message),
                Side::Reader => self.reader_hears(config, message),
            }
        }
    }

    fn publication_due(&mut self, config: &Config, index: u8, epoch: u8) {
        let publications = &self.sources[usize::from(index)].publications;
        let found = publications.iter().find(|p| p.ticket.epoch == epoch);
        if let Some(at) = found.and_then(|p| p.timer) {
            self.publication_event(
                config,
                index,
                epoch,
                source::Event::Tick,
                at.max(self.clock),
            );
        }
    }

    fn import_due(&mut self, config: &Config, index: u8, id: u8) {
        let import = self.readers[usize::from(index)].imports.get(&id);
        if let Some(at) = import.and_then(|i| i.timer) {
            self.import_event(config, index, id, reader::Event::Tick, at.max(self.clock));
        }
    }

    /// Everything that is due.
    fn fire(&mut self, config: &Config) {
        let now = self.clock;
        for index in 0..config.sources {
            let publications = &self.sources[usize::from(index)].publications;
            let due = publications
                .iter()
                .filter(|p| p.timer.is_some_and(|at| at <= now));
            for epoch in due.map(|p| p.ticket.epoch).collect::<Vec<_>>() {
                self.publication_due(config, index, epoch);
            }
        }
        for index in 0..config.readers {
            let imports = &self.readers[usize::from(index)].imports;
            let due = imports
                .iter()
                .filter(|(_, i)| i.timer.is_some_and(|at| at <= now));
            for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.import_due(config, index, id);
            }
            let notices = &self.readers[usize::from(index)].notices;
            let due = notices
                .iter()
                .filter(|(_, (_, n))| n.next_deadline().is_some_and(|at| at <= now));
            for id in due.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.notice_event(config, index, id, notice::Event::Tick, now);
            }
        }
    }

    fn crash(&mut self, peer: Peer) {
        self.crashes += 1;
        self.seen.insert("an agent crashes");
        match peer.side {
            Side::Source => {
                let source = &mut self.sources[usize::from(peer.index)];
                source.alive = false;
                source.publications.clear();
                source.unrevoked.clear();
                source.awaiting.clear();
                source.lost.clear();
            }
            Side::Reader => {
                let reader = self.reader(peer.index);
                reader.alive = false;
                reader.imports.clear();
                reader.copies.clear();
                reader.notices.clear();
                reader.lost.clear();
                reader.writers.fill(None);
                reader.memory.iter_mut().for_each(|m| m.fill(0));
            }
        }
        self.network.retain(|m| m.to != peer);
    }

    fn restart(&mut self, config: &Config, side: Side, index: u8) {
        self.restarts += 1;
        match side {
            Side::Source => {
                let source = &mut self.sources[usize::from(index)];
                source.alive = true;
                source.life += 1;
                source.memories.push(Memory {
                    slots: vec![0; config.slots.into()],
                    leases: Vec::new(),
                });
            }
            Side::Reader => {
                let reader = self.reader(index);
                reader.alive = true;
                reader.life += 1;
            }
        }
    }
}
