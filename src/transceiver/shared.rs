//! What a transceiver's methods, its operations' notices and its domain's messages share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::api::{Config, Consensus, Direction, ReceiveRequest, RequestResult, Side};
use super::domain::{Domain, Voter};
use super::port::{DomainEvents, End, Notice, Notify, Operation, Port};
use super::signal::Signal;
use super::table::{Begun, CANCELLED, Table};
use crate::agent::{ImportDesc, Outcome, ReceiveDesc};
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::session::Now;
use crate::session::votes::{Ending, Endings, Leader};
use crate::wire::votes::{Headed, Votes};

/// How much longer than its operation's own deadline a blocked caller waits for its end.
pub(super) const GRACE: Duration = Duration::from_secs(5);

pub(super) struct Shared<P> {
    pub port: P,
    pub config: Config,
    pub epoch: Instant,
    pub sides: [Cell; 2],
    pub signal: Signal,
    /// Nanoseconds of [`Shared::now`] at which the port will call `alarm`.
    pub armed: AtomicU64,
}

/// No alarm.
pub(super) const NEVER: u64 = u64::MAX;

/// One side: its table and what can be read without its lock.
pub(super) struct Cell {
    side: Side,
    table: Mutex<Table>,
    pub changed: Condvar,
    /// A status call has nothing to look at.
    pub idle: AtomicBool,
    /// There is a result to take.
    pub ready: AtomicBool,
    /// Set by the first request: from then on every rank's status call exchanges.
    pub used: AtomicBool,
    /// Number of the next exchange; held during one.
    pub exchange: Mutex<u64>,
    /// Held while votes are sent, so that they leave in the order in which they were cast.
    outbox: Mutex<()>,
}

impl Cell {
    pub fn new(side: Side, config: &Config) -> Self {
        let limit = match side {
            Side::Context => config.context_limit,
            Side::Generation => config.generation_limit,
        };
        let failed = |cause| Ending {
            outcome: Outcome::Failed as u32,
            cause,
        };
        let endings = Endings {
            late: failed(Status::KVF_ERR_DEADLINE),
            lost: failed(Status::KVF_ERR_PEER_LOST),
        };
        let domain = match config.consensus {
            Consensus::None => Domain::Single,
            Consensus::Collective => Domain::Collective,
            Consensus::Votes if config.rank == 0 => {
                Domain::Leader(Box::new(Leader::new(config.world, limit, endings)))
            }
            Consensus::Votes => Domain::Follower(Voter::default()),
        };
        let (memory, records) = (config.cancel_memory, config.records);
        Self {
            side,
            table: Mutex::new(Table::new(side, config.rank, memory, records, domain)),
            changed: Condvar::new(),
            idle: AtomicBool::new(true),
            ready: AtomicBool::new(false),
            used: AtomicBool::new(false),
            exchange: Mutex::new(0),
            outbox: Mutex::new(()),
        }
    }

    /// The table. After a panic of a thread that held it, it is used as it is: every change of it
    /// is complete before anything can panic.
    pub fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P> Shared<P> {
    pub fn cell(&self, side: Side) -> &Cell {
        let [context, generation] = &self.sides;
        match side {
            Side::Context => context,
            Side::Generation => generation,
        }
    }

    pub fn now(&self) -> Now {
        self.epoch.elapsed()
    }

    /// Makes a change visible: to status calls without a lock, to the descriptor, to waiters.
    pub fn publish(&self, cell: &Cell, table: &mut Table) {
        cell.idle.store(table.idle(), Ordering::Release);
        let ready = table.has_news();
        if cell.ready.swap(ready, Ordering::AcqRel) != ready {
            self.signal.set(cell.side, ready);
        }
        if std::mem::take(&mut table.wake) {
            cell.changed.notify_all();
        }
    }
}

impl<P: Port> Shared<P> {
    /// Changes a side's table, makes it visible, and then does what the change asks for.
    pub fn with<R>(&self, side: Side, change: impl FnOnce(&mut Table, Now) -> R) -> R {
        let cell = self.cell(side);
        let mut table = cell.lock();
        // After the lock: a table's times must not run backwards.
        let now = self.now();
        let result = change(&mut table, now);
        self.release(cell, table);
        result
    }

