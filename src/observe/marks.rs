//! Facts about the calling thread and process that the C boundary and the runtime share: is this
//! one of kvferry's own threads, is this a forked child, what did the last panic say.
//!
//! They stand here and not in `runtime` because `ffi` may not use `runtime`. Nothing happens at
//! load time: the fork handler is registered by the first agent ([`watch_forks`]), the panic hook
//! by the first guarded call ([`quiet_panics`]).

use std::cell::{Cell, RefCell};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;

static FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static OWN_THREAD: Cell<bool> = const { Cell::new(false) };
    static QUIET: Cell<u32> = const { Cell::new(0) };
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Makes every later `fork()` of this process mark its child; repeated calls do nothing.
///
/// Called at agent creation, because before that there is nothing a child could break.
///
/// # Errors
/// `KVF_ERR_NO_MEMORY` when the C library cannot register the handler.
pub fn watch_forks() -> Result<()> {
    static REGISTERED: std::sync::Mutex<bool> = std::sync::Mutex::new(false);
    extern "C" fn in_child() {
        FORKED.store(true, Ordering::Relaxed);
    }
    let mut registered = REGISTERED
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    if *registered {
        return Ok(());
    }
    // SAFETY: the handler stays mapped (the library is linked with -z nodelete) and only stores
    // to an atomic, which is async-signal-safe.
    let rc = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if rc != 0 {
        let why = std::io::Error::from_raw_os_error(rc);
        crate::bail!(KVF_ERR_NO_MEMORY, "the fork handler cannot be set: {why}");
    }
    *registered = true;
    Ok(())
}

/// Whether this process is a forked child of one that had an agent.
#[inline]
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Declares the calling thread one of kvferry's own, for the rest of its life: calls of the C
/// interface from it (from inside a callback) are refused, and its panics are kept as text for
/// [`take_panic`] instead of being printed.
pub fn mark_own_thread() {
    quiet_panics();
    OWN_THREAD.with(|own| own.set(true));
}

/// Whether the calling thread is one of kvferry's own.
#[inline]
pub fn own_thread() -> bool {
    // A thread that is tearing its locals down runs no callback any more.
    OWN_THREAD.try_with(Cell::get).unwrap_or(false)
}

/// While it lives, calls of the C interface from this thread are refused as re-entrant. For a
/// callback that runs on the caller's own thread.
#[derive(Debug)]
pub struct InCallback(bool);

impl InCallback {
    /// Marks the calling thread until the value is dropped.
    #[must_use]
    pub fn enter() -> Self {
        Self(OWN_THREAD.try_with(|own| own.replace(true)).unwrap_or(true))
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        // Nothing to restore on a thread whose locals are gone.
        let _ = OWN_THREAD.try_with(|own| own.set(self.0));
    }
}

/// Runs `body`; a panic inside is kept as text for [`take_panic`] and not printed.
pub fn quietly<T>(body: impl FnOnce() -> T) -> T {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            let _ = QUIET.try_with(|quiet| quiet.set(quiet.get().saturating_sub(1)));
        }
    }
    quiet_panics();
    let _ = QUIET.try_with(|quiet| quiet.set(quiet.get() + 1));
    let _restore = Restore;
    body()
}

/// Message and place of this thread's last panic inside [`quietly`] or on an own thread; empty
/// when there was none. Taken once.
pub fn take_panic() -> String {
    LAST_PANIC.try_with(RefCell::take).unwrap_or_default()
}

/// As [`take_panic`], which may still be called.
pub fn last_panic() -> String {
    let text = LAST_PANIC.try_with(|last| last.borrow().clone());
    text.unwrap_or_default()
}

/// Keeps panics that kvferry catches off the host's stderr; every other panic goes to the hook
/// that was there before, so Rust hosts that share this std notice nothing.
fn quiet_panics() {
    static HOOK: Once = Once::new();
    if HOOK.is_completed() || std::thread::panicking() {
        return; // the standard library refuses a new hook while unwinding; the next call sets it
    }
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !own_thread() && QUIET.try_with(Cell::get).unwrap_or(0) == 0 {
                return before(info);
            }
            let payload = info.payload();
            let what = match payload.downcast_ref::<&str>() {
                Some(text) => text,
                None => payload
                    .downcast_ref::<String>()
                    .map_or("no message", String::as_str),
            };
            let text = match info.location() {
                Some(at) => format!("{what} at {}:{}", at.file(), at.line()),
                None => what.to_owned(),
            };
            let _ = LAST_PANIC.try_with(|last| last.replace(text));
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_belong_to_one_thread() {
        std::thread::spawn(|| {
            mark_own_thread();
            assert!(own_thread());
        })
        .join()
        .unwrap();
        assert!(!own_thread());
    }

    #[test]
    fn callback_mark_ends_with_the_callback_and_nests() {
        let outer = InCallback::enter();
        drop(InCallback::enter());
        assert!(own_thread(), "the inner callback's end is not the outer's");
        drop(outer);
        assert!(!own_thread());
    }

    #[test]
    fn a_quiet_panic_leaves_its_text_once() {
        let caught = std::panic::catch_unwind(|| quietly(|| panic!("slot {} is odd", 7)));
        assert!(caught.is_err());
        assert_eq!(last_panic(), last_panic());
        let text = take_panic();
        assert!(text.starts_with("slot 7 is odd at "), "{text}");
        assert!(text.contains("marks.rs:"), "{text}");
        assert_eq!(take_panic(), "");
    }
}
