//! Remote agents: links, handshakes, liveness, the way to their memory.
//!
//! A remote agent is known by its incarnation. It has at most one link; if both sides connect at
//! once, the link dialled by the smaller incarnation stays. A link that breaks while the process
//! may live is dialled again, with growing pauses if that fails or does not last; an agent is lost
//! when its process has ended (pidfd), when nobody answers at its address any more, when somebody
//! else does, or when it has been silent, or tried in vain, for too long.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use super::api::{Event, EventKind};
use super::control::{Control, Timer};
use super::link::{Incoming, Link, LinkId};
use super::metadata::{EngineInfo, RankInfo};
use super::peers::{PeerShared, Route};
use super::reach::Reach;
use crate::err;
use crate::error::{Error, Status};
use crate::ids::{Incarnation, Key};
use crate::session::{End, Now};
use crate::wire::opening::Opened;
use crate::wire::{self, Body};

/// A remote agent and our connection to it.
pub(super) struct Remote {
    pub engine: Arc<EngineInfo>,
    /// Its place in `engine.ranks`.
    pub index: usize,
    pub route: Arc<Route>,
    /// A caller's peer wants to read from it: we dial.
    pub wanted: bool,
    pub state: LinkState,
    pub reach: Reach,
    pub last_sent: Now,
    pub last_heard: Now,
    /// Our dialling made the link.
    pub dialled: bool,
    /// The link over which memory was asked for.
    pub memory_asked: Option<LinkId>,
    /// Pools that the agent wants to free and that may just be being mapped.
    pub unmap: Vec<u32>,
}

pub(super) enum LinkState {
    /// Dial again at this time.
    Down(Now),
    Dialling(Now),
    /// Our hello is out.
    Greeting(Link, Now),
    Up(Link),
}

/// An accepted connection that is open and whose hello has not come yet.
pub(super) struct Greeting {
    pub link: Link,
    pub opened: Opened,
}

impl Remote {
    pub fn info(&self) -> &RankInfo {
        &self.engine.ranks[self.index]
    }

    pub fn rank(&self) -> u32 {
        self.info().layout.coordinates.global_rank
    }

    pub fn dp_rank(&self) -> u32 {
        self.info().layout.coordinates.dp_rank
    }

    pub fn link(&self) -> Option<&Link> {
        match &self.state {
            LinkState::Up(link) => Some(link),
            _ => None,
        }
    }

    /// Whether nobody listening at its address proves that it is gone. Its own listener holds a name
    /// or port of this host for its whole life. Elsewhere a link to it, whoever dialled, shows that it
    /// was there; before, the port may be that of a router that does not know the way yet.
    pub fn gone_if_refused(&self) -> bool {
        let here = |address: SocketAddr| address.ip().to_canonical().is_loopback();
        self.reach.met() || self.info().address.is_none_or(here)
    }

    /// Closes the link after what is queued on it; the receiver ends when it is written.
    pub fn close(self) -> Option<tokio::sync::oneshot::Receiver<()>> {
        match self.state {
            LinkState::Up(link) => Some(link.finish()),
            _ => None,
        }
    }
}

