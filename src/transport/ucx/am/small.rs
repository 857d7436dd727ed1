//! Small jobs: asked for by the call that begins them, and taken by the caller that waits, or by a worker.
//!
//! Answers come into buffers of their own, and whoever takes them copies: so nothing writes the job's memory
//! while no thread works on it, and a cancel meanwhile finds it quiet.

use std::collections::VecDeque;
use std::time::Instant;

use super::path::{MessagePath, OpenChannel};
use crate::err;
use crate::error::Result;
use crate::plan::Batch;
use crate::transport::ReadJob;
use crate::transport::device::flow::Flow;
use crate::transport::pieces::{Asking, Ranges, Walk, place};

/// Jobs up to this size are small.
pub(super) const SMALL_BYTES: u64 = 32 << 10;

/// What was asked for and is not in place yet.
pub(super) struct Asked {
    /// Dropped first: nothing is written into the buffers afterwards.
    channel: OpenChannel,
    /// In the order of their answers, with the buffers that those come into.
    coming: VecDeque<(Batch, Vec<u8>)>,
    /// Batches in place.
    arrived: u64,
    /// When it was asked for, or the last batch was taken.
    heard: Instant,
}

impl MessagePath {
    /// Asks for the whole of a small job in host memory; `None`: it is none, and nothing was done.
    pub(super) fn ask_small(&self, job: &ReadJob) -> Result<Option<Asked>> {
        if job.bytes() > SMALL_BYTES || job.pools().any(|pool| pool.is_device()) {
            return Ok(None);
        }
        let mut asked = Asked {
            channel: self.channel()?,
            coming: VecDeque::new(),
            arrived: 0,
            heard: Instant::now(),
        };
        let mut out = Vec::new();
        let mut asking = Asking::begin(job, asked.channel.number, &mut out)?;
        while let Some(batch) = asking.next(job, &mut out)? {
            let shapes = batch.shapes();
            let bytes = shapes.map(|(shape, places)| shape.bytes() * places.len() as u64);
            let mut buffer = vec![0; bytes.sum::<u64>() as usize];
            let mut ranges = Ranges::default();
            ranges.push(buffer.as_mut_ptr(), buffer.len());
            // SAFETY: `coming` has the buffer until the channel is closed, and leaves it alone until
            // the batch is in place.
            unsafe { asked.channel.expect(ranges, buffer.len() as u64) };
            asked.coming.push_back((batch, buffer));
        }
        self.ask(out)?;
        Ok(Some(asked))
    }

    /// Puts into place what comes, until all of it has or the job is cancelled. `wait` waits for more;
    /// false: there is no time for that, and the rest may be taken later.
    pub(super) fn take_small(
        &self,
        job: &ReadJob,
        asked: &mut Asked,
        wait: &mut dyn FnMut(&OpenChannel) -> Result<bool>,
    ) -> Result<bool> {
        let mut flow = Flow::new(self.devices(), job);
        while !asked.coming.is_empty() && !job.is_cancelled() {
            if asked.channel.done() == asked.arrived {
                if let Some(e) = asked.channel.error() {
                    return Err(e);
                }
                if !wait(&asked.channel)? {
                    return Ok(false);
                }
                continue;
            }
            let Some((batch, bytes)) = asked.coming.pop_front() else {
                return Err(err!(KVF_ERR_INTERNAL, "more came than was asked for"));
            };
            asked.arrived += 1;
            asked.heard = Instant::now();
            let mut ranges = Ranges::default();
            let placed = place(job, self.pools(), &batch, &mut ranges, &mut flow)?;
            // SAFETY: `place` has put every byte inside a pool of this job, which keeps it.
            unsafe { ranges.write(&mut Walk::default(), &bytes) };
            if asked.channel.lease_lost() {
                job.lose_lease();
            }
            placed.arrived(job, &mut flow)?;
        }
        if !asked.coming.is_empty() {
            self.given_up(asked.heard);
        }
        Ok(true)
    }
}
