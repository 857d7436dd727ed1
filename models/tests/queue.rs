//! The completion queue under every interleaving: the library's own source, with loom's locks.

mod sync {
    pub use loom::sync::{Mutex, MutexGuard};
}

#[path = "../../src/runtime/level.rs"]
mod level;

use level::{Level, Leveled};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

/// As an eventfd: raising adds one, lowering takes everything.
#[derive(Debug)]
struct Counter(AtomicU64);

impl Level for Counter {
    fn raise(&self) {
        assert_eq!(self.0.fetch_add(1, Ordering::SeqCst), 0, "raised twice");
    }

    fn lower(&self) {
        assert_eq!(self.0.swap(0, Ordering::SeqCst), 1, "lowered twice");
    }
}

type Queue = Leveled<u32, Counter>;

fn queue() -> Arc<Queue> {
    Arc::new(Leveled::new(Counter(AtomicU64::new(0))))
}

fn readable(queue: &Queue) -> bool {
    queue.level.0.load(Ordering::SeqCst) > 0
}

/// Takes everything, one at a time; the level must say how often that is possible.
fn drain(queue: &Queue) -> Vec<u32> {
    let mut out = Vec::new();
    while readable(queue) {
        let more = queue.take(&mut out, 1);
        assert_eq!(more, readable(queue), "the level is the queue's state");
    }
    assert!(!queue.take(&mut out, 9), "nothing is left without a level");
    out
}

#[test]
fn no_wake_up_is_lost() {
    loom::model(|| {
        let queue = queue();
        let pushers: Vec<_> = (1..=2)
            .map(|n| {
                let queue = queue.clone();
                thread::spawn(move || queue.push(n))
            })
            .collect();
        // A consumer that saw the level high finds something; one that takes too early finds
        // nothing, and the level tells it later.
        let mut taken = Vec::new();
        if readable(&queue) {
            queue.take(&mut taken, 1);
            assert_eq!(taken.len(), 1);
        }
        for pusher in pushers {
            pusher.join().unwrap();
        }
        taken.extend(drain(&queue));
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
    });
}

#[test]
fn an_event_is_withdrawn_or_taken_and_never_both_or_neither() {
    loom::model(|| {
        let queue = queue();
        let first = queue.push(1);
        queue.push(2);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || queue.withdraw(first))
        };
        let mut taken = Vec::new();
        let more = queue.take(&mut taken, 1);
        other.join().unwrap();
        match taken[..] {
            [1] => assert!(more, "the second one is left"),
            [2] => assert!(!more),
            _ => panic!("{taken:?}"),
        }
        taken.extend(drain(&queue));
        assert_eq!(taken.iter().filter(|n| **n == 2).count(), 1, "{taken:?}");
        assert!(!readable(&queue));
    });
}

#[test]
fn withdrawing_the_last_event_races_with_a_new_one() {
    loom::model(|| {
        let queue = queue();
        let first = queue.push(1);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || {
                queue.push(2);
            })
        };
        queue.withdraw(first);
        other.join().unwrap();
        assert!(readable(&queue));
        assert_eq!(drain(&queue), [2]);
    });
}

#[test]
fn two_consumers_share_the_events() {
    loom::model(|| {
        let queue = queue();
        queue.push(1);
        queue.push(2);
        let other = {
            let queue = queue.clone();
            thread::spawn(move || {
                let mut out = Vec::new();
                queue.take(&mut out, 1);
                out
            })
        };
        let mut taken = Vec::new();
        queue.take(&mut taken, 1);
        taken.extend(other.join().unwrap());
        taken.sort_unstable();
        assert_eq!(taken, [1, 2]);
        assert!(!readable(&queue));
    });
}

/// The same checks catch a queue whose level is changed outside its lock.
mod seeded {
    use super::*;
    use loom::sync::Mutex;

    struct Late {
        level: AtomicU64,
        events: Mutex<Vec<u32>>,
    }

    impl Late {
        fn push(&self, event: u32) {
            let empty = {
                let mut events = self.events.lock().unwrap();
                events.push(event);
                events.len() == 1
            };
            if empty {
                self.level.store(1, Ordering::SeqCst);
            }
        }

        fn take(&self) -> Option<u32> {
            let (event, empty) = {
                let mut events = self.events.lock().unwrap();
                (events.pop(), events.is_empty())
            };
            if empty {
                self.level.store(0, Ordering::SeqCst);
            }
            event
        }
    }

    #[test]
    #[should_panic(expected = "a wake-up is lost")]
    fn a_level_outside_the_lock_loses_a_wake_up() {
        loom::model(|| {
            let queue = Arc::new(Late {
                level: AtomicU64::new(0),
                events: Mutex::new(Vec::new()),
            });
            let other = {
                let queue = queue.clone();
                thread::spawn(move || queue.push(2))
            };
            queue.push(1);
            let first = queue.take();
            other.join().unwrap();
            let left = queue.events.lock().unwrap().len();
            let high = queue.level.load(Ordering::SeqCst) == 1;
            assert!(first.is_none() || high == (left > 0), "a wake-up is lost");
        });
    }
}
