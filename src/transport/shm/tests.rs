//! Reads from a real second process: this test binary again, run as [`source_process`].

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::span::tests::{Cache, moved, naive, pattern, patterns, source_byte};
use super::*;
use crate::error::Status;
use crate::memory::{LeaseTable, PageSize};

const SOURCE: &str = "KVFERRY_TEST_SOURCE";
const MAPPED: u32 = 3;
const PRIVATE: u32 = 4;
const POOL_BYTES: u64 = Cache::BYTES;
const LEASES: u32 = 8;

fn fill(pool: &Pool) {
    for offset in 0..pool.bytes() as usize {
        // SAFETY: inside the pool.
        unsafe {
            pool.base()
                .add(offset)
                .write(source_byte(pool.id(), offset))
        };
    }
}

/// Not a test of its own: the source in the other process, which obeys one-byte orders.
#[test]
fn source_process() {
    let Some(name) = std::env::var_os(SOURCE) else {
        return;
    };
    let mapped = Pool::create_shared(MAPPED, POOL_BYTES, None, PageSize::Default).unwrap();
    // SAFETY: a new private mapping that is never unmapped by anybody but the order below.
    let private = unsafe {
        let base = libc::mmap(
            std::ptr::null_mut(),
            POOL_BYTES as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        Pool::register(PRIVATE, base.cast(), POOL_BYTES).unwrap()
    };
    fill(&mapped);
    fill(&private);
    let table = LeaseTable::create(LEASES).unwrap();
    let lease = table.grant().unwrap();

    let address = SocketAddr::from_abstract_name(name.as_encoded_bytes()).unwrap();
    let mut stream = UnixStream::connect_addr(&address).unwrap();
    let mut hello = Vec::new();
    for number in [
        private.base().addr() as u64,
        table.address(),
        u64::from(lease.index),
        lease.generation,
    ] {
        hello.extend(number.to_le_bytes());
    }
    hello.extend(table.nonce());
    let sent = fds::try_send(stream.as_fd(), &hello, &[mapped.fd().unwrap(), table.fd()]).unwrap();
    assert_eq!(sent, hello.len());
    let mut order = [0];
    while stream.read(&mut order).is_ok_and(|n| n == 1) {
        match &order {
            b"r" => assert!(table.revoke(lease)),
            // SAFETY: nobody here uses the second half of the private pool any more.
            b"u" => unsafe {
                let half = POOL_BYTES as usize / 2;
                assert_eq!(libc::munmap(private.base().add(half).cast(), half), 0);
            },
            b"x" => panic!("{}", Command::new("sleep").arg("60").exec()),
            _ => unreachable!(),
        }
        stream.write_all(&order).unwrap();
    }
    std::process::exit(0);
}

struct SourceProcess {
    child: Child,
    stream: UnixStream,
    path: ShmPath,
    lease: LeaseRef,
}

impl SourceProcess {
    fn start() -> Self {
        Self::start_with(|_| {})
    }

    /// `change` may spoil what the peer announced.
    fn start_with(change: impl FnOnce(&mut PeerLeases)) -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!(
            "kvferry-shm-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "transport::shm::tests::source_process"])
            .env(SOURCE, &name)
            .spawn()
            .unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let peer = Arc::new(PeerProcess::of_stream(stream.as_fd()).unwrap());
        assert_eq!(peer.pid(), Some(child.id() as i32));
        let mut hello = [0; 48];
        let (n, fds) = loop {
            match fds::try_recv(stream.as_fd(), &mut hello, 2) {
                Err(err) if err.kind() == std::io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                done => break done.unwrap(),
            }
        };
        assert_eq!((n, fds.len()), (48, 2));
        let number = |i: usize| u64::from_le_bytes(hello[i * 8..][..8].try_into().unwrap());
        let pools = BTreeMap::from([
            (
                MAPPED,
                PeerPool::Mapped(Mapping::new(fds[0].as_fd(), POOL_BYTES).unwrap()),
            ),
            (
                PRIVATE,
                PeerPool::Private {
                    address: number(0),
                    bytes: POOL_BYTES,
                },
            ),
        ]);
        let table = Mapping::new(fds[1].as_fd(), LEASE_HEAD_BYTES + u64::from(LEASES) * 8).unwrap();
        let mut leases = PeerLeases {
            view: Some(LeaseView::new(table).unwrap()),
            address: number(1),
            capacity: LEASES,
            nonce: hello[32..].try_into().unwrap(),
        };
        change(&mut leases);
        Self {
            child,
            stream,
            path: ShmPath::new(peer, pools, leases).unwrap(),
            lease: LeaseRef {
                index: number(2) as u32,
                generation: number(3),
            },
        }
    }

    fn order(&mut self, order: u8) {
        self.stream.write_all(&[order]).unwrap();
        let mut echo = [0];
        self.stream.read_exact(&mut echo).unwrap();
        assert_eq!(echo, [order]);
    }

    fn job(&self) -> ReadJob {
        ReadJob::new(
            Vec::new(),
            BTreeMap::new(),
            self.lease,
            crate::wire::DataOpen::default,
        )
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for SourceProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Our own pool, filled with something that the source never holds everywhere.
struct Destination {
    memory: Vec<u8>,
    pool: Arc<Pool>,
}

impl Destination {
    const FRESH: u8 = 0xee;

    fn new(bytes: usize) -> Self {
        let mut memory = vec![Self::FRESH; bytes];
        // SAFETY: the vector's buffer moves with the struct but never in memory.
        let pool = unsafe { Pool::register(1, memory.as_mut_ptr(), bytes as u64).unwrap() };
        let pool = Arc::new(pool);
        Self { memory, pool }
    }

    fn bytes(&self) -> Vec<u8> {
        // SAFETY: the pool's own bytes, which no one writes now.
        unsafe { std::slice::from_raw_parts(self.pool.base(), self.memory.len()) }.to_vec()
    }

    fn read(&self, path: &ShmPath, patterns: &[Pattern]) -> Result<u64> {
        path.copy_batch(
            &patterns.iter().copied().collect(),
            |id| (id == 1).then_some(&*self.pool),
            || false,
            0,
            &mut Buffers::default(),
        )
    }
}

#[test]
fn both_kinds_of_pool_arrive_byte_for_byte() {
    let source = SourceProcess::start();
    for pool in [MAPPED, PRIVATE] {
        // Whole, first, last, and one byte.
        for (offset, len) in [
            (0, POOL_BYTES),
            (0, 4096),
            (POOL_BYTES - 4096, 4096),
            (12345, 1),
            (4095, 8193),
        ] {
            let dst = Destination::new(len as usize + 2);
            let batch = [pattern(pool, offset, 1, 1, len, &[])];
            assert_eq!(dst.read(&source.path, &batch).unwrap(), len);
            let bytes = dst.bytes();
            assert_eq!(bytes[0], Destination::FRESH);
            assert_eq!(bytes[len as usize + 1], Destination::FRESH);
            let expected: Vec<u8> = (0..len)
                .map(|i| source_byte(pool, (offset + i) as usize))
                .collect();
            assert!(
                bytes[1..=len as usize] == expected[..],
                "pool {pool} {offset}+{len}"
            );
        }
    }
    assert!(source.path.attest(&source.job()).unwrap());
}

#[test]
fn a_job_is_shared_by_workers_and_attested() {
    let mut source = SourceProcess::start();
    for (keys, values) in [(MAPPED, MAPPED), (MAPPED, PRIVATE), (PRIVATE, PRIVATE)] {
        let dst = Destination::new(2 * Cache::BYTES as usize);
        let job = ReadJob::new(
            Cache::bindings(keys, values),
            BTreeMap::from([(1, dst.pool.clone())]),
            source.lease,
            crate::wire::DataOpen::default,
        );
        assert_eq!(job.bytes(), Cache::MOVED);
        std::thread::scope(|scope| {
            let workers = [(); 3].map(|()| scope.spawn(|| source.path.run(&job)));
            for worker in workers {
                worker.join().unwrap().unwrap();
            }
        });
        assert_eq!(job.moved(), Cache::MOVED);
        assert!(source.path.attest(&job).unwrap());
        let expected = Cache::expected((keys, values), source_byte, Destination::FRESH);
        assert!(dst.bytes() == expected, "{keys} {values}");
    }
    source.kill();
    let dst = Destination::new(2 * Cache::BYTES as usize);
    let pools = BTreeMap::from([(1, dst.pool.clone())]);
    let job = ReadJob::new(
        Cache::bindings(MAPPED, PRIVATE),
        pools,
        source.lease,
        crate::wire::DataOpen::default,
    );
    let err = source.path.run(&job).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
    job.cancel();
    source.path.run(&job).unwrap();
}

#[test]
fn more_ranges_than_one_call_takes_arrive_in_order() {
    let source = SourceProcess::start();
    // Reversed blocks, so that nothing merges: three calls and a bit.
    let blocks = 3 * 1024 + 7;
    let batch: Vec<_> = (0..blocks)
        .map(|i| pattern(PRIVATE, (blocks - 1 - i) * 300, 1, i * 300, 299, &[]))
        .collect();
    let dst = Destination::new(blocks as usize * 300);
    assert_eq!(dst.read(&source.path, &batch).unwrap(), blocks * 299);
    assert_eq!(
        dst.bytes(),
        naive(&batch, source_byte, dst.memory.len(), 0xee)
    );
}

#[test]
fn a_stop_is_seen_between_two_calls() {
    let source = SourceProcess::start();
    let batch = [pattern(PRIVATE, 0, 1, 0, 4, &[(5000, 8, 12)])];
    let dst = Destination::new(60_000);
    let read = source
        .path
        .copy_batch(
            &batch.into_iter().collect(),
            |_| Some(&*dst.pool),
            || true,
            0,
            &mut Buffers::default(),
        )
        .unwrap();
    assert_eq!(read, 1024 * 4);
}

#[test]
fn lesson53_ranges_outside_of_a_pool_are_refused_before_anything_moves() {
    let source = SourceProcess::start();
    let dst = Destination::new(8192);
    for pool in [MAPPED, PRIVATE] {
        for bad in [
            pattern(pool, POOL_BYTES - 4095, 1, 0, 4096, &[]),
            pattern(pool, u64::MAX - 10, 1, 0, 4096, &[]),
            pattern(pool, 0, 1, 4097, 4096, &[]),
            pattern(pool, 0, 1, 0, 16, &[(3, POOL_BYTES / 2, 16)]),
            pattern(pool, 0, 1, 0, 16, &[(3, 16, 4096)]),
            pattern(pool, 0, 1, 0, 16, &[(u64::MAX, u64::MAX, 16)]),
            pattern(pool, 0, 1, 0, 16, &[(u64::MAX, 0, 0)]),
            pattern(pool, 0, 9, 0, 16, &[]),
            pattern(77, 0, 1, 0, 16, &[]),
        ] {
            let err = dst.read(&source.path, &[bad]).unwrap_err();
            assert_eq!(err.status, Status::KVF_ERR_TRANSFER, "{err}");
        }
    }
    assert!(dst.bytes().iter().all(|byte| *byte == Destination::FRESH));
    let nothing = pattern(PRIVATE, 0, 1, 0, 16, &[(0, 1 << 40, 1 << 40)]);
    assert_eq!(dst.read(&source.path, &[nothing]).unwrap(), 0);
}

#[test]
fn a_revoked_lease_is_not_attested_on_either_way() {
    for by_pid in [false, true] {
        let mut source = SourceProcess::start_with(|leases| {
            if by_pid {
                leases.view = None;
            }
        });
        let job = |lease| {
            ReadJob::new(
                Vec::new(),
                BTreeMap::new(),
                lease,
                crate::wire::DataOpen::default,
            )
        };
        let LeaseRef { index, generation } = source.lease;
        assert!(source.path.attest(&job(source.lease)).unwrap());
        let later = LeaseRef {
            index,
            generation: generation + 1,
        };
        let never = LeaseRef {
            index: index + 1,
            generation,
        };
        let outside = LeaseRef {
            index: LEASES,
            generation,
        };
        assert!(!source.path.attest(&job(later)).unwrap());
        assert!(!source.path.attest(&job(never)).unwrap());
        let err = source.path.attest(&job(outside)).unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_PROTOCOL);
        source.order(b'r');
        assert!(!source.path.attest(&job(source.lease)).unwrap());
    }
}

#[test]
fn lesson56_memory_that_the_source_unmapped_is_named() {
    let mut source = SourceProcess::start();
    source.order(b'u');
    let half = POOL_BYTES / 2;
    let dst = Destination::new(16384);
    // The second range of the call begins 4096 bytes before the hole.
    let batch = [
        pattern(PRIVATE, 0, 1, 0, 100, &[]),
        pattern(PRIVATE, half - 4096, 1, 200, 8192, &[]),
    ];
    let err = dst.read(&source.path, &batch).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_TRANSFER, "{err}");
    let named = format!("pool {PRIVATE} offset {half} (4096 bytes left)");
    assert!(err.text.contains(&named), "{err} without {named}");
    let before = naive(
        &[batch[0], pattern(PRIVATE, half - 4096, 1, 200, 4096, &[])],
        source_byte,
        16384,
        Destination::FRESH,
    );
    assert_eq!(dst.bytes(), before);
    // The process and its other pages are as good as before.
    assert_eq!(dst.read(&source.path, &batch[..1]).unwrap(), 100);
}

#[test]
fn a_dead_source_is_a_lost_peer_but_its_pool_stays_readable() {
    let mut source = SourceProcess::start();
    let dst = Destination::new(4096);
    let private = [pattern(PRIVATE, 0, 1, 0, 4096, &[])];
    dst.read(&source.path, &private).unwrap();
    source.kill();
    assert!(!source.path.peer.is_alive());
    let err = dst.read(&source.path, &private).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
    let err = source.path.same_program().unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
    let mapped = [pattern(MAPPED, 8192, 1, 0, 4096, &[])];
    dst.read(&source.path, &mapped).unwrap();
    assert_eq!(dst.bytes(), naive(&mapped, source_byte, 4096, 0));
}

#[test]
fn a_zombie_is_not_alive() {
    let mut source = SourceProcess::start();
    source.child.kill().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while source.path.peer.is_alive() {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
    // Not waited for yet: the pid still exists and is still the peer's.
    let err = source.path.prove_private().unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
}

/// The pid and the pidfd stay the same through exec; only the nonce tells.
#[test]
fn another_program_under_the_same_pid_is_not_the_peer() {
    let mut source = SourceProcess::start();
    source.path.prove_private().unwrap();
    source.stream.write_all(b"x").unwrap();
    // Close-on-exec ends the stream when the new program is in place.
    assert_eq!(source.stream.read(&mut [0]).unwrap(), 0);
    assert!(source.path.peer.is_alive());
    // What `run` asks after its last byte, and what a failed read is explained by.
    let err = source.path.same_program().unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
    let dst = Destination::new(64);
    let err = dst
        .read(&source.path, &[pattern(PRIVATE, 0, 1, 0, 64, &[])])
        .unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
}

#[test]
fn lesson32_private_memory_is_not_read_without_the_right_nonce() {
    let source = SourceProcess::start_with(|leases| {
        leases.view = None;
        leases.nonce[5] ^= 1;
    });
    let dst = Destination::new(64);
    let err = dst
        .read(&source.path, &[pattern(PRIVATE, 0, 1, 0, 64, &[])])
        .unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PEER_LOST, "{err}");
    assert!(dst.bytes().iter().all(|byte| *byte == Destination::FRESH));

    let table = LeaseTable::create(1).unwrap();
    let mapping = Mapping::new(table.fd(), table.bytes()).unwrap();
    let mut nonce = table.nonce();
    nonce[0] ^= 1;
    let leases = PeerLeases {
        view: Some(LeaseView::new(mapping).unwrap()),
        address: 0,
        capacity: 1,
        nonce,
    };
    let err = ShmPath::new(source.path.peer.clone(), BTreeMap::new(), leases).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PROTOCOL, "{err}");
}

