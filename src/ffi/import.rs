//! Beginning of transfers by the destination: pull (one group), import (several parts, one
//! outcome).

use std::ffi::c_void;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::{must_be_zero, read_blob};
use super::event::kvf_key;
use super::handle::{Object, optional};
use super::peer::kvf_peer;
use super::structs::{Out, abi_struct, read, read_array, read_plain, view};
use super::transfer::kvf_transfer;
use crate::agent::{CallerStream, ImportDesc, ImportGroup, ImportState, ReceiveDesc};
use crate::bail;
use crate::error::{Result, kvf_status};

/// As `token_end` of a destination: all tokens that were published.
pub const KVF_TOKEN_END_ALL: u64 = 0xffff_ffff_ffff_ffff;
/// As `as_of_token` of a destination: whatever was published.
pub const KVF_AS_OF_ANY: u64 = 0xffff_ffff_ffff_ffff;

/// The destination reads (default).
pub const KVF_DIRECTION_PULL: u32 = 0;
/// The source sends into slots that the destination opens.
pub const KVF_DIRECTION_PUSH: u32 = 1;

/// Blocks of one paged group to fill.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_import_group {
    /// Index of the group in the layout.
    pub group: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Destination block of each ordinal that this rank owns, in order from `first_ordinal`; -1 =
    /// not wanted.
    pub slots: *const i32,
    /// Elements of `slots`; the last one takes the last wanted token.
    pub num_slots: usize,
    /// Block ordinal from which `slots` counts; not 0 where a sliding window's table starts later.
    pub first_ordinal: u64,
    /// Tokens before this one are here already (prefix hit) and are not written; a multiple of
    /// this rank's block size.
    pub skip_token: u64,
    /// End of the wanted tokens, or KVF_TOKEN_END_ALL. Equal to `skip_token`: nothing is left.
    pub token_end: u64,
}
abi_struct!(elem kvf_import_group {
    group, reserved, slots, num_slots, first_ordinal, skip_token, token_end,
});

/// A state slot to fill.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_import_state {
    /// Index of the group in the layout.
    pub group: u32,
    /// Destination slot.
    pub slot: i32,
    /// Must equal what was published, or KVF_AS_OF_ANY.
    pub as_of_token: u64,
}
abi_struct!(elem kvf_import_state { group, slot, as_of_token });

/// A slot of a group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_slot_ref {
    /// Index of the group in the layout.
    pub group: u32,
    /// Slot in that group.
    pub slot: i32,
}
abi_struct!(elem kvf_slot_ref { group, slot });

/// A pull of one paged group.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_pull_desc {
    /// `sizeof(kvf_pull_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Index of the group in the layout.
    pub group: u32,
    /// The engine that the ticket comes from.
    pub peer: *const kvf_peer,
    /// The ticket's bytes. Not kept.
    pub ticket: *const c_void,
    /// Their number.
    pub ticket_bytes: usize,
    /// Destination block of each ordinal that this rank owns, in order from `first_ordinal`; -1 =
    /// not wanted.
    pub slots: *const i32,
    /// Elements of `slots`; the last one takes the last wanted token.
    pub num_slots: usize,
    /// Block ordinal from which `slots` counts; not 0 where a sliding window's table starts later.
    pub first_ordinal: u64,
    /// Tokens before this one are here already (prefix hit) and are not written; a multiple of
    /// this rank's block size.
    pub skip_token: u64,
    /// End of the wanted tokens, or KVF_TOKEN_END_ALL. Equal to `skip_token`: nothing is left.
    pub token_end: u64,
    /// CUstream: earlier users of the slots are done when what is enqueued so far is done. NULL =
    /// they are done now; the default streams are KVF_STREAM_LEGACY and KVF_STREAM_PER_THREAD.
    pub stream: *mut c_void,
    /// From now, in ns; 0 = the agent's `transfer_ns`.
    pub deadline_ns: u64,
    /// Hash of the last skipped block; compared when both sides set it. 0 = none.
    pub prefix_tag: u64,
    /// Returned in the transfer's events.
    pub user_data: u64,
    /// Larger is served first; 0 = normal.
    pub priority: i32,
    /// Must be 0.
    pub reserved: u32,
}
abi_struct!(head kvf_pull_desc {
    struct_size, abi_version, group, peer, ticket, ticket_bytes, slots, num_slots, first_ordinal, skip_token,
    token_end, stream, deadline_ns, prefix_tag, user_data, priority, reserved,
});

