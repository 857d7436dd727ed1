//! Agents: a rank's kvferry object.

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::boundary::guard;
use super::checks::{flag, nanos_or};
use super::handle::{Object, Shared, destroy};
use super::log::{KVF_LOG_DEBUG, KVF_LOG_OFF, Log, kvf_log_fn};
use super::structs::{Out, OutArray, abi_struct, put_bytes, read, read_plain, read_text, view};
use crate::agent::{Agent, AgentConfig, AuthKey, Timeouts};
use crate::bail;
use crate::error::{Result, Status, kvf_status};

/// A rank's kvferry object: memory, peers, publications, transfers. Any thread may call it.
pub struct kvf_agent(pub(crate) Object<Arc<Shared>>);

/// How kvf_agent_create() makes an agent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_agent_config {
    /// `sizeof(kvf_agent_config)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// Copying threads; 0 = 2. A thread in kvf_transfer_wait() may copy besides.
    pub workers: u32,
    /// Appears in messages and thread names, need not be unique, no control characters; NULL =
    /// "kvferry".
    pub name: *const c_char,
    /// `host:port` for other agents; NULL = 127.0.0.1 and any port. An address that is not loopback
    /// needs `auth_key` or `allow_unauthenticated`.
    pub listen: *const c_char,
    /// CPUs that the agent's threads may run on, and where all but small copies are made: then no
    /// thread in kvf_transfer_wait() makes any; NULL = those of the calling thread.
    pub affinity: *const u32,
    /// Elements of `affinity`.
    pub num_affinity: usize,
    /// Allowed transports, as in `"shm,tcp"`, of inproc, shm, cuda_ipc, ucx, unix and tcp; NULL =
    /// all. The environment variable `KVFERRY_TRANSPORTS` narrows it further; one must be left.
    /// Naming ucx, here or there, forces it where nothing before it serves a peer.
    pub transports: *const c_char,
    /// Names model, revision and cache format; must be equal on both sides of a handoff. NULL = "".
    pub fingerprint: *const c_char,
    /// Connecting and shaking hands with a peer, one attempt, in ns; 0 = 10 s.
    pub connect_ns: u64,
    /// A peer that has sent nothing for this long, or was tried in vain for this long, is lost, in
    /// ns; 0 = 10 s.
    pub peer_silence_ns: u64,
    /// Distance of heartbeats on an otherwise silent link, in ns; 0 = 3 s. Must be below
    /// `peer_silence_ns`, and below that of every peer.
    pub heartbeat_ns: u64,
    /// Life of a publication until its first reader, in ns; 0 = 300 s.
    pub claim_ns: u64,
    /// Life of a publication without a renewal by its readers, in ns; 0 = 30 s.
    pub lease_ns: u64,
    /// Deadline of a transfer whose descriptor names none, in ns; 0 = 60 s.
    pub transfer_ns: u64,
    /// Publications that may live at once; 0 = 65536.
    pub max_publications: u32,
    /// Lines up to this level go to `log`; 0 = KVF_LOG_OFF.
    pub log_level: u32,
    /// Receives log lines; NULL = nobody.
    pub log: kvf_log_fn,
    /// First argument of `log`.
    pub log_arg: *mut c_void,
    /// How long a thread looks at a data socket before it sleeps, in ns; 0 = it sleeps at once. With
    /// it a call that begins a transfer of at most 32 KiB through a socket looks for the answer
    /// itself, for at most 0.2 ms.
    pub spin_ns: u64,
    /// Pre-shared key: `auth_key_bytes` random bytes (16 to 4096), the same for all agents that may
    /// talk to each other. Copied, and overwritten when the agent ends. NULL = the content of the
    /// file that the environment variable `KVFERRY_AUTH_KEY_FILE` names, without one trailing
    /// newline; without that, no key. Both sides of every connection prove that they know it; it
    /// encrypts nothing.
    pub auth_key: *const u8,
    /// Bytes of `auth_key`.
    pub auth_key_bytes: usize,
    /// `host:port` that peers are told to connect to; port 0 = the one listened on. Needed where
    /// `listen` is a wildcard (0.0.0.0, [::]) or peers see another address; NULL = as listened on.
    pub advertise: *const c_char,
    /// 1: listen beyond loopback without a key. **Open to everybody who can connect**: they may read
    /// what is published and disturb what runs. No meaning with a key.
    pub allow_unauthenticated: u32,
    /// Sockets (`tcp`, `unix`): connections over which one transfer reads from one source agent at
    /// once, and that are kept for the next one. Each needs a worker; 0 = as many as workers, at
    /// most 256.
    pub data_connections: u32,
}
abi_struct!(head kvf_agent_config {
    struct_size, abi_version, workers, name, listen, affinity, num_affinity, transports,
    fingerprint, connect_ns, peer_silence_ns, heartbeat_ns, claim_ns, lease_ns, transfer_ns,
    max_publications, log_level, log, log_arg, spin_ns, auth_key,
    auth_key_bytes, advertise, allow_unauthenticated, data_connections,
});

