//! The request level's port to a real agent.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use prost::Message;

use super::api::{Config, Side};
use super::port::{DomainEvents, End, Notice, Notify, Operation, Port};
use super::room::Transceiver;
use crate::agent::{
    self, Agent, GroupEvents, ImportDesc, Observer, Peer, Publication, PublishDesc, ReceiveDesc,
    Transfer,
};
use crate::bail;
use crate::error::{Error, Result, Status};
use crate::ids::Key;
use crate::wire::{OFFER_MAGIC, Offer, TICKET_HEAD, TICKET_MAGIC, Ticket};

/// A port to the agent that `A` owns or shares.
#[derive(Debug)]
pub struct AgentPort<A: AsRef<Agent>> {
    agent: A,
    member: OnceLock<Arc<Member>>,
}

impl<A: AsRef<Agent>> Drop for AgentPort<A> {
    fn drop(&mut self) {
        if let Some(member) = self.member.get() {
            self.agent.as_ref().group_leave(member.domain);
        }
    }
}

/// A rank in its domain. The agent's channel is the domain's number, its ranks are the engine's.
struct Member {
    domain: u64,
    /// Engine ranks in the domain's order.
    ranks: Vec<u32>,
    events: Weak<dyn DomainEvents>,
}

impl std::fmt::Debug for Member {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Member(domain {}, ranks {:?})", self.domain, self.ranks)
    }
}

impl Member {
    fn place(&self, rank: u32) -> Option<u32> {
        let place = self.ranks.iter().position(|r| *r == rank)?;
        u32::try_from(place).ok()
    }
}

impl GroupEvents for Member {
    fn message(&self, from: u32, bytes: &[u8]) {
        if let (Some(events), Some(from)) = (self.events.upgrade(), self.place(from)) {
            events.message(from, bytes);
        }
    }

    fn lost(&self, rank: Option<u32>, _: &Error) {
        let Some(events) = self.events.upgrade() else {
            return;
        };
        match rank {
            None => events.lost(None),
            Some(rank) => {
                if let Some(place) = self.place(rank) {
                    events.lost(Some(place));
                }
            }
        }
    }

    fn alarm(&self) {
        if let Some(events) = self.events.upgrade() {
            events.alarm();
        }
    }
}

impl<A: AsRef<Agent> + Send + Sync + 'static> Transceiver<AgentPort<A>> {
    /// Makes a transceiver upon an agent, which it keeps alive.
    ///
    /// # Errors
    /// As [`Transceiver::with_port`].
    pub fn create(agent: A, config: Config) -> Result<Self> {
        let port = AgentPort {
            agent,
            member: OnceLock::new(),
        };
        Self::with_port(port, config)
    }
}

impl<A: AsRef<Agent> + Send + Sync + 'static> Port for AgentPort<A> {
    type Peer = Peer;

    fn publish(&self, desc: PublishDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        let watch = Watch::new(notify);
        let publication = self
            .agent
            .as_ref()
            .publish_observed(desc, Some(watch.observer()))?;
        Ok(watch.begun(publication))
    }

    fn import(&self, peer: &Peer, desc: ImportDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        let watch = Watch::new(notify);
        let transfer = self
            .agent
            .as_ref()
            .import_observed(peer, desc, Some(watch.observer()))?;
        Ok(watch.begun(transfer))
    }

    fn receive(
        &self,
        sender: &Peer,
        desc: ReceiveDesc,
        notify: Notify,
    ) -> Result<Arc<dyn Operation>> {
        let watch = Watch::new(notify);
        let agent = self.agent.as_ref();
        let transfer = agent.receive_begin(Some(sender), desc, Some(watch.observer()))?;
        Ok(watch.begun(transfer))
    }

    fn push(
        &self,
        peer: &Peer,
        offer: &[u8],
        desc: PublishDesc,
        deadline: Duration,
        notify: Notify,
    ) -> Result<Arc<dyn Operation>> {
        let watch = Watch::new(notify);
        let agent = self.agent.as_ref();
        let transfer = agent.push_begin(peer, offer, desc, deadline, Some(watch.observer()))?;
        Ok(watch.begun(transfer))
    }

    fn decline(&self, peer: &Peer, ticket: &[u8], cause: Status) -> Result<()> {
        self.agent.as_ref().decline_ticket(peer, ticket, cause)
    }

    fn ticket_key(&self, ticket: &[u8]) -> Result<Key> {
        let body = |magic: [u8; 4]| {
            let (head, body) = ticket.split_at_checked(TICKET_HEAD)?;
            head.starts_with(&magic).then_some(body)
        };
        let of_ticket = || Ticket::decode(body(TICKET_MAGIC)?).ok()?.key;
        let of_offer = || Offer::decode(body(OFFER_MAGIC)?).ok()?.key;
        match of_ticket().or_else(of_offer) {
            Some(key) => Ok(Key {
                request: key.request,
                attempt: key.attempt,
            }),
            None => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} bytes are no ticket and no offer; pass those of the context side's \
                 respond_and_send (pull) or of the generation side's request_and_receive (push)",
                ticket.len()
            ),
        }
    }

    fn join(
        &self,
        domain: u64,
        world: u32,
        rank: u32,
        events: Weak<dyn DomainEvents>,
    ) -> Result<()> {
        let agent = self.agent.as_ref();
        let (ranks, mine) = agent.domain_ranks()?;
        let place = ranks.iter().position(|r| *r == mine);
        if ranks.len() != world as usize || place != Some(rank as usize) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "rank {rank} of {world} in the configuration, but engine rank {mine} is rank {} of \
                 the {} of its data-parallel index (engine ranks {ranks:?}); a domain is all of \
                 them, in ascending order",
                place.unwrap_or_default(),
                ranks.len()
            );
        }
        // The leader speaks with all, the others with the leader.
        let mates = match rank {
            0 => &ranks[1..],
            _ => &ranks[..1],
        };
        let mates = mates.to_vec();
        let member = Arc::new(Member {
            domain,
            ranks,
            events,
        });
        let hears: Weak<Member> = Arc::downgrade(&member);
        agent.group_join(domain, &mates, hears)?;
        // Once only, by the transceiver that this port was made for.
        let _ = self.member.set(member);
        Ok(())
    }

    fn send(&self, rank: u32, _: Side, bytes: Vec<u8>) -> Result<()> {
        let member = self.member.get();
        match member.and_then(|m| Some((m, m.ranks.get(rank as usize)?))) {
            Some((member, rank)) => {
                let agent = self.agent.as_ref();
                agent.group_send(*rank, member.domain, bytes)
            }
            None => bail!(KVF_ERR_STATE, "rank {rank} of a domain that was not joined"),
        }
    }

    fn alarm(&self, after: Duration) {
        if let Some(member) = self.member.get() {
            self.agent.as_ref().group_alarm(member.domain, after);
        }
    }
}

