//! Making links: dialling, accepting, hellos and their answers.
//!
//! If both sides connect at once, the link dialled by the smaller incarnation stays.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::control::{Control, Timer};
use super::link::{Incoming, Link, LinkId, Socket, connect, unix_name};
use super::metadata::decode_engine;
use super::opening::{self, Failure, Identity, MAX_STRANGERS};
use super::remote::{Greeting, LinkState};
use super::serving::{self};
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::session::End;
use crate::transport::shm::PeerProcess;
use crate::wire::opening::{Opened, Purpose};
use crate::wire::{self, Body};
use crate::{bail, err};

/// Between two log lines about refused connections.
const LOG_PAUSE: Duration = Duration::from_secs(1);

/// How long the other side's link is waited for when both connected at once.
const LINK_COMES: Duration = Duration::from_millis(300);

/// What came of the opening of somebody's connection.
pub(super) enum Answered {
    Open(Opened, Socket),
    /// A word for the metrics, and the reason.
    Refused(&'static str, Error),
}

impl Control {
    pub fn dial(&mut self, agent: Incarnation) {
        let (now, timeout) = (self.now(), self.shared.config.timeouts.connect);
        let dialled = self.dialled.clone();
        let host = self.shared.host.clone();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        if !matches!(remote.state, LinkState::Down(_)) {
            return;
        }
        remote.state = LinkState::Dialling(now + timeout);
        remote.reach.trying(now);
        let info = remote.info();
        let unix = (info.host == host).then(|| unix_name(agent));
        let address = info.address;
        let own = Identity::of(&self.shared);
        tokio::spawn(async move {
            let attempt = async {
                let socket = connect(unix, address).await.map_err(Failure::Broken)?;
                opening::call(&own, agent, &socket).await?;
                Ok(socket)
            };
            let result = match tokio::time::timeout(timeout, attempt).await {
                Ok(result) => result,
                Err(_) => Err(Failure::Broken(err!(
                    KVF_ERR_PEER_UNREACHABLE,
                    "no answer to a connection attempt within {timeout:?}"
                ))),
            };
            let _ = dialled.send((agent, result));
        });
        self.arm_remote(agent);
    }

    pub fn dial_done(&mut self, agent: Incarnation, result: std::result::Result<Socket, Failure>) {
        let dialling = self
            .remotes
            .get(&agent)
            .is_some_and(|r| matches!(r.state, LinkState::Dialling(_)));
        if !dialling {
            return; // the other side's link came first
        }
        match result {
            Ok(socket) => {
                if let Err(e) = self.greet(agent, socket) {
                    self.dial_failed(agent, e);
                }
            }
            Err(Failure::Broken(e)) => self.dial_failed(agent, e),
            Err(Failure::Final(e)) => self.remote_lost(agent, End::new(e.status, e.text)),
        }
    }

    fn greet(&mut self, agent: Incarnation, socket: Socket) -> Result<()> {
        let own = self.shared.lock().engine()?;
        let hello = wire::Hello {
            rank: own.info.ranks[own.index].layout.coordinates.global_rank,
            engine: own.metadata.clone(),
            name: self.shared.config.name.clone(),
        };
        let link = self.open_link(socket)?;
        self.link_owner.insert(link.id, agent);
        link.send(Body::Hello(hello));
        let until = self.now() + self.shared.config.timeouts.connect;
        if let Some(remote) = self.remotes.get_mut(&agent) {
            remote.state = LinkState::Greeting(link, until);
        }
        self.arm_remote(agent);
        Ok(())
    }

    pub fn open_link(&mut self, socket: Socket) -> Result<Link> {
        let process = match socket.process() {
            Some(process) => Some(Arc::new(process?)),
            None => None,
        };
        let id = self.next_link;
        self.next_link += 1;
        let mut link = Link::start(id, socket, process.clone(), self.inbox.clone());
        if let Some(process) = process {
            link.watcher = watch(id, process, self.died.clone());
        }
        Ok(link)
    }

    /// An attempt failed: another one follows, unless nobody listening there is a death notice.
    pub fn dial_failed(&mut self, agent: Incarnation, e: Error) {
        let now = self.now();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        let pause = remote.reach.failed(now, &e.text);
        let refused = e.status == Status::KVF_ERR_PEER_LOST;
        if refused && remote.gone_if_refused() {
            return self.unreachable(agent);
        }
        self.down(agent, pause, &e);
    }

