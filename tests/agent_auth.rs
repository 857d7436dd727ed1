//! The pre-shared key between agents, and what strangers may do at a listener: nothing.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

mod small_layout;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvferry::agent::*;
use kvferry::error::Status::{self, *};
use kvferry::ids::{Incarnation, Key};
use kvferry::wire::opening::{Caller, Purpose};
use kvferry::wire::{self, Body, Frame};
use small_layout::small_layout;

const LONG: Duration = Duration::from_secs(20);
const SLOT: u64 = 1 << 20;

struct Side {
    agent: Agent,
    pool: (*mut u8, u64),
    address: SocketAddr,
}

fn key(byte: u8) -> Option<AuthKey> {
    Some(AuthKey::new(vec![byte; 32]).unwrap())
}

fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

fn side(name: &str, auth_key: Option<AuthKey>, transport: &str, connect: Duration) -> Side {
    configured(name, auth_key, transport, connect, |_| {})
}

fn configured(
    name: &str,
    auth_key: Option<AuthKey>,
    transport: &str,
    connect: Duration,
    configure: impl FnOnce(&mut AgentConfig),
) -> Side {
    let address = free_address();
    let mut config = AgentConfig {
        name: name.into(),
        listen: address.to_string(),
        transports: vec![transport.into()],
        auth_key,
        timeouts: Timeouts {
            connect,
            ..Timeouts::default()
        },
        ..AgentConfig::default()
    };
    configure(&mut config);
    let agent = Agent::create(config, None).unwrap();
    let pool = agent.create_pool(4 * SLOT, None, 0).unwrap();
    agent.set_layout(small_layout(pool, SLOT, 4)).unwrap();
    agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
    let pool = agent.pool_memory(pool).unwrap();
    Side {
        agent,
        pool,
        address,
    }
}

impl Side {
    #[allow(clippy::mut_from_ref)] // raw memory that the agent owns
    fn bytes(&self) -> &mut [u8] {
        // SAFETY: the pool lives as long as the agent; the test does not touch it in parallel.
        unsafe { std::slice::from_raw_parts_mut(self.pool.0, self.pool.1 as usize) }
    }

    fn peer(&self, other: &Self) -> Peer {
        let metadata = other.agent.engine_metadata().unwrap();
        self.agent.add_peer(&metadata, 0).unwrap()
    }

    /// Connections that were refused for a reason.
    fn refused(&self, reason: &str) -> u64 {
        let text = self.agent.metrics_text().unwrap();
        let start = format!("kvferry_refused_connections_total{{reason=\"{reason}\"");
        let line = text.lines().find(|l| l.starts_with(&start));
        line.map_or(0, |l| l.rsplit(' ').next().unwrap().parse().unwrap())
    }

    fn wait_refused(&self, reason: &str, at_least: u64) {
        let until = Instant::now() + LONG;
        while self.refused(reason) < at_least {
            assert!(Instant::now() < until, "{reason}: {}", self.refused(reason));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn incarnation(&self) -> Incarnation {
        // Whoever is told "you mean another one" is told who is there.
        let mut stranger = Stranger::new(self.address);
        let nobody = Incarnation([0; 16]);
        let (_, open) = Caller::new(None, Purpose::Control, (nobody, ""), nobody, [0; 32]);
        stranger.send(open);
        assert!(matches!(stranger.hear(), Some(Body::Refuse(_))));
        let metadata = self.agent.metadata().unwrap();
        let at = metadata.len();
        // The body's first field: tag 1, 16 bytes; the head is 32 bytes.
        let found = (32..at - 18).find(|i| metadata[*i..*i + 2] == [0x0a, 16]);
        let from = found.unwrap() + 2;
        Incarnation(metadata[from..from + 16].try_into().unwrap())
    }
}

/// A hand-over from `source` to `sink`, compared.
fn hands_over(source: &Side, sink: &Side, peer: &Peer) {
    for (i, byte) in source.bytes().iter_mut().enumerate() {
        *byte = (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3];
    }
    let publication = source
        .agent
        .publish(PublishDesc {
            key: Key {
                request: 1,
                attempt: 0,
            },
            groups: vec![PublishedGroup {
                group: 0,
                slots: vec![3, 1],
                token_end: 2,
                ..PublishedGroup::default()
            }],
            ..PublishDesc::default()
        })
        .unwrap();
    let transfer = sink
        .agent
        .import_begin(
            peer,
            ImportDesc {
                ticket: publication.ticket().to_vec(),
                groups: vec![ImportGroup {
                    group: 0,
                    slots: vec![0, 2],
                    token_end: u64::MAX,
                    ..ImportGroup::default()
                }],
                ..ImportDesc::default()
            },
        )
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    let slot = |side: &Side, n: usize| side.bytes()[n * SLOT as usize..][..SLOT as usize].to_vec();
    assert_eq!(slot(sink, 0), slot(source, 3));
    assert_eq!(slot(sink, 2), slot(source, 1));
    assert!(slot(sink, 1).iter().all(|b| *b == 0));
    assert_eq!(publication.wait(LONG), KVF_OK);
}

/// Names of this process's threads that begin so.
fn threads(begin: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|t| std::fs::read_to_string(t.unwrap().path().join("comm")).ok());
    names.filter(|name| name.starts_with(begin)).collect()
}

/// A socket without an agent behind it.
struct Stranger(TcpStream);

impl Stranger {
    fn new(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        Self(stream)
    }

