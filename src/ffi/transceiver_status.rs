//! Status calls and decisions of transceivers, and their results.

use std::ffi::c_void;
use std::time::Duration;

use super::boundary::guard;
use super::event::kvf_key;
use super::structs::{Out, OutArray, abi_struct, put_bytes, read_plain};
use super::transceiver::{Core, KVF_TIMEOUT_CONFIGURED, KVF_WAIT_ALL, enter, kvf_transceiver};
use crate::bail;
use crate::error::{Result, Status, kvf_status};
use crate::transceiver::{Checked, RequestResult};

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

fn in_progress(is: bool) -> Status {
    if is {
        Status::KVF_IN_PROGRESS
    } else {
        Status::KVF_OK
    }
}
