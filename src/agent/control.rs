//! The control thread: alone it owns links and session machines. Commands and frames come in
//! through queues, results go out through cells and the event queue. It sleeps until something
//! arrives or the next deadline is due.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot};

use super::api::{Event, EventKind};
use super::gates::{Gated, Gates};
use super::group::Groups;
use super::handshake::Answered;
use super::link::{INBOX, Incoming, LinkId, Socket};
use super::notices::Notices;
use super::offers::Offers;
use super::opening::{Failure, Strangers};
use super::peers::PeerShared;
use super::reader::{Import, NewImport};
use super::remote::{Greeting, Remote};
use super::shared::Shared;
use super::source::{NewPublication, Publications};
use crate::error::{Error, Status};
use crate::ids::{Incarnation, PublicationId};
use crate::plan::Plan;
use crate::session::{End, Now};
use crate::transport::DataPath;

/// What other threads ask of the control thread.
pub(super) enum Command {
    Publish(Box<NewPublication>),
    Withdraw(PublicationId, End),
    Import(Box<NewImport>),
    /// An offer that wants nothing: (id, how long a sender may still ask).
    EmptyOffer(u64, Now),
    Cancel(u64),
    /// A worker's copy of (import, job) has returned.
    Stopped(u64, usize, End),
    /// An import that ended inside its begin call: tell the sources.
    Tell(Vec<super::notices::Finished>),
    Hold(Arc<PeerShared>, Vec<super::notices::Finished>),
    AddPeer(Arc<PeerShared>),
    RemovePeer(u64),
    /// A worker has made, or failed to make, the data path to a remote agent over a link.
    Path(Incarnation, LinkId, Result<Arc<dyn DataPath>, Error>),
    /// A worker has prepared UCX for a reader that asks for our memory.
    Announce(Incarnation, Box<crate::wire::UcxMemory>),
    UnregisterPool(u32, Now, u64),
    /// What a caller's stream held is done.
    GateOpen(Gated),
    /// A device could not be stopped: the memory of (import, job) is never safe again.
    Stuck(u64, usize, End),
    /// Nothing here maps the agent's pool any more.
    Unmapped(Incarnation, u32),
    /// The process of an agent that may have had pools of ours mapped has ended.
    HolderEnded(Incarnation),
    /// Pools or the agent may have become idle.
    Idle,
    Group(super::group::Order),
    Drain(Now, oneshot::Sender<bool>),
    Shutdown(oneshot::Sender<()>),
    /// A kvferry thread panicked.
    Panicked(String),
}

/// What a timer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Publication(PublicationId),
    Awaiting(crate::ids::Key),
    Import(u64),
    Notice(PublicationId),
    Remote(Incarnation),
    Greeting(LinkId),
    Pool(u32),
    Offer(u64),
    /// A channel's alarm.
    Group(u64),
    Gates,
    Drain,
}

/// Deadlines in order; one per object.
#[derive(Default)]
pub(super) struct Timers {
    due: BTreeSet<(Now, Timer)>,
    at: HashMap<Timer, Now>,
}

impl std::hash::Hash for Timer {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        std::mem::discriminant(self).hash(state);
        match self {
            Self::Publication(id) | Self::Notice(id) => id.hash(state),
            Self::Awaiting(key) => key.hash(state),
            Self::Import(id) | Self::Greeting(id) | Self::Offer(id) | Self::Group(id) => {
                id.hash(state);
            }
            Self::Remote(id) => id.hash(state),
            Self::Pool(id) => id.hash(state),
            Self::Gates | Self::Drain => {}
        }
    }
}

impl Timers {
    /// Sets, moves or removes an object's deadline.
    pub fn set(&mut self, timer: Timer, at: Option<Now>) {
        let before = match at {
            Some(at) => self.at.insert(timer, at),
            None => self.at.remove(&timer),
        };
        if before != at {
            if let Some(before) = before {
                self.due.remove(&(before, timer));
            }
            if let Some(at) = at {
                self.due.insert((at, timer));
            }
        }
    }

    fn next(&self) -> Option<Now> {
        self.due.first().map(|(at, _)| *at)
    }

