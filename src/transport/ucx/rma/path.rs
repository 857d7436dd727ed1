//! Reading one peer by gets.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::device::SCRATCH_BYTES;
use super::flight::{Flight, Get, LANDING_WORDS, Region};
use crate::cuda::RemoteWrites;
use crate::error::Result;
use crate::memory::{LEASE_HEAD_BYTES, NONCE_BYTES, Pool};
use crate::plan::Batch;
use crate::transport::span::{self, Runs};
use crate::transport::ucx::endpoint::EndpointState;
use crate::transport::ucx::engine::Engine;
use crate::transport::{DataPath, LeaseRef, ReadJob};
use crate::{bail, err};

/// Bytes of one batch.
const BATCH_BYTES: u64 = 1 << 20;
/// Batches and gets that one worker has handed over at most: plenty, so that the progress thread has
/// work however late the worker wakes up. A cancel drops what UCX does not have yet.
const DEPTH: u64 = 32;
const GETS: u64 = 16_384;
/// How long gets that UCX has may go on after a cancel, before the endpoint is closed under them.
const GRACE: Duration = Duration::from_millis(500);
/// How long a forced close may take before all of this agent's UCX is ended.
const LAST_RESORT: Duration = Duration::from_secs(5);

/// A source agent, as it announced itself.
pub struct Source {
    /// For people.
    pub name: String,
    /// Of its UCX worker.
    pub address: Vec<u8>,
    /// Packed keys of pools and lease table.
    pub keys: Vec<(Region, Vec<u8>)>,
    /// Its pools, by id.
    pub pools: BTreeMap<u32, SourcePool>,
    /// Address and length of the lease table.
    pub leases: (u64, u64),
    /// At the head of the lease table.
    pub nonce: [u8; NONCE_BYTES],
}

/// A pool of the source.
#[derive(Clone, Copy)]
pub struct SourcePool {
    /// Of its first byte there.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// Memory of a CUDA device there.
    pub on_device: bool,
}

/// Reads one source agent. Dropping it force-closes the endpoint.
pub struct UcxPath {
    engine: Arc<Engine>,
    endpoint: u64,
    state: Arc<EndpointState>,
    name: String,
    reason: String,
    pools: BTreeMap<u32, SourcePool>,
    leases: (u64, u64),
    nonce: [u8; NONCE_BYTES],
    patience: Duration,
}

impl UcxPath {
    /// Connects, and reads the nonce through the data path within `patience`.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` for an announcement that cannot be; else UCX's text.
    pub fn new(
        engine: Arc<Engine>,
        source: Source,
        reason: String,
        patience: Duration,
    ) -> Result<Self> {
        let pools = source.pools.values().map(|pool| (pool.address, pool.bytes));
        for (base, bytes) in pools.chain([source.leases]) {
            if base.checked_add(bytes).is_none() {
                bail!(
                    KVF_ERR_PROTOCOL,
                    "{} announces {bytes} bytes at {base:#x}, which wrap around",
                    source.name
                );
            }
        }
        if source.leases.1 < LEASE_HEAD_BYTES + 8 {
            bail!(
                KVF_ERR_PROTOCOL,
                "{} announces a lease table of {} bytes",
                source.name,
                source.leases.1
            );
        }
        let keyed: BTreeSet<Region> = source.keys.iter().map(|(region, _)| *region).collect();
        let tried = source.pools.iter();
        let tried = tried.filter(|(id, _)| keyed.contains(&Region::Pool(**id)));
        let tried: Vec<(u32, SourcePool)> = tried.map(|(id, pool)| (*id, *pool)).collect();
        let (endpoint, state) = engine.connect(source.name.clone(), source.address, source.keys)?;
        let path = Self {
            engine,
            endpoint,
            state,
            name: source.name,
            reason,
            pools: source.pools,
            leases: source.leases,
            nonce: source.nonce,
            patience,
        };
        path.read_word(path.leases.0 + LEASE_HEAD_BYTES, None)?;
        path.try_devices(&tried)?;
        Ok(path)
    }

    /// Where one side has device memory: whether the card reads each pool into the kind of memory that there
    /// is here. What comes is thrown away.
    fn try_devices(&self, pools: &[(u32, SourcePool)]) -> Result<()> {
        let own = self.engine.device().is_ok();
        if !own && !pools.iter().any(|(_, pool)| pool.on_device) {
            return Ok(());
        }
        let flight = Flight::new()?;
        let (local, to) = match own {
            true => (self.engine.scratch()?, Some(Region::Scratch)),
            false => (flight.landing().expose_provenance() as u64, None),
        };
        const TRIED: u64 = 8;
        const _: () = assert!(TRIED <= SCRATCH_BYTES && TRIED <= LANDING_WORDS as u64 * 8);
        let gets = pools.iter().map(|(id, pool)| Get {
            local: std::ptr::with_exposed_provenance_mut(local as usize),
            remote: pool.address,
            bytes: TRIED.min(pool.bytes),
            from: Region::Pool(*id),
            to,
        });
        // SAFETY: the scratch memory lives as long as the engine, the landing words as long as the
        // flight, which every get holds.
        unsafe { self.engine.read(self.endpoint, &flight, gets.collect())? };
        self.finish(&flight, None)
            .map_err(|e| e.context("the card does not reach device memory"))
    }