    fn send(&mut self, body: Body) {
        let mut bytes = Vec::new();
        wire::encode(&Frame { body: Some(body) }, &mut bytes).unwrap();
        self.0.write_all(&bytes).unwrap();
    }

    /// The next message; `None` at the end of the connection.
    fn hear(&mut self) -> Option<Body> {
        let mut head = [0; 4];
        self.0.read_exact(&mut head).ok()?;
        let mut body = vec![0; u32::from_le_bytes(head) as usize];
        self.0.read_exact(&mut body).ok()?;
        wire::decode(&body).unwrap().body
    }

    fn refusal(&mut self) -> (Status, String) {
        match self.hear() {
            Some(Body::Refuse(refuse)) => {
                assert!(self.hear().is_none(), "the connection ends after a refusal");
                (Status::from_code(refuse.status).unwrap(), refuse.text)
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn equal_keys_hand_over_on_every_transport() {
    for transport in ["inproc", "unix", "tcp"] {
        let (source, sink) = (
            side("src", key(7), transport, LONG),
            side("dst", key(7), transport, LONG),
        );
        let peer = sink.peer(&source);
        assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
        assert_eq!(peer.info().transport, transport);
        hands_over(&source, &sink, &peer);
    }
}

#[test]
fn a_missing_or_wrong_key_is_an_error_on_both_sides_that_says_which() {
    for (theirs, mine, at_theirs, word) in [
        (key(1), None, "no_key", "without a pre-shared key"),
        (None, key(1), "unexpected_key", "has no key"),
        (key(1), key(2), "wrong_key", "has another pre-shared key"),
    ] {
        let (there, here) = (
            side("there", theirs, "tcp", LONG),
            side("here", mine, "tcp", LONG),
        );
        let peer = here.peer(&there);
        assert_eq!(peer.wait(LONG), KVF_ERR_AUTH, "{}", peer.info().text);
        let text = peer.info().text;
        for part in [word, "there", "\"here\"", "auth_key on both sides"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
        there.wait_refused(at_theirs, 1);
        // The other way the other one is told.
        let back = there.peer(&here);
        assert_eq!(back.wait(LONG), KVF_ERR_AUTH, "{}", back.info().text);
    }
}

#[test]
fn a_stranger_gets_nothing_out_of_a_listener_with_a_key() {
    let there = side("there", key(1), "tcp", LONG);
    let (me, target) = (Incarnation([9; 16]), there.incarnation());
    for purpose in [Purpose::Control, Purpose::Data] {
        // Without a key.
        let mut stranger = Stranger::new(there.address);
        stranger.send(Caller::new(None, purpose, (me, "x"), target, [1; 32]).1);
        assert_eq!(stranger.refusal().0, KVF_ERR_AUTH);
        // With a wrong one: the data hello behind it is never looked at.
        let mut stranger = Stranger::new(there.address);
        let (mut caller, open) = Caller::new(key(2), purpose, (me, "x"), target, [1; 32]);
        stranger.send(open);
        let step = caller.hears(stranger.hear().unwrap()).unwrap();
        stranger.send(step.send.unwrap());
        assert_eq!(stranger.refusal().0, KVF_ERR_AUTH);
    }
    there.wait_refused("no_key", 2);
    there.wait_refused("wrong_key", 2);
    // What was recorded is worth nothing on another connection.
    let (mut caller, open) = Caller::new(key(1), Purpose::Control, (me, "x"), target, [1; 32]);
    let mut good = Stranger::new(there.address);
    good.send(open.clone());
    let proof = caller.hears(good.hear().unwrap()).unwrap().send.unwrap();
    good.send(proof.clone());
    assert!(caller.hears(good.hear().unwrap()).unwrap().open);
    let mut replay = Stranger::new(there.address);
    replay.send(open);
    assert!(matches!(replay.hear(), Some(Body::Challenge(_))));
    replay.send(proof);
    assert_eq!(replay.refusal().0, KVF_ERR_AUTH);
    there.wait_refused("wrong_key", 3);
    // The key without a token opens no data connection.
    let (mut caller, open) = Caller::new(key(1), Purpose::Data, (me, "x"), target, [1; 32]);
    let mut data = Stranger::new(there.address);
    data.send(open);
    let challenge = data.hear().unwrap();
    data.send(caller.hears(challenge).unwrap().send.unwrap());
    assert!(caller.hears(data.hear().unwrap()).unwrap().open);
    data.send(Body::DataHello(wire::DataHello {
        token: vec![0; 16],
        ..Default::default()
    }));
    there.wait_refused("data", 1);
}

#[test]
fn garbage_and_oversized_frames_end_the_connection() {
    let there = side("there", key(1), "tcp", LONG);
    let mut counted = 0;
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        &(1u32 << 30).to_le_bytes(), // the length of a frame that never comes
        &513u32.to_le_bytes(),
        &[2, 0, 0, 0, 0xff, 0xff],
        &[0, 0, 0, 0], // no message
    ] {
        let mut stranger = Stranger::new(there.address);
        stranger.0.write_all(bytes).unwrap();
        counted += 1;
        there.wait_refused("malformed", counted);
        // At once, not after a time: told why if it can still hear, then ended.
        let mut rest = Vec::new();
        let _ = stranger.0.read_to_end(&mut rest);
    }
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    let there = side("there", key(1), "tcp", Duration::from_millis(200));
    let mut silent = Stranger::new(there.address);
    let mut slow = Stranger::new(there.address);
    slow.0.write_all(&[100]).unwrap();
    assert!(silent.hear().is_none() && slow.hear().is_none());
    there.wait_refused("late", 2);
}

#[test]
fn a_flood_of_strangers_takes_neither_threads_nor_the_peers_place() {
    let (source, sink) = (
        side("flooded", key(7), "tcp", LONG),
        side("dst", key(7), "tcp", LONG),
    );
    let threads = || threads("kvf-flooded").len();
    let before = threads();
    let flood: Vec<_> = (0..400).map(|_| Stranger::new(source.address)).collect();
    source.wait_refused("too_many", 400 - 256);
    assert_eq!((threads(), before), (3, 3), "no thread for a stranger");
    // The oldest were closed.
    let mut first = &flood[0].0;
    assert_eq!(first.read(&mut [0; 1]).unwrap_or(0), 0);
    let peer = sink.peer(&source);
    assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
    hands_over(&source, &sink, &peer);
    drop(flood);
    source.wait_refused("broken", 200);
}

#[test]
fn one_transfer_has_as_many_connections_as_were_configured() {
    for transport in ["tcp", "unix"] {
        for (connections, tries) in [(1, 3), (3, 20)] {
            let name = format!("{transport}{connections}");
            let source = side(&name, None, transport, LONG);
            let sink = configured("dst", None, transport, LONG, |config| {
                config.workers = 4;
                config.data_connections = connections;
            });
            let peer = sink.peer(&source);
            assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
            // Threads of data connections: kvf-NAME-d1, -d2, ...
            let begin = format!("kvf-{name}-d");
            let mut most = 0;
            for _ in 0..tries {
                hands_over(&source, &sink, &peer);
                sink.bytes().fill(0);
                let made = threads(&begin);
                most = most.max(made.len());
                assert!(most <= connections as usize, "{made:?}");
                if most > 1 {
                    break;
                }
            }
            // How many workers take part is the scheduler's; one alone is what 1 means.
            assert!((most > 1) == (connections > 1), "{most} of {connections}");
        }
    }
}
