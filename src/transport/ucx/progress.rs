//! The progress thread: alone it calls UCX, whose objects may not be used by two threads at once.
//!
//! It sleeps until UCX's descriptor or the bell of the order queue is readable. What comes in is handed
//! on from UCX's callbacks ([`Incoming`]).

use std::any::Any;
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::ptr::null_mut;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::am::{Connection, Hello, Incoming, Message};
use super::endpoint::{Endpoint, EndpointState, Peer, Registered, check_lengths};
use super::library::Library;
use super::rma::{Flight, Get, Region};
use super::ucx_sys as sys;
use super::workers::Workers;
use crate::cuda::{Context, Current};
use crate::err;
use crate::error::{Error, Result};
use crate::runtime::{Bell, wait_readable};

/// How long the end of the thread waits for the gets of endpoints that it has closed.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A range to register.
pub struct Range {
    pub region: Region,
    pub base: u64,
    pub bytes: u64,
    /// Memory of the device whose context the thread has.
    pub on_device: bool,
    /// Keeps the memory mapped while it is registered.
    pub owner: Arc<dyn Any + Send + Sync>,
}

pub enum Order {
    /// Answers with the packed key.
    Register(Range, SyncSender<Result<Vec<u8>>>),
    Unregister(Region, Box<dyn FnOnce() + Send>),
    /// Answers with the endpoint's number and state; without keys, with those of an endpoint that there is.
    Connect(Peer, SyncSender<Result<(u64, Arc<EndpointState>)>>),
    Read(u64, Arc<Flight>, Vec<Get>),
    Send(u64, Box<Message>),
    /// A reader is served no more.
    Disconnect(Arc<Connection>),
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
        let first = orders.list.is_empty();
        orders.list.push(order);
        drop(orders);
        if first {
            self.bell.ring(); // for the others it has rung
        }
        None
    }

    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }
}

/// The thread's own.
pub struct Progress {
    ucx: &'static Library,
    workers: Workers,
    queue: Arc<Queue>,
    incoming: Arc<Incoming>,
    last_endpoint: u64,
    spin: Duration,
    /// Of the agent's device memory: current while the thread works, and not while it sleeps.
    cuda: Option<Context>,
    memory: BTreeMap<Region, Registered>,
    endpoints: BTreeMap<u64, Endpoint>,
    /// Of the order to end.
    at_end: Vec<Box<dyn FnOnce() + Send>>,
}

impl Progress {
    /// UCX's context and worker, on the calling thread; the worker's address.
    pub fn new(
        ucx: &'static Library,
        features: sys::ucp_feature,
        options: &[(&str, &str)],
        queue: Arc<Queue>,
        incoming: Arc<Incoming>,
        spin: Duration,
        cuda: Option<Context>,
    ) -> Result<(Self, Vec<u8>)> {
        let _current = enter(cuda);
        let workers = Workers::new(ucx, ucx.context(features, options)?)?;
        incoming.listen(ucx, workers.inward)?;
        let address = workers.address()?;
        let progress = Self {
            ucx,
            workers,
            queue,
            incoming,
            last_endpoint: 0,
            spin,
            cuda,
            memory: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            at_end: Vec::new(),
        };
        Ok((progress, address))
    }

    /// Whether UCX can tell device memory.
    pub fn knows_cuda(&self) -> bool {
        // SAFETY: open, and this thread's alone.
        unsafe { self.ucx.knows_cuda(self.workers.context) }
    }

    /// Runs until the order to end.
    pub fn run(&mut self) {
        let mut busy_since = Instant::now();
        while let Some(moved) = self.turn() {
            if moved {
                busy_since = Instant::now();
            } else if !self.spin.is_zero() && self.is_awaiting() && busy_since.elapsed() < self.spin
            {
                // Whoever waits for what comes may need this core.
                std::thread::yield_now();
            } else if !self.sleep() {
                return;
            }
        }
    }

