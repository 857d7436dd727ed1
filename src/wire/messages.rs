//! The messages. Field numbers are never reused; a newer peer's unknown fields are skipped.

use prost::bytes::Bytes;
use prost::{Message, Oneof};

/// Protocol version that both sides must share.
pub const PROTOCOL: u32 = 2;

/// Bytes at the start of engine and agent metadata.
pub const METADATA_MAGIC: [u8; 4] = *b"KVFM";
/// Bytes at the start of a ticket.
pub const TICKET_MAGIC: [u8; 4] = *b"KVFT";
/// Bytes at the start of an offer.
pub const OFFER_MAGIC: [u8; 4] = *b"KVFO";
/// Bytes before the message of a ticket or offer: magic, version, its length, its CRC-32.
pub const TICKET_HEAD: usize = 13;

/// One control message.
#[derive(Clone, PartialEq, Message)]
pub struct Frame {
    /// What it says.
    #[prost(
        oneof = "Body",
        tags = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 30, 31, 32, 33, 40, 41, 42"
    )]
    pub body: Option<Body>,
}

/// The kinds of control messages.
#[derive(Clone, PartialEq, Oneof)]
pub enum Body {
    /// Control link, once it is open: who connects.
    #[prost(message, tag = "1")]
    Hello(Hello),
    /// The answer to a hello.
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    /// The other answer; the link is closed after it.
    #[prost(message, tag = "3")]
    Refuse(Refuse),
    /// A reader wants to map the other side's memory.
    #[prost(message, tag = "4")]
    MemoryRequest(MemoryRequest),
    /// What can be mapped; file descriptors travel beside it.
    #[prost(message, tag = "5")]
    Memory(Memory),
    /// Nothing to say, still alive.
    #[prost(message, tag = "6")]
    Heartbeat(Heartbeat),
    /// A reader has begun (or, unanswered so far, wants to know what was published).
    #[prost(message, tag = "7")]
    Claim(Claim),
    /// What was published under a key.
    #[prost(message, tag = "8")]
    Published(Published),
    /// A reader is still at it, or still has the request queued.
    #[prost(message, tag = "9")]
    Renew(Renew),
    /// A reader has finished, in success or failure. Re-sent until acknowledged.
    #[prost(message, tag = "10")]
    Finished(Finished),
    /// The source has noted it.
    #[prost(message, tag = "11")]
    FinishedAck(FinishedAck),
    /// The source's publication ended before this reader had finished.
    #[prost(message, tag = "12")]
    Ended(Ended),
    /// A sender's slots for an offer: please fetch them.
    #[prost(message, tag = "13")]
    Push(Push),
    /// The receiver's answer to a push that it cannot serve, or the end of its offer.
    #[prost(message, tag = "14")]
    OfferEnded(OfferEnded),
    /// The agent is leaving in an orderly way.
    #[prost(message, tag = "15")]
    Goodbye(Goodbye),
    /// Opaque bytes for another room (consensus votes).
    #[prost(message, tag = "16")]
    Group(GroupMessage),
    /// Data connection, once it is open: what for.
    #[prost(message, tag = "17")]
    DataHello(DataHello),
    /// Data connection: a job begins.
    #[prost(message, tag = "18")]
    DataOpen(DataOpen),
    /// Data connection: send these pieces.
    #[prost(message, tag = "19")]
    DataRead(DataRead),
    /// Data connection: a job is over.
    #[prost(message, tag = "20")]
    DataClose(DataClose),
    /// First message of whoever connects, on every connection.
    #[prost(message, tag = "30")]
    Open(Open),
    /// Prove that you know the key.
    #[prost(message, tag = "31")]
    Challenge(Challenge),
    /// The proof of who connects.
    #[prost(message, tag = "32")]
    Proof(Proof),
    /// The connection is open; with the answering side's proof.
    #[prost(message, tag = "33")]
    Accepted(Accepted),
    /// What was published may be read: the source's stream has come so far.
    #[prost(message, tag = "40")]
    Readable(Readable),
    /// The source wants to free a pool that the reader has mapped.
    #[prost(message, tag = "41")]
    Unmap(Unmap),
    /// The reader has unmapped it.
    #[prost(message, tag = "42")]
    Unmapped(Unmap),
}

