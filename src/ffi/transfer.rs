//! Transfers: one submitted operation, polled, waited for, cancelled, destroyed once.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::boundary::guard;
use super::checks::{give_text, name_field, say};
use super::event::kvf_key;
use super::handle::{Object, destroy};
use super::layout::{KVF_GROUP_PAGED, KVF_GROUP_STATE};
use super::structs::{OutArray, abi_struct, check_head, put_bytes, view, write_result};
use crate::agent::{CallerStream, PartInfo, PartKind, PartState, Transfer};
use crate::bail;
use crate::error::{Status, kvf_status};

/// Nothing to move: nothing was submitted.
pub const KVF_PART_NOT_NEEDED: u32 = 0;
/// Waiting or copying.
pub const KVF_PART_IN_PROGRESS: u32 = 1;
/// All its bytes are here; whether they count is the transfer's outcome.
pub const KVF_PART_DONE: u32 = 2;
/// It did not complete.
pub const KVF_PART_FAILED: u32 = 3;

const _: () = {
    assert!(KVF_PART_NOT_NEEDED == PartState::NotNeeded as u32);
    assert!(KVF_PART_IN_PROGRESS == PartState::InProgress as u32);
    assert!(KVF_PART_DONE == PartState::Done as u32);
    assert!(KVF_PART_FAILED == PartState::Failed as u32);
    assert!(KVF_GROUP_PAGED == PartKind::Paged as u32);
    assert!(KVF_GROUP_STATE == PartKind::State as u32);
};

/// A running or ended pull, import, receive or push. Any thread may use it, several at once.
pub struct kvf_transfer(pub(crate) Object<Transfer>);

/// What kvf_transfer_query() tells. Outcome and safety are separate: a transfer that has failed
/// may still be written to, and then its slots must not be reused.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvf_transfer_info {
    /// `sizeof(kvf_transfer_info)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_OUTCOME_*.
    pub outcome: u32,
    /// A kvf_status: why it ended; KVF_OK for a success, KVF_IN_PROGRESS while pending.
    pub cause: i32,
    /// 1: no byte of its slots will be written any more on its behalf.
    pub memory_safe: u32,
    /// Parts that were submitted to a data path; 0 for a transfer with nothing to move.
    pub submitted: u32,
    /// Parts that it has: groups and states of its descriptor.
    pub num_parts: u32,
    /// Object of the transfer's events.
    pub id: u64,
    /// The request.
    pub key: kvf_key,
    /// Bytes moved so far.
    pub bytes: u64,
    /// Bytes to move.
    pub bytes_total: u64,
    /// Nanoseconds from its begin to the outcome; 0 while pending.
    pub elapsed_ns: u64,
    /// Data path ("inproc", "shm", ...), NUL-terminated; "" = none was needed, or none yet.
    pub transport: [c_char; 16],
}
abi_struct!(head kvf_transfer_info {
    struct_size, abi_version, outcome, cause, memory_safe, submitted, num_parts, id, key, bytes,
    bytes_total, elapsed_ns, transport,
});

/// One part of a transfer.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvf_part_info {
    /// Index of the group in the layout.
    pub group: u32,
    /// KVF_GROUP_PAGED or KVF_GROUP_STATE.
    pub kind: u32,
    /// KVF_PART_*.
    pub state: u32,
    /// A kvf_status: why it failed; KVF_OK otherwise.
    pub cause: i32,
    /// Bytes that it has to move.
    pub bytes: u64,
}
abi_struct!(elem kvf_part_info { group, kind, state, cause, bytes });

impl From<&PartInfo> for kvf_part_info {
    fn from(part: &PartInfo) -> Self {
        Self {
            group: part.group,
            kind: part.kind as u32,
            state: part.state as u32,
            cause: part.cause as i32,
            bytes: part.bytes,
        }
    }
}

/// Looks at a transfer without lock or system call; for scheduler loops.
///
/// @param transfer  The transfer.
/// @return KVF_IN_PROGRESS; KVF_OK: done and attested; otherwise the error it ended with. An error
///         does not say that its memory is safe: see kvf_transfer_query().
///
/// # Safety
/// @p transfer must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_poll(transfer: *const kvf_transfer) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        say(transfer.poll(), || transfer.error_text())
    })
}

/// Waits for a transfer's outcome.
///
/// Blocks the calling thread only; several threads may wait. A time-out changes nothing: the
/// transfer goes on to its own deadline. With 1 ms or more, the thread may copy meanwhile, in the
/// place of one of the threads that the import would have; this is the fastest way to a small
/// transfer's end. It does not where the agent has an `affinity`.
///
/// @param transfer    The transfer.
/// @param timeout_ns  Longest wait, in ns, exceeded by at most a piece of 256 KiB; 0 = only look.
/// @return As kvf_transfer_poll(), KVF_TIMED_OUT in place of KVF_IN_PROGRESS.
///
/// # Safety
/// @p transfer must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_wait(
    transfer: *const kvf_transfer,
    timeout_ns: u64,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        let status = transfer.wait(Duration::from_nanos(timeout_ns));
        say(status, || transfer.error_text())
    })
}

/// Asks for a transfer's end; idempotent. Never blocks: the outcome tells whether the cancel or
/// the last byte came first, and comes after at most one piece of 4 MiB.
///
/// @param transfer  The transfer.
/// @return KVF_OK.
///
/// # Safety
/// @p transfer must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_cancel(transfer: *mut kvf_transfer) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        transfer.cancel();
        Ok(())
    })
}