/// An import: several groups and states of one request with one outcome.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_import_desc {
    /// `sizeof(kvf_import_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_DIRECTION_PULL or KVF_DIRECTION_PUSH.
    pub direction: u32,
    /// The engine that the ticket comes from. KVF_DIRECTION_PUSH: as in kvf_receive_desc.
    pub peer: *const kvf_peer,
    /// The ticket's bytes. Not kept.
    pub ticket: *const c_void,
    /// Their number.
    pub ticket_bytes: usize,
    /// Paged groups; NULL = none.
    pub groups: *const kvf_import_group,
    /// `sizeof(kvf_import_group)`.
    pub groups_elem_size: usize,
    /// Elements of `groups`.
    pub num_groups: usize,
    /// State slots; NULL = none.
    pub states: *const kvf_import_state,
    /// `sizeof(kvf_import_state)`.
    pub states_elem_size: usize,
    /// Elements of `states`.
    pub num_states: usize,
    /// Slots that the request owns and that are never written (continuation blocks); NULL = none.
    pub owned_only: *const kvf_slot_ref,
    /// `sizeof(kvf_slot_ref)`.
    pub owned_only_elem_size: usize,
    /// Elements of `owned_only`.
    pub num_owned_only: usize,
    /// CUstream: earlier users of the slots are done when what is enqueued so far is done. NULL =
    /// they are done now; the default streams are KVF_STREAM_LEGACY and KVF_STREAM_PER_THREAD.
    pub stream: *mut c_void,
    /// From now, in ns; 0 = the agent's `transfer_ns`.
    pub deadline_ns: u64,
    /// Hash of the last skipped block; compared when both sides set it. 0 = none.
    pub prefix_tag: u64,
    /// Returned in the transfer's events.
    pub user_data: u64,
    /// Larger is served first; 0 = normal.
    pub priority: i32,
    /// Must be 0.
    pub reserved: u32,
    /// KVF_DIRECTION_PUSH: request and attempt. KVF_DIRECTION_PULL: 0, the ticket has them.
    pub key: kvf_key,
}
abi_struct!(head kvf_import_desc {
    struct_size, abi_version, direction, peer, ticket, ticket_bytes, groups, groups_elem_size,
    num_groups, states, states_elem_size, num_states, owned_only, owned_only_elem_size,
    num_owned_only, stream, deadline_ns, prefix_tag, user_data, priority, reserved, key,
});

