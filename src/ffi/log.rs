//! The caller's log callback. kvferry installs no logger: without a callback nothing is logged.

use std::ffi::{CString, c_char, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::agent::LogSink;
use crate::observe::marks::InCallback;

/// Log nothing (default).
pub const KVF_LOG_OFF: u32 = 0;
/// What failed for good.
pub const KVF_LOG_ERROR: u32 = 1;
/// What was survived: a retry, a refused peer, an expired lease.
pub const KVF_LOG_WARNING: u32 = 2;
/// What happens once: peers, chosen transports, pools.
pub const KVF_LOG_INFO: u32 = 3;
/// What happens per request.
pub const KVF_LOG_DEBUG: u32 = 4;

/// Receives one log line of an agent.
///
/// Called one line at a time, mostly on kvferry's own threads. It must return soon, must not throw
/// (declare it `noexcept` in C++), and must not call kvferry: every call in it is refused with
/// KVF_ERR_REENTRANT. It is not called any more once kvf_agent_destroy() has returned; @p arg may
/// be freed then.
///
/// @param     arg    `log_arg` of the agent's config.
/// @param     level  KVF_LOG_ERROR .. KVF_LOG_DEBUG.
/// @param[in] text   One line without newline, UTF-8; valid during the call.
pub type kvf_log_fn =
    Option<unsafe extern "C" fn(arg: *mut c_void, level: u32, text: *const c_char)>;

type Callback = unsafe extern "C" fn(*mut c_void, u32, *const c_char);

/// The callback while it may be called.
pub(crate) struct Log(Mutex<Option<(Callback, *mut c_void)>>);

// SAFETY: `arg` is only handed back to the callback, which the caller declares fit for any thread;
// the mutex admits one thread at a time.
unsafe impl Send for Log {}
// SAFETY: as for Send.
unsafe impl Sync for Log {}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

impl Log {
    pub(crate) fn new(callback: Callback, arg: *mut c_void) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some((callback, arg)))))
    }

    /// The core's end of it.
    pub(crate) fn sink(self: &Arc<Self>) -> LogSink {
        let log = Arc::clone(self);
        Box::new(move |level, text| log.line(level, text))
    }

    /// Ends the callback: it does not run any more when this returns.
    pub(crate) fn silence(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn line(&self, level: u32, text: &str) {
        let Ok(text) = CString::new(text.replace('\0', " ")) else {
            return; // unreachable: no NUL is left
        };
        let callback = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((callback, arg)) = *callback {
            let _mark = InCallback::enter();
            // SAFETY: the caller gave the two for each other; the text lives through the call.
            unsafe { callback(arg, level, text.as_ptr()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::error::Status;
    use crate::ffi::boundary::guard;

    unsafe extern "C" fn keep(arg: *mut c_void, level: u32, text: *const c_char) {
        // SAFETY: the test's vector and kvferry's text, both alive.
        let (lines, text) = unsafe { (&mut *arg.cast::<Vec<String>>(), CStr::from_ptr(text)) };
        let inside = guard(|| Ok(()));
        lines.push(format!("{level} {} {inside:?}", text.to_string_lossy()));
    }

    #[test]
    fn lines_arrive_until_silenced_and_calls_inside_are_refused() {
        let mut lines = Vec::<String>::new();
        let log = Log::new(keep, (&raw mut lines).cast());
        let sink = log.sink();
        sink(2, "a\0b");
        assert_eq!(
            guard(|| Ok(())),
            Status::KVF_OK,
            "the mark ends with the callback"
        );
        log.silence();
        sink(1, "late");
        assert_eq!(lines, ["2 a b KVF_ERR_REENTRANT"]);
    }
}
