//! What a rank holds, described explicitly: groups of layers, their views, strides, shards and
//! replicas. Nothing is derived from parallel sizes and nothing is inferred from a shape.
//!
//! Pure data and validation; the copies between two layouts are [`crate::plan`]'s.
//! `docs/layouts.md` explains the language with pictures.

mod engine;
mod invariants;
mod overlap;
pub mod shapes;
mod validate;

use std::ops::Range;

pub use engine::{Gap, missing, validate_engine};
pub(crate) use engine::{atoms, complete, layer_classes};
pub(crate) use invariants::blocks_fit;
pub use invariants::{GroupInvariants, Invariants, ViewInvariants, compatible};
pub use validate::{check, validate};

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

/// A part of a view's head axis: a section, or the whole axis of a view without sections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    /// The section's name; `None` = the whole axis.
    pub section: Option<&'a str>,
    /// Global heads (channels of the section) that this rank holds.
    pub held: Range<u64>,
    /// Where they start in the rank's own head axis.
    pub local: u64,
    /// Global heads (channels of the section) over all shards.
    pub total: u64,
}

impl View {
    /// Heads (channels) over all shards and sections.
    pub fn total_heads(&self) -> u64 {
        if self.sections.is_empty() {
            u64::from(self.heads) * u64::from(self.shards)
        } else {
            self.sections.iter().map(|s| u64::from(s.total)).sum()
        }
    }

    /// The parts of the head axis in local order. Counts must have passed [`check`].
    pub fn parts(&self) -> Vec<Part<'_>> {
        let (shards, shard) = (u64::from(self.shards.max(1)), u64::from(self.shard));
        if self.sections.is_empty() {
            let heads = u64::from(self.heads);
            return vec![Part {
                section: None,
                held: shard * heads..(shard + 1) * heads,
                local: 0,
                total: heads * shards,
            }];
        }
        let mut local = 0;
        let part = |s: &'_ Section| (u64::from(s.total) / shards, u64::from(s.total));
        self.sections
            .iter()
            .map(|s| {
                let (width, total) = part(s);
                let start = local;
                local += width;
                Part {
                    section: Some(s.name.as_str()),
                    held: shard * width..(shard + 1) * width,
                    local: start,
                    total,
                }
            })
            .collect()
    }

    /// Where the bytes of a local layer start: its own tensor, or its place in the common one.
    pub fn layer_base(&self, local: usize) -> Option<Tensor> {
        match self.tensors.as_slice() {
            [one] => Some(Tensor {
                pool: one.pool,
                offset: one.offset + local as u64 * self.strides.layer,
            }),
            many => many.get(local).copied(),
        }
    }
}

impl Group {
    /// The view with this role.
    pub fn view(&self, role: Role) -> Option<&View> {
        self.views.iter().find(|v| v.role == role)
    }

    /// Tokens in one slot; 1 for a state, which has no token axis.
    pub fn tokens_per_slot(&self) -> u32 {
        match self.kind {
            GroupKind::Paged {
                tokens_per_block, ..
            } => tokens_per_block,
            GroupKind::State => 1,
        }
    }

    /// Live tokens of the window; 0 = everything is kept.
    pub fn window(&self) -> u32 {
        match self.kind {
            GroupKind::Paged { window, .. } => window,
            GroupKind::State => 0,
        }
    }

    /// How many slots a table has that starts with the first owned ordinal at or after
    /// `first_ordinal` and ends with the block of the last token below `token_end`
    /// (a state: 1).
    pub fn table_len(&self, first_ordinal: u64, token_end: u64) -> u64 {
        match self.kind {
            GroupKind::State => 1,
            GroupKind::Paged {
                tokens_per_block, ..
            } => {
                let end = token_end.div_ceil(u64::from(tokens_per_block.max(1)));
                let o = self.ordinals;
                o.owned_below(end)
                    .saturating_sub(o.owned_below(first_ordinal))
            }
        }
    }

    /// First ordinal of an end-aligned table: `len` owned blocks of which the last holds the last
    /// owned token below `token_end`. This is how a table that covers only the live window of a
    /// sliding-window group says where it starts. `None` = longer than all blocks there are.
    pub fn end_aligned(&self, len: u64, token_end: u64) -> Option<u64> {
        match self.kind {
            GroupKind::State => Some(0),
            GroupKind::Paged { .. } => {
                let skipped = self.table_len(0, token_end).checked_sub(len)?;
                Some(if skipped == 0 {
                    0
                } else {
                    u64::from(self.ordinals.offset) + skipped * u64::from(self.ordinals.stride)
                })
            }
        }
    }
}

impl Ordinals {
    /// How many owned ordinals are below this one; also the table index of an owned ordinal.
    pub fn owned_below(self, ordinal: u64) -> u64 {
        ordinal
            .saturating_sub(u64::from(self.offset))
            .div_ceil(u64::from(self.stride.max(1)))
    }
}

impl Role {
    /// All roles with their names in messages and JSON.
    pub const ALL: [(Self, &'static str); 9] = [
        (Self::Key, "key"),
        (Self::Value, "value"),
        (Self::KeyValue, "key_value"),
        (Self::Latent, "latent"),
        (Self::IndexKey, "index_key"),
        (Self::Scale, "scale"),
        (Self::Conv, "conv"),
        (Self::Recurrent, "recurrent"),
        (Self::Opaque, "opaque"),
    ];

    /// The name in messages and JSON.
    pub fn name(self) -> &'static str {
        Self::ALL
            .into_iter()
            .find_map(|(role, name)| (role == self).then_some(name))
            .unwrap_or("unknown")
    }

    /// The role with this number; `None` for a number of a newer library.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find_map(|(role, _)| (role as u32 == code).then_some(role))
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Writes sorted numbers as ranges: `0..4, 7`.
pub(crate) fn ranges(sorted: &[u32]) -> String {
    let runs = sorted.chunk_by(|a, b| a.checked_add(1) == Some(*b));
    let text: Vec<String> = runs
        .map(|run| match run {
            [one] => one.to_string(),
            [first, .., last] => format!("{first}..{}", u64::from(*last) + 1),
            [] => String::new(),
        })
        .collect();
    text.join(", ")
}
