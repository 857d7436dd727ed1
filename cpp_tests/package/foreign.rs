//! Another Rust library in the same C program, as a tokenizer is.

/// Gives 1 when this library's own panic was caught.
#[unsafe(no_mangle)]
pub extern "C" fn foreign_catches_a_panic() -> i32 {
    std::panic::set_hook(Box::new(|_| {}));
    let caught = std::panic::catch_unwind(|| panic!("foreign"));
    i32::from(caught.is_err())
}
