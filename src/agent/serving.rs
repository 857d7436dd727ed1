//! Data connections: who may open one, what it may read, and the threads that serve them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use super::api::{ImportGroup, ImportState, Timeouts};
use super::lock;
use super::metadata::{EngineInfo, RankInfo, incarnation};
use super::opening::{Identity, call_blocking, receive_blocking};
use super::shared::{Shared, random};
use super::ticket::key;
use super::wants::{Wants, bind};
use crate::cuda::Devices;
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::memory::Pool;
use crate::plan::{Pair, Plan, Policy};
use crate::runtime::{Thread, spawn, stalled};
use crate::transport::pieces::{Opened, Serving, Source};
use crate::transport::tcp::{Connect, Stream, Until, serve};
use crate::transport::ucx;
use crate::wire::{self, Body, DataHello, DataOpen, DataPart, Frame, pack_slots, unpack_slots};
use crate::{bail, err};

/// Data connections that one agent serves at most.
const MAX_CONNECTIONS: usize = 1024;

/// A reader that may open data connections.
#[derive(Clone)]
pub(super) struct Reader {
    agent: Incarnation,
    engine: Arc<EngineInfo>,
    /// Its place in `engine.ranks`.
    index: usize,
    /// What we move to it; planned when it first asks.
    pair: Arc<OnceLock<Arc<Pair>>>,
}

impl Reader {
    /// # Errors
    /// The layouts do not fit, or we hold nothing that the reader needs.
    fn pair(&self, shared: &Shared) -> Result<Arc<Pair>> {
        if let Some(pair) = self.pair.get() {
            return Ok(pair.clone());
        }
        let own = shared.lock().engine()?;
        let plan = Plan::new(&own.info.layouts(), &self.engine.layouts(), Policy::Spread)?;
        let mut out = plan.out_of_source(own.index);
        match out.find(|pair| pair.dst == self.index) {
            Some(pair) => Ok(self.pair.get_or_init(|| pair.clone()).clone()),
            None => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "this rank moves nothing to the reader"
            ),
        }
    }
}

/// Tokens given out and connections served.
#[derive(Default)]
pub(super) struct DataConnections {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    tokens: HashMap<[u8; 16], Reader>,
    next: u64,
    open: HashMap<u64, Open>,
    threads: Vec<Thread>,
    closed: bool,
}

/// A connection that is served.
struct Open {
    of: Incarnation,
    /// Ends it.
    end: Box<dyn Fn() + Send>,
}

impl DataConnections {
    /// A token for a reader, to be shown on its data connections.
    pub fn token(&self, agent: Incarnation, engine: &Arc<EngineInfo>, index: usize) -> Vec<u8> {
        let Ok(token) = random() else {
            return Vec::new(); // without one no data connection is let in
        };
        let mut inner = lock(&self.inner);
        // Answers to two requests may cross: the reader may use either.
        let known = inner.tokens.iter().find(|(_, reader)| {
            reader.agent == agent && reader.index == index && Arc::ptr_eq(&reader.engine, engine)
        });
        if let Some((token, _)) = known {
            return token.to_vec();
        }
        inner.tokens.retain(|_, reader| reader.agent != agent);
        let engine = engine.clone();
        inner.tokens.insert(
            token,
            Reader {
                agent,
                engine,
                index,
                pair: Arc::default(),
            },
        );
        token.to_vec()
    }

    /// The agent is gone: its connections end, its token is worth nothing.
    pub fn drop_agent(&self, agent: Incarnation) {
        let mut inner = lock(&self.inner);
        inner.tokens.retain(|_, reader| reader.agent != agent);
        for open in inner.open.values().filter(|open| open.of == agent) {
            (open.end)();
        }
    }

    /// Ends all connections and waits for their threads; false: some were left behind.
    pub fn close(&self, deadline: Instant) -> bool {
        let threads = {
            let mut inner = lock(&self.inner);
            inner.closed = true;
            inner.tokens.clear();
            inner.open.values().for_each(|open| (open.end)());
            std::mem::take(&mut inner.threads)
        };
        let mut all = true;
        for thread in threads {
            all &= thread.join_until(deadline);
        }
        all
    }
}

/// Takes over a connection whose data hello has come.
///
/// # Errors
/// A token that was not given out, or too many connections.
pub(super) fn admit(
    shared: &Arc<Shared>,
    fd: OwnedFd,
    agent: Incarnation,
    hello: &DataHello,
) -> Result<()> {
    let token = incarnation(&hello.token)?.0;
    let stream = Stream::new(fd).map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "socket", &e))?;
    let times = &shared.config.timeouts;
    stream.watch_peer(times.heartbeat, times.data_silence());
    let stream = Arc::new(stream);
    let ended = stream.clone();
    let end = Box::new(move || ended.shutdown());
    let (reader, number) = register(shared, token, Some(agent), end)?;
    serve_on_thread(shared, reader, number, move |source, limits| {
        let mut welcome = Vec::new();
        let welcome_by = Until {
            deadline: Instant::now() + limits.stall,
            wake: None,
        };
        let frame = Frame {
            body: Some(Body::Welcome(wire::Welcome {
                protocol: wire::PROTOCOL,
                incarnation: source.shared.incarnation.0.to_vec(),
            })),
        };
        wire::encode(&frame, &mut welcome)?;
        stream.send_all(&welcome, welcome_by)?;
        serve(&stream, source, limits)
    })
}