    /// Waits for the end of what was asked for, at most the patience; else the endpoint is closed. It is not
    /// for a cancel: others use it, and what is still on its way writes memory of the flight or the scratch.
    fn finish(&self, flight: &Flight, job: Option<&ReadJob>) -> Result<()> {
        let deadline = Instant::now() + self.patience;
        let wake = job.map(ReadJob::wake).transpose()?;
        let mut late = false;
        while flight.in_flight() > 0 && !late && !job.is_some_and(ReadJob::is_cancelled) {
            late = !flight.wait(0, wake.map(AsFd::as_fd), Some(deadline));
        }
        if flight.in_flight() > 0 && late {
            let patience = self.patience;
            flight.fail(err!(KVF_ERR_TRANSFER, "no answer within {patience:?}"));
            self.engine.close_endpoint(self.endpoint);
        } else if flight.in_flight() > 0 {
            flight.fail(err!(KVF_ERR_CANCELLED, "cancelled"));
        }
        flight.take_error().map_or(Ok(()), Err)
    }

    /// The word at an address of the lease table, once the nonce at its head is right.
    fn read_word(&self, word: u64, job: Option<&ReadJob>) -> Result<u64> {
        let flight = Flight::new()?;
        let landing = flight.landing();
        let get = |at: usize, remote, bytes| Get {
            local: landing.wrapping_add(at),
            remote,
            bytes,
            from: Region::Leases,
            to: None,
        };
        let gets = vec![
            get(0, self.leases.0, NONCE_BYTES as u64),
            get(NONCE_BYTES, word, 8),
        ];
        // SAFETY: the landing words live as long as the flight, which every get holds.
        unsafe { self.engine.read(self.endpoint, &flight, gets)? };
        self.finish(&flight, job)
            .map_err(|e| e.context(format_args!("ucx read of {}'s lease table", self.name)))?;
        let Some(words) = flight.landed_words() else {
            bail!(KVF_ERR_INTERNAL, "a get that is over is still on its way");
        };
        const _: () = assert!(LANDING_WORDS * 8 == NONCE_BYTES + 8);
        let found = [words[0].to_ne_bytes(), words[1].to_ne_bytes()].concat();
        if found != self.nonce {
            bail!(
                KVF_ERR_PEER_LOST,
                "{} does not hold the announced lease table: another program answers there",
                self.name
            );
        }
        Ok(words[2])
    }

    /// One worker's part of a job, as long as nothing goes wrong.
    fn read(&self, job: &ReadJob, flight: &Arc<Flight>) -> Result<()> {
        let wake = job.wake()?;
        let (mut patterns, mut registered) = (Batch::new(), Vec::new());
        let mut more = true;
        loop {
            while more && flight.in_flight() < DEPTH && flight.gets() < GETS {
                patterns.clear();
                if job.next_at(BATCH_BYTES, &mut patterns).is_none() {
                    more = false;
                    break;
                }
                let gets = self.gets(job, &patterns, &mut registered)?;
                // SAFETY: every destination was checked against a pool of the job, which the job
                // keeps; `run` returns only when no batch is in flight.
                unsafe { self.engine.read(self.endpoint, flight, gets)? };
                job.add_moved(flight.take_bytes());
            }
            job.add_moved(flight.take_bytes());
            if flight.in_flight() == 0 || flight.is_stopped() || job.is_cancelled() {
                return Ok(());
            }
            // Half is still on its way when the next ones are made. The import's deadline sets `wake`.
            let left = if more { flight.in_flight() / 2 } else { 0 };
            flight.wait(left, Some(wake.as_fd()), None);
        }
    }

    /// The gets of a batch, neighbours merged; our pools are registered when they are first met.
    fn gets(&self, job: &ReadJob, patterns: &Batch, registered: &mut Vec<u32>) -> Result<Vec<Get>> {
        let mut gets: Vec<Get> = Vec::new();
        for pattern in patterns.iter() {
            let Some(theirs) = self.pools.get(&pattern.src_pool) else {
                return Err(span::unknown_pool("the peer", pattern.src_pool));
            };
            let pool = job
                .pool(pattern.dst_pool)
                .ok_or_else(|| span::unknown_pool("this side", pattern.dst_pool))?;
            if span::check(&pattern, theirs.bytes, pool.bytes())? == 0 {
                continue;
            }
            if !registered.contains(&pool.id()) {
                self.check_place(pool)?;
                match pool.is_device() {
                    true => self.engine.register_device_pool(pool)?,
                    false => drop(self.engine.register_pool(pool)?),
                }
                registered.push(pool.id());
            }
            for (from, to) in Runs::new(&pattern) {
                let next = Get {
                    local: pool.base().wrapping_add(to as usize),
                    remote: theirs.address + from,
                    bytes: pattern.run,
                    from: Region::Pool(pattern.src_pool),
                    to: Some(Region::Pool(pool.id())),
                };
                match gets.last_mut() {
                    Some(last) if continues(last, &next) => last.bytes += next.bytes,
                    _ => gets.push(next),
                }
            }
        }
        Ok(gets)
    }