/// Begins to fetch one paged group of what a ticket offers: an import with one part.
///
/// Mirrors Megatron-LM's `begin_pull_blocks`. Never blocks: what is small may be copied inside the
/// call, the rest is done by kvferry's threads and by who waits for it. A pull with nothing to move
/// is born complete, and the source is told all the same.
///
/// @param      agent     The agent.
/// @param[in]  desc      Start from KVF_PULL_DESC_INIT. Nothing of it is kept.
/// @param[out] transfer  Receives the transfer; end it with kvf_transfer_destroy().
/// @return KVF_OK: begun, or complete already; KVF_ERR_OUT_OF_RANGE for a slot, group or token
///         outside of the layout; KVF_ERR_DUPLICATE for a slot named twice; KVF_ERR_SLOT_BUSY for
///         a slot that a transfer, a publication or the quarantine holds, named in
///         kvf_last_error(); KVF_ERR_INVALID_ARGUMENT for bytes that are no ticket and for a
///         ticket of another engine; KVF_ERR_NOT_FOUND for a group that was not published;
///         KVF_ERR_PREFIX_MISMATCH; KVF_ERR_UNSUPPORTED for a stream that is being captured, or
///         without a CUDA driver. Nothing has changed then;
///         whatever fails later is the transfer's outcome.
///
/// # Safety
/// @p agent and `desc->peer` must be live, @p desc point to `desc->struct_size` readable bytes and
/// its pointers to what they say, @p transfer be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pull_begin(
    agent: *mut kvf_agent,
    desc: *const kvf_pull_desc,
    transfer: *mut *mut kvf_transfer,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(transfer, "transfer") }?;
        must_be_zero(desc.reserved, "desc.reserved")?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(desc.peer, "desc.peer") }?.0.enter("peer")?;
        peer.must_belong_to(&agent, "desc.peer")?;
        // SAFETY: the caller's contract.
        let (ticket, slots) = unsafe {
            (
                read_blob(desc.ticket, desc.ticket_bytes, "desc.ticket")?,
                read_plain(desc.slots, desc.num_slots, "desc.slots")?,
            )
        };
        let group = ImportGroup {
            group: desc.group,
            slots,
            first_ordinal: desc.first_ordinal,
            skip_token: desc.skip_token,
            token_end: desc.token_end,
        };
        wants_tokens(&group, "desc")?;
        let import = ImportDesc {
            ticket,
            groups: vec![group],
            states: Vec::new(),
            owned_only: Vec::new(),
            deadline: Duration::from_nanos(desc.deadline_ns),
            priority: desc.priority,
            prefix_tag: desc.prefix_tag,
            stream: CallerStream::new(desc.stream),
            user_data: desc.user_data,
        };
        let core = agent.core.import_begin(&peer, import)?;
        out.set_handle(kvf_transfer(Object::child(&agent, core)));
        Ok(())
    })
}

/// Begins to fetch several groups and states of what a ticket offers.
///
/// Mirrors Megatron-LM's handoff import. All parts are admitted or none; they start independently
/// and end together: the first failure is the import's outcome, after the parts already started
/// have settled. A part with nothing to move submits nothing; an import with nothing to move is
/// born complete, and the source is told all the same. Never blocks.
///
/// @param      agent     The agent.
/// @param[in]  desc      Start from KVF_IMPORT_DESC_INIT. Nothing of it is kept.
/// @param[out] transfer  Receives the transfer; end it with kvf_transfer_destroy().
/// @return As kvf_pull_begin(); with KVF_DIRECTION_PUSH as kvf_receive_begin();
///         KVF_ERR_DUPLICATE also for an owned-only slot that is to be written.
///
/// # Safety
/// @p agent and `desc->peer` (if not NULL) must be live, @p desc point to `desc->struct_size`
/// readable bytes and its pointers to what they say, @p transfer be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_import_begin(
    agent: *mut kvf_agent,
    desc: *const kvf_import_desc,
    transfer: *mut *mut kvf_transfer,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(transfer, "transfer") }?;
        must_be_zero(desc.reserved, "desc.reserved")?;
        // SAFETY: the caller's contract.
        let (groups, states, owned_only) = unsafe {
            (
                read_import_groups(desc.groups, desc.num_groups, desc.groups_elem_size)?,
                read_import_states(desc.states, desc.num_states, desc.states_elem_size)?,
                read_owned_only(
                    desc.owned_only,
                    desc.num_owned_only,
                    desc.owned_only_elem_size,
                )?,
            )
        };
        let deadline = Duration::from_nanos(desc.deadline_ns);
        let core = match desc.direction {
            KVF_DIRECTION_PULL => {
                // SAFETY: the caller's contract.
                let peer = unsafe { view(desc.peer, "desc.peer") }?.0.enter("peer")?;
                peer.must_belong_to(&agent, "desc.peer")?;
                let import = ImportDesc {
                    // SAFETY: the caller's contract.
                    ticket: unsafe { read_blob(desc.ticket, desc.ticket_bytes, "desc.ticket") }?,
                    groups,
                    states,
                    owned_only,
                    deadline,
                    priority: desc.priority,
                    prefix_tag: desc.prefix_tag,
                    stream: CallerStream::new(desc.stream),
                    user_data: desc.user_data,
                };
                agent.core.import_begin(&peer, import)?
            }
            KVF_DIRECTION_PUSH => {
                if desc.ticket_bytes != 0 {
                    bail!(
                        KVF_ERR_INVALID_ARGUMENT,
                        "desc.ticket_bytes is {} in a push: the sender has no ticket to give",
                        desc.ticket_bytes
                    );
                }
                let receive = ReceiveDesc {
                    key: desc.key.read("desc.key")?,
                    groups,
                    states,
                    owned_only,
                    deadline,
                    priority: desc.priority,
                    prefix_tag: desc.prefix_tag,
                    stream: CallerStream::new(desc.stream),
                    user_data: desc.user_data,
                };
                // SAFETY: the caller's contract.
                let sender = unsafe { optional(desc.peer, |p| &p.0, &agent, "desc.peer") }?;
                agent.core.receive_begin(sender.as_deref(), receive, None)?
            }
            unknown => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "desc.direction {unknown} is unknown"
            ),
        };
        out.set_handle(kvf_transfer(Object::child(&agent, core)));
        Ok(())
    })
}

