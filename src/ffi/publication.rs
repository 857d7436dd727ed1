//! Publications: the source's offer of slots under a lease, and the tickets that lead to it.

use std::ffi::c_void;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::{must_be_zero, read_blob, read_cause, say};
use super::event::kvf_key;
use super::handle::{Object, destroy};
use super::peer::kvf_peer;
use super::structs::{
    Out, abi_struct, check_head, put_bytes, read, read_array, read_plain, view, write_result,
};
use crate::agent::{
    CallerStream, Outcome, Publication, PublishDesc, PublishedGroup, PublishedState,
};
use crate::bail;
use crate::error::{Result, Status, kvf_status};

/// Not ended.
pub const KVF_OUTCOME_PENDING: u32 = 0;
/// Every byte arrived and the lease held throughout. Publication: every reader has finished.
pub const KVF_OUTCOME_DONE: u32 = 1;
/// Something failed; the cause says what.
pub const KVF_OUTCOME_FAILED: u32 = 2;
/// Cancelled (publication: released) by this side.
pub const KVF_OUTCOME_CANCELLED: u32 = 3;
/// Cancelled or released by the other side.
pub const KVF_OUTCOME_CANCELLED_BY_PEER: u32 = 4;
/// A lease or deadline passed.
pub const KVF_OUTCOME_EXPIRED: u32 = 5;
/// The other side declined.
pub const KVF_OUTCOME_DECLINED: u32 = 6;

const _: () = {
    assert!(KVF_OUTCOME_PENDING == Outcome::Pending as u32);
    assert!(KVF_OUTCOME_DONE == Outcome::Done as u32);
    assert!(KVF_OUTCOME_FAILED == Outcome::Failed as u32);
    assert!(KVF_OUTCOME_CANCELLED == Outcome::Cancelled as u32);
    assert!(KVF_OUTCOME_CANCELLED_BY_PEER == Outcome::CancelledByPeer as u32);
    assert!(KVF_OUTCOME_EXPIRED == Outcome::Expired as u32);
    assert!(KVF_OUTCOME_DECLINED == Outcome::Declined as u32);
};

/// An offer of slots. Any thread may use it.
pub struct kvf_publication(pub(crate) Object<Publication>);

/// Blocks of one paged group in a publication.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_published_group {
    /// Index of the group in the layout.
    pub group: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Block of each ordinal that this rank owns, in order from `first_ordinal`; -1 = not held.
    pub slots: *const i32,
    /// Elements of `slots`: one for each block up to the last valid token, or more. Blocks behind it, as an
    /// engine allocates them ahead, are kept like the others until the publication has ended, and not read.
    pub num_slots: usize,
    /// Block ordinal from which `slots` counts; not 0 where a sliding window's table starts later.
    /// Not beyond the block of the last valid token.
    pub first_ordinal: u64,
    /// First valid token.
    pub token_begin: u64,
    /// End of the valid tokens; those before it must not change until the publication has ended.
    pub token_end: u64,
}
abi_struct!(elem kvf_published_group {
    group, reserved, slots, num_slots, first_ordinal, token_begin, token_end,
});

/// A request's state slot in a publication.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_published_state {
    /// Index of the group in the layout.
    pub group: u32,
    /// The request's slot.
    pub slot: i32,
    /// The state is the one after this many tokens.
    pub as_of_token: u64,
}
abi_struct!(elem kvf_published_state { group, slot, as_of_token });

