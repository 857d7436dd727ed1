//! Reading one peer by asking it.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::incoming::{Incoming, connection_key, ended_by_source};
use super::message::{Kind, Message};
use super::small::{Asked, SMALL_BYTES};
use super::{Channel, KEY_BYTES};
use crate::cuda::Devices;
use crate::error::{Result, Status};
use crate::transport::device::flow::Flow;
use crate::transport::pieces::{Asking, PIPELINE, Placed, Ranges, place};
use crate::transport::ucx::endpoint::EndpointState;
use crate::transport::ucx::engine::Engine;
use crate::transport::{DataPath, ReadJob};
use crate::wire::{self, Body, DataHello, Frame};
use crate::{bail, err};

/// A source agent, as it announced itself.
pub struct MessageSource {
    /// For people.
    pub name: String,
    /// Of its UCX worker.
    pub address: Vec<u8>,
    /// That it gave us.
    pub token: [u8; KEY_BYTES],
    /// Length of each pool.
    pub pools: BTreeMap<u32, u64>,
    /// What it answers a hello with.
    pub nonce: [u8; crate::memory::NONCE_BYTES],
}

/// Answers that have not come for this long when a job is given up may never come: the source's side of the
/// connection may have ended, and nothing else would say so here.
const SILENCE: Duration = Duration::from_secs(1);

/// Reads one source agent.
pub struct MessagePath {
    engine: Arc<Engine>,
    source: MessageSource,
    link: Link,
    reason: String,
    devices: Arc<Devices>,
    pub(super) silence: Duration,
    silent: AtomicBool,
}

impl MessagePath {
    /// Connects, and gets the nonce through the data path within `patience`.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` for an address of an impossible length, `KVF_ERR_PEER_LOST` if somebody else
    /// answers; else UCX's text.
    pub fn new(
        engine: Arc<Engine>,
        source: MessageSource,
        reason: String,
        patience: Duration,
        devices: Arc<Devices>,
    ) -> Result<Self> {
        let mut path = Self {
            link: Link::new(&engine, &source)?,
            engine,
            source,
            reason,
            devices,
            silence: SILENCE,
            silent: AtomicBool::new(false),
        };
        // An old connection may not have noticed yet that the network works again.
        if let Err(e) = path.greet(patience / 2, false) {
            if e.status != Status::KVF_ERR_TRANSFER {
                return Err(e);
            }
            path.engine.close_endpoint(path.link.endpoint);
            path.link = Link::new(&path.engine, &path.source)?;
            path.greet(patience / 2, true)?;
        }
        Ok(path)
    }

