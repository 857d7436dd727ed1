//! Metadata of engines.

use prost::Message;

use super::PoolMemory;

/// Bytes at the start of engine and agent metadata.
pub const METADATA_MAGIC: [u8; 4] = *b"KVFM";

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
