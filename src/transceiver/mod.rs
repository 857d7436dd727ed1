//! The request level: what is in flight, what has ended, and agreement of an engine's ranks.
//!
//! A [`Transceiver`] keeps one [`table::Table`] per side under one lock each. Operations report
//! their ends through [`port::Notify`] from the agent's threads; a completion goes straight into
//! its side's queue of results, so that a status call costs what has ended and not what is
//! pending. Nothing here has a thread, and nothing is done only because a status call comes:
//! leases, slots and quarantine are the agent's.
//!
//! Locks, in order: exchange or outbox, one side's table, the signal. No lock is held while the
//! port or the caller's all-gather is called, except the exchange and the outbox, which nothing
//! takes from inside those calls.

mod agent_port;
mod agreement;
mod api;
mod codec;
mod domain;
mod gather;
pub mod port;
mod records;
mod request;
mod results;
mod room;
mod shared;
mod signal;
mod status;
mod table;

pub use agent_port::AgentPort;
pub use api::*;
pub use codec::{DECISION_ENTRY, DECISION_HEAD};
pub use gather::framed;
pub use records::RecordFormat;
pub use room::Transceiver;