/// Notes a connection of the reader that has the token; `agent`: who it must be; `None` over UCX,
/// where the token alone says so.
fn register(
    shared: &Shared,
    token: [u8; 16],
    agent: Option<Incarnation>,
    end: Box<dyn Fn() + Send>,
) -> Result<(Reader, u64)> {
    let mut inner = lock(&shared.data.inner);
    let reader = match inner.tokens.get(&token) {
        Some(reader) if agent.is_none_or(|agent| reader.agent == agent) => reader.clone(),
        _ => bail!(KVF_ERR_AUTH, "a data connection without a valid token"),
    };
    if inner.open.len() >= MAX_CONNECTIONS {
        bail!(KVF_ERR_LIMIT, "{} data connections", inner.open.len());
    }
    inner.next += 1;
    let number = inner.next;
    let of = reader.agent;
    inner.open.insert(number, Open { of, end });
    inner.threads.retain(|thread| !thread.is_finished());
    Ok((reader, number))
}

/// Runs `serve` on a thread of its own and forgets the connection afterwards.
fn serve_on_thread(
    shared: &Arc<Shared>,
    reader: Reader,
    number: u64,
    serve: impl FnOnce(&Publications, Serving) -> Result<()> + Send + 'static,
) -> Result<()> {
    let source = Publications {
        shared: shared.clone(),
        reader,
    };
    let name = format!(
        "{}-d{number}",
        super::setup::thread_name(&shared.config.name)
    );
    let serving = move || {
        let serving = &source.shared;
        let limits = Serving {
            stall: serving.config.timeouts.peer_silence,
            spin: serving.config.spin,
        };
        if let Err(e) = serve(&source, limits) {
            serving
                .log
                .debug(format_args!("a data connection ended: {e}"));
        }
        lock(&serving.data.inner).open.remove(&number);
    };
    // Held until the thread is in the list: `close` either finds it there, or has said before that
    // no more are to come.
    let mut inner = lock(&shared.data.inner);
    let spawned = match inner.closed {
        true => Err(err!(KVF_ERR_SHUTDOWN, "the agent ends")),
        false => spawn(name, &shared.config.affinity, serving),
    };
    match spawned {
        Ok(thread) => {
            inner.threads.push(thread);
            Ok(())
        }
        Err(e) => {
            inner.open.remove(&number);
            Err(e)
        }
    }
}

/// Lets in readers that come over UCX; what they send is for UCX's thread, which may outlive the agent.
pub(super) struct OverUcx(pub Weak<Shared>);

impl OverUcx {
    fn agent(&self) -> Result<Arc<Shared>> {
        match self.0.upgrade() {
            Some(shared) => Ok(shared),
            None => bail!(KVF_ERR_CANCELLED, "the agent has ended"),
        }
    }
}

impl ucx::Accept for OverUcx {
    fn admits(&self, token: &[u8; 16]) -> Result<String> {
        let shared = self.agent()?;
        let inner = lock(&shared.data.inner);
        let Some(reader) = inner.tokens.get(token) else {
            shared.metrics.refused("data");
            bail!(KVF_ERR_AUTH, "a data connection without a valid token");
        };
        let name = &reader.engine.ranks[reader.index].name;
        Ok(format!("agent {name}"))
    }

    fn accept(&self, connection: &Arc<ucx::Connection>) -> Result<()> {
        let shared = self.agent()?;
        let ended = connection.clone();
        let end = Box::new(move || ended.end("the agent ends it".into()));
        let (reader, number) = register(&shared, connection.token, None, end)?;
        let served = connection.clone();
        serve_on_thread(&shared, reader, number, move |source, limits| {
            let nonce = source.shared.leases.nonce();
            served.serve(&nonce, source, limits)
        })
    }

    fn dropped(&self, why: &'static str) {
        if let Some(shared) = self.0.upgrade() {
            shared.metrics.dropped_message(why);
        }
    }
}

/// Our publications, as one reader may see them.
struct Publications {
    shared: Arc<Shared>,
    reader: Reader,
}

impl Source for Publications {
    fn open(&self, open: &DataOpen) -> Result<Opened> {
        let state = self.shared.lock();
        let cell = state.published.get(&open.epoch).and_then(|c| c.upgrade());
        drop(state);
        let Some(cell) = cell.filter(|c| c.id.key == key(open.key)) else {
            bail!(
                KVF_ERR_EXPIRED,
                "no publication of {} with epoch {}: it has ended",
                key(open.key),
                open.epoch
            );
        };
        let pair = self.reader.pair(&self.shared)?;
        let bindings = bind(&pair, &wants(open)?, &cell.entry)?;
        let (leases, lease) = (self.shared.leases.clone(), cell.lease);
        Ok(Opened {
            bindings: bindings.into_iter().map(|(_, binding)| binding).collect(),
            // A reader that did not wait for the source's stream is refused like a late one.
            holds: Box::new(move || cell.readable.load(Ordering::Acquire) && leases.holds(lease)),
        })
    }

