//! The progress thread: alone it calls UCX, whose objects may not be used by two threads at once.
//!
//! It sleeps until UCX's descriptor or the bell of the order queue is readable. As a source it must
//! run too: without a card that reads memory by itself, UCX answers a peer's gets here.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::flight::{Batch, Flight, Get, Region};
use super::library::{Library, set_up};
use super::ucx_sys::{self as sys, ucs_status_ptr_t, ucs_status_t};
use crate::bail;
use crate::error::{Error, Result};
use crate::runtime::{Bell, wait_readable};
use crate::{err, observe};

/// Bytes that UCX has of one endpoint at a time, as gets of the size of the next one, and between how
/// many gets. More would only lie in its queues, where a cancel cannot take them back.
const WINDOW_BYTES: u64 = 8 << 20;
const WINDOW: std::ops::RangeInclusive<u64> = 8..=64;
/// Bytes posted to one endpoint before orders are looked at again: where UCX reads the peer's memory
/// through the kernel, posting is copying.
const TURN_BYTES: u64 = 1 << 20;
/// How long the end of the thread waits for the gets of endpoints that it has closed.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A range to register.
pub struct Range {
    pub region: Region,
    pub base: u64,
    pub bytes: u64,
    /// Keeps the memory mapped while it is registered.
    pub owner: Arc<dyn Any + Send + Sync>,
}

/// What a caller knows of an endpoint.
#[derive(Debug, Default)]
pub struct EndpointState {
    /// UCX's status once it has failed.
    failed: AtomicI32,
    closed: AtomicBool,
}

impl EndpointState {
    /// Whether gets through it can still succeed.
    pub fn is_open(&self) -> bool {
        self.failed.load(Ordering::Acquire) == 0 && !self.closed.load(Ordering::Acquire)
    }

