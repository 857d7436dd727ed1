//! What the ranks of an engine hold together, and whether two engines fit.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use super::{Group, GroupKind, Layout, Ordinals, Role, Section, View, check, ranges};
use crate::bail;
use crate::error::Result;

/// What must be equal in two engines, whatever their parallel sizes, strides and block sizes are.
/// Its digest travels in the head of the metadata.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Invariants {
    /// Names model, revision and cache format.
    pub fingerprint: String,
    /// By group id.
    pub groups: Vec<GroupInvariants>,
}

/// [`Invariants`] of one group.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct GroupInvariants {
    /// A state group, not a paged one.
    pub state: bool,
    /// All ranks' global layers, ascending.
    pub layers: Vec<u32>,
    /// By role, ascending; none if no rank has a layer of the group.
    pub views: Vec<ViewInvariants>,
}

/// [`Invariants`] of one view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewInvariants {
    /// What the bytes are.
    pub role: Role,
    /// Bits of one element.
    pub element_bits: u32,
    /// Contiguous bytes of one head of one token (channel, state).
    pub bytes_per_head: u64,
    /// Heads (channels) over all shards.
    pub total_heads: u64,
    /// Packed sections by name, ascending: two engines may pack them in a different order.
    pub sections: Vec<Section>,
}

impl ViewInvariants {
    fn of(view: &View) -> Self {
        let mut sections = view.sections.clone();
        sections.sort_by(|a, b| a.name.cmp(&b.name));
        Self {
            role: view.role,
            element_bits: view.element_bits,
            bytes_per_head: view.bytes_per_head,
            total_heads: view.total_heads(),
            sections,
        }
    }
}

impl Invariants {
    /// The invariants of the engine made of these ranks, which must not contradict each other.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` names the two ranks, the field and both values; also what
    /// [`check`] finds in one of them.
    pub fn of(ranks: &[Layout]) -> Result<Self> {
        let Some(first) = ranks.first() else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "an engine has no ranks; at least 1 is needed"
            );
        };
        let name = |rank: &Layout| format!("rank {}", rank.coordinates.global_rank);
        let mut all = Self {
            fingerprint: first.fingerprint.clone(),
            groups: Vec::new(),
        };
        // Per group the first rank that has layers, to name it in a contradiction.
        let mut models: Vec<&Layout> = Vec::new();
        for rank in ranks {
            check(rank).map_err(|e| e.context(name(rank)))?;
            if rank.groups.len() != first.groups.len() {
                bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "{} lists {} groups and {} lists {}; a rank without layers of a group lists it empty",
                    name(first),
                    first.groups.len(),
                    name(rank),
                    rank.groups.len()
                );
            }
        }
        for g in 0..first.groups.len() {
            let model = ranks
                .iter()
                .find(|r| !r.groups[g].layers.is_empty())
                .unwrap_or(first);
            models.push(model);
            all.groups.push(GroupInvariants::of_rank(&model.groups[g]));
        }
        for rank in ranks {
            let two = |model: &Layout| format!("{} and {}", name(model), name(rank));
            if rank.fingerprint != first.fingerprint {
                differ(None, "fingerprint", &first.fingerprint, &rank.fingerprint)
                    .map_err(|e| contradiction(e, &two(first)))?;
            }
            for (g, group) in rank.groups.iter().enumerate() {
                if group.layers.is_empty() {
                    continue;
                }
                let model = &models[g].groups[g];
                let (mut ours, theirs) = (
                    GroupInvariants::of_rank(model),
                    GroupInvariants::of_rank(group),
                );
                ours.layers = theirs.layers.clone(); // of one rank; only their union counts
                ours.compare(&theirs, g)
                    .and_then(|()| same_blocks(model, group, g))
                    .map_err(|e| contradiction(e, &two(models[g])))?;
                all.groups[g].layers.extend_from_slice(&group.layers);
            }
        }
        for group in &mut all.groups {
            group.layers.sort_unstable();
            group.layers.dedup();
        }
        Ok(all)
    }

    /// Compares a source (self) with a destination.
    ///
    /// # Errors
    /// `KVF_ERR_INCOMPATIBLE` names the first field that differs and both values.
    pub fn compare(&self, destination: &Self) -> Result<()> {
        if self.fingerprint != destination.fingerprint {
            return differ(
                None,
                "fingerprint",
                &self.fingerprint,
                &destination.fingerprint,
            );
        }
        if self.groups.len() != destination.groups.len() {
            return differ(
                None,
                "number of layer groups",
                self.groups.len(),
                destination.groups.len(),
            );
        }
        let pairs = self.groups.iter().zip(&destination.groups);
        pairs
            .enumerate()
            .try_for_each(|(g, (src, dst))| src.compare(dst, g))
    }
}

impl GroupInvariants {
    fn of_rank(group: &Group) -> Self {
        let mut views: Vec<_> = if group.layers.is_empty() {
            Vec::new()
        } else {
            group.views.iter().map(ViewInvariants::of).collect()
        };
        views.sort_by_key(|v| v.role);
        Self {
            state: group.kind == GroupKind::State,
            layers: group.layers.clone(),
            views,
        }
    }

