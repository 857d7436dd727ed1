//! Transceivers: request-level bookkeeping over the agent level.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::{give_text, must_be_zero, name_field};
use super::engine::kvf_engine;
use super::event::kvf_key;
use super::handle::{Object, Shared, Use, destroy};
use super::import::{
    kvf_import_group, kvf_import_state, kvf_slot_ref, read_import_groups, read_import_states,
    read_owned_only,
};
use super::peer::kvf_peer;
use super::publication::kvf_publish_desc;
use super::structs::{
    Out, OutArray, abi_struct, check_head, put_bytes, read, read_plain, view, write_result,
};
use super::transceiver_config::kvf_transceiver_config;
use crate::agent::{Agent, CallerStream, ImportDesc, Peer};
use crate::bail;
use crate::error::{Error, Result, Status, kvf_status};
use crate::transceiver::{
    AgentPort, Cancel, Group, ReceiveRequest, Record, RequestResult, ResultKind, Side, Transceiver,
};

/// As `at_least`: all requests that are in flight.
pub const KVF_WAIT_ALL: u32 = 0xffff_ffff;
/// As `timeout_ns` of a status call: the side's poll time-out of the configuration.
pub const KVF_TIMEOUT_CONFIGURED: u64 = 0xffff_ffff_ffff_ffff;

/// One rank: what ends here is reported here (default).
pub const KVF_CONSENSUS_NONE: u32 = 0;
/// Ranks vote, rank 0 of the domain decides, the engine broadcasts its decision bytes.
pub const KVF_CONSENSUS_VOTES: u32 = 1;
/// Every rank's status call exchanges what it knows through `exchange`.
pub const KVF_CONSENSUS_COLLECTIVE: u32 = 2;

/// The tensor- and context-parallel ranks of one pipeline stage.
pub const KVF_EXCHANGE_TENSOR: u32 = 0;
/// The pipeline stages' ranks of equal tensor- and context-parallel coordinates.
pub const KVF_EXCHANGE_PIPELINE: u32 = 1;

/// The request has ended; its memory may be reused if `memory_safe` says so.
pub const KVF_RESULT_ENDED: u32 = 1;
/// The memory of a request that was reported as ended may be reused now.
pub const KVF_RESULT_MEMORY_SAFE: u32 = 2;

/// A context request: this engine prefilled.
pub const KVF_SIDE_CONTEXT: u32 = 0;
/// A generation request: this engine decodes.
pub const KVF_SIDE_GENERATION: u32 = 1;

/// Bytes of a decision of no result.
pub const KVF_DECISION_HEAD_BYTES: usize = 64;
/// Bytes that each result adds to a decision at most.
pub const KVF_DECISION_RESULT_BYTES: usize = 48;

const _: () = {
    assert!(KVF_RESULT_ENDED == ResultKind::Ended as u32);
    assert!(KVF_RESULT_MEMORY_SAFE == ResultKind::MemorySafe as u32);
    assert!(KVF_SIDE_CONTEXT == Side::Context as u32);
    assert!(KVF_SIDE_GENERATION == Side::Generation as u32);
    assert!(KVF_EXCHANGE_TENSOR == Group::Tensor as u32);
    assert!(KVF_EXCHANGE_PIPELINE == Group::Pipeline as u32);
    assert!(KVF_DECISION_HEAD_BYTES == crate::transceiver::DECISION_HEAD);
    assert!(KVF_DECISION_RESULT_BYTES == crate::transceiver::DECISION_ENTRY);
};

/// The agent under a transceiver.
pub(super) struct Owner(Arc<Shared>);

impl AsRef<Agent> for Owner {
    fn as_ref(&self) -> &Agent {
        &self.0.core
    }
}

/// cbindgen:ignore
pub(super) type Core = Transceiver<AgentPort<Owner>>;

/// A rank's request-level bookkeeping. Any thread may use it, several at once.
pub struct kvf_transceiver(Object<Core>);

