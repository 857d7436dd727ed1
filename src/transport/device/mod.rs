//! Peers on this host whose memory, or ours, is on a CUDA device. Adds devices to the paths of
//! [`inproc`](super::inproc) and [`shm`](super::shm), which go on to serve host memory and leases.
//!
//! | source | destination | how |
//! |---|---|---|
//! | device | device | one copy on a stream of ours |
//! | host | device | read into a pinned buffer as for the host, then copied |
//! | device | host | copied into a pinned buffer, then copied as for the host |
//!
//! Pinned host memory of this process counts as reachable by the device, and needs no buffer.

pub(super) mod flow;
pub(super) mod pack;
pub(super) mod socket;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, PoisonError, RwLock};

use super::inproc::InprocPath;
use super::shm::{Buffers, ShmPath};
use super::span::{self, Runs, check};
use super::{DataPath, PIECE_BYTES, ReadJob};
use crate::bail;
use crate::cuda::{Context, Copy, Devices, Mapping};
use crate::error::Result;
use crate::memory::{Entered, Pool};
use crate::observe::fault;
use crate::plan::{Batch, Binding};
use flow::{Flow, context, device_copy, staging};
use pack::{into_staging, out_of_staging};

/// Most bytes of a launch between two places of one context: a smaller one takes the device less time
/// than it costs, a larger one would hold up a cancel for longer than some milliseconds.
const LAUNCH_BYTES: u64 = 64 << 20;

/// Most patterns of a launch, on average: they bound its table.
const LAUNCH_PATTERNS: u64 = 16 << 10;

/// How host memory and leases of the source are reached.
pub enum HostPath {
    /// Same process.
    Inproc(InprocPath),
    /// Same host.
    Shm(ShmPath),
}

/// A pool of the source that is mapped through CUDA IPC.
pub struct MappedPool {
    /// Its allocation; pools may share one.
    mapping: Option<Arc<Mapping>>,
    at: At,
    gone: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl MappedPool {
    /// A pool of `bytes` bytes from `offset` of a mapping. `gone` is called when it is no longer
    /// used here.
    pub fn new(
        mapping: Arc<Mapping>,
        offset: u64,
        bytes: u64,
        gone: Box<dyn FnOnce() + Send + Sync>,
    ) -> Self {
        let at = At {
            address: mapping.base() + offset,
            bytes,
            context: mapping.context(),
            own: true,
        };
        Self {
            mapping: Some(mapping),
            at,
            gone: Some(gone),
        }
    }
}

impl Drop for MappedPool {
    fn drop(&mut self) {
        self.mapping = None;
        if let Some(gone) = self.gone.take() {
            gone();
        }
    }
}

/// What keeps a batch's sources as they are until it is copied.
pub(super) struct Open<'a> {
    _entered: Vec<Entered<'a>>,
    mapped: Vec<(u32, Arc<MappedPool>)>,
}

impl Open<'_> {
    /// For sources that are elsewhere.
    pub(super) fn nothing() -> Self {
        Self {
            _entered: Vec::new(),
            mapped: Vec::new(),
        }
    }
}

/// Reads a peer of this host that has, or for whom we have, device memory.
pub struct DevicePath {
    host: HostPath,
    devices: Arc<Devices>,
    mapped: RwLock<BTreeMap<u32, Arc<MappedPool>>>,
    /// Ids of all pools that were ever mapped.
    exported: BTreeSet<u32>,
}

/// Where one side of a pattern is for a device.
#[derive(Clone, Copy)]
struct At {
    address: u64,
    bytes: u64,
    context: Context,
    /// Memory of the device itself, and not of the host.
    own: bool,
}

/// What one batch does on one context.
#[derive(Default)]
struct Work {
    /// Between two places that the device reaches.
    direct: Vec<Copy>,
    direct_bytes: u64,
    /// Host to device.
    up: Batch,
    /// Device to host.
    down: Batch,
}

impl DevicePath {
    /// Adds devices to `host`. `mapped`: the source's device pools by id, opened here (same host).
    pub fn new(
        host: HostPath,
        devices: Arc<Devices>,
        mapped: BTreeMap<u32, Arc<MappedPool>>,
    ) -> Self {
        Self {
            host,
            devices,
            exported: mapped.keys().copied().collect(),
            mapped: RwLock::new(mapped),
        }
    }

