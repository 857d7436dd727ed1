//! Reading what C callers fill and writing what they receive: structs that grow, arrays of them,
//! buffers, strings, handles.
//!
//! Invariant: caller memory is copied out once and never borrowed as a Rust value, so a caller
//! that changes a struct during a call gets a wrong answer and not undefined behaviour.

use std::ffi::{CStr, c_char};
use std::fmt;
use std::mem::MaybeUninit;

use super::version::KVF_ABI_VERSION;
use crate::error::Result;

/// No struct or array element comes near this; a larger size is uninitialised memory.
const MAX_STRUCT: usize = 64 * 1024;

/// Most elements of one array that a caller may pass: far above any block table.
const MAX_ELEMENTS: usize = 1 << 28;

/// Longest string that a caller may pass, with its NUL.
const MAX_TEXT: usize = 64 * 1024;

/// Bytes of the two fields that every version of every struct has.
const HEAD: usize = size_of::<usize>() + size_of::<u32>();

/// A C struct without padding, for which all-zero is a value and every bit pattern too.
/// Implemented by `abi_struct!`.
///
/// # Safety
/// `#[repr(C)]`, no padding, and only integers, floats, pointers, `Option` of C functions, and
/// arrays or structs of these. (A `bool` or an enum is not: C can put anything there. A result
/// struct may hold a `kvf_status`, since it is never read from the caller.)
pub(crate) unsafe trait AbiStruct: Copy {
    /// The C name.
    const NAME: &'static str;
    /// Where each field ends: the sizes that an older header's struct can have.
    const ENDS: &'static [usize];
}

/// An [`AbiStruct`] that starts with `size_t struct_size; uint32_t abi_version;`. Implemented by
/// `abi_struct!`.
///
/// # Safety
/// As the first sentence says.
pub(crate) unsafe trait HeadedStruct: AbiStruct {}

/// Declares a C struct's growth rules and proves at compile time that it has no padding and, if
/// `head`ed, where its head is. Every field must be listed.
///
/// `abi_struct!(head kvf_agent_config { struct_size, abi_version, workers, name });` for structs
/// with a head, `abi_struct!(elem kvf_layer { ... });` for elements of arrays that carry
/// `elem_size`.
macro_rules! abi_struct {
    (head $name:ident { $($field:ident),+ $(,)? }) => {
        $crate::ffi::structs::abi_struct!(elem $name { $($field),+ });
        // SAFETY: the offsets are asserted here; `abi_version` is a u32 by its use in `size_of`.
        unsafe impl $crate::ffi::structs::HeadedStruct for $name {}
        const _: () = {
            assert!(std::mem::offset_of!($name, struct_size) == 0);
            assert!(std::mem::offset_of!($name, abi_version) == size_of::<usize>());
            const fn head(s: &$name) -> (usize, u32) { (s.struct_size, s.abi_version) }
            let _ = head;
        };
    };
    (elem $name:ident { $($field:ident),+ $(,)? }) => {
        // SAFETY: no padding is asserted here; field types are the declarer's duty (see the trait).
        unsafe impl $crate::ffi::structs::AbiStruct for $name {
            const NAME: &'static str = stringify!($name);
            const ENDS: &'static [usize] = {
                const fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize { size_of::<F>() }
                &[$(std::mem::offset_of!($name, $field) + size_of_field(|s: &$name| &s.$field)),+]
            };
        }
        const _: () = {
            const fn size_of_field<T, F>(_: fn(&T) -> &F) -> usize { size_of::<F>() }
            let mut sum = 0;
            $(sum += size_of_field(|s: &$name| &s.$field);)+
            assert!(sum == size_of::<$name>(), "implicit padding: add a reserved field");
            // Exhaustive: a forgotten field does not compile.
            const fn _all(s: $name) { let $name { $($field: _),+ } = s; }
        };
    };
}
pub(crate) use abi_struct;

/// Reads a struct that the caller filled: a smaller one (older header) is extended with zeros, of
/// a larger one (newer header) everything this library does not know must be zero.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for NULL; `KVF_ERR_ABI_MISMATCH` for a size that cannot be one (see
/// `check_size`), an unknown ABI version, or an unknown field that is set.
///
/// # Safety
/// `src` must be NULL or point to `struct_size` readable bytes. Its alignment does not matter.
pub(crate) unsafe fn read<T: HeadedStruct>(src: *const T, what: &str) -> Result<T> {
    // SAFETY: the caller's contract.
    let size = unsafe { check_head(src, what)? };
    // SAFETY: `size` bytes are readable by contract.
    unsafe { read_prefix(src.cast(), size, T::NAME, what) }
}

