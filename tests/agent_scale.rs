//! Thousands of pools and a hundred thousand blocks: what is registered, announced, planned and
//! read must not have a limit that an engine meets, nor a cost that grows with its square.
#![allow(missing_docs, clippy::unwrap_used)]

mod agent_side;

use std::time::{Duration, Instant};

use kvferry::agent::*;
use kvferry::error::Status::*;

use agent_side::*;

const TRANSPORTS: [&str; 4] = ["inproc", "shm", "unix", "tcp"];

/// Pulls slots `from` into slots `to` and compares every byte of the sink.
fn hand_over(source: &Side, sink: &Side, block: usize, from: &[i32], to: &[i32]) -> TransferInfo {
    let peer = meet(source, sink);
    let publication = publish(source, from);
    let transfer = pull(sink, &peer, publication.ticket(), to);
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    let info = transfer.info();
    let bytes = source.tensors.len() * block * from.len();
    assert_eq!(info.bytes, bytes as u64);
    assert_eq!(publication.wait(LONG), KVF_OK);
    let words = block / 8;
    for tensor in 0..sink.tensors.len() {
        let mut expected = vec![0; sink.tensor_words];
        for (from, to) in from.iter().zip(to) {
            for i in 0..words {
                expected[*to as usize * words + i] = word(tensor, *from as usize * words + i);
            }
        }
        assert!(
            sink.words(tensor) == expected,
            "tensor {tensor} differs over {}",
            info.transport
        );
    }
    info
}

#[test]
fn ten_thousand_pools_in_one_layout() {
    for transport in TRANSPORTS {
        let side = || Side::new(transport, Memory::Own, 10_000, 4, 256);
        let info = hand_over(&side(), &side(), 256, &[3, 1], &[0, 3]);
        assert_eq!(info.transport, transport);
    }
}

#[test]
fn more_pools_of_kvferry_than_descriptors_in_a_message() {
    // Both sides and what is on its way: 600 + 600 + 512 + 512 descriptors in this process.
    if !may_open(3000) {
        eprintln!("SKIPPED: THIS PROCESS MAY NOT OPEN 3000 FILES");
        return;
    }
    let side = || Side::new("shm", Memory::Kvferry, 600, 4, 64);
    let (source, sink) = (side(), side());
    let info = hand_over(&source, &sink, 64, &[3, 1], &[0, 3]);
    assert_eq!(info.transport, "shm");
}

/// Raises the soft limit of open files as far as needed.
fn may_open(files: u64) -> bool {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: one struct that lives here.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    limit.rlim_cur = limit.rlim_cur.max(files.min(limit.rlim_max));
    // SAFETY: as above.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    limit.rlim_cur >= files
}

#[test]
fn many_blocks_in_one_call() {
    let transports = TRANSPORTS.into_iter();
    for (transport, blocks) in transports.flat_map(|t| [(t, 4096), (t, 100_000)]) {
        // Small ones: their number is what could be too large. kvferry-bench moves whole 4 KiB.
        const BLOCK: usize = 64;
        let slots = blocks + 1;
        let side = || Side::new(transport, Memory::Own, 1, slots, BLOCK as u64);
        // 7 has no factor in common with either number of slots: every slot once, scattered.
        let scattered = |i| (u64::from(i) * 7 % u64::from(slots)) as i32;
        let from: Vec<i32> = (0..blocks).map(scattered).collect();
        let to: Vec<i32> = (0..blocks).rev().map(|i| i as i32).collect();
        let info = hand_over(&side(), &side(), BLOCK, &from, &to);
        assert_eq!(info.transport, transport);
    }
}

#[test]
fn a_cancel_at_any_moment_leaves_both_sides_with_one_outcome() {
    const BLOCK: u64 = 48 << 10; // not small enough for the thread that begins it
    for transport in ["shm", "unix", "tcp"] {
        let side = || Side::new(transport, Memory::Own, 1, 4, BLOCK);
        let (source, sink) = (side(), side());
        let peer = meet(&source, &sink);
        let mut done = 0;
        for round in 0..400u64 {
            let publication = publish(&source, &[3, 1]);
            // The slots are the same each time: whoever hears of the end may use them at once.
            let transfer = pull(&sink, &peer, publication.ticket(), &[0, 2]);
            let begun = Instant::now();
            let wait = Duration::from_micros(round % 100 * 4);
            while round % 4 != 0 && begun.elapsed() < wait {
                std::hint::spin_loop();
            }
            if round % 4 != 0 {
                transfer.cancel();
            }
            let ended = transfer.wait(LONG);
            while !transfer.info().memory_safe {
                assert!(begun.elapsed() < LONG);
                std::thread::yield_now();
            }
            let expected = match ended {
                KVF_OK => KVF_OK,
                KVF_ERR_CANCELLED => KVF_ERR_CANCELLED_BY_PEER,
                other => panic!("{transport}: {other:?} {}", transfer.error_text()),
            };
            let text = publication.error_text();
            assert_eq!(publication.wait(LONG), expected, "{transport}: {text}");
            done += u64::from(ended == KVF_OK);
            let mut events = Vec::new();
            sink.agent.take_events(&mut events, 100);
            let ends = events
                .iter()
                .filter(|e| e.kind == EventKind::TransferEnded && e.object == transfer.id());
            assert_eq!(ends.map(|e| e.status).collect::<Vec<_>>(), [ended]);
        }
        assert!(done >= 100, "{transport}: {done} of 400 were not cancelled");
    }
}