/// A slot that an ended transfer may still write to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kvf_quarantined_slot {
    /// `id` of the transfer.
    pub transfer: u64,
    /// Group of the agent's layout.
    pub group: u32,
    /// Slot in that group.
    pub slot: u32,
}
abi_struct!(elem kvf_quarantined_slot { transfer, group, slot });

/// Makes an agent and starts its threads.
///
/// The threads are named, block all signals, and end in kvf_agent_destroy(). Nothing else of the
/// process is touched: no signal handler, no logger, no global runtime.
///
/// @param[in]  config  Start from KVF_AGENT_CONFIG_INIT. Not kept.
/// @param[out] agent   Receives the agent; end it with kvf_agent_destroy().
/// @return KVF_OK; KVF_ERR_INVALID_ARGUMENT for an unknown transport, address or log level, a key of
///         a wrong size, an address beyond loopback without a key, or one that peers cannot connect
///         to, and heartbeats that are not more frequent than `peer_silence_ns`;
///         KVF_ERR_SYSTEM or KVF_ERR_NO_MEMORY when the system refuses sockets, threads or memory.
///
/// # Safety
/// @p config must point to `config->struct_size` readable bytes and its pointers be NULL or valid
/// during the call; `log` and `log_arg` until the agent is destroyed. @p agent must be writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_create(
    config: *const kvf_agent_config,
    agent: *mut *mut kvf_agent,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let config = unsafe { read(config, "config") }?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(agent, "agent") }?;
        let (core_config, log) = config.convert()?;
        crate::observe::marks::watch_forks()?;
        let sink = log.as_ref().map(|log| (config.log_level, log.sink()));
        let core = Agent::create(core_config, sink)?;
        out.set_handle(kvf_agent(Object::root(Arc::new(Shared::new(core, log)))));
        Ok(())
    })
}