/// What kvf_publish() offers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_publish_desc {
    /// `sizeof(kvf_publish_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Request and attempt.
    pub key: kvf_key,
    /// Paged groups; NULL = none.
    pub groups: *const kvf_published_group,
    /// `sizeof(kvf_published_group)`.
    pub groups_elem_size: usize,
    /// Elements of `groups`; 0 is valid: nothing to move is a handoff too.
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
    /// Life until the first reader, in ns from now; 0 = the agent's `claim_ns`.
    pub claim_ns: u64,
    /// Life without a renewal by a reader, in ns; 0 = the agent's `lease_ns`.
    pub lease_ns: u64,
    /// Bytes for the reader that travel with the ticket (first tokens, draft tokens); NULL = none.
    pub aux: *const c_void,
    /// Length of `aux`, at most 65536.
    pub aux_bytes: usize,
    /// Hash of the last block before the published ones; compared when both sides set it. 0 = none.
    pub prefix_tag: u64,
    /// Returned in the publication's events.
    pub user_data: u64,
}
abi_struct!(head kvf_publish_desc {
    struct_size, abi_version, reserved, key, groups, groups_elem_size, num_groups, states,
    states_elem_size, num_states, stream, claim_ns, lease_ns, aux, aux_bytes, prefix_tag,
    user_data,
});

/// What kvf_publication_query() tells.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvf_publication_info {
    /// `sizeof(kvf_publication_info)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_OUTCOME_*.
    pub outcome: u32,
    /// A kvf_status: why it ended; KVF_IN_PROGRESS while it lives.
    pub cause: i32,
    /// 1: ended, and no reader can be given its bytes any more. The slots may be reused unless
    /// another publication holds them.
    pub memory_safe: u32,
    /// 1: a reader has been seen.
    pub claimed: u32,
    /// Readers that have finished.
    pub readers_done: u32,
    /// Readers that the plan expects; 0 = not known before the first one.
    pub readers_expected: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// Object of the publication's events.
    pub id: u64,
    /// What it is about.
    pub key: kvf_key,
}
abi_struct!(head kvf_publication_info {
    struct_size, abi_version, outcome, cause, memory_safe, claimed, readers_done,
    readers_expected, reserved, id, key,
});

/// Offers slots to readers under a lease.
///
/// The slots' tokens below `token_end` must stay unchanged until the publication has ended with
/// memory safe: all readers finished, released, or expired. Never blocks.
///
/// @param      agent        An agent with an engine.
/// @param[in]  desc         Start from KVF_PUBLISH_DESC_INIT. Nothing of it is kept.
/// @param[out] publication  Receives the publication; end it with kvf_publication_destroy().
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE for a slot, group or token outside of the layout;
///         KVF_ERR_DUPLICATE for a slot or group named twice; KVF_ERR_INVALID_ARGUMENT for fewer
///         slots than tokens; KVF_ERR_SLOT_BUSY for a slot that a transfer writes, with its holder
///         in kvf_last_error(); KVF_ERR_LIMIT when `max_publications` live, for more than
///         1048576 slots, or when `aux` is too long; KVF_ERR_UNSUPPORTED for a stream that is being
///         captured, or without a CUDA driver. Nothing was offered then.
///
/// # Safety
/// @p agent must be live, @p desc point to `desc->struct_size` readable bytes and its arrays to as
/// many elements as it says, @p publication be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_publish(
    agent: *mut kvf_agent,
    desc: *const kvf_publish_desc,
    publication: *mut *mut kvf_publication,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(publication, "publication") }?;
        // SAFETY: the caller's contract.
        let core = agent.core.publish(unsafe { desc.convert() }?)?;
        out.set_handle(kvf_publication(Object::child(&agent, core)));
        Ok(())
    })
}

/// Gives the ticket: the bytes that travel with the request to the reader.
///
/// @param      publication  The publication.
/// @param[out] buf          Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small (it stays untouched).
///
/// # Safety
/// @p publication must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_publication_ticket(
    publication: *const kvf_publication,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let publication = unsafe { view(publication, "publication") }?
            .0
            .enter("publication")?;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, publication.ticket(), "buf") }
    })
}

