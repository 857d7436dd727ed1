//! Pools: memory that kvferry may read and write.

use std::ffi::c_void;
use std::time::Duration;

use super::agent::kvf_agent;
use super::boundary::guard;
use super::checks::must_be_zero;
use super::handle::{Object, Shared, destroy};
use super::structs::{Out, abi_struct, check_head, read, view, write_result};
use crate::bail;
use crate::error::{Status, kvf_status};

/// Any NUMA node (default).
pub const KVF_NUMA_ANY: u32 = 0;
/// NUMA node 0, since a `numa_node` of 0 is KVF_NUMA_ANY; every other node is its own number.
pub const KVF_NUMA_NODE_0: u32 = 0xffff_ffff;

/// Memory of the host (default).
pub const KVF_MEMORY_HOST: u32 = 0;
/// Memory of a CUDA device, from cudaMalloc (cuMemAlloc).
pub const KVF_MEMORY_DEVICE: u32 = 1;

/// Pins host memory for copies to and from CUDA devices (cuMemHostRegister); undone before the
/// pool is released. Needs a device pool registered before, or a CUDA context on this thread.
pub const KVF_POOL_PINNED: u32 = 1;

/// One memory range that kvferry knows, made by it or registered.
pub struct kvf_pool(pub(crate) Object<Pool>);

/// What a pool's handle stands for.
#[derive(Debug)]
pub(crate) struct Pool {
    /// The agent's id of it.
    pub(crate) id: u32,
    user_data: u64,
}

/// How kvf_host_pool_create() makes a pool.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_host_pool_config {
    /// `sizeof(kvf_host_pool_config)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_NUMA_ANY, KVF_NUMA_NODE_0 or the number of a node from 1.
    pub numa_node: u32,
    /// Length in bytes, at least 1; rounded up to whole pages.
    pub bytes: u64,
    /// Bytes of a page: 0 = the system's; 2 MiB or 1 GiB for huge pages.
    pub page_size: u64,
    /// Returned in the pool's events.
    pub user_data: u64,
    /// 0 or KVF_POOL_PINNED.
    pub flags: u32,
    /// Must be 0.
    pub reserved: u32,
}
abi_struct!(head kvf_host_pool_config {
    struct_size, abi_version, numa_node, bytes, page_size, user_data, flags, reserved,
});

/// Memory for kvf_pool_register().
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_pool_desc {
    /// `sizeof(kvf_pool_desc)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_MEMORY_HOST or KVF_MEMORY_DEVICE.
    pub memory_kind: u32,
    /// First byte.
    pub base: *mut c_void,
    /// Length in bytes, at least 1.
    pub bytes: u64,
    /// CUDA device of KVF_MEMORY_DEVICE; otherwise 0.
    pub device: u32,
    /// KVF_POOL_PINNED for host memory, or 0.
    pub flags: u32,
    /// Returned in the pool's events.
    pub user_data: u64,
}
abi_struct!(head kvf_pool_desc {
    struct_size, abi_version, memory_kind, base, bytes, device, flags, user_data,
});

/// What kvf_pool_query() tells.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvf_pool_info {
    /// `sizeof(kvf_pool_info)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// A kvf_status: KVF_ERR_BUSY = registered, KVF_IN_PROGRESS = being taken back, KVF_OK = may be
    /// freed.
    pub status: i32,
    /// Object of the pool's events; layouts and messages name the pool by it.
    pub id: u64,
}
abi_struct!(head kvf_pool_info { struct_size, abi_version, status, id });

