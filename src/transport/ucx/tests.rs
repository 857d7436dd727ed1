//! What needs a UCX on this machine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::error::{Result, Status};
use crate::memory::{LeaseTable, Pool};
use crate::transport::span::tests::{Cache, filled, register, source_byte};
use crate::transport::{DataPath, ReadJob};
use crate::wire::DataOpen;

/// UCX, or a loud line why the test was skipped.
fn ucx(test: &str) -> Option<&'static Library> {
    match Library::get() {
        Ok(ucx) => Some(ucx),
        Err(e) => {
            let line = format!("NOT TESTED, NO UCX HERE: transport::ucx {test}: {e}");
            println!("{line}");
            if let Some(path) = std::env::var_os("KVFERRY_SKIP_FILE") {
                use std::io::Write;
                let mut options = std::fs::OpenOptions::new();
                let file = options.append(true).create(true).open(path);
                writeln!(file.unwrap(), "{line}").unwrap();
            }
            None
        }
    }
}

extern "C" fn handler(_: libc::c_int) {}

#[test]
fn signal_handlers_of_the_process_stay_as_they_are() {
    let signals = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGUSR1,
        libc::SIGCHLD,
    ];
    let action = |signal, new: Option<&libc::sigaction>| {
        let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: both are valid actions or null; the handler does nothing.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(signal, new, &raw mut old), 0);
            old
        }
    };
    // SAFETY: all zero is a valid action.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
    ours.sa_flags = libc::SA_RESTART;
    let before: Vec<_> = signals.iter().map(|s| action(*s, Some(&ours))).collect();
    let opened = ucx("signal_handlers").map(|ucx| (ucx, ucx.context(&[]).unwrap()));
    let after: Vec<_> = signals.iter().map(|s| action(*s, None)).collect();
    for (signal, old) in signals.iter().zip(&before) {
        action(*signal, Some(old));
    }
    let Some((ucx, context)) = opened else { return };
    // SAFETY: made above and not used any more.
    unsafe { ucx.ucp_cleanup(context) };
    for (signal, now) in signals.iter().zip(&after) {
        assert_eq!(now.sa_sigaction, ours.sa_sigaction, "signal {signal}");
        assert_eq!(
            now.sa_flags & libc::SA_RESTART,
            libc::SA_RESTART,
            "signal {signal}"
        );
    }
}

fn engine(name: &str) -> Arc<Engine> {
    let config = Config {
        name: name.into(),
        affinity: Vec::new(),
        forced: true,
        loopback: true,
        spin: Duration::ZERO,
        patience: Duration::from_secs(20),
    };
    Engine::start(config, || {}).unwrap()
}

/// A source with pools 2 and 3 and what it announces.
struct Peer {
    engine: Arc<Engine>,
    leases: Arc<LeaseTable>,
    pools: Vec<Arc<Pool>>,
    _memory: Vec<Vec<u8>>,
}

impl Peer {
    fn new() -> Self {
        let mut memory: Vec<Vec<u8>> = [2, 3]
            .into_iter()
            .map(|id| filled(id, Cache::BYTES as usize))
            .collect();
        let pools = memory
            .iter_mut()
            .zip([2, 3])
            .map(|(memory, id)| Arc::new(register(id, memory)))
            .collect();
        Self {
            engine: engine("kvf-src-ucx"),
            leases: Arc::new(LeaseTable::create(4).unwrap()),
            pools,
            _memory: memory,
        }
    }

    fn announced(&self) -> Source {
        let keys = self.pools.iter().map(|pool| {
            let key = self.engine.register_pool(pool).unwrap();
            (Region::Pool(pool.id()), key)
        });
        let leases = self.engine.register_leases(&self.leases).unwrap();
        Source {
            name: "agent source".into(),
            address: self.engine.address().to_vec(),
            keys: keys.chain([(Region::Leases, leases)]).collect(),
            pools: self
                .pools
                .iter()
                .map(|pool| (pool.id(), (pool.base() as u64, pool.bytes())))
                .collect(),
            leases: (self.leases.address(), self.leases.bytes()),
            nonce: self.leases.nonce(),
        }
    }
}

