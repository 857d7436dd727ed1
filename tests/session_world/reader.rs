//! What the agent's reader side does around the machines.

use super::*;
use kvferry::session::notice;
use kvferry::session::reader::{Action, Event};

impl World {
    pub(crate) fn reader(&mut self, index: u8) -> &mut Reader {
        &mut self.readers[usize::from(index)]
    }

    /// The tickets of a request, one for each source, if the orchestrator has what it takes.
    pub(crate) fn jobs_for(&self, config: &Config, request: u8) -> Option<Vec<Job>> {
        let mut jobs = Vec::new();
        for index in 0..config.sources {
            let ticket = self.tickets.get(&(index, request)).cloned();
            let ticket = ticket.filter(|_| index == 0 || !config.ask);
            if ticket.is_none() && !(config.ask && index > 0) {
                return None;
            }
            let source = match &ticket {
                Some(ticket) => ticket.source,
                None => self.source_peer(index),
            };
            jobs.push(Job { source, ticket });
        }
        Some(jobs)
    }

    pub(crate) fn free_reader_slots(&self, index: u8, count: usize) -> Option<Vec<u8>> {
        let writers = &self.readers[usize::from(index)].writers;
        let free = (0u8..).zip(writers).filter(|(_, w)| w.is_none());
        let slots: Vec<u8> = free.map(|(slot, _)| slot).take(count).collect();
        (slots.len() == count).then_some(slots)
    }

    pub(crate) fn begin(&mut self, config: &Config, index: u8, request: u8) {
        let Some(jobs) = self.jobs_for(config, request) else {
            return;
        };
        let count = jobs[0].ticket.as_ref().map_or(1, |t| t.slots.len());
        let Some(slots) = self.free_reader_slots(index, count) else {
            return;
        };
        let (now, count) = (self.clock, jobs.len());
        let deadline = now + config.deadline;
        let machine = Import::new(now, count, deadline, config.lease / 6);
        let reader = self.reader(index);
        let id = reader.begun;
        reader.begun += 1;
        for slot in &slots {
            reader.writers[usize::from(*slot)] = Some(id);
        }
        let import = Importing {
            request,
            jobs,
            slots,
            timer: machine.next_deadline(),
            machine,
            deadline,
            outcome: None,
        };
        reader.imports.insert(id, import);
        for job in 0..count {
            self.try_start(config, index, id, job);
        }
    }

    fn try_start(&mut self, config: &Config, index: u8, id: u8, at: usize) {
        let me = self.reader_peer(index);
        let reader = self.reader(index);
        let Some(import) = reader.imports.get(&id) else {
            // Only a broken driver would still start something.
            return;
        };
        let (request, job) = (import.request, import.jobs[at].clone());
        if reader.lost.contains(&job.source) {
            let event = Event::SourceLost(at, end(Status::KVF_ERR_PEER_LOST));
            return self.import_event(config, index, id, event, self.clock);
        }
        match job.ticket {
            Some(_) => {
                if import.outcome.is_some() && config.bug == Some(Bug::StartedAfterTheEnd) {
                    return self.start(config, index, id, at);
                }
                self.import_event(config, index, id, Event::Ready(at), self.clock);
            }
            None => {
                let body = Body::Claim { request, epoch: 0 };
                self.send(config, me, job.source, body);
            }
        }
    }

    pub(crate) fn import_event(
        &mut self,
        config: &Config,
        index: u8,
        id: u8,
        event: Event,
        now: Now,
    ) {
        let me = self.reader_peer(index);
        let Some(import) = self.reader(index).imports.get_mut(&id) else {
            return;
        };
        let first = matches!(&event, Event::Stopped(_, end) if end.is_ok());
        let actions = import.machine.on(event, now);
        import.timer = import.machine.next_deadline();
        for action in actions {
            match action {
                Action::Start(job) => self.start(config, index, id, job),
                Action::Stop(job) => {
                    let copies = self.reader(index).copies.iter_mut();
                    for copy in copies.filter(|c| c.import == id && c.job == job) {
                        copy.stop = true;
                    }
                }
                Action::Renew(job) => {
                    let import = self.reader(index).imports.get(&id);
                    let job = import.map(|i| i.jobs[job].clone());
                    if let Some(Job {
                        source,
                        ticket: Some(t),
                    }) = job
                    {
                        let (request, epoch) = (t.request, t.epoch);
                        self.send(config, me, source, Body::Renew { request, epoch });
                    }
                }
                Action::Outcome(end) => self.outcome(config, index, id, &end),
                Action::Tell(job, end) => self.tell(config, index, id, job, &end),
                Action::MemorySafe => self.memory_safe(index, id),
            }
        }
        if first && config.bug == Some(Bug::SuccessOfFirstJob) {
            self.outcome(config, index, id, &End::ok());
        }
    }

