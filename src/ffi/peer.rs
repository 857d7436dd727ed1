//! Peers: remote engines of 1..n ranks.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::{give_text, name_field, read_blob, say};
use super::handle::{Object, Shared, destroy};
use super::structs::{Out, abi_struct, check_head, view, write_result};
use crate::agent::Peer;
use crate::error::{Status, kvf_status};

/// A remote engine. Any thread may use it.
pub struct kvf_peer(pub(crate) Object<Peer>);

/// What kvf_peer_query() tells.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvf_peer_info {
    /// `sizeof(kvf_peer_info)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// A kvf_status: KVF_OK = can be used, KVF_IN_PROGRESS = connecting, else why not.
    pub status: i32,
    /// Object of the peer's events.
    pub id: u64,
    /// Ranks of the peer that this rank needs.
    pub ranks: u32,
    /// How many of them are connected.
    pub ranks_ready: u32,
    /// Data path of the first of them ("inproc", "shm", ...), NUL-terminated; "" = none yet.
    pub transport: [c_char; 16],
}
abi_struct!(head kvf_peer_info {
    struct_size, abi_version, status, id, ranks, ranks_ready, transport,
});

/// Adds a remote engine: checks that it fits, makes the plan, and starts to connect.
///
/// Never blocks on the network; kvf_peer_wait() or KVF_EVENT_PEER_READY tells when it is there.
/// Transfers may be begun at once, they wait inside their deadline.
///
/// The same engine may be added again: each call gives a handle of its own, with its own user_data and
/// events; they share one connection, and each is removed by itself. An engine is known by its agents'
/// incarnations and not by their names: after a restart it is another peer, under whatever name.
///
/// @param      agent            An agent with an engine.
/// @param[in]  engine_metadata  kvf_engine_metadata() of the other side. Not kept.
/// @param      metadata_bytes   Its length.
/// @param      user_data        Returned in the peer's events.
/// @param[out] peer             Receives the peer; end it with kvf_peer_destroy().
/// @return KVF_OK; KVF_ERR_INCOMPATIBLE with the field and both values when the caches do not fit,
///         before any data moves; KVF_ERR_STATE before kvf_engine_create();
///         KVF_ERR_INVALID_ARGUMENT for bytes that are no metadata, for this agent's own engine, and
///         for metadata that says other things of an agent than that of a peer there is;
///         KVF_ERR_ABI_MISMATCH for metadata of another major version.
///
/// # Safety
/// @p agent must be live, @p engine_metadata point to @p metadata_bytes readable bytes, @p peer be
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_peer_add(
    agent: *mut kvf_agent,
    engine_metadata: *const c_void,
    metadata_bytes: usize,
    user_data: u64,
    peer: *mut *mut kvf_peer,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let metadata = unsafe { read_blob(engine_metadata, metadata_bytes, "engine_metadata") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(peer, "peer") }?;
        let core = agent.core.add_peer(&metadata, user_data)?;
        out.set_handle(kvf_peer(Object::child(&agent, core)));
        Ok(())
    })
}

/// Tells whether and how a peer can be used.
///
/// @param         peer  The peer.
/// @param[in,out] info  Start from KVF_PEER_INFO_INIT; written up to `info->struct_size`.
/// @return KVF_OK; the state is in @p info.
///
/// # Safety
/// @p peer must be live, @p info point to `info->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_peer_query(
    peer: *const kvf_peer,
    info: *mut kvf_peer_info,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let peer = unsafe { view(peer, "peer") }?.0.enter("peer")?;
        // SAFETY: the caller's contract.
        let size = unsafe { check_head(info, "info") }?;
        let now = peer.info();
        let value = kvf_peer_info {
            struct_size: size,
            abi_version: 0,
            status: now.status as i32,
            id: peer.id(),
            ranks: now.ranks,
            ranks_ready: now.ranks_ready,
            transport: name_field(now.transport),
        };
        // SAFETY: `size` writable bytes by the caller's contract.
        unsafe { write_result(info, size, &value) };
        Ok(())
    })
}

/// Gives one line for people: the chosen data path, why, and why not the others; or what is wrong
/// with the peer.
///
/// @param      peer    The peer.
/// @param[out] buf     Receives the NUL-terminated UTF-8 text, cut to @p cap bytes; may be NULL
///                     when @p cap is 0.
/// @param      cap     Size of @p buf in bytes.
/// @param[out] needed  Receives the size of the whole text with its NUL; may be NULL.
/// @return KVF_OK, also when the text was cut.
///
/// # Safety
/// @p peer must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_peer_text(
    peer: *const kvf_peer,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let peer = unsafe { view(peer, "peer") }?.0.enter("peer")?;
        // SAFETY: the caller's contract.
        unsafe { give_text(buf, cap, needed, &peer.info().text) }
    })
}

/// Waits until a peer can be used.
///
/// Blocks the calling thread only; several threads may wait.
///
/// @param peer        The peer.
/// @param timeout_ns  Longest wait, in ns; 0 = only look.
/// @return KVF_OK: ready; KVF_TIMED_OUT: still connecting, and kvferry goes on;
///         KVF_ERR_PEER_LOST, KVF_ERR_PEER_UNREACHABLE, ...: why it cannot be used, with the text
///         in kvf_last_error().
///
/// # Safety
/// @p peer must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_peer_wait(peer: *const kvf_peer, timeout_ns: u64) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let peer = unsafe { view(peer, "peer") }?.0.enter("peer")?;
        let status = peer.wait(Duration::from_nanos(timeout_ns));
        say(status, || peer.info().text)
    })
}

/// Forgets a peer: its running transfers fail with KVF_ERR_CANCELLED, its mappings go.
///
/// The handle stays for kvf_peer_query() and kvf_peer_destroy(). Idempotent.
///
/// @param peer  The peer.
/// @return KVF_OK.
///
/// # Safety
/// @p peer must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_peer_remove(peer: *mut kvf_peer) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let peer = unsafe { view(peer, "peer") }?.0.enter("peer")?;
        peer.remove();
        Ok(())
    })
}

/// Ends a peer's handle, after kvf_peer_remove() if that was not called.
///
/// @param peer  The peer, or NULL.
/// @return KVF_OK.
///
/// # Safety
/// @p peer must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_peer_destroy(peer: *mut kvf_peer) -> kvf_status {
    let end = |peer: Peer, agent: Option<&Shared>| {
        if agent.is_some_and(|agent| !agent.ended()) {
            peer.remove();
        }
        Ok(Status::KVF_OK)
    };
    // SAFETY: the caller's contract.
    unsafe { destroy(peer, |handle| handle.0, end) }
}
