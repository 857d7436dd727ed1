//! Who sends what to whom, in layers and heads: intersection of the two engines and election of
//! one source among replicas. No addresses yet.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use super::Policy;
use super::meeting::meet;
use crate::layout::{Gap, Layout, Ordinals, Part, Role, View, atoms, layer_classes};

/// A layer on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerAt {
    /// Global layer id.
    pub global: u32,
    /// Index in the source rank's layers.
    pub src: u32,
    /// Index in the destination rank's layers.
    pub dst: u32,
}

/// A rectangle of layers and heads that one source rank sends to one destination rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Group id.
    pub group: usize,
    /// The view.
    pub role: Role,
    /// The section, if the view has any.
    pub section: Option<String>,
    /// In the destination's local order.
    pub layers: Vec<LayerAt>,
    /// Global heads (channels of the section).
    pub heads: Range<u64>,
    /// First of them in the source rank's head axis.
    pub src_head: u64,
    /// First of them in the destination rank's head axis.
    pub dst_head: u64,
}

/// What a destination rank holds and no source rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncovered {
    /// Global rank of the destination.
    pub dst_rank: u32,
    /// The bytes; the dp index is the source's.
    pub gap: Gap,
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "destination rank {} cannot be served: {} in the source engine",
            self.dst_rank, self.gap
        )
    }
}

/// The result: shares by (destination, source) index, and gaps.
pub(super) struct Resharding {
    pub shares: BTreeMap<(usize, usize), Vec<Share>>,
    pub uncovered: Vec<Uncovered>,
}

pub(super) fn reshard(src: &[Layout], dst: &[Layout], policy: Policy) -> Resharding {
    let mut out = Resharding {
        shares: BTreeMap::new(),
        uncovered: Vec::new(),
    };
    let everyone: Vec<&Layout> = src.iter().chain(dst).collect();
    let groups = src.iter().chain(dst).map(|r| r.groups.len()).min();
    for group in 0..groups.unwrap_or(0) {
        let mut election = Election {
            src,
            dst,
            group,
            policy,
            won: BTreeMap::new(),
            uncovered: &mut out.uncovered,
        };
        for (holders, layers) in layer_classes(&everyone, group) {
            let (from, to): (Vec<usize>, Vec<usize>) =
                holders.into_iter().partition(|i| *i < src.len());
            let to: Vec<usize> = to.into_iter().map(|i| i - src.len()).collect();
            for from in by_dp(src, src, &from) {
                for (_, to) in by_dp(dst, &[], &to) {
                    election.class(from.0, &from.1, &to, &layers);
                }
            }
        }
        let won = election.won;
        for (key, areas) in won {
            for (heads, mut layers) in areas {
                layers.sort_unstable();
                let share = share(src, dst, group, &key, heads, &layers);
                if let Some(share) = share {
                    out.shares
                        .entry((key.dst, key.src))
                        .or_default()
                        .push(share);
                }
            }
        }
    }
    out
}

/// Splits rank indices by attention-DP index, each part by global rank. An index that exists in
/// `all` but has none of the ranks gets an empty part: what it lacks is a gap.
fn by_dp(ranks: &[Layout], all: &[Layout], of: &[usize]) -> Vec<(u32, Vec<usize>)> {
    let mut parts: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for rank in all {
        parts.entry(rank.coordinates.dp_rank).or_default();
    }
    for i in of {
        parts
            .entry(ranks[*i].coordinates.dp_rank)
            .or_default()
            .push(*i);
    }
    for part in parts.values_mut() {
        part.sort_by_key(|i| ranks[*i].coordinates.global_rank);
    }
    parts.into_iter().collect()
}

/// Which bytes a source won for a destination.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    dst: usize,
    src: usize,
    role: Role,
    /// Place of the section in the destination's view.
    section: usize,
}

/// Heads and the layers they were won in.
type Areas = Vec<(Range<u64>, Vec<u32>)>;

struct Election<'a> {
    src: &'a [Layout],
    dst: &'a [Layout],
    group: usize,
    policy: Policy,
    won: BTreeMap<Key, Areas>,
    uncovered: &'a mut Vec<Uncovered>,
}

/// What a rank holds of one part of one view.
struct Holder {
    rank: usize,
    ordinals: Ordinals,
    heads: Range<u64>,
    /// Place of the part in the view.
    part: usize,
}