/// Tells how a transfer and its parts stand, all seen at one moment.
///
/// @param         transfer        The transfer.
/// @param[in,out] info            Start from KVF_TRANSFER_INFO_INIT; written up to
///                                `info->struct_size`.
/// @param[out]    parts           Receives up to @p cap parts: the groups of the descriptor, then
///                                its states. May be NULL when @p cap is 0.
/// @param         part_elem_size  `sizeof(kvf_part_info)`.
/// @param         cap             Elements in @p parts; `info->num_parts` tells how many there are.
/// @return KVF_OK; the state is in @p info.
///
/// # Safety
/// @p transfer must be live, @p info point to `info->struct_size` writable bytes, @p parts to
/// @p cap elements of @p part_elem_size bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_query(
    transfer: *const kvf_transfer,
    info: *mut kvf_transfer_info,
    parts: *mut kvf_part_info,
    part_elem_size: usize,
    cap: usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        // SAFETY: the caller's contract.
        let size = unsafe { check_head(info, "info") }?;
        // SAFETY: the caller's contract.
        let parts = unsafe { OutArray::new(parts, cap, part_elem_size, "parts") }?;
        let now = transfer.info();
        let list: Vec<kvf_part_info> = now.parts.iter().map(kvf_part_info::from).collect();
        let value = kvf_transfer_info {
            struct_size: size,
            abi_version: 0,
            outcome: now.outcome as u32,
            cause: now.cause as i32,
            memory_safe: now.memory_safe.into(),
            submitted: now.submitted,
            num_parts: list.len() as u32,
            id: transfer.id(),
            key: transfer.key().into(),
            bytes: now.bytes,
            bytes_total: now.bytes_total,
            elapsed_ns: now.elapsed_ns,
            transport: name_field(now.transport),
        };
        parts.fill(&list);
        // SAFETY: `size` writable bytes by the caller's contract.
        unsafe { write_result(info, size, &value) };
        Ok(())
    })
}

/// Gives what went wrong with a transfer, for people: part, peer, transport and the numbers.
///
/// @param      transfer  The transfer.
/// @param[out] buf       Receives the NUL-terminated UTF-8 text, cut to @p cap bytes; may be NULL
///                       when @p cap is 0. "" when nothing went wrong.
/// @param      cap       Size of @p buf in bytes.
/// @param[out] needed    Receives the size of the whole text with its NUL; may be NULL.
/// @return KVF_OK, also when the text was cut.
///
/// # Safety
/// @p transfer must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_error_text(
    transfer: *const kvf_transfer,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        // SAFETY: the caller's contract.
        unsafe { give_text(buf, cap, needed, &transfer.error_text()) }
    })
}

/// Gives the bytes that the publisher attached (`kvf_publish_desc.aux`).
///
/// @param      transfer  The transfer.
/// @param[out] buf       Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap       Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed    Receives the size, 0 for none, also when @p buf is too small; may be
///                       NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small (it stays untouched).
///
/// # Safety
/// @p transfer must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_aux(
    transfer: *const kvf_transfer,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &transfer.aux(), "buf") }
    })
}

/// Gives the offer of a receive: the bytes that the sender's kvf_push_begin() needs.
///
/// @param      transfer  A transfer of kvf_receive_begin().
/// @param[out] buf       Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap       Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed    Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE if @p buf is too small; KVF_ERR_STATE for another transfer.
///
/// # Safety
/// @p transfer must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_offer(
    transfer: *const kvf_transfer,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        let Some(offer) = transfer.offer() else {
            bail!(
                KVF_ERR_STATE,
                "this transfer is no receive: only kvf_receive_begin() makes an offer"
            );
        };
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, offer, "buf") }
    })
}

/// Makes a CUDA stream wait, without a block on the host, until the transfer has ended, in success
/// or failure, at the latest at its deadline. It orders work; it does not say success: what the
/// stream does next must not be trusted before kvf_transfer_poll() has said KVF_OK.
///
/// @param transfer  The transfer.
/// @param stream    CUstream of the caller, KVF_STREAM_LEGACY or KVF_STREAM_PER_THREAD.
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT for NULL and for what is no stream;
///         KVF_ERR_UNSUPPORTED for a stream that is being captured, on a device without stream
///         memory operations, or without a CUDA driver.
///
/// # Safety
/// @p transfer and @p stream must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_stream_wait(
    transfer: *mut kvf_transfer,
    stream: *mut c_void,
) -> kvf_status {
    guard::<()>(|| {
        // SAFETY: the caller's contract.
        let transfer = unsafe { view(transfer, "transfer") }?.0.enter("transfer")?;
        match CallerStream::new(stream) {
            Some(stream) => transfer.stream_wait(stream),
            None => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "stream is NULL, which names no stream: the legacy default stream is \
                 KVF_STREAM_LEGACY"
            ),
        }
    })
}

/// Ends a transfer's handle. A running transfer is cancelled and detached: its slots stay in
/// kvf_agent_quarantine() until they are safe. Its events that were not taken yet are withdrawn.
///
/// @param transfer  The transfer, or NULL.
/// @return KVF_OK.
///
/// # Safety
/// @p transfer must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transfer_destroy(transfer: *mut kvf_transfer) -> kvf_status {
    // SAFETY: the caller's contract.
    unsafe { destroy(transfer, |handle| handle.0, |_, _| Ok(Status::KVF_OK)) }
}
