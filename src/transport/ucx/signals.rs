//! Keeps the engine's signal handlers as they are.
//!
//! UCX puts its own handlers for fatal signals in place while it is loaded (seen with 1.13 and
//! 1.22), which would take the engine's crash reports from it.

/// The handlers as they were; those that have changed are put back when this is dropped. A handler
/// that another thread installs meanwhile is lost, so this is held only around UCX's own set-up.
pub struct KeptHandlers(Vec<(libc::c_int, libc::sigaction)>);

impl KeptHandlers {
    /// Notes every handler of the process.
    pub fn save() -> Self {
        let signals = 1..=libc::SIGRTMAX();
        Self(signals.filter_map(|s| Some((s, current(s)?))).collect())
    }
}

impl Drop for KeptHandlers {
    fn drop(&mut self) {
        for (signal, before) in &self.0 {
            let same = |now: libc::sigaction| {
                now.sa_sigaction == before.sa_sigaction && now.sa_flags == before.sa_flags
            };
            if !current(*signal).is_some_and(same) {
                // SAFETY: `before` came from the kernel for this very signal.
                unsafe { libc::sigaction(*signal, &raw const *before, std::ptr::null_mut()) };
            }
        }
    }
}

/// `None`: not a signal that can have a handler (some are the C library's own).
fn current(signal: libc::c_int) -> Option<libc::sigaction> {
    // SAFETY: an all-zero sigaction is valid; the kernel fills it in and nothing is changed.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        (libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0).then_some(action)
    }
}
