//! A caller that waits for an import takes part in it. One process, in which no worker is given
//! what is left to such a caller.
#![cfg(feature = "testing")]
#![allow(missing_docs, clippy::unwrap_used)]

mod agent_side;

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvferry::agent::*;
use kvferry::error::Status::*;
use kvferry::observe::fault;

use agent_side::*;

const BLOCK: usize = 4096;
const SLOTS: i32 = 1024;

fn side(transport: &str, workers: u32, affinity: Vec<u32>) -> Side {
    Side::made(
        transport,
        Memory::Own,
        1,
        SLOTS as u32,
        BLOCK as u64,
        |config| {
            config.workers = workers;
            config.affinity = affinity;
        },
    )
}

fn begin(source: &Side, sink: &Side, peer: &Peer, blocks: i32) -> (Publication, Transfer) {
    let slots: Vec<i32> = (0..blocks).collect();
    sink.words(0).fill(0);
    let publication = publish(source, &slots);
    let transfer = pull(sink, peer, publication.ticket(), &slots);
    (publication, transfer)
}

fn compare(sink: &Side, blocks: i32) {
    let words = blocks as usize * BLOCK / 8;
    for (at, got) in sink.words(0).iter().enumerate() {
        let expected = if at < words { word(0, at) } else { 0 };
        assert_eq!(*got, expected);
    }
}

/// The first CPU that this process may use.
fn a_cpu() -> u32 {
    // SAFETY: an all-zero set is a valid one, and is as large as is said.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(
            libc::sched_getaffinity(0, size_of_val(&set), &raw mut set),
            0
        );
        let may = |cpu: &usize| libc::CPU_ISSET(*cpu, &set);
        (0..libc::CPU_SETSIZE as usize).find(may).unwrap() as u32
    }
}

/// One test, since what it arms is the process's.
#[test]
fn who_waits_does_what_no_worker_was_given() {
    fault::arm("left_to_the_caller:on").unwrap();
    // Sockets: one small answer. Memory: one share, and several, of which a worker has the others.
    for (transport, blocks) in [
        ("unix", 1),
        ("tcp", 8),
        ("shm", 64),
        ("shm", SLOTS),
        ("inproc", 64),
        ("inproc", SLOTS),
    ] {
        for workers in [1, 2] {
            let (source, sink) = (side(transport, 1, vec![]), side(transport, workers, vec![]));
            let peer = meet(&source, &sink);
            for round in 0..20 {
                let (publication, transfer) = begin(&source, &sink, &peer, blocks);
                // Who only looks does nothing.
                assert_eq!(transfer.wait(Duration::ZERO), KVF_TIMED_OUT);
                let waiting = || assert_eq!(transfer.wait(LONG), KVF_OK);
                thread::scope(|scope| {
                    for _ in 0..round % 3 {
                        scope.spawn(waiting);
                    }
                    waiting();
                });
                assert_eq!(transfer.info().bytes, blocks as u64 * BLOCK as u64);
                compare(&sink, blocks);
                assert_eq!(publication.wait(LONG), KVF_OK);
            }
            // An agent's end waits for who has joined in.
            let (_publication, transfer) = begin(&source, &sink, &peer, blocks);
            thread::scope(|scope| {
                let waiting = scope.spawn(|| transfer.wait(LONG));
                sink.agent.shutdown(LONG).unwrap();
                let ended = waiting.join().unwrap();
                assert!([KVF_OK, KVF_ERR_SHUTDOWN].contains(&ended), "{ended:?}");
            });
        }
        // Where copies are made was said, or who observes is told: workers do everything.
        let (source, sink) = (
            side(transport, 1, vec![]),
            side(transport, 2, vec![a_cpu()]),
        );
        let peer = meet(&source, &sink);
        let (_publication, transfer) = begin(&source, &sink, &peer, blocks);
        ended_by_itself(&transfer);
        compare(&sink, blocks);
        let sink = side(transport, 1, vec![]);
        let peer = meet(&source, &sink);
        let slots: Vec<i32> = (0..blocks).collect();
        let publication = publish(&source, &slots);
        let want = import(publication.ticket(), &slots);
        let (told, hears) = mpsc::channel();
        let observer: Observer = Arc::new(move |notice| told.send(notice).unwrap());
        let observed = sink.agent.import_observed(&peer, want, Some(observer));
        let observed = observed.unwrap();
        assert_eq!(hears.recv_timeout(LONG).unwrap(), Notice::Ended);
        assert_eq!(observed.poll(), KVF_OK, "{}", observed.error_text());
        compare(&sink, blocks);
    }
}

fn ended_by_itself(transfer: &Transfer) {
    let begun = Instant::now();
    while transfer.poll() == KVF_IN_PROGRESS {
        assert!(begun.elapsed() < LONG);
        thread::yield_now();
    }
    assert_eq!(transfer.poll(), KVF_OK, "{}", transfer.error_text());
}
