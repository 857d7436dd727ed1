//! What an import wants: checked against our layout and the ticket, and bound to a plan.

use std::sync::Arc;

use super::api::{ImportGroup, ImportState, PartKind};
use super::shared::State;
use super::slots::{GroupSlots, check_first, held_slots};
use super::ticket::key;
use crate::bail;
use crate::error::Result;
use crate::layout::{GroupKind, Layout};
use crate::observe::fault;
use crate::plan::{Binding, Pair, Request};
use crate::wire;

/// What an import wants, checked against our layout.
#[derive(Clone, Debug)]
pub(super) struct Wants {
    pub groups: Vec<ImportGroup>,
    pub states: Vec<ImportState>,
    pub prefix_tag: u64,
}

pub(super) fn wants_nothing(wants: &Wants) -> bool {
    wants.states.is_empty()
        && wants.groups.iter().all(|g| g.skip_token >= g.token_end)
        && !fault::deviates("submit_empty")
}

pub(super) fn groups_of(wants: &Wants) -> Vec<u32> {
    let groups = wants.groups.iter().map(|g| g.group);
    groups.chain(wants.states.iter().map(|s| s.group)).collect()
}

/// Group, kind and whether anything is wanted of each part.
pub(super) fn parts_of(wants: &Wants) -> Vec<(u32, PartKind, bool)> {
    let groups = wants
        .groups
        .iter()
        .map(|g| (g.group, PartKind::Paged, g.skip_token < g.token_end));
    let states = wants
        .states
        .iter()
        .map(|s| (s.group, PartKind::State, true));
    groups.chain(states).collect()
}

/// The parts that a source's bindings move bytes of; a part with nothing to move is not submitted.
pub(super) fn parts_moved(pair: &Pair, wants: &Wants, bindings: &[(usize, Binding)]) -> Vec<usize> {
    if fault::deviates("submit_empty") {
        let groups = groups_of(wants).into_iter().enumerate();
        return groups
            .filter(|(_, group)| pair.moves(*group as usize))
            .map(|(part, _)| part)
            .collect();
    }
    let moving = bindings.iter().filter(|(_, binding)| binding.bytes() > 0);
    moving.map(|(part, _)| *part).collect()
}

pub(super) fn add_part_bytes(part_bytes: &mut [u64], bindings: &[(usize, Binding)]) {
    for (part, binding) in bindings {
        part_bytes[*part] += binding.bytes();
    }
}

/// Both sides' prefix tags, if both are set.
pub(super) fn check_prefix(ours: u64, ticket: &wire::Ticket) -> Result<()> {
    if ours != 0 && ticket.prefix_tag != 0 && ours != ticket.prefix_tag {
        bail!(
            KVF_ERR_PREFIX_MISMATCH,
            "{}: the prefix tag is {ours:#x} here and {:#x} at the source: the cached prefix is another one",
            key(ticket.key),
            ticket.prefix_tag
        );
    }
    Ok(())
}

/// Checks groups against our layout, and that none is named twice.
pub(super) fn check_wants(wants: &Wants, layout: &Layout, state: &State) -> Result<()> {
    let mut seen = Vec::new();
    let mut check = |group: u32, paged: bool| {
        let Some(held) = layout.groups.get(group as usize) else {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {group} of a layout with {} groups",
                layout.groups.len()
            );
        };
        if matches!(held.kind, GroupKind::Paged { .. }) != paged {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {group} is {}: give it as one",
                if paged {
                    "a state group"
                } else {
                    "a paged group"
                }
            );
        }
        if seen.contains(&group) {
            bail!(KVF_ERR_DUPLICATE, "group {group} is given twice");
        }
        seen.push(group);
        Ok(held)
    };
    for want in &wants.groups {
        check_skip(want)?;
        let held = check(want.group, true)?;
        if !held.layers.is_empty() {
            let (first, end) = (want.first_ordinal, want.token_end);
            check_first(want.group, held, first, &want.slots, end)?;
            state.slots.check_table(want.group, &want.slots)?;
        }
    }
    for want in &wants.states {
        if !check(want.group, false)?.layers.is_empty() {
            state.slots.check(want.group, i64::from(want.slot))?;
        }
    }
    Ok(())
}

/// Replaces "all that were published" by the number.
pub(super) fn resolve_ends(wants: &mut Wants, ticket: &wire::Ticket) -> Result<()> {
    for want in &mut wants.groups {
        let published = ticket
            .entries
            .iter()
            .flat_map(|e| &e.groups)
            .find(|g| g.group == want.group);
        let Some(published) = published else {
            if want.token_end == u64::MAX {
                bail!(
                    KVF_ERR_NOT_FOUND,
                    "{}: group {} is not in the ticket",
                    key(ticket.key),
                    want.group
                );
            }
            continue;
        };
        if want.token_end == u64::MAX {
            want.token_end = published.token_end;
            check_skip(want)?;
        }
    }
    Ok(())
}

