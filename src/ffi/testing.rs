//! Functions that only a test build has (feature `testing`).

#[cfg(feature = "testing")]
use std::ffi::c_char;

#[cfg(feature = "testing")]
use super::boundary::guard;
#[cfg(feature = "testing")]
use super::structs::read_text;
#[cfg(feature = "testing")]
use crate::error::kvf_status;
#[cfg(feature = "testing")]
use crate::observe::fault;

/// Panics inside the boundary, to show that a panic becomes KVF_ERR_INTERNAL.
#[cfg(feature = "testing")]
#[must_use]
#[unsafe(no_mangle)]
pub extern "C" fn kvf_testing_panic() -> kvf_status {
    #[allow(clippy::panic)] // what it is for
    guard::<()>(|| panic!("asked to"))
}

/// Arms a fault of this process: "NAME:kill" and "NAME:stop" send SIGKILL or SIGSTOP once when the
/// named point is reached, "NAME:on" turns a named deviation on, "" disarms. The environment
/// variable `KVF_FAULT` does the same from the start.
///
/// @param[in] fault  NUL-terminated.
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT for anything else.
///
/// # Safety
/// @p fault must be NULL or NUL-terminated.
#[cfg(feature = "testing")]
#[must_use]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_testing_fault(fault: *const c_char) -> kvf_status {
    guard(|| {
        // SAFETY: by this function's contract.
        let text = unsafe { read_text(fault, "fault")? };
        fault::arm(text.as_deref().unwrap_or_default())
    })
}
