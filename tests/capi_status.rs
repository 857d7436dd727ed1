//! Versions, names and last-error texts through the C functions, called from Rust.

#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, c_char};

use kvferry::ffi::*;

fn text(c: *const c_char) -> &'static str {
    // SAFETY: both functions used here return static strings with their NUL.
    unsafe { CStr::from_ptr(c) }.to_str().unwrap()
}

#[test]
fn versions_are_the_manifests() {
    assert_eq!(text(kvf_version_string()), env!("CARGO_PKG_VERSION"));
    assert_eq!(kvf_version() >> 24, 0);
    assert_eq!(kvf_abi_version(), KVF_ABI_VERSION);
}

#[test]
fn every_status_has_its_name_and_unknown_ones_have_one_too() {
    for status in kvf_status::ALL {
        assert_eq!(text(kvf_status_name(status as i32)), format!("{status:?}"));
    }
    assert_eq!(text(kvf_status_name(i32::MAX)), "KVF_STATUS_UNKNOWN");
}

#[test]
fn a_thread_without_a_failure_has_an_empty_text() {
    let read = || {
        let mut buf = [b'x' as c_char; 4];
        // SAFETY: the buffer and its size belong together.
        let len = unsafe { kvf_last_error(buf.as_mut_ptr(), buf.len()) };
        (len, buf[0])
    };
    assert_eq!(std::thread::spawn(read).join().unwrap(), (0, 0));
}

#[cfg(feature = "testing")]
#[test]
fn lesson46_a_panic_is_a_status_and_a_text_of_this_thread() {
    assert_eq!(kvf_testing_panic(), kvf_status::KVF_ERR_INTERNAL);
    let mut buf = [0 as c_char; 512];
    // SAFETY: the buffer and its size belong together; the result has its NUL.
    let text = unsafe {
        kvf_last_error(buf.as_mut_ptr(), buf.len());
        CStr::from_ptr(buf.as_ptr()).to_str().unwrap()
    };
    assert!(
        text.contains("panic: asked to at src/ffi/testing.rs"),
        "{text}"
    );
}
