//! The proof that a plan writes every byte of every destination view exactly once.

use std::collections::HashMap;
use std::ops::Range;

use super::lower::Template;
use super::meeting::meet;
use super::{Pair, Plan};
use crate::bail;
use crate::error::Result;
use crate::layout::{Group, Layout, Ordinals, Role};

/// Checks a plan without the planner's help.
///
/// 1. Each destination view, source attention-DP index by index: for every local layer the shares
///    of the sources with the same block ordinals tile the head axis, no head twice and none left
///    out. Sources with different ordinals have no block in common, and [`crate::layout::check`]
///    has shown that (slot, layer, token, head) names each byte of a view once.
/// 2. Each template: its strided pieces hold as many bytes as its shares and stay inside the
///    memory of the two groups' views.
///
/// # Errors
/// `KVF_ERR_INTERNAL`: the planner is wrong; nothing may be moved.
pub(super) fn every_byte_once(plan: &Plan, src: &[Layout], dst: &[Layout]) -> Result<()> {
    for pair in plan.pairs() {
        for (g, template) in pair.templates.iter().enumerate().filter(|(_, t)| t.moves()) {
            let (from, to) = (&src[pair.src].groups[g], &dst[pair.dst].groups[g]);
            faithful(template, from, to).map_err(|e| e.context(place(pair, g)))?;
        }
    }
    for (d, rank) in dst.iter().enumerate() {
        for (g, group) in rank.groups.iter().enumerate() {
            for view in group.views.iter().filter(|_| !group.layers.is_empty()) {
                for dp in plan.src_dps() {
                    let target = Target {
                        plan,
                        src,
                        d,
                        g,
                        group,
                        dp: *dp,
                    };
                    target
                        .tiled(view.role, u64::from(view.heads))
                        .map_err(|e| {
                            let rank = rank.coordinates.global_rank;
                            e.context(format!(
                                "destination rank {rank}, group {g}, view {}",
                                view.role
                            ))
                        })?;
                }
            }
        }
    }
    Ok(())
}

fn place(pair: &Pair, group: usize) -> String {
    format!(
        "source rank {}, destination rank {}, group {group}",
        pair.src_rank, pair.dst_rank
    )
}

fn faithful(template: &Template, from: &Group, to: &Group) -> Result<()> {
    let mut bytes = 0;
    for share in &template.shares {
        let heads = share.heads.end - share.heads.start;
        let per_head = to.view(share.role).map_or(0, |v| v.bytes_per_head);
        bytes += heads * share.layers.len() as u64 * per_head;
    }
    if bytes != template.bytes_per_token() {
        bail!(
            KVF_ERR_INTERNAL,
            "shares of {bytes} bytes a token became pieces of {}",
            template.bytes_per_token()
        );
    }
    let Some(meeting) = &template.meeting else {
        bail!(KVF_ERR_INTERNAL, "pieces without common blocks");
    };
    let (from, to) = (memory(from), memory(to));
    for piece in &template.pieces {
        let extent = template.forms[piece.form].axes().extent(meeting);
        for (name, memory, pool, first, extent) in [
            ("source", &from, piece.src_pool, piece.src, extent.0),
            ("destination", &to, piece.dst_pool, piece.dst, extent.1),
        ] {
            let inside = memory.get(&pool);
            let reach = first..first + extent;
            if !inside.is_some_and(|m| m.start <= reach.start && reach.end <= m.end) {
                bail!(
                    KVF_ERR_INTERNAL,
                    "a piece reaches bytes {reach:?} of {name} pool {pool}, the views are {inside:?}"
                );
            }
        }
    }
    Ok(())
}

/// First to last byte of a group's views in each pool.
fn memory(group: &Group) -> HashMap<u32, Range<u64>> {
    let mut pools: HashMap<u32, Range<u64>> = HashMap::new();
    for view in &group.views {
        let layers = if view.tensors.len() == 1 {
            group.layers.len() as u64
        } else {
            1
        };
        let s = view.strides;
        let extent = (u64::from(view.slots) - 1) * s.slot
            + (layers - 1) * s.layer
            + (u64::from(group.tokens_per_slot()) - 1) * s.token
            + (u64::from(view.heads) - 1) * s.head
            + view.bytes_per_head;
        for tensor in &view.tensors {
            let (start, end) = (tensor.offset, tensor.offset + extent);
            let pool = pools.entry(tensor.pool).or_insert(start..end);
            *pool = pool.start.min(start)..pool.end.max(end);
        }
    }
    pools
}

struct Target<'a> {
    plan: &'a Plan,
    src: &'a [Layout],
    d: usize,
    g: usize,
    group: &'a Group,
    dp: u32,
}

impl Target<'_> {
    fn tiled(&self, role: Role, heads: u64) -> Result<()> {
        let pairs: Vec<_> = self
            .plan
            .into_destination(self.d)
            .filter(|p| p.src_dp == self.dp && p.moves(self.g))
            .collect();
        let Some(first) = pairs.first() else {
            bail!(KVF_ERR_INTERNAL, "no source serves it");
        };
        let model = &self.src[first.src].groups[self.g];
        let (from, to) = (model.tokens_per_slot(), self.group.tokens_per_slot());
        for offset in 0..model.ordinals.stride {
            let ordinals = Ordinals {
                offset,
                stride: model.ordinals.stride,
            };
            if !meet((from, ordinals), (to, self.group.ordinals)) {
                continue;
            }
            // By local layer: the head ranges written into it.
            let mut written = vec![Vec::new(); self.group.layers.len()];
            for pair in &pairs {
                if self.src[pair.src].groups[self.g].ordinals != ordinals {
                    continue;
                }
                for share in pair.shares(self.g).iter().filter(|s| s.role == role) {
                    let range =
                        share.dst_head..share.dst_head + (share.heads.end - share.heads.start);
                    for layer in &share.layers {
                        written[layer.dst as usize].push(range.clone());
                    }
                }
            }
            for (layer, mut ranges) in self.group.layers.iter().zip(written) {
                ranges.sort_unstable_by_key(|r| r.start);
                let mut next = 0;
                for range in &ranges {
                    if range.start != next {
                        break;
                    }
                    next = range.end;
                }
                let tiles = next == heads && ranges.last().is_some_and(|r| r.end == heads);
                if !tiles {
                    bail!(
                        KVF_ERR_INTERNAL,
                        "layer {layer}: heads 0..{heads} are written as {ranges:?} (block ordinals {offset} of {})",
                        model.ordinals.stride
                    );
                }
            }
        }
        Ok(())
    }
}