    fn pop_due(&mut self, now: Now) -> Option<(Now, Timer)> {
        let (at, timer) = *self.due.first()?;
        if at > now {
            return None;
        }
        self.due.pop_first();
        self.at.remove(&timer);
        Some((at, timer))
    }
}

/// State that only the control thread touches.
pub(super) struct Control {
    pub shared: Arc<Shared>,
    pub inbox: mpsc::Sender<(LinkId, Incoming)>,
    pub dialled: mpsc::UnboundedSender<(Incarnation, Result<Socket, Failure>)>,
    pub answered: mpsc::UnboundedSender<(u64, Answered)>,
    pub strangers: Strangers,
    pub refusal_logged: Option<Now>,
    pub died: mpsc::UnboundedSender<LinkId>,
    pub timers: Timers,
    pub peers: HashMap<u64, Arc<PeerShared>>,
    pub remotes: HashMap<Incarnation, Remote>,
    pub greetings: HashMap<LinkId, Greeting>,
    pub link_owner: HashMap<LinkId, Incarnation>,
    pub next_link: LinkId,
    pub publications: Publications,
    /// Plans from our engine to others, by the other engine's identity.
    pub outward: HashMap<Incarnation, Arc<Plan>>,
    pub imports: HashMap<u64, Import>,
    pub notices: Notices,
    pub offers: Offers,
    pub groups: Groups,
    pub gates: Gates,
    /// What hears of the ends of processes that may have device pools mapped.
    pub holders: HashMap<Incarnation, tokio::task::AbortHandle>,
    pub drains: Vec<(Now, oneshot::Sender<bool>)>,
    pub stopping: Option<oneshot::Sender<()>>,
}

/// Sockets and queues that the loop waits for.
pub(super) struct Inputs {
    pub tcp: TcpListener,
    pub unix: UnixListener,
    pub commands: mpsc::UnboundedReceiver<Command>,
}

impl Control {
    /// Runs until shutdown.
    pub async fn run(shared: Arc<Shared>, mut inputs: Inputs) {
        let (inbox, mut frames) = mpsc::channel(INBOX);
        let (dialled, mut dials) = mpsc::unbounded_channel();
        let (answered, mut answers) = mpsc::unbounded_channel();
        let (died, mut deaths) = mpsc::unbounded_channel();
        let mut control = Self {
            shared,
            inbox,
            dialled,
            answered,
            strangers: Strangers::default(),
            refusal_logged: None,
            died,
            timers: Timers::default(),
            peers: HashMap::new(),
            remotes: HashMap::new(),
            greetings: HashMap::new(),
            link_owner: HashMap::new(),
            next_link: 1,
            publications: Publications::default(),
            outward: HashMap::new(),
            imports: HashMap::new(),
            notices: Notices::default(),
            offers: Offers::default(),
            groups: Groups::default(),
            gates: Gates::default(),
            holders: HashMap::new(),
            drains: Vec::new(),
            stopping: None,
        };
        let sleep = tokio::time::sleep(Duration::ZERO);
        tokio::pin!(sleep);
        let mut turns = 0u32;
        while control.stopping.is_none() {
            // A flood of messages must not keep deadlines waiting for ever.
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(256) {
                control.fire_timers();
            }
            let next = control.timers.next();
            if let Some(at) = next {
                let at = tokio::time::Instant::from_std(control.shared.instant(at));
                if sleep.deadline() != at {
                    sleep.as_mut().reset(at);
                }
            }
            // In this order: commands first, so that a notice from outside never overtakes the
            // publication it is about; timers last, so that what has arrived counts as in time.
            tokio::select! {
                biased;
                Some(command) = inputs.commands.recv() => control.command(command),
                Some((link, incoming)) = frames.recv() => {
                    while let Ok(command) = inputs.commands.try_recv() {
                        control.command(command);
                    }
                    control.incoming(link, incoming);
                }
                Some((agent, result)) = dials.recv() => control.dial_done(agent, result),
                Some(link) = deaths.recv() => control.process_died(link),
                Some((number, answer)) = answers.recv() => control.answered(number, answer),
                Ok((stream, _)) = inputs.unix.accept() => control.accepted(Socket::Unix(stream)),
                Ok((stream, _)) = inputs.tcp.accept() => {
                    let _ = stream.set_nodelay(true);
                    control.accepted(Socket::Tcp(stream));
                }
                () = &mut sleep, if next.is_some() => control.fire_timers(),
            }
        }
        let done = control.stopping.take();
        let mapped = control.end_operations();
        control.wait_for_unmapping(mapped, &mut inputs).await;
        control.stop().await;
        if let Some(done) = done {
            let _ = done.send(());
        }
    }