/// A connection's first message: small, so that a stranger costs little. See [`super::opening`].
#[derive(Clone, PartialEq, Message)]
pub struct Open {
    /// [`PROTOCOL`].
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// 1 control link, 2 data connection.
    #[prost(uint32, tag = "2")]
    pub purpose: u32,
    /// The connecting agent.
    #[prost(bytes = "vec", tag = "3")]
    pub incarnation: Vec<u8>,
    /// The agent that must answer.
    #[prost(bytes = "vec", tag = "4")]
    pub target: Vec<u8>,
    /// 32 bytes that were never used before.
    #[prost(bytes = "vec", tag = "5")]
    pub nonce: Vec<u8>,
    /// The connecting agent has a pre-shared key.
    #[prost(bool, tag = "6")]
    pub keyed: bool,
    /// The connecting agent's name, for people; cut when it is long.
    #[prost(string, tag = "7")]
    pub name: String,
}

/// The answering side's nonce, if both have a key.
#[derive(Clone, PartialEq, Message)]
pub struct Challenge {
    /// 32 bytes that were never used before.
    #[prost(bytes = "vec", tag = "1")]
    pub nonce: Vec<u8>,
}

/// The connecting side's proof.
#[derive(Clone, PartialEq, Message)]
pub struct Proof {
    /// HMAC-SHA256, 32 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub mac: Vec<u8>,
}

/// The connection is open.
#[derive(Clone, PartialEq, Message)]
pub struct Accepted {
    /// The answering side's proof, HMAC-SHA256; empty if neither side has a key.
    #[prost(bytes = "vec", tag = "1")]
    pub mac: Vec<u8>,
}

/// Who connects; its incarnation and whom it means are in [`Open`].
#[derive(Clone, PartialEq, Message)]
pub struct Hello {
    /// Its global rank.
    #[prost(uint32, tag = "4")]
    pub rank: u32,
    /// Metadata of its engine.
    #[prost(bytes = "vec", tag = "5")]
    pub engine: Vec<u8>,
    /// Its name.
    #[prost(string, tag = "6")]
    pub name: String,
}

/// The answering agent.
#[derive(Clone, PartialEq, Message)]
pub struct Welcome {
    /// [`PROTOCOL`].
    #[prost(uint32, tag = "1")]
    pub protocol: u32,
    /// The answering agent.
    #[prost(bytes = "vec", tag = "2")]
    pub incarnation: Vec<u8>,
}

/// Why the answering agent does not want to talk.
#[derive(Clone, PartialEq, Message)]
pub struct Refuse {
    /// A `kvf_status`.
    #[prost(sint32, tag = "1")]
    pub status: i32,
    /// For people.
    #[prost(string, tag = "2")]
    pub text: String,
}

/// Please send [`Memory`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct MemoryRequest {
    /// Also for UCX, which the source may have to load for it.
    #[prost(bool, tag = "1")]
    pub ucx: bool,
    /// By gets, if the source can serve them too; else by messages.
    #[prost(bool, tag = "2")]
    pub ucx_gets: bool,
    /// Also of device memory: the reader looks at `UcxKey.address` and tries the keys.
    #[prost(bool, tag = "3")]
    pub ucx_device_gets: bool,
}

/// Memory of the sending agent. File descriptors: the lease table, then each mappable pool.
#[derive(Clone, PartialEq, Message)]
pub struct Memory {
    /// Pools in ascending id.
    #[prost(message, repeated, tag = "1")]
    pub pools: Vec<PoolMemory>,
    /// The nonce at the head of the lease table.
    #[prost(bytes = "vec", tag = "2")]
    pub nonce: Vec<u8>,
    /// Bytes of the lease table.
    #[prost(uint64, tag = "3")]
    pub lease_bytes: u64,
    /// Its address in the sending process.
    #[prost(uint64, tag = "4")]
    pub lease_address: u64,
    /// File descriptors that travel with this message.
    #[prost(uint32, tag = "5")]
    pub descriptors: u32,
    /// Proves on a data connection that it belongs to this link.
    #[prost(bytes = "vec", tag = "6")]
    pub token: Vec<u8>,
    /// If the reader asked for it.
    #[prost(message, optional, boxed, tag = "7")]
    pub ucx: Option<Box<UcxMemory>>,
}

