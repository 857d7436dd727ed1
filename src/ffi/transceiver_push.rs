//! Transceivers that push: the offer of the generation side and the context side's answer; and
//! records as text.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::boundary::guard;
use super::event::kvf_key;
use super::push::kvf_push_desc;
use super::structs::{put_bytes, read, view};
use super::transceiver::{enter, kvf_transceiver};
use crate::bail;
use crate::error::kvf_status;
use crate::transceiver::RecordFormat;

/// A JSON object a line.
pub const KVF_RECORDS_JSON_LINES: u32 = 0;
/// Comma-separated values, the names in the first line.
pub const KVF_RECORDS_CSV: u32 = 1;

/// Push: sends a prefilled request's slots into what the generation side has offered. The key is
/// the offer's. Never blocks; how it went is told by
/// kvf_transceiver_check_context_transfer_status().
///
/// An offer is one generation rank's, so a context rank feeds one generation rank; every context
/// rank that holds a part of it pushes with the same bytes. Where a context rank must feed
/// several, use KVF_DIRECTION_PULL.
///
/// @param     transceiver  A transceiver made with KVF_DIRECTION_PUSH.
/// @param[in] request      Start from KVF_PUSH_DESC_INIT. Nothing of it is kept. `deadline_ns` 0 =
///                         the transceiver's `transfer_ns`.
/// @return KVF_OK; KVF_ERR_STATE for a transceiver made for pull, and when the domain ended the
///         request before it came; KVF_ERR_DUPLICATE while the key is in use here;
///         KVF_ERR_GROUP_LOST, KVF_ERR_SHUTDOWN; otherwise as kvf_push_begin(). Nothing has changed
///         then.
///
/// # Safety
/// @p transceiver and `request->peer` must be live, @p request point to `request->struct_size`
/// readable bytes and its pointers to what they say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_push_async(
    transceiver: *mut kvf_transceiver,
    request: *const kvf_push_desc,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        // SAFETY: the caller's contract.
        let request = unsafe { read(request, "request") }?;
        // SAFETY: the caller's contract.
        let peer = unsafe { view(request.peer, "request.peer") }?
            .0
            .enter("peer")?;
        peer.must_belong_to(core.agent()?, "request.peer")?;
        // SAFETY: the caller's contract.
        let (offer, push) = unsafe { request.convert() }?;
        let deadline = Duration::from_nanos(request.deadline_ns);
        core.push_async(&peer, &offer, push, deadline)
    })
}

/// Push: gives the offer of a receive that is in flight. It travels to the context side, which
/// answers it by kvf_transceiver_push_async().
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
pub unsafe extern "C" fn kvf_transceiver_offer(
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
        let Some(offer) = core.offer(key) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "{key} is no receive with an offer in flight here"
            );
        };
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &offer, "buf") }
    })
}

/// Gives the records of the last ended requests as text: request, side, outcome, cause, times
/// (queued, first byte, last byte, attested, decided, safe), bytes, GB/s, transport. Takes nothing
/// away. Times are in ns since the request's call, `queued_ns` since the transceiver was made.
///
/// @param      transceiver  The transceiver.
/// @param      format       KVF_RECORDS_*.
/// @param[out] buf          Receives the NUL-terminated text; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size with the NUL, also when @p buf is too small; may be
///                          NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_records_text(
    transceiver: *const kvf_transceiver,
    format: u32,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let format = match format {
            KVF_RECORDS_JSON_LINES => RecordFormat::JsonLines,
            KVF_RECORDS_CSV => RecordFormat::Csv,
            unknown => bail!(KVF_ERR_INVALID_ARGUMENT, "format {unknown} is unknown"),
        };
        let mut text = core.records_text(format)?.into_bytes();
        text.push(0);
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &text, "buf") }
    })
}
