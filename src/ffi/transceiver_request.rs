//! Requests of a transceiver: what the context side offers, what the generation side fetches.

use std::ffi::c_void;
use std::time::Duration;

use super::boundary::guard;
use super::checks::must_be_zero;
use super::event::kvf_key;
use super::handle::Use;
use super::import::{
    kvf_import_group, kvf_import_state, kvf_slot_ref, read_import_groups, read_import_states,
    read_owned_only,
};
use super::peer::kvf_peer;
use super::publication::kvf_publish_desc;
use super::structs::{OutArray, abi_struct, put_bytes, read, read_plain, view};
use super::transceiver::{Core, enter, kvf_transceiver};
use super::transceiver_status::kvf_request_result;
use crate::agent::{CallerStream, ImportDesc, Peer};
use crate::bail;
use crate::error::{Error, Result, Status, kvf_status};
use crate::transceiver::{Cancel, ReceiveRequest};

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
