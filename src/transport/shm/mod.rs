//! A peer on this host, in another process.
//!
//! Pools made by kvferry are mapped and copied by us; the engine's own memory is read through the
//! kernel. One [`ShmPath`] serves both kinds of one peer, since one transfer may touch both.
//! [`fds`] moves the files of the pools, [`PeerProcess`] says who the peer is.

pub mod fds;
mod peer_process;
mod process_vm;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::{Duration, Instant};

use super::span::{self, COPY_BYTES, Runs, Scratch, Source, copy_batch, next, time_left};
use super::{DataPath, LeaseRef, ReadJob};
use crate::bail;
use crate::error::{Result, Status};
use crate::memory::{LEASE_HEAD_BYTES, LeaseView, Mapping, NONCE_BYTES, Pool};
use crate::plan::{Batch, Pattern, Place};
pub use peer_process::PeerProcess;
use process_vm::{Window, read_pair};

/// Jobs up to this many bytes are copied by the thread that begins them: about as long as waking a
/// worker takes.
pub(super) const INLINE_BYTES: u64 = 32 << 10;

/// Fewest bytes of one turn of a worker that reads through the kernel, which is slower than copying.
const READ_BYTES: u64 = 128 << 10;

/// How one of the peer's pools is reached.
#[derive(Debug)]
pub enum PeerPool {
    /// Mapped here.
    Mapped(Mapping),
    /// The peer engine's own memory, at an address of the peer.
    Private {
        /// First byte in the peer.
        address: u64,
        /// Length in bytes.
        bytes: u64,
    },
}

/// The peer's lease table, mapped or by its address or both.
#[derive(Debug)]
pub struct PeerLeases {
    /// The mapped table.
    pub view: Option<LeaseView>,
    /// Address of the table in the peer ([`crate::memory::LeaseTable::address`]); needed for
    /// private pools. 0 = not known.
    pub address: u64,
    /// Its words.
    pub capacity: u32,
    /// The nonce at its head, as announced over the control connection.
    pub nonce: [u8; NONCE_BYTES],
}

/// Reads one peer process of this host.
pub struct ShmPath {
    peer: Arc<PeerProcess>,
    pools: BTreeMap<u32, PeerPool>,
    leases: PeerLeases,
    has_private: bool,
    /// Whether the nonce was found through the kernel, so that private pools may be read.
    private_proven: AtomicBool,
}

impl ShmPath {
    /// A path to the peer's pools (by id). Reads the nonce through the mapped table; the kernel
    /// path is proven at its first use, or by [`Self::prove_private`].
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` if the mapped nonce is not the announced one or a pool wraps around,
    /// `KVF_ERR_INVALID_ARGUMENT` if no lease table can be reached.
    pub fn new(
        peer: Arc<PeerProcess>,
        pools: BTreeMap<u32, PeerPool>,
        leases: PeerLeases,
    ) -> Result<Self> {
        match &leases.view {
            Some(view) if view.nonce() != leases.nonce => bail!(
                KVF_ERR_PROTOCOL,
                "the mapped lease table of {} is not the announced one",
                peer.describe()
            ),
            None if leases.address == 0 => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "no lease table of {}, neither mapped nor by address",
                peer.describe()
            ),
            _ => {}
        }
        if leases
            .address
            .checked_add(LEASE_HEAD_BYTES + u64::from(leases.capacity) * 8)
            .is_none()
        {
            bail!(KVF_ERR_PROTOCOL, "the peer's lease table wraps around");
        }
        let mut has_private = false;
        for (id, pool) in &pools {
            if let PeerPool::Private { address, bytes } = pool {
                has_private = true;
                if address.checked_add(*bytes).is_none() {
                    bail!(
                        KVF_ERR_PROTOCOL,
                        "the peer's pool {id} of {bytes} bytes at {address:#x} wraps around"
                    );
                }
            }
        }
        Ok(Self {
            peer,
            pools,
            leases,
            has_private,
            private_proven: AtomicBool::new(false),
        })
    }

    /// Reads the nonce through the kernel; the same is done before the first private read.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` with the reason and what to do where the kernel refuses,
    /// `KVF_ERR_PEER_LOST` if the peer has ended or is another process by now.
    pub fn prove_private(&self) -> Result<()> {
        if self.private_proven.load(Ordering::Relaxed) {
            return Ok(());
        }
        if self.leases.address == 0 {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "{} did not say where its lease table is",
                self.peer.describe()
            );
        }
        self.same_program()?;
        self.private_proven.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// After reads by pid: they reached the peer only if it still lives, because until it is gone
    /// nobody else gets its pid, and still has the nonce, because exec keeps pid and pidfd but not
    /// the memory.
    fn same_program(&self) -> Result<()> {
        // The word that comes along is of no interest; every table has a first one.
        self.read_table(self.leases.address + LEASE_HEAD_BYTES)
            .map(|_| ())
    }

