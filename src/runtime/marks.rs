//! Two marks that every call from outside looks at: is this a kvferry thread, is this a forked
//! child?

use std::cell::Cell;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

thread_local! {
    static KVFERRY_THREAD: Cell<bool> = const { Cell::new(false) };
}
static FORKED: AtomicBool = AtomicBool::new(false);

/// Marks the calling thread as kvferry's for the rest of its life.
pub fn mark_kvferry_thread() {
    KVFERRY_THREAD.set(true);
}

/// Whether the calling thread is kvferry's, that is: the caller is inside a callback.
pub fn on_kvferry_thread() -> bool {
    // The thread may already be tearing its locals down; then it runs no callback of ours.
    KVFERRY_THREAD.try_with(Cell::get).unwrap_or(false)
}

/// Makes [`forked`] tell the truth from now on. Called when an agent is created, so that loading
/// the library does nothing.
pub fn watch_forks() {
    static ONCE: Once = Once::new();
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    ONCE.call_once(|| {
        // SAFETY: the handler only stores to an atomic, which is allowed in a forked child.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// Whether this process is a forked child of one that had an agent.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
