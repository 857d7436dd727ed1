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
    let e = run_for_a_while(&path, &job).unwrap_err();
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
    let cases = [(LONG, true), (Duration::ZERO, false)];
    for (small, (silence, usable)) in [false, true]
        .map(|small| cases.map(|case| (small, case)))
        .concat()
    {
        let mut two = Two::new();
        two.served.small.store(small, Ordering::SeqCst);
        let mut path = two.good_path();
        path.silence = silence;
        let served = two.served.clone();
        let held_up = served.gate.lock().unwrap();
        let job = match small {
            true => two.asked(&path),
            false => two.job(),
        };
        let (late, asked) = (job.clone(), served.clone());
        let deadline = std::thread::spawn(move || {
            let came = asked.hears("open", 1, LONG);
            late.cancel();
            came
        });
        path.run(&job).unwrap();
        assert!(deadline.join().unwrap());
        assert_eq!(job.moved(), 0);
        assert_eq!(path.is_usable(), usable, "{small} {silence:?}");
        drop((held_up, path));
        two.end();
    }
}