    fn fire_timers(&mut self) {
        let now = self.shared.now();
        while let Some((at, timer)) = self.timers.pop_due(now) {
            match timer {
                Timer::Publication(id) => {
                    self.publication_event(id, crate::session::source::Event::Tick)
                }
                Timer::Awaiting(key) => self.publications.forget_awaiting(key),
                Timer::Import(id) => self.import_event(id, crate::session::reader::Event::Tick),
                Timer::Notice(id) => {
                    self.notice_event(id, crate::session::notice::Event::Tick);
                }
                Timer::Remote(agent) => self.remote_due(agent, now.saturating_sub(at)),
                Timer::Greeting(link) => self.greeting_late(link),
                Timer::Pool(pool) => self.pool_late(pool),
                Timer::Offer(id) => self.offer_over(id),
                Timer::Group(channel) => self.group_alarm_due(channel),
                Timer::Gates => self.check_gates(),
                Timer::Drain => self.check_drains(),
            }
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Publish(new) => self.publish(*new),
            Command::Withdraw(id, end) => {
                self.publication_event(id, crate::session::source::Event::Withdrawn(end));
            }
            Command::Import(new) => self.begin_import(*new),
            Command::EmptyOffer(id, until) => {
                self.offers.open(id, Some(Status::KVF_OK));
                self.timers.set(Timer::Offer(id), Some(until));
            }
            Command::Cancel(id) => self.import_event(id, crate::session::reader::Event::Cancel),
            Command::Stopped(id, job, end) => {
                self.import_event(id, crate::session::reader::Event::Stopped(job, end));
            }
            Command::Stuck(id, job, end) => {
                self.import_event(id, crate::session::reader::Event::SourceLost(job, end));
            }
            Command::GateOpen(what) => self.gate_open(what),
            Command::Unmapped(agent, pool) => self.unmapped(agent, pool),
            Command::Tell(finished) => finished.into_iter().for_each(|f| self.tell_finished(f)),
            Command::Hold(peer, held) => self.hold(&peer, &held),
            Command::AddPeer(peer) => self.add_peer(peer),
            Command::RemovePeer(id) => self.remove_peer(id),
            Command::Path(agent, link, result) => self.path_made(agent, link, result),
            Command::Announce(agent, ucx) => self.send_memory(agent, Some(ucx)),
            Command::UnregisterPool(pool, deadline, user_data) => {
                self.unregister_pool(pool, deadline, user_data);
            }
            Command::HolderEnded(agent) => self.holder_ended(agent),
            Command::Idle => {
                self.release_pools();
                self.check_drains();
            }
            Command::Group(order) => self.group(order),
            Command::Drain(deadline, done) => {
                self.drains.push((deadline, done));
                self.check_drains();
            }
            Command::Shutdown(done) => self.stopping = Some(done),
            Command::Panicked(text) => self.panicked(&text),
        }
    }

    /// Marks the end of an operation that used these pools.
    pub fn operation_ended(&mut self, pools: &[u32]) {
        let idle = self.shared.lock().leave_pools(pools);
        if idle {
            self.release_pools();
            self.check_drains();
        }
    }

    fn unregister_pool(&mut self, pool: u32, deadline: Now, user_data: u64) {
        self.shared.lock().pools.leave(pool, user_data, false);
        self.timers.set(Timer::Pool(pool), Some(deadline));
        self.release_pools();
    }