/// What a generation request fetches, and into which slots.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_receive_request {
    /// `sizeof(kvf_receive_request)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Must be 0.
    pub reserved: u32,
    /// Must be the ticket's.
    pub key: kvf_key,
    /// The engine that the ticket comes from; push: the one that will answer the offer.
    pub peer: *const kvf_peer,
    /// The ticket's bytes. Not kept. Push: NULL; the request makes an offer.
    pub ticket: *const c_void,
    /// Their number; push: 0.
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
    /// From now, in ns; 0 = the transceiver's `transfer_ns`.
    pub deadline_ns: u64,
    /// Hash of the last skipped block; compared when both sides set it. 0 = none.
    pub prefix_tag: u64,
    /// Returned in the request's results.
    pub user_data: u64,
    /// Larger is served first; 0 = normal.
    pub priority: i32,
    /// Must be 0.
    pub reserved2: u32,
}
abi_struct!(head kvf_receive_request {
    struct_size, abi_version, reserved, key, peer, ticket, ticket_bytes, groups, groups_elem_size,
    num_groups, states, states_elem_size, num_states, owned_only, owned_only_elem_size,
    num_owned_only, stream, deadline_ns, prefix_tag, user_data, priority, reserved2,
});

/// One line of a status call's answer: the whole outcome of a request.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvf_request_result {
    /// The request.
    pub key: kvf_key,
    /// `user_data` of the request; 0 if it never came to this rank.
    pub user_data: u64,
    /// KVF_RESULT_*.
    pub kind: u32,
    /// KVF_OUTCOME_*.
    pub outcome: u32,
    /// A kvf_status: why; KVF_OK for a success.
    pub cause: i32,
    /// 1: the request's slots may be reused (on every rank, where ranks agree).
    pub memory_safe: u32,
    /// The rank of the domain that decided the outcome; for a success this one.
    pub rank: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// Bytes moved on this rank.
    pub bytes: u64,
    /// From the request's call to its end on this rank, in ns.
    pub elapsed_ns: u64,
}
abi_struct!(elem kvf_request_result {
    key, user_data, kind, outcome, cause, memory_safe, rank, reserved, bytes, elapsed_ns,
});

impl From<&RequestResult> for kvf_request_result {
    fn from(result: &RequestResult) -> Self {
        Self {
            key: result.key.into(),
            user_data: result.user_data,
            kind: result.kind as u32,
            outcome: result.outcome as u32,
            cause: result.cause as i32,
            memory_safe: result.memory_safe.into(),
            rank: result.rank,
            reserved: 0,
            bytes: result.bytes,
            elapsed_ns: result.elapsed_ns,
        }
    }
}

/// What became of one request. Times are since its call, in ns; 0 = not yet.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvf_request_record {
    /// `sizeof(kvf_request_record)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_SIDE_*.
    pub side: u32,
    /// The request.
    pub key: kvf_key,
    /// KVF_OUTCOME_*, as far as known.
    pub outcome: u32,
    /// A kvf_status: why; KVF_IN_PROGRESS while pending.
    pub cause: i32,
    /// The rank of the domain that decided the outcome.
    pub rank: u32,
    /// Bytes that the publisher attached: see kvf_transceiver_aux().
    pub aux_bytes: u32,
    /// The request's call, in ns since the transceiver was made.
    pub queued_ns: u64,
    /// The end on this rank, attested.
    pub ended_ns: u64,
    /// Memory safe on this rank.
    pub safe_ns: u64,
    /// The outcome was decided.
    pub decided_ns: u64,
    /// Bytes moved on this rank.
    pub bytes: u64,
    /// Bytes to move on this rank.
    pub bytes_total: u64,
    /// Data path, empty if none was needed; NUL-terminated.
    pub transport: [c_char; 16],
    /// The first byte on this rank; context side: the first reader's contact.
    pub first_byte_ns: u64,
    /// The last byte on this rank, not attested yet; context side: the last reader's end.
    pub last_byte_ns: u64,
    /// `bytes` in the time between those two, in GB/s; 0 = nothing was moved, or context side.
    pub gb_per_s: f64,
}
abi_struct!(head kvf_request_record {
    struct_size, abi_version, side, key, outcome, cause, rank, aux_bytes, queued_ns, ended_ns,
    safe_ns, decided_ns, bytes, bytes_total, transport, first_byte_ns, last_byte_ns, gb_per_s,
});

