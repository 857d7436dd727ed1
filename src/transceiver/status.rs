//! The status calls.

use std::sync::PoisonError;
use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::api::{Checked, Consensus, Group, RequestResult, Side};
use super::codec;
use super::port::Port;
use super::shared::{Cell, Shared, wait};
use crate::error::{Result, Status};
use crate::session::collective::{Ballot, merge};
use crate::session::votes::Batch;
use crate::wire::votes::{Headed, Lists};
use crate::{bail, err};

impl Checked {
    fn nothing() -> Self {
        Self {
            status: Status::KVF_OK,
            more: false,
            decision: Vec::new(),
        }
    }
}

impl<P: Port> Shared<P> {
    pub fn check(
        &self,
        side: Side,
        at_least: Option<u32>,
        timeout: Option<Duration>,
        cap: usize,
        out: &mut Vec<RequestResult>,
    ) -> Result<Checked> {
        let cell = self.cell(side);
        if self.config.consensus == Consensus::Collective {
            return self.check_together(cell, side, at_least, timeout, cap, out);
        }
        // Two loads decide the calls of an idle loop: no lock, no clock, no descriptor.
        let sweep = at_least == Some(0) && self.config.consensus == Consensus::None;
        if !cell.ready.load(Ordering::Acquire) && (sweep || cell.idle.load(Ordering::Acquire)) {
            return Ok(Checked::nothing());
        }
        let status = self.wait_for_ends(cell, side, at_least, timeout, false);
        Ok(self.take(cell, side, status, cap, out))
    }

    /// Waits until so many requests have ended, clamped to what is in flight.
    fn wait_for_ends(
        &self,
        cell: &Cell,
        side: Side,
        at_least: Option<u32>,
        timeout: Option<Duration>,
        here: bool,
    ) -> Status {
        let mut table = cell.lock();
        let wanted = at_least
            .map_or(usize::MAX, |n| n as usize)
            .min(table.open());
        let mark = table.interrupt_mark();
        let mut deadline = None;
        let status = loop {
            let next = table.domain.expire(self.now());
            let ended = if here {
                table.ended_here() + table.ready_ended()
            } else {
                table.ready_ended()
            };
            // Another thread's call may have taken some meanwhile.
            if ended >= wanted.min(table.open()) || table.domain.follows() {
                break Status::KVF_OK;
            }
            if table.stopped || table.interrupted(mark) {
                break Status::KVF_INTERRUPTED;
            }
            let now = Instant::now();
            let deadline = *deadline.get_or_insert_with(|| {
                now + timeout.unwrap_or(match side {
                    Side::Context => self.config.context_poll,
                    Side::Generation => self.config.generation_poll,
                })
            });
            let left = deadline.saturating_duration_since(now);
            if left.is_zero() {
                break Status::KVF_TIMED_OUT;
            }
            let until_next = next.map(|at| at.saturating_sub(self.now()));
            let left = until_next.map_or(left, |next| left.min(next.max(Duration::from_micros(1))));
            table = wait(cell, table, left);
        };
        self.release(cell, table);
        status
    }

    fn take(
        &self,
        cell: &Cell,
        side: Side,
        status: Status,
        cap: usize,
        out: &mut Vec<RequestResult>,
    ) -> Checked {
        let mut table = cell.lock();
        let now = self.now();
        table.settle(now);
        let batch = table.draw(cap, now);
        table.take(cap, out);
        let more = table.ready() > 0;
        self.release(cell, table);
        let bytes = |batch: Batch| codec::decisions(self.config.domain, side, &batch).to_bytes();
        Checked {
            status,
            more,
            decision: batch.map(bytes).unwrap_or_default(),
        }
    }

    /// One exchange with all ranks of the domain, then what they agree on.
    fn check_together(
        &self,
        cell: &Cell,
        side: Side,
        at_least: Option<u32>,
        timeout: Option<Duration>,
        cap: usize,
        out: &mut Vec<RequestResult>,
    ) -> Result<Checked> {
        // All ranks get their first request in the same iteration, so all skip alike.
        if !cell.used.load(Ordering::Acquire) {
            return Ok(Checked::nothing());
        }
        let mut round = match cell.exchange.try_lock() {
            Ok(round) => round,
            Err(TryLockError::Poisoned(poisoned)) => PoisonError::into_inner(poisoned),
            Err(TryLockError::WouldBlock) => bail!(
                KVF_ERR_BUSY,
                "another status call of the {} side is in its exchange",
                side.name()
            ),
        };
        let wanted = if self.config.wait_before_gather {
            at_least
        } else {
            Some(0)
        };
        let status = self.wait_for_ends(cell, side, wanted, timeout, true);
        let ballot = cell.lock().ballot();
        let agreed = self.exchange(side, *round, ballot)?;
        *round += 1;
        self.with(side, |table, now| table.commit(&agreed, now));
        Ok(self.take(cell, side, status, cap, out))
    }

    fn exchange(&self, side: Side, round: u64, mut ballot: Ballot) -> Result<Ballot> {
        let config = &self.config;
        let groups = [
            (Group::Tensor, config.tensor_ranks),
            (Group::Pipeline, config.pipeline_ranks),
        ];
        for (group, members) in groups {
            if members <= 1 {
                continue;
            }
            let gather = config
                .gather
                .as_ref()
                .ok_or_else(|| err!(KVF_ERR_STATE, "no all-gather callback"))?;
            let mine = codec::lists(config.domain, side, round, &ballot).to_bytes();
            let all = gather(group, &mine)
                .map_err(|e| e.context(format_args!("{group:?} exchange {round}")))?;
            if all.len() != members as usize {
                bail!(
                    KVF_ERR_GROUP_LOST,
                    "{group:?} exchange {round} returned {} lists for {members} ranks",
                    all.len()
                );
            }
            let ballots = all.iter().map(|bytes| {
                let lists = Lists::from_bytes(bytes)?;
                codec::ballot_of(&lists, config.domain, side, round)
            });
            ballot = merge(&ballots.collect::<Result<Vec<_>>>()?);
        }
        // Of one rank nothing is to be agreed on, but a cancel still beats a success.
        Ok(if config.world == 1 {
            merge(&[ballot])
        } else {
            ballot
        })
    }
}
