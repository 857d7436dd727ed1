//! Both agents in one process: a copy between two pools.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::span::{COPY_BYTES, Scratch, Source, copy_batch, next, time_left};
use super::{DataPath, ReadJob};
use crate::bail;
use crate::error::Result;
use crate::memory::{Entered, LeaseTable, NONCE_BYTES, Pool};
use crate::plan::Batch;

/// Reads another agent of this process. Holding its pools keeps their memory mapped (shared) or
/// registered; the source agent must see the path dropped before it says "may be freed now".
pub struct InprocPath {
    pools: BTreeMap<u32, Arc<Pool>>,
    leases: Arc<LeaseTable>,
}

impl InprocPath {
    /// A path over the source agent's pools (by id) and lease table.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` if the table is not the one whose `nonce` the source announced.
    pub fn new(
        pools: BTreeMap<u32, Arc<Pool>>,
        leases: Arc<LeaseTable>,
        nonce: [u8; NONCE_BYTES],
    ) -> Result<Self> {
        if leases.nonce() != nonce {
            bail!(
                KVF_ERR_PROTOCOL,
                "the source's lease table in this process is not the announced one"
            );
        }
        Ok(Self { pools, leases })
    }
}

impl InprocPath {
    /// One of the source's pools.
    pub(super) fn pool(&self, id: u32) -> Option<&Pool> {
        self.pools.get(&id).map(|pool| &**pool)
    }

    /// Copies what is host memory on both sides.
    pub(super) fn copy_batch<'a>(
        &'a self,
        batch: &Batch,
        job_pool: impl Fn(u32) -> Option<&'a Pool>,
        whole: u64,
        scratch: &mut Scratch,
    ) -> Result<u64> {
        copy_batch(
            batch.shapes(),
            |id| self.pool(id).filter(|p| !p.is_device()).map(Source::from),
            job_pool,
            whole,
            scratch,
        )
    }

    /// Keeps the source's pools open for one piece.
    pub(super) fn enter(&self, batch: &Batch) -> Result<Vec<Entered<'_>>> {
        let mut ids: Vec<u32> = batch.shapes().map(|(shape, _)| shape.src_pool).collect();
        ids.sort_unstable();
        ids.dedup();
        let pools = ids.iter().filter_map(|id| self.pools.get(id));
        pools
            .map(|pool| match pool.enter() {
                Some(guard) => Ok(guard),
                None => bail!(
                    KVF_ERR_EXPIRED,
                    "pool {} was unregistered by the source",
                    pool.id()
                ),
            })
            .collect()
    }
}

impl InprocPath {
    /// Copies pieces until there are no more, or until then: false.
    fn copy(&self, job: &ReadJob, until: Option<Instant>) -> Result<bool> {
        let (mut batch, mut scratch) = (Batch::new(), Scratch::default());
        let mut left = until.map_or(Duration::MAX, time_left);
        while !left.is_zero() && next(job, COPY_BYTES, left, &mut batch) {
            // The source agent waits for these before it says "may be freed now".
            let _open = self.enter(&batch)?;
            let pool = |id| job.pool(id).map(|pool| &**pool);
            let moved = self.copy_batch(&batch, pool, job.bytes(), &mut scratch)?;
            job.add_moved(moved);
            batch.clear();
            left = until.map_or(Duration::MAX, time_left);
        }
        Ok(!left.is_zero())
    }
}

impl DataPath for InprocPath {
    fn name(&self) -> &'static str {
        "inproc"
    }

    fn reason(&self) -> String {
        "same process".into()
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
        Ok(self.leases.holds(job.lease()))
    }

    fn inline_bytes(&self) -> u64 {
        super::shm::INLINE_BYTES
    }
}

impl fmt::Debug for InprocPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InprocPath")
            .field("pools", &self.pools.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::error::Status;
    use crate::memory::PageSize;
    use crate::transport::span::tests::{Cache, filled, register, source_byte};

    /// The source's lease table and pools 2 (shared) and 3 (registered, in `memory`).
    fn source(memory: &mut [u8]) -> (Arc<LeaseTable>, BTreeMap<u32, Arc<Pool>>) {
        let shared = Pool::create_shared(2, Cache::BYTES, None, PageSize::Default).unwrap();
        let bytes = filled(2, Cache::BYTES as usize);
        // SAFETY: both are that long, and the pool is new.
        unsafe { shared.base().copy_from(bytes.as_ptr(), bytes.len()) };
        let registered = register(3, memory);
        let pools = BTreeMap::from([(2, Arc::new(shared)), (3, Arc::new(registered))]);
        (Arc::new(LeaseTable::create(4).unwrap()), pools)
    }

    #[test]
    fn a_job_arrives_byte_for_byte_while_its_lease_holds() {
        let mut memory = filled(3, Cache::BYTES as usize);
        let (leases, pools) = source(&mut memory);
        let path = InprocPath::new(pools, leases.clone(), leases.nonce()).unwrap();
        let mut ours = vec![0xee; 2 * Cache::BYTES as usize];
        let dst = Arc::new(register(1, &mut ours));
        let lease = leases.grant().unwrap();
        let job = ReadJob::new(
            Cache::bindings(2, 3),
            BTreeMap::from([(1, dst.clone())]),
            lease,
            crate::wire::DataOpen::default,
        );
        path.run(&job).unwrap();
        assert_eq!(job.moved(), Cache::MOVED);
        assert!(path.attest(&job).unwrap());
        leases.revoke(lease);
        assert!(!path.attest(&job).unwrap());
        drop((job, dst));
        assert!(ours == Cache::expected((2, 3), source_byte, 0xee));
    }

    #[test]
    fn a_pool_that_the_source_does_not_have_fails_the_job() {
        let mut memory = filled(3, Cache::BYTES as usize);
        let (leases, mut pools) = source(&mut memory);
        pools.remove(&3);
        let path = InprocPath::new(pools, leases.clone(), leases.nonce()).unwrap();
        let mut ours = vec![0; 2 * Cache::BYTES as usize];
        let dst = Arc::new(register(1, &mut ours));
        let job = ReadJob::new(
            Cache::bindings(2, 3),
            BTreeMap::from([(1, dst)]),
            leases.grant().unwrap(),
            crate::wire::DataOpen::default,
        );
        let err = path.run(&job).unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_TRANSFER);
        assert!(err.text.contains("no pool 3"), "{err}");
    }

    #[test]
    fn another_table_is_not_taken_for_the_announced_one() {
        let leases = Arc::new(LeaseTable::create(1).unwrap());
        let other = LeaseTable::create(1).unwrap();
        let err = InprocPath::new(BTreeMap::new(), leases, other.nonce()).unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_PROTOCOL);
    }
}
