//! The transceiver: requests in, cancel, and what holds its parts together.

use std::os::fd::RawFd;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::api::{
    Cancel, Checked, Config, Consensus, Direction, ReceiveRequest, Record, RequestResult,
    SendRequest, Side,
};
use super::codec;
use super::port::Port;
use super::shared::{Cell, GRACE, NEVER, Shared, same_key};
use super::signal::Signal;
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::wire::votes::{Decisions, Headed};

/// The request level of one rank. Any thread may call anything.
///
/// Dropping it cancels what is in flight and detaches: slots that are still in use stay in the
/// agent's quarantine.
pub struct Transceiver<P: Port> {
    shared: Arc<Shared<P>>,
}

impl<P: Port> Transceiver<P> {
    /// Makes a transceiver upon a port.
    ///
    /// # Errors
    /// What contradicts in the configuration, `KVF_ERR_UNSUPPORTED` for what is not served, or no
    /// more file descriptors.
    pub fn with_port(port: P, config: Config) -> Result<Self> {
        config.check()?;
        let cells = [
            Cell::new(Side::Context, &config),
            Cell::new(Side::Generation, &config),
        ];
        let shared = Arc::new(Shared {
            port,
            epoch: Instant::now(),
            sides: cells,
            signal: Signal::new()?,
            armed: AtomicU64::new(NEVER),
            config,
        });
        let config = &shared.config;
        if config.consensus == Consensus::Votes && config.world > 1 {
            let weak: Weak<Shared<P>> = Arc::downgrade(&shared);
            shared
                .port
                .join(config.domain, config.world, config.rank, weak)?;
        }
        Ok(Self { shared })
    }

    /// Readable exactly while a status call has a result to give. Owned by the transceiver; the
    /// caller only polls it.
    pub fn event_fd(&self) -> RawFd {
        self.shared.signal.raw_fd()
    }

    /// Offers a request's slots to whoever shows the returned ticket. Never blocks.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::publish`], and `KVF_ERR_DUPLICATE`: the key is in use; nothing
    /// changed.
    pub fn respond_and_send_async(&self, request: SendRequest) -> Result<Vec<u8>> {
        let shared = &self.shared;
        let (key, user_data) = (request.key, request.user_data);
        if shared.config.direction == Direction::Push {
            bail!(
                KVF_ERR_STATE,
                "{key}: this transceiver was made for push: answer the generation side's offer"
            );
        }
        let begun = shared.begin(Side::Context, key, user_data, false)?;
        let notify = shared.notify(Side::Context, key, begun.serial);
        // With a cancel from before: published and taken back, so that a reader who already has
        // the ticket's key is told.
        let op = shared
            .port
            .publish(request, notify)
            .inspect_err(|_| shared.abort(Side::Context, key, begun.serial))?;
        let ticket = op.ticket();
        shared.started(Side::Context, key, begun.serial, Some(op));
        Ok(ticket)
    }

    /// Push: sends a request's slots into what the generation side has offered. `offer` are the
    /// bytes that the other side's [`Self::offer`] gave; one rank's, so that a context rank feeds
    /// one generation rank. `deadline` zero = the transceiver's. Never blocks.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::push_begin`]; `KVF_ERR_DUPLICATE`: the key is in use;
    /// `KVF_ERR_STATE`: made for pull. Nothing changed.
    pub fn push_async(
        &self,
        peer: &P::Peer,
        offer: &[u8],
        mut request: SendRequest,
        deadline: Duration,
    ) -> Result<()> {
        let shared = &self.shared;
        if shared.config.direction == Direction::Pull {
            bail!(
                KVF_ERR_STATE,
                "this transceiver was made for pull: offer the slots by respond_and_send_async"
            );
        }
        let key = shared.port.ticket_key(offer)?;
        if request.key != Key::default() {
            same_key("offer", key, request.key)?;
        }
        request.key = key;
        let deadline = match deadline {
            Duration::ZERO => shared.config.transfer,
            given => given,
        };
        let (side, user_data) = (Side::Context, request.user_data);
        let begun = shared.begin(side, key, user_data, false)?;
        let notify = shared.notify(side, key, begun.serial);
        // With a cancel from before: begun and taken back, so that the receiver is told.
        let op = shared
            .port
            .push(peer, offer, request, deadline, notify)
            .inspect_err(|_| shared.abort(side, key, begun.serial))?;
        shared.started(side, key, begun.serial, Some(op));
        Ok(())
    }

    /// Push: the bytes of a receive that is in the table, for the context side's
    /// [`Self::push_async`].
    pub fn offer(&self, key: Key) -> Option<Vec<u8>> {
        let found = self.shared.cell(Side::Generation).lock().operation(key);
        found
            .map(|op| op.ticket())
            .filter(|offer| !offer.is_empty())
    }

    pub(super) fn kept_records(&self, side: Side) -> Vec<Record> {
        self.shared.cell(side).lock().kept_records()
    }

