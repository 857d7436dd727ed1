//! Streams of the engine: operations that wait until what a stream holds is done. The driver calls
//! us back; nobody waits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::control::{Command, Control, Timer};
use super::shared::Shared;
use super::ticket::key;
use crate::cuda::{CallerStream, Context, Driver, Gate, Uuid};
use crate::error::{Error, Result};
use crate::ids::{Epoch, Incarnation, PublicationId};
use crate::observe::fault;
use crate::session::End;
use crate::wire;

/// Whose gate it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Gated {
    Publication(PublicationId),
    Import(u64),
}

/// Gates that are not open.
pub(super) type Gates = BTreeMap<Gated, Gate>;

/// How often the driver is asked about gates that are not open: in a context that has failed it
/// calls nobody back.
const QUERY_EVERY: Duration = Duration::from_millis(100);

impl Shared {
    /// Contexts of this agent's device memory; empty = it has none.
    pub fn contexts(&self) -> Vec<Context> {
        self.lock().pools.contexts().collect()
    }

    /// Marks what the stream holds so far; `None`: no stream, or it is done already.
    ///
    /// # Errors
    /// A stream that is none, is captured, or belongs to a context without a pool of ours.
    pub fn gate(
        self: &Arc<Self>,
        stream: Option<CallerStream>,
        what: Gated,
    ) -> Result<Option<Gate>> {
        let Some(stream) = stream else {
            return Ok(None);
        };
        let without = match what {
            Gated::Publication(_) => "cuda_no_source_gate",
            Gated::Import(_) => "cuda_no_destination_gate",
        };
        if fault::deviates(without) {
            return Ok(None);
        }
        let commands = self.commands.clone();
        Gate::new(&self.devices, stream, &self.contexts(), move || {
            // The control thread ends only with the agent.
            let _ = commands.send(Command::GateOpen(what));
        })
        .map_err(|e| e.context("desc.stream"))
    }
}

/// Whether a context is on this device.
pub(super) fn is_device(context: Context, uuid: &Uuid) -> bool {
    Driver::get().is_ok_and(|driver| driver.uuid(context.device).is_ok_and(|id| id == *uuid))
}

impl Control {
    /// Keeps a gate until it is open; the operation it belongs to is known from now on.
    pub fn hold_gate(&mut self, what: Gated, gate: Gate) {
        self.gates.insert(what, gate);
        // The driver may have called before the operation was known.
        self.check_gate(what);
        self.arm_gates();
    }

    fn arm_gates(&mut self) {
        let at = (!self.gates.is_empty()).then(|| self.shared.now() + QUERY_EVERY);
        self.timers.set(Timer::Gates, at);
    }

    /// Asks the driver about every gate.
    pub fn check_gates(&mut self) {
        let all: Vec<Gated> = self.gates.keys().copied().collect();
        for what in all {
            self.check_gate(what);
        }
        self.arm_gates();
    }

    fn check_gate(&mut self, what: Gated) {
        match self.gates.get(&what).map(Gate::is_open) {
            None | Some(Ok(false)) => {}
            Some(Ok(true)) => self.gate_open(what),
            Some(Err(e)) => self.gate_failed(what, e),
        }
    }

    /// What the stream held is done.
    pub fn gate_open(&mut self, what: Gated) {
        if self.gates.remove(&what).is_none() {
            return; // not known yet, or over
        }
        match what {
            Gated::Publication(id) => self.publication_readable(id),
            Gated::Import(id) => self.start_jobs(id),
        }
    }

    fn gate_failed(&mut self, what: Gated, e: Error) {
        self.gates.remove(&what);
        let e = e.context("waiting for the caller's stream");
        let end = End::new(e.status, e.text);
        match what {
            Gated::Publication(id) => {
                self.publication_event(id, crate::session::source::Event::Withdrawn(end));
            }
            Gated::Import(id) => {
                self.import_event(id, crate::session::reader::Event::Failed(end));
            }
        }
    }

    /// A source's stream has come so far.
    pub fn on_readable(&mut self, agent: Incarnation, readable: &wire::Readable) {
        let id = PublicationId {
            source: agent,
            key: key(readable.key),
            epoch: Epoch(readable.epoch),
        };
        self.source_readable(id);
    }
}
