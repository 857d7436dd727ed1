//! What a rank holds, described explicitly: groups of layers, their views, strides, shards and
//! replicas. Nothing is derived from parallel sizes and nothing is inferred from a shape.
//!
//! Pure data and validation; the copies between two layouts are [`crate::plan`]'s.

/// Position of a rank in its engine. Only `global_rank` and `dp_rank` have a meaning to kvferry
/// (election of replicas, attention-DP routing); the others appear in messages for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Coordinates {
    /// Unique in the engine.
    pub global_rank: u32,
    /// Tensor-parallel index and size (size 0 is read as 1, also below).
    pub tp_rank: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline stage.
    pub pp_rank: u32,
    /// Number of pipeline stages.
    pub pp_size: u32,
    /// Context-parallel index.
    pub cp_rank: u32,
    /// Context-parallel size.
    pub cp_size: u32,
    /// Attention-data-parallel index.
    pub dp_rank: u32,
    /// Attention-data-parallel size.
    pub dp_size: u32,
}

/// Everything one rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Layout {
    /// Names model, revision and cache format; must be equal on both sides.
    pub fingerprint: String,
    /// Where the rank stands in its engine.
    pub coordinates: Coordinates,
    /// Layer groups; the index is the group's id and means the same on both sides. A rank without
    /// a layer of a group lists it with no layers.
    pub groups: Vec<Group>,
}

/// Layers that share one block table, or one state slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Paged or state.
    pub kind: GroupKind,
    /// Global layer ids in local order.
    pub layers: Vec<u32>,
    /// Which block ordinals this rank owns (context parallelism).
    pub ordinals: Ordinals,
    /// One view per role.
    pub views: Vec<View>,
}

/// How a group's slots relate to tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupKind {
    /// A slot is a block of tokens.
    Paged {
        /// Tokens in one block, at least 1.
        tokens_per_block: u32,
        /// Live tokens of a sliding window; 0 = all tokens are kept.
        window: u32,
    },
    /// A slot is one request's whole recurrent state.
    State,
}

/// Block ordinals `offset, offset + stride, ...` are this rank's; `{0, 1}` = all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ordinals {
    /// First owned ordinal.
    pub offset: u32,
    /// Distance between owned ordinals, at least 1.
    pub stride: u32,
}

impl Default for Ordinals {
    fn default() -> Self {
        Self {
            offset: 0,
            stride: 1,
        }
    }
}

/// What the bytes of a view are. The numbers are the C ABI's and the wire's.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Attention keys.
    Key = 1,
    /// Attention values.
    Value = 2,
    /// Keys and values in one tensor that is never split between them.
    KeyValue = 3,
    /// Compressed latent (MLA).
    Latent = 4,
    /// Sparse-attention index keys.
    IndexKey = 5,
    /// Quantisation scales.
    Scale = 6,
    /// Convolution state.
    Conv = 7,
    /// Recurrent (SSM) state.
    Recurrent = 8,
    /// Bytes that only the engine understands.
    Opaque = 9,
}

/// One role's bytes in a group.
///
/// Address of a head's `bytes_per_head` contiguous bytes:
/// `tensor(layer) + slot * strides.slot + layer * strides.layer + token * strides.token + head * strides.head`,
/// where `layer * strides.layer` is left out if there is one tensor per layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// What the bytes are; unique in the group.
    pub role: Role,
    /// Bits of one element, 4 to 32; compared, never used for addresses.
    pub element_bits: u32,
    /// Heads held by this rank (for sections: channels over all sections).
    pub heads: u32,
    /// Contiguous bytes of one head of one token (state: of one slot).
    pub bytes_per_head: u64,
    /// Into how many shards the heads are split, at least 1.
    pub shards: u32,
    /// Which of them this rank holds.
    pub shard: u32,
    /// How many ranks hold the same shard, at least 1.
    pub replicas: u32,
    /// Which of them this rank is.
    pub replica: u32,
    /// Packed channel sections, each split over the shards by itself; empty = none.
    pub sections: Vec<Section>,
    /// One tensor for all layers, or one per local layer.
    pub tensors: Vec<Tensor>,
    /// Number of slots.
    pub slots: u32,
    /// Byte strides.
    pub strides: Strides,
}

/// A packed part of the channel axis (`x | B | C`, `q | k | v`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// For messages and for `kvf_plan_explain`.
    pub name: String,
    /// Global channels of the section; divisible by the view's shard count.
    pub total: u32,
}

/// Where a tensor starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// The agent's id of the pool.
    pub pool: u32,
    /// Bytes from the pool's start.
    pub offset: u64,
}

/// Byte strides of a view. A stride of an axis of length 1 may be 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Strides {
    /// From slot to slot.
    pub slot: u64,
    /// From layer to layer (one tensor for all layers).
    pub layer: u64,
    /// From token to token in a block.
    pub token: u64,
    /// From head to head.
    pub head: u64,
}
