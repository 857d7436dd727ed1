//! Making links: dialling, accepting, hellos and their answers.
//!
//! If both sides connect at once, the link dialled by the smaller incarnation stays.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use super::control::{Control, Timer};
use super::link::{Incoming, Link, LinkId, Socket, connect, unix_name};
use super::metadata::{decode_engine, incarnation};
use super::remote::{Greeting, LinkState};
use super::serving::{self};
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::session::End;
use crate::transport::shm::PeerProcess;
use crate::wire::{self, Body};
use crate::{bail, err};

/// How long the other side's link is waited for when both connected at once.
const LINK_COMES: Duration = Duration::from_millis(300);

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

    pub fn greet(&mut self, agent: Incarnation, socket: Socket) -> Result<()> {
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

    /// An attempt failed. Nobody listening is as good as a death notice: the name or port is held
    /// for an agent's whole life. Everything else is tried again.
    pub fn dial_failed(&mut self, agent: Incarnation, e: Error) {
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

    pub fn first_frame(&mut self, id: LinkId, incoming: Incoming) {
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
    pub fn data_hello(&mut self, link: Link, hello: &wire::DataHello) {
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
    pub fn hello(&mut self, link: Link, hello: &wire::Hello) -> Result<()> {
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