    /// The word at an address of the table through the kernel, once the nonce before it is right.
    fn read_table(&self, word: u64) -> Result<u64> {
        let at = (self.leases.address, word);
        let (nonce, word): ([u8; NONCE_BYTES], [u8; 8]) =
            read_pair(&self.peer, at, "its lease table").map_err(|mut err| {
                // kvferry's own memory is there as long as the program runs.
                if err.status == Status::KVF_ERR_TRANSFER {
                    err.status = Status::KVF_ERR_PEER_LOST;
                }
                err
            })?;
        if nonce != self.leases.nonce {
            bail!(
                KVF_ERR_PEER_LOST,
                "{} does not hold the announced lease table: it runs another program",
                self.peer.describe()
            );
        }
        if !self.peer.is_alive() {
            bail!(
                KVF_ERR_PEER_LOST,
                "{} ended while its memory was read",
                self.peer.describe()
            );
        }
        Ok(u64::from_ne_bytes(word))
    }

    fn is_private(&self, id: u32) -> bool {
        matches!(self.pools.get(&id), Some(PeerPool::Private { .. }))
    }

    fn mapping(&self, id: u32) -> Option<Source<'_>> {
        match self.pools.get(&id)? {
            PeerPool::Mapped(mapping) => Some(Source::from(mapping)),
            PeerPool::Private { .. } => None,
        }
    }

    /// Copies one batch; returns the bytes written, fewer than all only if `stop` said so.
    pub(super) fn copy_batch<'a>(
        &'a self,
        batch: &Batch,
        job_pool: impl Fn(u32) -> Option<&'a Pool>,
        stop: impl Fn() -> bool,
        whole: u64,
        buffers: &mut Buffers,
    ) -> Result<u64> {
        if !self.has_private {
            return copy_batch(
                batch.shapes(),
                |id| self.mapping(id),
                job_pool,
                whole,
                &mut buffers.scratch,
            );
        }
        let private = |(shape, _): &(&Pattern, _)| self.is_private(shape.src_pool);
        let mapped = batch.shapes().filter(|of| !private(of));
        let bytes = copy_batch(
            mapped,
            |id| self.mapping(id),
            &job_pool,
            whole,
            &mut buffers.scratch,
        )?;
        let private = batch.shapes().filter(private);
        let read = self.read_private(private, job_pool, stop, &mut buffers.window)?;
        buffers.read_by_pid |= read > 0;
        Ok(bytes + read)
    }

    /// Reads copies of private pools in as few calls as their runs allow.
    fn read_private<'p, 'a>(
        &self,
        batch: impl Iterator<Item = (&'p Pattern, &'p [Place])>,
        job_pool: impl Fn(u32) -> Option<&'a Pool>,
        stop: impl Fn() -> bool,
        window: &mut Window,
    ) -> Result<u64> {
        let mut read = 0;
        for (shape, places) in batch {
            let Some(PeerPool::Private { address, bytes }) = self.pools.get(&shape.src_pool) else {
                return Err(span::unknown_pool("the peer", shape.src_pool));
            };
            let dst = job_pool(shape.dst_pool)
                .ok_or_else(|| span::unknown_pool("this side", shape.dst_pool))?;
            span::refuse_device(dst)?;
            if span::check_all(shape, places, *bytes, dst.bytes())? == 0 {
                continue;
            }
            self.prove_private()?;
            let runs = places.iter().flat_map(|place| Runs::at(shape, *place));
            for (from, to) in runs {
                let mut done = 0;
                while done < shape.run {
                    // Lossless: checked against the size of our own memory.
                    let local = dst.base().wrapping_add((to + done) as usize);
                    let taken = window.push(address + from + done, local, shape.run - done);
                    done += taken as u64;
                    if taken == 0 {
                        read += self.flush(window)?;
                        if stop() {
                            return Ok(read);
                        }
                    }
                }
            }
        }
        Ok(read + self.flush(window)?)
    }

    fn flush(&self, window: &mut Window) -> Result<u64> {
        // SAFETY: every local range was checked against a pool of the job, which the job keeps;
        // pools are writable by `Pool`'s contract and never borrowed.
        match unsafe { window.read(&self.peer, |at| self.place(at)) } {
            // Another program under the same pid has other mappings: say that instead.
            Err(err) if err.status == Status::KVF_ERR_TRANSFER => self.same_program().and(Err(err)),
            done => done,
        }
    }

    /// "pool 3 offset 4096" of a remote address.
    fn place(&self, at: u64) -> String {
        let inside = self.pools.iter().find_map(|(id, pool)| match pool {
            PeerPool::Private { address, bytes } if (*address..*address + *bytes).contains(&at) => {
                Some(format!("its pool {id} offset {}", at - address))
            }
            _ => None,
        });
        inside.unwrap_or_else(|| format!("address {at:#x}"))
    }

    /// The lease word through the kernel.
    fn holds_remotely(&self, lease: LeaseRef) -> Result<bool> {
        if lease.index >= self.leases.capacity {
            bail!(
                KVF_ERR_PROTOCOL,
                "lease {} of a table of {}",
                lease.index,
                self.leases.capacity
            );
        }
        // The data was read by earlier calls, of other threads too.
        fence(Ordering::SeqCst);
        let word = self.read_table(self.leases.address + lease.offset())?;
        Ok(word == lease.word())
    }
}

