//! Messages between two engines of this process.

mod channel;
mod endpoints;
mod small;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use super::incoming::Dropped;
use super::message::{Head, Kind};
use super::*;
use crate::cuda::Devices;
use crate::error::{Result, Status};
use crate::memory::{Lease, LeaseTable, Pool};
use crate::transport::pieces::{Opened, Ranges, Serving, Source};
use crate::transport::span::tests::{BLOCK, Cache, block, filled, register, source_byte};
use crate::transport::ucx::Engine;
use crate::transport::ucx::tests::{Nobody, engine, soon, ucx};
use crate::transport::{DataPath, ReadJob};
use crate::wire::{self, Body, DataHello, DataOpen, Frame};
use crate::{bail, err};

const LONG: Duration = Duration::from_secs(20);
const TOKEN: [u8; KEY_BYTES] = [3; KEY_BYTES];
const SECRET: [u8; KEY_BYTES] = [4; KEY_BYTES];

/// Pools 2 and 3, for one reader.
struct Served {
    leases: Arc<LeaseTable>,
    lease: Lease,
    pools: Vec<Arc<Pool>>,
    refuse: AtomicBool,
    /// The publication has one block only.
    small: AtomicBool,
    /// Holds requests up while a test has it.
    gate: Mutex<()>,
    devices: Devices,
    /// Jobs that were opened (`open`), and why messages were dropped.
    heard: Mutex<Vec<&'static str>>,
    heard_more: Condvar,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    _memory: Vec<Vec<u8>>,
}

impl Served {
    fn new() -> Arc<Self> {
        let mut memory: Vec<Vec<u8>> = [2, 3]
            .into_iter()
            .map(|id| filled(id, Cache::BYTES as usize))
            .collect();
        let pools = memory
            .iter_mut()
            .zip([2, 3])
            .map(|(memory, id)| Arc::new(register(id, memory)))
            .collect();
        let leases = Arc::new(LeaseTable::create(4).unwrap());
        Arc::new(Self {
            lease: leases.grant().unwrap(),
            leases,
            pools,
            refuse: AtomicBool::new(false),
            small: AtomicBool::new(false),
            gate: Mutex::default(),
            devices: Devices::default(),
            heard: Mutex::default(),
            heard_more: Condvar::new(),
            threads: Mutex::default(),
            _memory: memory,
        })
    }

    fn hear(&self, what: &'static str) {
        self.heard.lock().unwrap().push(what);
        self.heard_more.notify_all();
    }

    fn heard(&self, what: &str) -> usize {
        let heard = self.heard.lock().unwrap();
        heard.iter().filter(|heard| **heard == what).count()
    }

    /// Whether that is heard so often within `limit`.
    fn hears(&self, what: &str, count: usize, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut heard = self.heard.lock().unwrap();
        while heard.iter().filter(|heard| **heard == what).count() < count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            heard = self.heard_more.wait_timeout(heard, left).unwrap().0;
        }
        true
    }

    fn wait_heard(&self, what: &str, count: usize) {
        assert!(self.hears(what, count, LONG), "{what} {count}");
    }
}

struct Serves(Arc<Served>);

impl Source for Serves {
    fn open(&self, _: &DataOpen) -> Result<Opened> {
        if self.0.refuse.load(Ordering::SeqCst) {
            bail!(KVF_ERR_EXPIRED, "no such publication");
        }
        self.0.hear("open");
        let _held_up = self.0.gate.lock().unwrap();
        let leases = self.0.leases.clone();
        let lease = self.0.lease;
        Ok(Opened {
            bindings: match self.0.small.load(Ordering::SeqCst) {
                true => block(2),
                false => Cache::bindings(2, 3),
            },
            holds: Box::new(move || leases.holds(lease)),
        })
    }

    fn pool(&self, id: u32) -> Option<Arc<Pool>> {
        self.0.pools.iter().find(|pool| pool.id() == id).cloned()
    }

    fn devices(&self) -> &Devices {
        &self.0.devices
    }
}

impl Accept for Serves {
    fn admits(&self, token: &[u8; KEY_BYTES]) -> Result<String> {
        match *token == TOKEN {
            true => Ok("the reader".into()),
            false => bail!(KVF_ERR_AUTH, "another token"),
        }
    }

    fn accept(&self, connection: &Arc<Connection>) -> Result<()> {
        let (connection, serves) = (connection.clone(), Serves(self.0.clone()));
        let thread = std::thread::spawn(move || {
            let limits = Serving {
                stall: Duration::from_secs(20),
                spin: Duration::ZERO,
            };
            let nonce = serves.0.leases.nonce();
            let _ = connection.serve(&nonce, &serves, limits);
        });
        self.0.threads.lock().unwrap().push(thread);
        Ok(())
    }

