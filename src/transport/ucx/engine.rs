//! One agent's UCX: context, worker and progress thread, made when the first peer needs them.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::am::{self, Accept, Incoming, Message};
use super::endpoint::{EndpointState, Peer, check_lengths};
use super::library::Library;
use super::progress::{Order, Progress, Queue, Range, refuse};
use super::rma::{DeviceGets, Flight, Get, Region, SCRATCH_BYTES, card_options};
use super::ucx_sys as sys;
use crate::bail;
use crate::cuda::{Context, DeviceBytes, RemoteWrites};
use crate::error::{Error, Result, Status};
use crate::memory::{LeaseTable, Pool};
use crate::observe::{self, fault};
use crate::runtime::{Thread, spawn};

/// How an agent wants its UCX.
pub struct Config {
    /// Of the thread.
    pub name: String,
    /// CPUs of the thread; empty = inherited.
    pub affinity: Vec<u32>,
    /// Also gets. Without them nobody can ask UCX to read our memory.
    pub gets: bool,
    /// Gets may be answered in software: for tests, which have no card.
    pub software: bool,
    /// Of the agent's device pools, if they are of one; for gets of and into them.
    pub cuda: Option<Context>,
    /// `UCX_TLS`, unless the environment has one.
    pub lanes: &'static str,
    /// UCX listens on the loopback interface only, as the agent does.
    pub loopback: bool,
    /// How long the thread looks at UCX before it sleeps, while something is on its way.
    pub spin: Duration,
    /// Longest wait for the thread's answers.
    pub patience: Duration,
}

/// The handle; all calls are answered by the progress thread. Dropping it ends the thread.
pub struct Engine {
    ucx: &'static Library,
    queue: Arc<Queue>,
    thread: Mutex<Option<Thread>>,
    address: Vec<u8>,
    /// What was asked to be registered, with its packed key once the thread has answered.
    keys: Mutex<BTreeMap<Region, Option<Vec<u8>>>>,
    /// Kept from before it is registered: an answer may come too late.
    scratch: Mutex<Option<Arc<DeviceBytes>>>,
    incoming: Arc<Incoming>,
    gets: bool,
    device: DeviceGets,
    pub(super) patience: Duration,
}