/// What a worker keeps from batch to batch of one job.
#[derive(Default)]
pub(super) struct Buffers {
    scratch: Scratch,
    window: Window,
    read_by_pid: bool,
}

impl Buffers {
    pub(super) fn scratch(&mut self) -> &mut Scratch {
        &mut self.scratch
    }
}

impl ShmPath {
    /// After the last batch that used these buffers: was it the peer that was read?
    pub(super) fn after(&self, buffers: &Buffers) -> Result<()> {
        match buffers.read_by_pid {
            true => self.same_program(),
            false => Ok(()),
        }
    }

    /// Copies pieces until there are no more, or until then: false.
    fn copy(&self, job: &ReadJob, until: Option<Instant>) -> Result<bool> {
        let least = if self.has_private {
            READ_BYTES
        } else {
            COPY_BYTES
        };
        let (mut batch, mut buffers) = (Batch::new(), Buffers::default());
        let mut left = until.map_or(Duration::MAX, time_left);
        while !left.is_zero() && next(job, least, left, &mut batch) {
            let moved = self.copy_batch(
                &batch,
                |id| job.pool(id).map(|pool| &**pool),
                || job.is_cancelled(),
                job.bytes(),
                &mut buffers,
            )?;
            job.add_moved(moved);
            batch.clear();
            left = until.map_or(Duration::MAX, time_left);
        }
        self.after(&buffers)?;
        Ok(!left.is_zero())
    }
}

impl DataPath for ShmPath {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn reason(&self) -> String {
        let mapped = |pool: &&PeerPool| matches!(pool, PeerPool::Mapped(_));
        let mapped = self.pools.values().filter(mapped).count();
        format!(
            "same host, {}; of its {} pools {mapped} mapped, {} read by process_vm_readv",
            self.peer.describe(),
            self.pools.len(),
            self.pools.len() - mapped
        )
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        self.copy(job, None).map(|_| ())
    }

    fn may_be_joined(&self, _: &ReadJob) -> bool {
        true
    }

    fn run_until(&self, job: &ReadJob, until: Instant) -> Result<bool> {
        self.copy(job, Some(until))
    }

    fn attest(&self, job: &ReadJob) -> Result<bool> {
        match &self.leases.view {
            // `run` has made sure that what it read by pid was the peer's.
            Some(view) => view.holds(job.lease()),
            None => self.holds_remotely(job.lease()),
        }
    }

    fn inline_bytes(&self) -> u64 {
        INLINE_BYTES
    }
}

impl fmt::Debug for ShmPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShmPath")
            .field("peer", &self.peer.describe())
            .field("pools", &self.pools.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