    /// Somebody has connected. Nothing but the opening is read before it has succeeded.
    pub fn accepted(&mut self, socket: Socket) {
        // Another user's process is not even asked.
        if let Some(Err(e)) = socket.process() {
            return self.refused_connection("user", &e);
        }
        while self.strangers.len() + self.greetings.len() >= MAX_STRANGERS {
            let error = err!(
                KVF_ERR_LIMIT,
                "{MAX_STRANGERS} connections have not said yet who they are: one was closed"
            );
            if !self.strangers.drop_one() && !self.drop_oldest_greeting() {
                break;
            }
            self.refused_connection("too_many", &error);
        }
        let (number, from) = (self.strangers.number(), socket.remote_ip());
        let (own, answered) = (Identity::of(&self.shared), self.answered.clone());
        let timeout = self.shared.config.timeouts.connect;
        let task = tokio::spawn(async move {
            let result = tokio::time::timeout(timeout, opening::answer(&own, &socket)).await;
            let answer = match result {
                Ok(Ok(Ok(opened))) => Answered::Open(opened, socket),
                Ok(Ok(Err(refusal))) => Answered::Refused(refusal.cause.name(), refusal.error),
                Ok(Err(e)) => Answered::Refused(
                    "broken",
                    err!(KVF_ERR_PEER_LOST, "it ended before it was open: {e}"),
                ),
                Err(_) => Answered::Refused(
                    "late",
                    err!(KVF_ERR_DEADLINE, "it was not open within {timeout:?}"),
                ),
            };
            let _ = answered.send((number, answer));
        });
        self.strangers.add(number, from, task.abort_handle());
    }

    /// The opening of a connection is over.
    pub fn answered(&mut self, number: u64, answer: Answered) {
        self.strangers.remove(number);
        let (opened, socket) = match answer {
            Answered::Open(opened, socket) => (opened, socket),
            Answered::Refused(reason, e) => return self.refused_connection(reason, &e),
        };
        match self.open_link(socket) {
            Ok(link) => {
                let until = self.now() + self.shared.config.timeouts.connect;
                self.timers.set(Timer::Greeting(link.id), Some(until));
                self.greetings.insert(link.id, Greeting { link, opened });
            }
            Err(e) => self.refused_connection("broken", &e),
        }
    }

    /// Counts, and logs one in a while: a flood must not fill the engine's log.
    fn refused_connection(&mut self, reason: &'static str, e: &Error) {
        self.shared.metrics.refused(reason);
        let now = self.now();
        if self.refusal_logged.is_some_and(|at| now < at + LOG_PAUSE) {
            return;
        }
        self.refusal_logged = Some(now);
        self.shared.log.warn(format_args!(
            "a connection was refused ({reason}): {e}; the metric refused_connections_total counts \
             them, and the next one is logged in {LOG_PAUSE:?} at the earliest"
        ));
    }

    fn drop_oldest_greeting(&mut self) -> bool {
        let Some(oldest) = self.greetings.keys().min().copied() else {
            return false;
        };
        self.timers.set(Timer::Greeting(oldest), None);
        self.greetings.remove(&oldest).is_some()
    }

    pub fn greeting_late(&mut self, link: LinkId) {
        if self.greetings.remove(&link).is_some() {
            let e = err!(KVF_ERR_DEADLINE, "it was open and said no hello");
            self.refused_connection("late", &e);
        }
    }

    pub fn first_frame(&mut self, id: LinkId, incoming: Incoming) {
        let Some(Greeting { link, opened }) = self.greetings.remove(&id) else {
            return;
        };
        self.timers.set(Timer::Greeting(id), None);
        let refused = match (incoming, opened.purpose) {
            (Incoming::Frame(Body::Hello(hello), _), Purpose::Control) => self
                .hello(opened.agent, link, &hello)
                .map_err(|e| ("hello", e.context(format!("agent {:?}", hello.name)))),
            (Incoming::Frame(Body::DataHello(hello), _), Purpose::Data) => self
                .data_hello(opened.agent, link, &hello)
                .map_err(|e| ("data", e)),
            (Incoming::Frame(..), _) => Err((
                "malformed",
                err!(KVF_ERR_PROTOCOL, "something else than a hello came first"),
            )),
            (Incoming::Closed(e), _) => Err(("broken", e)),
        };
        if let Err((reason, e)) = refused {
            self.refused_connection(reason, &e);
        }
    }

