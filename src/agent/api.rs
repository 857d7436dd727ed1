//! What callers give to an agent and what they get back. Plain data: the C ABI and the
//! transceiver fill these, the agent checks them.

use std::time::Duration;

use crate::cuda::CallerStream;
use crate::error::Status;
use crate::ids::Key;
pub use crate::wire::AuthKey;

/// How long things may take. Every field has a default; `docs/protocol.md` has the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Connecting and shaking hands with one peer agent, one attempt.
    pub connect: Duration,
    /// A peer that has sent nothing for this long is declared lost.
    pub peer_silence: Duration,
    /// Distance of heartbeats on a link without other traffic.
    pub heartbeat: Duration,
    /// Publication without a reader.
    pub claim: Duration,
    /// Publication with a reader that no longer renews.
    pub lease: Duration,
    /// Transfer whose descriptor names no deadline.
    pub transfer: Duration,
}

impl Timeouts {
    /// A data connection whose other end does not answer the kernel. Longer than the silence of a peer, so
    /// that one that is cut off is lost as a peer, which says more than that a connection broke.
    pub fn data_silence(&self) -> Duration {
        self.peer_silence.saturating_add(self.heartbeat)
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            peer_silence: Duration::from_secs(10),
            heartbeat: Duration::from_secs(3),
            claim: Duration::from_secs(300),
            lease: Duration::from_secs(30),
            transfer: Duration::from_secs(60),
        }
    }
}

/// Parameters of an agent.
#[derive(Clone, Debug, Default)]
pub struct AgentConfig {
    /// For messages and thread names; need not be unique.
    pub name: String,
    /// `host:port` to listen on; empty = 127.0.0.1 and any port.
    pub listen: String,
    /// Copying threads; 0 = 2.
    pub workers: u32,
    /// CPUs the agent's threads may run on; empty = inherited.
    pub affinity: Vec<u32>,
    /// Allowed transports; empty = all (see also `KVFERRY_TRANSPORTS`).
    pub transports: Vec<String>,
    /// Model, revision and cache format; part of every layout of this agent.
    pub fingerprint: String,
    /// Deadlines.
    pub timeouts: Timeouts,
    /// Publications that may live at once; 0 = 65536.
    pub max_publications: u32,
    /// How long a thread looks at a data socket before it sleeps; zero = sleep at once. A thread
    /// that begins a small transfer looks too, much shorter.
    pub spin: Duration,
    /// Both sides of every connection must know it; `None` = no key, unless
    /// `KVFERRY_AUTH_KEY_FILE` names one.
    pub auth_key: Option<AuthKey>,
    /// `host:port` that peers are told; port 0 = the one listened on, empty = as listened on.
    pub advertise: String,
    /// Sockets: connections of one transfer to one source agent, and those kept; 0 = as workers.
    pub data_connections: u32,
    /// Listen beyond loopback without a key: open to everybody who can connect.
    pub allow_unauthenticated: bool,
}

/// A transfer's or publication's end, a peer's death: something the caller has not seen yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Id of the object it happened to (`Transfer::id`, `Publication::id`, `Peer::id`, pool id).
    pub object: u64,
    /// The caller's word from the descriptor that made the object.
    pub user_data: u64,
    /// The request, where there is one.
    pub key: Key,
    /// Cause; `KVF_OK` for a success.
    pub status: Status,
}

/// Kinds of events. The numbers are the C ABI's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A transfer has its outcome.
    TransferEnded = 1,
    /// The slots of an ended transfer may be reused.
    MemorySafe = 2,
    /// A publication has ended; its slots may be reused unless another one holds them.
    PublicationEnded = 3,
    /// A peer's agent can be used.
    PeerReady = 4,
    /// A peer died, went silent, or was replaced.
    PeerLost = 5,
    /// A pool's memory may be freed.
    PoolReleased = 6,
    /// A consensus decision is ready (transceiver).
    Decision = 7,
}

