//! Events: what an agent's event fd announces.

use super::agent::kvf_agent;
use super::boundary::guard;
use super::structs::{Out, OutArray, abi_struct, view};
use crate::agent::{Event, EventKind};
use crate::error::kvf_status;
use crate::ids::Key;

/// Which request, and which attempt at it; both are the orchestrator's numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvf_key {
    /// The orchestrator's request id.
    pub request: u64,
    /// Grows when the same request is handed over again.
    pub attempt: u32,
    /// Must be 0.
    pub reserved: u32,
}
abi_struct!(elem kvf_key { request, attempt, reserved });

impl kvf_key {
    /// The core's key.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for a reserved field that is set.
    pub(crate) fn read(self, what: &str) -> crate::error::Result<Key> {
        super::checks::must_be_zero(self.reserved, &format!("{what}.reserved"))?;
        Ok(Key {
            request: self.request,
            attempt: self.attempt,
        })
    }
}

impl From<Key> for kvf_key {
    fn from(key: Key) -> Self {
        Self {
            request: key.request,
            attempt: key.attempt,
            reserved: 0,
        }
    }
}

/// A transfer has its outcome.
pub const KVF_EVENT_TRANSFER_ENDED: u32 = 1;
/// The slots of an ended transfer may be reused.
pub const KVF_EVENT_MEMORY_SAFE: u32 = 2;
/// A publication has ended; its slots may be reused unless another publication holds them.
pub const KVF_EVENT_PUBLICATION_ENDED: u32 = 3;
/// A peer can be used.
pub const KVF_EVENT_PEER_READY: u32 = 4;
/// A peer died, went silent or was replaced.
pub const KVF_EVENT_PEER_LOST: u32 = 5;
/// A pool's memory may be freed (status KVF_OK), or not yet at the deadline (KVF_ERR_DEADLINE).
pub const KVF_EVENT_POOL_RELEASED: u32 = 6;
/// A consensus decision is ready (transceivers only).
pub const KVF_EVENT_DECISION: u32 = 7;

const _: () = {
    assert!(KVF_EVENT_TRANSFER_ENDED == EventKind::TransferEnded as u32);
    assert!(KVF_EVENT_MEMORY_SAFE == EventKind::MemorySafe as u32);
    assert!(KVF_EVENT_PUBLICATION_ENDED == EventKind::PublicationEnded as u32);
    assert!(KVF_EVENT_PEER_READY == EventKind::PeerReady as u32);
    assert!(KVF_EVENT_PEER_LOST == EventKind::PeerLost as u32);
    assert!(KVF_EVENT_POOL_RELEASED == EventKind::PoolReleased as u32);
    assert!(KVF_EVENT_DECISION == EventKind::Decision as u32);
};

/// Something that happened and that the caller has not seen yet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvf_event {
    /// KVF_EVENT_TRANSFER_ENDED ... A newer library may send kinds that are not in this header:
    /// ignore them.
    pub kind: u32,
    /// A kvf_status: the cause; KVF_OK for a success.
    pub status: i32,
    /// `id` of the object it happened to, as its query function gives it.
    pub object: u64,
    /// `user_data` of the descriptor that made the object.
    pub user_data: u64,
    /// The request, where there is one.
    pub key: kvf_key,
}
abi_struct!(elem kvf_event { kind, status, object, user_data, key });

impl From<&Event> for kvf_event {
    fn from(event: &Event) -> Self {
        Self {
            kind: event.kind as u32,
            status: event.status as i32,
            object: event.object,
            user_data: event.user_data,
            key: event.key.into(),
        }
    }
}

/// Takes the oldest events, each once.
///
/// The event fd stops being readable when the last event was taken: call again while @p n comes
/// back equal to @p cap. Never blocks; any thread, several at once included.
///
/// @param      agent      The agent.
/// @param[out] events     Receives up to @p cap events, oldest first.
/// @param      elem_size  `sizeof(kvf_event)`.
/// @param      cap        Elements in @p events, at least 1.
/// @param[out] n          Receives how many were taken.
/// @return KVF_OK, also for none.
///
/// # Safety
/// @p agent must be live, @p events must point to @p cap elements of @p elem_size bytes, @p n must
/// be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_take_events(
    agent: *mut kvf_agent,
    events: *mut kvf_event,
    elem_size: usize,
    cap: usize,
    n: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        if cap == 0 {
            crate::bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "cap is 0: no event could be taken"
            );
        }
        // SAFETY: the caller's contract.
        let events = unsafe { OutArray::new(events, cap, elem_size, "events") }?;
        // SAFETY: the caller's contract.
        let n = unsafe { Out::new(n, "n") }?;
        let mut taken = Vec::new();
        agent.core.take_events(&mut taken, cap);
        let taken: Vec<kvf_event> = taken.iter().map(kvf_event::from).collect();
        n.set(events.fill(&taken));
        Ok(())
    })
}
