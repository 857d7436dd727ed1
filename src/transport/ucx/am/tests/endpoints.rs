//! Endpoints that end under messages, or beside them.

use super::*;
use crate::transport::ucx::{Region, UcxPath, rma};

#[test]
fn the_end_of_gets_from_a_peer_is_not_the_end_of_messages() {
    if ucx("the_end_of_gets").is_none() {
        return;
    }
    let mut two = Two::with_gets(true);
    let leases = &two.served.leases;
    let key = two.source.register_leases(leases).unwrap();
    let source = rma::Source {
        name: "agent source".into(),
        address: two.source.address().to_vec(),
        keys: vec![(Region::Leases, key)],
        pools: BTreeMap::new(),
        leases: (leases.address(), leases.bytes()),
        nonce: leases.nonce(),
    };
    let gets = UcxPath::new(two.here.clone(), source, "a test".into(), LONG).unwrap();
    let path = two.good_path();
    path.run(&two.job()).unwrap();
    drop(gets);
    path.run(&two.job()).unwrap();
    assert!(path.is_usable());
    drop(path);
    two.end();
}

#[test]
fn a_job_over_an_endpoint_that_has_just_been_closed_fails_at_once() {
    if ucx("a_job_over_an_endpoint").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    let address = two.source.address().to_vec();
    let shared = two.here.connect("agent source".into(), address, Vec::new());
    let (endpoint, state) = shared.unwrap();
    two.here.close_endpoint(endpoint);
    let begun = Instant::now();
    while state.is_open() {
        assert!(begun.elapsed() < LONG, "it does not close");
        std::thread::yield_now();
    }
    let job = two.job();
    let (deadline, (ended, over)) = (job.clone(), mpsc::channel::<()>());
    let timer = std::thread::spawn(move || {
        let _ = over.recv_timeout(Duration::from_secs(5));
        deadline.cancel(); // as the transfer's deadline would
    });
    let outcome = path.run(&job);
    drop(ended);
    timer.join().unwrap();
    let e = outcome.unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
    assert!(e.text.contains("the endpoint was closed"), "{e}");
    drop(path);
    two.end();
}

/// The source's side may have ended without a word; then only a new connection helps.
#[test]
fn a_connection_that_was_silent_until_a_job_was_given_up_is_made_anew() {
    if ucx("a_connection_that_was_silent").is_none() {
        return;
    }
    for small in [false, true] {
        let mut two = Two::new();
        two.served.small.store(small, Ordering::SeqCst);
        let path = two.good_path();
        let served = two.served.clone();
        let held_up = served.gate.lock().unwrap();
        for (given_up, usable) in [(0, true), (1500, false)] {
            let job = match small {
                true => two.asked(&path),
                false => two.job(),
            };
            let late = job.clone();
            let deadline = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(given_up));
                late.cancel();
            });
            path.run(&job).unwrap();
            deadline.join().unwrap();
            assert_eq!(job.moved(), 0);
            assert_eq!(path.is_usable(), usable, "{small} {given_up}");
        }
        drop((held_up, path));
        two.end();
    }
}
