//! Named threads that no signal of the engine's is delivered to.

use std::io;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Status};

/// A thread that can be joined within a time-out.
#[derive(Debug)]
pub struct Thread {
    handle: JoinHandle<()>,
}

impl Thread {
    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }

    /// Joins if the thread ends before `deadline`; else detaches it and says false.
    ///
    /// The standard library has no timed join, so the end is looked for with a growing pause; this
    /// runs only while an agent is being destroyed.
    pub fn join_until(self, deadline: Instant) -> bool {
        let mut pause = Duration::from_micros(20);
        while !self.handle.is_finished() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        }
        self.handle.join().is_ok()
    }
}

/// Starts a thread: named, on the given CPUs (none = inherited), with all signals blocked, marked
/// as kvferry's.
///
/// # Errors
/// `KVF_ERR_SYSTEM`: the system refused the thread.
pub fn spawn(
    name: String,
    affinity: &[u32],
    body: impl FnOnce() + Send + 'static,
) -> Result<Thread> {
    let cpus = affinity.to_vec();
    let blocked = BlockedSignals::all();
    let handle = std::thread::Builder::new()
        .name(name.clone())
        .spawn(move || {
            crate::observe::marks::mark_own_thread();
            bind(&cpus);
            body();
        })
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, format!("thread {name}"), &e))?;
    drop(blocked);
    Ok(Thread { handle })
}

/// Checks CPUs before any thread is started.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT`: the process may not run there.
pub fn check_affinity(affinity: &[u32]) -> Result<()> {
    if affinity.is_empty() {
        return Ok(());
    }
    // SAFETY: an all-zero cpu_set_t is a valid, empty one.
    let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is writable and its size is given.
    let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&allowed), &raw mut allowed) };
    if rc != 0 {
        let err = io::Error::last_os_error();
        return Err(Error::os(Status::KVF_ERR_SYSTEM, "sched_getaffinity", &err));
    }
    for &cpu in affinity {
        // SAFETY: CPU_ISSET only reads the set; the index is checked first.
        let usable = (cpu as usize) < libc::CPU_SETSIZE as usize
            && unsafe { libc::CPU_ISSET(cpu as usize, &allowed) };
        if !usable {
            crate::bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "affinity: cpu {cpu} does not exist or is not allowed for this process"
            );
        }
    }
    Ok(())
}

fn bind(cpus: &[u32]) {
    if cpus.is_empty() {
        return;
    }
    // SAFETY: an all-zero cpu_set_t is valid, indices were checked, the size is given.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for &cpu in cpus {
            libc::CPU_SET(cpu as usize, &mut set);
        }
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set);
    }
}

/// All signals are blocked for the calling thread, and so inherited by threads it starts, until
/// this is dropped.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn all() -> Self {
        // SAFETY: both sets are written before they are read.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: `before` came from pthread_sigmask.
        unsafe {
            libc::pthread_sigmask(
                libc::SIG_SETMASK,
                &raw const self.before,
                std::ptr::null_mut(),
            )
        };
    }
}
