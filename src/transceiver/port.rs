//! What the request level needs of the agent level, so that its logic runs without one in tests.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::api::Side;
use crate::agent::{ImportDesc, Outcome, PublishDesc, ReceiveDesc};
use crate::error::{Result, Status};
use crate::ids::Key;

/// How an operation ended on this rank.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct End {
    /// How.
    pub outcome: Outcome,
    /// Why.
    pub cause: Status,
    /// Nothing touches its slots any more.
    pub memory_safe: bool,
    /// Bytes moved.
    pub bytes: u64,
    /// Bytes to move.
    pub bytes_total: u64,
    /// From the operation's begin to its first byte, in ns; 0 = none was moved.
    pub first_byte_ns: u64,
    /// To its last byte.
    pub last_byte_ns: u64,
    /// Data path.
    pub transport: &'static str,
}

/// News of one operation: its end, and later its quiet if the end did not include it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Notice {
    /// It ended.
    Ended(End),
    /// It had ended; its memory is safe now.
    MemorySafe,
}

/// Called at most twice per operation, from any thread, also before the call that made the
/// operation returns. It neither waits nor calls back into the operation.
pub type Notify = Box<dyn Fn(Notice) + Send + Sync>;

/// A publication or transfer. Dropping one that runs must not block.
pub trait Operation: Send + Sync {
    /// The bytes that travel with the request: a publication's ticket, a receive's offer; empty
    /// for an import and a push.
    fn ticket(&self) -> Vec<u8>;
    /// Asks for its end.
    fn cancel(&self);
    /// What went wrong, for people.
    fn error_text(&self) -> String;
    /// The bytes that the publisher attached.
    fn aux(&self) -> Vec<u8>;
}

/// Hears what other ranks of the domain say. The port keeps a weak reference.
pub trait DomainEvents: Send + Sync {
    /// Bytes that a rank passed to [`Port::send`]; those of one rank arrive in order.
    fn message(&self, from: u32, bytes: &[u8]);
    /// A rank died, was replaced or has left. `None`: no other rank can be reached any more.
    fn lost(&self, rank: Option<u32>);
    /// The time given to [`Port::alarm`] has come.
    fn alarm(&self);
}

/// The agent level, as the request level sees it.
pub trait Port: Send + Sync + 'static {
    /// A remote engine.
    type Peer: ?Sized;

    /// Offers slots.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::publish`]; nothing changed and `notify` is never called.
    fn publish(&self, desc: PublishDesc, notify: Notify) -> Result<Arc<dyn Operation>>;

    /// Fetches what a ticket offers.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::import_begin`]; nothing changed and `notify` is never called.
    fn import(
        &self,
        peer: &Self::Peer,
        desc: ImportDesc,
        notify: Notify,
    ) -> Result<Arc<dyn Operation>>;

    /// Offers slots to a sender of this peer.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::receive_begin`]; nothing changed and `notify` is never called.
    fn receive(
        &self,
        sender: &Self::Peer,
        desc: ReceiveDesc,
        notify: Notify,
    ) -> Result<Arc<dyn Operation>>;

    /// Answers an offer.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::push_begin`]; nothing changed and `notify` is never called.
    fn push(
        &self,
        peer: &Self::Peer,
        offer: &[u8],
        desc: PublishDesc,
        deadline: Duration,
        notify: Notify,
    ) -> Result<Arc<dyn Operation>>;

    /// Tells the source that its ticket will not be used.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::decline_ticket`].
    fn decline(&self, peer: &Self::Peer, ticket: &[u8], cause: Status) -> Result<()>;

    /// The key that a ticket or an offer is about.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT`: neither.
    fn ticket_key(&self, ticket: &[u8]) -> Result<Key>;

    /// Starts hearing the other ranks of a domain of `world` ranks, as `rank` of them.
    ///
    /// # Errors
    /// The ranks are not the engine's, or this port cannot reach them.
    fn join(
        &self,
        domain: u64,
        world: u32,
        rank: u32,
        events: Weak<dyn DomainEvents>,
    ) -> Result<()>;

    /// Gives bytes to a rank of the domain, in order, without waiting.
    ///
    /// # Errors
    /// The rank is lost.
    fn send(&self, rank: u32, side: Side, bytes: Vec<u8>) -> Result<()>;

    /// Calls [`DomainEvents::alarm`] after so long, or earlier if an earlier time was asked for.
    fn alarm(&self, after: Duration);
}
