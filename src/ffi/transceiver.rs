//! Transceivers: request-level bookkeeping over the agent level.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::{give_text, must_be_zero, name_field, nanos_or, no_stream, read_blob};
use super::engine::kvf_engine;
use super::event::kvf_key;
use super::handle::{Object, Shared, Use, destroy};
use super::import::{
    KVF_DIRECTION_PULL, KVF_DIRECTION_PUSH, kvf_import_group, kvf_import_state, kvf_slot_ref,
    read_import_groups, read_import_states, read_owned_only,
};
use super::peer::kvf_peer;
use super::publication::kvf_publish_desc;
use super::structs::{
    Out, OutArray, abi_struct, check_head, put_bytes, read, read_plain, view, write_result,
};
use crate::agent::{Agent, ImportDesc, Peer};
use crate::bail;
use crate::error::{Error, Result, Status, kvf_status};
use crate::observe::marks::InCallback;
use crate::transceiver::{
    AgentPort, Cancel, Checked, Config, Consensus, Direction, Group, ReceiveRequest, Record,
    RequestResult, ResultKind, Side, Transceiver, framed,
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
struct Owner(Arc<Shared>);

impl AsRef<Agent> for Owner {
    fn as_ref(&self) -> &Agent {
        &self.0.core
    }
}

/// cbindgen:ignore
type Core = Transceiver<AgentPort<Owner>>;

/// A rank's request-level bookkeeping. Any thread may use it, several at once.
pub struct kvf_transceiver(Object<Core>);

/// All-gather inside a group of a domain's ranks, as MPI_Allgather on bytes.
///
/// Called only on the thread that is inside a status call, with the same @p bytes on all members
/// of the group; once per group and call, rarely twice. It may block; how long is the caller's
/// choice. It must not throw (declare it `noexcept` in C++) and must not call kvferry
/// (KVF_ERR_REENTRANT).
///
/// @param      arg    `exchange_arg` of the configuration.
/// @param      group  KVF_EXCHANGE_TENSOR or KVF_EXCHANGE_PIPELINE.
/// @param[in]  mine   This rank's contribution, @p bytes long.
/// @param[out] all    Receives members * @p bytes: the contributions in the same order on every
///                    member, this rank's included.
/// @param      bytes  Length of one contribution.
/// @return 0 when @p all is filled; anything else fails the status call, which has then committed
///         nothing.
pub type kvf_group_exchange_fn = Option<
    unsafe extern "C" fn(
        arg: *mut c_void,
        group: u32,
        mine: *const c_void,
        all: *mut c_void,
        bytes: usize,
    ) -> i32,
>;

/// Parameters of a transceiver.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_transceiver_config {
    /// `sizeof(kvf_transceiver_config)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_DIRECTION_*; KVF_DIRECTION_PUSH is KVF_ERR_UNSUPPORTED for now.
    pub direction: u32,
    /// Longest wait of a context status call with KVF_TIMEOUT_CONFIGURED, in ns; 0 = 1 s.
    pub context_poll_ns: u64,
    /// The same for a generation status call; 0 = 5 s.
    pub generation_poll_ns: u64,
    /// For a receive, from its call to its end, where its request names no deadline, in ns; 0 =
    /// 60 s.
    pub transfer_ns: u64,
    /// How long a cancel for a key that is not known yet waits for it, in ns; 0 = 60 s.
    pub cancel_memory_ns: u64,
    /// KVF_CONSENSUS_*.
    pub consensus: u32,
    /// Ranks in the scheduling domain (tp x pp x cp inside one dp index); 0 = 1.
    pub world: u32,
    /// This rank inside the domain; rank 0 leads.
    pub rank: u32,
    /// KVF_CONSENSUS_COLLECTIVE: members of this rank's tensor group; 0 = 1.
    pub tensor_ranks: u32,
    /// Names the domain; equal on all its ranks.
    pub domain: u64,
    /// KVF_CONSENSUS_VOTES: a context request is decided at the latest this long after the first
    /// rank knows it, in ns; 0 = 390 s (claim, lease and transfer).
    pub context_limit_ns: u64,
    /// The same for a generation request; 0 = 65 s.
    pub generation_limit_ns: u64,
    /// KVF_CONSENSUS_COLLECTIVE: members of this rank's pipeline group; 0 = 1.
    pub pipeline_ranks: u32,
    /// KVF_CONSENSUS_COLLECTIVE: 1 = all ranks have agreed to pass equal `at_least` and
    /// `timeout_ns`, so that a status call may wait for this rank's own requests before it
    /// exchanges; 0 = it exchanges at once.
    pub wait_before_exchange: u32,
    /// KVF_CONSENSUS_COLLECTIVE: the exchange; otherwise NULL.
    pub exchange: kvf_group_exchange_fn,
    /// First argument of `exchange`.
    pub exchange_arg: *mut c_void,
    /// Ended requests whose record is kept; 0 = 1024.
    pub records: u32,
    /// Must be 0.
    pub reserved: u32,
}
abi_struct!(head kvf_transceiver_config {
    struct_size, abi_version, direction, context_poll_ns, generation_poll_ns, transfer_ns,
    cancel_memory_ns, consensus, world, rank, tensor_ranks, domain, context_limit_ns,
    generation_limit_ns, pipeline_ranks, wait_before_exchange, exchange, exchange_arg, records,
    reserved,
});

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
    /// The engine that the ticket comes from.
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
    /// they are done; anything else is KVF_ERR_UNSUPPORTED for now.
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
}
abi_struct!(head kvf_request_record {
    struct_size, abi_version, side, key, outcome, cause, rank, aux_bytes, queued_ns, ended_ns,
    safe_ns, decided_ns, bytes, bytes_total, transport,
});

