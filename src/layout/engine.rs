//! What the ranks of an engine hold together.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use super::{Group, Invariants, Layout, Ordinals, Role, View, ranges};
use crate::bail;
use crate::error::Result;

/// Something that no rank of a set holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Attention-DP index of the set.
    pub dp_rank: u32,
    /// Group id.
    pub group: usize,
    /// The view; all views lack it if the layers are held by no rank.
    pub role: Role,
    /// The section, if the view has any.
    pub section: Option<String>,
    /// Global layers, ascending.
    pub layers: Vec<u32>,
    /// Global heads (channels of the section).
    pub heads: Range<u64>,
    /// Heads (channels) of one shard.
    pub shard_heads: u64,
    /// The block ordinals; `None` = all.
    pub ordinals: Option<Ordinals>,
}

impl fmt::Display for Gap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            dp_rank,
            group,
            role,
            heads,
            ..
        } = self;
        write!(
            f,
            "no rank of dp index {dp_rank} holds heads {}..{}",
            heads.start, heads.end
        )?;
        if heads.start % self.shard_heads == 0 && heads.end - heads.start == self.shard_heads {
            write!(f, " (shard {})", heads.start / self.shard_heads)?;
        }
        if let Some(section) = &self.section {
            write!(f, " of section {section}")?;
        }
        write!(
            f,
            " of layers {} (group {group}, view {role}",
            ranges(&self.layers)
        )?;
        if let Some(Ordinals { offset, stride }) = self.ordinals {
            write!(
                f,
                ", block ordinals {offset}, {}, ...",
                u64::from(offset) + u64::from(stride)
            )?;
        }
        write!(f, ")")
    }
}

/// Layers by which ranks hold them: the planner's unit, since such layers are treated alike.
pub(crate) fn layer_classes(ranks: &[&Layout], group: usize) -> BTreeMap<Vec<usize>, Vec<u32>> {
    let mut holders: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, rank) in ranks.iter().enumerate() {
        for layer in &rank.groups[group].layers {
            holders.entry(*layer).or_default().push(i);
        }
    }
    let mut classes: BTreeMap<Vec<usize>, Vec<u32>> = BTreeMap::new();
    for (layer, held_by) in holders {
        classes.entry(held_by).or_default().push(layer);
    }
    classes
}

/// The smallest pieces into which the ranks' shards cut an axis of `total` heads.
pub(crate) fn atoms(total: u64, held: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut cuts: Vec<u64> = held
        .iter()
        .flat_map(|r| [r.start, r.end])
        .chain([0, total])
        .collect();
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|w| w[0]..w[1]).collect()
}

/// What the ranks of an engine do not hold although their layouts imply it, for each attention-DP
/// index by itself: layers that another index has, head shards, section parts, block ordinals.
/// The layouts must not contradict each other ([`Invariants::of`]).
pub fn missing(ranks: &[Layout]) -> Vec<Gap> {
    let mut gaps = Vec::new();
    let all: Vec<&Layout> = ranks.iter().collect();
    let mut dps: Vec<u32> = ranks.iter().map(|r| r.coordinates.dp_rank).collect();
    dps.sort_unstable();
    dps.dedup();
    for g in 0..ranks.first().map_or(0, |r| r.groups.len()) {
        for (holders, layers) in layer_classes(&all, g) {
            for dp in &dps {
                let set: Vec<&Group> = holders
                    .iter()
                    .filter(|i| ranks[**i].coordinates.dp_rank == *dp)
                    .map(|i| &ranks[*i].groups[g])
                    .collect();
                let model = &ranks[holders[0]].groups[g];
                for view in &model.views {
                    missing_heads(
                        &set,
                        view,
                        model.ordinals.stride,
                        |section, heads, ordinals| {
                            let shard_heads = view
                                .parts()
                                .iter()
                                .find(|p| p.section == section)
                                .map_or(1, |p| p.held.end - p.held.start);
                            gaps.push(Gap {
                                dp_rank: *dp,
                                group: g,
                                role: view.role,
                                section: section.map(str::to_owned),
                                layers: layers.clone(),
                                heads,
                                shard_heads,
                                ordinals,
                            });
                        },
                    );
                }
            }
        }
    }
    gaps
}

