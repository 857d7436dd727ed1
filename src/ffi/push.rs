//! Pushes: slots that a destination opens, and the source's answer to that offer.

use std::ffi::c_void;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::read_blob;
use super::event::kvf_key;
use super::handle::{Object, optional};
use super::import::{
    kvf_import_group, kvf_import_state, kvf_slot_ref, read_import_groups, read_import_states,
    read_owned_only,
};
use super::peer::kvf_peer;
use super::publication::{
    kvf_published_group, kvf_published_state, read_published_groups, read_published_states,
};
use super::structs::{Out, abi_struct, read, read_plain, view};
use super::transfer::kvf_transfer;
use crate::agent::{CallerStream, PublishDesc, ReceiveDesc};
use crate::bail;
use crate::error::{Result, kvf_status};

/// Slots that the destination opens for a push.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_receive_desc {
    /// `sizeof(kvf_receive_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Larger is served first; 0 = normal.
    pub priority: i32,
    /// Request and attempt.
    pub key: kvf_key,
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
    /// Slots that the request owns and that are never written; NULL = none.
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
    /// The engine that will push: nobody else may, and the receive fails at once when that engine is
    /// lost. NULL = any engine; then the deadline alone ends a receive that nobody answers.
    pub peer: *const kvf_peer,
}
abi_struct!(head kvf_receive_desc {
    struct_size, abi_version, priority, key, groups, groups_elem_size, num_groups, states,
    states_elem_size, num_states, owned_only, owned_only_elem_size, num_owned_only, stream,
    deadline_ns, prefix_tag, user_data, peer,
});

/// A push into slots that the destination opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_push_desc {
    /// `sizeof(kvf_push_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Larger is served first; 0 = normal.
    pub priority: i32,
    /// The engine that the offer comes from.
    pub peer: *const kvf_peer,
    /// The offer's bytes: kvf_transfer_offer() of the destination. Not kept.
    pub offer: *const c_void,
    /// Their number.
    pub offer_bytes: usize,
    /// Paged groups; NULL = none.
    pub groups: *const kvf_published_group,
    /// `sizeof(kvf_published_group)`.
    pub groups_elem_size: usize,
    /// Elements of `groups`.
    pub num_groups: usize,
    /// State slots; NULL = none.
    pub states: *const kvf_published_state,
    /// `sizeof(kvf_published_state)`.
    pub states_elem_size: usize,
    /// Elements of `states`.
    pub num_states: usize,
    /// CUstream: the slots are readable when what is enqueued so far is done. NULL = they are
    /// readable now; the default streams are KVF_STREAM_LEGACY and KVF_STREAM_PER_THREAD.
    pub stream: *mut c_void,
    /// From now, in ns; 0 = the agent's `transfer_ns`.
    pub deadline_ns: u64,
    /// Bytes for the destination (first tokens, draft tokens); NULL = none.
    pub aux: *const c_void,
    /// Length of `aux`, at most 65536.
    pub aux_bytes: usize,
    /// Hash of the last block before the pushed ones; compared when both sides set it. 0 = none.
    pub prefix_tag: u64,
    /// Returned in the transfer's events.
    pub user_data: u64,
}
abi_struct!(head kvf_push_desc {
    struct_size, abi_version, priority, peer, offer, offer_bytes, groups, groups_elem_size,
    num_groups, states, states_elem_size, num_states, stream, deadline_ns, aux, aux_bytes,
    prefix_tag, user_data,
});

