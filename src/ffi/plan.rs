//! Plans on paper: what would move between two engines, without agents.

use std::ffi::{c_char, c_void};

use super::boundary::guard;
use super::checks::read_blob;
use crate::bail;
use crate::error::kvf_status;
use crate::plan::Policy;

/// Destination i of d reads source floor(i * s / d) of s replicas (default).
pub const KVF_POLICY_SPREAD: u32 = 0;
/// The smallest global rank serves everybody.
pub const KVF_POLICY_LOWEST: u32 = 1;

/// Says what would move between two engines, as JSON: `transfers`, `uncovered` and `errors`
/// (docs/layouts.md has the schema of input and output). Needs no agent.
///
/// @param[in]  source             Layout file of the source engine, JSON.
/// @param      source_bytes       Its length.
/// @param[in]  destination        Layout file of the destination engine, JSON.
/// @param      destination_bytes  Its length.
/// @param      policy             KVF_POLICY_SPREAD or KVF_POLICY_LOWEST.
/// @param[out] json               Receives the NUL-terminated JSON; may be NULL when @p cap is 0.
/// @param      cap                Size of @p json in bytes; 0 only asks for the size.
/// @param[out] needed             Receives the size with the NUL, also when @p json is too small;
///                                may be NULL.
/// @return KVF_OK, also for engines that do not fit: `errors` says why; KVF_ERR_OUT_OF_RANGE when
///         @p json is too small (it stays untouched); KVF_ERR_INVALID_ARGUMENT for input that is
///         no layout file.
///
/// # Safety
/// @p source and @p destination must point to as many readable bytes, @p json to @p cap writable
/// bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_plan_explain(
    source: *const c_void,
    source_bytes: usize,
    destination: *const c_void,
    destination_bytes: usize,
    policy: u32,
    json: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard::<()>(|| {
        // SAFETY: the caller's contract.
        let (_source, _destination) = unsafe {
            (
                read_blob(source, source_bytes, "source")?,
                read_blob(destination, destination_bytes, "destination")?,
            )
        };
        let _policy = match policy {
            KVF_POLICY_SPREAD => Policy::Spread,
            KVF_POLICY_LOWEST => Policy::Lowest,
            unknown => bail!(KVF_ERR_INVALID_ARGUMENT, "policy {unknown} is unknown"),
        };
        let _ = (json, cap, needed);
        bail!(KVF_ERR_UNSUPPORTED, "kvf_plan_explain is not served yet")
    })
}