    /// Why gets through it fail.
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

/// A peer to connect to.
pub struct Peer {
    pub id: u64,
    /// For people.
    pub name: String,
    pub address: Vec<u8>,
    pub keys: Vec<(Region, Vec<u8>)>,
    pub state: Arc<EndpointState>,
}

pub enum Order {
    /// Answers with the packed key.
    Register(Range, SyncSender<Result<Vec<u8>>>),
    Unregister(Region, Box<dyn FnOnce() + Send>),
    Connect(Peer, SyncSender<Result<()>>),
    Read(u64, Arc<Flight>, Vec<Get>),
    /// Flights were stopped: look at all of them.
    Sweep,
    /// Force-closes an endpoint: its gets end with errors, and it takes no more.
    Close(u64),
    /// Ends the thread, UCX's worker and whatever is in flight; then calls this.
    End(Option<Box<dyn FnOnce() + Send>>),
}

/// Orders on their way to the thread.
pub struct Queue {
    orders: Mutex<Orders>,
    bell: Bell,
}

struct Orders {
    list: Vec<Order>,
    /// The thread has ended, or was never there.
    closed: bool,
}

impl Queue {
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            orders: Mutex::new(Orders {
                list: Vec::new(),
                closed: false,
            }),
            bell: Bell::new()?,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands an order over, or gives it back: the thread has ended.
    pub fn push(&self, order: Order) -> Option<Order> {
        let mut orders = self.lock();
        if orders.closed {
            return Some(order);
        }
        orders.list.push(order);
        drop(orders);
        self.bell.ring();
        None
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

struct Registered {
    memh: sys::ucp_mem_h,
    packed: Vec<u8>,
    _owner: Arc<dyn Any + Send + Sync>,
}

struct Endpoint {
    /// Null once it was closed.
    ep: sys::ucp_ep_h,
    name: String,
    keys: BTreeMap<Region, sys::ucp_rkey_h>,
    state: Arc<EndpointState>,
    waiting: VecDeque<(Arc<Batch>, std::vec::IntoIter<Get>)>,
    /// Batches that UCX has gets of.
    live: Vec<Arc<Batch>>,
    posted: Arc<AtomicUsize>,
    /// What the forced close is waited for with.
    closing: ucs_status_ptr_t,
}

/// The thread's own.
pub struct Progress {
    ucx: &'static Library,
    context: sys::ucp_context_h,
    worker: sys::ucp_worker_h,
    efd: RawFd,
    queue: Arc<Queue>,
    spin: Duration,
    memory: BTreeMap<Region, Registered>,
    endpoints: BTreeMap<u64, Endpoint>,
    /// Of the order to end.
    at_end: Vec<Box<dyn FnOnce() + Send>>,
}

impl Progress {
    /// UCX's context and worker, on the calling thread; the worker's address.
    pub fn new(
        ucx: &'static Library,
        options: &[(&str, &str)],
        queue: Arc<Queue>,
        spin: Duration,
    ) -> Result<(Self, Vec<u8>)> {
        let context = ucx.context(options)?;
        let mut progress = Self {
            ucx,
            context,
            worker: null_mut(),
            efd: -1,
            queue,
            spin,
            memory: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            at_end: Vec::new(),
        };
        // What was made so far is undone by Drop.
        let address = progress.open()?;
        Ok((progress, address))
    }

    fn open(&mut self) -> Result<Vec<u8>> {
        let ucx = self.ucx;
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_worker_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = sys::UCS_THREAD_MODE_SINGLE;
        let status = {
            let _handlers = set_up();
            // SAFETY: the context is open, the mask says which fields are there.
            unsafe { ucx.ucp_worker_create(self.context, &raw const params, &raw mut self.worker) }
        };
        ucx.check(status, "ucp_worker_create")?;
        // SAFETY: the worker is open; the descriptor stays UCX's.
        let status = unsafe { ucx.ucp_worker_get_efd(self.worker, &raw mut self.efd) };
        ucx.check(status, "ucp_worker_get_efd")?;
        let (mut address, mut len) = (null_mut(), 0);
        // SAFETY: the worker is open; the buffer is copied and given back.
        unsafe {
            let status = ucx.ucp_worker_get_address(self.worker, &raw mut address, &raw mut len);
            ucx.check(status, "ucp_worker_get_address")?;
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            ucx.ucp_worker_release_address(self.worker, address);
            Ok(bytes)
        }
    }

    /// Runs until the order to end.
    pub fn run(&mut self) {
        let mut busy_since = Instant::now();
        while !self.take_orders() {
            let mut moved = self.post();
            for _ in 0..16 {
                // SAFETY: the worker is open and only this thread uses it.
                if unsafe { self.ucx.ucp_worker_progress(self.worker) } == 0 {
                    break;
                }
                moved = true;
            }
            self.tidy();
            if moved {
                busy_since = Instant::now();
            } else if !self.spin.is_zero() && self.has_gets() && busy_since.elapsed() < self.spin {
                std::hint::spin_loop();
            } else if !self.sleep() {
                return;
            }
        }
    }

    /// Until UCX or the bell has something; false: UCX cannot be waited for any more.
    fn sleep(&self) -> bool {
        // SAFETY: the worker is open and only this thread uses it.
        match unsafe { self.ucx.ucp_worker_arm(self.worker) } {
            sys::UCS_OK => {}
            sys::UCS_ERR_BUSY => return true,
            _ => return false,
        }
        // SAFETY: UCX keeps its descriptor open as long as the worker, which outlives this call.
        let ucx = unsafe { BorrowedFd::borrow_raw(self.efd) };
        let waited = wait_readable([Some(ucx), Some(self.queue.bell.as_fd())], None);
        self.queue.bell.clear();
        waited.is_ok()
    }

    fn has_gets(&self) -> bool {
        let posted = |e: &Endpoint| e.posted.load(Ordering::Relaxed) > 0;
        self.endpoints.values().any(posted)
    }

    /// True: the thread is to end.
    fn take_orders(&mut self) -> bool {
        let orders = std::mem::take(&mut self.queue.lock().list);
        let mut end = false;
        for order in orders {
            match order {
                Order::Register(range, reply) => {
                    let _ = reply.send(self.register(range)); // nobody may be waiting any more
                }
                Order::Unregister(region, done) => {
                    self.unregister(region);
                    done();
                }
                Order::Connect(peer, reply) => {
                    let _ = reply.send(self.connect(peer));
                }
                Order::Read(id, flight, gets) => self.read(id, &flight, gets),
                Order::Sweep => self.endpoints.values_mut().for_each(Endpoint::sweep),
                Order::Close(id) => self.close(id),
                Order::End(done) => {
                    self.at_end.extend(done);
                    end = true;
                }
            }
        }
        end
    }

    fn register(&mut self, range: Range) -> Result<Vec<u8>> {
        if let Some(known) = self.memory.get(&range.region) {
            return Ok(known.packed.clone());
        }
        let what = || format!("registering {} bytes of {:?}", range.bytes, range.region);
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_mem_map_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(
            sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | sys::UCP_MEM_MAP_PARAM_FIELD_PROT
                | sys::UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        );
        params.address = std::ptr::with_exposed_provenance_mut(range.base as usize);
        params.length = range.bytes as usize;
        // No process writes another one's memory.
        params.prot = sys::UCP_MEM_MAP_PROT_LOCAL_READ
            | sys::UCP_MEM_MAP_PROT_LOCAL_WRITE
            | sys::UCP_MEM_MAP_PROT_REMOTE_READ;
        params.memory_type = sys::UCS_MEMORY_TYPE_HOST;
        let mut memh = null_mut();
        // SAFETY: the range is mapped, and its owner is kept until it is unregistered.
        let status = unsafe {
            self.ucx
                .ucp_mem_map(self.context, &raw const params, &raw mut memh)
        };
        self.ucx.check(status, what())?;
        let (mut buffer, mut len) = (null_mut(), 0);
        // SAFETY: just registered; the buffer is copied and given back.
        let packed = unsafe {
            let status = self
                .ucx
                .ucp_rkey_pack(self.context, memh, &raw mut buffer, &raw mut len);
            if let Err(e) = self.ucx.check(status, what()) {
                self.ucx.ucp_mem_unmap(self.context, memh);
                return Err(e);
            }
            let packed = std::slice::from_raw_parts(buffer.cast::<u8>(), len).to_vec();
            self.ucx.ucp_rkey_buffer_release(buffer);
            packed
        };
        let registered = Registered {
            memh,
            packed: packed.clone(),
            _owner: range.owner,
        };
        self.memory.insert(range.region, registered);
        Ok(packed)
    }

    fn unregister(&mut self, region: Region) {
        if let Some(known) = self.memory.remove(&region) {
            // SAFETY: registered above; no get of ours uses it, since its pool has no users.
            unsafe { self.ucx.ucp_mem_unmap(self.context, known.memh) };
        }
    }

    fn connect(&mut self, peer: Peer) -> Result<()> {
        let ucx = self.ucx;
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_ep_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(
            sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        // UCX reads neither an address nor a key by its length; zeros behind it end a wrong one.
        let padded = |bytes: &[u8]| [bytes, &[0; 1024]].concat();
        let address = padded(&peer.address);
        params.address = address.as_ptr().cast();
        params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(endpoint_failed);
        // The endpoint below keeps it until UCX has closed its own.
        params.err_handler.arg = Arc::as_ptr(&peer.state).cast_mut().cast();
        let mut endpoint = Endpoint {
            ep: null_mut(),
            name: peer.name,
            keys: BTreeMap::new(),
            state: peer.state,
            waiting: VecDeque::new(),
            live: Vec::new(),
            posted: Arc::default(),
            closing: null_mut(),
        };
        // SAFETY: the worker is open, the mask says which fields are there.
        let status =
            unsafe { ucx.ucp_ep_create(self.worker, &raw const params, &raw mut endpoint.ep) };
        ucx.check(status, format_args!("connecting to {}", endpoint.name))?;
        let mut unpacked = Ok(());
        for (region, packed) in peer.keys {
            let packed = padded(&packed);
            let mut key = null_mut();
            // SAFETY: the endpoint was just made; the buffer lives through the call.
            let status = unsafe {
                ucx.ucp_ep_rkey_unpack(endpoint.ep, packed.as_ptr().cast(), &raw mut key)
            };
            if let Err(e) = ucx.check(
                status,
                format_args!("the key of {region:?} of {}", endpoint.name),
            ) {
                unpacked = Err(e);
                break;
            }
            endpoint.keys.insert(region, key);
        }
        self.endpoints.insert(peer.id, endpoint);
        if unpacked.is_err() {
            self.close(peer.id);
        }
        unpacked
    }

    fn read(&mut self, id: u64, flight: &Arc<Flight>, gets: Vec<Get>) {
        match self.endpoints.get_mut(&id) {
            Some(endpoint) if endpoint.state.is_open() => {
                let batch = Batch::new(self.ucx, flight, &gets, endpoint.posted.clone());
                endpoint.waiting.push_back((batch, gets.into_iter()));
            }
            Some(endpoint) => {
                flight.fail(endpoint.state.why_closed(self.ucx));
                flight.land(gets.len());
            }
            None => {
                flight.fail(err!(KVF_ERR_TRANSFER, "the endpoint was closed before"));
                flight.land(gets.len());
            }
        }
    }

    /// Gives UCX gets up to the window; true: some.
    fn post(&mut self) -> bool {
        let mut some = false;
        for endpoint in self.endpoints.values_mut() {
            let mut bytes = 0;
            while bytes < TURN_BYTES {
                let Some((batch, gets)) = endpoint.waiting.front_mut() else {
                    break;
                };
                let next = gets.as_slice().first().map_or(1, |get| get.bytes.max(1));
                let window = (WINDOW_BYTES / next).clamp(*WINDOW.start(), *WINDOW.end());
                if endpoint.posted.load(Ordering::Relaxed) as u64 >= window {
                    break;
                }
                let next = if batch.flight.is_stopped() {
                    None
                } else {
                    gets.next()
                };
                let Some(get) = next else {
                    batch.over(gets.len());
                    let batch = endpoint.waiting.pop_front();
                    endpoint
                        .live
                        .extend(batch.map(|(batch, _)| batch).filter(|b| !b.is_over()));
                    continue;
                };
                bytes += get.bytes;
                let batch = batch.clone();
                endpoint.post(self.ucx, &self.memory, &batch, get);
                some = true;
            }
        }
        some
    }

    /// Closes what has failed, frees what has been closed.
    fn tidy(&mut self) {
        let ucx = self.ucx;
        for endpoint in self.endpoints.values_mut() {
            if !endpoint.live.is_empty() {
                endpoint.live.retain(|batch| !batch.is_over());
            }
            if !endpoint.ep.is_null() && !endpoint.state.is_open() {
                endpoint.close(ucx);
            }
        }
        self.endpoints
            .retain(|_, e| !(e.ep.is_null() && e.is_gone(ucx)));
    }

    fn close(&mut self, id: u64) {
        if let Some(endpoint) = self.endpoints.get_mut(&id) {
            endpoint.close(self.ucx);
        }
    }

    /// Ends everything. When this returns, UCX touches no memory of ours any more.
    pub fn shut_down(&mut self) {
        let ids: Vec<u64> = self.endpoints.keys().copied().collect();
        ids.into_iter().for_each(|id| self.close(id));
        let until = Instant::now() + LAST_WORDS;
        while !self.endpoints.is_empty() && Instant::now() < until {
            // SAFETY: the worker is open and only this thread uses it.
            if unsafe { self.ucx.ucp_worker_progress(self.worker) } == 0 {
                std::thread::yield_now();
            }
            self.tidy();
        }
        for region in self.memory.keys().copied().collect::<Vec<_>>() {
            self.unregister(region);
        }
        self.destroy();
        // Without a worker nobody can end these any more, nor write their memory.
        for endpoint in self.endpoints.values_mut() {
            endpoint.state.closed.store(true, Ordering::Release);
            endpoint.drop_waiting(&err!(KVF_ERR_TRANSFER, "ucx has been shut down"));
            for batch in endpoint.live.drain(..) {
                batch
                    .flight
                    .fail(err!(KVF_ERR_TRANSFER, "ucx has been shut down"));
                batch.abandon();
            }
        }
        self.endpoints.clear();
        let left = {
            let mut orders = self.queue.lock();
            orders.closed = true;
            std::mem::take(&mut orders.list)
        };
        left.into_iter().for_each(refuse);
        self.at_end.drain(..).for_each(|done| done());
    }

    fn destroy(&mut self) {
        // SAFETY: both are open or null, and nothing uses them afterwards.
        unsafe {
            if !self.worker.is_null() {
                self.ucx.ucp_worker_destroy(self.worker);
                self.worker = null_mut();
            }
            if !self.context.is_null() {
                self.ucx.ucp_cleanup(self.context);
                self.context = null_mut();
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if !observe::marks::forked() {
            self.destroy();
        }
    }
}

/// An order that comes after the end.
pub fn refuse(order: Order) {
    match order {
        // Dropping the sender tells who waits.
        Order::Register(..) | Order::Connect(..) | Order::Sweep | Order::Close(_) => {}
        Order::Unregister(_, done) => done(),
        Order::End(done) => {
            if let Some(done) = done {
                done();
            }
        }
        Order::Read(_, flight, gets) => {
            flight.fail(err!(KVF_ERR_TRANSFER, "ucx has been shut down"));
            flight.land(gets.len());
        }
    }
}

impl Endpoint {
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
    fn sweep(&mut self) {
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
    fn close(&mut self, ucx: &Library) {
        self.state.closed.store(true, Ordering::Release);
        let why = self.state.why_closed(ucx);
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
