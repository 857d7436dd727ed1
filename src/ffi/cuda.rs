//! CUDA: the default streams' numbers, and whether there is a driver.

use std::ffi::c_char;

use super::boundary::guard;
use super::checks::give_text;
use crate::agent::cuda_info;
use crate::error::kvf_status;

/// The legacy default stream where a stream is asked for, as `(void *)KVF_STREAM_LEGACY`: the
/// number of CU_STREAM_LEGACY. NULL is no stream.
pub const KVF_STREAM_LEGACY: usize = 1;
/// The calling thread's default stream: the number of CU_STREAM_PER_THREAD.
pub const KVF_STREAM_PER_THREAD: usize = 2;

/// Tells whether there is a CUDA driver, in one line: version, library, devices; or why there is
/// none. The driver is loaded by the first call that needs it, from the path in the environment
/// variable KVFERRY_CUDA_LIBRARY when it is set; the library works without one.
///
/// @param[out] buf     Receives the NUL-terminated UTF-8 text, cut to @p cap bytes; may be NULL when
///                     @p cap is 0.
/// @param      cap     Size of @p buf in bytes.
/// @param[out] needed  Receives the size of the whole text with its NUL; may be NULL.
/// @return KVF_OK; KVF_ERR_UNSUPPORTED when there is none: kvf_last_error() says why, @p buf stays
///         untouched.
///
/// # Safety
/// @p buf must point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_cuda_info(
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        let text = cuda_info()?;
        // SAFETY: the caller's contract.
        unsafe { give_text(buf, cap, needed, &text) }
    })
}