/// Whoever reads it later must know whom it is about.
pub(super) fn naming(end: End, agent: &str) -> End {
    if end.text.contains(agent) {
        return end;
    }
    End::new(end.status, format!("agent {agent}: {}", end.text))
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
                reach: Reach::default(),
                last_sent: now,
                last_heard: now,
                dialled: false,
                memory_asked: None,
                unmap: Vec::new(),
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
                    Status::KVF_ERR_CANCELLED,
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

    /// A frame, or the end, of a link.
    pub fn incoming(&mut self, link: LinkId, incoming: Incoming) {
        if self.greetings.contains_key(&link) {
            return self.first_frame(link, incoming);
        }
        let Some(agent) = self.link_owner.get(&link).copied() else {
            return; // a link that was closed meanwhile
        };
        let now = self.now();
        match incoming {
            Incoming::Closed(e) => self.link_closed(agent, link, e),
            Incoming::Frame(body, fds) => {
                if let Some(remote) = self.remotes.get_mut(&agent) {
                    remote.last_heard = now;
                }
                self.frame(agent, link, body, fds);
            }
        }
    }

    pub fn link_up(&mut self, agent: Incarnation, link: Link, dialled: bool) {
        let now = self.now();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        if matches!(remote.state, LinkState::Up(_)) {
            remote.reach.replaced(now, &self.shared.config.timeouts);
        }
        remote.reach.up(now);
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

    pub fn arm_remote(&mut self, agent: Incarnation) {
        let times = &self.shared.config.timeouts;
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let at = match &remote.state {
            LinkState::Down(at) | LinkState::Dialling(at) | LinkState::Greeting(_, at) => {
                remote.reach.ends_at(times).map_or(*at, |end| end.min(*at))
            }
            LinkState::Up(_) => {
                (remote.last_sent + times.heartbeat).min(remote.last_heard + times.peer_silence)
            }
        };
        self.timers.set(Timer::Remote(agent), Some(at));
    }

    /// A heartbeat came: ours goes out in the same wake-up if it is due soon, so that an idle pair
    /// beats together and wakes half as often.
    fn answer_heartbeat(&mut self, agent: Incarnation) {
        let (now, every) = (self.now(), self.shared.config.timeouts.heartbeat);
        if let Some(remote) = self.remotes.get_mut(&agent)
            && let LinkState::Up(link) = &remote.state
            && now.saturating_sub(remote.last_sent) >= every / 2
        {
            link.send(Body::Heartbeat(wire::Heartbeat {
                sequence: now.as_millis() as u64,
            }));
            remote.last_sent = now;
            self.arm_remote(agent);
        }
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
        let ends = remote.reach.ends_at(&times).is_some_and(|at| now >= at);
        if ends && !matches!(remote.state, LinkState::Up(_)) {
            if late < times.heartbeat {
                return self.unreachable(agent);
            }
            remote.reach.extend(now, &times);
        }
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

    pub fn link_closed(&mut self, agent: Incarnation, link: LinkId, e: Error) {
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
                let (times, heard) = (&self.shared.config.timeouts, remote.last_heard);
                let pause = remote.reach.broke(now, heard, times, &e.text);
                self.down(agent, pause, &e);
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

    /// There is no link, and the next attempt comes after a pause, unless all were in vain for too
    /// long.
    pub fn down(&mut self, agent: Incarnation, pause: Duration, why: &Error) {
        let now = self.now();
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        let times = &self.shared.config.timeouts;
        let late = remote.reach.ends_at(times).map(|at| now.checked_sub(at));
        match late.flatten() {
            // The timer of the end would have come long before, had this process not been stopped.
            Some(late) if late >= times.heartbeat => remote.reach.extend(now, times),
            Some(_) => return self.unreachable(agent),
            None => {}
        }
        remote.route.attempt_failed(why);
        remote.state = LinkState::Down(now + pause);
        self.arm_remote(agent);
    }

    /// Every attempt was in vain, or the last one proved that it is gone.
    pub fn unreachable(&mut self, agent: Incarnation) {
        let now = self.now();
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let status = match remote.reach.met() {
            true => Status::KVF_ERR_PEER_LOST,
            false => Status::KVF_ERR_PEER_UNREACHABLE,
        };
        let (name, why) = (&remote.info().name, remote.reach.describe(now));
        let end = End::new(status, format!("agent {name} cannot be reached: {why}"));
        self.remote_lost(agent, end);
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
        let end = naming(end, &remote.info().name);
        self.timers.set(Timer::Remote(agent), None);
        if let LinkState::Up(link) | LinkState::Greeting(link, _) = &remote.state {
            self.link_owner.remove(&link.id);
        }
        self.shared.log.warn(format_args!("lost: {}", end.text));
        remote
            .route
            .set(Some(Err(Error::new(end.status, end.text.clone()))));
        self.sources_lost(agent, &end);
        self.readers_lost(agent, &end);
        self.shared.data.drop_agent(agent);
        self.holder_lost(agent);
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
            self.offers.engine_lost(engine);
        }
        // Its process may have been the last one that had a pool mapped.
        self.release_pools();
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

    pub fn frame(&mut self, agent: Incarnation, link: LinkId, body: Body, fds: Vec<OwnedFd>) {
        match body {
            Body::Welcome(w) => self.welcome(agent, link, &w),
            Body::Refuse(r) => self.refused(agent, link, r),
            Body::MemoryRequest(m) => self.memory_requested(agent, m),
            Body::Memory(m) => self.memory(agent, link, m, fds),
            Body::Heartbeat(_) => self.answer_heartbeat(agent),
            Body::Hello(_) => {}
            Body::Group(m) => self.on_group(agent, m),
            Body::DataHello(_)
            | Body::DataOpen(_)
            | Body::DataRead(_)
            | Body::DataClose(_)
            | Body::Open(_)
            | Body::Challenge(_)
            | Body::Proof(_)
            | Body::Accepted(_) => {
                let text = "a message that has no place on a control link";
                self.remote_lost(agent, End::new(Status::KVF_ERR_PROTOCOL, text));
            }
            Body::Readable(m) => self.on_readable(agent, &m),
            Body::Unmap(m) => self.on_unmap(agent, m.pool),
            Body::Unmapped(m) => self.on_unmapped(agent, m.pool),
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
}
