//! What stands behind a handle: the core's object, whether a panic has poisoned it, and whether
//! its agent has ended.
//!
//! Invariant: every handle keeps its agent alive, so children may be used and destroyed after
//! `kvf_agent_destroy()`; they then answer `KVF_ERR_SHUTDOWN`.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::boundary::guard_destroy;
use super::log::Log;
use crate::agent::Agent;
use crate::bail;
use crate::error::{Result, Status};

/// The agent as its handle and its children share it.
pub(crate) struct Shared {
    /// The core's agent.
    pub(crate) core: Agent,
    /// The caller's log callback, to be silenced at the end.
    pub(crate) log: Option<Arc<Log>>,
    ended: AtomicBool,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.core.fmt(f)
    }
}

impl Shared {
    pub(crate) fn new(core: Agent, log: Option<Arc<Log>>) -> Self {
        Self {
            core,
            log,
            ended: AtomicBool::new(false),
        }
    }

    /// From now on every call on a child is refused.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    /// Whether `kvf_agent_destroy()` was called.
    pub(crate) fn ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }
}

/// A core object with its handle's state.
#[derive(Debug)]
pub(crate) struct Object<T> {
    core: T,
    /// `None`: the object belongs to no agent.
    agent: Option<Arc<Shared>>,
    poisoned: AtomicBool,
}

impl<T> Object<T> {
    /// An object that lives under `agent`.
    pub(crate) fn child(agent: &Arc<Shared>, core: T) -> Self {
        Self {
            core,
            agent: Some(agent.clone()),
            poisoned: AtomicBool::new(false),
        }
    }

    /// An object without a parent.
    pub(crate) fn root(core: T) -> Self {
        Self {
            core,
            agent: None,
            poisoned: AtomicBool::new(false),
        }
    }

    /// The object, for one call.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL` after a panic, `KVF_ERR_SHUTDOWN` after its agent's end.
    pub(crate) fn enter(&self, what: &str) -> Result<Use<'_, T>> {
        if self.poisoned.load(Ordering::Acquire) {
            bail!(
                KVF_ERR_INTERNAL,
                "an earlier call on this {what} hit a bug in kvferry; destroy it"
            );
        }
        if self.agent.as_ref().is_some_and(|agent| agent.ended()) {
            bail!(
                KVF_ERR_SHUTDOWN,
                "the agent of this {what} was destroyed; only its _destroy function is left"
            );
        }
        Ok(Use {
            object: self,
            panicking: std::thread::panicking(),
        })
    }
}

/// A call's hold on an object: a panic while it lives poisons the object.
#[derive(Debug)]
pub(crate) struct Use<'a, T> {
    object: &'a Object<T>,
    /// The caller was unwinding already, which is not this object's fault.
    panicking: bool,
}

impl<T> Use<'_, T> {
    /// The agent that the object lives under.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL` for an object without one.
    pub(crate) fn agent(&self) -> Result<&Arc<Shared>> {
        match &self.object.agent {
            Some(agent) => Ok(agent),
            None => bail!(KVF_ERR_INTERNAL, "an object without agent was asked for it"),
        }
    }

    /// Refuses an object of another agent.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT`.
    pub(crate) fn must_belong_to(&self, agent: &Arc<Shared>, what: &str) -> Result<()> {
        if !Arc::ptr_eq(self.agent()?, agent) {
            bail!(KVF_ERR_INVALID_ARGUMENT, "{what} belongs to another agent");
        }
        Ok(())
    }
}

/// The object of an optional handle, which must belong to the agent; `None` for NULL.
///
/// # Errors
/// As [`Object::enter`] and [`Use::must_belong_to`].
///
/// # Safety
/// `handle` must be NULL or live for `'a`.
pub(crate) unsafe fn optional<'a, H: 'a, T: 'a>(
    handle: *const H,
    object: fn(&'a H) -> &'a Object<T>,
    agent: &Arc<Shared>,
    what: &str,
) -> Result<Option<Use<'a, T>>> {
    // SAFETY: the caller's contract.
    let Some(handle) = (unsafe { handle.as_ref() }) else {
        return Ok(None);
    };
    let object = object(handle).enter(what)?;
    object.must_belong_to(agent, what)?;
    Ok(Some(object))
}