/// How the sending agent's memory is read through UCX.
#[derive(Clone, PartialEq, Message)]
pub struct UcxMemory {
    /// UCX's version.
    #[prost(string, tag = "1")]
    pub version: String,
    /// Of its worker.
    #[prost(bytes = "vec", tag = "2")]
    pub address: Vec<u8>,
    /// Packed key of the lease table. Empty: messages, not gets.
    #[prost(bytes = "vec", tag = "3")]
    pub lease_key: Vec<u8>,
    /// Packed keys of the pools.
    #[prost(message, repeated, tag = "4")]
    pub keys: Vec<UcxKey>,
    /// Why UCX cannot be used there; empty if it can.
    #[prost(string, tag = "5")]
    pub refused: String,
    /// Why there are no keys for a reader that wanted gets; empty if there are.
    #[prost(string, tag = "6")]
    pub no_gets: String,
}

/// A pool's packed key.
#[derive(Clone, PartialEq, Message)]
pub struct UcxKey {
    /// Pool id.
    #[prost(uint32, tag = "1")]
    pub pool: u32,
    /// The key.
    #[prost(bytes = "vec", tag = "2")]
    pub key: Vec<u8>,
    /// Of device memory: where it lies there. 0: memory of the host, at the pool's address.
    #[prost(uint64, tag = "3")]
    pub address: u64,
}

/// One pool of the sending agent.
#[derive(Clone, PartialEq, Message)]
pub struct PoolMemory {
    /// Pool id.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Length.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
    /// Address in the sending process.
    #[prost(uint64, tag = "3")]
    pub address: u64,
    /// A descriptor of it travels along.
    #[prost(bool, tag = "4")]
    pub mappable: bool,
    /// Set if it is memory of a CUDA device; `address` is 0 then.
    #[prost(message, optional, tag = "20")]
    pub device: Option<DeviceMemory>,
}

/// Where a device pool is.
#[derive(Clone, PartialEq, Message)]
pub struct DeviceMemory {
    /// The device, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub uuid: Vec<u8>,
    /// CUDA IPC handle of the allocation, 64 bytes; empty = it cannot be mapped.
    #[prost(bytes = "vec", tag = "2")]
    pub handle: Vec<u8>,
    /// Where the pool begins in its allocation.
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    /// Why there is no handle.
    #[prost(string, tag = "4")]
    pub reason: String,
}

/// A publication whose stream has come so far.
#[derive(Clone, PartialEq, Message)]
pub struct Readable {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// A pool of the source that the reader has mapped.
#[derive(Clone, PartialEq, Message)]
pub struct Unmap {
    /// Pool id.
    #[prost(uint32, tag = "1")]
    pub pool: u32,
}

/// Nothing to say.
#[derive(Clone, PartialEq, Message)]
pub struct Heartbeat {
    /// Counts up; for captures.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
}

/// Request and attempt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct KeyMessage {
    /// Request id.
    #[prost(uint64, tag = "1")]
    pub request: u64,
    /// Attempt.
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
}