fn missing_heads(
    set: &[&Group],
    model: &View,
    stride: u32,
    mut found: impl FnMut(Option<&str>, Range<u64>, Option<Ordinals>),
) {
    for part in model.parts() {
        let held: Vec<(Ordinals, Range<u64>)> = set
            .iter()
            .filter_map(|group| {
                let view = group.view(model.role)?;
                let parts = view.parts();
                let same = parts.iter().find(|p| p.section == part.section)?;
                Some((group.ordinals, same.held.clone()))
            })
            .collect();
        let bounds: Vec<_> = held.iter().map(|(_, r)| r.clone()).collect();
        for atom in atoms(part.total, &bounds) {
            let covers = |r: &Range<u64>| r.start <= atom.start && atom.end <= r.end;
            let of = |offset| held.iter().any(|(o, r)| covers(r) && o.offset == offset);
            if bounds.iter().all(|r| !covers(r)) {
                found(part.section, atom, None);
                continue;
            }
            for offset in (0..stride).filter(|offset| !of(*offset)) {
                found(
                    part.section,
                    atom.clone(),
                    Some(Ordinals { offset, stride }),
                );
            }
        }
    }
}

/// Checks the ranks of one engine: each by itself, unique global ranks, no contradictions, and
/// together every layer, head shard, section, block ordinal and replica.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` or `KVF_ERR_DUPLICATE` names the ranks, or what is missing.
pub fn validate_engine(ranks: &[Layout]) -> Result<()> {
    Invariants::of(ranks)?;
    complete(ranks)
}

/// The part of [`validate_engine`] for ranks that do not contradict each other.
pub(crate) fn complete(ranks: &[Layout]) -> Result<()> {
    let mut ids: Vec<u32> = ranks.iter().map(|r| r.coordinates.global_rank).collect();
    ids.sort_unstable();
    if let Some(twice) = ids.windows(2).find(|w| w[0] == w[1]) {
        bail!(
            KVF_ERR_DUPLICATE,
            "two ranks have the global rank {}",
            twice[0]
        );
    }
    let gaps = missing(ranks);
    if let Some(gap) = gaps.first() {
        let more = match gaps.len() - 1 {
            0 => String::new(),
            n => format!("; {n} more gaps"),
        };
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the engine is incomplete: {gap}{more}"
        );
    }
    replicas(ranks)
}

/// Replica indices: none twice in one attention-DP index, none absent from the engine. Replicas
/// that all say they are the only one are accepted: what a rank holds is known from its shards.
fn replicas(ranks: &[Layout]) -> Result<()> {
    // (group, role, layer class's first layer, shard, shards, offset) -> (replica, count, dp, rank)
    type Shard = (usize, Role, u32, u32, u32, u32);
    let mut shards: BTreeMap<Shard, Vec<(u32, u32, u32, u32)>> = BTreeMap::new();
    let all: Vec<&Layout> = ranks.iter().collect();
    for g in 0..ranks.first().map_or(0, |r| r.groups.len()) {
        for (holders, layers) in layer_classes(&all, g) {
            for rank in holders.iter().map(|i| &ranks[*i]) {
                let group = &rank.groups[g];
                for v in &group.views {
                    let shard = (
                        g,
                        v.role,
                        layers[0],
                        v.shard,
                        v.shards,
                        group.ordinals.offset,
                    );
                    let c = rank.coordinates;
                    let replica = (v.replica, v.replicas, c.dp_rank, c.global_rank);
                    shards.entry(shard).or_default().push(replica);
                }
            }
        }
    }
    for ((g, role, layer, shard, of, _), held) in shards {
        let place = format!("group {g}, view {role}, layer {layer}, shard {shard} of {of}");
        let declared = || held.iter().enumerate().filter(|(_, h)| h.1 > 1);
        for (i, (replica, count, dp, rank)) in declared() {
            if let Some(other) = held[..i].iter().find(|h| h.0 == *replica && h.2 == *dp) {
                bail!(
                    KVF_ERR_DUPLICATE,
                    "{place}: ranks {} and {rank} both say they are replica {replica} of {count}",
                    other.3
                );
            }
        }
        for (_, (_, count, _, rank)) in declared() {
            if let Some(absent) = (0..*count).find(|r| held.iter().all(|h| h.0 != *r)) {
                bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "{place}: rank {rank} says there are {count} replicas, but no rank is replica {absent}"
                );
            }
        }
    }
    Ok(())
}