/// Makes a transceiver for an engine's rank.
///
/// @param      agent        An agent with an engine.
/// @param      engine       Its engine.
/// @param[in]  config       Start from KVF_TRANSCEIVER_CONFIG_INIT. Not kept.
/// @param[out] transceiver  Receives the transceiver; end it with kvf_transceiver_destroy().
/// @return KVF_OK; KVF_ERR_UNSUPPORTED for KVF_DIRECTION_PUSH and for votes of several ranks that
///         the agent cannot carry; KVF_ERR_INVALID_ARGUMENT, KVF_ERR_OUT_OF_RANGE for ranks,
///         groups or callbacks that contradict each other.
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
/// kvf_transceiver_check_gen_transfer_status().
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

/// Reports context requests that have ended, and memory that became safe.
///
/// Waits until @p at_least requests have ended (failed and cancelled ones count), clamped to what
/// is in flight, at most @p timeout_ns in all. With nothing in flight it returns at once, whatever
/// is asked for, in some nanoseconds. It is woken by what it waits for and by
/// kvf_transceiver_interrupt(); new requests never wait behind it.
///
/// On a follower (KVF_CONSENSUS_VOTES) it never waits: decisions come by kvf_transceiver_apply().
/// With KVF_CONSENSUS_COLLECTIVE it exchanges with the other ranks, which must all call it in the
/// same iteration, and waits before that only if `wait_before_exchange` is set.
///
/// @param      transceiver     The transceiver.
/// @param      at_least        0 = only take what has ended; KVF_WAIT_ALL = all in flight.
/// @param      timeout_ns      Longest wait, in ns, or KVF_TIMEOUT_CONFIGURED.
/// @param[out] results         Receives up to @p cap results; NULL when @p cap is 0.
/// @param      elem_size       `sizeof(kvf_request_result)`.
/// @param      cap             Elements in @p results.
/// @param[out] n               Receives how many were written.
/// @param[out] more            Receives 1 if results are waiting for the next call; may be NULL.
/// @param[out] decision        Leader (KVF_CONSENSUS_VOTES, rank 0): receives the bytes that give
///                             every follower the same results; otherwise NULL.
/// @param      decision_cap    Its size: KVF_DECISION_HEAD_BYTES and KVF_DECISION_RESULT_BYTES for
///                             each of @p cap; with less there are fewer results per call.
/// @param[out] decision_bytes  Receives how many bytes there are; 0 = nothing to broadcast. NULL
///                             where @p decision is.
/// @return KVF_OK: as many as asked for, or all that were in flight; KVF_TIMED_OUT or
///         KVF_INTERRUPTED: fewer, the rest goes on; KVF_ERR_OUT_OF_RANGE: @p decision cannot hold
///         one result; KVF_ERR_GROUP_LOST, KVF_ERR_BUSY: the exchange failed, or another thread is
///         in it; nothing was committed.
///
/// # Safety
/// @p transceiver must be live, @p results point to @p cap elements of @p elem_size bytes, @p n be
/// writable, @p more and @p decision_bytes be NULL or writable, @p decision point to @p
/// decision_cap writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_check_context_transfer_status(
    transceiver: *mut kvf_transceiver,
    at_least: u32,
    timeout_ns: u64,
    results: *mut kvf_request_result,
    elem_size: usize,
    cap: usize,
    n: *mut usize,
    more: *mut u32,
    decision: *mut c_void,
    decision_cap: usize,
    decision_bytes: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            check(
                transceiver,
                Core::check_context_transfer_status,
                (at_least, timeout_ns),
                Answer::new(results, elem_size, cap, n, more)?,
                Decision::new(decision, decision_cap, decision_bytes)?,
            )
        }
    })
}