/// Blocks of one paged group in a publication.
#[derive(Clone, Debug, Default)]
pub struct PublishedGroup {
    /// Group id.
    pub group: u32,
    /// Block of each ordinal this rank owns, -1 = not held; block `i` holds the tokens of its ordinal.
    pub slots: Vec<i32>,
    /// Block ordinal from which `slots` counts: not 0 where a window's table starts later.
    pub first_ordinal: u64,
    /// First valid token.
    pub token_begin: u64,
    /// End of the valid tokens.
    pub token_end: u64,
}

/// One state slot in a publication.
#[derive(Clone, Copy, Debug, Default)]
pub struct PublishedState {
    /// Group id.
    pub group: u32,
    /// The request's slot.
    pub slot: i32,
    /// The state is the one after this many tokens.
    pub as_of_token: u64,
}

/// What [`super::Agent::publish`] offers.
#[derive(Clone, Debug, Default)]
pub struct PublishDesc {
    /// Request and attempt.
    pub key: Key,
    /// Paged groups.
    pub groups: Vec<PublishedGroup>,
    /// State slots.
    pub states: Vec<PublishedState>,
    /// Until the first reader; zero = the agent's default.
    pub claim: Duration,
    /// Without a renewal; zero = the agent's default.
    pub lease: Duration,
    /// Bytes that travel with the ticket (first tokens, draft tokens, ...), at most 64 KiB.
    pub aux: Vec<u8>,
    /// Hash of the last block before the published ones; 0 = none. Compared if both sides set it.
    pub prefix_tag: u64,
    /// The slots hold their bytes when what this stream holds so far is done.
    pub stream: Option<CallerStream>,
    /// Returned in events.
    pub user_data: u64,
}

/// One paged group to import.
#[derive(Clone, Debug, Default)]
pub struct ImportGroup {
    /// Group id.
    pub group: u32,
    /// Destination block of each ordinal this rank owns, -1 = not wanted; ends with the block of
    /// the last wanted token.
    pub slots: Vec<i32>,
    /// Block ordinal from which `slots` counts: not 0 where a window's table starts later.
    pub first_ordinal: u64,
    /// Tokens before this one are already here; a multiple of our block size.
    pub skip_token: u64,
    /// End of the wanted tokens; `u64::MAX` = all that were published.
    pub token_end: u64,
}

/// One state slot to import.
#[derive(Clone, Copy, Debug, Default)]
pub struct ImportState {
    /// Group id.
    pub group: u32,
    /// Destination slot.
    pub slot: i32,
    /// Must equal what was published; `u64::MAX` = take whatever was published.
    pub as_of_token: u64,
}

/// What [`super::Agent::import_begin`] fetches (a pull is an import of one group).
#[derive(Clone, Debug, Default)]
pub struct ImportDesc {
    /// The ticket's bytes.
    pub ticket: Vec<u8>,
    /// Paged groups.
    pub groups: Vec<ImportGroup>,
    /// State slots.
    pub states: Vec<ImportState>,
    /// (group, slot) pairs that the request owns and that must not be written.
    pub owned_only: Vec<(u32, i32)>,
    /// From now; zero = the agent's default.
    pub deadline: Duration,
    /// Larger is served first.
    pub priority: i32,
    /// Compared with the publication's if both are set.
    pub prefix_tag: u64,
    /// Earlier users of the slots are done when what this stream holds so far is done.
    pub stream: Option<CallerStream>,
    /// Returned in events.
    pub user_data: u64,
}

/// What [`super::Agent::receive_begin`] offers to a sender.
#[derive(Clone, Debug, Default)]
pub struct ReceiveDesc {
    /// Request and attempt.
    pub key: Key,
    /// Paged groups; `token_end` `u64::MAX` = all that the sender has.
    pub groups: Vec<ImportGroup>,
    /// State slots.
    pub states: Vec<ImportState>,
    /// (group, slot) pairs that the request owns and that must not be written.
    pub owned_only: Vec<(u32, i32)>,
    /// From now; zero = the agent's default.
    pub deadline: Duration,
    /// Larger is served first.
    pub priority: i32,
    /// Compared with the sender's if both are set.
    pub prefix_tag: u64,
    /// Earlier users of the slots are done when what this stream holds so far is done.
    pub stream: Option<CallerStream>,
    /// Returned in events.
    pub user_data: u64,
}

