//! The control thread's table of imports: events in, actions of the session machine out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::begin::lease_of;
use super::control::{Control, Timer};
use super::copying::Run;
use super::gates::Gated;
use super::import_cell::{Decider, ImportCell};
use super::notices::Finished;
use super::peers::{PeerShared, Route};
use super::serving::data_open;
use super::ticket::key;
use super::wants::{Wants, add_part_bytes, bind, parts_moved};
use super::{lock, metadata};
use crate::cuda::Gate;
use crate::error::Status;
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::memory::Pool;
use crate::observe::fault;
use crate::observe::metrics::Notice;
use crate::plan::Pair;
use crate::session::reader::{self, Action, Event};
use crate::session::{End, Now};
use crate::transport::ReadJob;
use crate::wire::{self, Body};

/// One source rank's part of an import.
pub(super) struct NewJob {
    pub pair: Arc<Pair>,
    /// Epoch 0: the source has to be asked what it published.
    pub id: PublicationId,
    pub job: Option<Arc<ReadJob>>,
    /// Parts of the import that the job moves bytes of.
    pub parts: Vec<usize>,
    /// The source's stream has not come so far: its word has to be waited for.
    pub gated: bool,
    /// The begin call has made its run: workers, or a caller that waits, may be at work on it.
    pub started: bool,
}

/// An import on its way to the control thread.
pub(super) struct NewImport {
    pub cell: Arc<ImportCell>,
    /// One for each job.
    pub routes: Vec<Arc<Route>>,
    pub jobs: Vec<NewJob>,
    pub wants: Arc<Wants>,
    pub pools: BTreeMap<u32, Arc<Pool>>,
    pub deadline: Now,
    pub lease: Duration,
    pub priority: i32,
    /// A receive: jobs come with the senders' pushes.
    pub offer: Option<u64>,
    /// A receive: the engine that will push, if the caller knows it.
    pub sender: Option<Arc<PeerShared>>,
    /// Nothing is written before it is open.
    pub gate: Option<Gate>,
}

pub(super) struct Import {
    pub(super) new: NewImport,
    pub(super) machine: reader::Import,
}

impl Import {
    /// Ends the cell without the machine: the control thread itself is broken.
    pub fn fail_for_good(&self, end: &End) {
        self.new.cell.cell.end(end.clone());
    }
}

impl Control {
    pub fn begin_import(&mut self, mut new: NewImport) {
        let gate = new.gate.take();
        let (id, now) = (new.cell.cell.id, self.now());
        // Six signs of life a lease: three may be late.
        let machine = reader::Import::new(now, new.jobs.len(), new.deadline, new.lease / 6);
        self.timers.set(Timer::Import(id), machine.next_deadline());
        let jobs = new.jobs.len();
        if let Some(offer) = new.offer {
            self.offers.open(offer, None);
        }
        self.imports.insert(id, Import { new, machine });
        if let Some(gate) = gate {
            self.hold_gate(Gated::Import(id), gate);
        }
        for job in 0..jobs {
            if self
                .imports
                .get(&id)
                .is_some_and(|i| i.new.jobs[job].started)
            {
                self.already_started(id, job);
            } else {
                self.try_start(id, job);
            }
        }
        self.look_for_senders(id);
    }

    /// A job that threads may be at work on before this one knew of it.
    fn already_started(&mut self, id: u64, job: usize) {
        self.import_event(id, Event::Ready(job));
        let import = self.imports.get(&id);
        if let Some(import) = import {
            let runs = lock(&import.new.cell.runs).clone();
            for run in runs {
                if run.is_open() && fault::deviates("left_to_the_caller") {
                    continue;
                }
                if run.call_workers(&self.shared, &import.new.cell, 0) {
                    self.shared.callers_wait.store(false, Ordering::Relaxed);
                }
            }
        }
        if let Some(Err(e)) = import.and_then(|import| import.new.routes[job].get()) {
            self.import_event(id, Event::SourceLost(job, End::new(e.status, e.text)));
        }
    }

    /// Starts what only waited for the gate.
    pub fn start_jobs(&mut self, id: u64) {
        let jobs = self.imports.get(&id).map_or(0, |i| i.new.jobs.len());
        for job in 0..jobs {
            self.try_start(id, job);
        }
    }

    /// A source's stream has come so far: what it published may be read.
    pub fn source_readable(&mut self, publication: PublicationId) {
        for (id, at) in self.jobs_from(publication.source) {
            if let Some(import) = self.imports.get_mut(&id)
                && import.new.jobs[at].id == publication
            {
                import.new.jobs[at].gated = false;
                self.try_start(id, at);
            }
        }
    }