    fn start(&mut self, config: &Config, index: u8, id: u8, at: usize) {
        let me = self.reader_peer(index);
        let reader = self.reader(index);
        let Some(import) = reader.imports.get(&id) else {
            return;
        };
        let Some(ticket) = import.jobs[at].ticket.clone() else {
            return;
        };
        if ticket.slots.len() != import.slots.len() {
            // Another source published another number of slots: `bind` refuses that.
            let event = Event::Stopped(at, end(Status::KVF_ERR_OUT_OF_RANGE));
            return self.import_event(config, index, id, event, self.clock);
        }
        let (request, epoch, source) = (ticket.request, ticket.epoch, ticket.source);
        let slots = import.slots.clone();
        reader.copies.push(Copying {
            import: id,
            job: at,
            ticket,
            slots,
            read: false,
            stop: false,
        });
        self.send(config, me, source, Body::Claim { request, epoch });
    }

    /// The memory that a copy reaches.
    fn reached(&self, config: &Config, source: Peer) -> &Memory {
        let found = &self.sources[usize::from(source.index)];
        let life = match config.bug {
            Some(Bug::IncarnationCheckRemoved) => found.life,
            _ => source.life,
        };
        &found.memories[usize::from(life)]
    }

    /// A worker copies its bytes.
    pub(crate) fn copy(&mut self, config: &Config, index: u8, at: usize) {
        let Some(copy) = self.readers[usize::from(index)].copies.get(at).cloned() else {
            return;
        };
        let memory = self.reached(config, copy.ticket.source);
        let from = copy
            .ticket
            .slots
            .iter()
            .map(|s| memory.slots[usize::from(*s)]);
        let versions: Vec<u8> = from.collect();
        let source = usize::from(copy.ticket.source.index);
        let reader = self.reader(index);
        for (slot, version) in copy.slots.iter().zip(versions) {
            reader.memory[usize::from(*slot)][source] = version;
        }
        reader.copies[at].read = true;
    }

    /// A worker returns: attested, or stopped early.
    pub(crate) fn copy_returns(&mut self, config: &Config, index: u8, at: usize) {
        let copy = self.reader(index).copies.remove(at);
        let memory = self.reached(config, copy.ticket.source);
        let holds = memory.leases.get(usize::from(copy.ticket.epoch) - 1) == Some(&true);
        let status = if !copy.read {
            Status::KVF_ERR_CANCELLED
        } else if holds || config.bug == Some(Bug::AttestationSkipped) {
            Status::KVF_OK
        } else {
            self.seen.insert("a copy finds its lease ended");
            Status::KVF_ERR_EXPIRED
        };
        let event = Event::Stopped(copy.job, end(status));
        self.import_event(config, index, copy.import, event, self.clock);
    }

    fn outcome(&mut self, config: &Config, index: u8, id: u8, end: &End) {
        let Some(import) = self.reader(index).imports.get_mut(&id) else {
            return;
        };
        let twice = import.outcome.replace(end.status).is_some();
        let (slots, jobs) = (import.slots.clone(), import.jobs.clone());
        if twice {
            self.breaks(property::ENDS_ONCE);
        }
        if end.is_ok() {
            self.seen.insert("an import succeeds");
            for job in &jobs {
                let memory = &self.readers[usize::from(index)].memory;
                let source = usize::from(job.source.index);
                let have = slots.iter().map(|s| memory[usize::from(*s)][source]);
                let right = (job.ticket.as_ref()).is_some_and(|t| have.eq(t.versions.clone()));
                if !right {
                    self.breaks(property::RIGHT_BYTES);
                }
            }
        }
        let freed = match config.bug {
            Some(Bug::FreedOnTimeOut) => end.status == Status::KVF_ERR_DEADLINE,
            Some(Bug::MemorySafeBeforeTheCopyStopped) => true,
            _ => false,
        };
        if freed {
            self.free_slots(index, id);
        }
    }

    fn free_slots(&mut self, index: u8, id: u8) {
        let reader = self.reader(index);
        for (slot, writer) in reader.writers.iter_mut().enumerate() {
            if *writer == Some(id) {
                *writer = None;
                reader.memory[slot].fill(0);
            }
        }
    }

    fn memory_safe(&mut self, index: u8, id: u8) {
        self.free_slots(index, id);
        let import = self.reader(index).imports.remove(&id);
        if import.is_none_or(|i| i.outcome.is_none()) {
            self.breaks(property::ENDS_ONCE);
        }
    }

    fn tell(&mut self, config: &Config, index: u8, id: u8, at: usize, end: &End) {
        let reader = &self.readers[usize::from(index)];
        let Some(import) = reader.imports.get(&id) else {
            return;
        };
        let job = &import.jobs[at];
        let publication = PublicationId {
            source: job.source,
            request: import.request,
            epoch: job.ticket.as_ref().map_or(0, |t| t.epoch),
        };
        if reader.copies.iter().any(|c| c.import == id) {
            self.seen.insert("an import ends before its copy");
        }
        self.tell_finished(config, index, publication, end.status);
    }