/// Tells how a publication stands.
///
/// @param         publication  The publication.
/// @param[in,out] info         Start from KVF_PUBLICATION_INFO_INIT; written up to
///                             `info->struct_size`.
/// @return KVF_OK; the state is in @p info.
///
/// # Safety
/// @p publication must be live, @p info point to `info->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_publication_query(
    publication: *const kvf_publication,
    info: *mut kvf_publication_info,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let publication = unsafe { view(publication, "publication") }?
            .0
            .enter("publication")?;
        // SAFETY: the caller's contract.
        let size = unsafe { check_head(info, "info") }?;
        let now = publication.info();
        let value = kvf_publication_info {
            struct_size: size,
            abi_version: 0,
            outcome: now.outcome as u32,
            cause: now.cause as i32,
            memory_safe: now.memory_safe.into(),
            claimed: now.claimed.into(),
            readers_done: now.readers_done,
            readers_expected: now.readers_expected,
            reserved: 0,
            id: publication.id(),
            key: publication.key().into(),
        };
        // SAFETY: `size` writable bytes by the caller's contract.
        unsafe { write_result(info, size, &value) };
        Ok(())
    })
}

/// Waits until a publication has ended.
///
/// Blocks the calling thread only; several threads may wait.
///
/// @param publication  The publication.
/// @param timeout_ns   Longest wait, in ns; 0 = only look.
/// @return KVF_OK: every reader has finished; KVF_TIMED_OUT: it lives; otherwise why it ended:
///         KVF_ERR_CANCELLED (released), KVF_ERR_EXPIRED, KVF_ERR_DECLINED, KVF_ERR_PEER_LOST.
///
/// # Safety
/// @p publication must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_publication_wait(
    publication: *const kvf_publication,
    timeout_ns: u64,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let publication = unsafe { view(publication, "publication") }?
            .0
            .enter("publication")?;
        let status = publication.wait(Duration::from_nanos(timeout_ns));
        say(status, || publication.error_text())
    })
}

/// Takes an offer back; idempotent. Readers that are still copying fail with
/// KVF_ERR_CANCELLED_BY_PEER. Never blocks: KVF_EVENT_PUBLICATION_ENDED follows.
///
/// @param publication  The publication.
/// @return KVF_OK.
///
/// # Safety
/// @p publication must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_publication_release(publication: *mut kvf_publication) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let publication = unsafe { view(publication, "publication") }?
            .0
            .enter("publication")?;
        publication.release();
        Ok(())
    })
}

/// Ends a publication's handle. The offer itself stays until its readers have finished or its
/// lease ends, but nobody is told any more: its events are withdrawn. To take the offer back, or
/// to know when its slots may be reused, release it and wait before.
///
/// @param publication  The publication, or NULL.
/// @return KVF_OK.
///
/// # Safety
/// @p publication must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_publication_destroy(publication: *mut kvf_publication) -> kvf_status {
    // SAFETY: the caller's contract.
    unsafe { destroy(publication, |handle| handle.0, |_, _| Ok(Status::KVF_OK)) }
}

/// Renews the lease of a ticket whose request is still queued here. Never blocks; a source that
/// has ended the publication meanwhile is found by the transfer.
///
/// @param     agent         The agent.
/// @param     peer          The engine that the ticket comes from.
/// @param[in] ticket        The ticket's bytes. Not kept.
/// @param     ticket_bytes  Their number.
/// @return KVF_OK: sent; KVF_ERR_INVALID_ARGUMENT for bytes that are no ticket and for a ticket of
///         another engine.
///
/// # Safety
/// @p agent and @p peer must be live, @p ticket point to @p ticket_bytes readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ticket_hold(
    agent: *mut kvf_agent,
    peer: *const kvf_peer,
    ticket: *const c_void,
    ticket_bytes: usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(peer, "peer") }?.0.enter("peer")?;
        peer.must_belong_to(&agent, "peer")?;
        // SAFETY: the caller's contract.
        let ticket = unsafe { read_blob(ticket, ticket_bytes, "ticket") }?;
        agent.core.hold_ticket(&peer, &ticket)
    })
}