    fn dropped(&self, why: &'static str) {
        self.0.hear(why);
    }
}

/// Runs a job, which is cancelled if that takes long, as by its transfer's deadline.
fn run_for_a_while(path: &MessagePath, job: &Arc<ReadJob>) -> Result<()> {
    let (deadline, (ended, over)) = (job.clone(), mpsc::channel::<()>());
    let timer = std::thread::spawn(move || {
        let _ = over.recv_timeout(Duration::from_secs(5));
        deadline.cancel();
    });
    let outcome = path.run(job);
    drop(ended);
    timer.join().unwrap();
    outcome
}

/// A source, a reader, and the reader's pool 1.
struct Two {
    served: Arc<Served>,
    source: Arc<Engine>,
    here: Arc<Engine>,
    ours: Vec<u8>,
}

impl Two {
    fn new() -> Self {
        Self::with_gets(false)
    }

    fn with_gets(gets: bool) -> Self {
        let served = Served::new();
        Self {
            source: engine("kvf-src-ucx", gets, Box::new(Serves(served.clone()))),
            served,
            here: engine("kvf-dst-ucx", gets, Box::new(Nobody)),
            ours: vec![0xee; 2 * Cache::BYTES as usize],
        }
    }

    fn announced(&self) -> MessageSource {
        let pools = self.served.pools.iter();
        MessageSource {
            name: "agent source".into(),
            address: self.source.address().to_vec(),
            token: TOKEN,
            pools: pools.map(|pool| (pool.id(), pool.bytes())).collect(),
            nonce: self.served.leases.nonce(),
        }
    }

    fn path(&self, source: MessageSource, patience: Duration) -> Result<MessagePath> {
        let (here, why) = (self.here.clone(), "a test".into());
        MessagePath::new(here, source, why, patience, Arc::default())
    }

    fn good_path(&self) -> MessagePath {
        self.path(self.announced(), Duration::from_secs(20))
            .unwrap()
    }

    fn job(&mut self) -> Arc<ReadJob> {
        let pools = BTreeMap::from([(1, Arc::new(register(1, &mut self.ours)))]);
        let lease = self.served.lease;
        let request = DataOpen::default;
        Arc::new(ReadJob::new(Cache::bindings(2, 3), pools, lease, request))
    }

    fn end(&self) {
        assert!(self.here.close(soon()) && self.source.close(soon()));
        for thread in self.served.threads.lock().unwrap().drain(..) {
            thread.join().unwrap();
        }
    }
}

#[test]
fn a_job_arrives_byte_for_byte_while_its_lease_holds() {
    if ucx("a_job_arrives").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    for _ in 0..2 {
        let job = two.job();
        path.run(&job).unwrap();
        assert_eq!(job.moved(), Cache::MOVED);
        assert!(path.attest(&job).unwrap());
    }
    two.served.leases.revoke(two.served.lease);
    let e = path.run(&two.job()).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_EXPIRED);
    assert!(e.text.contains("the source's lease has ended"), "{e}");
    assert!(path.is_usable());
    drop(path);
    two.end();
    assert!(two.ours == Cache::expected((2, 3), source_byte, 0xee));
}

#[test]
fn a_refusal_and_its_text_arrive() {
    if ucx("a_refusal").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    two.served.refuse.store(true, Ordering::SeqCst);
    let e = path.run(&two.job()).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_EXPIRED);
    assert!(
        e.text.contains("the source refused: no such publication"),
        "{e}"
    );
    assert!(e.text.contains("agent source after 0 of 4194304"), "{e}");
    two.served.refuse.store(false, Ordering::SeqCst);
    path.run(&two.job()).unwrap();
    drop(path);
    two.end();
}

#[test]
fn another_program_at_the_address_is_noticed_and_a_wrong_token_gets_no_answer() {
    if ucx("another_program").is_none() {
        return;
    }
    let two = Two::new();
    let mut source = two.announced();
    source.token[0] ^= 1;
    let e = two.path(source, Duration::from_millis(300)).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
    assert!(e.text.contains("did not answer a hello over ucx"), "{e}");
    let mut source = two.announced();
    source.nonce[0] ^= 1;
    let e = two.path(source, Duration::from_secs(20)).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_PEER_LOST);
    assert!(e.text.contains("agent source does not hold"), "{e}");
    let mut source = two.announced();
    source.address.clear();
    let e = two.path(source, Duration::from_secs(20)).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_PROTOCOL);
    assert!(e.text.contains("a UCX address of 0 bytes"), "{e}");
    two.end();
}

