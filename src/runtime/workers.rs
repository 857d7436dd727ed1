//! Threads that copy.
//!
//! A task that waits for somebody else (a socket of a peer that is stopped or cut off) says so with
//! [`stalled`]: while it does, another thread takes its place, so that tasks about other peers go on.

use std::cell::RefCell;
use std::collections::BinaryHeap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::thread::{Thread, spawn};
use crate::error::Result;

/// After a wait of this long the other side is taken for stalled.
pub const STALL_AFTER: Duration = Duration::from_millis(20);

/// Most threads that take the places of stalled ones.
const MAX_SPARE: usize = 64;

type Task = Box<dyn FnOnce() + Send>;

/// A pool of threads that run tasks, larger priority first, then in order.
pub struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// The last guest has left.
    alone: Condvar,
    threads: Mutex<Vec<Thread>>,
    name: String,
    affinity: Vec<u32>,
    count: usize,
    on_panic: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Queue {
    tasks: BinaryHeap<Entry>,
    next: u64,
    /// Threads that there are, wait for a task, and are stalled in one.
    running: usize,
    idle: usize,
    stalled: usize,
    /// Threads of others in [`Workers::join_in`].
    guests: usize,
    /// Number of the next spare thread's name.
    spare: usize,
    closed: bool,
}

impl Queue {
    /// Tasks wait only because threads are stalled, of which there are `count` without spare ones.
    fn lacks_a_thread(&self, count: usize) -> bool {
        let free = self.running.saturating_sub(self.stalled);
        !self.closed
            && !self.tasks.is_empty()
            && self.idle == 0
            && free < count
            && self.running < count + MAX_SPARE
    }
}

thread_local! {
    /// The pool of a worker thread.
    static POOL: RefCell<Weak<Shared>> = const { RefCell::new(Weak::new()) };
}

/// Whether this is a worker's thread, for which [`stalled`] does something.
pub fn can_stall() -> bool {
    POOL.with_borrow(|pool| pool.strong_count() > 0)
}