/// Makes a transceiver for an engine's rank.
///
/// @param      agent        An agent with an engine.
/// @param      engine       Its engine.
/// @param[in]  config       Start from KVF_TRANSCEIVER_CONFIG_INIT. Not kept.
/// @param[out] transceiver  Receives the transceiver; end it with kvf_transceiver_destroy().
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT, KVF_ERR_OUT_OF_RANGE for ranks, groups or callbacks
///         that contradict each other or, with KVF_CONSENSUS_VOTES, the engine; KVF_ERR_DUPLICATE:
///         the agent has a voting transceiver of this domain.
///
/// # Safety
/// @p agent and @p engine must be live, @p config point to `config->struct_size` readable bytes,
/// `exchange` and `exchange_arg` be valid until the transceiver is destroyed and usable from the
/// threads that make status calls, @p transceiver be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_create(
    agent: *mut kvf_agent,
    engine: *const kvf_engine,
    config: *const kvf_transceiver_config,
    transceiver: *mut *mut kvf_transceiver,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let engine = unsafe { view(engine, "engine") }?.0.enter("engine")?;
        engine.must_belong_to(&agent, "engine")?;
        // SAFETY: the caller's contract.
        let config = unsafe { read(config, "config") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(transceiver, "transceiver") }?;
        let core = Transceiver::create(Owner(Arc::clone(&agent)), config.convert()?)?;
        out.set_handle(kvf_transceiver(Object::child(&agent, core)));
        Ok(())
    })
}

/// Ends a transceiver: cancels what is in flight and detaches. Slots that are still in use stay in
/// kvf_agent_quarantine(); call kvf_transceiver_shutdown() before to wait for them.
///
/// @param transceiver  The transceiver, or NULL.
/// @return KVF_OK.
///
/// # Safety
/// @p transceiver must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_destroy(transceiver: *mut kvf_transceiver) -> kvf_status {
    // SAFETY: the caller's contract.
    unsafe { destroy(transceiver, |handle| handle.0, |_, _| Ok(Status::KVF_OK)) }
}

/// Gives a descriptor that is readable exactly while a status call has a result to give.
///
/// As kvf_agent_event_fd(): only poll it; it ends with the transceiver. On a follower rank
/// (KVF_CONSENSUS_VOTES) decisions come by kvf_transceiver_apply() and not through it.
///
/// @param      transceiver  The transceiver.
/// @param[out] fd           Receives the descriptor.
/// @return KVF_OK.
///
/// # Safety
/// @p transceiver must be live, @p fd writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_event_fd(
    transceiver: *const kvf_transceiver,
    fd: *mut c_int,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(fd, "fd") }?;
        out.set(core.event_fd());
        Ok(())
    })
}

/// Ends the status calls that wait, or the next one that would: it returns KVF_INTERRUPTED with
/// what it has. Never blocks.
///
/// @param transceiver  The transceiver.
/// @return KVF_OK.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_interrupt(
    transceiver: *const kvf_transceiver,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe { enter(transceiver) }?.interrupt();
        Ok(())
    })
}

/// Takes no new requests and waits until nothing on this rank touches memory any more. Results can
/// be taken before, meanwhile (from other threads) and after. There is no way back.
///
/// @param transceiver  The transceiver.
/// @param timeout_ns   Longest wait, in ns; 0 = only look.
/// @return KVF_OK, KVF_TIMED_OUT.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_drain(
    transceiver: *mut kvf_transceiver,
    timeout_ns: u64,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        Ok(core.drain(Duration::from_nanos(timeout_ns)))
    })
}

/// Takes no new requests, cancels what is in flight, ends all waits, and waits until nothing on
/// this rank touches memory any more. Idempotent; results can still be taken.
///
/// @param transceiver  The transceiver.
/// @param timeout_ns   Longest wait, in ns; 0 = only look.
/// @return KVF_OK; KVF_ERR_BUSY when requests still hold memory: how many is in kvf_last_error().
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_shutdown(
    transceiver: *mut kvf_transceiver,
    timeout_ns: u64,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        core.shutdown(Duration::from_nanos(timeout_ns))
    })
}