/// Tells the source that this rank will not use a ticket; its publication need not wait for it.
/// Never blocks; sent again until acknowledged or the lease has ended.
///
/// @param     agent         The agent.
/// @param     peer          The engine that the ticket comes from.
/// @param[in] ticket        The ticket's bytes. Not kept.
/// @param     ticket_bytes  Their number.
/// @param     cause         A kvf_status below 0: the reason, which the source gets to see.
/// @return KVF_OK: accepted; KVF_ERR_INVALID_ARGUMENT for bytes that are no ticket, for a ticket of
///         another engine, and for a cause that is no error.
///
/// # Safety
/// @p agent and @p peer must be live, @p ticket point to @p ticket_bytes readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_ticket_decline(
    agent: *mut kvf_agent,
    peer: *const kvf_peer,
    ticket: *const c_void,
    ticket_bytes: usize,
    cause: i32,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(peer, "peer") }?.0.enter("peer")?;
        peer.must_belong_to(&agent, "peer")?;
        // SAFETY: the caller's contract.
        let ticket = unsafe { read_blob(ticket, ticket_bytes, "ticket") }?;
        let cause = read_cause(cause, "cause")?;
        agent.core.decline_ticket(&peer, &ticket, cause)
    })
}

impl kvf_publish_desc {
    /// # Safety
    /// As `kvf_publish`.
    pub(crate) unsafe fn convert(&self) -> Result<PublishDesc> {
        must_be_zero(self.reserved, "desc.reserved")?;
        // SAFETY: the caller's contract.
        let (groups, states, aux) = unsafe {
            (
                read_published_groups(self.groups, self.num_groups, self.groups_elem_size)?,
                read_published_states(self.states, self.num_states, self.states_elem_size)?,
                read_plain(self.aux.cast::<u8>(), self.aux_bytes, "desc.aux")?,
            )
        };
        Ok(PublishDesc {
            key: self.key.read("desc.key")?,
            groups,
            states,
            claim: Duration::from_nanos(self.claim_ns),
            lease: Duration::from_nanos(self.lease_ns),
            aux,
            prefix_tag: self.prefix_tag,
            stream: CallerStream::new(self.stream),
            user_data: self.user_data,
        })
    }
}

/// The groups of a publish descriptor, or of a transceiver's request.
///
/// # Errors
/// As `read_array`; `KVF_ERR_INVALID_ARGUMENT` for blocks without tokens.
///
/// # Safety
/// As `read_array`, for the array and the slots in it.
pub(crate) unsafe fn read_published_groups(
    groups: *const kvf_published_group,
    count: usize,
    elem_size: usize,
) -> Result<Vec<PublishedGroup>> {
    // SAFETY: the caller's contract.
    unsafe { read_array(groups, count, elem_size, "desc.groups") }?
        .iter()
        .enumerate()
        .map(|(i, group)| {
            let place = format!("desc.groups[{i}]");
            must_be_zero(group.reserved, &format!("{place}.reserved"))?;
            // SAFETY: the caller's contract.
            let slots =
                unsafe { read_plain(group.slots, group.num_slots, &format!("{place}.slots")) }?;
            if group.token_end == 0 && !slots.is_empty() {
                bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "{place} has {} slots and a token_end of 0; set the end of the valid tokens",
                    slots.len()
                );
            }
            Ok(PublishedGroup {
                group: group.group,
                slots,
                first_ordinal: group.first_ordinal,
                token_begin: group.token_begin,
                token_end: group.token_end,
            })
        })
        .collect()
}

/// The states of a publish descriptor, or of a transceiver's request.
///
/// # Errors
/// As `read_array`.
///
/// # Safety
/// As `read_array`.
pub(crate) unsafe fn read_published_states(
    states: *const kvf_published_state,
    count: usize,
    elem_size: usize,
) -> Result<Vec<PublishedState>> {
    // SAFETY: the caller's contract.
    let states = unsafe { read_array(states, count, elem_size, "desc.states") }?;
    Ok(states
        .iter()
        .map(|state| PublishedState {
            group: state.group,
            slot: state.slot,
            as_of_token: state.as_of_token,
        })
        .collect())
}