impl Election<'_> {
    /// Elects for the layers that exactly these ranks hold; `from` and `to` are one attention-DP
    /// index each.
    fn class(&mut self, src_dp: u32, from: &[usize], to: &[usize], layers: &[u32]) {
        let Some(first) = to.first() else {
            return;
        };
        let dst = self.dst;
        for model in &dst[*first].groups[self.group].views {
            for part in model.parts() {
                let sources = self.holders(self.src, from, model.role, &part);
                let wanting = self.holders(self.dst, to, model.role, &part);
                let cuts: Vec<_> = sources
                    .iter()
                    .chain(&wanting)
                    .map(|h| h.heads.clone())
                    .collect();
                let mut row: BTreeMap<Key, Areas> = BTreeMap::new();
                for atom in atoms(part.total, &cuts) {
                    self.atom(
                        src_dp,
                        &atom,
                        &sources,
                        &wanting,
                        (model, &part),
                        layers,
                        &mut row,
                    );
                }
                self.merge(row);
            }
        }
    }

    fn holders(&self, ranks: &[Layout], of: &[usize], role: Role, part: &Part<'_>) -> Vec<Holder> {
        of.iter()
            .filter_map(|rank| {
                let group = &ranks[*rank].groups[self.group];
                let parts = group.view(role)?.parts();
                let place = parts.iter().position(|p| p.section == part.section)?;
                Some(Holder {
                    rank: *rank,
                    ordinals: group.ordinals,
                    heads: parts[place].held.clone(),
                    part: place,
                })
            })
            .collect()
    }

    /// Elects for the smallest piece of heads: whoever holds a part of it holds all of it.
    #[allow(clippy::too_many_arguments)] // one call, all of it context
    fn atom(
        &mut self,
        src_dp: u32,
        atom: &Range<u64>,
        sources: &[Holder],
        wanting: &[Holder],
        (model, part): (&View, &Part<'_>),
        layers: &[u32],
        row: &mut BTreeMap<Key, Areas>,
    ) {
        let covers = |h: &&Holder| h.heads.start <= atom.start && atom.end <= h.heads.end;
        let sources: Vec<&Holder> = sources.iter().filter(covers).collect();
        let wanting: Vec<&Holder> = wanting.iter().filter(covers).collect();
        // Sources with the same ordinals are replicas, others (context parallelism) are disjoint.
        let mut offsets: Vec<Ordinals> = sources.iter().map(|h| h.ordinals).collect();
        offsets.sort_unstable_by_key(|o| o.offset);
        offsets.dedup();
        let stride = offsets.first().map_or(1, |o| o.stride);
        for to in &wanting {
            let same: Vec<_> = wanting
                .iter()
                .filter(|h| h.ordinals == to.ordinals)
                .collect();
            let index = same.iter().position(|h| h.rank == to.rank).unwrap_or(0);
            for offset in 0..stride {
                if !self.owns_common(sources.first(), to, Ordinals { offset, stride }) {
                    continue;
                }
                let replicas: Vec<_> = sources
                    .iter()
                    .filter(|h| h.ordinals.offset == offset)
                    .collect();
                if replicas.is_empty() {
                    let ordinals = (!sources.is_empty()).then_some(Ordinals { offset, stride });
                    self.uncovered.push(Uncovered {
                        dst_rank: self.dst[to.rank].coordinates.global_rank,
                        gap: Gap {
                            dp_rank: src_dp,
                            group: self.group,
                            role: model.role,
                            section: part.section.map(str::to_owned),
                            layers: layers.to_vec(),
                            heads: atom.clone(),
                            shard_heads: part.held.end - part.held.start,
                            ordinals,
                        },
                    });
                    continue;
                }
                let elected = match self.policy {
                    Policy::Lowest => 0,
                    Policy::Spread => index * replicas.len() / same.len(),
                };
                let key = Key {
                    dst: to.rank,
                    src: replicas[elected].rank,
                    role: model.role,
                    section: to.part,
                };
                let areas = row.entry(key).or_default();
                match areas.last_mut() {
                    Some((heads, _)) if heads.end == atom.start => heads.end = atom.end,
                    _ => areas.push((atom.clone(), layers.to_vec())),
                }
            }
        }
    }

    /// Whether a source with these ordinals and the destination own a common block; without any
    /// source the gap is everything.
    fn owns_common(&self, source: Option<&&Holder>, to: &Holder, ordinals: Ordinals) -> bool {
        let Some(source) = source else {
            return true;
        };
        let from = &self.src[source.rank].groups[self.group];
        let to = &self.dst[to.rank].groups[self.group];
        meet(
            (from.tokens_per_slot(), ordinals),
            (to.tokens_per_slot(), to.ordinals),
        )
    }

    /// Adds a class' areas; the same heads in other layers become one area.
    fn merge(&mut self, row: BTreeMap<Key, Areas>) {
        for (key, areas) in row {
            let known = self.won.entry(key).or_default();
            for (heads, layers) in areas {
                match known.iter_mut().find(|(h, _)| *h == heads) {
                    Some((_, all)) => all.extend(layers),
                    None => known.push((heads, layers)),
                }
            }
        }
    }
}

fn share(
    src: &[Layout],
    dst: &[Layout],
    group: usize,
    key: &Key,
    heads: Range<u64>,
    layers: &[u32],
) -> Option<Share> {
    let (from, to) = (&src[key.src].groups[group], &dst[key.dst].groups[group]);
    let (src_view, dst_view) = (from.view(key.role)?, to.view(key.role)?);
    let dst_parts = dst_view.parts();
    let dst_part = dst_parts.get(key.section)?;
    let src_parts = src_view.parts();
    let src_part = src_parts.iter().find(|p| p.section == dst_part.section)?;
    // `layers` is sorted, so the source index can be searched instead of scanned.
    let mut src_index = vec![0u32; layers.len()];
    for (i, layer) in from.layers.iter().enumerate() {
        if let Ok(at) = layers.binary_search(layer) {
            src_index[at] = i as u32;
        }
    }
    let layers = to.layers.iter().enumerate().filter_map(|(i, global)| {
        let at = layers.binary_search(global).ok()?;
        Some(LayerAt {
            global: *global,
            src: src_index[at],
            dst: i as u32,
        })
    });
    Some(Share {
        group,
        role: key.role,
        section: dst_part.section.map(str::to_owned),
        layers: layers.collect(),
        src_head: src_part.local + heads.start - src_part.held.start,
        dst_head: dst_part.local + heads.start - dst_part.held.start,
        heads,
    })
}
