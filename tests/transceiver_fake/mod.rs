//! An agent level without bytes: outcomes are injected, and every call is visible.

#![allow(dead_code)] // each test program uses its part

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use kvferry::agent::{ImportDesc, Outcome, PublishDesc, ReceiveDesc};
use kvferry::err;
use kvferry::error::{Error, Result, Status};
use kvferry::ids::Key;
use kvferry::transceiver::port::{DomainEvents, End, Notice, Notify, Operation, Port};
use kvferry::transceiver::{
    Checked, Config, ReceiveRequest, RequestResult, SendRequest, Side, Transceiver,
};

pub fn key(request: u64) -> Key {
    Key {
        request,
        attempt: 0,
    }
}

pub fn done() -> End {
    End {
        outcome: Outcome::Done,
        cause: Status::KVF_OK,
        memory_safe: true,
        bytes: 4096,
        bytes_total: 4096,
        first_byte_ns: 100,
        last_byte_ns: 1124,
        transport: "fake",
    }
}

pub fn ended(outcome: Outcome, cause: Status, memory_safe: bool) -> End {
    End {
        outcome,
        cause,
        memory_safe,
        bytes: 0,
        ..done()
    }
}

pub fn failed() -> End {
    ended(Outcome::Failed, Status::KVF_ERR_TRANSFER, true)
}

/// A publication or transfer that ends when the test says so.
pub struct FakeOp {
    pub key: Key,
    pub side: Side,
    notify: Notify,
    /// A cancel ends it at once; else the test does.
    cancel_ends: AtomicBool,
    pub cancels: AtomicU32,
}

impl FakeOp {
    pub fn end(&self, end: End) {
        (self.notify)(Notice::Ended(end));
    }

    pub fn quiet(&self) {
        (self.notify)(Notice::MemorySafe);
    }

    /// From now on it goes on writing after a cancel, until the test ends it.
    pub fn hold(&self) {
        self.cancel_ends.store(false, Ordering::SeqCst);
    }
}

impl Operation for FakeOp {
    fn ticket(&self) -> Vec<u8> {
        ticket(self.key)
    }
    fn cancel(&self) {
        self.cancels.fetch_add(1, Ordering::SeqCst);
        if self.cancel_ends.load(Ordering::SeqCst) {
            self.end(ended(Outcome::Cancelled, Status::KVF_ERR_CANCELLED, true));
        }
    }
    fn error_text(&self) -> String {
        "text of the operation".to_owned()
    }
    fn aux(&self) -> Vec<u8> {
        vec![7, 8, 9]
    }
}

pub fn ticket(key: Key) -> Vec<u8> {
    [&key.request.to_le_bytes()[..], &key.attempt.to_le_bytes()].concat()
}

#[derive(Default)]
pub struct Fake {
    ops: Mutex<Vec<Arc<FakeOp>>>,
    pub refuse: Mutex<Option<Error>>,
    /// The next operation ends inside its begin.
    pub inline: Mutex<Option<End>>,
    pub declined: Mutex<Vec<(Key, Status)>>,
    pub deadlines: Mutex<Vec<Duration>>,
    /// Alarms that were asked for.
    pub alarms: Mutex<Vec<Duration>>,
    /// The ranks of the domain, for votes: rank 0 first.
    pub domain: Mutex<Option<Arc<FakeDomain>>>,
    pub rank: AtomicU32,
}

impl Fake {
    fn begin(&self, key: Key, side: Side, notify: Notify) -> Result<Arc<dyn Operation>> {
        if let Some(error) = self.refuse.lock().unwrap().take() {
            return Err(error);
        }
        let op = Arc::new(FakeOp {
            key,
            side,
            notify,
            cancel_ends: AtomicBool::new(true),
            cancels: AtomicU32::new(0),
        });
        self.ops.lock().unwrap().push(op.clone());
        let inline = self.inline.lock().unwrap().take();
        if let Some(end) = inline {
            op.end(end);
        }
        Ok(op)
    }

    /// The last operation of a key.
    pub fn op(&self, request: u64) -> Arc<FakeOp> {
        let ops = self.ops.lock().unwrap();
        let op = ops.iter().rev().find(|op| op.key == key(request));
        op.expect("the request was given to the agent").clone()
    }