impl kvf_agent_config {
    fn convert(&self) -> Result<(AgentConfig, Option<Arc<Log>>)> {
        if self.log_level > KVF_LOG_DEBUG {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "config.log_level is {}, the highest is {KVF_LOG_DEBUG} (KVF_LOG_DEBUG)",
                self.log_level
            );
        }
        let log = match self.log {
            Some(callback) if self.log_level != KVF_LOG_OFF => {
                Some(Log::new(callback, self.log_arg))
            }
            Some(_) => None,
            None if self.log_level != KVF_LOG_OFF => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "config.log_level is {} without config.log",
                self.log_level
            ),
            None => None,
        };
        // SAFETY: strings and array are the caller's and valid during the call.
        let text = |text, what| unsafe { read_text(text, what) }.map(Option::unwrap_or_default);
        let name = text(self.name, "config.name")?;
        let default = Timeouts::default();
        let what = "config.auth_key";
        // SAFETY: as above.
        let key = unsafe { read_plain(self.auth_key, self.auth_key_bytes, what) }?;
        let auth_key = match key.is_empty() {
            true => None,
            false => Some(AuthKey::new(key).map_err(|e| e.context(what))?),
        };
        let config = AgentConfig {
            name: if name.is_empty() {
                "kvferry".to_owned()
            } else {
                name
            },
            listen: text(self.listen, "config.listen")?,
            workers: self.workers,
            // SAFETY: as above.
            affinity: unsafe { read_plain(self.affinity, self.num_affinity, "config.affinity") }?,
            transports: text(self.transports, "config.transports")?
                .split(',')
                .map(str::trim)
                .filter(|name| !name.is_empty())
                .map(str::to_owned)
                .collect(),
            fingerprint: text(self.fingerprint, "config.fingerprint")?,
            timeouts: Timeouts {
                connect: nanos_or(self.connect_ns, default.connect),
                peer_silence: nanos_or(self.peer_silence_ns, default.peer_silence),
                heartbeat: nanos_or(self.heartbeat_ns, default.heartbeat),
                claim: nanos_or(self.claim_ns, default.claim),
                lease: nanos_or(self.lease_ns, default.lease),
                transfer: nanos_or(self.transfer_ns, default.transfer),
            },
            max_publications: self.max_publications,
            spin: Duration::from_nanos(self.spin_ns),
            advertise: text(self.advertise, "config.advertise")?,
            allow_unauthenticated: flag(
                self.allow_unauthenticated,
                "config.allow_unauthenticated",
            )?,
            data_connections: self.data_connections,
            auth_key,
        };
        Ok((config, log))
    }
}

/// Ends an agent: everything still running fails with KVF_ERR_SHUTDOWN, peers are told, threads
/// are joined. The handle is gone whatever is returned, KVF_ERR_REENTRANT excepted.
///
/// The time-out bounds the wait for copies that are running, on a peer that does not answer for
/// instance; an agent without any is destroyed with KVF_OK whatever it is. kvferry's own threads end
/// promptly, after the last messages to the peers (200 ms at most for those that do not read, one
/// second for copies out of memory that is mapped here); should one hang, that is told after 5 s.
///
/// Pools, publications, transfers and peers of the agent stay valid handles: their calls return
/// KVF_ERR_SHUTDOWN, and each still needs its `_destroy`. The memory of a pool made by kvferry
/// stays mapped until its kvf_pool_destroy(). In a forked child only local memory is freed.
///
/// @param agent       The agent, or NULL.
/// @param timeout_ns  Longest wait for running copies, in ns; 0 = none.
/// @return KVF_OK: no memory of the caller is touched any more; KVF_ERR_DEADLINE: a thread was
///         still busy and was left behind, slots of running transfers must not be reused.
///
/// # Safety
/// @p agent must be live or NULL, and no other call on it may be running or follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_destroy(agent: *mut kvf_agent, timeout_ns: u64) -> kvf_status {
    let end = |shared: Arc<Shared>, _: Option<&Shared>| {
        shared.end();
        let ended = shared.core.shutdown(Duration::from_nanos(timeout_ns));
        if let Some(log) = &shared.log {
            log.silence();
        }
        ended.map(|()| Status::KVF_OK)
    };
    // SAFETY: the caller's contract.
    unsafe { destroy(agent, |handle| handle.0, end) }
}

/// Gives the file descriptor that is readable exactly while there is an event to take.
///
/// For poll(), epoll or io_uring in the caller's loop. Only poll it: kvferry writes it when an
/// event comes and clears it when kvf_agent_take_events() has taken the last one. It is
/// non-blocking, close-on-exec, belongs to the agent and ends with it.
///
/// @param      agent  The agent.
/// @param[out] fd     Receives the descriptor.
/// @return KVF_OK.
///
/// # Safety
/// @p agent must be live, @p fd writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_event_fd(agent: *const kvf_agent, fd: *mut c_int) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let out = unsafe { Out::new(fd, "fd") }?;
        out.set(agent.core.event_fd());
        Ok(())
    })
}