/// Offers a prefilled request's slots to whoever shows the ticket. Never blocks.
///
/// In pull mode "send" publishes: the generation side reads. How it went is told by
/// kvf_transceiver_check_context_transfer_status().
///
/// @param      transceiver  The transceiver.
/// @param[in]  request      Start from KVF_PUBLISH_DESC_INIT. Nothing of it is kept. `user_data`
///                          comes back in the request's results.
/// @param[out] buf          Receives the ticket; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes. 0: fetch the ticket by
///                          kvf_transceiver_ticket().
/// @param[out] needed       Receives the ticket's size; may be NULL.
/// @return KVF_OK; KVF_ERR_DUPLICATE while the key is in use here; KVF_ERR_STATE when the domain
///         ended the request before it came; KVF_ERR_GROUP_LOST, KVF_ERR_SHUTDOWN; otherwise as
///         kvf_publish(). Nothing was offered then. KVF_ERR_OUT_OF_RANGE when @p buf is too small:
///         then the request is in flight, and kvf_transceiver_ticket() gives the ticket.
///
/// # Safety
/// @p transceiver must be live, @p request point to `request->struct_size` readable bytes and its
/// arrays to as many elements as it says, @p buf to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_respond_and_send_async(
    transceiver: *mut kvf_transceiver,
    request: *const kvf_publish_desc,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        if cap != 0 && buf.is_null() {
            bail!(KVF_ERR_INVALID_ARGUMENT, "buf is NULL with a size of {cap}");
        }
        // SAFETY: the caller's contract.
        let request = unsafe { read(request, "request")?.convert() }?;
        let ticket = core.respond_and_send_async(request)?;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &ticket, "buf") }
    })
}

/// Gives the ticket of a context request that is in flight.
///
/// @param      transceiver  The transceiver.
/// @param      key          The request.
/// @param[out] buf          Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_ticket(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let key = key.read("key")?;
        let Some(ticket) = core.ticket(key) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "{key} is no context request in flight here"
            );
        };
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &ticket, "buf") }
    })
}

/// Would send layer by layer while prefill computes.
///
/// @param transceiver  The transceiver.
/// @param request      Ignored for now.
/// @return KVF_ERR_UNSUPPORTED: call kvf_transceiver_respond_and_send_async() after prefill.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_respond_and_send_layer_wise(
    transceiver: *mut kvf_transceiver,
    request: *const kvf_publish_desc,
) -> kvf_status {
    let _ = request;
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe { enter(transceiver) }?.respond_and_send_layer_wise()
    })
}

/// Would ready context requests for which the generation side asked first.
///
/// @param transceiver  The transceiver.
/// @param keys         Ignored for now.
/// @param num_keys     Ignored for now.
/// @return KVF_ERR_UNSUPPORTED: schedule the context side first.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_prepare_context_requests(
    transceiver: *mut kvf_transceiver,
    keys: *const kvf_key,
    num_keys: usize,
) -> kvf_status {
    let _ = (keys, num_keys);
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe { enter(transceiver) }?.prepare_context_requests()
    })
}

/// Fetches what a ticket offers into a request's slots. Never blocks; how it went is told by
/// kvf_transceiver_check_gen_transfer_status(). Push: offers the slots; kvf_transceiver_offer()
/// gives the bytes that travel to the context side.
///
/// @param     transceiver  The transceiver.
/// @param[in] request      Start from KVF_RECEIVE_REQUEST_INIT. Nothing of it is kept.
/// @return KVF_OK; KVF_ERR_DUPLICATE while the key is in use here; KVF_ERR_INVALID_ARGUMENT for a
///         ticket of another key; KVF_ERR_STATE when the domain ended the request before it came;
///         KVF_ERR_GROUP_LOST, KVF_ERR_SHUTDOWN; otherwise as kvf_import_begin(). Nothing has
///         changed then.
///
/// # Safety
/// @p transceiver and `request->peer` must be live, @p request point to `request->struct_size`
/// readable bytes and its pointers to what they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_request_and_receive_async(
    transceiver: *mut kvf_transceiver,
    request: *const kvf_receive_request,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        // SAFETY: the caller's contract.
        let (peer, request) = unsafe { read(request, "request")?.convert(&core) }?;
        core.request_and_receive_async(&peer, request)
    })
}