    /// Starts a job whose route and slots are known; asks for what is missing.
    pub fn try_start(&mut self, id: u64, job: usize) {
        let Some(import) = self.imports.get(&id) else {
            return;
        };
        let (Some(new), Some(route)) = (import.new.jobs.get(job), import.new.routes.get(job))
        else {
            return;
        };
        if new.job.is_none() {
            let asked = wire::Claim {
                key: Some(new.id.key.into()),
                epoch: 0,
            };
            if import.new.offer.is_none() {
                self.send_to(new.id.source, Body::Claim(asked));
            }
            if let Some(Err(e)) = route.get() {
                self.import_event(id, Event::SourceLost(job, End::new(e.status, e.text)));
            }
            return;
        }
        if new.gated && matches!(route.get(), Some(Ok(_))) {
            // The claim asks for word from the source.
            let claim = wire::Claim {
                key: Some(new.id.key.into()),
                epoch: new.id.epoch.0,
            };
            return self.send_to(new.id.source, Body::Claim(claim));
        }
        match route.get() {
            Some(Ok(_)) if self.gates.contains_key(&Gated::Import(id)) => {}
            Some(Ok(path)) if !path.is_usable() => self.renew_path(new.id.source),
            Some(Ok(_)) => self.import_event(id, Event::Ready(job)),
            Some(Err(e)) => {
                self.import_event(id, Event::SourceLost(job, End::new(e.status, e.text)));
            }
            None => {}
        }
    }

    /// Feeds an import's machine and does what it says.
    pub fn import_event(&mut self, id: u64, event: Event) {
        let now = self.now();
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let before = import.machine.clone();
        let mut actions = import.machine.on(event, now);
        let decides = actions.iter().any(|a| matches!(a, Action::Outcome(_)));
        let by_worker = decides && !import.new.cell.decide(Decider::Control);
        if by_worker && !import.machine.outcome().is_some_and(End::is_ok) {
            // Too late: the import's one job has succeeded, and the worker's word of it is coming.
            // It is taken now, so that also an agent that ends meanwhile tells the source the same.
            import.machine = before;
            actions = import.machine.on(Event::Stopped(0, End::ok()), now);
        }
        let next = import.machine.next_deadline();
        self.timers.set(Timer::Import(id), next);
        let safe = actions.contains(&Action::MemorySafe);
        if safe {
            self.free_slots(id);
        }
        for action in actions {
            match action {
                Action::Start(job) => self.start(id, job),
                Action::Stop(job) => {
                    if let Some(job) = self.job(id, job) {
                        job.cancel();
                    }
                }
                Action::Renew(job) => self.renew(id, job),
                Action::Outcome(end) if by_worker => self.log_end(id, &end),
                Action::Outcome(end) => self.outcome(id, end, safe),
                Action::Tell(job, end) => self.tell_source(id, job, &end),
                Action::MemorySafe => {
                    self.gates.remove(&Gated::Import(id));
                    if let Some(import) = self.imports.remove(&id) {
                        if !by_worker {
                            import.new.cell.cell.make_safe(false); // the worker says it with the end
                        }
                        let pools = import.new.cell.pools.clone();
                        // Our references to the pools go before "may be freed" can be said.
                        import.new.cell.settle();
                        drop(import);
                        self.operation_ended(&pools);
                    }
                    self.offer_over(id);
                }
            }
        }
    }

    fn free_slots(&self, id: u64) {
        if let Some(import) = self.imports.get(&id) {
            import.new.cell.free_slots(&self.shared);
        }
    }

    fn outcome(&mut self, id: u64, mut end: End, safe: bool) {
        if let Some(import) = self.imports.get(&id) {
            if end.status == Status::KVF_ERR_DEADLINE {
                // Who was waited for, and what is known of it.
                let waited = import.new.routes.iter().map(|route| route.describe());
                end.text.extend(waited.map(|peer| format!("; {peer}")));
            }
            self.log_end(id, &end);
            import.new.cell.report(&self.shared, end, safe);
        }
    }

    /// Here and not where the end is told: a callback runs on no thread of the caller.
    fn log_end(&self, id: u64, end: &End) {
        if let Some(import) = self.imports.get(&id) {
            self.shared.log.debug(format_args!(
                "import {id} of {} ended: {:?} {}",
                import.new.cell.cell.key, end.status, end.text
            ));
        }
    }

    fn job(&self, id: u64, job: usize) -> Option<Arc<ReadJob>> {
        self.imports.get(&id)?.new.jobs.get(job)?.job.clone()
    }

    fn start(&mut self, id: u64, at: usize) {
        let Some(import) = self.imports.get(&id) else {
            return;
        };
        let (new, route) = (&import.new.jobs[at], &import.new.routes[at]);
        let Some(job) = new.job.clone() else { return };
        let claim = wire::Claim {
            key: Some(new.id.key.into()),
            epoch: new.id.epoch.0,
        };
        if new.parts.is_empty() {
            return self.import_event(id, Event::Stopped(at, End::ok()));
        }
        let path = match route.get() {
            _ if new.started => None,
            Some(Ok(path)) => Some(path),
            Some(Err(e)) => {
                let end = End::new(e.status, e.text);
                return self.import_event(id, Event::Stopped(at, end));
            }
            None => {
                let end = End::new(Status::KVF_ERR_PEER_LOST, "the peer went away");
                return self.import_event(id, Event::Stopped(at, end));
            }
        };
        let (cell, alone) = (import.new.cell.clone(), import.new.jobs.len() == 1);
        let (parts, route) = (new.parts.clone(), route.clone());
        let priority = import.new.priority;
        self.send_to(new.id.source, Body::Claim(claim));
        fault::point("claimed");
        if let Some(path) = path {
            let run = Run::new(at, alone, priority, job, path, route);
            run.submit(&self.shared, &cell, &parts);
        }
    }