/// A reader's first contact.
#[derive(Clone, PartialEq, Message)]
pub struct Claim {
    /// What it reads.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication; 0 = the reader has no ticket of this rank: answer with [`Published`],
    /// now or when it is published.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// Answer to a claim without an epoch.
#[derive(Clone, PartialEq, Message)]
pub struct Published {
    /// What was asked for.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// This rank's entry.
    #[prost(message, optional, tag = "2")]
    pub entry: Option<TicketEntry>,
}

/// The reader is alive.
#[derive(Clone, PartialEq, Message)]
pub struct Renew {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// The reader's end.
#[derive(Clone, PartialEq, Message)]
pub struct Finished {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// A `kvf_status`: `KVF_OK`, or why not.
    #[prost(sint32, tag = "3")]
    pub status: i32,
    /// Bytes that the reader took from this source.
    #[prost(uint64, tag = "4")]
    pub bytes: u64,
}

/// The source has noted a [`Finished`].
#[derive(Clone, PartialEq, Message)]
pub struct FinishedAck {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
}

/// The source's end.
#[derive(Clone, PartialEq, Message)]
pub struct Ended {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// Which publication; 0 = the claim named none.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// A `kvf_status`.
    #[prost(sint32, tag = "3")]
    pub status: i32,
    /// For people.
    #[prost(string, tag = "4")]
    pub text: String,
}

/// A sender's part of a push: the receiver fetches it into the slots it offered.
#[derive(Clone, PartialEq, Message)]
pub struct Push {
    /// The receiver's offer.
    #[prost(uint64, tag = "1")]
    pub offer: u64,
    /// The sender's ticket.
    #[prost(bytes = "vec", tag = "2")]
    pub ticket: Vec<u8>,
}

/// An offer is over.
#[derive(Clone, PartialEq, Message)]
pub struct OfferEnded {
    /// The receiver's offer.
    #[prost(uint64, tag = "1")]
    pub offer: u64,
    /// Request and attempt of the push.
    #[prost(message, optional, tag = "2")]
    pub key: Option<KeyMessage>,
    /// The sender's publication.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// A `kvf_status`.
    #[prost(sint32, tag = "4")]
    pub status: i32,
    /// For people.
    #[prost(string, tag = "5")]
    pub text: String,
}

/// Orderly end.
#[derive(Clone, PartialEq, Message)]
pub struct Goodbye {
    /// For people.
    #[prost(string, tag = "1")]
    pub text: String,
}

/// Bytes between ranks of one engine.
#[derive(Clone, PartialEq, Message)]
pub struct GroupMessage {
    /// Who they are for.
    #[prost(uint64, tag = "1")]
    pub channel: u64,
    /// The bytes.
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
    /// Place among the sender's messages to this rank, from 1; 0: only an acknowledgement.
    #[prost(uint64, tag = "3")]
    pub sequence: u64,
    /// Everything up to this place has come.
    #[prost(uint64, tag = "4")]
    pub acked: u64,
    /// The sender's last message on this channel.
    #[prost(bool, tag = "5")]
    pub leaves: bool,
}

/// What travels with a request.
#[derive(Clone, PartialEq, Message)]
pub struct Ticket {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// The publishing engine.
    #[prost(bytes = "vec", tag = "2")]
    pub engine: Vec<u8>,
    /// Which attention-data-parallel index of it.
    #[prost(uint32, tag = "3")]
    pub dp_rank: u32,
    /// At least the publishing rank's entry; others are asked for theirs.
    #[prost(message, repeated, tag = "4")]
    pub entries: Vec<TicketEntry>,
    /// The caller's bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub aux: Vec<u8>,
    /// Hash of the last block before the published ones; 0 = none.
    #[prost(uint64, tag = "6")]
    pub prefix_tag: u64,
    /// Lease, in nanoseconds: how often a reader must renew.
    #[prost(uint64, tag = "7")]
    pub lease_ns: u64,
}

/// One source rank's publication.
#[derive(Clone, PartialEq, Message)]
pub struct TicketEntry {
    /// Global rank.
    #[prost(uint32, tag = "1")]
    pub rank: u32,
    /// The agent.
    #[prost(bytes = "vec", tag = "2")]
    pub incarnation: Vec<u8>,
    /// Which publication of the key.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Lease word.
    #[prost(uint32, tag = "4")]
    pub lease_index: u32,
    /// What it says while the lease holds.
    #[prost(uint64, tag = "5")]
    pub lease_generation: u64,
    /// Paged groups.
    #[prost(message, repeated, tag = "6")]
    pub groups: Vec<TicketGroup>,
    /// State slots.
    #[prost(message, repeated, tag = "7")]
    pub states: Vec<TicketState>,
    /// Not to be read before the source has sent [`Readable`]; a claim asks for it.
    #[prost(bool, tag = "20")]
    pub gated: bool,
}

/// Blocks of one group.
#[derive(Clone, PartialEq, Message)]
pub struct TicketGroup {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// Block of each owned ordinal, -1 = not held; see [`super::pack_slots`]. A part of the ticket
    /// it came in: a table is long, and the caller waits.
    #[prost(bytes = "bytes", tag = "2")]
    pub slots: Bytes,
    /// First valid token.
    #[prost(uint64, tag = "3")]
    pub token_begin: u64,
    /// End of the valid tokens.
    #[prost(uint64, tag = "4")]
    pub token_end: u64,
    /// Block ordinal from which `slots` counts.
    #[prost(uint64, tag = "5")]
    pub first_ordinal: u64,
}

/// One state slot.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct TicketState {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// Slot.
    #[prost(sint32, tag = "2")]
    pub slot: i32,
    /// After this many tokens.
    #[prost(uint64, tag = "3")]
    pub as_of_token: u64,
}

/// What an open data connection is for: which control link it belongs to.
#[derive(Clone, PartialEq, Message)]
pub struct DataHello {
    /// The token of the [`Memory`] message.
    #[prost(bytes = "vec", tag = "3")]
    pub token: Vec<u8>,
    /// Over UCX: what answers are to begin with.
    #[prost(bytes = "vec", tag = "4")]
    pub secret: Vec<u8>,
    /// Over UCX: of the reader's worker.
    #[prost(bytes = "vec", tag = "5")]
    pub address: Vec<u8>,
    /// Over UCX: the number that the answer to this bears.
    #[prost(uint64, tag = "6")]
    pub job: u64,
    /// Over UCX: the connections that there were do not answer; make a new one.
    #[prost(bool, tag = "7")]
    pub anew: bool,
}

/// What a reader reads on a data connection: enough for the source to derive the same copies.
#[derive(Clone, PartialEq, Message)]
pub struct DataOpen {
    /// Number of the job on this connection.
    #[prost(uint64, tag = "1")]
    pub job: u64,
    /// Request and attempt.
    #[prost(message, optional, tag = "2")]
    pub key: Option<KeyMessage>,
    /// Which publication.
    #[prost(uint64, tag = "3")]
    pub epoch: u64,
    /// Paged groups, then states, in the reader's order.
    #[prost(message, repeated, tag = "4")]
    pub parts: Vec<DataPart>,
}

/// One group or state of a reader.
#[derive(Clone, PartialEq, Message)]
pub struct DataPart {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// A state slot, not a paged group.
    #[prost(bool, tag = "2")]
    pub state: bool,
    /// The reader's slots; see [`super::pack_slots`].
    #[prost(bytes = "vec", tag = "3")]
    pub slots: Vec<u8>,
    /// Block ordinal from which `slots` counts.
    #[prost(uint64, tag = "4")]
    pub first_ordinal: u64,
    /// First wanted token.
    #[prost(uint64, tag = "5")]
    pub skip_token: u64,
    /// End of the wanted tokens; of a state: as of which token.
    #[prost(uint64, tag = "6")]
    pub token_end: u64,
}

/// Some pieces of an opened job, please.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct DataRead {
    /// Number of the job on this connection.
    #[prost(uint64, tag = "1")]
    pub job: u64,
    /// Index of the binding.
    #[prost(uint32, tag = "2")]
    pub binding: u32,
    /// Position in it: piece, segment, bytes taken.
    #[prost(uint64, tag = "3")]
    pub piece: u64,
    /// See `piece`.
    #[prost(uint64, tag = "4")]
    pub segment: u64,
    /// See `piece`.
    #[prost(uint64, tag = "5")]
    pub taken: u64,
    /// As many bytes as this at most.
    #[prost(uint64, tag = "6")]
    pub max_bytes: u64,
}

