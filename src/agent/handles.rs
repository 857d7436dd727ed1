//! What callers hold: a remote engine, a publication, a transfer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::api::{PeerInfo, PublicationInfo, TransferInfo};
use super::control::Command;
use super::import_cell::ImportCell;
use super::peers::PeerShared;
use super::shared::Shared;
use super::source::PublicationCell;
use super::{cells, lock};
use crate::cuda::CallerStream;
use crate::error::{Result, Status};
use crate::ids::Key;
use crate::session::End;

/// A remote engine. Dropping it does not remove it.
#[derive(Debug)]
pub struct Peer {
    pub(super) shared: Arc<PeerShared>,
    pub(super) agent: Arc<Shared>,
}

impl Peer {
    /// Names the peer in events.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// Whether and how it can be used.
    pub fn info(&self) -> PeerInfo {
        self.shared.info()
    }

    /// Waits until all needed ranks are ready: `KVF_OK`, `KVF_TIMED_OUT`, or why not.
    pub fn wait(&self, timeout: Duration) -> Status {
        self.shared.wait(timeout)
    }

    /// Forgets the peer: imports from it fail.
    pub fn remove(&self) {
        if self.shared.removed.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut state = self.agent.lock();
        for route in &self.shared.routes {
            state.routes.give_back(route);
        }
        self.agent.send(Command::RemovePeer(self.shared.id));
    }
}

/// An offer of slots. Dropping it detaches: the offer stays until it ends.
#[derive(Debug)]
pub struct Publication {
    pub(super) shared: Arc<PublicationCell>,
    pub(super) agent: Arc<Shared>,
}

impl Publication {
    /// Names the publication in events.
    pub fn id(&self) -> u64 {
        self.shared.cell.id
    }

    /// What it is about.
    pub fn key(&self) -> Key {
        self.shared.cell.key
    }

    /// The bytes that travel with the request.
    pub fn ticket(&self) -> &[u8] {
        &self.shared.ticket
    }

    /// Looks at it.
    pub fn info(&self) -> PublicationInfo {
        let (outcome, cause, memory_safe, _) = self.shared.cell.look();
        PublicationInfo {
            outcome,
            cause,
            memory_safe,
            claimed: self.shared.claimed.load(Ordering::Relaxed) != 0,
            readers_done: self.shared.readers_done.load(Ordering::Relaxed),
            readers_expected: self.shared.readers_expected.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            first_byte_ns: self.shared.times.first_ns(),
            last_byte_ns: self.shared.times.last_ns(),
        }
    }

    /// Takes the offer back; idempotent. Ends with `PublicationEnded`.
    pub fn release(&self) {
        let end = End::new(Status::KVF_ERR_CANCELLED, "released by the source's engine");
        self.agent.send(Command::Withdraw(self.shared.id, end));
    }

    /// Waits until it has ended.
    pub fn wait(&self, timeout: Duration) -> Status {
        self.shared.cell.wait(timeout)
    }

    /// What went wrong, for people; empty if nothing did.
    pub fn error_text(&self) -> String {
        self.shared.cell.look().3
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.shared.cell.abandon();
    }
}

/// A running or ended import, receive or push. Dropping a running one cancels and detaches it.
#[derive(Debug)]
pub struct Transfer {
    pub(super) kind: TransferKind,
    pub(super) agent: Arc<Shared>,
}

#[derive(Debug)]
pub(super) enum TransferKind {
    Import(Arc<ImportCell>),
    /// With its offer's bytes.
    Receive(Arc<ImportCell>, Vec<u8>),
    Push(Arc<PublicationCell>),
}

impl Transfer {
    fn cell(&self) -> &cells::Cell {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => &import.cell,
            TransferKind::Push(push) => &push.cell,
        }
    }

    /// Names the transfer in events.
    pub fn id(&self) -> u64 {
        self.cell().id
    }

    /// What it is about.
    pub fn key(&self) -> Key {
        self.cell().key
    }

    /// `KVF_IN_PROGRESS`, `KVF_OK`, or the error it ended with. Lock-free.
    pub fn poll(&self) -> Status {
        self.cell().poll()
    }

    /// Waits for the outcome: as `poll`, or `KVF_TIMED_OUT`.
    pub fn wait(&self, timeout: Duration) -> Status {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                import.wait(&self.agent, timeout)
            }
            TransferKind::Push(push) => push.cell.wait(timeout),
        }
    }

    /// Makes a stream wait until the transfer has its outcome, without a block on the host.
    ///
    /// # Errors
    /// A stream that is none or is captured; `KVF_ERR_UNSUPPORTED` without stream memory operations.
    pub fn stream_wait(&self, stream: CallerStream) -> Result<()> {
        // Before the word is there, so that a bad stream is refused in any case.
        stream.context(&[])?;
        if self.poll() == Status::KVF_IN_PROGRESS {
            let word = self.agent.devices.stream_wait(stream)?;
            self.cell().keep_until_end(Box::new(word));
        }
        Ok(())
    }

    /// Asks for its end; idempotent. The outcome tells whether it came first.
    pub fn cancel(&self) {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                self.agent.send(Command::Cancel(import.cell.id))
            }
            TransferKind::Push(push) => {
                let end = End::new(Status::KVF_ERR_CANCELLED, "cancelled by this side");
                self.agent.send(Command::Withdraw(push.id, end));
            }
        }
    }

    /// Looks at it.
    pub fn info(&self) -> TransferInfo {
        let (outcome, cause, memory_safe, _) = self.cell().look();
        let mut info = TransferInfo {
            outcome,
            cause,
            memory_safe,
            bytes: 0,
            bytes_total: 0,
            submitted: 0,
            elapsed_ns: 0,
            first_byte_ns: 0,
            last_byte_ns: 0,
            transport: "",
            parts: Vec::new(),
        };
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                import.describe(&mut info)
            }
            TransferKind::Push(push) => push.describe(&mut info),
        }
        info
    }

    /// What went wrong, for people; empty if nothing did.
    pub fn error_text(&self) -> String {
        self.cell().look().3
    }

    /// The bytes that a sender needs to push into this receive; `None` for other transfers.
    pub fn offer(&self) -> Option<&[u8]> {
        match &self.kind {
            TransferKind::Receive(_, offer) => Some(offer),
            _ => None,
        }
    }

    /// The bytes that the publisher attached.
    pub fn aux(&self) -> Vec<u8> {
        match &self.kind {
            TransferKind::Import(import) | TransferKind::Receive(import, _) => {
                lock(&import.aux).clone()
            }
            TransferKind::Push(_) => Vec::new(),
        }
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.cell().abandon();
        if self.poll() == Status::KVF_IN_PROGRESS {
            self.cancel();
        }
    }
}
