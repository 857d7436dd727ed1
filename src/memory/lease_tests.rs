//! Leases over mapped tables, which Miri cannot run.

#![cfg(not(miri))]

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::error::Status;

fn view(table: &LeaseTable) -> LeaseView {
    LeaseView::new(Mapping::new(table.fd(), table.bytes()).unwrap()).unwrap()
}

#[test]
fn a_lease_holds_until_it_is_revoked_and_never_again() {
    let table = LeaseTable::create(3).unwrap();
    let view = view(&table);
    assert_eq!(view.nonce(), table.nonce());
    assert_ne!(table.nonce(), LeaseTable::create(3).unwrap().nonce());
    let leases = [(); 3].map(|()| table.grant().unwrap());
    assert_eq!(leases.map(|l| l.index), [0, 1, 2]);
    let full = table.grant().unwrap_err();
    assert_eq!(full.status, Status::KVF_ERR_LIMIT);
    assert!(full.text.contains("all 3"), "{full}");
    for lease in leases {
        assert!(view.holds(lease).unwrap() && table.holds(lease));
    }
    assert!(table.revoke(leases[1]));
    assert!(!table.revoke(leases[1]));
    assert!(!view.holds(leases[1]).unwrap() && !table.holds(leases[1]));
    assert!(view.holds(leases[0]).unwrap() && view.holds(leases[2]).unwrap());

    let again = table.grant().unwrap();
    assert_eq!(again.index, 1);
    assert!(again.generation > leases[1].generation);
    assert!(view.holds(again).unwrap());
    assert!(!view.holds(leases[1]).unwrap());
    assert!(!table.revoke(leases[1]), "an old lease ends nobody else's");
    assert!(view.holds(again).unwrap());
}

#[test]
fn words_are_where_a_remote_reader_looks() {
    let table = LeaseTable::create(4).unwrap();
    let (first, second) = (table.grant().unwrap(), table.grant().unwrap());
    table.revoke(first);
    for (lease, word) in [(first, first.word() & !1), (second, second.word())] {
        let at = ptr::with_exposed_provenance::<u64>((table.address() + lease.offset()) as usize);
        // SAFETY: a word of the table.
        assert_eq!(unsafe { at.read_volatile() }, word);
    }
    assert_eq!(table.bytes(), 64 + 4 * 8);
}

#[test]
fn words_outside_of_the_table_are_refused() {
    let table = LeaseTable::create(2).unwrap();
    let outside = Lease {
        index: 2,
        generation: 1,
    };
    let err = view(&table).holds(outside).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PROTOCOL);
    assert!(!table.holds(outside) && !table.revoke(outside));
    let err = LeaseTable::create(0).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_INVALID_ARGUMENT);
    let none = Pool::create_shared(909, 64, None, PageSize::Base).unwrap();
    let err = LeaseView::new(Mapping::new(none.fd().unwrap(), 64).unwrap()).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_PROTOCOL);
}

/// A writer reuses its slot as soon as `revoke` has returned; what a reader has attested must
/// be the published bytes.
#[test]
fn a_read_that_a_revocation_overtook_is_not_attested() {
    const WORDS: usize = 512;
    let table = LeaseTable::create(1).unwrap();
    let view = view(&table);
    let slot: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    let offered = AtomicU64::new(0); // generation
    let stop = AtomicBool::new(false);
    let (mut attested, mut expired) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut reused = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let lease = table.grant().unwrap();
                for word in &slot {
                    word.store(lease.generation, Ordering::Relaxed);
                }
                offered.store(lease.generation, Ordering::Release);
                for _ in 0..lease.generation % 4000 {
                    std::hint::spin_loop();
                }
                assert!(table.revoke(lease));
                reused += 1;
                for word in &slot {
                    word.store(u64::MAX - reused, Ordering::Relaxed);
                }
            }
        });
        let end = Instant::now() + Duration::from_millis(500);
        while Instant::now() < end || attested == 0 || expired == 0 {
            let generation = offered.load(Ordering::Acquire);
            if generation == 0 {
                continue;
            }
            let copy: Vec<u64> = slot.iter().map(|w| w.load(Ordering::Relaxed)).collect();
            let lease = Lease {
                index: 0,
                generation,
            };
            if view.holds(lease).unwrap() {
                attested += 1;
                assert!(copy.iter().all(|word| *word == generation));
            } else {
                expired += 1;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}