/// The job is over.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct DataClose {
    /// Number of the job on this connection.
    #[prost(uint64, tag = "1")]
    pub job: u64,
}

/// A receiver's slots, on their way to the sender.
#[derive(Clone, PartialEq, Message)]
pub struct Offer {
    /// Request and attempt.
    #[prost(message, optional, tag = "1")]
    pub key: Option<KeyMessage>,
    /// The receiving engine.
    #[prost(bytes = "vec", tag = "2")]
    pub engine: Vec<u8>,
    /// The receiving rank.
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    /// The receiving agent.
    #[prost(bytes = "vec", tag = "4")]
    pub incarnation: Vec<u8>,
    /// Its id of the offer.
    #[prost(uint64, tag = "5")]
    pub offer: u64,
    /// What it wants.
    #[prost(message, repeated, tag = "6")]
    pub groups: Vec<OfferGroup>,
    /// Groups of the states it wants.
    #[prost(uint32, repeated, tag = "7")]
    pub states: Vec<u32>,
}

/// Tokens that a receiver wants of one group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct OfferGroup {
    /// Group id.
    #[prost(uint32, tag = "1")]
    pub group: u32,
    /// First wanted token.
    #[prost(uint64, tag = "2")]
    pub skip_token: u64,
    /// End of the wanted tokens.
    #[prost(uint64, tag = "3")]
    pub token_end: u64,
}