/// Opens slots for a push; kvf_transfer_offer() then gives the bytes that the sender needs. The
/// sender skips exactly what is skipped here; a receive of nothing is born complete. Never blocks.
///
/// @param      agent     The agent.
/// @param[in]  desc      Start from KVF_RECEIVE_DESC_INIT. Nothing of it is kept.
/// @param[out] transfer  Receives the transfer; end it with kvf_transfer_destroy().
/// @return As kvf_import_begin(); KVF_ERR_INCOMPATIBLE if the layout of `desc->peer` does not fit.
///
/// # Safety
/// @p agent and `desc->peer` (if not NULL) must be live, @p desc point to `desc->struct_size` readable bytes and its pointers to
/// what they say, @p transfer be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_receive_begin(
    agent: *mut kvf_agent,
    desc: *const kvf_receive_desc,
    transfer: *mut *mut kvf_transfer,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(transfer, "transfer") }?;
        // SAFETY: the caller's contract.
        let sender = unsafe { optional(desc.peer, |p| &p.0, &agent, "desc.peer") }?;
        // SAFETY: the caller's contract.
        let receive = unsafe {
            ReceiveDesc {
                key: desc.key.read("desc.key")?,
                groups: read_import_groups(desc.groups, desc.num_groups, desc.groups_elem_size)?,
                states: read_import_states(desc.states, desc.num_states, desc.states_elem_size)?,
                owned_only: read_owned_only(
                    desc.owned_only,
                    desc.num_owned_only,
                    desc.owned_only_elem_size,
                )?,
                deadline: Duration::from_nanos(desc.deadline_ns),
                priority: desc.priority,
                prefix_tag: desc.prefix_tag,
                stream: CallerStream::new(desc.stream),
                user_data: desc.user_data,
            }
        };
        let core = agent.core.receive_begin(sender.as_deref(), receive, None)?;
        out.set_handle(kvf_transfer(Object::child(&agent, core)));
        Ok(())
    })
}

/// Begins to write into slots that the destination opened. Mirrors Megatron-LM's
/// `begin_push_blocks`. The destination's kvferry fetches the bytes, so that no process writes
/// another one's memory. Never blocks.
///
/// @param      agent     The agent.
/// @param[in]  desc      Start from KVF_PUSH_DESC_INIT. Nothing of it is kept.
/// @param[out] transfer  Receives the transfer; end it with kvf_transfer_destroy().
/// @return As kvf_publish(); KVF_ERR_INVALID_ARGUMENT also for bytes that are no offer, for an
///         offer of another engine and for a group that the destination wants and that is not
///         pushed; KVF_ERR_OUT_OF_RANGE also for tokens that it wants and that are not pushed;
///         KVF_ERR_PEER_LOST. Nothing has changed then.
///
/// # Safety
/// @p agent and `desc->peer` must be live, @p desc point to `desc->struct_size` readable bytes and
/// its pointers to what they say, @p transfer be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_push_begin(
    agent: *mut kvf_agent,
    desc: *const kvf_push_desc,
    transfer: *mut *mut kvf_transfer,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(transfer, "transfer") }?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(desc.peer, "desc.peer") }?.0.enter("peer")?;
        peer.must_belong_to(&agent, "desc.peer")?;
        // SAFETY: the caller's contract.
        let (offer, push) = unsafe { desc.convert() }?;
        let deadline = Duration::from_nanos(desc.deadline_ns);
        let core = agent.core.push_begin(&peer, &offer, push, deadline, None)?;
        out.set_handle(kvf_transfer(Object::child(&agent, core)));
        Ok(())
    })
}

impl kvf_push_desc {
    /// The offer's bytes, and what to push.
    ///
    /// # Safety
    /// As `kvf_push_begin`.
    pub(super) unsafe fn convert(&self) -> Result<(Vec<u8>, PublishDesc)> {
        if self.priority != 0 {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "desc.priority is {}: the destination's decides, a push has none yet",
                self.priority
            );
        }
        // SAFETY: the caller's contract.
        unsafe {
            Ok((
                read_blob(self.offer, self.offer_bytes, "desc.offer")?,
                PublishDesc {
                    groups: read_published_groups(
                        self.groups,
                        self.num_groups,
                        self.groups_elem_size,
                    )?,
                    states: read_published_states(
                        self.states,
                        self.num_states,
                        self.states_elem_size,
                    )?,
                    aux: read_plain(self.aux.cast::<u8>(), self.aux_bytes, "desc.aux")?,
                    prefix_tag: self.prefix_tag,
                    stream: CallerStream::new(self.stream),
                    user_data: self.user_data,
                    ..PublishDesc::default()
                },
            ))
        }
    }
}
