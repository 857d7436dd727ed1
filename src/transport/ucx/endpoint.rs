//! A peer's endpoint on the progress thread: messages go out, gets wait here, are posted within a
//! window, and end.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};

use super::am::Message;
use super::library::Library;
use super::rma::{Batch, Flight, Get, Region};
use super::ucx_sys::{self as sys, ucs_status_ptr_t, ucs_status_t};
use crate::bail;
use crate::err;
use crate::error::{Error, Result};

/// Bytes that UCX has of one endpoint at a time, as gets of the size of the next one, and between how
/// many gets. More would only lie in its queues, where a cancel cannot take them back.
const WINDOW_BYTES: u64 = 8 << 20;
const WINDOW: std::ops::RangeInclusive<u64> = 8..=64;
/// Bytes posted to one endpoint before orders are looked at again: where UCX reads the peer's memory
/// through the kernel, posting is copying.
const TURN_BYTES: u64 = 1 << 20;

/// What a caller knows of an endpoint.
#[derive(Debug, Default)]
pub struct EndpointState {
    /// UCX's status once it has failed.
    failed: AtomicI32,
    closed: AtomicBool,
}

impl EndpointState {
    /// Whether anything through it can still succeed.
    pub fn is_open(&self) -> bool {
        self.failed.load(Ordering::Acquire) == 0 && !self.closed.load(Ordering::Acquire)
    }

    /// Why what goes through it fails.
    pub fn why_closed(&self, ucx: &Library) -> Error {
        match self.failed.load(Ordering::Acquire) {
            0 => err!(
                KVF_ERR_TRANSFER,
                "the endpoint was closed: the peer did not answer in time, or was given up"
            ),
            status => err!(
                KVF_ERR_TRANSFER,
                "the endpoint failed: {}",
                ucx.text(status as ucs_status_t)
            ),
        }
    }
}

/// Packed keys of a peer's ranges.
pub type Keys = Vec<(Region, Vec<u8>)>;

/// Called with the reason when an endpoint has ended.
pub type OnClosed = Box<dyn FnOnce(&Error) + Send>;

/// A peer to connect to.
pub struct Peer {
    /// For people.
    pub name: String,
    pub address: Vec<u8>,
    pub keys: Keys,
}

/// A range of ours that UCX knows.
pub struct Registered {
    pub memh: sys::ucp_mem_h,
    pub memory_type: sys::ucs_memory_type_t,
    pub packed: Vec<u8>,
    pub _owner: Arc<dyn Any + Send + Sync>,
}

/// A peer's, on the progress thread.
pub struct Endpoint {
    /// Null once it was closed.
    ep: sys::ucp_ep_h,
    name: String,
    pub address: Vec<u8>,
    keys: BTreeMap<Region, sys::ucp_rkey_h>,
    pub state: Arc<EndpointState>,
    waiting: VecDeque<(Arc<Batch>, std::vec::IntoIter<Get>)>,
    /// Batches that UCX has gets of.
    live: Vec<Arc<Batch>>,
    pub posted: Arc<AtomicUsize>,
    /// What the forced close is waited for with.
    closing: ucs_status_ptr_t,
    closed: Option<OnClosed>,
}