impl Engine {
    /// Loads UCX and starts the thread. `accept` lets readers in; `on_panic` hears of a panic there.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` without a usable UCX, `KVF_ERR_SYSTEM` without a thread.
    pub fn start(
        config: Config,
        accept: Box<dyn Accept>,
        on_panic: impl Fn() + Send + 'static,
    ) -> Result<Arc<Self>> {
        let queue = Queue::new().map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "eventfd", &e))?;
        let queue = Arc::new(queue);
        let (reply, answer) = sync_channel(1);
        let (own, spin) = (queue.clone(), config.spin);
        let incoming = Arc::new(Incoming::new(accept));
        let features = match config.gets {
            true => sys::UCP_FEATURE_AM | sys::UCP_FEATURE_RMA,
            false => sys::UCP_FEATURE_AM,
        };
        let (gets, came) = (config.gets, incoming.clone());
        let (software, cuda) = (config.software, config.cuda.filter(|_| config.gets));
        // Also opens the library: on a thread that blocks all signals, as the threads that UCX may
        // start inherit.
        let (lanes, loopback) = (config.lanes, config.loopback);
        let thread = spawn(config.name, &config.affinity, move || {
            let begun = Library::get().and_then(|ucx| {
                let mut options = options(ucx, gets, lanes, loopback);
                if gets && !software {
                    options.extend(card_options(ucx, cuda.is_some()));
                }
                let (progress, address) =
                    Progress::new(ucx, features, &options, own, came, spin, cuda)?;
                Ok((ucx, progress, address))
            });
            let mut progress = match begun {
                Ok((ucx, progress, address)) => {
                    let device = match gets {
                        true => DeviceGets::of(ucx, progress.knows_cuda(), cuda, software),
                        false => DeviceGets::none(),
                    };
                    let _ = reply.send(Ok((ucx, address, device)));
                    progress
                }
                Err(e) => {
                    let _ = reply.send(Err(e));
                    return;
                }
            };
            // AssertUnwindSafe: after a panic only what ends everything is called.
            let run = std::panic::AssertUnwindSafe(|| progress.run());
            let panicked = std::panic::catch_unwind(run).is_err();
            progress.shut_down();
            if panicked {
                on_panic();
            }
        })?;
        let (ucx, address, device) = match answer.recv_timeout(config.patience) {
            Ok(begun) => begun?,
            Err(_) => {
                queue.push(Order::End(None)); // it may start yet
                bail!(
                    KVF_ERR_UNSUPPORTED,
                    "UCX did not start within {:?}",
                    config.patience
                );
            }
        };
        Ok(Arc::new(Self {
            ucx,
            queue,
            thread: Mutex::new(Some(thread)),
            address,
            keys: Mutex::default(),
            scratch: Mutex::default(),
            incoming,
            gets,
            device,
            patience: config.patience,
        }))
    }

    /// UCX's version and where it was found, for people.
    pub fn describe(&self) -> String {
        format!("UCX {} from {}", self.ucx.version(), self.ucx.path())
    }

    /// As in `1.13.1`.
    pub fn version(&self) -> &str {
        self.ucx.version()
    }

    /// Whether gets are possible.
    pub fn has_gets(&self) -> bool {
        self.gets
    }

    /// Whether device memory of peers can be read by gets.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` with the reason.
    pub fn reads_devices(&self) -> Result<()> {
        self.device.reads.clone()
    }

    /// The context whose device memory gets reach here, and what they need after writing it.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` with the reason.
    pub fn device(&self) -> Result<(Context, RemoteWrites)> {
        self.device.own.clone()
    }

    /// Where peers connect to.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Whether the thread has ended; whoever needs UCX again makes a new engine.
    pub fn has_ended(&self) -> bool {
        self.queue.is_closed()
    }

    /// Registers a pool once; its key for peers.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with UCX's text.
    pub fn register_pool(&self, pool: &Arc<Pool>) -> Result<Vec<u8>> {
        let (base, bytes) = (pool.base().expose_provenance() as u64, pool.bytes());
        let at = (base, bytes, pool.is_device());
        self.register(Region::Pool(pool.id()), at, pool.clone())
            .map_err(|e| e.context(format_args!("pool {}", pool.id())))
    }

    /// Registers a pool of device memory, with the card too: UCX says nothing when only some of its lanes take
    /// the memory, but a key then names fewer of them than that of the memory that gets are tried with.
    ///
    /// # Errors
    /// As for [`Self::register_pool`]; `KVF_ERR_UNSUPPORTED` if the card does not take the pool.
    pub fn register_device_pool(&self, pool: &Arc<Pool>) -> Result<()> {
        self.scratch()?;
        let tried = self
            .keys()
            .get(&Region::Scratch)
            .and_then(Option::as_ref)
            .map_or(0, Vec::len);
        if self.register_pool(pool)?.len() < tried {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "pool {}: the card does not take its {} bytes",
                pool.id(),
                pool.bytes()
            );
        }
        Ok(())
    }

    /// Registers the lease table once; its key for peers.
    ///
    /// # Errors
    /// As for [`Self::register_pool`].
    pub fn register_leases(&self, leases: &Arc<LeaseTable>) -> Result<Vec<u8>> {
        let at = (leases.address(), leases.bytes(), false);
        self.register(Region::Leases, at, leases.clone())
    }

    /// Device memory to try gets with, [`SCRATCH_BYTES`] at this address, registered.
    ///
    /// # Errors
    /// As for [`Self::device`], and the driver's and UCX's.
    pub fn scratch(&self) -> Result<u64> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match &*scratch {
            Some(bytes) => bytes.clone(),
            None => {
                let (context, _) = self.device()?;
                let bytes = DeviceBytes::new(context, SCRATCH_BYTES as usize)?;
                scratch.insert(Arc::new(bytes)).clone()
            }
        };
        let address = bytes.address();
        self.register(Region::Scratch, (address, SCRATCH_BYTES, true), bytes)?;
        Ok(address)
    }

    fn register(
        &self,
        region: Region,
        (base, bytes, on_device): (u64, u64, bool),
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Vec<u8>> {
        // Noted before it is asked for: an answer that comes too late changes nothing, the pool is
        // registered and has to be taken back.
        if let Some(key) = self.keys().entry(region).or_default() {
            return Ok(key.clone());
        }
        let range = Range {
            region,
            base,
            bytes,
            on_device,
            owner,
        };
        let (reply, answer) = sync_channel(1);
        self.order(Order::Register(range, reply))?;
        let answer = match fault::deviates("ucx_registers_late") {
            true => sync_channel(1).1, // nobody waits for the thread's
            false => answer,
        };
        let key = self.answer(&answer)?;
        self.keys().insert(region, Some(key.clone()));
        Ok(key)
    }

    fn keys(&self) -> std::sync::MutexGuard<'_, BTreeMap<Region, Option<Vec<u8>>>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the pool is registered, or was asked to be.
    pub fn has_pool(&self, pool: u32) -> bool {
        self.keys().contains_key(&Region::Pool(pool))
    }

    /// Takes a pool back. True: it was not registered; false: `done` is called when it is so no
    /// more.
    pub fn unregister_pool(&self, pool: u32, done: impl FnOnce() + Send + 'static) -> bool {
        let region = Region::Pool(pool);
        if self.keys().remove(&region).is_none() {
            return true;
        }
        if let Some(order) = self.queue.push(Order::Unregister(region, Box::new(done))) {
            refuse(order);
        }
        false
    }

    /// Connects to a peer's address; nothing is sent before the first get. The endpoint's number
    /// and its state.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` for an address or a key of an impossible length, else UCX's text.
    pub fn connect(
        &self,
        name: String,
        address: Vec<u8>,
        keys: Vec<(Region, Vec<u8>)>,
    ) -> Result<(u64, Arc<EndpointState>)> {
        check_lengths(&address, &keys)?;
        let peer = Peer {
            name,
            address,
            keys,
        };
        let (reply, answer) = sync_channel(1);
        self.order(Order::Connect(peer, reply))?;
        self.answer(&answer)
    }

    /// Hands gets over; their end is told by the flight.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: the engine has ended; nothing was handed over.
    ///
    /// # Safety
    /// The local memory must be writable until the flight has no batch in flight.
    pub unsafe fn read(&self, endpoint: u64, flight: &Arc<Flight>, gets: Vec<Get>) -> Result<()> {
        if gets.is_empty() {
            return Ok(());
        }
        flight.begin(gets.len());
        if let Some(order) = self.queue.push(Order::Read(endpoint, flight.clone(), gets)) {
            refuse(order); // lands it
            bail!(KVF_ERR_TRANSFER, "ucx has been shut down");
        }
        Ok(())
    }

    /// Sends a message; if it cannot be sent, the endpoint fails.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: the endpoint has failed, or the engine has ended.
    pub(super) fn send(&self, endpoint: u64, message: Box<Message>) -> Result<()> {
        self.order(Order::Send(endpoint, message))
    }

    /// # Errors
    /// `KVF_ERR_TRANSFER`: why nothing goes through the endpoint any more.
    pub(super) fn check_open(&self, endpoint: &EndpointState) -> Result<()> {
        match endpoint.is_open() {
            true => Ok(()),
            false => Err(endpoint.why_closed(self.ucx)),
        }
    }

    pub(super) fn incoming(&self) -> &Arc<Incoming> {
        &self.incoming
    }

    /// A flight was stopped: its gets that UCX does not have are dropped.
    pub fn sweep(&self) {
        self.queue.push(Order::Sweep);
    }

    /// Force-closes an endpoint.
    pub fn close_endpoint(&self, endpoint: u64) {
        self.queue.push(Order::Close(endpoint));
    }

    /// Ends the thread and UCX's worker: nobody can read our memory through it any more, and nothing
    /// of ours is written. Then calls `done`.
    pub fn end(&self, done: Option<Box<dyn FnOnce() + Send>>) {
        if let Some(order) = self.queue.push(Order::End(done)) {
            refuse(order);
        }
    }

    /// Ends it and waits for the thread; false: it is still busy and was left behind.
    pub fn close(&self, deadline: Instant) -> bool {
        self.end(None);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        thread.is_none_or(|thread| thread.join_until(deadline))
    }

    fn order(&self, order: Order) -> Result<()> {
        if let Some(order) = self.queue.push(order) {
            refuse(order);
            bail!(KVF_ERR_TRANSFER, "ucx has been shut down");
        }
        Ok(())
    }

    fn answer<T>(&self, answer: &Receiver<Result<T>>) -> Result<T> {
        match answer.recv_timeout(self.patience) {
            Ok(result) => result,
            Err(_) => bail!(
                KVF_ERR_TRANSFER,
                "ucx's thread did not answer within {:?}",
                self.patience
            ),
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !observe::marks::forked() {
            self.end(None);
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("ucx", &self.describe())
            .finish_non_exhaustive()
    }
}

/// kvferry registers what it uses, for good; a cache would watch all of the engine's memory.
const NO_CACHES: [(&str, &str); 2] = [("RCACHE_ENABLE", "n"), ("MEMTYPE_CACHE", "n")];

/// Options that kvferry sets; what the environment names stays as it is.
fn options(
    ucx: &Library,
    gets: bool,
    lanes: &'static str,
    loopback: bool,
) -> Vec<(&'static str, &'static str)> {
    let unset = |name: &str| std::env::var_os(name).is_none();
    let mut options = NO_CACHES.to_vec();
    if !gets && unset("UCX_ADAPTIVE_PROGRESS") {
        // UCX would leave the worker that messages come to, and that has no endpoints, to a thread of its
        // own, which would wake ours for each of them.
        options.push(("ADAPTIVE_PROGRESS", "n"));
    }
    if unset("UCX_TLS") {
        options.push(("TLS", lanes));
    }
    if unset("UCX_TCP_TX_SEG_SIZE") && unset("UCX_TCP_RX_SEG_SIZE") {
        options.extend(ucx.tcp_segments().map(|name| (name, am::SEGMENT)));
    }
    if loopback && unset("UCX_NET_DEVICES") {
        options.push(("NET_DEVICES", "lo"));
    }
    options
}

/// Whether this host has a card that may be able to do RMA; UCX is not asked.
pub fn has_card() -> bool {
    const CARDS: &str = "/sys/class/infiniband";
    std::fs::read_dir(CARDS).is_ok_and(|mut list| list.next().is_some())
}

/// Whether UCX, left to itself, can tell memory of CUDA devices. Asked with all its lanes: it warns of one that
/// is named and not there.
///
/// # Errors
/// `KVF_ERR_UNSUPPORTED` without a usable UCX.
pub fn knows_cuda() -> Result<bool> {
    let ucx = Library::get()?;
    let context = ucx.context(sys::UCP_FEATURE_RMA, &NO_CACHES)?;
    // SAFETY: just made, and this thread's alone.
    unsafe {
        let knows = ucx.knows_cuda(context);
        ucx.ucp_cleanup(context);
        Ok(knows)
    }
}

/// Whether this host has a card that reads a peer's memory without the peer's processor.
///
/// # Errors
/// `KVF_ERR_UNSUPPORTED` with the reason.
pub fn hardware_rma() -> Result<()> {
    if !has_card() {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "no card for hardware RMA here; force it by naming ucx"
        );
    }
    let ucx = Library::get()?;
    // UCX 1.13 has no call that lists transports; a context with these alone is made or is not.
    match ucx.context(sys::UCP_FEATURE_RMA, &[("TLS", "rc,dc")]) {
        Ok(context) => {
            // SAFETY: just made, and not used.
            unsafe { ucx.ucp_cleanup(context) };
            Ok(())
        }
        Err(e) => bail!(
            KVF_ERR_UNSUPPORTED,
            "no lane with hardware RMA; force it by naming ucx: {}",
            e.text
        ),
    }
}
