//! Gets, here without a card: UCX answers them in software.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::error::{Result, Status};
use crate::memory::{LeaseTable, Pool};
use crate::transport::span::tests::{Cache, filled, register, source_byte};
use crate::transport::ucx::Engine;
use crate::transport::ucx::tests::{Nobody, engine, engine_over_tcp, soon, ucx};
use crate::transport::{DataPath, ReadJob};
use crate::wire::DataOpen;

/// A source with pools 2 and 3 and what it announces.
struct Peer {
    engine: Arc<Engine>,
    leases: Arc<LeaseTable>,
    pools: Vec<Arc<Pool>>,
    _memory: Vec<Vec<u8>>,
}

impl Peer {
    fn new() -> Self {
        Self::of(engine("kvf-src-ucx", true, Box::new(Nobody)))
    }

    fn of(engine: Arc<Engine>) -> Self {
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
            engine,
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
                .map(|pool| {
                    let place = SourcePool {
                        address: pool.base() as u64,
                        bytes: pool.bytes(),
                        on_device: pool.is_device(),
                    };
                    (pool.id(), place)
                })
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

#[test]
fn a_job_arrives_byte_for_byte_while_its_lease_holds() {
    if ucx("a_job_arrives").is_none() {
        return;
    }
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx", true, Box::new(Nobody)));
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
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx", true, Box::new(Nobody)));
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
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx", true, Box::new(Nobody)));
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
    let (ended, over) = std::sync::mpsc::channel();
    let timer = std::thread::spawn(move || {
        let _ = over.recv_timeout(Duration::from_secs(2));
        deadline.cancel(); // as the transfer's deadline would
    });
    // Over a lane that reads through the kernel it may even succeed: the memory is still there.
    let outcome = path.run(&job);
    ended.send(()).unwrap();
    match outcome {
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
fn a_cancel_of_one_job_while_its_lease_is_looked_at_is_not_the_end_of_others() {
    if ucx("a_cancel_of_one_job").is_none() {
        return;
    }
    let here = engine_over_tcp("kvf-dst-ucx");
    let peer = Peer::of(engine_over_tcp("kvf-src-ucx"));
    let path = path(&here, peer.announced()).unwrap();
    let lease = peer.leases.grant().unwrap();
    let job = ReadJob::new(Vec::new(), BTreeMap::new(), lease, DataOpen::default);
    // The source's thread, which answers here in place of a card, is held up.
    let (go_on, held_up) = std::sync::mpsc::channel::<()>();
    let (stops, stopped) = std::sync::mpsc::channel();
    let waits = move || {
        stops.send(()).unwrap();
        let _ = held_up.recv();
    };
    assert!(!peer.engine.unregister_pool(3, waits));
    stopped.recv().unwrap();
    let outcome = std::thread::scope(|scope| {
        let attesting = scope.spawn(|| path.attest(&job));
        job.cancel();
        attesting.join().unwrap()
    });
    assert_eq!(outcome.unwrap_err().status, Status::KVF_ERR_CANCELLED);
    drop(go_on);
    let next = ReadJob::new(Vec::new(), BTreeMap::new(), lease, DataOpen::default);
    assert!(path.attest(&next).unwrap());
    assert!(path.is_usable());
    drop(path);
    assert!(here.close(soon()) && peer.engine.close(soon()));
}

#[test]
fn impossible_announcements_are_refused() {
    if ucx("impossible_announcements").is_none() {
        return;
    }
    let (peer, here) = (Peer::new(), engine("kvf-dst-ucx", true, Box::new(Nobody)));
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
        |s| s.pools.values_mut().for_each(|p| p.bytes = u64::MAX),
        "wrap around",
    );
}