    fn compare(&self, dst: &Self, g: usize) -> Result<()> {
        let place = format!("group {g}");
        let kind = |state| if state { "state" } else { "paged" };
        if self.state != dst.state {
            return differ(Some(&place), "kind", kind(self.state), kind(dst.state));
        }
        if self.layers != dst.layers {
            let lacks = |a: &[u32], b: &[u32]| {
                let gone: Vec<u32> = b.iter().filter(|l| !a.contains(l)).copied().collect();
                if gone.is_empty() {
                    "nothing".to_owned()
                } else {
                    ranges(&gone)
                }
            };
            bail!(
                KVF_ERR_INCOMPATIBLE,
                "group {g}: layers differ: source {}, destination {}; the source lacks {}, the destination lacks {} (is a pipeline stage missing?)",
                ranges(&self.layers),
                ranges(&dst.layers),
                lacks(&self.layers, &dst.layers),
                lacks(&dst.layers, &self.layers)
            );
        }
        let roles = |views: &[ViewInvariants]| {
            let names: Vec<_> = views.iter().map(|v| v.role.name()).collect();
            names.join(" ")
        };
        let (ours, theirs) = (roles(&self.views), roles(&dst.views));
        if ours != theirs {
            return differ(Some(&place), "view roles", ours, theirs);
        }
        self.views.iter().zip(&dst.views).try_for_each(|(s, d)| {
            let place = format!("group {g}, view {}", s.role);
            for (field, a, b) in [
                (
                    "element bits",
                    u64::from(s.element_bits),
                    u64::from(d.element_bits),
                ),
                ("bytes per head", s.bytes_per_head, d.bytes_per_head),
            ] {
                if a != b {
                    return differ(Some(&place), field, a, b);
                }
            }
            if s.sections != d.sections {
                let text = |sections: &[Section]| {
                    let parts: Vec<_> = sections
                        .iter()
                        .map(|s| format!("{}:{}", s.name, s.total))
                        .collect();
                    if parts.is_empty() {
                        "none".to_owned()
                    } else {
                        parts.join(" ")
                    }
                };
                return differ(
                    Some(&place),
                    "sections",
                    text(&s.sections),
                    text(&d.sections),
                );
            }
            if s.total_heads != d.total_heads {
                return differ(Some(&place), "total heads", s.total_heads, d.total_heads);
            }
            Ok(())
        })
    }
}

fn differ(
    place: Option<&str>,
    field: &str,
    src: impl fmt::Display,
    dst: impl fmt::Display,
) -> Result<()> {
    let place = place.map(|p| format!("{p}: ")).unwrap_or_default();
    bail!(
        KVF_ERR_INCOMPATIBLE,
        "{place}{field} differ: source {src}, destination {dst}"
    )
}

/// Turns "source a, destination b" into a contradiction of two ranks of one engine.
fn contradiction(e: crate::error::Error, ranks: &str) -> crate::error::Error {
    let text = e.text.replace("source ", "").replace("destination ", "");
    crate::err!(
        KVF_ERR_INVALID_ARGUMENT,
        "{ranks} of one engine contradict each other: {text}"
    )
}

/// Inside one engine the block size, the window and the ordinal stride must be equal, too.
fn same_blocks(a: &Group, b: &Group, g: usize) -> Result<()> {
    let place = format!("group {g}");
    for (field, x, y) in [
        ("tokens per block", a.tokens_per_slot(), b.tokens_per_slot()),
        ("window", a.window(), b.window()),
        ("ordinal stride", a.ordinals.stride, b.ordinals.stride),
    ] {
        if x != y {
            return differ(Some(&place), field, x, y);
        }
    }
    Ok(())
}

/// Whether a source and a destination engine fit: equal [`Invariants`], tokens per block in an
/// integral ratio, and a source window that holds what the destination needs.
///
/// # Errors
/// `KVF_ERR_INCOMPATIBLE` with field and both values; `KVF_ERR_INVALID_ARGUMENT` if the ranks of
/// one engine contradict each other.
pub fn compatible(src: &[Layout], dst: &[Layout]) -> Result<()> {
    let ours = Invariants::of(src).map_err(|e| e.context("source engine"))?;
    let theirs = Invariants::of(dst).map_err(|e| e.context("destination engine"))?;
    ours.compare(&theirs)?;
    blocks_fit(src, dst)
}

/// The part of [`compatible`] about blocks and windows; both engines must be free of
/// contradictions and have the same number of groups.
pub(crate) fn blocks_fit(src: &[Layout], dst: &[Layout]) -> Result<()> {
    let first = |ranks: &[Layout], g: usize| -> Option<Group> {
        let mut groups = ranks.iter().map(|r| &r.groups[g]);
        groups.find(|group| !group.layers.is_empty()).cloned()
    };
    for g in 0..src.first().map_or(0, |r| r.groups.len()) {
        let (Some(s), Some(d)) = (first(src, g), first(dst, g)) else {
            continue;
        };
        let (st, dt) = (s.tokens_per_slot(), d.tokens_per_slot());
        if st.max(dt) % st.min(dt) != 0 {
            bail!(
                KVF_ERR_INCOMPATIBLE,
                "group {g}: tokens per block differ: source {st}, destination {dt}; one must divide the other"
            );
        }
        let (sw, dw) = (s.window(), d.window());
        if sw != 0 && (dw == 0 || dw > sw) {
            let name = |w: u32| {
                if w == 0 {
                    "0 (all tokens)".to_owned()
                } else {
                    w.to_string()
                }
            };
            bail!(
                KVF_ERR_INCOMPATIBLE,
                "group {g}: window differ: source {sw}, destination {}; the source keeps fewer live tokens than the destination needs",
                name(dw)
            );
        }
    }
    Ok(())
}

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
        for (i, (replica, count, dp, rank)) in held.iter().enumerate() {
            if *count == 1 {
                continue;
            }
            let place = format!("group {g}, view {role}, layer {layer}, shard {shard} of {of}");
            if let Some(other) = held[..i].iter().find(|h| h.0 == *replica && h.2 == *dp) {
                bail!(
                    KVF_ERR_DUPLICATE,
                    "{place}: ranks {} and {rank} both say they are replica {replica} of {count}",
                    other.3
                );
            }
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
