//! Both agents in one process: a copy between two pools.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, RwLockReadGuard};

use super::span::{COPY_BYTES, Scratch, Source, copy_patterns};
use super::{DataPath, ReadJob};
use crate::bail;
use crate::error::Result;
use crate::memory::{LeaseTable, NONCE_BYTES, Pool};
use crate::plan::Pattern;

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
    /// Keeps the source's pools open for one piece.
    fn enter(&self, batch: &[Pattern]) -> Result<Vec<RwLockReadGuard<'_, bool>>> {
        let mut ids: Vec<u32> = batch.iter().map(|p| p.src_pool).collect();
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

impl DataPath for InprocPath {
    fn name(&self) -> &'static str {
        "inproc"
    }

    fn reason(&self) -> String {
        "same process".into()
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        let (mut batch, mut scratch) = (Vec::new(), Scratch::default());
        while job.next(COPY_BYTES, &mut batch) {
            // The source agent waits for these before it says "may be freed now".
            let _open = self.enter(&batch)?;
            let moved = copy_patterns(
                batch.iter(),
                |id| self.pools.get(&id).map(|pool| Source::from(&**pool)),
                |id| job.pool(id).map(|pool| &**pool),
                job.bytes(),
                &mut scratch,
            )?;
            job.add_moved(moved);
            batch.clear();
        }
        Ok(())
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
