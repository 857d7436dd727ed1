//! The caller's part of a publication: check everything, mark the slots, grant the lease, make the
//! ticket. A bad argument fails here and changes nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::Duration;

use super::api::{EventKind, PublishDesc};
use super::cells::{Cell, Observer};
use super::control::Command;
use super::gates::Gated;
use super::shared::{Shared, State};
use super::slots::{GroupSlots, check_first, held_slots};
use super::source::{NewPublication, PublicationCell};
use super::ticket::encode_ticket;
use crate::bail;
use crate::error::Result;
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::layout::{Group, GroupKind, Layout};
use crate::observe::Times;
use crate::plan::slot_twice;
use crate::wire;

/// Longest aux data, in bytes.
pub(super) const MAX_AUX: usize = 64 << 10;
/// Most slots of one publication: five bytes of a ticket each, which has 8 MiB.
const MAX_SLOTS: usize = 1 << 20;

pub(super) fn publish(
    shared: &Arc<Shared>,
    desc: PublishDesc,
    push: Option<(Incarnation, u64)>,
    observer: Option<Observer>,
) -> Result<Arc<PublicationCell>> {
    shared.check_open()?;
    if desc.aux.len() > MAX_AUX {
        bail!(
            KVF_ERR_LIMIT,
            "{} bytes of aux data are over the limit of {MAX_AUX}",
            desc.aux.len()
        );
    }
    let slots: usize = desc.groups.iter().map(|g| g.slots.len()).sum();
    if slots > MAX_SLOTS {
        bail!(
            KVF_ERR_LIMIT,
            "{slots} slots in one publication are over the limit of {MAX_SLOTS}: publish parts under keys of their own"
        );
    }
    let number = shared.new_id();
    let id = PublicationId {
        source: shared.incarnation,
        key: desc.key,
        epoch: Epoch(number),
    };
    let gate = shared.gate(desc.stream, Gated::Publication(id))?;
    let mut state = shared.lock();
    let own = state.engine()?;
    let layout = &own.info.ranks[own.index].layout;
    let slots = read_slots(&desc, layout, &state)?;
    let groups: Vec<u32> = slots.iter().map(|(g, _)| *g).collect();
    let pools = state.pools_of(groups.iter().copied());
    let lease = shared.leases.grant()?;
    if let Err(e) = state.use_pools(&pools) {
        shared.leases.revoke(lease);
        return Err(e);
    }
    if let Err(e) = state.slots.begin_read(&slots) {
        state.leave_pools(&pools);
        shared.leases.revoke(lease);
        return Err(e);
    }
    drop(state);

    let or = |given: Duration, default: Duration| match given {
        Duration::ZERO => default,
        given => given,
    };
    let times = &shared.config.timeouts;
    let lease_time = or(desc.lease, times.lease);
    let entry = wire::TicketEntry {
        rank: layout.coordinates.global_rank,
        incarnation: shared.incarnation.0.to_vec(),
        epoch: number,
        lease_index: lease.index,
        lease_generation: lease.generation,
        groups: desc
            .groups
            .iter()
            .map(|g| wire::TicketGroup {
                group: g.group,
                slots: wire::pack_slots(&g.slots).into(),
                token_begin: g.token_begin,
                token_end: g.token_end,
                first_ordinal: g.first_ordinal,
            })
            .collect(),
        states: desc
            .states
            .iter()
            .map(|s| wire::TicketState {
                group: s.group,
                slot: s.slot,
                as_of_token: s.as_of_token,
            })
            .collect(),
        gated: gate.is_some(),
    };
    let ticket = encode_ticket(&wire::Ticket {
        key: Some(desc.key.into()),
        engine: own.info.id().0.to_vec(),
        dp_rank: layout.coordinates.dp_rank,
        entries: vec![entry.clone()],
        aux: desc.aux,
        prefix_tag: desc.prefix_tag,
        lease_ns: u64::try_from(lease_time.as_nanos()).unwrap_or(u64::MAX),
    });
    let kind = match push {
        Some(_) => EventKind::TransferEnded,
        None => EventKind::PublicationEnded,
    };
    let cell = Arc::new(PublicationCell {
        cell: Cell::new(
            number,
            desc.key,
            desc.user_data,
            kind,
            shared.events.clone(),
            observer,
        ),
        id,
        lease,
        entry: entry.clone(),
        ticket,
        claimed: AtomicU32::new(0),
        readers_done: AtomicU32::new(0),
        readers_expected: AtomicU32::new(0),
        bytes: AtomicU64::new(0),
        times: Times::begin(),
        readable: AtomicBool::new(gate.is_none()),
    });
    shared.metrics.lease_granted();
    let weak = Arc::downgrade(&cell);
    shared.lock().published.insert(number, weak);
    shared.send(Command::Publish(Box::new(NewPublication {
        cell: cell.clone(),
        lease,
        entry,
        slots,
        pools,
        groups: groups.into_iter().map(|g| g as usize).collect(),
        claim: or(desc.claim, times.claim),
        lease_time,
        push,
        gate,
    })));
    Ok(cell)
}