    fn source(&self, id: u32, open: &Open<'_>) -> Option<At> {
        if let Some((_, pool)) = open.mapped.iter().find(|(mapped, _)| *mapped == id) {
            return Some(pool.at);
        }
        match &self.host {
            HostPath::Inproc(path) => path.pool(id).and_then(at),
            HostPath::Shm(_) => None,
        }
    }

    fn enter(&self, batch: &Batch) -> Result<Open<'_>> {
        let entered = match &self.host {
            HostPath::Inproc(path) => path.enter(batch)?,
            HostPath::Shm(_) => Vec::new(),
        };
        let mut open = Open {
            _entered: entered,
            mapped: Vec::new(),
        };
        if self.exported.is_empty() {
            return Ok(open);
        }
        let all = self.mapped.read().unwrap_or_else(PoisonError::into_inner);
        for id in batch.shapes().map(|(shape, _)| shape.src_pool) {
            if !self.exported.contains(&id) || open.mapped.iter().any(|(known, _)| *known == id) {
                continue;
            }
            match all.get(&id) {
                Some(pool) => open.mapped.push((id, pool.clone())),
                None => bail!(KVF_ERR_EXPIRED, "pool {id} was unregistered by the source"),
            }
        }
        Ok(open)
    }

    fn copy_on_host<'a>(
        &'a self,
        batch: &Batch,
        job: &'a ReadJob,
        pool: impl Fn(u32) -> Option<&'a Pool>,
        buffers: &mut Buffers,
    ) -> Result<u64> {
        let stop = || job.is_cancelled();
        match &self.host {
            HostPath::Inproc(path) => path.copy_batch(batch, pool, job.bytes(), buffers.scratch()),
            HostPath::Shm(path) => path.copy_batch(batch, pool, stop, job.bytes(), buffers),
        }
    }

    /// Sorts a batch by the context that does it; the rest is the host's.
    fn sort(
        &self,
        batch: &Batch,
        job: &ReadJob,
        open: &Open<'_>,
        host: &mut Batch,
    ) -> Result<BTreeMap<Context, Work>> {
        let mut all: BTreeMap<Context, Work> = BTreeMap::new();
        let mut common = false;
        for pattern in batch.iter() {
            let pool = job
                .pool(pattern.dst_pool)
                .ok_or_else(|| span::unknown_pool("this side", pattern.dst_pool))?;
            let (src, dst) = (self.source(pattern.src_pool, open), at(pool));
            match (src, dst) {
                (Some(src), Some(dst)) if src.own || dst.own => {
                    let bytes = check(&pattern, src.bytes, dst.bytes)?;
                    common |= span::overlap((src.address, src.bytes), (dst.address, dst.bytes));
                    // Device to device the destination's context does it: the mapping is for it.
                    let does = if dst.own { dst.context } else { src.context };
                    let from = src.own && src.context != does;
                    let from = from.then_some(src.context);
                    let work = all.entry(does).or_default();
                    if bytes > 0 {
                        let copy = device_copy(&pattern, src.address, dst.address, from)?;
                        work.direct.push(copy);
                        work.direct_bytes += bytes;
                    }
                }
                (_, Some(dst)) if dst.own => all.entry(dst.context).or_default().up.push(pattern),
                (Some(src), _) if src.own => {
                    all.entry(src.context).or_default().down.push(pattern);
                }
                _ => host.push(pattern),
            }
        }
        if common && !fault::deviates("cuda_overlap") {
            self.refuse_common(batch, job, open)?;
        }
        Ok(all)
    }

    /// As on the host: no byte may be read and written by one batch.
    fn refuse_common(&self, batch: &Batch, job: &ReadJob, open: &Open<'_>) -> Result<()> {
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for pattern in batch.iter() {
            let dst = job.pool(pattern.dst_pool).and_then(|pool| at(pool));
            let (Some(src), Some(dst)) = (self.source(pattern.src_pool, open), dst) else {
                continue;
            };
            if check(&pattern, src.bytes, dst.bytes)? == 0 {
                continue;
            }
            for (from, to) in Runs::new(&pattern) {
                reads.push((src.address + from, pattern.run));
                writes.push((dst.address + to, pattern.run));
            }
        }
        span::refuse_common(reads, writes)
    }

    /// Most bytes of one batch of a binding.
    fn batch_bytes(&self, binding: &Binding, job: &ReadJob) -> u64 {
        let mapped = self.mapped.read().unwrap_or_else(PoisonError::into_inner);
        let near = |src, dst| {
            let src = match &self.host {
                HostPath::Inproc(path) => path.pool(src).and_then(at),
                HostPath::Shm(_) => mapped.get(&src).map(|pool| pool.at),
            };
            let dst = job.pool(dst).and_then(|pool| at(pool));
            match (src, dst) {
                (Some(src), Some(dst)) => (src.own || dst.own) && src.context == dst.context,
                _ => false, // through a buffer
            }
        };
        if !binding.all_pools(near) {
            return PIECE_BYTES;
        }
        let each = binding.bytes() / binding.patterns().max(1);
        each.saturating_mul(LAUNCH_PATTERNS)
            .clamp(PIECE_BYTES, LAUNCH_BYTES)
    }

    /// Starts a batch; what the host does alone is done when it returns.
    fn start<'a>(
        &'a self,
        batch: &Batch,
        job: &'a ReadJob,
        flow: &mut Flow<'a>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let stop = || job.is_cancelled();
        // The source agent waits for these before it says "may be freed now".
        let open = Rc::new(self.enter(batch)?);
        let mut host = Batch::new();
        for (context, work) in self.sort(batch, job, &open, &mut host)? {
            if !work.direct.is_empty() {
                let mut lane = flow.lane(context)?;
                // SAFETY: checked against both pools, which the job and `open` keep; slots are
                // read and written by this job only, by the agent's bookkeeping.
                let enqueued = unsafe { lane.copy(&work.direct, &stop) };
                let started = flow.start(lane, open.clone(), Batch::new(), work.direct_bytes);
                enqueued.and(started)?;
            }
            if !work.up.is_empty() {
                self.up(&work.up, context, &open, job, flow, buffers)?;
            }
            if !work.down.is_empty() {
                self.down(&work.down, context, &open, flow)?;
            }
        }
        if !host.is_empty() {
            let pool = |id| job.pool(id).map(|pool| &**pool);
            job.add_moved(self.copy_on_host(&host, job, pool, buffers)?);
        }
        Ok(())
    }

    /// Host to device: read into the lane's buffer now, from there by the device.
    fn up<'a>(
        &'a self,
        batch: &Batch,
        context: Context,
        open: &Rc<Open<'a>>,
        job: &'a ReadJob,
        flow: &mut Flow<'a>,
        buffers: &mut Buffers,
    ) -> Result<()> {
        let mut lane = flow.lane(context)?;
        let (buffer, device) = staging(&mut lane)?;
        let (mut reads, mut copies, mut bytes) = (Batch::new(), Vec::new(), 0);
        for pattern in batch.iter() {
            let pool = job
                .pool(pattern.dst_pool)
                .ok_or_else(|| span::unknown_pool("this side", pattern.dst_pool))?;
            let out = out_of_staging(&pattern, bytes);
            reads.push(into_staging(&pattern, bytes));
            let moved = check(&out, PIECE_BYTES, pool.bytes())?;
            if moved > 0 {
                copies.push(device_copy(&out, device, pool.base() as u64, None)?);
            }
            bytes += moved;
        }
        let read = self.read(&reads, job, &buffer, buffers)?;
        if read < bytes {
            self.devices.give_back(lane);
            return Ok(()); // cancelled in the middle
        }
        // SAFETY: the buffer is the lane's, the destination was checked and belongs to the job.
        let enqueued = unsafe { lane.copy(&copies, &|| job.is_cancelled()) };
        let started = flow.start(lane, open.clone(), Batch::new(), bytes);
        enqueued.and(started)
    }

    fn read(
        &self,
        reads: &Batch,
        job: &ReadJob,
        buffer: &Pool,
        buffers: &mut Buffers,
    ) -> Result<u64> {
        let stop = || job.is_cancelled();
        let (pool, whole) = (|_| Some(buffer), job.bytes());
        match &self.host {
            HostPath::Inproc(path) => path.copy_batch(reads, pool, whole, buffers.scratch()),
            HostPath::Shm(path) => path.copy_batch(reads, pool, stop, whole, buffers),
        }
    }

    /// Device to host: into the lane's buffer by the device, from there when it is done.
    fn down<'a>(
        &'a self,
        batch: &Batch,
        context: Context,
        open: &Rc<Open<'a>>,
        flow: &mut Flow<'a>,
    ) -> Result<()> {
        let mut lane = flow.lane(context)?;
        let (_, device) = staging(&mut lane)?;
        let (mut land, mut copies, mut bytes) = (Batch::new(), Vec::new(), 0);
        for pattern in batch.iter() {
            let Some(src) = self.source(pattern.src_pool, open) else {
                return Err(span::unknown_pool("the peer", pattern.src_pool));
            };
            let into = into_staging(&pattern, bytes);
            let moved = check(&into, src.bytes, PIECE_BYTES)?;
            if moved > 0 {
                copies.push(device_copy(&into, src.address, device, None)?);
                land.push(out_of_staging(&pattern, bytes));
            }
            bytes += moved;
        }
        // SAFETY: the buffer is the lane's, the source was checked and is kept by `open` or the
        // mapping.
        let enqueued = unsafe { lane.copy(&copies, &|| flow.is_cancelled()) };
        let started = flow.start(lane, open.clone(), land, bytes);
        enqueued.and(started)
    }
}