/// Refuses a group that names blocks and, by a forgotten field, no token: it would succeed
/// without moving a byte.
fn wants_tokens(group: &ImportGroup, place: &str) -> Result<()> {
    if group.token_end == 0 && !group.slots.is_empty() {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{place} has {} slots and a token_end of 0; set the end of the wanted tokens or \
             KVF_TOKEN_END_ALL",
            group.slots.len()
        );
    }
    Ok(())
}

/// The groups of an import, or of a transceiver's request.
///
/// # Errors
/// As `read_array`; `KVF_ERR_INVALID_ARGUMENT` for blocks without tokens.
///
/// # Safety
/// As `read_array`, for the array and the slots in it.
pub(crate) unsafe fn read_import_groups(
    groups: *const kvf_import_group,
    count: usize,
    elem_size: usize,
) -> Result<Vec<ImportGroup>> {
    // SAFETY: the caller's contract.
    unsafe { read_array(groups, count, elem_size, "desc.groups") }?
        .iter()
        .enumerate()
        .map(|(i, group)| {
            let place = format!("desc.groups[{i}]");
            must_be_zero(group.reserved, &format!("{place}.reserved"))?;
            let group = ImportGroup {
                group: group.group,
                // SAFETY: the caller's contract.
                slots: unsafe {
                    read_plain(group.slots, group.num_slots, &format!("{place}.slots"))
                }?,
                first_ordinal: group.first_ordinal,
                skip_token: group.skip_token,
                token_end: group.token_end,
            };
            wants_tokens(&group, &place)?;
            Ok(group)
        })
        .collect()
}

/// The states of an import, or of a transceiver's request.
///
/// # Errors
/// As `read_array`.
///
/// # Safety
/// As `read_array`.
pub(crate) unsafe fn read_import_states(
    states: *const kvf_import_state,
    count: usize,
    elem_size: usize,
) -> Result<Vec<ImportState>> {
    // SAFETY: the caller's contract.
    let states = unsafe { read_array(states, count, elem_size, "desc.states") }?;
    Ok(states
        .iter()
        .map(|state| ImportState {
            group: state.group,
            slot: state.slot,
            as_of_token: state.as_of_token,
        })
        .collect())
}

/// The owned-only slots of an import, or of a transceiver's request.
///
/// # Errors
/// As `read_array`.
///
/// # Safety
/// As `read_array`.
pub(crate) unsafe fn read_owned_only(
    slots: *const kvf_slot_ref,
    count: usize,
    elem_size: usize,
) -> Result<Vec<(u32, i32)>> {
    // SAFETY: the caller's contract.
    let slots = unsafe { read_array(slots, count, elem_size, "desc.owned_only") }?;
    Ok(slots.iter().map(|slot| (slot.group, slot.slot)).collect())
}