/// Looks at an operation when it is told that there is news. News that come before the begin has
/// returned wait for its handle.
struct Watch<T> {
    notify: Notify,
    handle: OnceLock<Weak<T>>,
    early: Mutex<Vec<agent::Notice>>,
}

/// A handle that tells how it ended.
trait Handle: Operation + Sized + 'static {
    fn end(&self) -> End;
}

impl<T: Handle> Watch<T> {
    fn new(notify: Notify) -> Arc<Self> {
        Arc::new(Self {
            notify,
            handle: OnceLock::new(),
            early: Mutex::default(),
        })
    }

    fn observer(self: &Arc<Self>) -> Observer {
        let watch = self.clone();
        Arc::new(move |notice| watch.hear(notice))
    }

    fn hear(&self, notice: agent::Notice) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = self.handle.get() else {
            early.push(notice);
            return;
        };
        drop(early);
        if let Some(handle) = handle.upgrade() {
            self.pass_on(&handle, notice);
        }
    }

    fn begun(&self, handle: T) -> Arc<dyn Operation> {
        let handle = Arc::new(handle);
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        // Once only, here.
        let _ = self.handle.set(Arc::downgrade(&handle));
        let missed = std::mem::take(&mut *early);
        drop(early);
        for notice in missed {
            self.pass_on(&handle, notice);
        }
        handle
    }

    fn pass_on(&self, handle: &T, notice: agent::Notice) {
        (self.notify)(match notice {
            agent::Notice::Ended => Notice::Ended(handle.end()),
            agent::Notice::MemorySafe => Notice::MemorySafe,
        });
    }
}

impl Operation for Publication {
    fn ticket(&self) -> Vec<u8> {
        Publication::ticket(self).to_vec()
    }
    fn cancel(&self) {
        self.release();
    }
    fn error_text(&self) -> String {
        Publication::error_text(self)
    }
    fn aux(&self) -> Vec<u8> {
        Vec::new()
    }
}

impl Handle for Publication {
    fn end(&self) -> End {
        let info = self.info();
        End {
            outcome: info.outcome,
            cause: info.cause,
            memory_safe: info.memory_safe,
            bytes: info.bytes,
            bytes_total: info.bytes,
            first_byte_ns: info.first_byte_ns,
            last_byte_ns: info.last_byte_ns,
            transport: "",
        }
    }
}

impl Operation for Transfer {
    fn ticket(&self) -> Vec<u8> {
        self.offer().map(<[u8]>::to_vec).unwrap_or_default()
    }
    fn cancel(&self) {
        Transfer::cancel(self);
    }
    fn error_text(&self) -> String {
        Transfer::error_text(self)
    }
    fn aux(&self) -> Vec<u8> {
        Transfer::aux(self)
    }
}

impl Handle for Transfer {
    fn end(&self) -> End {
        let info = self.info();
        End {
            outcome: info.outcome,
            cause: info.cause,
            memory_safe: info.memory_safe,
            bytes: info.bytes,
            bytes_total: info.bytes_total,
            first_byte_ns: info.first_byte_ns,
            last_byte_ns: info.last_byte_ns,
            transport: info.transport,
        }
    }
}
