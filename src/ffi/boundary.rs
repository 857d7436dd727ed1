//! The boundary: no panic leaves it, no call passes it in a forked child or from inside a
//! callback, and every error becomes a status plus the calling thread's last-error text.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Error, Result, Status};
use crate::observe::marks;

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// What a guarded body may end with: nothing more to say (`KVF_OK`) or a state such as
/// `KVF_IN_PROGRESS`.
pub(crate) trait Outcome {
    fn status(self) -> Status;
}

impl Outcome for () {
    fn status(self) -> Status {
        Status::KVF_OK
    }
}

impl Outcome for Status {
    fn status(self) -> Status {
        self
    }
}

/// Runs the body of a C function that returns a status. Never unwinds.
///
/// Refuses calls in a forked child and from kvferry's own threads before the body runs.
pub(crate) fn guard<T: Outcome>(body: impl FnOnce() -> Result<T>) -> Status {
    settle(|| {
        enter()?;
        body()
    })
}

/// Runs the body of a `_destroy` function, which gets `true` in a forked child: there it may only
/// free memory (no thread to join, no peer to tell, no fd that the parent shares to write to).
///
/// From inside a callback nothing is destroyed: the thread would have to wait for itself.
pub(crate) fn guard_destroy(body: impl FnOnce(bool) -> Result<()>) -> Status {
    settle(|| {
        let forked = marks::forked();
        if !forked {
            enter()?;
        }
        body(forked)
    })
}

/// Runs a body that only reads and cannot fail, from any thread and in any process; `fallback` is
/// what a panic gives.
pub(crate) fn guard_or<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(|| marks::quietly(body))).unwrap_or(fallback)
}

/// Whether the C interface may be used here at all.
///
/// # Errors
/// `KVF_ERR_FORKED`, `KVF_ERR_REENTRANT`.
pub(crate) fn enter() -> Result<()> {
    if marks::forked() {
        crate::bail!(
            KVF_ERR_FORKED,
            "called in process {}, a forked child; kvferry works only in the process that created \
             its agents: use posix_spawn, or fork before the first agent",
            std::process::id()
        );
    }
    if marks::own_thread() {
        crate::bail!(
            KVF_ERR_REENTRANT,
            "called from inside a kvferry callback; return from it first and call from a thread of \
             your own"
        );
    }
    Ok(())
}

fn settle<T: Outcome>(body: impl FnOnce() -> Result<T>) -> Status {
    // AssertUnwindSafe: after a panic the object is poisoned by contract (docs/abi.md).
    match catch_unwind(AssertUnwindSafe(|| marks::quietly(body))) {
        Ok(Ok(outcome)) => outcome.status(),
        Ok(Err(Error { status, text })) => {
            set_last_error(text);
            status
        }
        Err(_payload) => {
            set_last_error(format!(
                "a bug in kvferry, please report it: panic: {}; destroy the object of this call",
                marks::take_panic()
            ));
            Status::KVF_ERR_INTERNAL
        }
    }
}

/// Sets the calling thread's last-error text.
pub(crate) fn set_last_error(text: String) {
    // try_with: a call from a thread that is tearing its locals down still gets its status.
    let _ = LAST_ERROR.try_with(|slot| slot.replace(text));
}

/// Gives the calling thread's last-error text to `read`.
pub(crate) fn with_last_error<T>(fallback: T, read: impl FnOnce(&str) -> T) -> T {
    LAST_ERROR
        .try_with(|slot| read(&slot.borrow()))
        .unwrap_or(fallback)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::kvf_status::*;

    fn last_error() -> String {
        with_last_error(String::new(), str::to_owned)
    }

    #[test]
    fn ok_and_states_pass_and_keep_the_text() {
        set_last_error("before".to_owned());
        assert_eq!(guard(|| Ok(())), KVF_OK);
        assert_eq!(guard(|| Ok(KVF_IN_PROGRESS)), KVF_IN_PROGRESS);
        assert_eq!(last_error(), "before");
    }

    #[test]
    fn an_error_becomes_its_status_and_text() {
        let status = guard::<()>(|| crate::bail!(KVF_ERR_SLOT_BUSY, "slot {} is busy", 3));
        assert_eq!(status, KVF_ERR_SLOT_BUSY);
        assert_eq!(last_error(), "slot 3 is busy");
    }

    #[test]
    fn a_panic_becomes_internal_with_its_text_and_place() {
        assert_eq!(guard::<()>(|| panic!("asked to")), KVF_ERR_INTERNAL);
        let text = last_error();
        assert!(
            text.contains("panic: asked to at src/ffi/boundary.rs:"),
            "{text}"
        );
        assert_eq!(guard_or(5, || panic!("asked to")), 5);
    }

    #[test]
    fn the_text_belongs_to_one_thread() {
        set_last_error("mine".to_owned());
        std::thread::spawn(|| assert_eq!(last_error(), ""))
            .join()
            .unwrap();
        assert_eq!(last_error(), "mine");
    }

    #[test]
    fn calls_from_a_callback_are_refused_before_the_body_runs() {
        let ran = std::cell::Cell::new(0);
        let body = || {
            ran.set(ran.get() + 1);
            Ok(())
        };
        let in_callback = marks::InCallback::enter();
        assert_eq!(guard(body), KVF_ERR_REENTRANT);
        assert_eq!(guard_destroy(|_| body()), KVF_ERR_REENTRANT);
        assert!(last_error().contains("callback"), "{}", last_error());
        drop(in_callback);
        assert_eq!(guard(body), KVF_OK);
        assert_eq!(ran.get(), 1);
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn a_forked_child_is_refused_and_may_only_free() {
        marks::watch_forks().unwrap();
        marks::watch_forks().unwrap();
        // SAFETY: the child only calls guard(), which allocates its text; glibc keeps malloc
        // usable in a forked child. It leaves by _exit.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let ran = std::cell::Cell::new(false);
            let told = std::cell::Cell::new(false);
            let refused = guard(|| {
                ran.set(true);
                Ok(())
            });
            let freed = guard_destroy(|forked| {
                told.set(forked);
                Ok(())
            });
            let good = refused == KVF_ERR_FORKED && !ran.get() && freed == KVF_OK && told.get();
            // SAFETY: _exit is always allowed.
            unsafe { libc::_exit(if good { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: `child` is our child and `status` is writable.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "the child's checks");
        assert_eq!(guard(|| Ok(())), KVF_OK, "the parent goes on");
    }
}
