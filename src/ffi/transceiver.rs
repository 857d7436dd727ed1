//! Transceivers: request-level bookkeeping over the agent level.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::engine::kvf_engine;
use super::handle::{Object, Shared, Use, destroy};
use super::structs::{Out, read, view};
use super::transceiver_config::kvf_transceiver_config;
use crate::agent::Agent;
use crate::error::{Result, Status, kvf_status};
use crate::transceiver::{AgentPort, Group, ResultKind, Side, Transceiver};

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

/// # Safety
/// `transceiver` must be NULL or live for `'a`.
pub(super) unsafe fn enter<'a>(transceiver: *const kvf_transceiver) -> Result<Use<'a, Core>> {
    // SAFETY: the caller's contract.
    unsafe { view(transceiver, "transceiver") }?
        .0
        .enter("transceiver")
}