    /// The operation begun last.
    pub fn last(&self) -> Arc<FakeOp> {
        let ops = self.ops.lock().unwrap();
        ops.last().expect("something was begun").clone()
    }

    pub fn begun(&self) -> usize {
        self.ops.lock().unwrap().len()
    }
}

/// The port of one rank.
#[derive(Clone, Default)]
pub struct FakePort(pub Arc<Fake>);

impl Port for FakePort {
    type Peer = ();

    fn publish(&self, desc: PublishDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        self.0.begin(desc.key, Side::Context, notify)
    }
    fn import(&self, _: &(), desc: ImportDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        self.0.deadlines.lock().unwrap().push(desc.deadline);
        let key = self.ticket_key(&desc.ticket)?;
        self.0.begin(key, Side::Generation, notify)
    }
    fn receive(&self, _: &(), desc: ReceiveDesc, notify: Notify) -> Result<Arc<dyn Operation>> {
        self.0.deadlines.lock().unwrap().push(desc.deadline);
        self.0.begin(desc.key, Side::Generation, notify)
    }
    fn push(
        &self,
        _: &(),
        offer: &[u8],
        desc: PublishDesc,
        deadline: Duration,
        notify: Notify,
    ) -> Result<Arc<dyn Operation>> {
        self.0.deadlines.lock().unwrap().push(deadline);
        assert_eq!(desc.key, self.ticket_key(offer)?);
        self.0.begin(desc.key, Side::Context, notify)
    }
    fn decline(&self, _: &(), ticket: &[u8], cause: Status) -> Result<()> {
        let key = self.ticket_key(ticket)?;
        self.0.declined.lock().unwrap().push((key, cause));
        Ok(())
    }
    fn ticket_key(&self, ticket: &[u8]) -> Result<Key> {
        match ticket {
            [request @ .., a, b, c, d] if request.len() == 8 => Ok(Key {
                request: u64::from_le_bytes(request.try_into().unwrap()),
                attempt: u32::from_le_bytes([*a, *b, *c, *d]),
            }),
            _ => Err(err!(KVF_ERR_INVALID_ARGUMENT, "no ticket")),
        }
    }
    fn join(&self, _: u64, _: u32, _: u32, events: Weak<dyn DomainEvents>) -> Result<()> {
        let domain = self.0.domain.lock().unwrap().clone();
        let domain = domain.ok_or_else(|| err!(KVF_ERR_UNSUPPORTED, "no domain"))?;
        let rank = self.0.rank.load(Ordering::SeqCst) as usize;
        domain.ranks[rank].set(events).expect("joined once");
        Ok(())
    }
    fn send(&self, rank: u32, _: Side, bytes: Vec<u8>) -> Result<()> {
        let domain = self.0.domain.lock().unwrap().clone().expect("in a domain");
        let from = self.0.rank.load(Ordering::SeqCst);
        domain.send(from, rank, bytes)
    }
    fn alarm(&self, after: Duration) {
        self.0.alarms.lock().unwrap().push(after);
    }
}

/// The mail between the ranks of a domain: delivered when the test says so, in order per sender.
pub struct FakeDomain {
    ranks: Vec<OnceLock<Weak<dyn DomainEvents>>>,
    mail: Vec<Mutex<std::collections::VecDeque<Vec<u8>>>>,
    dead: Vec<AtomicBool>,
    pub instant: AtomicBool,
}

impl FakeDomain {
    pub fn new(world: u32, instant: bool) -> Arc<Self> {
        Arc::new(Self {
            ranks: (0..world).map(|_| OnceLock::new()).collect(),
            mail: (0..world).map(|_| Mutex::default()).collect(),
            dead: (0..world).map(|_| AtomicBool::new(false)).collect(),
            instant: AtomicBool::new(instant),
        })
    }

    fn send(&self, from: u32, to: u32, bytes: Vec<u8>) -> Result<()> {
        assert_eq!(to, 0, "only the leader is written to");
        if self.dead[0].load(Ordering::SeqCst) {
            return Err(err!(KVF_ERR_PEER_LOST, "rank 0 is dead"));
        }
        self.mail[from as usize].lock().unwrap().push_back(bytes);
        if self.instant.load(Ordering::SeqCst) {
            self.deliver(from);
        }
        Ok(())
    }

