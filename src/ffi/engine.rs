//! Engines: all ranks of one model-parallel group.

use std::ffi::c_void;
use std::sync::Arc;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::{must_be_zero, read_blob};
use super::handle::{Object, Shared, destroy};
use super::structs::{Out, abi_struct, put_bytes, read, read_array, view};
use crate::bail;
use crate::error::{Result, Status, kvf_status};
use crate::observe::marks::InCallback;

/// Most bytes that the ranks' metadata may have together, each as long as the longest.
const MAX_GATHERED: u64 = 1 << 30;

/// Most ranks of an engine.
const MAX_WORLD: u32 = 1 << 16;

/// The engine that an agent's rank belongs to. Any thread may use it.
pub struct kvf_engine(pub(crate) Object<Arc<Shared>>);

/// All-gather over the ranks of an engine, as MPI_Allgather on bytes.
///
/// Every rank's kvf_engine_create() calls it twice, on the calling thread, with the same @p bytes
/// on all ranks each time (8, then the longest rank's metadata). It may block; how long is the
/// caller's choice. It must not throw (declare it `noexcept` in C++) and must not call kvferry
/// (KVF_ERR_REENTRANT).
///
/// @param      arg    `exchange_arg` of the descriptor.
/// @param[in]  mine   This rank's contribution, @p bytes long.
/// @param[out] all    Receives world * @p bytes: the contributions in order of rank, this rank's
///                    included.
/// @param      bytes  Length of one contribution.
/// @return 0 when @p all is filled; anything else fails kvf_engine_create().
pub type kvf_exchange_fn = Option<
    unsafe extern "C" fn(
        arg: *mut c_void,
        mine: *const c_void,
        all: *mut c_void,
        bytes: usize,
    ) -> i32,
>;

/// Bytes of the caller.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_bytes {
    /// First byte.
    pub data: *const c_void,
    /// How many.
    pub bytes: usize,
}
abi_struct!(elem kvf_bytes { data, bytes });

/// How an engine's ranks find together: by `exchange`, or by `ranks` when the caller has gathered
/// every rank's kvf_agent_metadata() itself. An engine of one rank needs neither.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_engine_desc {
    /// `sizeof(kvf_engine_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Number of ranks; 0 = 1.
    pub world: u32,
    /// Position of this rank in `ranks` and in what `exchange` gathers, below `world`.
    pub rank: u32,
    /// Must be 0.
    pub reserved: u32,
    /// All-gather over the ranks; NULL = none.
    pub exchange: kvf_exchange_fn,
    /// First argument of `exchange`.
    pub exchange_arg: *mut c_void,
    /// Metadata of all ranks in order; NULL = none.
    pub ranks: *const kvf_bytes,
    /// `sizeof(kvf_bytes)`.
    pub ranks_elem_size: usize,
    /// Elements of `ranks`: `world`, or 0.
    pub num_ranks: usize,
}
abi_struct!(head kvf_engine_desc {
    struct_size, abi_version, world, rank, reserved, exchange, exchange_arg, ranks,
    ranks_elem_size, num_ranks,
});

/// Joins the ranks of an engine; once per agent, after kvf_agent_set_layout().
///
/// Checked here: the ranks together hold every layer, head, section and block ordinal. With
/// `exchange` the call is collective and blocks in it.
///
/// @param      agent   An agent with a layout.
/// @param[in]  desc    Start from KVF_ENGINE_DESC_INIT. Not kept.
/// @param[out] engine  Receives the engine; end it with kvf_engine_destroy().
/// @return KVF_OK; KVF_ERR_STATE before the layout or the second time; KVF_ERR_GROUP_LOST when
///         `exchange` failed; KVF_ERR_INVALID_ARGUMENT when a part of the model is missing, with
///         what is, for bytes that are no metadata, and when this agent's own is not among them;
///         KVF_ERR_INCOMPATIBLE when the ranks contradict each other; KVF_ERR_DUPLICATE for a rank
///         given twice.
///
/// # Safety
/// @p agent must be live, @p desc point to `desc->struct_size` readable bytes and its pointers to
/// what they say, @p engine be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_create(
    agent: *mut kvf_agent,
    desc: *const kvf_engine_desc,
    engine: *mut *mut kvf_engine,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(engine, "engine") }?;
        let world = desc.world.max(1);
        must_be_zero(desc.reserved, "desc.reserved")?;
        if world > MAX_WORLD {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "desc.world is {world}, at most {MAX_WORLD} ranks are possible"
            );
        }
        if desc.rank >= world {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "desc.rank is {} of {world} ranks",
                desc.rank
            );
        }
        // SAFETY: the caller's contract.
        let given = unsafe {
            read_array(
                desc.ranks,
                desc.num_ranks,
                desc.ranks_elem_size,
                "desc.ranks",
            )
        }?;
        let ranks = match desc.exchange {
            Some(_) if !given.is_empty() => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "desc has both exchange and ranks; give one of them"
            ),
            Some(exchange) => {
                let mine = agent.core.metadata()?;
                gather(&mine, desc.rank as usize, world as usize, |mine, all| {
                    let _mark = InCallback::enter();
                    let (mine, bytes) = (mine.as_ptr().cast(), mine.len());
                    // SAFETY: the caller's function with the caller's argument; `all` has
                    // world * bytes bytes.
                    unsafe { exchange(desc.exchange_arg, mine, all.as_mut_ptr().cast(), bytes) }
                })?
            }
            None if given.is_empty() && world == 1 => vec![agent.core.metadata()?],
            None if given.len() != world as usize => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "desc.ranks has {} elements for {world} ranks, and desc.exchange is NULL",
                given.len()
            ),
            None => given
                .iter()
                .enumerate()
                .map(|(i, rank)| {
                    // SAFETY: the caller's contract.
                    unsafe { read_blob(rank.data, rank.bytes, &format!("desc.ranks[{i}]")) }
                })
                .collect::<Result<_>>()?,
        };
        agent.core.set_engine(&ranks)?;
        out.set_handle(kvf_engine(Object::child(&agent, Arc::clone(&agent))));
        Ok(())
    })
}

