//! Plans on paper: what would move between two engines, without agents.

use std::ffi::c_char;

use super::boundary::guard;
use super::checks::read_blob;
use super::engine::kvf_bytes;
use super::structs::{put_bytes, view};
use crate::bail;
use crate::error::{Result, kvf_status};
use crate::plan::{Policy, explain};

/// Destination i of d reads source floor(i * s / d) of s replicas (default).
pub const KVF_POLICY_SPREAD: u32 = 0;
/// The smallest global rank serves everybody.
pub const KVF_POLICY_LOWEST: u32 = 1;

/// JSON (default): an object with the arrays `transfers`, `uncovered` and `errors`.
pub const KVF_EXPLAIN_JSON: u32 = 0;
/// A table for people, with one line for each thing that is wrong.
pub const KVF_EXPLAIN_TABLE: u32 = 1;

/// Says what would move between two engines, from their layout files; docs/layouts.md has the
/// schemas. Needs no agent.
///
/// What is wrong with the files or between the engines is told in the explanation, so that the
/// call itself succeeds.
///
/// @param[in]  source       Layout file of the source engine: UTF-8 JSON.
/// @param[in]  destination  Layout file of the destination engine: UTF-8 JSON.
/// @param      policy       KVF_POLICY_SPREAD or KVF_POLICY_LOWEST.
/// @param      format       KVF_EXPLAIN_JSON or KVF_EXPLAIN_TABLE.
/// @param[out] text         Receives the NUL-terminated explanation; may be NULL when @p cap is 0.
/// @param      cap          Size of @p text in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size with the NUL, also when @p text is too small; may be
///                          NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p text is too small (it stays untouched);
///         KVF_ERR_INVALID_ARGUMENT for input that is not UTF-8 and for unknown numbers.
///
/// # Safety
/// @p source and @p destination must point to descriptions of readable bytes, @p text to @p cap
/// writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_plan_explain(
    source: *const kvf_bytes,
    destination: *const kvf_bytes,
    policy: u32,
    format: u32,
    text: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (source, destination) = unsafe {
            (
                read_json(source, "source")?,
                read_json(destination, "destination")?,
            )
        };
        let policy = match policy {
            KVF_POLICY_SPREAD => Policy::Spread,
            KVF_POLICY_LOWEST => Policy::Lowest,
            unknown => bail!(KVF_ERR_INVALID_ARGUMENT, "policy {unknown} is unknown"),
        };
        let mut explanation = match format {
            KVF_EXPLAIN_JSON => explain(&source, &destination, policy).to_json()?,
            KVF_EXPLAIN_TABLE => explain(&source, &destination, policy).to_table(),
            unknown => bail!(KVF_ERR_INVALID_ARGUMENT, "format {unknown} is unknown"),
        };
        explanation.push('\0');
        // SAFETY: the caller's contract.
        unsafe { put_bytes(text.cast(), cap, needed, explanation.as_bytes(), "text") }
    })
}

/// # Safety
/// `bytes` must be NULL or point to a description of readable bytes.
unsafe fn read_json(bytes: *const kvf_bytes, what: &str) -> Result<String> {
    // SAFETY: the caller's contract.
    let bytes = unsafe {
        let kvf_bytes { data, bytes } = *view(bytes, what)?;
        read_blob(data, bytes, &format!("{what}.data"))
    }?;
    String::from_utf8(bytes)
        .map_err(|why| crate::err!(KVF_ERR_INVALID_ARGUMENT, "{what} is not UTF-8: {why}"))
}