/// The same, and blocks the calling thread until the request has ended. kvf_transceiver_interrupt()
/// does not end this wait; the request's deadline, a cancel from another thread and
/// kvf_transceiver_shutdown() do.
///
/// @param      transceiver  The transceiver.
/// @param[in]  request      Start from KVF_RECEIVE_REQUEST_INIT. Nothing of it is kept.
/// @param[out] result       Receives how it ended; may be NULL. With `memory_safe` 0 a later
///                          status call reports the safety.
/// @param      elem_size    `sizeof(kvf_request_result)`.
/// @return KVF_OK: all bytes are here; the request's cause when it ended otherwise (@p result is
///         written); otherwise as kvf_transceiver_request_and_receive_async(), and
///         KVF_ERR_UNSUPPORTED where ranks agree.
///
/// # Safety
/// As kvf_transceiver_request_and_receive_async(); @p result must be NULL or point to @p elem_size
/// writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_request_and_receive_sync(
    transceiver: *mut kvf_transceiver,
    request: *const kvf_receive_request,
    result: *mut kvf_request_result,
    elem_size: usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let wanted = usize::from(!result.is_null());
        // SAFETY: the caller's contract.
        let out = unsafe { OutArray::new(result, wanted, elem_size, "result") }?;
        // SAFETY: the caller's contract.
        let (peer, request) = unsafe { read(request, "request")?.convert(&core) }?;
        let ended = core.request_and_receive_sync(&peer, request)?;
        out.fill(&[(&ended).into()]);
        if ended.cause == Status::KVF_OK {
            return Ok(());
        }
        let text = core.record(ended.key).map(|record| record.text);
        let text = text.filter(|text| !text.is_empty());
        let text = text.unwrap_or_else(|| format!("{} ended as {:?}", ended.key, ended.outcome));
        Err(Error::new(ended.cause, text))
    })
}

/// Cancels a request on either side. Never blocks, idempotent. The request stays visible until its
/// memory is quiet and is reported once, as whatever came first; where ranks agree, the cancel is
/// a proposal. For a key that is not known yet the cancel waits for it, `cancel_memory_ns` long.
///
/// @param transceiver  The transceiver.
/// @param key          The request.
/// @return KVF_OK: no memory of that key is in use; KVF_IN_PROGRESS: it may be, and a result will
///         say how the request ended and when its memory is safe.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_cancel(
    transceiver: *mut kvf_transceiver,
    key: kvf_key,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        Ok(match core.cancel(key.read("key")?) {
            Cancel::Pending => Status::KVF_IN_PROGRESS,
            Cancel::Over | Cancel::Remembered => Status::KVF_OK,
        })
    })
}

/// Tells whether a request's memory may still be in use, on any rank where ranks agree.
///
/// @param transceiver  The transceiver.
/// @param key          The request.
/// @return KVF_IN_PROGRESS: it may be; KVF_OK: it is not, or the key is unknown.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_has_inflight(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        Ok(in_progress(core.has_inflight(key.read("key")?)))
    })
}

/// Tells whether all receives have ended, are safe and were reported.
///
/// @param transceiver  The transceiver.
/// @return KVF_OK: they have; KVF_IN_PROGRESS.
///
/// # Safety
/// @p transceiver must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_check_gen_transfer_complete(
    transceiver: *const kvf_transceiver,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        Ok(in_progress(!core.check_gen_transfer_complete()))
    })
}