/// [`read`], or `None` when the pointer is NULL (all defaults).
///
/// # Errors
/// As [`read`], without NULL.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn read_optional<T: HeadedStruct>(
    src: *const T,
    what: &str,
) -> Result<Option<T>> {
    if src.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    unsafe { read(src, what) }.map(Some)
}

/// Reads an array of growing structs. No elements: `base` and `elem_size` are not looked at.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for NULL; `KVF_ERR_ABI_MISMATCH` as [`read`], naming the element;
/// `KVF_ERR_OUT_OF_RANGE` for an impossible count.
///
/// # Safety
/// `base` must be NULL or point to `count * elem_size` readable bytes. Its alignment does not
/// matter.
pub(crate) unsafe fn read_array<T: AbiStruct>(
    base: *const T,
    count: usize,
    elem_size: usize,
    what: &str,
) -> Result<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    check_array::<T>(base.is_null(), count, elem_size, what)?;
    (0..count)
        .map(|i| {
            // SAFETY: element `i` of `count` lies inside the caller's `count * elem_size` bytes.
            unsafe {
                let at = base.cast::<u8>().add(i * elem_size);
                read_prefix(at, elem_size, T::NAME, &format!("{what}[{i}]"))
            }
        })
        .collect()
}

/// Copies a plain array of integers (slots, layers, bytes) out of caller memory.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for NULL with a count; `KVF_ERR_OUT_OF_RANGE` for an impossible
/// count.
///
/// # Safety
/// `base` must be NULL or point to `count` readable, aligned elements; every bit pattern must be
/// a value of `T`.
pub(crate) unsafe fn read_plain<T: Copy>(
    base: *const T,
    count: usize,
    what: &str,
) -> Result<Vec<T>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if base.is_null() {
        crate::bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is NULL with a count of {count}"
        );
    }
    if count > MAX_ELEMENTS {
        crate::bail!(
            KVF_ERR_OUT_OF_RANGE,
            "{what} has {count} elements, at most {MAX_ELEMENTS} are possible"
        );
    }
    let mut copy = Vec::with_capacity(count);
    // SAFETY: `count` elements are readable by contract and fit the capacity.
    unsafe {
        std::ptr::copy_nonoverlapping(base, copy.as_mut_ptr(), count);
        copy.set_len(count);
    }
    Ok(copy)
}

/// Copies a NUL-terminated string; `None` for NULL.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` when it is not UTF-8 or too long.
///
/// # Safety
/// `text` must be NULL or NUL-terminated.
pub(crate) unsafe fn read_text(text: *const c_char, what: &str) -> Result<Option<String>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: NUL-terminated by contract.
    let text = unsafe { CStr::from_ptr(text) };
    if text.count_bytes() >= MAX_TEXT {
        crate::bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} has {} bytes, at most {} are allowed",
            text.count_bytes(),
            MAX_TEXT - 1
        );
    }
    match text.to_str() {
        Ok(text) => Ok(Some(text.to_owned())),
        Err(why) => crate::bail!(KVF_ERR_INVALID_ARGUMENT, "{what} is not UTF-8: {why}"),
    }
}

/// A live object behind a handle.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` for NULL.
///
/// # Safety
/// `handle` must be NULL or live for `'a`.
pub(crate) unsafe fn view<'a, T>(handle: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller's contract.
    match unsafe { handle.as_ref() } {
        Some(object) => Ok(object),
        None => crate::bail!(KVF_ERR_INVALID_ARGUMENT, "{what} is NULL"),
    }
}

/// A checked out-parameter, to be [`set`](Out::set) after everything that can fail.
pub(crate) struct Out<T>(*mut T);

impl<T> std::fmt::Debug for Out<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<T> Out<T> {
    /// Checks the pointer and touches nothing.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for NULL.
    ///
    /// # Safety
    /// `out` must be NULL or writable until the value is gone.
    pub(crate) unsafe fn new(out: *mut T, what: &str) -> Result<Self> {
        if out.is_null() {
            crate::bail!(KVF_ERR_INVALID_ARGUMENT, "{what} is NULL");
        }
        Ok(Self(out))
    }

    /// Writes the result.
    pub(crate) fn set(self, value: T) {
        // SAFETY: writable by the contract of `new`; what was there is not dropped.
        unsafe { self.0.write(value) }
    }
}

