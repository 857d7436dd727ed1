//! Transceivers that push: the offer of the generation side and the context side's answer.

use std::ffi::c_void;
use std::time::Duration;

use super::boundary::guard;
use super::event::kvf_key;
use super::push::kvf_push_desc;
use super::structs::{put_bytes, read, view};
use super::transceiver::{enter, kvf_transceiver};
use crate::bail;
use crate::error::kvf_status;

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