/// Reports generation requests: as kvf_transceiver_check_context_transfer_status().
///
/// @param      transceiver     The transceiver.
/// @param      at_least        0 = only take what has ended; KVF_WAIT_ALL = all in flight.
/// @param      timeout_ns      Longest wait, in ns, or KVF_TIMEOUT_CONFIGURED.
/// @param[out] results         Receives up to @p cap results; NULL when @p cap is 0.
/// @param      elem_size       `sizeof(kvf_request_result)`.
/// @param      cap             Elements in @p results.
/// @param[out] n               Receives how many were written.
/// @param[out] more            Receives 1 if results are waiting for the next call; may be NULL.
/// @param[out] decision        Leader: receives the bytes for the followers; otherwise NULL.
/// @param      decision_cap    Its size.
/// @param[out] decision_bytes  Receives how many bytes there are.
/// @return As kvf_transceiver_check_context_transfer_status().
///
/// # Safety
/// As kvf_transceiver_check_context_transfer_status().
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_check_gen_transfer_status(
    transceiver: *mut kvf_transceiver,
    at_least: u32,
    timeout_ns: u64,
    results: *mut kvf_request_result,
    elem_size: usize,
    cap: usize,
    n: *mut usize,
    more: *mut u32,
    decision: *mut c_void,
    decision_cap: usize,
    decision_bytes: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            check(
                transceiver,
                Core::check_gen_transfer_status,
                (at_least, timeout_ns),
                Answer::new(results, elem_size, cap, n, more)?,
                Decision::new(decision, decision_cap, decision_bytes)?,
            )
        }
    })
}

