//! The logic of the event queue, apart from the descriptor that shows its level; `models/` checks
//! this file with loom.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use super::sync::{Mutex, MutexGuard};

/// Something whose level others poll.
pub trait Level {
    /// Low to high.
    fn raise(&self);
    /// High to low.
    fn lower(&self);
}

/// Events not taken yet, in order, and a level that is high exactly while there are any: it is
/// changed under the queue's lock, on empty to non-empty and back.
#[derive(Debug)]
pub struct Leveled<T, L> {
    pub level: L,
    queue: Mutex<Queue<T>>,
}

#[derive(Debug)]
struct Queue<T> {
    next: u64,
    events: BTreeMap<u64, T>,
}

impl<T, L: Level> Leveled<T, L> {
    /// An empty queue; `level` is low.
    pub fn new(level: L) -> Self {
        Self {
            level,
            queue: Mutex::new(Queue {
                next: 1,
                events: BTreeMap::new(),
            }),
        }
    }

    /// Appends an event and returns its number.
    pub fn push(&self, event: T) -> u64 {
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        if queue.events.is_empty() {
            self.level.raise();
        }
        queue.events.insert(number, event);
        number
    }

    /// Takes an event back, if nobody has taken it yet.
    pub fn withdraw(&self, number: u64) {
        let mut queue = self.lock();
        if queue.events.remove(&number).is_some() && queue.events.is_empty() {
            self.level.lower();
        }
    }

    /// Moves up to `cap` events to `out`; true: more are left.
    pub fn take(&self, out: &mut Vec<T>, cap: usize) -> bool {
        let mut queue = self.lock();
        let before = queue.events.len();
        for _ in 0..cap {
            match queue.events.pop_first() {
                Some((_, event)) => out.push(event),
                None => break,
            }
        }
        if before > 0 && queue.events.is_empty() {
            self.level.lower();
        }
        !queue.events.is_empty()
    }

    fn lock(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
