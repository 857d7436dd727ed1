//! Versions of the library that was loaded, as opposed to the header that was compiled against.

use std::ffi::c_char;

/// Version of this interface's binary form, for the `abi_version` of every struct the caller
/// fills. The `_INIT` macros set it. It grows only when the meaning of a struct changes; appended
/// fields are told by `struct_size`.
pub const KVF_ABI_VERSION: u32 = 1;

/// Version of the loaded library: `major << 24 | minor << 16 | patch`, to compare with
/// `KVF_VERSION`.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_version() -> u32 {
    /// cbindgen:ignore
    const VERSION: u32 = decimal(env!("CARGO_PKG_VERSION_MAJOR")) << 24
        | decimal(env!("CARGO_PKG_VERSION_MINOR")) << 16
        | decimal(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}

/// Version of the loaded library as text, for logs.
///
/// @return NUL-terminated, valid for the life of the process.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_version_string() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// KVF_ABI_VERSION of the loaded library.
#[unsafe(no_mangle)]
pub extern "C" fn kvf_abi_version() -> u32 {
    KVF_ABI_VERSION
}

/// A decimal number at compile time; Cargo has already checked the digits.
const fn decimal(digits: &str) -> u32 {
    let bytes = digits.as_bytes();
    let (mut i, mut n) = (0, 0);
    while i < bytes.len() {
        n = n * 10 + (bytes[i] - b'0') as u32;
        i += 1;
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_and_text_agree() {
        let v = kvf_version();
        let text = format!("{}.{}.{}", v >> 24, v >> 16 & 255, v & 0xffff);
        assert_eq!(text, env!("CARGO_PKG_VERSION"));
        // SAFETY: a static string with its NUL.
        let c = unsafe { std::ffi::CStr::from_ptr(kvf_version_string()) };
        assert_eq!(c.to_str(), Ok(env!("CARGO_PKG_VERSION")));
        assert_eq!(decimal("1234"), 1234);
    }
}
