//! What became of a transceiver's requests: one record, or all of them as text.

use std::ffi::{c_char, c_void};

use super::boundary::guard;
use super::checks::{give_text, name_field};
use super::event::kvf_key;
use super::structs::{abi_struct, check_head, put_bytes, write_result};
use super::transceiver::{Core, enter, kvf_transceiver};
use crate::bail;
use crate::error::{Result, kvf_status};
use crate::transceiver::{Record, RecordFormat};

/// A JSON object a line.
pub const KVF_RECORDS_JSON_LINES: u32 = 0;
/// Comma-separated values, the names in the first line.
pub const KVF_RECORDS_CSV: u32 = 1;

/// What became of one request. Times are since its call, in ns; 0 = not yet.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvf_request_record {
    /// `sizeof(kvf_request_record)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_SIDE_*.
    pub side: u32,
    /// The request.
    pub key: kvf_key,
    /// KVF_OUTCOME_*, as far as known.
    pub outcome: u32,
    /// A kvf_status: why; KVF_IN_PROGRESS while pending.
    pub cause: i32,
    /// The rank of the domain that decided the outcome.
    pub rank: u32,
    /// Bytes that the publisher attached: see kvf_transceiver_aux().
    pub aux_bytes: u32,
    /// The request's call, in ns since the transceiver was made.
    pub queued_ns: u64,
    /// The end on this rank, attested.
    pub ended_ns: u64,
    /// Memory safe on this rank.
    pub safe_ns: u64,
    /// The outcome was decided.
    pub decided_ns: u64,
    /// Bytes moved on this rank.
    pub bytes: u64,
    /// Bytes to move on this rank.
    pub bytes_total: u64,
    /// Data path, empty if none was needed; NUL-terminated.
    pub transport: [c_char; 16],
    /// The first byte on this rank; context side: the first reader's contact.
    pub first_byte_ns: u64,
    /// The last byte on this rank, not attested yet; context side: the last reader's end.
    pub last_byte_ns: u64,
    /// `bytes` in the time between those two, in GB/s; 0 = nothing was moved, or context side.
    pub gb_per_s: f64,
}
abi_struct!(head kvf_request_record {
    struct_size, abi_version, side, key, outcome, cause, rank, aux_bytes, queued_ns, ended_ns,
    safe_ns, decided_ns, bytes, bytes_total, transport, first_byte_ns, last_byte_ns, gb_per_s,
});

/// Tells what became of a request, while it is in flight and for the last `records` ended ones.
///
/// @param         transceiver  The transceiver.
/// @param         key          The request; the generation side's if both have it.
/// @param[in,out] record       Start from KVF_REQUEST_RECORD_INIT; written up to
///                             `record->struct_size`.
/// @return KVF_OK; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p record point to `record->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_record(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    record: *mut kvf_request_record,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        // SAFETY: the caller's contract.
        let size = unsafe { check_head(record, "record") }?;
        let found = find(&core, key)?;
        let value = kvf_request_record {
            struct_size: size,
            abi_version: 0,
            side: found.side as u32,
            key: found.key.into(),
            outcome: found.outcome as u32,
            cause: found.cause as i32,
            rank: found.rank,
            aux_bytes: u32::try_from(found.aux.len()).unwrap_or(u32::MAX),
            queued_ns: found.queued_ns,
            ended_ns: found.ended_ns,
            safe_ns: found.safe_ns,
            decided_ns: found.decided_ns,
            bytes: found.bytes,
            bytes_total: found.bytes_total,
            transport: name_field(found.transport),
            first_byte_ns: found.first_byte_ns,
            last_byte_ns: found.last_byte_ns,
            gb_per_s: found.gb_per_s(),
        };
        // SAFETY: `size` writable bytes by the caller's contract.
        unsafe { write_result(record, size, &value) };
        Ok(())
    })
}

/// Gives the bytes that the publisher attached to a request (first tokens, draft tokens).
///
/// @param      transceiver  The transceiver.
/// @param      key          The request.
/// @param[out] buf          Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_aux(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let aux = find(&core, key)?.aux;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &aux, "buf") }
    })
}

/// Gives what went wrong with a request, for people; empty if nothing did.
///
/// @param      transceiver  The transceiver.
/// @param      key          The request.
/// @param[out] buf          Receives the text, cut to @p cap bytes with its NUL; may be NULL when
///                          @p cap is 0.
/// @param      cap          Size of @p buf in bytes.
/// @param[out] needed       Receives the whole size with the NUL; may be NULL.
/// @return KVF_OK; KVF_ERR_NOT_FOUND.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_error_text(
    transceiver: *const kvf_transceiver,
    key: kvf_key,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let text = find(&core, key)?.text;
        // SAFETY: the caller's contract.
        unsafe { give_text(buf, cap, needed, &text) }
    })
}

fn find(core: &Core, key: kvf_key) -> Result<Record> {
    let key = key.read("key")?;
    match core.record(key) {
        Some(record) => Ok(record),
        None => bail!(
            KVF_ERR_NOT_FOUND,
            "{key} is not in flight here and not among the last ended requests"
        ),
    }
}

/// Gives the records of the last ended requests as text: request, side, outcome, cause, times
/// (queued, first byte, last byte, attested, decided, safe), bytes, GB/s, transport. Takes nothing
/// away. Times are in ns since the request's call, `queued_ns` since the transceiver was made.
///
/// @param      transceiver  The transceiver.
/// @param      format       KVF_RECORDS_*.
/// @param[out] buf          Receives the NUL-terminated text; may be NULL when @p cap is 0.
/// @param      cap          Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed       Receives the size with the NUL, also when @p buf is too small; may be
///                          NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small.
///
/// # Safety
/// @p transceiver must be live, @p buf point to @p cap writable bytes, @p needed be NULL or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_transceiver_records_text(
    transceiver: *const kvf_transceiver,
    format: u32,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let core = unsafe { enter(transceiver) }?;
        let format = match format {
            KVF_RECORDS_JSON_LINES => RecordFormat::JsonLines,
            KVF_RECORDS_CSV => RecordFormat::Csv,
            unknown => bail!(KVF_ERR_INVALID_ARGUMENT, "format {unknown} is unknown"),
        };
        let mut text = core.records_text(format)?.into_bytes();
        text.push(0);
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &text, "buf") }
    })
}
