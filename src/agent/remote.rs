//! Remote agents: links, handshakes, liveness, the way to their memory.
//!
//! A remote agent is known by its incarnation. It has at most one link; if both sides connect at
//! once, the link dialled by the smaller incarnation stays. A link that breaks while the process
//! may live is dialled again with growing pauses; an agent is lost when its process has ended
//! (pidfd), when nobody answers at its address any more, when somebody else does, or when it has
//! been silent for too long.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use super::api::{Event, EventKind};
use super::control::{Command, Control, Timer};
use super::link::{Incoming, Link, LinkId, Socket, connect, unix_name};
use super::metadata::{EngineInfo, RankInfo, decode_engine, incarnation};
use super::peers::{PeerShared, Route};
use super::serving::{self, Door};
use super::shared::{self, Shared};
use crate::error::{Error, Result, Status};
use crate::ids::{Incarnation, Key};
use crate::memory::{LeaseView, Mapping};
use crate::session::{End, Now};
use crate::transport::DataPath;
use crate::transport::inproc::InprocPath;
use crate::transport::shm::{PeerLeases, PeerPool, PeerProcess, ShmPath};
use crate::transport::tcp::TcpPath;
use crate::wire::{self, Body};
use crate::{bail, err};

/// How long the other side's link is waited for when both connected at once.
const LINK_COMES: Duration = Duration::from_millis(300);

/// A remote agent and our connection to it.
pub(super) struct Remote {
    pub engine: Arc<EngineInfo>,
    /// Its place in `engine.ranks`.
    index: usize,
    pub route: Arc<Route>,
    /// A caller's peer wants to read from it: we dial.
    wanted: bool,
    state: LinkState,
    /// Consecutive failed attempts.
    attempts: u32,
    last_sent: Now,
    last_heard: Now,
    /// Our dialling made the link.
    dialled: bool,
    /// The link over which memory was asked for.
    memory_asked: Option<LinkId>,
}

enum LinkState {
    /// Dial again at this time.
    Down(Now),
    Dialling(Now),
    /// Our hello is out.
    Greeting(Link, Now),
    Up(Link),
}

/// An accepted connection whose hello has not come yet.
pub(super) struct Greeting {
    link: Link,
}

impl Remote {
    fn info(&self) -> &RankInfo {
        &self.engine.ranks[self.index]
    }

    pub fn rank(&self) -> u32 {
        self.info().layout.coordinates.global_rank
    }

    pub fn dp_rank(&self) -> u32 {
        self.info().layout.coordinates.dp_rank
    }

    fn link(&self) -> Option<&Link> {
        match &self.state {
            LinkState::Up(link) => Some(link),
            _ => None,
        }
    }

    /// Closes the link after what is queued on it; the receiver ends when it is written.
    pub fn close(self) -> Option<tokio::sync::oneshot::Receiver<()>> {
        match self.state {
            LinkState::Up(link) => Some(link.finish()),
            _ => None,
        }
    }
}

impl Control {
    /// The record of an agent, made if it is new.
    pub fn remote(&mut self, engine: &Arc<EngineInfo>, index: usize) -> &mut Remote {
        let info = &engine.ranks[index];
        let now = self.shared.now();
        self.remotes
            .entry(info.incarnation)
            .or_insert_with(|| Remote {
                engine: engine.clone(),
                index,
                route: Arc::new(Route::new(info.incarnation, info.name.clone())),
                wanted: false,
                state: LinkState::Down(now),
                attempts: 0,
                last_sent: now,
                last_heard: now,
                dialled: false,
                memory_asked: None,
            })
    }

    pub fn add_peer(&mut self, peer: Arc<PeerShared>) {
        for (index, route) in peer.routes.iter().enumerate() {
            if !peer.needed.contains(&index) {
                continue;
            }
            let agent = route.incarnation;
            let remote = self.remote(&peer.engine, index);
            // An agent that dialled us first has a record, but no handle had its route yet.
            remote.route = route.clone();
            remote.wanted = true;
            let up = remote.link().is_some();
            let asked = remote.memory_asked.is_some();
            if up && !asked {
                self.ask_memory(agent);
            } else if !up {
                self.dial(agent);
            }
        }
        self.peers.insert(peer.id, peer);
    }

