//! The layout file of `kvf_plan_explain`: an engine's ranks as JSON.

use serde::{Deserialize, Serialize};

use crate::err;
use crate::error::Result;
use crate::layout::{
    self, Coordinates, Group, GroupKind, Layout, Role, Section, Strides, Tensor, View,
};

/// Slots of a view whose file gives none: enough for a paper check.
const DEFAULT_SLOTS: u32 = 1024;

/// An engine: `{"fingerprint": "...", "ranks": [...]}`. Unknown fields are skipped.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayoutFile {
    /// Names model, revision and cache format.
    pub fingerprint: String,
    /// All ranks of the engine.
    pub ranks: Vec<RankFile>,
}

/// One rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RankFile {
    /// Unique in the engine.
    pub global_rank: u32,
    /// Tensor-parallel index.
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
    /// Layer groups, the same list on every rank.
    pub groups: Vec<GroupFile>,
}

/// One layer group of a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct GroupFile {
    /// `paged` or `state`.
    pub kind: KindName,
    /// 0 for a state.
    #[serde(default)]
    pub tokens_per_block: u32,
    /// 0 = all tokens are kept.
    #[serde(default)]
    pub window: u32,
    /// Global layers in local order.
    pub layers: Vec<u32>,
    /// Owned block ordinals; left out = all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordinals: Option<OrdinalsFile>,
    /// May be left out if there are no layers.
    #[serde(default)]
    pub views: Vec<ViewFile>,
}

/// Kind of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KindName {
    /// Blocks of tokens.
    Paged,
    /// One state per request.
    State,
}

/// Owned block ordinals.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct OrdinalsFile {
    /// First owned ordinal.
    pub offset: u32,
    /// Distance between owned ordinals.
    pub stride: u32,
}

/// One view. Strides, slots and tensors may be left out: dense HND is assumed then, all layers in
/// one tensor and a pool of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ViewFile {
    /// `key`, `value`, `key_value`, `latent`, `index_key`, `scale`, `conv`, `recurrent`, `opaque`.
    pub role: String,
    /// Bits of one element.
    pub element_bits: u32,
    /// Heads (for sections: channels) of this rank.
    pub heads: u32,
    /// Bytes of one head of one token (channel, state).
    pub bytes_per_head: u64,
    /// Into how many shards the heads are split.
    #[serde(default = "one")]
    pub shards: u32,
    /// This rank's shard.
    #[serde(default)]
    pub shard: u32,
    /// How many ranks hold the same shard.
    #[serde(default = "one")]
    pub replicas: u32,
    /// Which of them this rank is.
    #[serde(default)]
    pub replica: u32,
    /// Packed sections with their global channels; empty or left out = none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sections: Option<Vec<SectionFile>>,
    /// Number of slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// Byte strides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strides: Option<StridesFile>,
    /// One for all layers, or one per layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensors: Option<Vec<TensorFile>>,
}

fn one() -> u32 {
    1
}

/// A packed section.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SectionFile {
    /// Its name.
    pub name: String,
    /// Global channels.
    pub total: u32,
}

/// Byte strides.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct StridesFile {
    /// From slot to slot.
    pub slot: u64,
    /// From layer to layer of one tensor.
    #[serde(default)]
    pub layer: u64,
    /// From token to token.
    #[serde(default)]
    pub token: u64,
    /// From head to head.
    #[serde(default)]
    pub head: u64,
}

/// Where a tensor starts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct TensorFile {
    /// The pool.
    pub pool: u32,
    /// Bytes from its start.
    pub offset: u64,
}

impl LayoutFile {
    /// Parses a layout file.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` with line, column and what was expected.
    pub fn parse(json: &str) -> Result<Self> {
        serde_json::from_str(json)
            .map_err(|e| err!(KVF_ERR_INVALID_ARGUMENT, "not a layout file: {e}"))
    }

    /// The ranks' layouts.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for an unknown role or sizes that no memory has.
    pub fn layouts(&self) -> Result<Vec<Layout>> {
        let rank = |rank: &RankFile| {
            rank.layout(&self.fingerprint)
                .map_err(|e| e.context(format!("rank {}", rank.global_rank)))
        };
        self.ranks.iter().map(rank).collect()
    }

    /// The file that describes these layouts, strides included.
    pub fn of(ranks: &[Layout]) -> Self {
        Self {
            fingerprint: ranks
                .first()
                .map(|r| r.fingerprint.clone())
                .unwrap_or_default(),
            ranks: ranks.iter().map(RankFile::of).collect(),
        }
    }
}

impl RankFile {
    fn layout(&self, fingerprint: &str) -> Result<Layout> {
        let mut pool = 0;
        let groups = self.groups.iter().map(|g| g.group(&mut pool));
        Ok(Layout {
            fingerprint: fingerprint.to_owned(),
            coordinates: Coordinates {
                global_rank: self.global_rank,
                tp_rank: self.tp_rank,
                tp_size: self.tp_size,
                pp_rank: self.pp_rank,
                pp_size: self.pp_size,
                cp_rank: self.cp_rank,
                cp_size: self.cp_size,
                dp_rank: self.dp_rank,
                dp_size: self.dp_size,
            },
            groups: groups.collect::<Result<_>>()?,
        })
    }

