//! Functions that only a test build has (feature `testing`).

#[cfg(feature = "testing")]
use super::boundary::guard;
#[cfg(feature = "testing")]
use crate::error::kvf_status;

/// Panics inside the boundary, to show that a panic becomes KVF_ERR_INTERNAL.
#[cfg(feature = "testing")]
#[must_use]
#[unsafe(no_mangle)]
pub extern "C" fn kvf_testing_panic() -> kvf_status {
    #[allow(clippy::panic)] // what it is for
    guard::<()>(|| panic!("asked to"))
}