/// Tells what became of a request, while it is in flight and for the last `records` ended ones.
///
/// @param         transceiver  The transceiver.
/// @param         key          The request; the generation side's if both have it.
/// @param[in,out] record       Start from KVF_REQUEST_RECORD_INIT; written up to
///                             `record->struct_size`.
/// @return KVF_OK; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p record point to `record->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_record(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    record: *mut kvf_request_record,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        // SAFETY: the caller's contract.
        let size = unsafe { check_head(record, "record") }?;
        let found = find(&core, key)?;
        let value = kvf_request_record {
            struct_size: size,
            abi_version: 0,
            side: found.side as u32,
            key: found.key.into(),
            outcome: found.outcome as u32,
            cause: found.cause as i32,
            rank: found.rank,
            aux_bytes: u32::try_from(found.aux.len()).unwrap_or(u32::MAX),
            queued_ns: found.queued_ns,
            ended_ns: found.ended_ns,
            safe_ns: found.safe_ns,
            decided_ns: found.decided_ns,
            bytes: found.bytes,
            bytes_total: found.bytes_total,
            transport: name_field(found.transport),
            first_byte_ns: found.first_byte_ns,
            last_byte_ns: found.last_byte_ns,
            gb_per_s: found.gb_per_s(),
        };
        // SAFETY: `size` writable bytes by the caller's contract.
        unsafe { write_result(record, size, &value) };
        Ok(())
    })
}

/// Gives the bytes that the publisher attached to a request (first tokens, draft tokens).
///
/// @param      transceiver  The transceiver.
/// @param      key          The request.
/// @param[out] buf          Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_aux(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let aux = find(&core, key)?.aux;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &aux, "buf") }
    })
}

/// Gives what went wrong with a request, for people; empty if nothing did.
///
/// @param      transceiver  The transceiver.
/// @param      key          The request.
/// @param[out] buf          Receives the text, cut to @p cap bytes with its NUL; may be NULL when
///                          @p cap is 0.
/// @param      cap          Size of @p buf in bytes.
/// @param[out] needed       Receives the whole size with the NUL; may be NULL.
/// @return KVF_OK; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_error_text(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let text = find(&core, key)?.text;
        // SAFETY: the caller's contract.
        unsafe { give_text(buf, cap, needed, &text) }
    })
}

/// # Safety
/// `transceiver` must be NULL or live for `'a`.
pub(super) unsafe fn enter<'a>(transceiver: *const kvf_transceiver) -> Result<Use<'a, Core>> {
    // SAFETY: the caller's contract.
    unsafe { view(transceiver, "transceiver") }?
        .0
        .enter("transceiver")
}

fn in_progress(is: bool) -> Status {
    if is {
        Status::KVF_IN_PROGRESS
    } else {
        Status::KVF_OK
    }
}

fn find(core: &Core, key: kvf_key) -> Result<Record> {
    let key = key.read("key")?;
    match core.record(key) {
        Some(record) => Ok(record),
        None => bail!(
            KVF_ERR_NOT_FOUND,
            "{key} is not in flight here and not among the last ended requests"
        ),
    }
}

impl kvf_receive_request {
    /// # Safety
    /// As `kvf_transceiver_request_and_receive_async`.
    unsafe fn convert<'a>(&self, core: &Use<'_, Core>) -> Result<(Use<'a, Peer>, ReceiveRequest)> {
        must_be_zero(self.reserved, "request.reserved")?;
        must_be_zero(self.reserved2, "request.reserved2")?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(self.peer, "request.peer") }?
            .0
            .enter("peer")?;
        peer.must_belong_to(core.agent()?, "request.peer")?;
        // SAFETY: the caller's contract.
        let import = unsafe {
            ImportDesc {
                ticket: read_plain(
                    self.ticket.cast::<u8>(),
                    self.ticket_bytes,
                    "request.ticket",
                )?,
                groups: read_import_groups(self.groups, self.num_groups, self.groups_elem_size)?,
                states: read_import_states(self.states, self.num_states, self.states_elem_size)?,
                owned_only: read_owned_only(
                    self.owned_only,
                    self.num_owned_only,
                    self.owned_only_elem_size,
                )?,
                deadline: Duration::from_nanos(self.deadline_ns),
                priority: self.priority,
                prefix_tag: self.prefix_tag,
                stream: CallerStream::new(self.stream),
                user_data: self.user_data,
            }
        };
        let key = self.key.read("request.key")?;
        Ok((peer, ReceiveRequest { key, import }))
    }
}
