//! The proof that a plan writes every byte of every destination view exactly once.

use super::Plan;
use super::meeting::meet;
use crate::bail;
use crate::error::Result;
use crate::layout::{Group, Layout, Ordinals, Role};

/// Checks each destination view, source attention-DP index by index: for every local layer the
/// shares of the sources with the same block ordinals tile the head axis, no head twice and none
/// left out. Sources with different ordinals have no block in common, and [`crate::layout::check`]
/// has shown that (slot, layer, token, head) names each byte of a view once; so each byte is
/// written once, and nothing outside the view is.
///
/// # Errors
/// `KVF_ERR_INTERNAL`: the planner is wrong; nothing may be moved.
pub(super) fn every_byte_once(plan: &Plan, src: &[Layout], dst: &[Layout]) -> Result<()> {
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
