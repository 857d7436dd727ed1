//! The reader's end: what is asked for, and where the answers go.

use std::collections::BTreeMap;

use super::{BATCH_BYTES, Ranges};
use crate::error::{Error, Result, Status};
use crate::plan::Batch;
use crate::transport::ReadJob;
use crate::transport::device::flow::Flow;
use crate::transport::device::socket::Landing;
use crate::transport::span::{Runs, check_all, unknown_pool};
use crate::wire::{self, Body, DataClose, DataRead, Frame};

/// One worker's part of a job, as the source knows it.
pub(in crate::transport) struct Asking {
    /// The job's number for the source.
    number: u64,
    spare: Vec<Batch>,
    /// There is nothing more to ask for, and the source was told.
    all: bool,
}

impl Asking {
    /// Names the job to the source; the message is appended to `out`.
    pub fn begin(job: &ReadJob, number: u64, out: &mut Vec<u8>) -> Result<Self> {
        let mut request = job.request().clone();
        request.job = number;
        encode(Body::DataOpen(request), out)?;
        Ok(Self {
            number,
            spare: Vec::new(),
            all: false,
        })
    }

    /// Asks for the next batch, by a message that is appended to `out`; `None`: there is no more,
    /// which the source is told.
    pub fn next(&mut self, job: &ReadJob, out: &mut Vec<u8>) -> Result<Option<Batch>> {
        if self.all {
            return Ok(None);
        }
        let mut batch = self.spare.pop().unwrap_or_default();
        batch.clear();
        let Some((binding, cursor)) = job.next_at(BATCH_BYTES, &mut batch) else {
            self.all = true;
            encode(Body::DataClose(DataClose { job: self.number }), out)?;
            return Ok(None);
        };
        let (piece, segment, taken) = cursor.to_parts();
        let read = DataRead {
            job: self.number,
            binding: binding as u32,
            piece,
            segment,
            taken,
            max_bytes: BATCH_BYTES,
        };
        encode(Body::DataRead(read), out)?;
        Ok(Some(batch))
    }

    /// Takes a batch back, for the next one.
    pub fn give_back(&mut self, batch: Batch) {
        self.spare.push(batch);
    }
}

fn encode(body: Body, out: &mut Vec<u8>) -> Result<()> {
    wire::encode(&Frame { body: Some(body) }, out)
}

/// A batch whose place is known.
pub(in crate::transport) struct Placed {
    pub bytes: u64,
    on_host: u64,
    landing: Landing,
}

impl Placed {
    /// Every byte is in the ranges: counts them, and a device takes its own from here.
    pub fn arrived(self, job: &ReadJob, flow: &mut Flow<'_>) -> Result<()> {
        job.add_moved(self.on_host);
        self.landing.start(flow)
    }
}

/// Where the bytes of a batch go, in the source's order: pools of the job, or buffers of lanes that
/// the result has. `pools`: lengths of the source's.
pub(in crate::transport) fn place(
    job: &ReadJob,
    pools: &BTreeMap<u32, u64>,
    batch: &Batch,
    ranges: &mut Ranges,
    flow: &mut Flow<'_>,
) -> Result<Placed> {
    ranges.clear();
    let (mut bytes, mut on_host) = (0, 0);
    let mut landing = Landing::default();
    // Neighbouring shapes mostly use the same two pools.
    let mut known = None;
    for (shape, places) in batch.shapes() {
        let ids = (shape.src_pool, shape.dst_pool);
        let (src_bytes, pool) = match known {
            Some((last, src_bytes, pool)) if last == ids => (src_bytes, pool),
            _ => {
                let Some(pool) = job.pool(shape.dst_pool) else {
                    return Err(unknown_pool("this side", shape.dst_pool));
                };
                let src_bytes = pools.get(&shape.src_pool).copied().unwrap_or(0);
                known = Some((ids, src_bytes, pool));
                (src_bytes, pool)
            }
        };
        let moved = check_all(shape, places, src_bytes, pool.bytes())?;
        if moved == 0 {
            continue;
        }
        bytes += moved;
        if pool.is_device() {
            let each = shape.bytes();
            for place in places {
                let at = landing.place(flow, &shape.at(*place), pool, each)?;
                ranges.push(at, each as usize);
            }
            continue;
        }
        on_host += moved;
        for (_, to) in places.iter().flat_map(|place| Runs::at(shape, *place)) {
            ranges.push(pool.base().wrapping_add(to as usize), shape.run as usize);
        }
    }
    Ok(Placed {
        bytes,
        on_host,
        landing,
    })
}

/// The error that a source has answered with.
pub(in crate::transport) fn refusal(status: i32, text: &[u8]) -> Error {
    Error::new(
        Status::from_code(status).unwrap_or(Status::KVF_ERR_TRANSFER),
        format!("the source refused: {}", String::from_utf8_lossy(text)),
    )
}