    /// Does what there is to do, with the device's context; whether UCX had something. `None`: the
    /// thread is to end.
    fn turn(&mut self) -> Option<bool> {
        let _current = enter(self.cuda);
        if self.take_orders() {
            return None;
        }
        let mut moved = self.post();
        for _ in 0..16 {
            if !self.workers.progress() {
                break;
            }
            moved = true;
        }
        self.greet();
        self.tidy();
        Some(moved)
    }

    /// Until UCX or the bell has something; false: UCX cannot be waited for any more.
    fn sleep(&self) -> bool {
        match self.workers.arm() {
            sys::UCS_OK => {}
            sys::UCS_ERR_BUSY => return true,
            _ => return false,
        }
        let waited = wait_readable(
            [Some(self.workers.as_fd()), Some(self.queue.bell.as_fd())],
            None,
        );
        self.queue.bell.clear();
        waited.is_ok()
    }

    fn is_awaiting(&self) -> bool {
        let posted = |e: &Endpoint| e.posted.load(Ordering::Relaxed) > 0;
        self.incoming.is_awaiting() || self.endpoints.values().any(posted)
    }

    /// Lets readers in whose hellos have come.
    fn greet(&mut self) {
        for hello in self.incoming.take_hellos() {
            // Who is not let in hears nothing; the agent counts him.
            let _ = self.let_in(hello);
        }
    }

    fn let_in(&mut self, hello: Hello) -> Result<()> {
        check_lengths(&hello.address, &[])?;
        let peer = Peer {
            name: self.incoming.admits(&hello)?,
            address: hello.address.clone(),
            keys: Vec::new(),
        };
        if hello.anew {
            let (ucx, address) = (self.ucx, &hello.address);
            let old = self
                .endpoints
                .values_mut()
                .filter(|e| e.address == *address);
            old.for_each(|endpoint| endpoint.close(ucx));
        }
        let (endpoint, _) = self.connect(peer)?;
        let connection = Connection::new(&hello, endpoint, self.queue.clone());
        self.incoming.connect(&Arc::new(connection))
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
                Order::Send(id, message) => match self.endpoints.get_mut(&id) {
                    Some(endpoint) => endpoint.send(self.ucx, message),
                    None => message.over(),
                },
                Order::Disconnect(connection) => self.incoming.disconnect(&connection),
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
        let memory_type = match range.on_device {
            true => sys::UCS_MEMORY_TYPE_CUDA,
            false => sys::UCS_MEMORY_TYPE_HOST,
        };
        params.memory_type = memory_type;
        let mut memh = null_mut();
        // SAFETY: the range is mapped, and its owner is kept until it is unregistered.
        let status = unsafe {
            self.ucx
                .ucp_mem_map(self.workers.context, &raw const params, &raw mut memh)
        };
        self.ucx.check(status, what())?;
        let (mut buffer, mut len) = (null_mut(), 0);
        // SAFETY: just registered; the buffer is copied and given back.
        let packed = unsafe {
            let status =
                self.ucx
                    .ucp_rkey_pack(self.workers.context, memh, &raw mut buffer, &raw mut len);
            if let Err(e) = self.ucx.check(status, what()) {
                self.ucx.ucp_mem_unmap(self.workers.context, memh);
                return Err(e);
            }
            let packed = std::slice::from_raw_parts(buffer.cast::<u8>(), len).to_vec();
            self.ucx.ucp_rkey_buffer_release(buffer);
            packed
        };
        let registered = Registered {
            memh,
            memory_type,
            packed: packed.clone(),
            _owner: range.owner,
        };
        self.memory.insert(range.region, registered);
        Ok(packed)
    }

    fn unregister(&mut self, region: Region) {
        if let Some(known) = self.memory.remove(&region) {
            // SAFETY: registered above; no get of ours uses it, since its pool has no users.
            unsafe { self.ucx.ucp_mem_unmap(self.workers.context, known.memh) };
        }
    }

