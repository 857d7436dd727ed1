//! What must be equal in two engines, and whether they fit.

use std::fmt;

use super::{Group, GroupKind, Layout, Role, Section, View, check, ranges};
use crate::error::{Error, Result};
use crate::{bail, err};

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

/// A field that must be equal and is not.
struct Difference {
    /// Group and view, "" for the whole engine.
    place: String,
    field: &'static str,
    a: String,
    b: String,
    /// What else there is to say.
    hint: String,
}

impl Difference {
    fn new(place: &str, field: &'static str, a: impl fmt::Display, b: impl fmt::Display) -> Self {
        Self {
            place: if place.is_empty() {
                String::new()
            } else {
                format!("{place}: ")
            },
            field,
            a: a.to_string(),
            b: b.to_string(),
            hint: "they must be equal".to_owned(),
        }
    }

    /// Of a source and a destination.
    fn incompatible(self) -> Error {
        let Self {
            place,
            field,
            a,
            b,
            hint,
        } = self;
        err!(
            KVF_ERR_INCOMPATIBLE,
            "{place}{field}: source {a}, destination {b}; {hint}"
        )
    }

    /// Of two ranks of one engine.
    fn contradiction(self, one: &Layout, other: &Layout) -> Error {
        let Self {
            place,
            field,
            a,
            b,
            hint,
        } = self;
        err!(
            KVF_ERR_INVALID_ARGUMENT,
            "two ranks of one engine contradict each other: {place}{field}: rank {} has {a}, rank {} has {b}; {hint}",
            one.coordinates.global_rank,
            other.coordinates.global_rank
        )
    }
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

    fn difference(&self, dst: &Self, place: &str) -> Option<Difference> {
        if self == dst {
            return None;
        }
        let sections = |sections: &[Section]| {
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
        let fields = [
            (
                "element bits",
                self.element_bits.to_string(),
                dst.element_bits.to_string(),
            ),
            (
                "bytes per head",
                self.bytes_per_head.to_string(),
                dst.bytes_per_head.to_string(),
            ),
            (
                "sections",
                sections(&self.sections),
                sections(&dst.sections),
            ),
            (
                "total heads",
                self.total_heads.to_string(),
                dst.total_heads.to_string(),
            ),
        ];
        let (field, a, b) = fields.into_iter().find(|(_, a, b)| a != b)?;
        Some(Difference::new(place, field, a, b))
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
            if rank.fingerprint != first.fingerprint {
                let (a, b) = (&first.fingerprint, &rank.fingerprint);
                return Err(Difference::new("", "fingerprint", a, b).contradiction(first, rank));
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
                ours.layers.clone_from(&theirs.layers); // only the union of the ranks counts
                let difference = ours
                    .difference(&theirs, g)
                    .or_else(|| blocks(model, group, g));
                if let Some(difference) = difference {
                    return Err(difference.contradiction(models[g], rank));
                }
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
        let whole = [
            (
                "fingerprint",
                self.fingerprint.clone(),
                destination.fingerprint.clone(),
            ),
            (
                "number of layer groups",
                self.groups.len().to_string(),
                destination.groups.len().to_string(),
            ),
        ];
        for (field, a, b) in whole {
            if a != b {
                return Err(Difference::new("", field, a, b).incompatible());
            }
        }
        let pairs = self.groups.iter().zip(&destination.groups);
        let mut differences = pairs
            .enumerate()
            .filter_map(|(g, (s, d))| s.difference(d, g));
        differences.next().map_or(Ok(()), |d| Err(d.incompatible()))
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

    fn difference(&self, dst: &Self, g: usize) -> Option<Difference> {
        let place = format!("group {g}");
        let kind = |state| if state { "state" } else { "paged" };
        if self.state != dst.state {
            return Some(Difference::new(
                &place,
                "kind",
                kind(self.state),
                kind(dst.state),
            ));
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
            let text = |layers: &[u32]| {
                if layers.is_empty() {
                    "none".to_owned()
                } else {
                    ranges(layers)
                }
            };
            let mut d = Difference::new(&place, "layers", text(&self.layers), text(&dst.layers));
            d.hint = format!(
                "the source lacks {}, the destination lacks {}: is a pipeline stage missing?",
                lacks(&self.layers, &dst.layers),
                lacks(&dst.layers, &self.layers)
            );
            return Some(d);
        }
        let roles = |views: &[ViewInvariants]| {
            let names: Vec<_> = views.iter().map(|v| v.role.name()).collect();
            names.join(" ")
        };
        let (ours, theirs) = (roles(&self.views), roles(&dst.views));
        if ours != theirs {
            return Some(Difference::new(&place, "view roles", ours, theirs));
        }
        let mut views = self.views.iter().zip(&dst.views);
        views.find_map(|(s, d)| s.difference(d, &format!("group {g}, view {}", s.role)))
    }
}

/// Inside one engine the block size, the window and the ordinal stride must be equal, too.
fn blocks(a: &Group, b: &Group, g: usize) -> Option<Difference> {
    let fields = [
        ("tokens per block", a.tokens_per_slot(), b.tokens_per_slot()),
        ("window", a.window(), b.window()),
        ("ordinal stride", a.ordinals.stride, b.ordinals.stride),
    ];
    let (field, x, y) = fields.into_iter().find(|(_, x, y)| x != y)?;
    Some(Difference::new(&format!("group {g}"), field, x, y))
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
        let place = format!("group {g}");
        if st.max(dt) % st.min(dt) != 0 {
            let mut d = Difference::new(&place, "tokens per block", st, dt);
            d.hint = "one must divide the other".to_owned();
            return Err(d.incompatible());
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
            let mut d = Difference::new(&place, "window", name(sw), name(dw));
            d.hint = "the source keeps fewer live tokens than the destination needs".to_owned();
            return Err(d.incompatible());
        }
    }
    Ok(())
}
