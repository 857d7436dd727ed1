//! The callers' part of a push: the receiver's offer and the sender's answer to it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::api::{EventKind, PublishDesc, ReceiveDesc};
use super::begin::{end_empty, pool_map};
use super::cells::{Cell, Observer};
use super::control::Command;
use super::gates::Gated;
use super::import_cell::ImportCell;
use super::metadata::incarnation;
use super::peers::PeerShared;
use super::publish::publish;
use super::reader::NewImport;
use super::shared::{Shared, remember};
use super::source::PublicationCell;
use super::ticket::{decode_offer, encode_offer, key};
use super::wants::{
    Wants, check_owned_only, check_wants, groups_of, parts_of, wants_nothing, written_slots,
};
use crate::bail;
use crate::error::Result;
use crate::layout::Layout;
use crate::observe::Times;
use crate::observe::metrics::Operation;
use crate::wire;

/// Offers slots for a push; returns the offer's bytes too.
pub(super) fn receive(
    shared: &Arc<Shared>,
    sender: Option<&Arc<PeerShared>>,
    desc: ReceiveDesc,
    observer: Option<Observer>,
) -> Result<(Arc<ImportCell>, Vec<u8>)> {
    shared.check_open()?;
    let id = shared.new_id();
    let gate = shared.gate(desc.stream, Gated::Import(id))?;
    if let Some(sender) = sender {
        sender.inward()?;
    }
    let wants = Wants {
        groups: desc.groups,
        states: desc.states,
        prefix_tag: desc.prefix_tag,
    };
    let mut state = shared.lock();
    let own = state.engine()?;
    let layout = own.info.ranks[own.index].layout.clone();
    check_wants(&wants, &layout, &state)?;
    let slots: Arc<[_]> = written_slots(&wants, &layout)?.into();
    check_owned_only(&desc.owned_only, &slots, &state)?;
    let pools = state.pools_of(groups_of(&wants).into_iter());
    state.use_pools(&pools)?;
    if let Err(e) = state.slots.begin_write(id, desc.key, &slots) {
        state.leave_pools(&pools);
        return Err(e);
    }
    let map = pool_map(&state, &pools);
    drop(state);
    let offer = wire::Offer {
        key: Some(desc.key.into()),
        engine: own.info.id().0.to_vec(),
        rank: layout.coordinates.global_rank,
        incarnation: shared.incarnation.0.to_vec(),
        offer: id,
        groups: wants
            .groups
            .iter()
            .map(|g| wire::OfferGroup {
                group: g.group,
                skip_token: g.skip_token,
                token_end: g.token_end,
            })
            .collect(),
        states: wants.states.iter().map(|s| s.group).collect(),
    };
    let parts = parts_of(&wants);
    let submitted = vec![false; parts.len()];
    let cell = Arc::new(ImportCell {
        cell: Cell::new(
            id,
            desc.key,
            desc.user_data,
            EventKind::TransferEnded,
            shared.events.clone(),
            observer,
        ),
        part_bytes: Mutex::new(vec![0; parts.len()]),
        parts,
        jobs: Mutex::default(),
        settled: AtomicU64::new(0),
        submitted: Mutex::new(submitted),
        transport: Mutex::new(""),
        aux: Mutex::default(),
        slots,
        pools,
        times: Arc::new(Times::begin()),
        elapsed_ns: AtomicU64::new(0),
        kind: Operation::Receive,
        saved: OnceLock::new(),
        decider: OnceLock::new(),
        runs: Mutex::default(),
    });
    let deadline = match desc.deadline {
        Duration::ZERO => shared.config.timeouts.transfer,
        given => given,
    };
    let until = shared.now().saturating_add(deadline);
    if wants_nothing(&wants) {
        shared.send(Command::EmptyOffer(id, until));
        end_empty(shared, &cell, &[]);
    } else {
        remember(&mut shared.lock().running, &cell);
        shared.send(Command::Import(Box::new(NewImport {
            cell: cell.clone(),
            routes: Vec::new(),
            jobs: Vec::new(),
            wants: Arc::new(wants),
            pools: map,
            deadline: until,
            lease: shared.config.timeouts.lease,
            priority: desc.priority,
            offer: Some(id),
            sender: sender.cloned(),
            gate,
        })));
    }
    Ok((cell, encode_offer(&offer)))
}

/// Answers an offer: publishes the slots and tells the receiver.
pub(super) fn push(
    shared: &Arc<Shared>,
    peer: &PeerShared,
    offer: &[u8],
    mut desc: PublishDesc,
    deadline: Duration,
    observer: Option<Observer>,
) -> Result<Arc<PublicationCell>> {
    let offer = decode_offer(offer)?;
    let receiver = incarnation(&offer.incarnation)?;
    let Some(rank) = peer.engine.index_of(receiver) else {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the offer of {} is from agent {receiver:?}, which is no rank of this peer",
            key(offer.key)
        );
    };
    if let Some(Err(e)) = peer.routes[rank].get()
        && e.status == crate::error::Status::KVF_ERR_PEER_LOST
    {
        return Err(e);
    }
    if desc.key == crate::ids::Key::default() {
        desc.key = key(offer.key);
    }
    if desc.key != key(offer.key) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the offer is for {}, the push for {}",
            key(offer.key),
            desc.key
        );
    }
    check_offer(&offer, &desc, &peer.engine.ranks[rank].layout)?;
    let deadline = match deadline {
        Duration::ZERO => shared.config.timeouts.transfer,
        given => given,
    };
    // Of the whole push, as its machine knows.
    desc.claim = deadline;
    publish(shared, desc, Some((receiver, offer.offer)), observer)
}

/// The sender must hold what the receiver wants: it skips exactly what was skipped there.
fn check_offer(offer: &wire::Offer, desc: &PublishDesc, receiver: &Layout) -> Result<()> {
    let groups: BTreeMap<u32, _> = desc.groups.iter().map(|g| (g.group, g)).collect();
    for want in offer.groups.iter().filter(|g| g.skip_token < g.token_end) {
        let Some(given) = groups.get(&want.group) else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the receiver wants tokens {}..{} of group {}, which is not pushed",
                want.skip_token,
                want.token_end,
                want.group
            );
        };
        let end = match want.token_end {
            u64::MAX => given.token_end,
            end => end,
        };
        // Of a sliding window the receiver needs its last tokens only.
        let window = receiver
            .groups
            .get(want.group as usize)
            .map_or(0, |g| g.window());
        let live = match window {
            0 => 0,
            window => end.saturating_sub(u64::from(window)),
        };
        let first = want.skip_token.max(live);
        if first < given.token_begin || end > given.token_end {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "the receiver wants tokens {}..{} of group {}, {}..{} are pushed",
                first,
                end,
                want.group,
                given.token_begin,
                given.token_end
            );
        }
    }
    for group in &offer.states {
        if !desc.states.iter().any(|s| s.group == *group) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the receiver wants the state of group {group}, which is not pushed"
            );
        }
    }
    Ok(())
}
