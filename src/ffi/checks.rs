//! Checks of arguments that many functions share. Sizes, pointers and strings are
//! [`structs`](super::structs)'.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::structs::put_text;
use crate::bail;
use crate::error::{Error, Result, Status};

/// Refuses a reserved field that is set.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT`.
pub(crate) fn must_be_zero(value: u32, what: &str) -> Result<()> {
    if value != 0 {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is {value}; a reserved field must be 0: start from the struct's _INIT"
        );
    }
    Ok(())
}

/// A field that is 0 or 1.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT`.
pub(crate) fn flag(value: u32, what: &str) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is {other}, neither 0 nor 1"
        ),
    }
}

/// Bytes that must be there.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for NULL or none, and as `read_plain`.
///
/// # Safety
/// `base` must be NULL or point to `bytes` readable bytes.
pub(crate) unsafe fn read_blob(base: *const c_void, bytes: usize, what: &str) -> Result<Vec<u8>> {
    if base.is_null() {
        bail!(KVF_ERR_INVALID_ARGUMENT, "{what} is NULL");
    }
    if bytes == 0 {
        bail!(KVF_ERR_INVALID_ARGUMENT, "{what} has 0 bytes");
    }
    // SAFETY: the caller's contract.
    unsafe { super::structs::read_plain(base.cast::<u8>(), bytes, what) }
}

/// A status that the caller names as a cause.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for a number that is no error.
pub(crate) fn read_cause(cause: i32, what: &str) -> Result<Status> {
    match Status::from_code(cause) {
        Some(status) if cause < 0 => Ok(status),
        _ => bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is {cause}, which is no error of kvf_status"
        ),
    }
}

/// `ns`, or `default` for 0.
pub(crate) fn nanos_or(ns: u64, default: Duration) -> Duration {
    if ns == 0 {
        default
    } else {
        Duration::from_nanos(ns)
    }
}

/// Copies a name into a fixed, NUL-terminated field; a longer one is cut.
pub(crate) fn name_field<const N: usize>(name: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field.iter_mut().take(N - 1).zip(name.bytes()) {
        *to = from as c_char;
    }
    field
}

/// Gives a text cut to the caller's buffer, and its whole size with the NUL.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for a NULL buffer with a size.
///
/// # Safety
/// `buf` must be NULL or point to `cap` writable bytes, `needed` be NULL or writable.
pub(crate) unsafe fn give_text(
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
    text: &str,
) -> Result<()> {
    if buf.is_null() && cap != 0 {
        bail!(KVF_ERR_INVALID_ARGUMENT, "buf is NULL with a size of {cap}");
    }
    // SAFETY: the caller's contract.
    unsafe {
        let bytes = put_text(buf, cap, text);
        if !needed.is_null() {
            needed.write(bytes + 1);
        }
    }
    Ok(())
}

/// Passes a status of the core on; an error gets its text.
///
/// # Errors
/// `status`, when it is an error.
pub(crate) fn say(status: Status, text: impl FnOnce() -> String) -> Result<Status> {
    if status as i32 >= 0 {
        return Ok(status);
    }
    Err(Error::new(status, text()))
}