#[test]
fn after_a_cancel_nothing_is_written_and_the_path_is_of_use() {
    if ucx("after_a_cancel").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    let job = two.job();
    {
        let _held_up = two.served.gate.lock().unwrap();
        let (late, served) = (job.clone(), two.served.clone());
        let timer = std::thread::spawn(move || {
            served.wait_heard("open", 1);
            late.cancel();
        });
        path.run(&job).unwrap();
        timer.join().unwrap();
        assert!(job.is_cancelled());
    }
    drop(job);
    // The source answers now, and then the next job, behind it.
    let mut after = vec![0xee; 2 * Cache::BYTES as usize];
    std::mem::swap(&mut after, &mut two.ours);
    path.run(&two.job()).unwrap();
    assert!(after.iter().all(|byte| *byte == 0xee));
    assert!(two.ours == Cache::expected((2, 3), source_byte, 0xee));
    drop(path);
    two.end();
}

#[test]
fn a_source_whose_ucx_has_ended_fails_the_job_and_leaves_the_memory_quiet() {
    if ucx("a_source_whose_ucx_has_ended").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    let job = two.job();
    let held_up = two.served.gate.lock().unwrap();
    let (source, deadline) = (two.source.clone(), job.clone());
    let served = two.served.clone();
    let (ended, over) = mpsc::channel();
    let killer = std::thread::spawn(move || {
        served.wait_heard("open", 1);
        assert!(source.close(soon()));
        // Over a lane that says nothing, it is the transfer's deadline that ends it.
        let _ = over.recv_timeout(Duration::from_secs(2));
        deadline.cancel();
    });
    let outcome = path.run(&job);
    ended.send(()).unwrap();
    match outcome {
        Ok(()) => assert!(job.is_cancelled()),
        Err(e) => {
            assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
            assert!(e.text.contains("agent source"), "{e}");
            assert!(!path.is_usable());
        }
    }
    killer.join().unwrap();
    assert_eq!(job.moved(), 0);
    drop((held_up, path));
    two.end();
}

#[test]
fn garbage_changes_nothing_and_is_counted() {
    if ucx("garbage").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    // The same port, by somebody who knows no token.
    let address = two.source.address().to_vec();
    let stranger = engine("kvf-str-ucx", false, Box::new(Nobody));
    let (endpoint, _) = stranger
        .connect("the source".into(), address, Vec::new())
        .unwrap();
    let head = |job| Head {
        secret: SECRET,
        job,
        offset: 0,
        status: 0,
        last: true,
        held: true,
    };
    let messages = [
        (Kind::Hello, Vec::new(), Vec::new(), "garbage"),
        (Kind::Hello, Vec::new(), vec![1; 100], "garbage"),
        (Kind::Hello, Vec::new(), vec![1; 300_000], "garbage"),
        (Kind::Ask, vec![1; 31], vec![1; 10], "garbage"),
        (Kind::Ask, vec![1; 32], vec![1; 10], "stranger"),
        (Kind::Answer, vec![1; 39], vec![1; 10], "garbage"),
        (Kind::Answer, vec![0xff; 40], vec![1; 10], "garbage"),
        (
            Kind::Answer,
            head(77).encode().to_vec(),
            vec![1; 10],
            "late",
        ),
    ];
    let mut expected: BTreeMap<&str, usize> = BTreeMap::new();
    for (kind, head, data, why) in messages {
        stranger
            .send(endpoint, Message::new(kind, &head, data))
            .unwrap();
        *expected.entry(why).or_default() += 1;
        two.served.wait_heard(why, expected[why]);
    }
    path.run(&two.job()).unwrap();
    // Who has the token and talks nonsense ends his own connection, and no more.
    let (secret, key) = (
        [9; KEY_BYTES],
        incoming::connection_key(&TOKEN, &[9; KEY_BYTES]),
    );
    let hello = DataHello {
        token: TOKEN.to_vec(),
        secret: secret.to_vec(),
        address: stranger.address().to_vec(),
        job: 1,
        anew: false,
    };
    let mut frame = Vec::new();
    let body = Some(Body::DataHello(hello));
    wire::encode(&Frame { body }, &mut frame).unwrap();
    let before = two.served.heard("stranger");
    let hello = Message::new(Kind::Hello, &[], frame);
    stranger.send(endpoint, hello).unwrap();
    let deadline = soon();
    let mut refused = false;
    while !refused {
        assert!(Instant::now() < deadline, "it is still served");
        let nonsense = Message::new(Kind::Ask, &key, vec![0xff; 8]);
        stranger.send(endpoint, nonsense).unwrap();
        let a_while = Duration::from_millis(1);
        refused = two.served.hears("stranger", before + 1, a_while);
    }
    assert!(stranger.close(soon()));
    path.run(&two.job()).unwrap();
    drop(path);
    two.end();
    assert!(two.ours == Cache::expected((2, 3), source_byte, 0xee));
}