    pub fn remove_peer(&mut self, id: u64) {
        let Some(peer) = self.peers.remove(&id) else {
            return;
        };
        for route in &peer.routes {
            let agent = route.incarnation;
            let shared_with = self
                .peers
                .values()
                .any(|p| p.routes.iter().any(|r| r.incarnation == agent));
            if !shared_with && self.remotes.contains_key(&agent) {
                let end = End::new(
                    Status::KVF_ERR_PEER_LOST,
                    "the peer was removed by this side",
                );
                self.sources_lost(agent, &end);
                route.set(Some(Err(Error::new(end.status, end.text))));
                if let Some(remote) = self.remotes.get_mut(&agent) {
                    remote.wanted = false;
                    remote.memory_asked = None;
                }
            }
        }
    }

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
        let info = remote.info();
        let unix = (info.host == host).then(|| unix_name(agent));
        let address = info.address;
        tokio::spawn(async move {
            let result = match tokio::time::timeout(timeout, connect(unix, address)).await {
                Ok(result) => result,
                Err(_) => Err(err!(
                    KVF_ERR_PEER_UNREACHABLE,
                    "no answer to a connection attempt within {timeout:?}"
                )),
            };
            let _ = dialled.send((agent, result));
        });
        self.timers.set(Timer::Remote(agent), Some(now + timeout));
    }

    pub fn dial_done(&mut self, agent: Incarnation, result: Result<Socket>) {
        match result.and_then(|socket| self.greet(agent, socket)) {
            Ok(()) => {}
            Err(e) => self.dial_failed(agent, e),
        }
    }

    fn greet(&mut self, agent: Incarnation, socket: Socket) -> Result<()> {
        let own = self.shared.lock().engine()?;
        let hello = wire::Hello {
            protocol: wire::PROTOCOL,
            incarnation: self.shared.incarnation.0.to_vec(),
            target: agent.0.to_vec(),
            rank: own.info.ranks[own.index].layout.coordinates.global_rank,
            engine: own.metadata.clone(),
            name: self.shared.config.name.clone(),
        };
        let dialling = self
            .remotes
            .get(&agent)
            .is_some_and(|r| matches!(r.state, LinkState::Dialling(_)));
        if !dialling {
            return Ok(()); // the other side's link came first
        }
        let link = self.open_link(socket)?;
        self.link_owner.insert(link.id, agent);
        link.send(Body::Hello(hello));
        let until = self.now() + self.shared.config.timeouts.connect;
        if let Some(remote) = self.remotes.get_mut(&agent) {
            remote.state = LinkState::Greeting(link, until);
        }
        self.timers.set(Timer::Remote(agent), Some(until));
        Ok(())
    }

    fn open_link(&mut self, socket: Socket) -> Result<Link> {
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

    /// An attempt failed. Nobody listening is as good as a death notice: the name or port is held
    /// for an agent's whole life. Everything else is tried again.
    fn dial_failed(&mut self, agent: Incarnation, e: Error) {
        let now = self.now();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        remote.attempts += 1;
        let refused = e.status == Status::KVF_ERR_PEER_LOST;
        let heard_ago = now.saturating_sub(remote.last_heard);
        if refused || heard_ago >= self.shared.config.timeouts.peer_silence {
            let end = End::new(
                if remote.memory_asked.is_some() {
                    Status::KVF_ERR_PEER_LOST
                } else {
                    Status::KVF_ERR_PEER_UNREACHABLE
                },
                format!("agent {} cannot be reached: {e}", remote.info().name),
            );
            return self.remote_lost(agent, end);
        }
        let pause = Duration::from_millis(20) * 2u32.pow(remote.attempts.min(7));
        remote.state = LinkState::Down(now + pause);
        self.timers.set(Timer::Remote(agent), Some(now + pause));
    }

    pub fn accepted(&mut self, socket: Socket) {
        match self.open_link(socket) {
            Ok(link) => {
                let until = self.now() + self.shared.config.timeouts.connect;
                self.timers.set(Timer::Greeting(link.id), Some(until));
                self.greetings.insert(link.id, Greeting { link });
            }
            Err(e) => self
                .shared
                .log
                .warn(format_args!("a connection was refused: {e}")),
        }
    }

    pub fn greeting_late(&mut self, link: LinkId) {
        if self.greetings.remove(&link).is_some() {
            self.shared
                .log
                .info(format_args!("a connection without a hello was closed"));
        }
    }

    /// A frame, or the end, of a link.
    pub fn incoming(&mut self, link: LinkId, incoming: Incoming) {
        if self.greetings.contains_key(&link) {
            return self.first_frame(link, incoming);
        }
        let Some(agent) = self.link_owner.get(&link).copied() else {
            return; // a link that was closed meanwhile
        };
        let now = self.now();
        if let Some(remote) = self.remotes.get_mut(&agent) {
            remote.last_heard = now;
        }
        match incoming {
            Incoming::Closed(e) => self.link_closed(agent, link, e),
            Incoming::Frame(body, fds) => self.frame(agent, link, body, fds),
        }
    }

    fn first_frame(&mut self, id: LinkId, incoming: Incoming) {
        let Some(Greeting { link }) = self.greetings.remove(&id) else {
            return;
        };
        self.timers.set(Timer::Greeting(id), None);
        let hello = match incoming {
            Incoming::Frame(Body::Hello(hello), _) => hello,
            Incoming::Frame(Body::DataHello(hello), _) => return self.data_hello(link, &hello),
            _ => return, // gone, or not our protocol: nothing of it is looked at
        };
        if let Err(e) = self.hello(link, &hello) {
            self.shared
                .log
                .warn(format_args!("a hello of {} was refused: {e}", hello.name));
        }
    }

    /// A reader's data connection: a thread of its own serves it.
    fn data_hello(&mut self, link: Link, hello: &wire::DataHello) {
        let admitted = link
            .into_fd()
            .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "data connection", &e))
            .and_then(|fd| serving::admit(&self.shared, fd, hello));
        if let Err(e) = admitted {
            self.shared
                .log
                .warn(format_args!("a data connection was refused: {e}"));
        }
    }

    /// Decides about a connection from its hello.
    fn hello(&mut self, link: Link, hello: &wire::Hello) -> Result<()> {
        let refuse = |link: Link, e: Error| {
            link.send(Body::Refuse(wire::Refuse {
                status: e.status as i32,
                text: e.text.clone(),
            }));
            link.finish();
            Err(e)
        };
        if hello.protocol != wire::PROTOCOL {
            let e = err!(
                KVF_ERR_PROTOCOL,
                "protocol {} here, {} there: use the same release on both sides",
                wire::PROTOCOL,
                hello.protocol
            );
            return refuse(link, e);
        }
        if hello.target != self.shared.incarnation.0 {
            let e = err!(
                KVF_ERR_PEER_LOST,
                "this is agent {:?}, not the one that was meant: it has been replaced",
                self.shared.incarnation
            );
            return refuse(link, e);
        }
        let own = match self.shared.lock().engine() {
            Ok(own) => own,
            Err(e) => return refuse(link, e),
        };
        let agent = incarnation(&hello.incarnation)?;
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

    fn link_up(&mut self, agent: Incarnation, link: Link, dialled: bool) {
        let now = self.now();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        remote.attempts = 0;
        remote.dialled = dialled;
        remote.last_heard = now;
        remote.last_sent = now;
        let wanted = remote.wanted;
        let have_path = matches!(remote.route.get(), Some(Ok(_)));
        let before = std::mem::replace(&mut remote.state, LinkState::Up(link));
        if let LinkState::Up(old) | LinkState::Greeting(old, _) = before {
            self.link_owner.remove(&old.id);
        }
        self.arm_remote(agent);
        if wanted && !have_path {
            self.ask_memory(agent);
        }
        self.repeat_notices(agent);
        self.repeat_pushes(agent);
        self.group_up(agent);
        self.route_changed(agent);
    }

    /// Asks an agent for its memory, once a link.
    pub fn ask_memory(&mut self, agent: Incarnation) {
        if let Some(remote) = self.remotes.get_mut(&agent)
            && let LinkState::Up(link) = &remote.state
            && remote.memory_asked != Some(link.id)
        {
            remote.memory_asked = Some(link.id);
            link.send(Body::MemoryRequest(wire::MemoryRequest {}));
        }
    }

    fn arm_remote(&mut self, agent: Incarnation) {
        let times = &self.shared.config.timeouts;
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let at = match &remote.state {
            LinkState::Down(at) | LinkState::Dialling(at) | LinkState::Greeting(_, at) => *at,
            LinkState::Up(_) => {
                (remote.last_sent + times.heartbeat).min(remote.last_heard + times.peer_silence)
            }
        };
        self.timers.set(Timer::Remote(agent), Some(at));
    }

    /// A deadline of a remote is due; `late`: how much later than planned we run.
    pub fn remote_due(&mut self, agent: Incarnation, late: Duration) {
        let now = self.now();
        let times = self.shared.config.timeouts;
        if self.group_dying(agent) {
            let end = End::new(Status::KVF_ERR_PEER_LOST, "the peer's process has ended");
            return self.remote_lost(agent, end);
        }
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        match &remote.state {
            LinkState::Down(at) if now >= *at => {
                if remote.wanted || self.notices.any_for(agent) || self.groups.needs(agent) {
                    return self.dial(agent);
                }
                let end = End::new(Status::KVF_ERR_PEER_LOST, "the connection is gone");
                return self.remote_lost(agent, end);
            }
            LinkState::Dialling(at) | LinkState::Greeting(_, at) if now >= *at => {
                let name = remote.info().name.clone();
                remote.state = LinkState::Down(now);
                let e = err!(
                    KVF_ERR_PEER_UNREACHABLE,
                    "agent {name} did not answer the handshake within {:?}",
                    times.connect
                );
                return self.dial_failed(agent, e);
            }
            LinkState::Up(link) => {
                let silent = now.saturating_sub(remote.last_heard);
                if silent >= times.peer_silence {
                    // If we ourselves were stopped, what the peer sent meanwhile is still in the
                    // socket: read it before judging.
                    if late >= times.heartbeat {
                        remote.last_heard = now - times.peer_silence + times.heartbeat;
                    } else {
                        let end = End::new(
                            Status::KVF_ERR_PEER_LOST,
                            format!(
                                "agent {} has been silent for {silent:?}: stopped or cut off",
                                remote.info().name
                            ),
                        );
                        return self.remote_lost(agent, end);
                    }
                }
                if now.saturating_sub(remote.last_sent) >= times.heartbeat {
                    link.send(Body::Heartbeat(wire::Heartbeat {
                        sequence: now.as_millis() as u64,
                    }));
                    remote.last_sent = now;
                }
            }
            _ => {}
        }
        self.arm_remote(agent);
    }

    fn link_closed(&mut self, agent: Incarnation, link: LinkId, e: Error) {
        self.link_owner.remove(&link);
        let now = self.now();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        match &remote.state {
            LinkState::Up(up) if up.id == link => {
                let ended = up.process.as_ref().is_some_and(|p| !p.is_alive());
                self.shared
                    .log
                    .info(format_args!("link to {agent:?} closed: {e}"));
                let protocol = e.status == Status::KVF_ERR_PROTOCOL;
                if ended || protocol {
                    return self.remote_lost(agent, End::new(e.status, e.text));
                }
                remote.state = LinkState::Down(now);
                self.timers.set(Timer::Remote(agent), Some(now));
            }
            LinkState::Greeting(up, _) if up.id == link => {
                remote.state = LinkState::Down(now);
                // No proof of an end: the next attempt tells whether anybody listens.
                let e = Error::new(Status::KVF_ERR_PEER_UNREACHABLE, e.text);
                self.dial_failed(agent, e);
            }
            _ => {}
        }
    }

    /// The kernel says that the process behind a link has ended.
    pub fn process_died(&mut self, link: LinkId) {
        self.greetings.remove(&link);
        let Some(agent) = self.link_owner.get(&link).copied() else {
            return;
        };
        if self.group_last_words(agent) {
            return;
        }
        let end = End::new(Status::KVF_ERR_PEER_LOST, "the peer's process has ended");
        self.remote_lost(agent, end);
    }

    /// An agent is gone for good: its operations fail once, its memory is unmapped now.
    pub fn remote_lost(&mut self, agent: Incarnation, end: End) {
        let Some(remote) = self.remotes.remove(&agent) else {
            return;
        };
        self.timers.set(Timer::Remote(agent), None);
        if let LinkState::Up(link) | LinkState::Greeting(link, _) = &remote.state {
            self.link_owner.remove(&link.id);
        }
        self.shared.log.warn(format_args!(
            "agent {} is lost: {}",
            remote.info().name,
            end.text
        ));
        remote
            .route
            .set(Some(Err(Error::new(end.status, end.text.clone()))));
        self.sources_lost(agent, &end);
        self.readers_lost(agent, &end);
        self.shared.data.drop_agent(agent);
        self.drop_notices(agent);
        self.drop_pushes_to(agent, &end);
        self.group_lost(agent, &end);
        for peer in self.peers.values() {
            if peer
                .needed
                .iter()
                .any(|r| peer.routes[*r].incarnation == agent)
            {
                self.shared.events.push(Event {
                    kind: EventKind::PeerLost,
                    object: peer.id,
                    user_data: peer.user_data,
                    key: Key::default(),
                    status: end.status,
                });
            }
        }
        let engine = remote.engine.id();
        if !self.remotes.values().any(|r| r.engine.id() == engine) {
            self.outward.remove(&engine);
        }
    }

    /// Sends to an agent if its link is up; what must not be lost is repeated by its owner.
    pub fn send_to(&self, agent: Incarnation, body: Body) {
        if let Some(link) = self.remotes.get(&agent).and_then(Remote::link) {
            link.send(body);
        }
    }

    pub fn say_goodbye(&self) {
        let text = format!("agent {} has shut down", self.shared.config.name);
        for remote in self.remotes.values() {
            if let Some(link) = remote.link() {
                link.send(Body::Goodbye(wire::Goodbye { text: text.clone() }));
            }
        }
    }

    fn frame(&mut self, agent: Incarnation, link: LinkId, body: Body, fds: Vec<OwnedFd>) {
        match body {
            Body::Welcome(w) => self.welcome(agent, link, &w),
            Body::Refuse(r) => self.refused(agent, link, r),
            Body::MemoryRequest(_) => self.send_memory(agent),
            Body::Memory(m) => self.memory(agent, link, m, fds),
            Body::Heartbeat(_) | Body::Hello(_) => {}
            Body::Group(m) => self.on_group(agent, m),
            Body::DataHello(_) | Body::DataOpen(_) | Body::DataRead(_) | Body::DataClose(_) => {
                let text = "a data message on a control link";
                self.remote_lost(agent, End::new(Status::KVF_ERR_PROTOCOL, text));
            }
            Body::Claim(m) => self.on_claim(agent, &m),
            Body::Published(m) => self.on_published(agent, &m),
            Body::Renew(m) => self.on_renew(agent, &m),
            Body::Finished(m) => self.on_finished(agent, &m),
            Body::FinishedAck(m) => self.on_finished_ack(agent, &m),
            Body::Ended(m) => self.on_ended(agent, &m),
            Body::Push(m) => self.on_push(agent, &m),
            Body::OfferEnded(m) => self.on_offer_ended(agent, &m),
            Body::Goodbye(m) => {
                self.remote_lost(agent, End::new(Status::KVF_ERR_PEER_LOST, m.text));
            }
        }
    }

    fn welcome(&mut self, agent: Incarnation, id: LinkId, welcome: &wire::Welcome) {
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

    fn refused(&mut self, agent: Incarnation, id: LinkId, refuse: wire::Refuse) {
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
            self.timers.set(Timer::Remote(agent), Some(again));
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

    /// Our memory, for a reader.
    fn send_memory(&mut self, agent: Incarnation) {
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let Some(link) = remote.link() else { return };
        let token = self.shared.data.token(agent, &remote.engine, remote.index);
        let leases = &self.shared.leases;
        let mut fds: Vec<OwnedFd> = Vec::new();
        let mut pools = Vec::new();
        if link.unix
            && let Ok(fd) = leases.fd().try_clone_to_owned()
        {
            fds.push(fd);
        }
        for (id, entry) in &self.shared.lock().pools {
            let fd = entry.pool.fd().filter(|_| !fds.is_empty());
            let fd = fd.and_then(|fd| fd.try_clone_to_owned().ok());
            pools.push(wire::PoolMemory {
                id: *id,
                bytes: entry.pool.bytes(),
                address: entry.pool.base() as u64,
                mappable: fd.is_some(),
            });
            fds.extend(fd);
        }
        let memory = wire::Memory {
            pools,
            nonce: leases.nonce().to_vec(),
            lease_bytes: leases.bytes(),
            lease_address: leases.address(),
            descriptors: fds.len() as u32,
            token,
        };
        link.send_with(Body::Memory(memory), fds);
    }

    /// A source's memory came: map it on a worker, since populating takes its time.
    fn memory(&mut self, agent: Incarnation, id: LinkId, memory: wire::Memory, fds: Vec<OwnedFd>) {
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let (Some(link), info) = (remote.link(), remote.info()) else {
            return;
        };
        if remote.memory_asked != Some(id) {
            return;
        }
        let (source, process) = (info.clone(), link.process.clone());
        let shared = self.shared.clone();
        self.shared.workers.submit(i32::MAX, move || {
            let path = make_path(&shared, &source, process, &memory, fds);
            shared.send(Command::Path(agent, id, path));
        });
    }

    pub fn path_made(&mut self, agent: Incarnation, link: LinkId, path: Result<Arc<dyn DataPath>>) {
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        if remote.memory_asked != Some(link) {
            return;
        }
        let name = remote.info().name.clone();
        match &path {
            Ok(path) => self.shared.log.info(format_args!(
                "agent {name}: transport {} ({})",
                path.name(),
                path.reason()
            )),
            Err(e) => self
                .shared
                .log
                .warn(format_args!("agent {name}: no transport: {e}")),
        }
        let ready = path.is_ok();
        let status = path.as_ref().err().map_or(Status::KVF_OK, |e| e.status);
        remote.route.set(Some(path));
        for peer in self.peers.values() {
            let all = peer
                .needed
                .iter()
                .all(|r| matches!(peer.routes[*r].get(), Some(Ok(_))));
            let concerned = peer
                .needed
                .iter()
                .any(|r| peer.routes[*r].incarnation == agent);
            if concerned && (all || !ready) {
                self.shared.events.push(Event {
                    kind: if ready {
                        EventKind::PeerReady
                    } else {
                        EventKind::PeerLost
                    },
                    object: peer.id,
                    user_data: peer.user_data,
                    key: Key::default(),
                    status,
                });
            }
        }
        self.route_changed(agent);
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

/// Whether the configuration (empty = all) and `KVFERRY_TRANSPORTS` (unset = all) allow it.
fn allowed(configured: &[String], name: &str) -> bool {
    let named = |list: &str| list.split(',').any(|t| t.trim() == name);
    (configured.is_empty() || configured.iter().any(|t| t == name))
        && std::env::var("KVFERRY_TRANSPORTS").map_or(true, |list| list.is_empty() || named(&list))
}

/// Chooses how to read an agent's memory and proves that it works.
fn make_path(
    shared: &Shared,
    source: &RankInfo,
    process: Option<Arc<PeerProcess>>,
    memory: &wire::Memory,
    fds: Vec<OwnedFd>,
) -> Result<Arc<dyn DataPath>> {
    let may = |name: &str| allowed(&shared.config.transports, name);
    let nonce = incarnation(&memory.nonce)?.0;
    let mut reasons = Vec::new();
    if !may("inproc") {
        reasons.push("inproc: not allowed by the configuration".to_owned());
    } else if source.process != shared.process {
        reasons.push("inproc: another process".into());
    } else {
        let Some(other) = shared::find(source.incarnation) else {
            bail!(KVF_ERR_PEER_LOST, "the agent in this process has ended");
        };
        let state = other.lock();
        let pools = state.pools.iter().map(|(id, e)| (*id, e.pool.clone()));
        let path = InprocPath::new(pools.collect(), other.leases.clone(), nonce)?;
        return Ok(Arc::new(path));
    }
    let same_host = process.is_some();
    match process {
        _ if !may("shm") => reasons.push("shm: not allowed by the configuration".into()),
        None => reasons.push("shm: another host, or no Unix socket to it".into()),
        Some(process) => match shm_path(process, memory, fds, nonce) {
            Ok(path) => return Ok(Arc::new(path)),
            Err(e) if e.status == Status::KVF_ERR_PEER_LOST => return Err(e),
            Err(e) => reasons.push(format!("shm: {e}")),
        },
    }
    let doors = [
        (
            "unix",
            same_host.then(|| Door::Unix(unix_name(source.incarnation))),
        ),
        ("tcp", source.address.map(Door::Tcp)),
    ];
    for (name, door) in doors {
        let Some(door) = door.filter(|_| may(name)) else {
            reasons.push(format!(
                "{name}: no such way, or not allowed by the configuration"
            ));
            continue;
        };
        let dial = serving::dialler(shared, source, door, memory.token.clone());
        let pools = memory.pools.iter().map(|p| (p.id, p.bytes)).collect();
        let reason = match reasons.as_slice() {
            [] => "the first one allowed".to_owned(),
            refused => format!("not {}", refused.join("; not ")),
        };
        let spin = shared.config.spin;
        let path = TcpPath::new(name, reason, pools, spin, Box::new(dial));
        match path.prove() {
            Ok(()) => return Ok(Arc::new(path)),
            Err(e) => reasons.push(format!("{name}: {e}")),
        }
    }
    bail!(
        KVF_ERR_UNSUPPORTED,
        "no transport to agent {}: {}",
        source.name,
        reasons.join("; ")
    )
}

fn shm_path(
    process: Arc<PeerProcess>,
    memory: &wire::Memory,
    fds: Vec<OwnedFd>,
    nonce: [u8; 16],
) -> Result<ShmPath> {
    let mut fds = fds.into_iter();
    let mut next = |what: String| match fds.next() {
        Some(fd) => Ok(fd),
        None => Err(err!(KVF_ERR_PROTOCOL, "no descriptor for {what}")),
    };
    let view = match memory.descriptors {
        0 => None,
        _ => {
            let fd = next("the lease table".into())?;
            Some(LeaseView::new(Mapping::new(
                fd.as_fd(),
                memory.lease_bytes,
            )?)?)
        }
    };
    let mut pools = BTreeMap::new();
    for pool in &memory.pools {
        let reached = if pool.mappable {
            let fd = next(format!("pool {}", pool.id))?;
            let mapping = Mapping::new(fd.as_fd(), pool.bytes)
                .map_err(|e| e.context(format!("pool {}", pool.id)))?;
            PeerPool::Mapped(mapping)
        } else {
            PeerPool::Private {
                address: pool.address,
                bytes: pool.bytes,
            }
        };
        pools.insert(pool.id, reached);
    }
    let head = crate::memory::LEASE_HEAD_BYTES;
    let capacity = memory.lease_bytes.saturating_sub(head) / 8;
    let leases = PeerLeases {
        view,
        address: memory.lease_address,
        capacity: u32::try_from(capacity).unwrap_or(u32::MAX),
        nonce,
    };
    let private = pools
        .values()
        .any(|p| matches!(p, PeerPool::Private { .. }));
    let path = ShmPath::new(process, pools, leases)?;
    if private {
        // Where the kernel refuses it, another transport is chosen now and not a transfer failed.
        path.prove_private()?;
    }
    Ok(path)
}