/// Makes a host pool that peers on the same host can map, so that one copy suffices: the fastest
/// memory for a cache. Its pages are allocated here, so that a lack of memory is an error of this
/// call and not a signal later.
///
/// Blocks while the kernel clears the pages (about 1 s for some GB).
///
/// @param      agent   The agent.
/// @param[in]  config  Start from KVF_HOST_POOL_CONFIG_INIT. Not kept.
/// @param[out] pool    Receives the pool; end it with kvf_pool_destroy(), which frees the memory.
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT for 0 bytes or an impossible page size;
///         KVF_ERR_NO_MEMORY when the system has not enough of it (of that kind, on that node).
///
/// # Safety
/// @p agent must be live, @p config point to `config->struct_size` readable bytes, @p pool be
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_host_pool_create(
    agent: *mut kvf_agent,
    config: *const kvf_host_pool_config,
    pool: *mut *mut kvf_pool,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let config = unsafe { read(config, "config") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(pool, "pool") }?;
        if config.bytes == 0 {
            bail!(KVF_ERR_INVALID_ARGUMENT, "config.bytes is 0");
        }
        must_be_zero(config.reserved, "config.reserved")?;
        let node = match config.numa_node {
            KVF_NUMA_ANY => None,
            KVF_NUMA_NODE_0 => Some(0),
            node => Some(node),
        };
        let core = Pool {
            id: match flags(config.flags, "config.flags")? {
                0 => agent.core.create_pool(config.bytes, node, config.page_size),
                _ => agent
                    .core
                    .create_pinned_pool(config.bytes, node, config.page_size),
            }?,
            user_data: config.user_data,
        };
        out.set_handle(kvf_pool(Object::child(&agent, core)));
        Ok(())
    })
}

/// Registers memory of the caller.
///
/// It must stay mapped, and stay the same memory, until kvferry says that it may be freed: see
/// kvf_pool_unregister_begin(). It must not overlap another pool of the agent. Device memory must
/// lie in one allocation of cudaMalloc or cuMemAlloc; its context is used, never owned.
///
/// @param      agent  The agent.
/// @param[in]  desc   Start from KVF_POOL_DESC_INIT. Not kept.
/// @param[out] pool   Receives the pool; end it with kvf_pool_destroy().
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT for a NULL base, 0 bytes, an unknown kind, and memory
///         that is not of the kind or device that was named, or managed;
///         KVF_ERR_OUT_OF_RANGE for a range that passes the end of the address space or of its
///         allocation on a device;
///         KVF_ERR_DUPLICATE for memory that overlaps another pool or is pinned already;
///         KVF_ERR_UNSUPPORTED for KVF_MEMORY_DEVICE without a CUDA driver, and for memory of
///         cuMemCreate or a memory pool; KVF_ERR_STATE to pin without a CUDA context.
///
/// # Safety
/// @p agent must be live, @p desc point to `desc->struct_size` readable bytes, the memory be
/// readable and writable until it may be freed, @p pool be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pool_register(
    agent: *mut kvf_agent,
    desc: *const kvf_pool_desc,
    pool: *mut *mut kvf_pool,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let desc = unsafe { read(desc, "desc") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(pool, "pool") }?;
        let flags = flags(desc.flags, "desc.flags")?;
        match desc.memory_kind {
            KVF_MEMORY_HOST => must_be_zero(desc.device, "desc.device (of host memory)")?,
            KVF_MEMORY_DEVICE => must_be_zero(flags, "desc.flags (of device memory)")?,
            kind => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "desc.memory_kind {kind} is unknown"
            ),
        }
        if desc.base.is_null() {
            bail!(KVF_ERR_INVALID_ARGUMENT, "desc.base is NULL");
        }
        if desc.bytes == 0 {
            bail!(KVF_ERR_INVALID_ARGUMENT, "desc.bytes is 0");
        }
        if (desc.base as u64).checked_add(desc.bytes).is_none()
            || isize::try_from(desc.bytes).is_err()
        {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "{} bytes from {:p} pass the end of the address space",
                desc.bytes,
                desc.base
            );
        }
        let core = Pool {
            // SAFETY: the memory stays valid until the pool is released: the caller's contract.
            id: unsafe {
                let (core, base, bytes) = (&agent.core, desc.base, desc.bytes);
                match (desc.memory_kind, flags) {
                    (KVF_MEMORY_DEVICE, _) => {
                        core.register_device_pool(base as u64, bytes, desc.device)
                    }
                    (_, 0) => core.register_pool(base.cast(), bytes),
                    _ => core.register_pinned_pool(base.cast(), bytes),
                }
            }?,
            user_data: desc.user_data,
        };
        out.set_handle(kvf_pool(Object::child(&agent, core)));
        Ok(())
    })
}

/// Refuses flags that are not known.
fn flags(given: u32, what: &str) -> crate::error::Result<u32> {
    if given & !KVF_POOL_PINNED != 0 {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} is {given:#x}: only KVF_POOL_PINNED is known"
        );
    }
    Ok(given)
}