impl<T> Deref for Use<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object.core
    }
}

impl<T> Drop for Use<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.panicking {
            self.object.poisoned.store(true, Ordering::Release);
        }
    }
}

/// Ends a handle: `end` gets the core object. In a forked child the core object is left alone
/// (its threads, sockets and shared pages are the parent's) and only the handle's memory is freed.
///
/// # Safety
/// `handle` must be NULL or come from `Out::set_handle`, and nobody may use it any more.
pub(crate) unsafe fn destroy<H, T>(
    handle: *mut H,
    open: impl FnOnce(H) -> Object<T>,
    end: impl FnOnce(T, Option<&Shared>) -> Result<Status>,
) -> Status {
    let mut outcome = Status::KVF_OK;
    let status = guard_destroy(|forked| {
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: by contract a live box that nobody else uses.
        let object = open(*unsafe { Box::from_raw(handle) });
        if forked {
            std::mem::forget(object);
            return Ok(());
        }
        outcome = end(object.core, object.agent.as_deref())?;
        Ok(())
    });
    if status == Status::KVF_OK {
        outcome
    } else {
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::kvf_status::*;
    use crate::ffi::boundary::{guard, with_last_error};

    fn last_error() -> String {
        with_last_error(String::new(), str::to_owned)
    }

    #[test]
    fn a_panic_poisons_its_object_and_no_other() {
        let (first, second) = (Object::root(1), Object::root(2));
        let add =
            |object: &Object<i32>, by| guard(|| Ok(*object.enter("sample")? + by).map(|_| ()));
        let failed = guard::<()>(|| {
            let _first = first.enter("sample")?;
            bail!(KVF_ERR_BUSY, "busy")
        });
        assert_eq!(failed, KVF_ERR_BUSY);
        assert_eq!(add(&first, 1), KVF_OK, "an error poisons nothing");
        let panicked = guard::<()>(|| {
            let _first = first.enter("sample")?;
            panic!("asked to")
        });
        assert_eq!(panicked, KVF_ERR_INTERNAL);
        assert_eq!(add(&first, 1), KVF_ERR_INTERNAL);
        let text = "an earlier call on this sample hit a bug in kvferry; destroy it";
        assert_eq!(last_error(), text);
        assert_eq!(add(&second, 1), KVF_OK);
    }

    #[test]
    fn destroy_ends_once_and_leaves_the_core_alone_in_a_callback() {
        let end = |core: i32, agent: Option<&Shared>| {
            assert!(agent.is_none());
            if core == 7 {
                Ok(KVF_IN_PROGRESS)
            } else {
                bail!(KVF_ERR_BUSY, "core {core}")
            }
        };
        let make = |core| Box::into_raw(Box::new(Object::root(core)));
        // SAFETY: fresh boxes, each destroyed once; NULL is allowed.
        unsafe {
            assert_eq!(
                destroy(std::ptr::null_mut(), |o: Object<i32>| o, end),
                KVF_OK
            );
            assert_eq!(destroy(make(7), |o| o, end), KVF_IN_PROGRESS);
            assert_eq!(destroy(make(8), |o| o, end), KVF_ERR_BUSY);
            assert_eq!(last_error(), "core 8");
            let object = make(7);
            let callback = crate::observe::marks::InCallback::enter();
            assert_eq!(destroy(object, |o| o, end), KVF_ERR_REENTRANT);
            drop(callback);
            assert_eq!(
                destroy(object, |o| o, end),
                KVF_IN_PROGRESS,
                "it was still there"
            );
        }
    }
}