/// Follower: takes a decision in and gives the results that the leader's status call gave. Never
/// blocks. Bytes that were applied already, and the leader's own, give nothing.
///
/// @param      transceiver   The transceiver.
/// @param[in]  decision      The bytes that the leader's status call gave; NULL with 0 bytes
///                           fetches what did not fit into an earlier call's @p cap.
/// @param      bytes         Their number.
/// @param[out] results       Receives up to @p cap results; NULL when @p cap is 0.
/// @param      elem_size     `sizeof(kvf_request_result)`.
/// @param      cap           Elements in @p results.
/// @param[out] n             Receives how many were written.
/// @param[out] more          Receives 1 if results are left for the next call; may be NULL.
/// @return KVF_OK; KVF_ERR_GROUP_LOST: decisions before this one never came here, nothing was
///         applied, the engine must stop this iteration; KVF_ERR_STATE: no votes here;
///         KVF_ERR_INVALID_ARGUMENT, KVF_ERR_ABI_MISMATCH: no decision of this domain.
///
/// # Safety
/// @p transceiver must be live, @p decision point to @p bytes readable bytes, @p results to @p cap
/// elements of @p elem_size bytes, @p n be writable, @p more be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_apply(
    transceiver: *mut kvf_transceiver,
    decision: *const c_void,
    bytes: usize,
    results: *mut kvf_request_result,
    elem_size: usize,
    cap: usize,
    n: *mut usize,
    more: *mut u32,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        // SAFETY: the caller's contract.
        let answer = unsafe { Answer::new(results, elem_size, cap, n, more) }?;
        // SAFETY: the caller's contract.
        let decision = unsafe { read_plain(decision.cast::<u8>(), bytes, "decision") }?;
        let mut out = Vec::new();
        let checked = core.apply(&decision, answer.capacity(), &mut out)?;
        answer.set(&out, &checked);
        Ok(checked.status)
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
unsafe fn enter<'a>(transceiver: *const kvf_transceiver) -> Result<Use<'a, Core>> {
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

/// Where a status call's results go.
struct Answer {
    results: OutArray<kvf_request_result>,
    n: Out<usize>,
    more: Option<Out<u32>>,
}

impl Answer {
    /// # Safety
    /// As `kvf_transceiver_check_context_transfer_status`.
    unsafe fn new(
        results: *mut kvf_request_result,
        elem_size: usize,
        cap: usize,
        n: *mut usize,
        more: *mut u32,
    ) -> Result<Self> {
        // SAFETY: the caller's contract.
        unsafe {
            Ok(Self {
                results: OutArray::new(results, cap, elem_size, "results")?,
                n: Out::new(n, "n")?,
                more: (!more.is_null())
                    .then(|| Out::new(more, "more"))
                    .transpose()?,
            })
        }
    }

    fn capacity(&self) -> usize {
        self.results.capacity()
    }

    fn set(self, results: &[RequestResult], checked: &Checked) {
        let results: Vec<kvf_request_result> = results.iter().map(Into::into).collect();
        self.n.set(self.results.fill(&results));
        if let Some(more) = self.more {
            more.set(checked.more.into());
        }
    }
}

/// Where a leader's decision goes.
struct Decision {
    buf: *mut c_void,
    cap: usize,
    bytes: Option<Out<usize>>,
}

impl Decision {
    /// # Safety
    /// As `kvf_transceiver_check_context_transfer_status`.
    unsafe fn new(buf: *mut c_void, cap: usize, bytes: *mut usize) -> Result<Self> {
        if cap != 0 && (buf.is_null() || bytes.is_null()) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "decision or decision_bytes is NULL with a size of {cap}"
            );
        }
        // SAFETY: the caller's contract.
        let bytes = (!bytes.is_null()).then(|| unsafe { Out::new(bytes, "decision_bytes") });
        Ok(Self {
            buf,
            cap,
            bytes: bytes.transpose()?,
        })
    }
}

type StatusCall =
    fn(&Core, Option<u32>, Option<Duration>, usize, &mut Vec<RequestResult>) -> Result<Checked>;

/// # Safety
/// As `kvf_transceiver_check_context_transfer_status`.
unsafe fn check(
    transceiver: *const kvf_transceiver,
    call: StatusCall,
    (at_least, timeout_ns): (u32, u64),
    answer: Answer,
    decision: Decision,
) -> Result<Status> {
    // SAFETY: the caller's contract.
    let core = unsafe { enter(transceiver) }?;
    let at_least = (at_least != KVF_WAIT_ALL).then_some(at_least);
    let timeout = (timeout_ns != KVF_TIMEOUT_CONFIGURED).then(|| Duration::from_nanos(timeout_ns));
    let most = answer.capacity().min(core.results_within(decision.cap)?);
    let mut out = Vec::new();
    let checked = call(&core, at_least, timeout, most, &mut out)?;
    if let Some(bytes) = decision.bytes {
        // SAFETY: the caller's contract; results_within() has bounded the bytes.
        unsafe {
            put_bytes(
                decision.buf.cast(),
                decision.cap,
                std::ptr::null_mut(),
                &checked.decision,
                "decision",
            )?;
        }
        bytes.set(checked.decision.len());
    }
    answer.set(&out, &checked);
    Ok(checked.status)
}