#[test]
fn an_unknown_table_address_is_unsupported_for_private_memory_only() {
    let source = SourceProcess::start_with(|leases| leases.address = 0);
    let dst = Destination::new(64);
    dst.read(&source.path, &[pattern(MAPPED, 0, 1, 0, 64, &[])])
        .unwrap();
    let err = dst
        .read(&source.path, &[pattern(PRIVATE, 0, 1, 0, 64, &[])])
        .unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_UNSUPPORTED, "{err}");
    assert!(source.path.attest(&source.job()).unwrap());
}

static SHARED_SOURCE: Mutex<Option<SourceProcess>> = Mutex::new(None);

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    /// Any strides, from both kinds of pool in one batch, against the plainest loop.
    #[test]
    fn strided_reads_equal_the_naive_copy(
        batch in patterns(&[MAPPED, PRIVATE], POOL_BYTES, 1 << 16),
    ) {
        let mut shared = SHARED_SOURCE.lock().unwrap_or_else(|e| e.into_inner());
        let source = shared.get_or_insert_with(SourceProcess::start);
        let dst = Destination::new(1 << 16);
        let read = dst.read(&source.path, &batch).unwrap();
        prop_assert_eq!(read, batch.iter().map(moved).sum::<u64>());
        prop_assert!(dst.bytes() == naive(&batch, source_byte, 1 << 16, Destination::FRESH));
    }
}