    /// Sends layer by layer while prefill computes.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED`, always.
    pub fn respond_and_send_layer_wise(&self) -> Result<()> {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "layer-wise sending is not served; call respond_and_send_async after prefill"
        )
    }

    /// Readies context requests for which the generation side asked first.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED`, always.
    pub fn prepare_context_requests(&self) -> Result<()> {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "generation-first scheduling is not served; schedule the context side first"
        )
    }

    /// Fetches what a ticket offers into the request's slots; push: offers the slots, and
    /// [`Self::offer`] has the bytes for the context side. Never blocks.
    ///
    /// # Errors
    /// As [`crate::agent::Agent::import_begin`]; `KVF_ERR_DUPLICATE`: the key is in use;
    /// `KVF_ERR_INVALID_ARGUMENT`: the ticket is about another key. Nothing changed.
    pub fn request_and_receive_async(&self, peer: &P::Peer, request: ReceiveRequest) -> Result<()> {
        self.shared.receive(peer, request, false).map(|_| ())
    }

    /// The same, and waits for its end. [`Self::interrupt`] does not end this wait; its deadline,
    /// a cancel from another thread and [`Self::shutdown`] do. Slots that are not safe at its end
    /// are reported by a later status call.
    ///
    /// # Errors
    /// As [`Self::request_and_receive_async`]; `KVF_ERR_UNSUPPORTED` with consensus: the decision
    /// comes by a later call; `KVF_ERR_SHUTDOWN`, `KVF_ERR_DEADLINE`: not ended yet, a status
    /// call will report it.
    pub fn request_and_receive_sync(
        &self,
        peer: &P::Peer,
        request: ReceiveRequest,
    ) -> Result<RequestResult> {
        let shared = &self.shared;
        if shared.config.consensus != Consensus::None {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "a blocking receive would decide for this rank alone; use the async call where \
                 ranks agree"
            );
        }
        let key = request.key;
        let limit = shared.deadline_of(&request) + GRACE;
        let serial = shared.receive(peer, request, true)?;
        shared.wait_for(key, serial, Instant::now() + limit)
    }

    /// Cancels a request on either side. It stays visible until its memory is safe and is reported
    /// once, as whatever came first. Idempotent. For a key that is not known (yet) the cancel is
    /// remembered for the configured time.
    pub fn cancel(&self, key: Key) -> Cancel {
        let shared = &self.shared;
        let found = Side::ALL.map(|side| shared.with(side, |table, now| table.cancel(key, now)));
        if found == [Cancel::Remembered; 2] {
            return Cancel::Remembered;
        }
        // An operation may have ended inside its cancel: look again.
        let mut answer = Cancel::Over;
        for (side, found) in Side::ALL.into_iter().zip(found) {
            let now = shared.with(side, |table, _| match found {
                Cancel::Remembered => {
                    table.unpark(key);
                    Cancel::Over
                }
                _ => table.cancel_state(key),
            });
            if now == Cancel::Pending {
                answer = Cancel::Pending;
            }
        }
        answer
    }

    /// The ticket of a context request that is in the table.
    pub fn ticket(&self, key: Key) -> Option<Vec<u8>> {
        let found = self.shared.cell(Side::Context).lock().operation(key);
        found.map(|op| op.ticket())
    }

    /// Whether memory of this request may still be in use, on any rank where ranks agree.
    pub fn has_inflight(&self, key: Key) -> bool {
        Side::ALL
            .iter()
            .any(|side| self.shared.cell(*side).lock().in_flight(key))
    }

    /// Whether no receive is in flight: all have ended, are safe and were reported.
    pub fn check_gen_transfer_complete(&self) -> bool {
        self.shared.cell(Side::Generation).lock().len() == 0
    }

    /// Ends the status calls that wait, or the next one that would. It gives what it has.
    pub fn interrupt(&self) {
        for side in Side::ALL {
            self.shared.with(side, |table, _| table.interrupt());
        }
    }

    /// What is known of a request, in flight or among the last ended ones; the generation side's
    /// if both have it.
    pub fn record(&self, key: Key) -> Option<Record> {
        let sides = [Side::Generation, Side::Context];
        let (mut record, op) = sides
            .iter()
            .find_map(|side| self.shared.cell(*side).lock().record(key))?;
        if let Some(op) = op {
            let text = op.error_text();
            if !text.is_empty() {
                record.text = text;
            }
            record.aux = op.aux();
        }
        Some(record)
    }

    /// What status calls return: see [`Checked`] and `docs/transceiver.md`. `at_least`: 0 sweeps,
    /// N waits for up to N ends, `None` for all in flight; `timeout`: `None` = as configured.
    /// Appends at most `cap` results to `out`; what does not fit stays for the next call.
    ///
    /// # Errors
    /// Collective: the exchange failed or ranks are out of step; nothing was committed.
    pub fn check_context_transfer_status(
        &self,
        at_least: Option<u32>,
        timeout: Option<Duration>,
        cap: usize,
        out: &mut Vec<RequestResult>,
    ) -> Result<Checked> {
        self.shared
            .check(Side::Context, at_least, timeout, cap, out)
    }

    /// The same for receives.
    ///
    /// # Errors
    /// As [`Self::check_context_transfer_status`].
    pub fn check_gen_transfer_status(
        &self,
        at_least: Option<u32>,
        timeout: Option<Duration>,
        cap: usize,
        out: &mut Vec<RequestResult>,
    ) -> Result<Checked> {
        self.shared
            .check(Side::Generation, at_least, timeout, cap, out)
    }

    /// How many results a status call may return so that its decision fits into so many bytes.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`: not even one, and this rank's status calls make decisions.
    pub fn results_within(&self, decision_bytes: usize) -> Result<usize> {
        let config = &self.shared.config;
        if config.consensus != Consensus::Votes || config.rank != 0 {
            return Ok(usize::MAX);
        }
        match decision_bytes.saturating_sub(codec::DECISION_HEAD) / codec::DECISION_ENTRY {
            0 => bail!(
                KVF_ERR_OUT_OF_RANGE,
                "{decision_bytes} bytes for the decision; this rank leads its domain and needs                  {} and {} per result",
                codec::DECISION_HEAD,
                codec::DECISION_ENTRY
            ),
            fit => Ok(fit),
        }
    }

    /// Follower: takes the leader's decision bytes in and gives the results that the leader's
    /// status call gave. Never waits. Bytes that were applied already give nothing; empty bytes
    /// fetch what did not fit into an earlier call's `cap`, or what a lost leader left undecided.
    ///
    /// # Errors
    /// `KVF_ERR_GROUP_LOST`: decisions before these are missing, nothing was applied, the engine
    /// must stop this iteration; `KVF_ERR_STATE`: this transceiver does not vote;
    /// `KVF_ERR_INVALID_ARGUMENT`, `KVF_ERR_ABI_MISMATCH`: no decision of this domain.
    pub fn apply(
        &self,
        decision: &[u8],
        cap: usize,
        out: &mut Vec<RequestResult>,
    ) -> Result<Checked> {
        let shared = &self.shared;
        if shared.config.consensus != Consensus::Votes {
            bail!(
                KVF_ERR_STATE,
                "decision bytes without votes: this transceiver was made with {:?}",
                shared.config.consensus
            );
        }
        let mut sides = Side::ALL.to_vec();
        if !decision.is_empty() {
            let decisions = Decisions::from_bytes(decision)?;
            let side = Side::ALL.into_iter().find(|s| *s as u32 == decisions.side);
            let (Some(side), true) = (side, decisions.domain == shared.config.domain) else {
                bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "a decision of domain {}, side {} came to domain {}",
                    decisions.domain,
                    decisions.side,
                    shared.config.domain
                );
            };
            let batch = codec::batch_of(&decisions)?;
            shared.with(side, |table, now| {
                let new = table.domain.admit(&batch)?;
                table.apply(&new, now);
                Ok(())
            })?;
            sides = vec![side];
        }
        let mut more = false;
        let mut room = cap;
        for side in sides {
            let before = out.len();
            more |= shared.with(side, |table, now| {
                if decision.is_empty() {
                    table.settle(now);
                }
                table.take(room, out);
                table.ready() > 0
            });
            room -= out.len() - before;
        }
        Ok(Checked {
            status: Status::KVF_OK,
            more,
            decision: Vec::new(),
        })
    }

    /// Takes no new requests and waits until nothing touches memory on this rank any more:
    /// `KVF_OK` or `KVF_TIMED_OUT`. Results can be taken before, during and after.
    pub fn drain(&self, timeout: Duration) -> Status {
        let deadline = Instant::now() + timeout;
        for side in Side::ALL {
            self.shared.with(side, |table, _| table.closed = true);
        }
        self.shared.wait_quiet(deadline)
    }

    /// Takes no new requests, cancels what is in flight, ends all waits, and waits until nothing
    /// touches memory on this rank any more. Idempotent; results can still be taken.
    ///
    /// # Errors
    /// `KVF_ERR_BUSY`: the time-out passed; the text says how many requests still hold memory.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        let shared = &self.shared;
        shared.stop();
        if shared.wait_quiet(Instant::now() + timeout) == Status::KVF_OK {
            return Ok(());
        }
        let [context, generation] = Side::ALL.map(|side| shared.cell(side).lock().running());
        bail!(
            KVF_ERR_BUSY,
            "{context} context and {generation} generation requests still hold memory; their \
             slots stay in the agent's quarantine, call shutdown again or keep the pools"
        )
    }

    /// Notices that came twice or for requests that were over: counted, without effect.
    pub fn late_notices(&self) -> u64 {
        let sides = Side::ALL.iter();
        sides
            .map(|side| self.shared.cell(*side).lock().late_notices())
            .sum()
    }
}

impl<P: Port> Drop for Transceiver<P> {
    fn drop(&mut self) {
        self.shared.stop();
        for side in Side::ALL {
            self.shared.with(side, |table, _| table.empty());
        }
    }
}

impl<P: Port> std::fmt::Debug for Transceiver<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Transceiver")
            .field(&self.shared.config)
            .finish()
    }
}