    fn greet(&self, patience: Duration, anew: bool) -> Result<()> {
        let deadline = Instant::now() + patience;
        let channel = self.channel()?;
        let hello = DataHello {
            token: self.source.token.to_vec(),
            secret: self.link.secret.to_vec(),
            address: self.engine.address().to_vec(),
            job: channel.number,
            anew,
        };
        let mut frame = Vec::new();
        let body = Some(Body::DataHello(hello));
        wire::encode(&Frame { body }, &mut frame)?;
        let mut nonce = self.source.nonce.map(|_| 0u8);
        let (at, bytes) = (nonce.as_mut_ptr(), nonce.len());
        let mut ranges = Ranges::default();
        ranges.push(at, bytes);
        // SAFETY: `nonce` is not touched before the channel is closed.
        unsafe { channel.expect(ranges, bytes as u64) };
        let hello = Message::new(Kind::Hello, &[], frame);
        let sent = self.engine.send(self.link.endpoint, hello);
        while sent.is_ok() && channel.done() == 0 && channel.error().is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            channel.wait(None, Some(left))?;
        }
        let (done, error) = (channel.done() > 0, channel.error());
        drop(channel);
        sent?;
        let name = &self.source.name;
        match (done, error) {
            (true, _) if nonce == self.source.nonce => Ok(()),
            (true, _) => bail!(
                KVF_ERR_PEER_LOST,
                "{name} does not hold the announced lease table: another program answers there"
            ),
            (_, Some(e)) => Err(e.context(format_args!("ucx hello to {name}"))),
            _ => bail!(
                KVF_ERR_TRANSFER,
                "{name} did not answer a hello over ucx within {patience:?}"
            ),
        }
    }

    pub(super) fn pools(&self) -> &BTreeMap<u32, u64> {
        &self.source.pools
    }

    pub(super) fn devices(&self) -> &Devices {
        &self.devices
    }

    pub(super) fn channel(&self) -> Result<OpenChannel> {
        let (incoming, link) = (self.engine.incoming(), &self.link);
        let channel = OpenChannel {
            channel: incoming.open_channel(link.endpoint, link.secret)?,
            incoming: incoming.clone(),
        };
        // An endpoint that ends says so first and tells the channels then: one opened later hears nothing.
        self.engine.check_open(&link.state)?;
        // So does a source that ends the connection.
        if !incoming.is_trusted(&link.secret) {
            return Err(ended_by_source());
        }
        Ok(channel)
    }

    /// Sends frames to the source.
    pub(super) fn ask(&self, frames: Vec<u8>) -> Result<()> {
        let message = Message::new(Kind::Ask, &self.link.key, frames);
        self.engine.send(self.link.endpoint, message)
    }

    /// A job is given up that has heard nothing since then.
    pub(super) fn given_up(&self, heard: Instant) {
        if heard.elapsed() >= self.silence {
            self.silent.store(true, Ordering::Relaxed);
        }
    }

    fn outcome(&self, job: &ReadJob, received: Result<()>) -> Result<()> {
        match received {
            // What was cut off by a cancel is no failure of its own.
            Err(_) if job.is_cancelled() => Ok(()),
            outcome => outcome.map_err(|e| {
                e.context(format_args!(
                    "ucx read of {} after {} of {} bytes",
                    self.source.name,
                    job.moved(),
                    job.bytes()
                ))
            }),
        }
    }

    /// `coming` keeps what the channel may write until the caller has closed it.
    fn receive_all(
        &self,
        job: &ReadJob,
        channel: &Channel,
        coming: &mut VecDeque<Placed>,
        flow: &mut Flow<'_>,
    ) -> Result<()> {
        let wake = job.wake()?;
        let mut out = Vec::new();
        let mut asking = Asking::begin(job, channel.number, &mut out)?;
        let (mut arrived, mut heard) = (0, Instant::now());
        loop {
            while coming.len() < PIPELINE
                && let Some(batch) = asking.next(job, &mut out)?
            {
                let mut ranges = Ranges::default();
                let placed = place(job, &self.source.pools, &batch, &mut ranges, flow)?;
                // SAFETY: `place` has put every byte inside a pool of this job, which keeps it, or
                // it is in the buffer of a lane that `placed` has; the channel is closed before
                // either goes.
                unsafe { channel.expect(ranges, placed.bytes) };
                coming.push_back(placed);
                asking.give_back(batch);
            }
            if !out.is_empty() {
                self.ask(std::mem::take(&mut out))?;
            }
            if coming.is_empty() {
                return Ok(());
            }
            while channel.done() == arrived {
                if job.is_cancelled() {
                    self.given_up(heard);
                    return Ok(());
                }
                if let Some(e) = channel.error() {
                    return Err(e);
                }
                channel.wait(Some(wake.as_fd()), None)?;
            }
            heard = Instant::now();
            while channel.done() > arrived
                && let Some(placed) = coming.pop_front()
            {
                arrived += 1;
                placed.arrived(job, flow)?;
            }
            if channel.lease_lost() {
                job.lose_lease();
            }
        }
    }
}

/// A connection to a source.
struct Link {
    engine: Arc<Engine>,
    endpoint: u64,
    state: Arc<EndpointState>,
    /// What answers begin with.
    secret: [u8; KEY_BYTES],
    /// What asks begin with.
    key: [u8; 2 * KEY_BYTES],
}