    fn pool(&self, id: u32) -> Option<Arc<Pool>> {
        Some(self.shared.lock().pools.get(id)?.pool.clone())
    }

    fn devices(&self) -> &Devices {
        &self.shared.devices
    }
}

fn wants(open: &DataOpen) -> Result<Wants> {
    let mut wants = Wants {
        groups: Vec::new(),
        states: Vec::new(),
        prefix_tag: 0,
    };
    for part in &open.parts {
        let slots = unpack_slots(&part.slots)?;
        match part.state {
            false => wants.groups.push(ImportGroup {
                group: part.group,
                slots,
                first_ordinal: part.first_ordinal,
                skip_token: part.skip_token,
                token_end: part.token_end,
            }),
            true => wants.states.push(ImportState {
                group: part.group,
                slot: slots.first().copied().unwrap_or(-1),
                as_of_token: part.token_end,
            }),
        }
    }
    Ok(wants)
}

/// What a source must know to derive the copies of an import.
pub(super) fn data_open(
    wants: Arc<Wants>,
    key: crate::ids::Key,
    epoch: u64,
) -> impl FnOnce() -> DataOpen {
    move || {
        let groups = wants.groups.iter().map(|g| DataPart {
            group: g.group,
            state: false,
            slots: pack_slots(&g.slots),
            first_ordinal: g.first_ordinal,
            skip_token: g.skip_token,
            token_end: g.token_end,
        });
        let states = wants.states.iter().map(|s| DataPart {
            group: s.group,
            state: true,
            slots: pack_slots(&[s.slot]),
            first_ordinal: 0,
            skip_token: 0,
            token_end: s.as_of_token,
        });
        DataOpen {
            job: 0,
            key: Some(key.into()),
            epoch,
            parts: groups.chain(states).collect(),
        }
    }
}

/// Where data connections to a source go.
#[derive(Clone)]
pub(super) enum Door {
    Tcp(std::net::SocketAddr),
    Unix(Vec<u8>),
}

/// Opens data connections to a source.
pub(super) fn dialler(shared: &Shared, source: &RankInfo, door: Door, token: Vec<u8>) -> Connect {
    let hello = DataHello {
        token,
        ..Default::default()
    };
    let own = Identity::of(shared);
    let (times, closing) = (shared.config.timeouts, shared.closing.clone());
    let (expected, name) = (source.incarnation, source.name.clone());
    Box::new(move |wake| {
        let wake = wake.unwrap_or_else(|| closing.as_fd());
        dial(&door, &own, &hello, expected, &times, wake)
            .map_err(|e| e.context(format!("data connection to agent {name}")))
    })
}

fn dial(
    door: &Door,
    own: &Identity,
    hello: &DataHello,
    expected: Incarnation,
    times: &Timeouts,
    wake: BorrowedFd<'_>,
) -> Result<Stream> {
    let until = Until {
        deadline: Instant::now() + times.connect,
        wake: Some(wake),
    };
    let system = |e: io::Error| Error::os(Status::KVF_ERR_TRANSFER, "connect", &e);
    let stream = match door {
        Door::Tcp(address) => Stream::connect_tcp(address, until),
        Door::Unix(name) => stalled(|| Stream::connect_unix(name, Some(times.connect))),
    }
    .map_err(system)?;
    stream.watch_peer(times.heartbeat, times.data_silence());
    call_blocking(own, expected, &stream, until)?;
    let mut bytes = Vec::new();
    wire::encode(
        &Frame {
            body: Some(Body::DataHello(hello.clone())),
        },
        &mut bytes,
    )?;
    stream.send_all(&bytes, until)?;
    let answer = receive_blocking(&stream, until)?;
    match answer {
        Body::Welcome(w) if w.incarnation == expected.0 => Ok(stream),
        Body::Refuse(r) => Err(Error::new(super::metadata::status(r.status), r.text)),
        _ => Err(err!(KVF_ERR_PROTOCOL, "somebody else answers there")),
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::runtime::Wake;

    #[test]
    fn who_is_not_answered_stops_when_woken() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let door = Door::Tcp(listener.local_addr().unwrap());
        let wake = Wake::new().unwrap();
        let own = Identity {
            incarnation: Incarnation([1; 16]),
            name: "reader".into(),
            key: None,
        };
        let times = Timeouts {
            connect: Duration::from_secs(600), // longer than any test
            ..Timeouts::default()
        };
        let e = std::thread::scope(|scope| {
            let dialled = scope.spawn(|| {
                let (hello, source) = (DataHello::default(), Incarnation([2; 16]));
                dial(&door, &own, &hello, source, &times, wake.as_fd())
            });
            let _silent = listener.accept().unwrap();
            wake.set();
            dialled.join().unwrap().unwrap_err()
        });
        assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
        assert!(e.text.contains("cancelled"), "{e}");
    }
}