/// Refuses new publications and transfers from now on and waits until the running ones have
/// ended: the first step of an orderly end, before kvf_agent_destroy().
///
/// Blocks the calling thread only. There is no way back.
///
/// @param agent       The agent.
/// @param timeout_ns  Longest wait, in ns; 0 = only look.
/// @return KVF_OK when nothing is running; KVF_ERR_DEADLINE with what still is in
///         kvf_last_error().
///
/// # Safety
/// @p agent must be live.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_drain(agent: *mut kvf_agent, timeout_ns: u64) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        agent.core.drain(Duration::from_nanos(timeout_ns))
    })
}

/// Gives this rank's metadata, which kvf_engine_create() of every rank of the engine needs.
///
/// The same bytes for the life of the agent; they hold no address that other processes could use
/// without this one's consent.
///
/// @param      agent   An agent with a layout.
/// @param[out] buf     Receives the bytes; may be NULL when @p cap is 0.
/// @param      cap     Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed  Receives the size, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small (it stays untouched);
///         KVF_ERR_STATE before kvf_agent_set_layout().
///
/// # Safety
/// @p agent must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_metadata(
    agent: *const kvf_agent,
    buf: *mut c_void,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        let metadata = agent.core.metadata()?;
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &metadata, "buf") }
    })
}

/// Lists the slots that transfers which have ended may still write to. They must not be reused;
/// KVF_EVENT_MEMORY_SAFE tells when a transfer's slots leave the list.
///
/// Nothing is consumed: ask again with more room when @p n is larger than @p cap.
///
/// @param      agent      The agent.
/// @param[out] slots      Receives up to @p cap entries; may be NULL when @p cap is 0.
/// @param      elem_size  `sizeof(kvf_quarantined_slot)`.
/// @param      cap        Elements in @p slots.
/// @param[out] n          Receives the length of the whole list.
/// @return KVF_OK.
///
/// # Safety
/// @p agent must be live, @p slots point to @p cap elements of @p elem_size bytes, @p n be
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_agent_quarantine(
    agent: *const kvf_agent,
    slots: *mut kvf_quarantined_slot,
    elem_size: usize,
    cap: usize,
    n: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        // SAFETY: the caller's contract.
        let slots = unsafe { OutArray::new(slots, cap, elem_size, "slots") }?;
        // SAFETY: the caller's contract.
        let n = unsafe { Out::new(n, "n") }?;
        let list: Vec<_> = agent
            .core
            .quarantine()
            .into_iter()
            .map(|(transfer, group, slot)| kvf_quarantined_slot {
                transfer,
                group,
                slot,
            })
            .collect();
        slots.fill(&list);
        n.set(list.len());
        Ok(())
    })
}

/// Gives the agent's metrics in Prometheus' text format (version 0.0.4): bytes, reads and
/// transfers by outcome and cause, queue and copy times, patterns, bytes that prefixes saved,
/// leases, quarantine and late notices, by peer and transport. docs/metrics.md lists them.
///
/// Given whole or not at all. Numbers grow: give @p buf some room beyond an earlier @p needed.
///
/// @param      agent   The agent.
/// @param[out] buf     Receives the NUL-terminated text; may be NULL when @p cap is 0.
/// @param      cap     Size of @p buf in bytes; 0 only asks for the size.
/// @param[out] needed  Receives the size with the NUL, also when @p buf is too small; may be NULL.
/// @return KVF_OK; KVF_ERR_OUT_OF_RANGE when @p buf is too small.
///
/// # Safety
/// @p agent must be live, @p buf point to @p cap writable bytes, @p needed be NULL or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvf_metrics_text(
    agent: *const kvf_agent,
    buf: *mut c_char,
    cap: usize,
    needed: *mut usize,
) -> kvf_status {
    guard(|| {
        // SAFETY: the caller's contract.
        let agent = unsafe { view(agent, "agent") }?.0.enter("agent")?;
        let mut text = agent.core.metrics_text()?.into_bytes();
        text.push(0);
        // SAFETY: the caller's contract.
        unsafe { put_bytes(buf.cast(), cap, needed, &text, "buf") }
    })
}