/// Gives a pool's memory. Of a device pool an address that only the device can use.
///
/// @param      pool   The pool.
/// @param[out] base   Receives the address of its first byte.
/// @param[out] bytes  Receives its length in bytes; may be NULL.
/// @return KVF_OK, also for a pool that has been released: what kvferry made stays mapped until
///         kvf_pool_destroy().
///
/// # Safety
/// @p pool must be live, @p base writable, @p bytes NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pool_memory(
    pool: *const kvf_pool,
    base: *mut *mut c_void,
    bytes: *mut u64,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let pool = unsafe { view(pool, "pool") }?.0.enter("pool")?;
        // SAFETY: the caller's contract.
        let base = unsafe { Out::new(base, "base") }?;
        let (first, length) = pool.agent()?.core.pool_memory(pool.id)?;
        base.set(first.cast());
        if !bytes.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { Out::new(bytes, "bytes") }?.set(length);
        }
        Ok(())
    })
}

/// Gives the agent's number of a pool, by which messages, layouts and events name it.
///
/// @param      pool  The pool.
/// @param[out] id    Receives the number.
/// @return KVF_OK.
///
/// # Safety
/// @p pool must be live, @p id writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pool_id(pool: *const kvf_pool, id: *mut u32) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let pool = unsafe { view(pool, "pool") }?.0.enter("pool")?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(id, "id") }?;
        out.set(pool.id);
        Ok(())
    })
}

/// Starts to take a pool back: from now on no new publication or transfer may use it.
///
/// KVF_EVENT_POOL_RELEASED follows: with KVF_OK when the memory may be freed, or at the deadline
/// with KVF_ERR_DEADLINE when it may not be freed yet (it may be tried again). Until then freeing
/// or unmapping it is the caller's error: a peer may still read it.
///
/// @param pool         The pool.
/// @param deadline_ns  From now, in ns; 0 = the event comes at once, whatever it says.
/// @return KVF_OK: begun; KVF_ERR_STATE: it was begun before and has not ended, or the
///         pool has been released.
///
/// # Safety
/// @p pool must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pool_unregister_begin(
    pool: *mut kvf_pool,
    deadline_ns: u64,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let pool = unsafe { view(pool, "pool") }?.0.enter("pool")?;
        let deadline = Duration::from_nanos(deadline_ns);
        pool.agent()?
            .core
            .unregister_pool(pool.id, deadline, pool.user_data)
    })
}

/// Tells whether a pool's memory may be freed.
///
/// @param         pool  The pool.
/// @param[in,out] info  Start from KVF_POOL_INFO_INIT; written up to `info->struct_size`.
/// @return KVF_OK; the state is in @p info.
///
/// # Safety
/// @p pool must be live, @p info point to `info->struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pool_query(
    pool: *const kvf_pool,
    info: *mut kvf_pool_info,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let pool = unsafe { view(pool, "pool") }?.0.enter("pool")?;
        // SAFETY: the caller's contract.
        let size = unsafe { check_head(info, "info") }?;
        let value = kvf_pool_info {
            struct_size: size,
            abi_version: 0,
            status: pool.agent()?.core.pool_status(pool.id) as i32,
            id: pool.id.into(),
        };
        // SAFETY: `size` writable bytes by the caller's contract.
        unsafe { write_result(info, size, &value) };
        Ok(())
    })
}

/// Ends a pool's handle, taking the pool back if kvf_pool_unregister_begin() did not.
///
/// Memory that kvferry made is unmapped when nothing uses it any more; the caller must not touch
/// it from now on. Memory of the caller may be freed when this returns KVF_OK.
///
/// @param pool  The pool, or NULL.
/// @return KVF_OK: released; KVF_IN_PROGRESS: still used by a publication or transfer,
///         KVF_EVENT_POOL_RELEASED follows. The handle is gone in both cases.
///
/// # Safety
/// @p pool must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_pool_destroy(pool: *mut kvf_pool) -> kvf_status {
    let end = |pool: Pool, agent: Option<&Shared>| {
        let Some(agent) = agent.filter(|agent| !agent.ended()) else {
            return Ok(Status::KVF_OK); // kvf_agent_destroy() has told what is still in use
        };
        Ok(agent.core.discard_pool(pool.id, pool.user_data))
    };
    // SAFETY: the caller's contract.
    unsafe { destroy(pool, |handle| handle.0, end) }
}