    /// Says "may be freed now" for pools that are leaving and have no users.
    pub fn release_pools(&mut self) {
        let (mut forgotten, mut asked) = (Vec::new(), Vec::new());
        let mut state = self.shared.lock();
        for (id, pool, user_data) in state.pools.leaving_unused() {
            if let Some(holders) = state.pools.ask_holders(id) {
                asked.extend(holders.into_iter().map(|agent| (agent, id)));
                continue;
            }
            // Readers of this process may be in the middle of a piece; then we hear of it.
            let shared = self.shared.clone();
            if !pool.close(move || shared.send(Command::Idle)) {
                continue;
            }
            let shared = self.shared.clone();
            let idle = move || shared.send(Command::Idle);
            if !self.shared.ucx.release(id, idle) {
                continue;
            }
            forgotten.extend(state.pools.release(id));
            self.timers.set(Timer::Pool(id), None);
            self.shared
                .events
                .push(pool_event(id, user_data, Status::KVF_OK));
        }
        drop(state);
        drop(forgotten); // unmapping is not for the lock
        self.ask_to_unmap(asked);
    }

    fn pool_late(&mut self, pool: u32) {
        self.release_pools();
        let mut state = self.shared.lock();
        // The pool stays registered; the caller may ask again.
        if let Some(user_data) = state.pools.stay(pool) {
            self.shared
                .events
                .push(pool_event(pool, user_data, Status::KVF_ERR_DEADLINE));
        }
    }

    fn check_drains(&mut self) {
        let (now, idle) = (self.shared.now(), self.shared.lock().live == 0);
        let idle = idle && self.notices.is_empty();
        for (deadline, done) in std::mem::take(&mut self.drains) {
            if idle || now >= deadline {
                let _ = done.send(idle);
            } else {
                self.drains.push((deadline, done));
            }
        }
        let next = self.drains.iter().map(|(at, _)| *at).min();
        self.timers.set(Timer::Drain, next);
    }

    /// A bug: everything of this agent fails, nothing hangs.
    fn panicked(&mut self, text: &str) {
        self.shared
            .closed
            .store(true, std::sync::atomic::Ordering::Release);
        self.shared
            .log
            .warn(format_args!("panic on a kvferry thread: {text}"));
        let end = End::new(
            Status::KVF_ERR_INTERNAL,
            format!("a kvferry thread panicked ({text}); destroy this agent"),
        );
        for import in self.imports.values() {
            import.fail_for_good(&end);
        }
        self.publications.fail_all(&end);
        super::group::fail_all(&self.shared, &end);
    }

    /// Ends everything that runs and lets go of the peers' memory; how many of their pools will be
    /// unmapped.
    fn end_operations(&mut self) -> usize {
        self.end_publications();
        let imports: Vec<u64> = self.imports.keys().copied().collect();
        for id in imports {
            self.import_event(id, crate::session::reader::Event::Shutdown);
        }
        let mut mapped = 0;
        for remote in self.remotes.values() {
            if let Some(Ok(path)) = remote.route.get()
                && path.mapped() > 0
            {
                mapped += path.mapped();
                let text = "this agent has shut down";
                let gone = Error::new(Status::KVF_ERR_SHUTDOWN, text);
                remote.route.set(Some(Err(gone)));
            }
        }
        mapped
    }

    /// The peers may free their pools before this process ends: they hear of it, if the last copies
    /// end soon enough.
    async fn wait_for_unmapping(&mut self, mut mapped: usize, inputs: &mut Inputs) {
        let until = tokio::time::Instant::now() + Duration::from_secs(1);
        while mapped > 0 {
            let next = tokio::time::timeout_at(until, inputs.commands.recv()).await;
            let Ok(Some(command)) = next else { return };
            mapped -= usize::from(matches!(command, Command::Unmapped(..)));
            self.command(command);
        }
    }

    async fn stop(self) {
        self.say_goodbye();
        // What was queued for the sockets goes out, so that the peers hear of everything; one that
        // does not read is not waited for.
        let links: Vec<_> = self
            .remotes
            .into_values()
            .filter_map(Remote::close)
            .collect();
        let written = async {
            for link in links {
                let _ = link.await;
            }
        };
        let _ = tokio::time::timeout(Duration::from_millis(200), written).await;
    }
}

fn pool_event(pool: u32, user_data: u64, status: Status) -> Event {
    Event {
        kind: EventKind::PoolReleased,
        object: u64::from(pool),
        user_data,
        key: crate::ids::Key::default(),
        status,
    }
}
