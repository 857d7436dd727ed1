//! Names of statuses and the calling thread's last-error text.

use std::ffi::{CStr, c_char};

use super::boundary::{guard_or, with_last_error};
use super::structs::put_text;
use crate::error::kvf_status;

/// The name of a status as it stands in the header, for logs; never NULL.
///
/// Takes an integer, so that a number of a newer library is allowed: it gives
/// `"KVF_STATUS_UNKNOWN"`. May be called from anywhere, callbacks and forked children included.
///
/// @param status  A value returned by any kvferry function.
/// @return        NUL-terminated, valid for the life of the process.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_status_name(status: i32) -> *const c_char {
    kvf_status::from_code(status)
        .map_or(c"KVF_STATUS_UNKNOWN", name)
        .as_ptr()
}

/// Copies the text of the calling thread's last failed call into @p buf, cut to @p cap bytes
/// including the NUL.
///
/// A successful call does not change the text. May be called from anywhere, callbacks and forked
/// children included.
///
/// @param[out] buf  Receives the NUL-terminated UTF-8 text; may be NULL when @p cap is 0.
/// @param      cap  Size of @p buf in bytes.
/// @return          Length of the full text in bytes without the NUL, as snprintf(); 0 when no
///                  call of this thread has failed.
///
/// # Safety
/// @p buf must point to @p cap writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_last_error(buf: *mut c_char, cap: usize) -> usize {
    guard_or(0, || {
        // SAFETY: the caller's contract is put_text's.
        with_last_error(0, |text| unsafe { put_text(buf, cap, text) })
    })
}

/// Exhaustive on purpose: a new status does not compile without its name.
fn name(status: kvf_status) -> &'static CStr {
    use kvf_status::*;
    match status {
        KVF_OK => c"KVF_OK",
        KVF_IN_PROGRESS => c"KVF_IN_PROGRESS",
        KVF_INTERRUPTED => c"KVF_INTERRUPTED",
        KVF_TIMED_OUT => c"KVF_TIMED_OUT",
        KVF_ERR_INVALID_ARGUMENT => c"KVF_ERR_INVALID_ARGUMENT",
        KVF_ERR_ABI_MISMATCH => c"KVF_ERR_ABI_MISMATCH",
        KVF_ERR_UNSUPPORTED => c"KVF_ERR_UNSUPPORTED",
        KVF_ERR_OUT_OF_RANGE => c"KVF_ERR_OUT_OF_RANGE",
        KVF_ERR_SLOT_BUSY => c"KVF_ERR_SLOT_BUSY",
        KVF_ERR_DUPLICATE => c"KVF_ERR_DUPLICATE",
        KVF_ERR_NOT_FOUND => c"KVF_ERR_NOT_FOUND",
        KVF_ERR_NO_MEMORY => c"KVF_ERR_NO_MEMORY",
        KVF_ERR_LIMIT => c"KVF_ERR_LIMIT",
        KVF_ERR_REENTRANT => c"KVF_ERR_REENTRANT",
        KVF_ERR_FORKED => c"KVF_ERR_FORKED",
        KVF_ERR_BUSY => c"KVF_ERR_BUSY",
        KVF_ERR_STATE => c"KVF_ERR_STATE",
        KVF_ERR_INCOMPATIBLE => c"KVF_ERR_INCOMPATIBLE",
        KVF_ERR_CANCELLED => c"KVF_ERR_CANCELLED",
        KVF_ERR_CANCELLED_BY_PEER => c"KVF_ERR_CANCELLED_BY_PEER",
        KVF_ERR_EXPIRED => c"KVF_ERR_EXPIRED",
        KVF_ERR_DECLINED => c"KVF_ERR_DECLINED",
        KVF_ERR_DEADLINE => c"KVF_ERR_DEADLINE",
        KVF_ERR_TRANSFER => c"KVF_ERR_TRANSFER",
        KVF_ERR_PREFIX_MISMATCH => c"KVF_ERR_PREFIX_MISMATCH",
        KVF_ERR_PEER_LOST => c"KVF_ERR_PEER_LOST",
        KVF_ERR_PEER_UNREACHABLE => c"KVF_ERR_PEER_UNREACHABLE",
        KVF_ERR_PROTOCOL => c"KVF_ERR_PROTOCOL",
        KVF_ERR_AUTH => c"KVF_ERR_AUTH",
        KVF_ERR_SHUTDOWN => c"KVF_ERR_SHUTDOWN",
        KVF_ERR_GROUP_LOST => c"KVF_ERR_GROUP_LOST",
        KVF_ERR_SYSTEM => c"KVF_ERR_SYSTEM",
        KVF_ERR_INTERNAL => c"KVF_ERR_INTERNAL",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::ffi::boundary::guard;

    #[test]
    fn every_status_has_the_name_of_its_variant() {
        for status in kvf_status::ALL {
            assert_eq!(name(status).to_str(), Ok(format!("{status:?}").as_str()));
        }
        for unknown in [4, -27, 12345, i32::MIN] {
            // SAFETY: a static string with its NUL.
            let text = unsafe { CStr::from_ptr(kvf_status_name(unknown)) };
            assert_eq!(text, c"KVF_STATUS_UNKNOWN", "{unknown}");
        }
    }

    #[test]
    fn last_error_is_cut_to_the_buffer_and_returns_its_full_length() {
        let _ = guard::<()>(|| Err(Error::new(kvf_status::KVF_ERR_BUSY, "abcdef")));
        let mut buf = [b'#' as c_char; 8];
        // SAFETY: `cap` is at most the buffer's size; NULL goes with 0.
        unsafe {
            assert_eq!(kvf_last_error(std::ptr::null_mut(), 0), 6);
            assert_eq!(kvf_last_error(buf.as_mut_ptr(), 0), 6);
            assert_eq!(buf[0], b'#' as c_char, "cap 0 writes nothing");
            assert_eq!(kvf_last_error(buf.as_mut_ptr(), 4), 6);
            assert_eq!(CStr::from_ptr(buf.as_ptr()), c"abc");
            assert_eq!(buf[4], b'#' as c_char, "nothing behind cap");
            assert_eq!(kvf_last_error(buf.as_mut_ptr(), 8), 6);
            assert_eq!(CStr::from_ptr(buf.as_ptr()), c"abcdef");
        }
    }
}