/// How a transfer or publication ended. The numbers are the C ABI's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Outcome {
    /// Not ended.
    #[default]
    Pending = 0,
    /// Every byte arrived and the lease held throughout. Publication: every reader has finished.
    Done = 1,
    /// Something failed; see the cause.
    Failed = 2,
    /// Cancelled (publication: released) by this side.
    Cancelled = 3,
    /// Cancelled or released by the other side.
    CancelledByPeer = 4,
    /// A lease or deadline passed.
    Expired = 5,
    /// The other side declined.
    Declined = 6,
}

/// Kind of part in an import. The numbers are the C ABI's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// A paged group.
    Paged = 1,
    /// A state slot.
    State = 2,
}

/// Where a part stands. The numbers are the C ABI's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartState {
    /// Nothing to move: nothing was submitted.
    NotNeeded = 0,
    /// Waiting or copying.
    InProgress = 1,
    /// All its bytes are here.
    Done = 2,
    /// It did not complete.
    Failed = 3,
}

/// One part of an import.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartInfo {
    /// Group id.
    pub group: u32,
    /// Paged or state.
    pub kind: PartKind,
    /// Where it stands.
    pub state: PartState,
    /// Why it failed; `KVF_OK` otherwise.
    pub cause: Status,
    /// Bytes it has to move.
    pub bytes: u64,
}

/// A transfer, looked at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferInfo {
    /// How it ended, if it has.
    pub outcome: Outcome,
    /// Why; `KVF_OK` for a success, `KVF_IN_PROGRESS` while pending.
    pub cause: Status,
    /// No byte of its slots will be written any more on its behalf.
    pub memory_safe: bool,
    /// Bytes moved so far.
    pub bytes: u64,
    /// Bytes to move.
    pub bytes_total: u64,
    /// Transfers that were submitted to a data path: 0 for an empty one.
    pub submitted: u32,
    /// Nanoseconds from begin to the outcome; 0 while pending.
    pub elapsed_ns: u64,
    /// From begin to the first byte; 0 = none was copied yet. Push: to the first reader.
    pub first_byte_ns: u64,
    /// From begin to the last byte so far, not attested yet. Push: to the last reader's end.
    pub last_byte_ns: u64,
    /// Data path, `""` if none was needed.
    pub transport: &'static str,
    /// One entry per group and state of the descriptor.
    pub parts: Vec<PartInfo>,
}

/// A publication, looked at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicationInfo {
    /// How it ended, if it has.
    pub outcome: Outcome,
    /// Why; `KVF_IN_PROGRESS` while it lives.
    pub cause: Status,
    /// Ended, and no reader can be given its bytes any more.
    pub memory_safe: bool,
    /// A reader has been seen.
    pub claimed: bool,
    /// Readers that have finished.
    pub readers_done: u32,
    /// Readers that the plan expects; 0 = not known before the first one.
    pub readers_expected: u32,
    /// Bytes that readers say they took.
    pub bytes: u64,
    /// From the publication to its first reader; 0 = none yet.
    pub first_byte_ns: u64,
    /// From the publication to the last reader's end so far; 0 = none yet.
    pub last_byte_ns: u64,
}

/// Whether and how a peer can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// `KVF_OK` = ready, `KVF_IN_PROGRESS` = connecting, else why not.
    pub status: Status,
    /// Agents of the peer engine that we need, and how many of them are ready.
    pub ranks: u32,
    /// Ready ones.
    pub ranks_ready: u32,
    /// Chosen data path of the first rank and the reason for it and against the others.
    pub transport: &'static str,
    /// One line for people.
    pub text: String,
}