    /// Without keys, by the endpoint without keys that there is to the address: UCX may reset a connection that
    /// is made while an earlier one to the same worker ends. So these stay until they fail; one with keys ends
    /// with its path.
    fn connect(&mut self, peer: Peer) -> Result<(u64, Arc<EndpointState>)> {
        let known = self.endpoints.iter().find(|(_, endpoint)| {
            peer.keys.is_empty()
                && !endpoint.has_keys()
                && endpoint.state.is_open()
                && endpoint.address == peer.address
        });
        if let Some((id, endpoint)) = known {
            return Ok((*id, endpoint.state.clone()));
        }
        self.last_endpoint += 1;
        let id = self.last_endpoint;
        let incoming = self.incoming.clone();
        let closed = Box::new(move |e: &Error| incoming.endpoint_closed(id, e));
        let outward = self.workers.outward;
        let (mut endpoint, keys) = Endpoint::open(self.ucx, outward, peer, closed)?;
        let state = endpoint.state.clone();
        let unpacked = endpoint.unpack(self.ucx, keys);
        self.endpoints.insert(id, endpoint);
        if let Err(e) = unpacked {
            self.close(id);
            return Err(e);
        }
        Ok((id, state))
    }

    fn read(&mut self, id: u64, flight: &Arc<Flight>, gets: Vec<Get>) {
        match self.endpoints.get_mut(&id) {
            Some(endpoint) if endpoint.state.is_open() => {
                endpoint.push(self.ucx, flight, gets);
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
        let (ucx, memory) = (self.ucx, &self.memory);
        let post = |some, endpoint: &mut Endpoint| endpoint.post_turn(ucx, memory) | some;
        self.endpoints.values_mut().fold(false, post)
    }

    /// Closes what has failed, frees what has been closed.
    fn tidy(&mut self) {
        let ucx = self.ucx;
        self.endpoints.retain(|_, endpoint| !endpoint.tidy(ucx));
    }

    fn close(&mut self, id: u64) {
        if let Some(endpoint) = self.endpoints.get_mut(&id) {
            endpoint.close(self.ucx);
        }
    }

    /// Ends everything. When this returns, UCX touches no memory of ours any more.
    pub fn shut_down(&mut self) {
        let _current = enter(self.cuda);
        let ids: Vec<u64> = self.endpoints.keys().copied().collect();
        ids.into_iter().for_each(|id| self.close(id));
        let until = Instant::now() + LAST_WORDS;
        while !self.endpoints.is_empty() && Instant::now() < until {
            if !self.workers.progress() {
                std::thread::yield_now();
            }
            self.tidy();
        }
        // Before the memory is taken back: an endpoint that does not close may have gets that use it.
        self.workers.stop();
        for region in self.memory.keys().copied().collect::<Vec<_>>() {
            self.unregister(region);
        }
        self.workers.destroy();
        // Without a worker nobody can end these any more, nor write their memory.
        let why = err!(KVF_ERR_TRANSFER, "ucx has been shut down");
        self.endpoints
            .values_mut()
            .for_each(|endpoint| endpoint.abandon(&why));
        self.endpoints.clear();
        self.incoming.end(&why);
        let left = {
            let mut orders = self.queue.lock();
            orders.closed = true;
            std::mem::take(&mut orders.list)
        };
        left.into_iter().for_each(refuse);
        self.at_end.drain(..).for_each(|done| done());
    }
}

/// Makes the context the thread's. In one that has ended UCX says itself what it cannot do.
fn enter(context: Option<Context>) -> Option<Current> {
    context.and_then(|context| context.enter().ok())
}

/// An order that comes after the end.
pub fn refuse(order: Order) {
    match order {
        // Dropping the sender tells who waits.
        Order::Register(..)
        | Order::Connect(..)
        | Order::Sweep
        | Order::Disconnect(..)
        | Order::Close(_) => {}
        Order::Send(_, message) => message.over(),
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