    /// Ends a use of the table: publishes, unlocks, cancels and drops operations, sends votes.
    pub fn release(&self, cell: &Cell, mut table: MutexGuard<'_, Table>) {
        self.publish(cell, &mut table);
        let cancels = std::mem::take(&mut table.cancels);
        let dropped = std::mem::take(&mut table.dropped);
        let votes = table.domain.has_outgoing();
        let limit = table.domain.next_deadline();
        drop(table);
        if let Some(at) = limit {
            self.arm(at);
        }
        for op in cancels {
            op.cancel();
        }
        drop(dropped);
        if votes {
            self.send_votes(cell);
        }
    }

    /// Sees that a limit is noticed even if nobody makes a status call. Limits come in order, so
    /// that this rarely does more than look.
    fn arm(&self, at: Now) {
        let nanos = u64::try_from(at.as_nanos()).unwrap_or(NEVER);
        if self.armed.fetch_min(nanos, Ordering::AcqRel) > nanos {
            self.port.alarm(at.saturating_sub(self.now()));
        }
    }

    fn send_votes(&self, cell: &Cell) {
        let in_order = cell.outbox.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let Some(mut message) = cell.lock().domain.outgoing() else {
                return;
            };
            message.domain = self.config.domain;
            message.rank = self.config.rank;
            message.side = cell.side as u32;
            if self.port.send(0, cell.side, message.to_bytes()).is_err() {
                drop(in_order);
                self.with(cell.side, |table, now| table.leader_lost(now));
                return;
            }
        }
    }

    pub fn begin(&self, side: Side, key: Key, user_data: u64, waited_for: bool) -> Result<Begun> {
        self.cell(side).used.store(true, Ordering::Release);
        let begun = self.with(side, |table, now| {
            table.begin(key, user_data, waited_for, now)
        })?;
        if begun.cancelled {
            let other = match side {
                Side::Context => Side::Generation,
                Side::Generation => Side::Context,
            };
            self.with(other, |table, _| table.unpark(key));
        }
        Ok(begun)
    }

    pub fn started(&self, side: Side, key: Key, serial: u64, op: Option<Arc<dyn Operation>>) {
        self.with(side, |table, now| table.started(key, serial, op, now));
    }

    pub fn abort(&self, side: Side, key: Key, serial: u64) {
        self.with(side, |table, _| table.abort(key, serial));
    }

    pub fn notify(self: &Arc<Self>, side: Side, key: Key, serial: u64) -> Notify {
        let shared = Arc::downgrade(self);
        Box::new(move |notice| {
            if let Some(shared) = shared.upgrade() {
                shared.with(side, |table, now| table.notice(key, serial, notice, now));
            }
        })
    }

    pub fn deadline_of(&self, request: &ReceiveRequest) -> Duration {
        match request.import.deadline {
            Duration::ZERO => self.config.transfer,
            deadline => deadline,
        }
    }

    pub fn receive(
        self: &Arc<Self>,
        peer: &P::Peer,
        mut request: ReceiveRequest,
        waited_for: bool,
    ) -> Result<u64> {
        let key = request.key;
        let push = self.config.direction == Direction::Push;
        if push && !request.import.ticket.is_empty() {
            bail!(
                KVF_ERR_STATE,
                "{key}: a ticket was given, but this transceiver was made for push: the request \
                 makes an offer, which travels to the context side"
            );
        }
        if !push {
            let offered = self.port.ticket_key(&request.import.ticket)?;
            same_key("ticket", offered, key)?;
        }
        request.import.deadline = self.deadline_of(&request);
        let side = Side::Generation;
        let user_data = request.import.user_data;
        let Begun { serial, cancelled } = self.begin(side, key, user_data, waited_for)?;
        if cancelled {
            // Nothing was begun, so nothing can complete; the source frees its slots now and not
            // when its lease ends. If it cannot be told, the lease ends. A push has no source yet.
            if !push {
                let _ = self
                    .port
                    .decline(peer, &request.import.ticket, CANCELLED.cause);
            }
            self.started(side, key, serial, None);
            let end = End {
                outcome: Outcome::Cancelled,
                cause: CANCELLED.cause,
                memory_safe: true,
                bytes: 0,
                bytes_total: 0,
                first_byte_ns: 0,
                last_byte_ns: 0,
                transport: "",
            };
            self.with(side, |table, now| {
                table.notice(key, serial, Notice::Ended(end), now);
            });
            return Ok(serial);
        }
        let notify = self.notify(side, key, serial);
        let op = if push {
            self.port
                .receive(peer, offer_of(key, request.import), notify)
        } else {
            self.port.import(peer, request.import, notify)
        };
        let op = op.inspect_err(|_| self.abort(side, key, serial))?;
        self.started(side, key, serial, Some(op));
        Ok(serial)
    }