/// Skipping all tokens is fine, skipping more is a mistake in somebody's table. Also where this
/// rank has nothing to move: all ranks refuse alike.
fn check_skip(want: &ImportGroup) -> Result<()> {
    if want.skip_token > want.token_end {
        bail!(
            KVF_ERR_OUT_OF_RANGE,
            "group {}: cannot skip {} of {} tokens",
            want.group,
            want.skip_token,
            want.token_end
        );
    }
    Ok(())
}

/// Our slots that will be written.
pub(super) fn written_slots(wants: &Wants, layout: &Layout) -> Result<Vec<GroupSlots>> {
    let mut all = Vec::new();
    for want in &wants.groups {
        let Some(group) = layout.groups.get(want.group as usize) else {
            continue;
        };
        if group.layers.is_empty() {
            continue;
        }
        // The entries whose blocks have a token of [skip_token, token_end).
        let per_block = u64::from(group.tokens_per_slot().max(1));
        let before = group.ordinals.owned_below(want.first_ordinal);
        let entry = |ordinal| {
            let at = group.ordinals.owned_below(ordinal).saturating_sub(before);
            usize::try_from(at).map_or(want.slots.len(), |at| at.min(want.slots.len()))
        };
        let written = match want.skip_token < want.token_end {
            true => entry(want.skip_token / per_block)..entry(want.token_end.div_ceil(per_block)),
            false => 0..0,
        };
        all.push((want.group, held_slots(&want.slots[written])));
    }
    for want in &wants.states {
        let held = layout.groups.get(want.group as usize);
        if held.is_some_and(|g| !g.layers.is_empty()) {
            all.push((want.group, vec![want.slot as u32]));
        }
    }
    Ok(all)
}

pub(super) fn check_owned_only(
    owned: &[(u32, i32)],
    written: &[GroupSlots],
    state: &State,
) -> Result<()> {
    for (group, slot) in owned {
        state
            .slots
            .check(*group, i64::from(*slot))
            .map_err(|e| e.context("owned_only_slots"))?;
        let hit = written
            .iter()
            .any(|(g, slots)| g == group && slots.contains(&(*slot as u32)));
        if hit {
            bail!(
                KVF_ERR_DUPLICATE,
                "slot {slot} of group {group} is both owned-only and a destination"
            );
        }
    }
    Ok(())
}

/// The copies from one source rank: (part, binding).
pub(super) fn bind(
    pair: &Arc<Pair>,
    wants: &Wants,
    entry: &wire::TicketEntry,
) -> Result<Vec<(usize, Binding)>> {
    let mut bindings = Vec::new();
    for (part, want) in wants.groups.iter().enumerate() {
        if !pair.moves(want.group as usize) || want.skip_token >= want.token_end {
            continue;
        }
        let Some(published) = entry.groups.iter().find(|g| g.group == want.group) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "group {} was not published by source rank {}",
                want.group,
                entry.rank
            );
        };
        let first = pair.needed_from(want.group as usize, want.skip_token, want.token_end);
        if first < published.token_begin || want.token_end > published.token_end {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {}: tokens {}..{} are wanted, source rank {} published {}..{}",
                want.group,
                first,
                want.token_end,
                entry.rank,
                published.token_begin,
                published.token_end
            );
        }
        let binding = Binding::new(
            pair,
            Request {
                group: want.group as usize,
                src_slots: &wire::unpack_slots(&published.slots)?,
                dst_slots: &want.slots,
                src_first_ordinal: published.first_ordinal,
                dst_first_ordinal: want.first_ordinal,
                skip_token: want.skip_token,
                token_end: want.token_end,
            },
        );
        bindings.push((part, binding?));
    }
    for (i, want) in wants.states.iter().enumerate() {
        if !pair.moves(want.group as usize) {
            continue;
        }
        let Some(published) = entry.states.iter().find(|s| s.group == want.group) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "the state of group {} was not published by source rank {}",
                want.group,
                entry.rank
            );
        };
        if want.as_of_token != u64::MAX && want.as_of_token != published.as_of_token {
            bail!(
                KVF_ERR_INCOMPATIBLE,
                "the state of group {} is the one after token {} at source rank {}, {} is wanted",
                want.group,
                published.as_of_token,
                entry.rank,
                want.as_of_token
            );
        }
        let binding = Binding::new(
            pair,
            Request {
                group: want.group as usize,
                src_slots: &[published.slot],
                dst_slots: &[want.slot],
                src_first_ordinal: 0,
                dst_first_ordinal: 0,
                skip_token: 0,
                token_end: published.as_of_token,
            },
        );
        let part = wants.groups.len() + i;
        bindings.push((part, binding?));
    }
    Ok(bindings)
}
