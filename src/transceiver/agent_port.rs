//! The request level's port to a real agent.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use prost::Message;

use super::api::Config;
use super::port::{End, Notice, Notify, Operation, Port};
use super::room::Transceiver;
use crate::agent::{self, Agent, ImportDesc, Observer, Peer, Publication, PublishDesc, Transfer};
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::wire::{TICKET_MAGIC, Ticket};

/// Bytes before a ticket's message: magic, version, length.
const TICKET_HEAD: usize = 9;

/// A port to the agent that `A` owns or shares.
#[derive(Debug)]
pub struct AgentPort<A>(A);

impl<A: AsRef<Agent> + Send + Sync + 'static> Transceiver<AgentPort<A>> {
    /// Makes a transceiver upon an agent, which it keeps alive.
    ///
    /// # Errors
    /// As [`Transceiver::with_port`].
    pub fn create(agent: A, config: Config) -> Result<Self> {
        Self::with_port(AgentPort(agent), config)
    }
}

impl<A: AsRef<Agent> + Send + Sync + 'static> Port for AgentPort<A> {
    type Peer = Peer;

    fn publish(&self, desc: PublishDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        let watch = Watch::new(notify);
        let publication = self
            .0
            .as_ref()
            .publish_observed(desc, Some(watch.observer()))?;
        Ok(watch.begun(publication))
    }

    fn import(&self, peer: &Peer, desc: ImportDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        let watch = Watch::new(notify);
        let transfer = self
            .0
            .as_ref()
            .import_observed(peer, desc, Some(watch.observer()))?;
        Ok(watch.begun(transfer))
    }

    fn decline(&self, peer: &Peer, ticket: &[u8], cause: Status) -> Result<()> {
        self.0.as_ref().decline_ticket(peer, ticket, cause)
    }

    fn ticket_key(&self, ticket: &[u8]) -> Result<Key> {
        let body = ticket
            .split_at_checked(TICKET_HEAD)
            .filter(|(head, _)| head.starts_with(&TICKET_MAGIC))
            .and_then(|(_, body)| Ticket::decode(body).ok());
        match body.and_then(|ticket| ticket.key) {
            Some(key) => Ok(Key {
                request: key.request,
                attempt: key.attempt,
            }),
            None => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} bytes are no ticket; pass those of the context side's respond_and_send",
                ticket.len()
            ),
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
        String::new()
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
            bytes: 0,
            bytes_total: 0,
            transport: "",
        }
    }
}

impl Operation for Transfer {
    fn ticket(&self) -> Vec<u8> {
        Vec::new()
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
            transport: info.transport,
        }
    }
}
