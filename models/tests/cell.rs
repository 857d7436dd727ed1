//! The cell that a handle, a waiting thread and the control thread share, under every
//! interleaving: the library's own source, with loom's locks.

#![allow(dead_code)]

use kvferry::{error, ids, session};

mod sync {
    pub use loom::sync::atomic::AtomicI32;
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
}

#[path = "../../src/runtime/level.rs"]
mod level;

mod api {
    pub use kvferry::agent::{Event, EventKind, Outcome};
}

#[path = "../../src/agent/cells.rs"]
mod cells;

mod runtime {
    use crate::level::{Level, Leveled};
    pub(crate) use crate::sync;
    use loom::sync::atomic::{AtomicU64, Ordering};

    /// As an eventfd: raising adds one, lowering takes everything.
    pub struct Counter(AtomicU64);

    impl Level for Counter {
        fn raise(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn lower(&self) {
            self.0.store(0, Ordering::SeqCst);
        }
    }

    pub struct EventQueue<T>(pub Leveled<T, Counter>);

    impl<T> EventQueue<T> {
        pub fn new() -> Self {
            Self(Leveled::new(Counter(AtomicU64::new(0))))
        }

        pub fn push(&self, event: T) -> u64 {
            self.0.push(event)
        }

        pub fn withdraw(&self, number: u64) {
            self.0.withdraw(number);
        }

        pub fn readable(&self) -> bool {
            self.0.level.0.load(Ordering::SeqCst) > 0
        }
    }
}

use std::sync::Arc;
use std::time::Duration;

use api::{Event, EventKind};
use cells::Cell;
use error::Status::{self, *};
use loom::thread;
use runtime::EventQueue;
use session::End;

const LONG: Duration = Duration::from_secs(3600);

fn cell() -> (Arc<Cell>, Arc<EventQueue<Event>>) {
    let events = Arc::new(EventQueue::new());
    let kind = EventKind::TransferEnded;
    let cell = Cell::new(1, ids::Key::default(), 0, kind, events.clone(), None);
    (Arc::new(cell), events)
}

fn take(events: &EventQueue<Event>) -> Vec<(EventKind, Status)> {
    let mut out = Vec::new();
    events.0.take(&mut out, 9);
    out.into_iter().map(|e| (e.kind, e.status)).collect()
}

#[test]
fn a_waiter_never_misses_the_end() {
    loom::model(|| {
        let (cell, events) = cell();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || cell.end(End::new(KVF_ERR_TRANSFER, "why")))
        };
        assert_eq!(cell.wait(LONG), KVF_ERR_TRANSFER);
        assert_eq!(cell.poll(), KVF_ERR_TRANSFER);
        other.join().unwrap();
        assert_eq!(
            take(&events),
            [(EventKind::TransferEnded, KVF_ERR_TRANSFER)]
        );
        assert!(!events.readable());
    });
}

#[test]
fn of_two_ends_one_counts_and_one_event_tells_it() {
    loom::model(|| {
        let (cell, events) = cell();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || cell.end(End::ok()))
        };
        cell.end(End::new(KVF_ERR_INTERNAL, "a thread panicked"));
        other.join().unwrap();
        let status = cell.poll();
        assert!(matches!(status, KVF_OK | KVF_ERR_INTERNAL));
        assert_eq!(take(&events), [(EventKind::TransferEnded, status)]);
    });
}

#[test]
fn safety_is_told_after_the_outcome() {
    loom::model(|| {
        let (cell, events) = cell();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || {
                cell.end(End::new(KVF_ERR_DEADLINE, "late"));
                cell.make_safe(false);
            })
        };
        if cell.look().2 {
            assert_eq!(
                cell.poll(),
                KVF_ERR_DEADLINE,
                "never safe without an outcome"
            );
        }
        other.join().unwrap();
        assert!(cell.look().2);
        let told = [
            (EventKind::TransferEnded, KVF_ERR_DEADLINE),
            (EventKind::MemorySafe, KVF_ERR_DEADLINE),
        ];
        assert_eq!(take(&events), told);
    });
}

#[test]
fn an_abandoned_cell_leaves_no_event() {
    loom::model(|| {
        let (cell, events) = cell();
        let other = {
            let cell = cell.clone();
            thread::spawn(move || cell.end_safe(End::ok()))
        };
        cell.abandon();
        other.join().unwrap();
        assert!(!events.readable(), "an event of a handle that is gone");
        assert_eq!(take(&events), []);
    });
}