impl<T> Out<*mut T> {
    /// Gives the caller a new handle, to be ended by its `_destroy`.
    pub(crate) fn set_handle(self, object: T) {
        self.set(Box::into_raw(Box::new(object)));
    }
}

/// Checks a result struct before the work: NULL, size and ABI version. Returns the caller's size
/// for [`write_result`].
///
/// # Errors
/// As [`read`].
///
/// # Safety
/// `dst` must be NULL or point to `struct_size` readable bytes.
pub(crate) unsafe fn check_head<T: HeadedStruct>(dst: *const T, what: &str) -> Result<usize> {
    let name = T::NAME;
    if dst.is_null() {
        crate::bail!(KVF_ERR_INVALID_ARGUMENT, "{what} is NULL");
    }
    let init = name.to_uppercase() + "_INIT";
    // SAFETY: `struct_size` is the first field of every version of every struct.
    let size = unsafe { dst.cast::<usize>().read_unaligned() };
    if !(HEAD..=MAX_STRUCT).contains(&size) {
        crate::bail!(
            KVF_ERR_ABI_MISMATCH,
            "{what}.struct_size is {size}, a {name} has {} bytes; start from {init}",
            size_of::<T>()
        );
    }
    // SAFETY: at least HEAD bytes, checked above, and `abi_version` follows `struct_size`.
    let abi = unsafe {
        dst.cast::<u8>()
            .add(size_of::<usize>())
            .cast::<u32>()
            .read_unaligned()
    };
    if abi != KVF_ABI_VERSION {
        crate::bail!(
            KVF_ERR_ABI_MISMATCH,
            "{what}.abi_version is {abi}, this library serves {KVF_ABI_VERSION}; start from {init} \
             of a fitting kvferry.h"
        );
    }
    check_size::<T>(size, format_args!("{what}.struct_size"))?;
    Ok(size)
}

/// Refuses a size that no header's struct can have: one that ends inside a field, of which half
/// would be read or written, or one beyond the known fields that is no multiple of the alignment.
fn check_size<T: AbiStruct>(size: usize, what: fmt::Arguments<'_>) -> Result<()> {
    let (own, name) = (size_of::<T>(), T::NAME);
    if size < own && !T::ENDS.contains(&size) {
        crate::bail!(
            KVF_ERR_ABI_MISMATCH,
            "{what} is {size}, which ends inside a field of {name}; set it to sizeof({name}), which is \
             {own} in this library's kvferry.h"
        );
    }
    if size > own && !size.is_multiple_of(align_of::<T>()) {
        crate::bail!(
            KVF_ERR_ABI_MISMATCH,
            "{what} is {size}, which no {name} of any kvferry.h has; set it to sizeof({name}), which \
             is {own} in this library's"
        );
    }
    Ok(())
}

/// Writes a result struct up to the caller's size, which [`check_head`] returned; the head stays
/// the caller's and fields that this library does not know become zero.
///
/// # Safety
/// `dst` must point to `size` writable bytes.
pub(crate) unsafe fn write_result<T: HeadedStruct>(dst: *mut T, size: usize, value: &T) {
    let known = size.min(size_of::<T>());
    // SAFETY: both sides hold `known` bytes, HEAD of which every size has; `value` has no padding.
    unsafe {
        let (from, to) = ((&raw const *value).cast::<u8>(), dst.cast::<u8>());
        std::ptr::copy_nonoverlapping(from.add(HEAD), to.add(HEAD), known - HEAD);
        to.add(known).write_bytes(0, size - known);
    }
}

/// The caller's array for result elements, checked before the work.
pub(crate) struct OutArray<T> {
    base: *mut T,
    capacity: usize,
    elem_size: usize,
}

impl<T: AbiStruct> OutArray<T> {
    /// Checks pointer, capacity and element size and touches nothing. Capacity 0 allows NULL.
    ///
    /// # Errors
    /// As [`read_array`].
    ///
    /// # Safety
    /// `base` must be NULL or point to `capacity * elem_size` bytes, writable until the value is
    /// gone.
    pub(crate) unsafe fn new(
        base: *mut T,
        capacity: usize,
        elem_size: usize,
        what: &str,
    ) -> Result<Self> {
        if capacity != 0 {
            check_array::<T>(base.is_null(), capacity, elem_size, what)?;
        }
        Ok(Self {
            base,
            capacity,
            elem_size,
        })
    }

