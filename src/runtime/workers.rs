//! Threads that copy.

use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::thread::{Thread, spawn};
use crate::error::Result;

type Task = Box<dyn FnOnce() + Send>;

/// A pool of threads that run tasks, larger priority first, then in order.
pub struct Workers {
    shared: Arc<Shared>,
    threads: Mutex<Vec<Thread>>,
    count: usize,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    tasks: BinaryHeap<Entry>,
    next: u64,
    closed: bool,
}

struct Entry {
    priority: i32,
    number: u64,
    task: Task,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.priority, std::cmp::Reverse(self.number))
            .cmp(&(other.priority, std::cmp::Reverse(other.number)))
    }
}

impl Workers {
    /// Starts `count` threads named `{name}-w0`, ... . `on_panic` hears of a task that panicked.
    ///
    /// # Errors
    /// `KVF_ERR_SYSTEM`: the system refused a thread.
    pub fn start(
        name: &str,
        count: usize,
        affinity: &[u32],
        on_panic: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            wake: Condvar::new(),
        });
        let on_panic = Arc::new(on_panic);
        let mut workers = Self {
            shared: shared.clone(),
            threads: Mutex::default(),
            count,
        };
        for i in 0..count {
            let (shared, on_panic) = (shared.clone(), on_panic.clone());
            let body = move || {
                while let Some(task) = shared.next() {
                    // AssertUnwindSafe: whoever hears of the panic fails all operations.
                    if catch_unwind(AssertUnwindSafe(task)).is_err() {
                        on_panic();
                    }
                }
            };
            let thread = spawn(format!("{name}-w{i}"), affinity, body)?;
            workers
                .threads
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .push(thread);
        }
        Ok(workers)
    }

    /// Number of threads.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Queues a task; after [`Self::close`] it is dropped.
    pub fn submit(&self, priority: i32, task: impl FnOnce() + Send + 'static) {
        let mut queue = self.shared.lock();
        if !queue.closed {
            let number = queue.next;
            queue.next += 1;
            queue.tasks.push(Entry {
                priority,
                number,
                task: Box::new(task),
            });
            drop(queue);
            self.shared.wake.notify_one();
        }
    }

    /// Lets the threads end after their queued tasks and joins them until `deadline`; false: some
    /// are still running and were detached.
    pub fn close(&self, deadline: Instant) -> bool {
        self.shared.lock().closed = true;
        self.shared.wake.notify_all();
        let threads =
            std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        let mut all_ended = true;
        for thread in threads {
            all_ended &= thread.join_until(deadline);
        }
        all_ended
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // Threads that are left end by themselves; nobody waits for them here.
        self.shared.lock().closed = true;
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a task; `None`: closed and nothing is left.
    fn next(&self) -> Option<Task> {
        let mut queue = self.lock();
        loop {
            if let Some(entry) = queue.tasks.pop() {
                return Some(entry.task);
            }
            if queue.closed {
                return None;
            }
            queue = self
                .wake
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers")
            .field("count", &self.count)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn larger_priorities_run_first_and_equal_ones_in_order() {
        let workers = Workers::start("t", 1, &[], || {}).unwrap();
        let (hold, held) = channel::<()>();
        let (send, receive) = channel();
        workers.submit(9, move || held.recv().unwrap());
        for (priority, name) in [(0, "a"), (0, "b"), (5, "c"), (-1, "d")] {
            let send = send.clone();
            workers.submit(priority, move || send.send(name).unwrap());
        }
        hold.send(()).unwrap();
        assert!(workers.close(soon()));
        assert_eq!(receive.try_iter().collect::<String>(), "cabd");
    }

    #[test]
    fn a_panic_is_reported_and_the_thread_goes_on() {
        let (send, receive) = channel();
        let reported = send.clone();
        let workers = Workers::start("t", 1, &[], move || reported.send("panic").unwrap()).unwrap();
        workers.submit(0, || panic!("asked to"));
        workers.submit(0, move || send.send("next").unwrap());
        assert!(workers.close(soon()));
        assert_eq!(receive.try_iter().collect::<Vec<_>>(), ["panic", "next"]);
    }
}