/// The bounded part of metadata that is compared before anything else is decoded.
#[derive(Clone, PartialEq, Message)]
pub struct Invariants {
    /// Model, revision, cache format.
    #[prost(string, tag = "1")]
    pub fingerprint: String,
    /// By group id.
    #[prost(message, repeated, tag = "2")]
    pub groups: Vec<InvariantGroup>,
}

/// What two engines must have in common about a group.
#[derive(Clone, PartialEq, Message)]
pub struct InvariantGroup {
    /// 0 paged, 1 state.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Global layers, ascending.
    #[prost(uint32, repeated, tag = "2")]
    pub layers: Vec<u32>,
    /// By role.
    #[prost(message, repeated, tag = "3")]
    pub views: Vec<InvariantView>,
}

/// What two engines must have in common about a view.
#[derive(Clone, PartialEq, Message)]
pub struct InvariantView {
    /// Role number.
    #[prost(uint32, tag = "1")]
    pub role: u32,
    /// Bits of an element.
    #[prost(uint32, tag = "2")]
    pub element_bits: u32,
    /// Bytes of a head.
    #[prost(uint64, tag = "3")]
    pub bytes_per_head: u64,
    /// Heads over all shards.
    #[prost(uint64, tag = "4")]
    pub total_heads: u64,
    /// Sections.
    #[prost(message, repeated, tag = "5")]
    pub sections: Vec<SectionMessage>,
}

/// A packed section.
#[derive(Clone, PartialEq, Message)]
pub struct SectionMessage {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Global channels.
    #[prost(uint32, tag = "2")]
    pub total: u32,
}

/// All ranks of an engine.
#[derive(Clone, PartialEq, Message)]
pub struct EngineMetadata {
    /// In order of global rank.
    #[prost(message, repeated, tag = "1")]
    pub ranks: Vec<AgentMetadata>,
}

/// One rank.
#[derive(Clone, PartialEq, Message)]
pub struct AgentMetadata {
    /// The agent.
    #[prost(bytes = "vec", tag = "1")]
    pub incarnation: Vec<u8>,
    /// For people.
    #[prost(string, tag = "2")]
    pub name: String,
    /// Random id of its process.
    #[prost(bytes = "vec", tag = "3")]
    pub process: Vec<u8>,
    /// Identity of its running kernel.
    #[prost(string, tag = "4")]
    pub host: String,
    /// `host:port` of its control socket.
    #[prost(string, tag = "5")]
    pub address: String,
    /// Pool ids and lengths.
    #[prost(message, repeated, tag = "6")]
    pub pools: Vec<PoolMemory>,
    /// What it holds.
    #[prost(message, optional, tag = "7")]
    pub layout: Option<LayoutMessage>,
}