    /// Elements that fit.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Writes as many of `values` as fit, each up to the caller's element size, unknown fields as
    /// zero, and returns how many.
    pub(crate) fn fill(self, values: &[T]) -> usize {
        let count = values.len().min(self.capacity);
        let known = self.elem_size.min(size_of::<T>());
        for (i, value) in values[..count].iter().enumerate() {
            // SAFETY: element `i` lies inside the caller's `capacity * elem_size` bytes (contract
            // of `new`); `value` holds `known` bytes and has no padding.
            unsafe {
                let to = self.base.cast::<u8>().add(i * self.elem_size);
                std::ptr::copy_nonoverlapping((&raw const *value).cast::<u8>(), to, known);
                to.add(known).write_bytes(0, self.elem_size - known);
            }
        }
        count
    }
}

/// Gives the caller bytes: `cap` 0 asks for the size only (and takes nothing), otherwise all must
/// fit. `needed` receives the size in both cases, and when they do not fit; it may be NULL.
///
/// # Errors
/// `KVF_ERR_OUT_OF_RANGE` when they do not fit, `KVF_ERR_INVALID_ARGUMENT` for NULL with a size;
/// `buf` is untouched.
///
/// # Safety
/// `buf` must be NULL or point to `cap` writable bytes, `needed` must be NULL or writable.
pub(crate) unsafe fn put_bytes(
    buf: *mut u8,
    cap: usize,
    needed: *mut usize,
    bytes: &[u8],
    what: &str,
) -> Result<()> {
    if cap != 0 && buf.is_null() {
        crate::bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is NULL with a size of {cap}"
        );
    }
    if !needed.is_null() {
        // SAFETY: writable by contract.
        unsafe { needed.write(bytes.len()) };
    }
    if cap == 0 {
        return Ok(());
    }
    if bytes.len() > cap {
        crate::bail!(
            KVF_ERR_OUT_OF_RANGE,
            "{what} has {cap} bytes, {} are needed",
            bytes.len()
        );
    }
    // SAFETY: `cap` writable bytes by contract, and they suffice.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buf, bytes.len()) };
    Ok(())
}

/// Gives the caller a text as `snprintf` does: cut (between characters) to `cap` bytes with the
/// NUL; returns its full length.
///
/// # Safety
/// `buf` must be NULL or point to `cap` writable bytes.
pub(crate) unsafe fn put_text(buf: *mut c_char, cap: usize, text: &str) -> usize {
    if !buf.is_null() && cap > 0 {
        let mut n = text.len().min(cap - 1);
        while !text.is_char_boundary(n) {
            n -= 1;
        }
        // SAFETY: `cap` writable bytes by contract; n + 1 <= cap.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast::<u8>(), n);
            buf.add(n).write(0);
        }
    }
    text.len()
}

fn check_array<T: AbiStruct>(null: bool, count: usize, elem_size: usize, what: &str) -> Result<()> {
    let name = T::NAME;
    if null {
        crate::bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is NULL with a count of {count}"
        );
    }
    if !(1..=MAX_STRUCT).contains(&elem_size) {
        crate::bail!(
            KVF_ERR_ABI_MISMATCH,
            "elem_size of {what} is {elem_size}; set it to sizeof({name})"
        );
    }
    check_size::<T>(elem_size, format_args!("elem_size of {what}"))?;
    if count > MAX_ELEMENTS
        || count
            .checked_mul(elem_size)
            .is_none_or(|b| b > isize::MAX as usize)
    {
        crate::bail!(
            KVF_ERR_OUT_OF_RANGE,
            "{what} has {count} elements of {elem_size} bytes, at most {MAX_ELEMENTS} are possible"
        );
    }
    Ok(())
}

/// Copies what both sides know of a struct of `size` bytes; the rest is zero here and must be
/// zero there.
///
/// # Safety
/// `size` bytes at `src` must be readable.
unsafe fn read_prefix<T: AbiStruct>(
    src: *const u8,
    size: usize,
    name: &str,
    what: &str,
) -> Result<T> {
    let known = size.min(size_of::<T>());
    for at in known..size {
        // SAFETY: inside the `size` readable bytes.
        if unsafe { src.add(at).read() } != 0 {
            crate::bail!(
                KVF_ERR_ABI_MISMATCH,
                "{what} sets a field at byte {at}; this library's {name} has {known} bytes: clear \
                 what a newer kvferry.h added, or load that version"
            );
        }
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: both sides hold `known` bytes; every bit pattern is a `T` (AbiStruct).
    unsafe {
        std::ptr::copy_nonoverlapping(src, value.as_mut_ptr().cast::<u8>(), known);
        Ok(value.assume_init())
    }
}

#[cfg(test)]
#[path = "structs_tests.rs"]
mod tests;