    /// Whether gets may write the pool: device pools may have been registered since the path was chosen.
    fn check_place(&self, pool: &Pool) -> Result<()> {
        if let Some(place) = pool.on_device()
            && pool.is_device()
        {
            let (context, _) = self.engine.device()?;
            if context.handle() != place.context {
                bail!(
                    KVF_ERR_UNSUPPORTED,
                    "pool {}: in another CUDA context than the pools that UCX was started with",
                    pool.id()
                );
            }
        }
        Ok(())
    }

    /// Makes what the card has written to device pools of the job visible to devices.
    fn flush(&self, job: &ReadJob) -> Result<()> {
        if let Ok((context, RemoteWrites::Flushed)) = self.engine.device()
            && job.pools().any(|pool| pool.is_device())
        {
            context.flush_remote_writes()?;
        }
        Ok(())
    }

    /// Waits until nothing of the flight can write any more, whatever that takes: first what UCX has
    /// is let go on, then the endpoint is closed under it, then all of UCX.
    fn settle(&self, flight: &Flight) {
        if flight.in_flight() == 0 {
            return;
        }
        flight.stop();
        self.engine.sweep();
        if self.landed_within(flight, GRACE) {
            return;
        }
        self.engine.close_endpoint(self.endpoint);
        if self.landed_within(flight, LAST_RESORT) {
            return;
        }
        self.engine.end(None);
        // Without a limit: as long as UCX may write, the slots are not safe, and this thread is what
        // says so.
        while flight.in_flight() > 0 {
            flight.wait(0, None, None);
        }
    }

    fn landed_within(&self, flight: &Flight, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while flight.in_flight() > 0 {
            if !flight.wait(0, None, Some(deadline)) {
                return false;
            }
        }
        true
    }

    fn word_of(&self, lease: LeaseRef) -> Result<u64> {
        let offset = lease.offset();
        if offset + 8 > self.leases.1 {
            bail!(
                KVF_ERR_PROTOCOL,
                "lease {} of a table of {} bytes",
                lease.index,
                self.leases.1
            );
        }
        Ok(self.leases.0 + offset)
    }
}

/// Whether the second get begins where the first ends, on both sides.
fn continues(last: &Get, next: &Get) -> bool {
    last.from == next.from
        && last.to == next.to
        && last.remote + last.bytes == next.remote
        && last.local.wrapping_add(last.bytes as usize) == next.local
}

impl DataPath for UcxPath {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn reason(&self) -> String {
        format!("{}, {}", self.engine.describe(), self.reason)
    }

    /// A get is no business of the source's threads, which must not free what it reads.
    fn needs_claim(&self) -> bool {
        true
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        let flight = Flight::new()?;
        let outcome = self.read(job, &flight);
        self.settle(&flight);
        job.add_moved(flight.take_bytes());
        let failed = flight.take_error().map(|e| {
            e.context(format_args!(
                "ucx read of {} after {} of {} bytes",
                self.name,
                job.moved(),
                job.bytes()
            ))
        });
        let outcome = outcome.and(failed.map_or(Ok(()), Err));
        // After the last get, before the lease is looked at and anybody is told; however it ended, since
        // the slots are somebody else's next.
        let flushed = self.flush(job);
        if flushed.is_err() {
            job.mark_unquiet();
        }
        match outcome.and(flushed) {
            // What was cut off by a cancel is no failure of its own.
            Err(_) if job.is_cancelled() => Ok(()),
            outcome => outcome,
        }
    }

    fn attest(&self, job: &ReadJob) -> Result<bool> {
        let lease = job.lease();
        let word = self.read_word(self.word_of(lease)?, Some(job))?;
        Ok(word == lease.word())
    }

    fn inline_bytes(&self) -> u64 {
        0 // a round trip is not for the caller's thread
    }

    fn is_usable(&self) -> bool {
        self.state.is_open() && !self.engine.has_ended()
    }
}

impl Drop for UcxPath {
    fn drop(&mut self) {
        self.engine.close_endpoint(self.endpoint);
    }
}

impl fmt::Debug for UcxPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UcxPath")
            .field("peer", &self.name)
            .field("pools", &self.pools.len())
            .finish_non_exhaustive()
    }
}