/// Checks the description against our layout; the slots it names.
fn read_slots(desc: &PublishDesc, layout: &Layout, state: &State) -> Result<Vec<GroupSlots>> {
    let mut all: Vec<GroupSlots> = Vec::new();
    let find = |group: u32, all: &[GroupSlots]| -> Result<&Group> {
        let Some(held) = layout.groups.get(group as usize) else {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {group} of a layout with {} groups",
                layout.groups.len()
            );
        };
        if all.iter().any(|(g, _)| *g == group) {
            bail!(KVF_ERR_DUPLICATE, "group {group} is given twice");
        }
        Ok(held)
    };
    for given in &desc.groups {
        let held = find(given.group, &all)?;
        let GroupKind::Paged { .. } = held.kind else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {} is a state group: publish its slot as a state",
                given.group
            );
        };
        if given.token_end == u64::MAX {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {}: token_end is KVF_TOKEN_END_ALL, which only a reader may say: give the end \
                 of the valid tokens",
                given.group
            );
        }
        if given.token_begin > given.token_end {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {}: tokens {}..{}",
                given.group,
                given.token_begin,
                given.token_end
            );
        }
        if held.layers.is_empty() {
            all.push((given.group, Vec::new()));
            continue;
        }
        check_first(
            given.group,
            held,
            given.first_ordinal,
            &given.slots,
            given.token_end,
        )?;
        let needed = held.table_len(given.first_ordinal, given.token_end);
        if (given.slots.len() as u64) < needed {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {}: {} slots for the {needed} blocks from ordinal {} to token {}",
                given.group,
                given.slots.len(),
                given.first_ordinal,
                given.token_end
            );
        }
        state.slots.check_table(given.group, &given.slots)?;
        if let Some((_, entry)) = slot_twice(&given.slots, state.slots.count(given.group)) {
            bail!(
                KVF_ERR_DUPLICATE,
                "slot {} of group {} is given for two blocks",
                given.slots[entry],
                given.group
            );
        }
        all.push((given.group, held_slots(&given.slots)));
    }
    for given in &desc.states {
        let held = find(given.group, &all)?;
        if held.kind != GroupKind::State {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {} is a paged group: publish its blocks as a group",
                given.group
            );
        }
        if given.as_of_token == u64::MAX {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {}: as_of_token is KVF_AS_OF_ANY, which only a reader may say: give the \
                 number of tokens that the state is of",
                given.group
            );
        }
        if held.layers.is_empty() {
            all.push((given.group, Vec::new()));
            continue;
        }
        state.slots.check(given.group, i64::from(given.slot))?;
        all.push((given.group, vec![given.slot as u32]));
    }
    Ok(all)
}
