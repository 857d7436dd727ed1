use super::driver::Driver;
use crate::error::Status;

#[test]
fn a_library_that_is_not_there_is_a_status() {
    let err = Driver::load(Some("/nonexistent/libcuda.so.1")).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_UNSUPPORTED);
    assert!(err.text.starts_with("no CUDA driver: "), "{err}");
    assert!(err.text.contains("/nonexistent/libcuda.so.1"), "{err}");
}

#[test]
fn a_library_that_is_no_driver_is_too_old() {
    let err = Driver::load(Some("libc.so.6")).unwrap_err();
    assert_eq!(err.status, Status::KVF_ERR_UNSUPPORTED);
    assert!(err.text.contains("too old: it has no cuInit"), "{err}");
}