/// Where a pool is for a device; `None`: it does not reach it.
fn at(pool: &Pool) -> Option<At> {
    let place = pool.on_device()?;
    Some(At {
        address: place.address,
        bytes: pool.bytes(),
        context: context(place),
        own: pool.is_device(),
    })
}

impl DataPath for DevicePath {
    fn name(&self) -> &'static str {
        match &self.host {
            HostPath::Inproc(path) => path.name(),
            HostPath::Shm(_) if !self.exported.is_empty() => "cuda_ipc",
            HostPath::Shm(path) => path.name(),
        }
    }

    fn reason(&self) -> String {
        match &self.host {
            HostPath::Inproc(path) => format!("{}, with device memory", path.reason()),
            HostPath::Shm(path) => format!(
                "{}, {} in device memory",
                path.reason(),
                self.exported.len()
            ),
        }
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        let mut flow = Flow::new(&self.devices, job);
        let (mut batch, mut buffers) = (Batch::new(), Buffers::default());
        let mut outcome = Ok(());
        let most = |binding: &Binding| self.batch_bytes(binding, job);
        while outcome.is_ok() && job.next_of(most, &mut batch) {
            outcome = self.start(&batch, job, &mut flow, &mut buffers);
            batch.clear();
        }
        if fault::deviates("cuda_attest_early") && self.attest_host(job) == Ok(true) {
            job.attest_early();
        }
        flow.finish(outcome)?;
        match &self.host {
            HostPath::Shm(path) => path.after(&buffers),
            HostPath::Inproc(_) => Ok(()),
        }
    }

    fn attest(&self, job: &ReadJob) -> Result<bool> {
        // Every `run` has waited for its copies.
        Ok(job.attested_early() || self.attest_host(job)?)
    }

    fn mapped(&self) -> usize {
        let mapped = self.mapped.read();
        mapped.unwrap_or_else(PoisonError::into_inner).len()
    }

    fn unmap(&self, pool: u32) -> bool {
        let mut mapped = self.mapped.write().unwrap_or_else(PoisonError::into_inner);
        let gone = mapped.remove(&pool);
        drop(mapped);
        gone.is_some()
    }

    fn inline_bytes(&self) -> u64 {
        0 // waiting for a device is not for the caller's thread
    }
}

impl DevicePath {
    fn attest_host(&self, job: &ReadJob) -> Result<bool> {
        match &self.host {
            HostPath::Inproc(path) => path.attest(job),
            HostPath::Shm(path) => path.attest(job),
        }
    }
}

impl fmt::Debug for DevicePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePath")
            .field("exported", &self.exported)
            .finish_non_exhaustive()
    }
}
