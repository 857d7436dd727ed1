//! Waiting for what an engine has enqueued, without a thread that waits.

use std::sync::Arc;

use super::stream::Event;
use super::{CallerStream, Context, Devices, Driver, Lane};
use crate::error::Result;
use crate::observe::fault;

/// Work on an engine's stream that has to be done first. A stream of its own, so that no gate
/// waits behind another one.
#[derive(Debug)]
pub struct Gate {
    devices: Arc<Devices>,
    lane: Option<Lane>,
}

impl Gate {
    /// Marks what `stream` holds so far; `opened` is called on a thread of the driver when it is
    /// done. `None`: it is done already, and `opened` is not called.
    ///
    /// # Errors
    /// As for [`CallerStream::context`].
    pub fn new(
        devices: &Arc<Devices>,
        stream: CallerStream,
        allowed: &[Context],
        opened: impl FnOnce() + Send + 'static,
    ) -> Result<Option<Self>> {
        let context = stream.context(allowed)?;
        let driver = Driver::get()?;
        let event = match fault::deviates("cuda_gate_wrong_stream") {
            false => Event::record(driver, context, stream.raw())?,
            true => Event::record(driver, context, devices.lane(context)?.raw())?,
        };
        if event.is_done()? {
            return Ok(None);
        }
        let mut lane = devices.lane(context)?;
        let enqueued = lane
            .wait_for(&event)
            .and_then(|()| lane.call(Box::new(opened)));
        let gate = Self {
            devices: devices.clone(),
            lane: Some(lane),
        };
        enqueued.map(|()| Some(gate))
    }

    /// Whether it is open; for contexts that have failed, in which nobody is called.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: the context has failed.
    pub fn is_open(&self) -> Result<bool> {
        match &self.lane {
            Some(lane) => lane.is_idle(),
            None => Ok(true),
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(lane) = self.lane.take() {
            self.devices.give_back(lane);
        }
    }
}