    fn renew(&self, id: u64, job: usize) {
        if let Some(import) = self.imports.get(&id)
            && let Some(new) = import.new.jobs.get(job)
            && new.id.epoch != Epoch(0)
        {
            let renew = wire::Renew {
                key: Some(new.id.key.into()),
                epoch: new.id.epoch.0,
            };
            self.send_to(new.id.source, Body::Renew(renew));
        }
    }

    fn tell_source(&mut self, id: u64, job: usize, end: &End) {
        let Some(import) = self.imports.get(&id) else {
            return;
        };
        if let Some(new) = import.new.jobs.get(job) {
            let finished = Finished {
                id: new.id,
                status: end.status,
                bytes: new.job.as_ref().map_or(0, |job| job.moved()),
                lease: import.new.lease,
            };
            // Without a word from a sender there is nobody to tell.
            if new.id.epoch != Epoch(0) || import.new.offer.is_none() {
                self.tell_finished(finished);
            }
        }
    }

    /// (import, job) pairs that read from an agent.
    fn jobs_from(&self, agent: Incarnation) -> Vec<(u64, usize)> {
        let mut found = Vec::new();
        for (id, import) in &self.imports {
            for (at, job) in import.new.jobs.iter().enumerate() {
                if job.id.source == agent {
                    found.push((*id, at));
                }
            }
        }
        found
    }

    /// A route became known, or its link is new.
    pub fn route_changed(&mut self, agent: Incarnation) {
        for (id, job) in self.jobs_from(agent) {
            self.try_start(id, job);
        }
    }

    /// An agent died: imports from it fail.
    pub fn sources_lost(&mut self, agent: Incarnation, end: &End) {
        for (id, job) in self.jobs_from(agent) {
            self.import_event(id, Event::SourceLost(job, end.clone()));
        }
        for id in self.receives_from(agent) {
            self.look_for_senders(id);
        }
    }

    /// A source said that a publication has ended.
    pub fn on_ended(&mut self, agent: Incarnation, ended: &wire::Ended) {
        let key = key(ended.key);
        let end = End::new(
            metadata::status(ended.status),
            format!("the source ended the publication: {}", ended.text),
        );
        let publication = PublicationId {
            source: agent,
            key,
            epoch: Epoch(ended.epoch),
        };
        let mut late = !self.notice_event(publication, crate::session::notice::Event::Ended);
        for (id, at) in self.jobs_from(agent) {
            let matches = self.imports.get(&id).is_some_and(|import| {
                let job = &import.new.jobs[at].id;
                job.key == key && (job.epoch == Epoch(ended.epoch) || job.epoch == Epoch(0))
            });
            if matches {
                late = false;
                self.import_event(id, Event::SourceLost(at, end.clone()));
            }
        }
        if late {
            self.count_late(agent, Notice::Ended);
        }
    }

    /// A source said what it has published: bind and start what waited for it.
    pub fn on_published(&mut self, agent: Incarnation, published: &wire::Published) {
        self.resolve_notice(agent, published);
        let key = key(published.key);
        let Some(entry) = &published.entry else {
            return;
        };
        for (id, at) in self.jobs_from(agent) {
            let waits = self.imports.get(&id).is_some_and(|import| {
                let job = &import.new.jobs[at];
                job.job.is_none() && job.id.key == key && import.new.offer.is_none()
            });
            if waits {
                self.resolve_job(id, at, entry);
            }
        }
    }

    /// Gives a job its source's slots.
    pub fn resolve_job(&mut self, id: u64, at: usize, entry: &wire::TicketEntry) {
        let Some(import) = self.imports.get_mut(&id) else {
            return;
        };
        let new = &mut import.new;
        new.jobs[at].id.epoch = Epoch(entry.epoch);
        new.jobs[at].gated = entry.gated;
        match bind(&new.jobs[at].pair, &new.wants, entry) {
            Ok(bindings) => {
                add_part_bytes(&mut lock(&new.cell.part_bytes), &bindings);
                new.jobs[at].parts = parts_moved(&new.jobs[at].pair, &new.wants, &bindings);
                let bindings = bindings.into_iter().map(|(_, b)| b).collect();
                let request = data_open(new.wants.clone(), new.cell.cell.key, entry.epoch);
                let (pools, lease) = (new.pools.clone(), lease_of(entry));
                let job = Arc::new(ReadJob::new(bindings, pools, lease, request));
                lock(&new.cell.jobs).push(job.clone());
                new.jobs[at].job = Some(job);
                self.try_start(id, at);
            }
            Err(e) => self.import_event(id, Event::SourceLost(at, End::new(e.status, e.text))),
        }
    }
}