impl Link {
    fn new(engine: &Arc<Engine>, source: &MessageSource) -> Result<Self> {
        let mut secret = [0; KEY_BYTES];
        if let Err(e) = getrandom::fill(&mut secret) {
            bail!(KVF_ERR_SYSTEM, "no random numbers from the kernel: {e}");
        }
        let (name, address) = (source.name.clone(), source.address.clone());
        let (endpoint, state) = engine.connect(name, address, Vec::new())?;
        engine.incoming().trust(secret);
        Ok(Self {
            engine: engine.clone(),
            endpoint,
            state,
            secret,
            key: connection_key(&source.token, &secret),
        })
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.engine.incoming().forget(&self.secret);
        let goes = Message::new(Kind::Ask, &self.key, Vec::new());
        let _ = self.engine.send(self.endpoint, goes); // an engine that has ended has told by itself
    }
}

/// Closes the channel when it is dropped.
pub(super) struct OpenChannel {
    channel: Arc<Channel>,
    incoming: Arc<Incoming>,
}

impl std::ops::Deref for OpenChannel {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

impl Drop for OpenChannel {
    fn drop(&mut self) {
        self.incoming.close_channel(&self.channel);
    }
}

/// What was asked for when the job was begun.
fn begun(job: &ReadJob) -> Option<Box<Asked>> {
    job.unpark().and_then(|begun| begun.downcast().ok())
}

impl DataPath for MessagePath {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn reason(&self) -> String {
        format!("{}, {}", self.engine.describe(), self.reason)
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        if let Some(mut asked) = begun(job) {
            let taken = job.wake().and_then(|wake| {
                self.take_small(job, &mut asked, &mut |channel| {
                    channel.wait(Some(wake.as_fd()), None).map(|()| true)
                })
            });
            return self.outcome(job, taken.map(|_| ()));
        }
        let mut flow = Flow::new(&self.devices, job);
        let mut coming = VecDeque::new();
        let received = self
            .channel()
            .and_then(|channel| self.receive_all(job, &channel, &mut coming, &mut flow));
        drop(coming);
        self.outcome(job, flow.finish(received))
    }

    /// Asks, for whoever goes on with it.
    fn run_at_once(&self, job: &ReadJob) -> Result<bool> {
        match self.ask_small(job) {
            Ok(Some(asked)) => job.park(Box::new(asked), true),
            Ok(None) => {}
            Err(_) => job.rewind(), // a worker begins anew, and says what is wrong
        }
        Ok(false)
    }

    fn may_be_joined(&self, job: &ReadJob) -> bool {
        job.is_joinable()
    }

    /// Takes small answers that are on their way.
    fn run_until(&self, job: &ReadJob, until: Instant) -> Result<bool> {
        if !job.is_joinable() {
            return Ok(false);
        }
        let Some(mut asked) = begun(job) else {
            return Ok(false);
        };
        let taken = job.wake().and_then(|wake| {
            self.take_small(job, &mut asked, &mut |channel| {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(false);
                }
                channel.wait(Some(wake.as_fd()), Some(left)).map(|()| true)
            })
        });
        if let Ok(false) = taken {
            job.park(asked, true);
            return Ok(false);
        }
        self.outcome(job, taken.map(|_| ())).map(|()| true)
    }

    fn has_to_ask(&self) -> bool {
        true
    }

    fn attest(&self, job: &ReadJob) -> Result<bool> {
        if self.source.pools.is_empty() {
            return Err(err!(
                KVF_ERR_INTERNAL,
                "a path without pools has moved bytes"
            ));
        }
        Ok(!job.lease_lost())
    }

    fn most_workers(&self) -> usize {
        1 // the progress thread does the copying
    }

    fn inline_bytes(&self) -> u64 {
        SMALL_BYTES
    }

    fn is_usable(&self) -> bool {
        let incoming = self.engine.incoming();
        self.link.state.is_open()
            && !self.silent.load(Ordering::Relaxed)
            && incoming.is_trusted(&self.link.secret)
            && !self.engine.has_ended()
    }
}

impl fmt::Debug for MessagePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MessagePath")
            .field("peer", &self.source.name)
            .field("pools", &self.source.pools.len())
            .finish_non_exhaustive()
    }
}