#[test]
fn an_agent_that_ends_right_after_a_success_tells_the_source_of_it() {
    const BLOCK: u64 = 48 << 10;
    let side = || Side::new("unix", Memory::Own, 1, 4, BLOCK);
    let (source, sink) = (side(), side());
    let peer = meet(&source, &sink);
    let publication = publish(&source, &[3, 1]);
    // The worker that has the outcome is held up, as by the scheduler, before it can tell more.
    let (go_on, held_up) = std::sync::mpsc::channel();
    let held_up = std::sync::Mutex::new(held_up);
    let observer: Observer = std::sync::Arc::new(move |_| {
        let _ = held_up.lock().unwrap().recv_timeout(LONG);
    });
    let want = import(publication.ticket(), &[0, 2]);
    let transfer = sink
        .agent
        .import_observed(&peer, want, Some(observer))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    std::thread::scope(|scope| {
        scope.spawn(|| sink.agent.shutdown(LONG));
        let ended = publication.wait(LONG);
        go_on.send(()).unwrap();
        assert_eq!(ended, KVF_OK, "{}", publication.error_text());
    });
}

#[test]
fn a_publication_has_a_limit_and_reaches_it() {
    const LIMIT: u32 = 1 << 20;
    let side = || Side::new("tcp", Memory::Own, 1, LIMIT + 1, 8);
    let (source, sink) = (side(), side());
    let all: Vec<i32> = (0..=LIMIT as i32).collect();
    let too_many = PublishDesc {
        groups: vec![PublishedGroup {
            slots: all.clone(),
            token_end: all.len() as u64,
            ..PublishedGroup::default()
        }],
        ..PublishDesc::default()
    };
    let err = source.agent.publish(too_many).unwrap_err();
    assert_eq!(err.status, KVF_ERR_LIMIT);
    assert!(err.text.contains("1048577 slots"), "{err}");
    hand_over(&source, &sink, 8, &all[1..], &all[..LIMIT as usize]);
}

/// Small jobs over a socket are asked for by the caller's thread, which takes the answer if it may
/// look for it; a worker does otherwise.
#[test]
fn small_pulls_one_after_the_other() {
    const BLOCK: usize = 4096;
    for transport in ["unix", "tcp"] {
        for spin in [Duration::ZERO, Duration::from_millis(5)] {
            let side = || Side::spinning(spin, transport, Memory::Own, 1, 64, BLOCK as u64);
            let (source, sink) = (side(), side());
            let peer = meet(&source, &sink);
            for round in 0..200 {
                // 1 to 9 blocks: from 4 KiB to more than is asked for at once.
                let from: Vec<i32> = (0..=round % 9).map(|i| (round * 7 + i * 5) % 64).collect();
                let to: Vec<i32> = (0..=round % 9).map(|i| (round * 3 + i) % 64).collect();
                let publication = publish(&source, &from);
                let transfer = pull(&sink, &peer, publication.ticket(), &to);
                assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
                let words = BLOCK / 8;
                for (from, to) in from.iter().zip(&to) {
                    let at = *to as usize * words;
                    let got = sink.words(0)[at..at + words].iter().enumerate();
                    for (i, got) in got {
                        assert_eq!(*got, word(0, *from as usize * words + i), "{round} {from}");
                    }
                }
                assert_eq!(publication.wait(LONG), KVF_OK);
            }
            // What the source has taken back is refused by name, whoever asks for it.
            let publication = publish(&source, &[1]);
            publication.release();
            assert_ne!(publication.wait(LONG), KVF_OK);
            let before = sink.words(0)[..512].to_vec();
            let transfer = pull(&sink, &peer, publication.ticket(), &[0]);
            assert_eq!(
                transfer.wait(LONG),
                KVF_ERR_EXPIRED,
                "{}",
                transfer.error_text()
            );
            assert!(sink.words(0)[..512] == before);
        }
    }
}

#[test]
fn pools_outside_of_the_layout_are_not_announced() {
    let few = Side::new("tcp", Memory::Own, 2, 4, 64);
    let before = few.agent.metadata().unwrap();
    let mut more = vec![0u64; 16 * 10_000];
    let at: *mut u8 = more.as_mut_ptr().cast();
    for i in 0..10_000 {
        // SAFETY: inside `more`, which is dropped after the agent.
        unsafe { few.agent.register_pool(at.wrapping_add(i * 128), 64) }.unwrap();
    }
    assert_eq!(few.agent.metadata().unwrap(), before);
    drop(few);
    drop(more);
}