/// Runs what may wait long for somebody else. On a worker's thread another thread may take its
/// place meanwhile; on others nothing happens.
pub fn stalled<R>(wait: impl FnOnce() -> R) -> R {
    let Some(pool) = POOL.with_borrow(Weak::upgrade) else {
        return wait();
    };
    /// Also when `wait` panics.
    struct Stalled(Arc<Shared>);
    impl Drop for Stalled {
        fn drop(&mut self) {
            let mut queue = self.0.lock();
            queue.stalled -= 1;
            if queue.running > queue.stalled + self.0.count && queue.idle > 0 {
                drop(queue);
                self.0.wake.notify_one(); // one that is not needed any more ends
            }
        }
    }
    pool.lock().stalled += 1;
    pool.replace_stalled();
    let _stalled = Stalled(pool);
    wait()
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
        let workers = Self {
            shared: Arc::new(Shared {
                queue: Mutex::default(),
                wake: Condvar::new(),
                alone: Condvar::new(),
                threads: Mutex::default(),
                name: name.to_owned(),
                affinity: affinity.to_vec(),
                count,
                on_panic: Box::new(on_panic),
            }),
        };
        for i in 0..count {
            let mut threads = workers.shared.threads();
            workers.shared.lock().running += 1;
            workers.shared.add_thread(&mut threads, format!("w{i}"))?;
        }
        Ok(workers)
    }

    /// Number of threads, those of stalled ones' places not counted.
    pub fn count(&self) -> usize {
        self.shared.count
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
            self.shared.replace_stalled();
        }
    }

    /// Does a task on the calling thread, for which [`Self::close`] waits as for the others; `None`:
    /// closed.
    pub fn join_in<R>(&self, task: impl FnOnce() -> R) -> Option<R> {
        /// Also when `task` panics.
        struct Guest<'a>(&'a Shared);
        impl Drop for Guest<'_> {
            fn drop(&mut self) {
                let mut queue = self.0.lock();
                queue.guests -= 1;
                if queue.closed && queue.guests == 0 {
                    self.0.alone.notify_all();
                }
            }
        }
        let mut queue = self.shared.lock();
        if queue.closed {
            return None;
        }
        queue.guests += 1;
        drop(queue);
        let _guest = Guest(&self.shared);
        Some(task())
    }

    /// Lets the threads end after their queued tasks and joins them until `deadline`; false: some
    /// are still running and were detached.
    pub fn close(&self, deadline: Instant) -> bool {
        let mut queue = self.shared.lock();
        queue.closed = true;
        self.shared.wake.notify_all();
        let mut all_ended = true;
        while queue.guests > 0 && all_ended {
            let left = deadline.saturating_duration_since(Instant::now());
            let waited = self.shared.alone.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            all_ended = Instant::now() < deadline || queue.guests == 0;
        }
        drop(queue);
        let threads = std::mem::take(&mut *self.shared.threads());
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

    fn threads(&self) -> MutexGuard<'_, Vec<Thread>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread that is counted as running already.
    fn add_thread(self: &Arc<Self>, threads: &mut Vec<Thread>, suffix: String) -> Result<()> {
        let shared = self.clone();
        let body = move || {
            POOL.set(Arc::downgrade(&shared));
            while let Some(task) = shared.next() {
                // AssertUnwindSafe: whoever hears of the panic fails all operations.
                if catch_unwind(AssertUnwindSafe(task)).is_err() {
                    (shared.on_panic)();
                }
            }
        };
        let thread = spawn(format!("{}-{suffix}", self.name), &self.affinity, body)?;
        threads.retain(|thread| !thread.is_finished());
        threads.push(thread);
        Ok(())
    }

    /// Starts a thread if tasks wait only because others are stalled.
    fn replace_stalled(self: &Arc<Self>) {
        // Looked at first without the second lock: every task comes by here.
        if !self.lock().lacks_a_thread(self.count) {
            return;
        }
        // Held until the thread is in the list: `close` either finds it there, or has said before
        // that no more are to come.
        let mut threads = self.threads();
        let number = {
            let mut queue = self.lock();
            if !queue.lacks_a_thread(self.count) {
                return;
            }
            queue.running += 1;
            queue.spare = queue.spare.wrapping_add(1);
            queue.spare
        };
        if self.add_thread(&mut threads, format!("s{number}")).is_err() {
            // No worse than before: the tasks wait for the stalled ones.
            self.lock().running -= 1;
        }
    }

    /// Waits for a task; `None`: closed and nothing is left, or there are enough others.
    fn next(&self) -> Option<Task> {
        let mut queue = self.lock();
        loop {
            if queue.running > queue.stalled + self.count {
                queue.running -= 1;
                // A task's notice may have come to this thread.
                self.wake.notify_one();
                return None;
            }
            if let Some(entry) = queue.tasks.pop() {
                return Some(entry.task);
            }
            if queue.closed {
                queue.running -= 1;
                return None;
            }
            queue.idle += 1;
            queue = self
                .wake
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workers")
            .field("count", &self.shared.count)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

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
    fn close_waits_also_for_a_thread_that_is_only_being_started() {
        for _ in 0..200 {
            let workers = Arc::new(Workers::start("t", 1, &[], || {}).unwrap());
            let (begun, begins) = channel();
            let (hold, held) = channel::<()>();
            workers.submit(0, move || {
                begun.send(()).unwrap();
                // The next task makes a spare thread necessary: now, while `close` runs.
                stalled(|| held.recv().unwrap());
            });
            begins.recv().unwrap();
            let submitter = workers.clone();
            let other = std::thread::spawn(move || submitter.submit(0, || {}));
            let closer = workers.clone();
            let closing = std::thread::spawn(move || closer.close(soon()));
            other.join().unwrap();
            hold.send(()).unwrap();
            assert!(closing.join().unwrap());
            assert_eq!(workers.shared.threads().len(), 0, "not waited for");
            assert_eq!(workers.shared.lock().running, 0);
        }
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

    #[test]
    fn tasks_go_on_while_others_are_stalled() {
        let workers = Workers::start("t", 2, &[], || {}).unwrap();
        let (hold, held) = channel::<()>();
        let held = Arc::new(Mutex::new(held));
        let (send, receive) = channel();
        for _ in 0..5 {
            let (held, begun) = (held.clone(), send.clone());
            workers.submit(0, move || {
                stalled(|| {
                    begun.send("stalled").unwrap();
                    held.lock().unwrap().recv().unwrap();
                });
            });
        }
        for _ in 0..5 {
            assert_eq!(receive.recv_timeout(Duration::from_secs(20)), Ok("stalled"));
        }
        let other = send.clone();
        workers.submit(0, move || other.send("other").unwrap());
        assert_eq!(receive.recv_timeout(Duration::from_secs(20)), Ok("other"));
        for _ in 0..5 {
            hold.send(()).unwrap();
        }
        // The threads that took their places end.
        let until = soon();
        while workers.shared.lock().running > 2 {
            assert!(Instant::now() < until);
            let after = send.clone();
            workers.submit(0, move || after.send("after").unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(workers.close(soon()));
        assert_eq!(workers.shared.lock().running, 0);
    }

    #[test]
    fn the_end_waits_for_those_who_joined_in() {
        let workers = Workers::start("t", 1, &[], || {}).unwrap();
        let (begun, has_begun) = channel();
        let (hold, held) = channel::<()>();
        std::thread::scope(|scope| {
            let workers = &workers;
            let guest = scope.spawn(move || {
                workers.join_in(|| {
                    begun.send(()).unwrap();
                    held.recv().unwrap();
                    7
                })
            });
            has_begun.recv().unwrap();
            assert!(!workers.close(Instant::now()));
            let closing = scope.spawn(|| workers.close(soon()));
            hold.send(()).unwrap();
            assert_eq!(guest.join().unwrap(), Some(7));
            assert!(closing.join().unwrap());
            assert_eq!(workers.join_in(|| 8), None);
        });
    }

    #[test]
    fn who_panics_has_left() {
        let workers = Workers::start("t", 1, &[], || {}).unwrap();
        let task = AssertUnwindSafe(|| workers.join_in(|| panic!("asked to")));
        assert!(catch_unwind(task).is_err());
        assert!(workers.close(soon()));
    }
}