    pub fn wait_for(&self, key: Key, serial: u64, deadline: Instant) -> Result<RequestResult> {
        let cell = self.cell(Side::Generation);
        let mut table = cell.lock();
        loop {
            if let Some(result) = table.take_waited(key, serial) {
                self.release(cell, table);
                return Ok(result);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if table.stopped || left.is_zero() {
                let stopped = table.stopped;
                table.stop_waiting(key, serial);
                self.release(cell, table);
                if stopped {
                    bail!(KVF_ERR_SHUTDOWN, "{key}: the transceiver is shutting down");
                }
                bail!(
                    KVF_ERR_DEADLINE,
                    "{key}: not ended {} s after its own deadline; a status call will report it",
                    GRACE.as_secs()
                );
            }
            table = wait(cell, table, left);
        }
    }

    pub fn stop(&self) {
        for side in Side::ALL {
            self.with(side, |table, now| {
                table.closed = true;
                table.stopped = true;
                table.wake = true;
                table.cancel_all(now);
            });
        }
    }

    pub fn wait_quiet(&self, deadline: Instant) -> Status {
        for side in Side::ALL {
            let cell = self.cell(side);
            let mut table = cell.lock();
            while table.running() > 0 {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Status::KVF_TIMED_OUT;
                }
                table = wait(cell, table, left);
            }
        }
        Status::KVF_OK
    }
}

/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT`: the keys differ.
pub(super) fn same_key(what: &str, its: Key, key: Key) -> Result<()> {
    if its != key {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the {what} is about {its}, the request about {key}; both sides use the \
             orchestrator's key"
        );
    }
    Ok(())
}

/// What a receive offers to its sender.
fn offer_of(key: Key, import: ImportDesc) -> ReceiveDesc {
    ReceiveDesc {
        key,
        groups: import.groups,
        states: import.states,
        owned_only: import.owned_only,
        deadline: import.deadline,
        priority: import.priority,
        prefix_tag: import.prefix_tag,
        stream: import.stream,
        user_data: import.user_data,
    }
}

/// Waits for a change of the table, at most so long.
pub(super) fn wait<'a>(
    cell: &Cell,
    table: MutexGuard<'a, Table>,
    left: Duration,
) -> MutexGuard<'a, Table> {
    let waited = cell.changed.wait_timeout(table, left);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

impl<P: Port> DomainEvents for Shared<P> {
    fn message(&self, from: u32, bytes: &[u8]) {
        // What cannot be read or is another domain's changes nothing here; its sender's requests
        // end by their limit, with that rank named.
        let Ok(message) = Votes::from_bytes(bytes) else {
            return;
        };
        let side = Side::ALL.into_iter().find(|s| *s as u32 == message.side);
        if let Some(side) = side
            && message.domain == self.config.domain
            && message.rank == from
        {
            self.with(side, |table, now| {
                table.domain.incoming(from, &message, now);
                table.wake = true;
            });
        }
    }

    fn lost(&self, rank: Option<u32>) {
        for side in Side::ALL {
            self.with(side, |table, now| {
                if matches!(rank, None | Some(0)) {
                    table.leader_lost(now);
                }
                table.domain.lose_rank(rank);
                table.wake = true;
            });
        }
    }

    fn alarm(&self) {
        self.armed.store(NEVER, Ordering::Release);
        for side in Side::ALL {
            self.with(side, |table, now| {
                table.domain.expire(now);
                table.wake = true;
            });
        }
    }
}