    fn of(layout: &Layout) -> Self {
        let c = layout.coordinates;
        Self {
            global_rank: c.global_rank,
            tp_rank: c.tp_rank,
            tp_size: c.tp_size,
            pp_rank: c.pp_rank,
            pp_size: c.pp_size,
            cp_rank: c.cp_rank,
            cp_size: c.cp_size,
            dp_rank: c.dp_rank,
            dp_size: c.dp_size,
            groups: layout.groups.iter().map(GroupFile::of).collect(),
        }
    }
}

impl GroupFile {
    fn group(&self, pool: &mut u32) -> Result<Group> {
        let kind = match self.kind {
            KindName::Paged => GroupKind::Paged {
                tokens_per_block: self.tokens_per_block,
                window: self.window,
            },
            KindName::State => GroupKind::State,
        };
        let mut group = Group {
            kind,
            layers: self.layers.clone(),
            ordinals: self
                .ordinals
                .map_or_else(Default::default, |o| layout::Ordinals {
                    offset: o.offset,
                    stride: o.stride,
                }),
            views: Vec::new(),
        };
        for view in &self.views {
            let view = view.view(&group, pool)?;
            group.views.push(view);
        }
        Ok(group)
    }

    fn of(group: &Group) -> Self {
        let (kind, tokens_per_block) = match group.kind {
            GroupKind::Paged {
                tokens_per_block, ..
            } => (KindName::Paged, tokens_per_block),
            GroupKind::State => (KindName::State, 0),
        };
        Self {
            kind,
            tokens_per_block,
            window: group.window(),
            layers: group.layers.clone(),
            ordinals: Some(OrdinalsFile {
                offset: group.ordinals.offset,
                stride: group.ordinals.stride,
            }),
            views: group.views.iter().map(ViewFile::of).collect(),
        }
    }
}

impl ViewFile {
    fn view(&self, group: &Group, pool: &mut u32) -> Result<View> {
        let role = Role::ALL.into_iter().find(|(_, name)| *name == self.role);
        let Some((role, _)) = role else {
            let known = Role::ALL.map(|(_, name)| name).join(", ");
            return Err(err!(
                KVF_ERR_INVALID_ARGUMENT,
                "unknown role {:?}; known are {known}",
                self.role
            ));
        };
        let mut view = View {
            role,
            element_bits: self.element_bits,
            heads: self.heads,
            bytes_per_head: self.bytes_per_head,
            shards: self.shards,
            shard: self.shard,
            replicas: self.replicas,
            replica: self.replica,
            sections: self
                .sections
                .iter()
                .flatten()
                .map(|s| Section {
                    name: s.name.clone(),
                    total: s.total,
                })
                .collect(),
            tensors: Vec::new(),
            slots: self.slots.unwrap_or(DEFAULT_SLOTS),
            strides: Strides::default(),
        };
        view.strides = match self.strides {
            Some(s) => Strides {
                slot: s.slot,
                layer: s.layer,
                token: s.token,
                head: s.head,
            },
            None => dense_hnd(&view, group).ok_or_else(|| {
                err!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "view {role}: {} heads of {} bytes in {} slots are more than any memory",
                    view.heads,
                    view.bytes_per_head,
                    view.slots
                )
            })?,
        };
        view.tensors = match &self.tensors {
            Some(tensors) => tensors
                .iter()
                .map(|t| Tensor {
                    pool: t.pool,
                    offset: t.offset,
                })
                .collect(),
            None => vec![Tensor {
                pool: *pool,
                offset: 0,
            }],
        };
        *pool += 1;
        Ok(view)
    }

    fn of(view: &View) -> Self {
        let sections = view.sections.iter().map(|s| SectionFile {
            name: s.name.clone(),
            total: s.total,
        });
        let tensors = view.tensors.iter().map(|t| TensorFile {
            pool: t.pool,
            offset: t.offset,
        });
        let s = view.strides;
        Self {
            role: view.role.name().to_owned(),
            element_bits: view.element_bits,
            heads: view.heads,
            bytes_per_head: view.bytes_per_head,
            shards: view.shards,
            shard: view.shard,
            replicas: view.replicas,
            replica: view.replica,
            sections: Some(sections.collect()),
            slots: Some(view.slots),
            strides: Some(StridesFile {
                slot: s.slot,
                layer: s.layer,
                token: s.token,
                head: s.head,
            }),
            tensors: Some(tensors.collect()),
        }
    }
}

/// `[layer, slot, head, token]`, nothing between; `None` = overflow.
fn dense_hnd(view: &View, group: &Group) -> Option<Strides> {
    let token = view.bytes_per_head;
    let head = token.checked_mul(u64::from(group.tokens_per_slot()))?;
    let slot = head.checked_mul(u64::from(view.heads))?;
    let layer = slot.checked_mul(u64::from(view.slots))?;
    Some(Strides {
        slot,
        layer,
        token,
        head,
    })
}
