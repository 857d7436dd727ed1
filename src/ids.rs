//! Identities: which agent's lifetime, which request and attempt, which publication of it.

use std::fmt;

/// Random 128-bit id of one agent's lifetime. A restarted peer is a different peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Incarnation(pub [u8; 16]);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Eight digits tell two agents apart in a log line.
        self.0[..4].iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// A request and which attempt at it; chosen by the orchestrator.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Key {
    /// The orchestrator's request id.
    pub request: u64,
    /// Grows when the same request is handed over again.
    pub attempt: u32,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "request {} attempt {}", self.request, self.attempt)
    }
}

/// Tells two publications of one key by one agent apart; never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Epoch(pub u64);

/// Identity of a publication: everything a notice must name to have an effect.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct PublicationId {
    /// The publishing agent.
    pub source: Incarnation,
    /// What it published.
    pub key: Key,
    /// Which publication of that key.
    pub epoch: Epoch,
}

/// A reader of a publication: one rank of one engine's lifetime.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Consumer {
    /// The reading agent.
    pub incarnation: Incarnation,
    /// Its global rank.
    pub rank: u32,
}