impl Endpoint {
    /// Connects; nothing is sent before the first get. The keys are for [`Self::unpack`].
    pub fn open(
        ucx: &Library,
        worker: sys::ucp_worker_h,
        peer: Peer,
        closed: OnClosed,
    ) -> Result<(Self, Keys)> {
        let state = Arc::<EndpointState>::default();
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_ep_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(
            sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        let address = padded(&peer.address);
        params.address = address.as_ptr().cast();
        params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(endpoint_failed);
        // The endpoint below keeps it until UCX has closed its own.
        params.err_handler.arg = Arc::as_ptr(&state).cast_mut().cast();
        let mut endpoint = Endpoint {
            ep: null_mut(),
            name: peer.name,
            address: peer.address,
            keys: BTreeMap::new(),
            state,
            waiting: VecDeque::new(),
            live: Vec::new(),
            posted: Arc::default(),
            closing: null_mut(),
            closed: Some(closed),
        };
        // SAFETY: the worker is open, the mask says which fields are there.
        let status = unsafe { ucx.ucp_ep_create(worker, &raw const params, &raw mut endpoint.ep) };
        ucx.check(status, format_args!("connecting to {}", endpoint.name))?;
        Ok((endpoint, peer.keys))
    }

    /// Makes the peer's keys usable; after an error the endpoint is to be closed.
    pub fn unpack(&mut self, ucx: &Library, keys: Keys) -> Result<()> {
        for (region, packed) in keys {
            let packed = padded(&packed);
            let mut key = null_mut();
            // SAFETY: the endpoint is open; the buffer lives through the call.
            let status =
                unsafe { ucx.ucp_ep_rkey_unpack(self.ep, packed.as_ptr().cast(), &raw mut key) };
            ucx.check(
                status,
                format_args!("the key of {region:?} of {}", self.name),
            )?;
            if let Some(twice) = self.keys.insert(region, key) {
                // SAFETY: unpacked above for this endpoint, and no get uses it yet.
                unsafe { ucx.ucp_rkey_destroy(twice) };
            }
        }
        Ok(())
    }

    /// Whether it is for gets.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    /// Sends a message, in order with the others.
    pub fn send(&mut self, ucx: &'static Library, message: Box<Message>) {
        if self.ep.is_null() {
            return message.over();
        }
        // SAFETY: the endpoint is open.
        if let Err(status) = unsafe { message.post(ucx, self.ep, &self.posted) } {
            // The rest would come out of order; it is closed in the next `tidy`.
            self.state
                .failed
                .store(i32::from(status), Ordering::Release);
        }
    }

    fn tell_closed(&mut self, why: &Error) {
        if let Some(closed) = self.closed.take() {
            closed(why);
        }
    }

    /// Takes gets on.
    pub fn push(&mut self, ucx: &'static Library, flight: &Arc<Flight>, gets: Vec<Get>) {
        let batch = Batch::new(ucx, flight, &gets, self.posted.clone());
        self.waiting.push_back((batch, gets.into_iter()));
    }

    /// Gives UCX gets up to the window; true: some.
    pub fn post_turn(&mut self, ucx: &Library, memory: &BTreeMap<Region, Registered>) -> bool {
        let (mut some, mut bytes) = (false, 0);
        while bytes < TURN_BYTES {
            let Some((batch, gets)) = self.waiting.front_mut() else {
                break;
            };
            let next = gets.as_slice().first().map_or(1, |get| get.bytes.max(1));
            let window = (WINDOW_BYTES / next).clamp(*WINDOW.start(), *WINDOW.end());
            if self.posted.load(Ordering::Relaxed) as u64 >= window {
                break;
            }
            let stopped = batch.flight.is_stopped();
            let Some(get) = (!stopped).then(|| gets.next()).flatten() else {
                batch.over(gets.len());
                let batch = self.waiting.pop_front().map(|(batch, _)| batch);
                self.live.extend(batch.filter(|batch| !batch.is_over()));
                continue;
            };
            bytes += get.bytes;
            let batch = batch.clone();
            self.post(ucx, memory, &batch, get);
            some = true;
        }
        some
    }

    /// Closes it if it has failed; true: nothing of it is left.
    pub fn tidy(&mut self, ucx: &Library) -> bool {
        if !self.live.is_empty() {
            self.live.retain(|batch| !batch.is_over());
        }
        if !self.ep.is_null() && !self.state.is_open() {
            self.close(ucx);
        }
        self.ep.is_null() && self.is_gone(ucx)
    }

    /// UCX is gone: whatever is left has ended.
    pub fn abandon(&mut self, why: &Error) {
        self.state.closed.store(true, Ordering::Release);
        self.tell_closed(why);
        self.drop_waiting(why);
        for batch in self.live.drain(..) {
            batch.flight.fail(why.clone());
            batch.abandon();
        }
    }

    fn post(
        &mut self,
        ucx: &Library,
        memory: &BTreeMap<Region, Registered>,
        batch: &Arc<Batch>,
        get: Get,
    ) {
        let Some(key) = self.keys.get(&get.from) else {
            batch.flight.fail(err!(
                KVF_ERR_TRANSFER,
                "the peer gave no key for {:?}",
                get.from
            ));
            return batch.over(1);
        };
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_CALLBACK
            | sys::UCP_OP_ATTR_FIELD_USER_DATA
            | sys::UCP_OP_ATTR_FIELD_MEMORY_TYPE;
        params.cb.send = Some(get_ended);
        params.user_data = Arc::into_raw(batch.clone()).cast_mut().cast();
        params.memory_type = sys::UCS_MEMORY_TYPE_HOST;
        if let Some(ours) = get.to.and_then(|region| memory.get(&region)) {
            params.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
            params.memh = ours.memh;
            params.memory_type = ours.memory_type;
        }
        batch.posted();
        // SAFETY: endpoint and key are open; the worker that made the get keeps the local memory
        // until its batch is over, which is after UCX has called `get_ended` or failed here.
        let request = unsafe {
            ucx.ucp_get_nbx(
                self.ep,
                get.local.cast(),
                get.bytes as usize,
                get.remote,
                *key,
                &raw const params,
            )
        };
        let status = match request.addr() as isize {
            0 => sys::UCS_OK,
            // As UCS_PTR_IS_ERR: the last hundred addresses are statuses.
            error @ -100..0 => error as ucs_status_t,
            _ => return, // `get_ended` will be called
        };
        // SAFETY: UCX did not take it.
        drop(unsafe { Arc::from_raw(params.user_data.cast::<Batch>().cast_const()) });
        if status != sys::UCS_OK {
            batch.flight.fail(err!(
                KVF_ERR_TRANSFER,
                "a get of {} bytes: {}",
                get.bytes,
                ucx.text(status)
            ));
        }
        batch.returned();
    }

    /// Drops the gets of stopped flights that UCX does not have yet.
    pub fn sweep(&mut self) {
        let live = &mut self.live;
        self.waiting.retain(|(batch, gets)| {
            let keep = !batch.flight.is_stopped();
            if !keep {
                batch.over(gets.len());
                if !batch.is_over() {
                    live.push(batch.clone());
                }
            }
            keep
        });
    }

    fn drop_waiting(&mut self, why: &Error) {
        for (batch, _) in &self.waiting {
            batch.flight.fail(why.clone());
        }
        self.sweep();
    }

    /// Forced: nothing is flushed, and what UCX has ends with an error.
    pub fn close(&mut self, ucx: &Library) {
        self.state.closed.store(true, Ordering::Release);
        let why = self.state.why_closed(ucx);
        self.tell_closed(&why);
        self.drop_waiting(&why);
        if self.ep.is_null() {
            return;
        }
        for batch in &self.live {
            batch.flight.fail(why.clone());
        }
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_request_param_t = unsafe { std::mem::zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = sys::UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: the endpoint is open and not used for anything else any more.
        let request = unsafe { ucx.ucp_ep_close_nbx(self.ep, &raw const params) };
        self.ep = null_mut();
        if !(-100..=0).contains(&(request.addr() as isize)) {
            self.closing = request;
        }
    }

    /// Whether a closed endpoint has no get and no close in progress; frees what it had.
    fn is_gone(&mut self, ucx: &Library) -> bool {
        if !self.closing.is_null() {
            // SAFETY: the request is ours until it is freed here.
            unsafe {
                if ucx.ucp_request_check_status(self.closing) == sys::UCS_INPROGRESS {
                    return false;
                }
                ucx.ucp_request_free(self.closing);
            }
            self.closing = null_mut();
        }
        if self.posted.load(Ordering::Relaxed) > 0 {
            return false;
        }
        for (_, key) in std::mem::take(&mut self.keys) {
            // SAFETY: unpacked for this endpoint, and no get uses it any more.
            unsafe { ucx.ucp_rkey_destroy(key) };
        }
        true
    }
}

/// UCX's call when a peer has failed. The endpoint is closed later: not from inside a callback.
unsafe extern "C" fn endpoint_failed(arg: *mut c_void, _: sys::ucp_ep_h, status: ucs_status_t) {
    // SAFETY: `Endpoint` keeps its state until UCX has closed the endpoint.
    let state = unsafe { &*arg.cast::<EndpointState>() };
    state.failed.store(i32::from(status), Ordering::Release);
}

/// UCX's call when a get that it took is over.
unsafe extern "C" fn get_ended(request: *mut c_void, status: ucs_status_t, batch: *mut c_void) {
    // SAFETY: `post` made it from an Arc, once for each get.
    let batch = unsafe { Arc::from_raw(batch.cast::<Batch>().cast_const()) };
    let ucx = batch.ucx;
    if status != sys::UCS_OK {
        batch
            .flight
            .fail(err!(KVF_ERR_TRANSFER, "a get: {}", ucx.text(status)));
    }
    batch.returned();
    // SAFETY: UCX allows it inside the callback, and nobody else has the request.
    unsafe { ucx.ucp_request_free(request) };
}

/// UCX reads neither an address nor a key by its length; zeros behind it end a wrong one.
fn padded(bytes: &[u8]) -> Vec<u8> {
    [bytes, &[0; 1024]].concat()
}

/// Refuses what no UCX would send: UCX itself does not check lengths.
pub fn check_lengths(address: &[u8], keys: &[(Region, Vec<u8>)]) -> Result<()> {
    const MAX_ADDRESS: usize = 64 << 10;
    const MAX_KEY: usize = 4 << 10;
    if address.is_empty() || address.len() > MAX_ADDRESS {
        bail!(
            KVF_ERR_PROTOCOL,
            "a UCX address of {} bytes; 1 to {MAX_ADDRESS} are accepted",
            address.len()
        );
    }
    for (region, key) in keys {
        if key.is_empty() || key.len() > MAX_KEY {
            bail!(
                KVF_ERR_PROTOCOL,
                "a UCX key of {} bytes for {region:?}; 1 to {MAX_KEY} are accepted",
                key.len()
            );
        }
    }
    Ok(())
}