    fn tell_finished(&mut self, config: &Config, index: u8, id: PublicationId, status: Status) {
        let now = self.clock;
        if self.reader(index).lost.contains(&id.source) {
            return;
        }
        let notice = Notice::new(now, config.claim, config.lease);
        self.reader(index).notices.insert(id, (status, notice));
        self.send_notice(config, index, id);
        if config.bug == Some(Bug::NoticeNotRepeated) {
            self.notice_event(config, index, id, notice::Event::Acknowledged, now);
        }
    }

    fn send_notice(&mut self, config: &Config, index: u8, id: PublicationId) {
        let me = self.reader_peer(index);
        let Some((status, _)) = self.reader(index).notices.get(&id) else {
            return;
        };
        let (request, epoch, status) = (id.request, id.epoch, *status);
        let body = if epoch == 0 {
            Body::Claim { request, epoch }
        } else {
            let publications = &mut self.sources[usize::from(id.source.index)].publications;
            let told = |p: &&mut Published| p.ticket.id() == id;
            // What the source will be told for sure; the first verdict counts.
            if status == Status::KVF_OK
                && let Some(publication) = publications.iter_mut().find(told)
            {
                publication.succeeded.insert(me);
            }
            let status = status as i32;
            Body::Finished {
                request,
                epoch,
                status,
            }
        };
        self.send(config, me, id.source, body);
    }

    pub(crate) fn notice_event(
        &mut self,
        config: &Config,
        index: u8,
        id: PublicationId,
        event: notice::Event,
        now: Now,
    ) {
        let me = self.reader_peer(index);
        let Some((_, machine)) = self.reader(index).notices.get_mut(&id) else {
            return;
        };
        match machine.on(event, now) {
            Some(notice::Action::Send) => self.send_notice(config, index, id),
            Some(notice::Action::Close) => {
                self.reader(index).notices.remove(&id);
                let by_itself = matches!(event, notice::Event::Tick | notice::Event::SourceLost);
                if !by_itself && self.source_needs(id, me) {
                    self.breaks(property::NOTICE);
                }
            }
            None => {}
        }
    }

    pub(crate) fn reader_hears(&mut self, config: &Config, message: Message) {
        let Message { from, to: me, body } = message;
        let (index, now) = (me.index, self.clock);
        match body {
            Body::Ack { request, epoch } => {
                let id = PublicationId {
                    source: from,
                    request,
                    epoch,
                };
                self.notice_event(config, index, id, notice::Event::Acknowledged, now);
            }
            Body::Ended {
                request,
                epoch,
                status,
            } => {
                let id = PublicationId {
                    source: from,
                    request,
                    epoch,
                };
                self.notice_event(config, index, id, notice::Event::Ended, now);
                let status = Status::from_code(status).unwrap_or(Status::KVF_ERR_INTERNAL);
                for (id, at, job) in self.jobs_from(index, from, request) {
                    if job.ticket.is_none_or(|t| t.epoch == epoch) {
                        let event = Event::SourceLost(at, end(status));
                        self.import_event(config, index, id, event, now);
                    }
                }
            }
            Body::Published(ticket) => {
                let unknown = PublicationId {
                    epoch: 0,
                    ..ticket.id()
                };
                if let Some((status, _)) = self.reader(index).notices.remove(&unknown) {
                    self.tell_finished(config, index, ticket.id(), status);
                }
                for (id, at, job) in self.jobs_from(index, from, ticket.request) {
                    if job.ticket.is_none()
                        && let Some(import) = self.reader(index).imports.get_mut(&id)
                    {
                        import.jobs[at].ticket = Some(ticket.clone());
                        self.try_start(config, index, id, at);
                    }
                }
            }
            Body::Claim { .. } | Body::Renew { .. } | Body::Finished { .. } => {}
        }
    }

    fn jobs_from(&self, index: u8, source: Peer, request: u8) -> Vec<(u8, usize, Job)> {
        let mut found = Vec::new();
        for (id, import) in &self.readers[usize::from(index)].imports {
            for (at, job) in import.jobs.iter().enumerate() {
                if import.request == request && job.source == source {
                    found.push((*id, at, job.clone()));
                }
            }
        }
        found
    }

    pub(crate) fn reader_loses(&mut self, config: &Config, index: u8, source: Peer) {
        self.reader(index).lost.insert(source);
        let now = self.clock;
        for request in 0..config.requests {
            for (id, at, _) in self.jobs_from(index, source, request) {
                let event = Event::SourceLost(at, end(Status::KVF_ERR_PEER_LOST));
                self.import_event(config, index, id, event, now);
            }
        }
        let notices: Vec<_> = self.reader(index).notices.keys().copied().collect();
        for id in notices.into_iter().filter(|id| id.source == source) {
            self.notice_event(config, index, id, notice::Event::SourceLost, now);
        }
    }
}