    /// Delivers everything that a rank has sent.
    pub fn deliver(&self, from: u32) {
        loop {
            let next = self.mail[from as usize].lock().unwrap().pop_front();
            let (Some(bytes), false) = (next, self.dead[from as usize].load(Ordering::SeqCst))
            else {
                return;
            };
            if let Some(leader) = self.ranks[0].get().and_then(Weak::upgrade) {
                leader.message(from, &bytes);
            }
        }
    }

    /// A rank's alarm comes.
    pub fn alarm(&self, rank: u32) {
        if let Some(events) = self.ranks[rank as usize].get().and_then(Weak::upgrade) {
            events.alarm();
        }
    }

    /// A rank dies: its unsent mail with it, and everybody hears of it.
    pub fn kill(&self, rank: u32) {
        self.dead[rank as usize].store(true, Ordering::SeqCst);
        for (other, events) in self.ranks.iter().enumerate() {
            let alive = !self.dead[other].load(Ordering::SeqCst);
            if let (true, Some(events)) = (alive, events.get().and_then(Weak::upgrade)) {
                events.lost(Some(rank));
            }
        }
    }
}

/// One side of a transceiver upon a fake, so that a test can be written once for both.
pub struct Half {
    pub side: Side,
    pub fake: Arc<Fake>,
    pub t: Arc<Transceiver<FakePort>>,
}

pub fn half(side: Side, config: Config) -> Half {
    let port = FakePort::default();
    Half {
        side,
        fake: port.0.clone(),
        t: Arc::new(Transceiver::with_port(port, config).unwrap()),
    }
}

/// Runs a test on the context and on the generation side.
pub fn on_both_sides(test: impl Fn(Half)) {
    on_both_sides_with(Config::default, test);
}

pub fn on_both_sides_with(config: impl Fn() -> Config, test: impl Fn(Half)) {
    for side in Side::ALL {
        test(half(side, config()));
    }
}

pub fn send_request(request: u64) -> SendRequest {
    PublishDesc {
        key: key(request),
        user_data: request + 1000,
        ..PublishDesc::default()
    }
}

pub fn receive_request(request: u64) -> ReceiveRequest {
    ReceiveRequest {
        key: key(request),
        import: ImportDesc {
            ticket: ticket(key(request)),
            user_data: request + 1000,
            ..ImportDesc::default()
        },
    }
}

impl Half {
    pub fn begin(&self, request: u64) -> Result<()> {
        match self.side {
            Side::Context => {
                let bytes = self.t.respond_and_send_async(send_request(request))?;
                assert_eq!(bytes, ticket(key(request)));
                Ok(())
            }
            Side::Generation => self
                .t
                .request_and_receive_async(&(), receive_request(request)),
        }
    }

    pub fn check_with(
        &self,
        at_least: Option<u32>,
        timeout: Option<Duration>,
        cap: usize,
    ) -> (Checked, Vec<RequestResult>) {
        let mut out = Vec::new();
        let checked = match self.side {
            Side::Context => self
                .t
                .check_context_transfer_status(at_least, timeout, cap, &mut out),
            Side::Generation => self
                .t
                .check_gen_transfer_status(at_least, timeout, cap, &mut out),
        };
        (checked.unwrap(), out)
    }

    pub fn check(&self, at_least: Option<u32>, timeout_ms: u64) -> (Status, Vec<RequestResult>) {
        let timeout = Some(Duration::from_millis(timeout_ms));
        let (checked, out) = self.check_with(at_least, timeout, usize::MAX);
        assert!(!checked.more);
        assert!(checked.decision.is_empty());
        (checked.status, out)
    }

    pub fn sweep(&self) -> Vec<RequestResult> {
        let (status, out) = self.check(Some(0), 0);
        assert_eq!(status, Status::KVF_OK);
        out
    }

    pub fn fd_readable(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.t.event_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }
}

/// Runs something and says how long it took.
pub fn timed<T>(body: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = body();
    (result, start.elapsed())
}

/// Does something on another thread after so many milliseconds.
pub fn later(ms: u64, body: impl FnOnce() + Send + 'static) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(ms));
        body();
    })
}