/// The caller's exchange with its argument.
#[derive(Clone, Copy)]
struct Exchange(
    unsafe extern "C" fn(*mut c_void, u32, *const c_void, *mut c_void, usize) -> i32,
    *mut c_void,
);

// SAFETY: the caller promises that both are usable from the threads that make status calls; only
// the caller's function looks at the argument.
unsafe impl Send for Exchange {}
// SAFETY: as above; one exchange per side runs at a time.
unsafe impl Sync for Exchange {}

impl Exchange {
    fn run(&self, group: Group, mine: &[u8], all: &mut [u8]) -> Result<()> {
        let _mark = InCallback::enter();
        let (from, to) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: the caller's function with the caller's argument; `all` has members * bytes
        // bytes.
        match unsafe { (self.0)(self.1, group as u32, from, to, mine.len()) } {
            0 => Ok(()),
            code => bail!(
                KVF_ERR_GROUP_LOST,
                "config.exchange returned {code} for {} bytes of the {group:?} group",
                mine.len()
            ),
        }
    }
}

impl kvf_transceiver_config {
    fn convert(&self) -> Result<Config> {
        must_be_zero(self.reserved, "config.reserved")?;
        let defaults = Config::default();
        let tensor_ranks = self.tensor_ranks.max(1);
        let pipeline_ranks = self.pipeline_ranks.max(1);
        let exchange = self.exchange.map(|f| Exchange(f, self.exchange_arg));
        Ok(Config {
            direction: match self.direction {
                KVF_DIRECTION_PULL => Direction::Pull,
                KVF_DIRECTION_PUSH => Direction::Push,
                unknown => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "config.direction {unknown} is unknown"
                ),
            },
            context_poll: nanos_or(self.context_poll_ns, defaults.context_poll),
            generation_poll: nanos_or(self.generation_poll_ns, defaults.generation_poll),
            transfer: nanos_or(self.transfer_ns, defaults.transfer),
            cancel_memory: nanos_or(self.cancel_memory_ns, defaults.cancel_memory),
            consensus: match self.consensus {
                KVF_CONSENSUS_NONE => Consensus::None,
                KVF_CONSENSUS_VOTES => Consensus::Votes,
                KVF_CONSENSUS_COLLECTIVE => Consensus::Collective,
                unknown => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "config.consensus {unknown} is unknown"
                ),
            },
            domain: self.domain,
            world: self.world.max(1),
            rank: self.rank,
            context_limit: nanos_or(self.context_limit_ns, defaults.context_limit),
            generation_limit: nanos_or(self.generation_limit_ns, defaults.generation_limit),
            tensor_ranks,
            pipeline_ranks,
            gather: exchange.map(|exchange| {
                framed([tensor_ranks, pipeline_ranks], move |group, mine, all| {
                    exchange.run(group, mine, all)
                })
            }),
            wait_before_gather: match self.wait_before_exchange {
                0 => false,
                1 => true,
                unknown => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "config.wait_before_exchange is {unknown}, not 0 or 1"
                ),
            },
            records: match self.records {
                0 => defaults.records,
                records => records as usize,
            },
        })
    }
}

impl kvf_receive_request {
    /// # Safety
    /// As `kvf_transceiver_request_and_receive_async`.
    unsafe fn convert<'a>(&self, core: &Use<'_, Core>) -> Result<(Use<'a, Peer>, ReceiveRequest)> {
        must_be_zero(self.reserved, "request.reserved")?;
        must_be_zero(self.reserved2, "request.reserved2")?;
        no_stream(self.stream, "request.stream")?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(self.peer, "request.peer") }?
            .0
            .enter("peer")?;
        peer.must_belong_to(core.agent()?, "request.peer")?;
        // SAFETY: the caller's contract.
        let import = unsafe {
            ImportDesc {
                ticket: read_blob(self.ticket, self.ticket_bytes, "request.ticket")?,
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
                user_data: self.user_data,
            }
        };
        let key = self.key.read("request.key")?;
        Ok((peer, ReceiveRequest { key, import }))
    }
}