fn path(ours: &Arc<Engine>, source: Source) -> Result<UcxPath> {
    let patience = Duration::from_secs(10);
    UcxPath::new(ours.clone(), source, "a test".into(), patience)
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn a_job_arrives_byte_for_byte_while_its_lease_holds() {
    if ucx("a_job_arrives").is_none() {
        return;
    }
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx"));
    let path = path(&here, peer.announced()).unwrap();
    let mut ours = vec![0xee; 2 * Cache::BYTES as usize];
    let dst = Arc::new(register(1, &mut ours));
    let lease = peer.leases.grant().unwrap();
    let pools = BTreeMap::from([(1, dst.clone())]);
    let job = ReadJob::new(Cache::bindings(2, 3), pools, lease, DataOpen::default);
    path.run(&job).unwrap();
    assert_eq!(job.moved(), Cache::MOVED);
    assert!(path.attest(&job).unwrap());
    peer.leases.revoke(lease);
    assert!(!path.attest(&job).unwrap());
    drop((job, path));
    assert!(here.close(soon()) && peer.engine.close(soon()));
    drop(dst);
    assert!(ours == Cache::expected((2, 3), source_byte, 0xee));
}

#[test]
fn another_program_at_the_address_is_noticed_before_anything_is_read() {
    if ucx("another_program").is_none() {
        return;
    }
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx"));
    let mut source = peer.announced();
    source.nonce[0] ^= 1;
    let e = path(&here, source).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_PEER_LOST);
    assert!(e.text.contains("agent source does not hold"), "{e}");
}

#[test]
fn a_source_whose_ucx_has_ended_fails_the_job_and_leaves_the_memory_quiet() {
    if ucx("a_source_whose_ucx_has_ended").is_none() {
        return;
    }
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx"));
    let path = path(&here, peer.announced()).unwrap();
    let mut ours = vec![0xee; 2 * Cache::BYTES as usize];
    let dst = Arc::new(register(1, &mut ours));
    let pools = BTreeMap::from([(1, dst)]);
    let lease = peer.leases.grant().unwrap();
    let job = Arc::new(ReadJob::new(
        Cache::bindings(2, 3),
        pools,
        lease,
        DataOpen::default,
    ));
    assert!(peer.engine.close(soon()));
    let deadline = job.clone();
    let timer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(2));
        deadline.cancel(); // as the transfer's deadline would
    });
    // Over a lane that reads through the kernel it may even succeed: the memory is still there.
    match path.run(&job) {
        Ok(()) => assert!(job.is_cancelled() || job.moved() == Cache::MOVED),
        Err(e) => {
            assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
            assert!(e.text.contains("agent source"), "{e}");
            assert!(!path.is_usable());
        }
    }
    timer.join().unwrap();
}

#[test]
fn impossible_announcements_are_refused() {
    if ucx("impossible_announcements").is_none() {
        return;
    }
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx"));
    let refused = |change: fn(&mut Source), text: &str| {
        let mut source = peer.announced();
        change(&mut source);
        let e = path(&here, source).unwrap_err();
        assert_eq!(e.status, Status::KVF_ERR_PROTOCOL, "{e}");
        assert!(e.text.contains(text), "{e}");
    };
    refused(|s| s.address.clear(), "a UCX address of 0 bytes");
    refused(|s| s.address = vec![1; 70_000], "of 70000 bytes");
    refused(|s| s.keys[0].1 = vec![1; 5000], "a UCX key of 5000 bytes");
    refused(|s| s.leases.1 = 64, "a lease table of 64 bytes");
    refused(
        |s| s.pools.values_mut().for_each(|p| p.1 = u64::MAX),
        "wrap around",
    );
}

#[test]
fn an_ended_engine_answers_with_errors() {
    if ucx("an_ended_engine").is_none() {
        return;
    }
    let peer = Peer::new();
    assert!(peer.engine.close(soon()));
    assert!(peer.engine.has_ended());
    let e = peer.engine.register_pool(&peer.pools[0]).unwrap_err();
    assert!(e.text.contains("shut down"), "{e}");
    let (send, receive) = std::sync::mpsc::channel();
    peer.engine
        .end(Some(Box::new(move || send.send(()).unwrap())));
    receive.recv_timeout(Duration::from_secs(20)).unwrap();
}