    /// A reader's data connection: a thread of its own serves it.
    fn data_hello(&self, agent: Incarnation, link: Link, hello: &wire::DataHello) -> Result<()> {
        let fd = link
            .into_fd()
            .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "data connection", &e))?;
        serving::admit(&self.shared, fd, agent, hello)
    }

    /// Decides about a link from its hello.
    fn hello(&mut self, agent: Incarnation, link: Link, hello: &wire::Hello) -> Result<()> {
        let refuse = |link: Link, e: Error| {
            link.send(Body::Refuse(wire::Refuse {
                status: e.status as i32,
                text: e.text.clone(),
            }));
            link.finish();
            Err(e)
        };
        let own = match self.shared.lock().engine() {
            Ok(own) => own,
            Err(e) => return refuse(link, e),
        };
        if let Some(e) = self.group_fence(agent) {
            return refuse(link, e);
        }
        // A rank of our own engine sends the bytes that we have.
        let engine = if hello.engine == own.metadata {
            Ok(own.info.clone())
        } else {
            decode_engine(&hello.engine, &own.invariants).map(Arc::new)
        };
        let engine = engine.and_then(|engine| match engine.index_of(agent) {
            Some(index) => Ok((engine, index)),
            None => bail!(KVF_ERR_PROTOCOL, "agent {agent:?} is no rank of its engine"),
        });
        let (engine, index) = match engine {
            Ok(known) => known,
            Err(e) => return refuse(link, e),
        };
        let ours_first = self.shared.incarnation < agent;
        let remote = self.remote(&engine, index);
        let keep_ours = match &remote.state {
            LinkState::Up(_) => remote.dialled,
            LinkState::Greeting(..) => true,
            LinkState::Dialling(_) | LinkState::Down(_) => false,
        };
        if keep_ours && ours_first {
            let e = err!(
                KVF_ERR_DUPLICATE,
                "both sides connected at once; the link of the smaller incarnation stays"
            );
            return refuse(link, e);
        }
        link.send(Body::Welcome(wire::Welcome {
            protocol: wire::PROTOCOL,
            incarnation: self.shared.incarnation.0.to_vec(),
        }));
        self.link_owner.insert(link.id, agent);
        self.link_up(agent, link, false);
        Ok(())
    }

    pub fn welcome(&mut self, agent: Incarnation, id: LinkId, welcome: &wire::Welcome) {
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        let now_down = LinkState::Down(self.shared.now());
        match std::mem::replace(&mut remote.state, now_down) {
            LinkState::Greeting(link, _) if link.id == id && welcome.incarnation == agent.0 => {
                self.link_up(agent, link, true);
            }
            LinkState::Greeting(link, _) if link.id == id => {
                let end = End::new(
                    Status::KVF_ERR_PEER_LOST,
                    "somebody else answers at the peer's address",
                );
                drop(link);
                self.remote_lost(agent, end);
            }
            other => remote.state = other,
        }
    }

    pub fn refused(&mut self, agent: Incarnation, id: LinkId, refuse: wire::Refuse) {
        let ours = self
            .remotes
            .get(&agent)
            .is_some_and(|r| matches!(&r.state, LinkState::Greeting(link, _) if link.id == id));
        let status = super::metadata::status(refuse.status);
        if !ours {
            return;
        }
        if status == Status::KVF_ERR_DUPLICATE {
            // The other side's own link is on its way; this one's end says nothing.
            self.link_owner.remove(&id);
            let again = self.now() + LINK_COMES;
            if let Some(remote) = self.remotes.get_mut(&agent) {
                remote.state = LinkState::Down(again);
            }
            self.arm_remote(agent);
            return;
        }
        if status == Status::KVF_ERR_STATE {
            // It has no engine yet: ranks make theirs one after the other.
            self.link_owner.remove(&id);
            let e = Error::new(Status::KVF_ERR_PEER_UNREACHABLE, refuse.text);
            return self.dial_failed(agent, e);
        }
        self.remote_lost(agent, End::new(status, format!("refused: {}", refuse.text)));
    }
}

/// Reports the end of a process.
fn watch(
    link: LinkId,
    process: Arc<PeerProcess>,
    died: tokio::sync::mpsc::UnboundedSender<LinkId>,
) -> Option<tokio::task::AbortHandle> {
    // Without a descriptor the heartbeats will tell.
    let pidfd = process.as_fd().try_clone_to_owned().ok()?;
    let task = tokio::spawn(async move {
        if crate::runtime::readable(pidfd).await.is_ok() {
            let _ = died.send(link);
        }
    });
    Some(task.abort_handle())
}