/// Gives the engine's metadata: the same bytes on every rank, sent to the other side once, for its
/// kvf_peer_add().
///
/// @param      engine  The engine.
/// @param[out] buf     Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap     Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed  Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small (it stays untouched).
///
/// # Safety
/// @p engine must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_metadata(
    engine: *const kvf_engine,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let engine = unsafe { view(engine, "engine") }?.0.enter("engine")?;
        let metadata = engine.core.engine_metadata()?;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &metadata, "buf") }
    })
}

/// Ends an engine's handle. The agent stays the rank it is.
///
/// @param engine  The engine, or NULL.
/// @return KVF_OK.
///
/// # Safety
/// @p engine must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_engine_destroy(engine: *mut kvf_engine) -> kvf_status {
    // SAFETY: the caller's contract.
    unsafe { destroy(engine, |handle| handle.0, |_, _| Ok(Status::KVF_OK)) }
}

/// All ranks' metadata by two gathers of equal contributions: lengths, then padded bytes.
fn gather(
    mine: &[u8],
    rank: usize,
    world: usize,
    mut exchange: impl FnMut(&[u8], &mut [u8]) -> i32,
) -> Result<Vec<Vec<u8>>> {
    let mut run = |contribution: &[u8]| {
        let mut all = vec![0; world * contribution.len()];
        match exchange(contribution, &mut all) {
            0 => Ok(all),
            code => bail!(
                KVF_ERR_GROUP_LOST,
                "desc.exchange returned {code} for {} bytes of {world} ranks",
                contribution.len()
            ),
        }
    };
    let lengths: Vec<u64> = run(&(mine.len() as u64).to_le_bytes())?
        .chunks_exact(8)
        .map(|word| {
            word.iter()
                .rev()
                .fold(0, |n, byte| n << 8 | u64::from(*byte))
        })
        .collect();
    let longest = lengths.iter().copied().max().unwrap_or_default();
    if let Some(empty) = lengths.iter().position(|n| *n == 0) {
        bail!(
            KVF_ERR_PROTOCOL,
            "desc.exchange gave 0 as the metadata length of rank {empty}"
        );
    }
    if lengths.get(rank) != Some(&(mine.len() as u64)) {
        bail!(
            KVF_ERR_PROTOCOL,
            "desc.exchange gave {:?} as the metadata length of rank {rank}, this rank, which has \
             {} bytes: it must gather in order of rank, this rank included",
            lengths.get(rank),
            mine.len()
        );
    }
    if longest.saturating_mul(world as u64) > MAX_GATHERED {
        bail!(
            KVF_ERR_LIMIT,
            "desc.exchange gave {longest} as the longest metadata of {world} ranks; at most \
             {MAX_GATHERED} bytes are gathered"
        );
    }
    let mut padded = mine.to_vec();
    padded.resize(longest as usize, 0);
    let all = run(&padded)?;
    Ok(all
        .chunks_exact(longest as usize)
        .zip(&lengths)
        .map(|(bytes, length)| bytes[..*length as usize].to_vec())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_different_lengths_are_gathered_in_order() {
        let ranks: [&[u8]; 3] = [b"a", b"bcd", b"ef"];
        let mut calls = 0;
        let all = gather(ranks[1], 1, 3, |mine, all| {
            calls += 1;
            for (rank, to) in ranks.iter().zip(all.chunks_exact_mut(mine.len())) {
                if calls == 1 {
                    to.copy_from_slice(&(rank.len() as u64).to_le_bytes());
                } else {
                    to[..rank.len()].copy_from_slice(rank);
                }
            }
            0
        });
        assert_eq!(all, Ok(ranks.iter().map(|r| r.to_vec()).collect()));
        assert_eq!(calls, 2);
    }

    #[test]
    fn what_a_broken_exchange_gives_is_an_error() {
        let lost = gather(b"a", 0, 2, |_, _| 7).unwrap_err();
        assert_eq!(lost.status, Status::KVF_ERR_GROUP_LOST);
        assert!(lost.text.contains("returned 7"), "{lost}");

        let empty = gather(b"a", 0, 2, |_, _| 0).unwrap_err();
        assert_eq!(empty.status, Status::KVF_ERR_PROTOCOL);
        assert!(empty.text.contains("rank 0"), "{empty}");

        let lengths = |words: [u64; 2]| {
            move |_: &[u8], all: &mut [u8]| {
                for (to, word) in all.chunks_exact_mut(8).zip(words) {
                    to.copy_from_slice(&word.to_le_bytes());
                }
                0
            }
        };
        let swapped = gather(b"abc", 1, 2, lengths([3, 5])).unwrap_err();
        assert_eq!(swapped.status, Status::KVF_ERR_PROTOCOL);
        assert!(swapped.text.contains("order of rank"), "{swapped}");

        let huge = gather(b"abc", 0, 2, lengths([3, u64::MAX])).unwrap_err();
        assert_eq!(huge.status, Status::KVF_ERR_LIMIT);
    }
}