/// A layout.
#[derive(Clone, PartialEq, Message)]
pub struct LayoutMessage {
    /// Fingerprint.
    #[prost(string, tag = "1")]
    pub fingerprint: String,
    /// global, tp, tp size, pp, pp size, cp, cp size, dp, dp size.
    #[prost(uint32, repeated, tag = "2")]
    pub coordinates: Vec<u32>,
    /// Groups.
    #[prost(message, repeated, tag = "3")]
    pub groups: Vec<GroupLayout>,
}

/// A group of a layout.
#[derive(Clone, PartialEq, Message)]
pub struct GroupLayout {
    /// 0 paged, 1 state.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Paged.
    #[prost(uint32, tag = "2")]
    pub tokens_per_block: u32,
    /// Paged.
    #[prost(uint32, tag = "3")]
    pub window: u32,
    /// Global ids in local order.
    #[prost(uint32, repeated, tag = "4")]
    pub layers: Vec<u32>,
    /// Owned ordinals.
    #[prost(uint32, tag = "5")]
    pub ordinal_offset: u32,
    /// Owned ordinals.
    #[prost(uint32, tag = "6")]
    pub ordinal_stride: u32,
    /// Views.
    #[prost(message, repeated, tag = "7")]
    pub views: Vec<ViewLayout>,
}

/// A view of a layout.
#[derive(Clone, PartialEq, Message)]
pub struct ViewLayout {
    /// Role number.
    #[prost(uint32, tag = "1")]
    pub role: u32,
    /// Bits of an element.
    #[prost(uint32, tag = "2")]
    pub element_bits: u32,
    /// Local heads.
    #[prost(uint32, tag = "3")]
    pub heads: u32,
    /// Bytes of a head.
    #[prost(uint64, tag = "4")]
    pub bytes_per_head: u64,
    /// shards, shard, replicas, replica.
    #[prost(uint32, repeated, tag = "5")]
    pub sharding: Vec<u32>,
    /// Sections.
    #[prost(message, repeated, tag = "6")]
    pub sections: Vec<SectionMessage>,
    /// Pool of each tensor.
    #[prost(uint32, repeated, tag = "7")]
    pub tensor_pools: Vec<u32>,
    /// Offset of each tensor.
    #[prost(uint64, repeated, tag = "8")]
    pub tensor_offsets: Vec<u64>,
    /// Slots.
    #[prost(uint32, tag = "9")]
    pub slots: u32,
    /// slot, layer, token, head.
    #[prost(uint64, repeated, tag = "10")]
    pub strides: Vec<u64>,
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::{MemoryRequest, UcxKey};

    /// Before there were gets of device memory.
    #[derive(Clone, PartialEq, Message)]
    struct OldRequest {
        #[prost(bool, tag = "1")]
        ucx: bool,
        #[prost(bool, tag = "2")]
        ucx_gets: bool,
    }

    #[derive(Clone, PartialEq, Message)]
    struct OldKey {
        #[prost(uint32, tag = "1")]
        pool: u32,
        #[prost(bytes = "vec", tag = "2")]
        key: Vec<u8>,
    }

    #[test]
    fn gets_of_device_memory_are_unknown_to_older_peers_and_not_asked_for_by_them() {
        let new = MemoryRequest {
            ucx: true,
            ucx_gets: true,
            ucx_device_gets: true,
        };
        let old = OldRequest::decode(&new.encode_to_vec()[..]).unwrap();
        assert!(old.ucx && old.ucx_gets);
        let back = MemoryRequest::decode(&old.encode_to_vec()[..]).unwrap();
        assert!(back.ucx && back.ucx_gets && !back.ucx_device_gets);
        let key = UcxKey {
            pool: 3,
            key: vec![1, 2],
            address: 0x7000,
        };
        let old = OldKey::decode(&key.encode_to_vec()[..]).unwrap();
        assert_eq!((old.pool, &old.key[..]), (3, &[1, 2][..]));
        let back = UcxKey::decode(&old.encode_to_vec()[..]).unwrap();
        assert_eq!(back.address, 0);
    }
}
