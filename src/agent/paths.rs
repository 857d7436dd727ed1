//! The way to a remote agent's memory: what is announced, what is chosen and why.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use super::api::{Event, EventKind};
use super::control::{Command, Control};
use super::device_pools;
use super::link::{LinkId, unix_name};
use super::metadata::{RankInfo, incarnation};
use super::remote::LinkState;
use super::serving::{self, Door};
use super::shared::{self, Shared};
use super::ucx;
use crate::error::{Result, Status};
use crate::ids::{Incarnation, Key};
use crate::memory::{LeaseView, Mapping, Pool};
use crate::transport::DataPath;
use crate::transport::device::{DevicePath, HostPath};
use crate::transport::inproc::InprocPath;
use crate::transport::shm::{PeerLeases, PeerPool, PeerProcess, ShmPath};
use crate::transport::tcp::TcpPath;
use crate::wire::{self, Body};
use crate::{bail, err};

/// Most descriptors that travel with one message, the lease table's included: both processes have
/// them open at once, and by default a process may have 1024. Further pools are read through the
/// kernel.
pub(super) const MAX_DESCRIPTORS: usize = 512;

impl Control {
    /// Asks an agent for its memory, once a link.
    pub fn ask_memory(&mut self, agent: Incarnation) {
        if let Some(remote) = self.remotes.get_mut(&agent)
            && let LinkState::Up(link) = &remote.state
            && remote.memory_asked != Some(link.id)
        {
            remote.memory_asked = Some(link.id);
            let ucx = ucx::is_wanted(&self.shared, link.process.is_some());
            let ucx_gets = ucx && ucx::wants_gets(&self.shared);
            link.send(Body::MemoryRequest(wire::MemoryRequest {
                ucx,
                ucx_gets,
                ucx_device_gets: ucx_gets,
            }));
        }
    }

    /// No transfer can succeed any more over the way that there is: asks for the memory again.
    /// Transfers wait for the new way, as they do for the first one.
    pub fn renew_path(&mut self, agent: Incarnation) {
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        let name = &remote.info().name;
        self.shared.log.info(format_args!(
            "agent {name}: the transport has failed; asking for a new way"
        ));
        remote.route.set(None);
        if matches!(remote.state, LinkState::Up(_)) {
            remote.memory_asked = None;
            self.ask_memory(agent);
        } // else the next link asks
    }

    /// A reader asks for our memory.
    pub fn memory_requested(&mut self, agent: Incarnation, request: wire::MemoryRequest) {
        if !request.ucx {
            return self.send_memory(agent, None);
        }
        // Loading UCX and registering memory take their time.
        let shared = self.shared.clone();
        self.shared.workers.submit(i32::MAX, move || {
            let ucx = ucx::announce(&shared, &request);
            shared.send(Command::Announce(agent, Box::new(ucx)));
        });
    }

    /// Our memory, for a reader.
    pub fn send_memory(&mut self, agent: Incarnation, ucx: Option<Box<wire::UcxMemory>>) {
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let Some(link) = remote.link() else { return };
        let token = self.shared.data.token(agent, &remote.engine, remote.index);
        let leases = &self.shared.leases;
        let mut fds: Vec<OwnedFd> = Vec::new();
        let mut pools = Vec::new();
        if link.unix
            && let Ok(fd) = leases.fd().try_clone_to_owned()
        {
            fds.push(fd);
        }
        let process = link.process.clone().filter(|_| link.unix);
        self.shared.lock().each_layout_pool(|entry| {
            let may_map = (1..MAX_DESCRIPTORS).contains(&fds.len());
            let fd = entry.pool.fd().filter(|_| may_map);
            let fd = fd.and_then(|fd| fd.try_clone_to_owned().ok());
            pools.push(wire::PoolMemory {
                id: entry.pool.id(),
                bytes: entry.pool.bytes(),
                address: match entry.pool.is_device() {
                    true => 0,
                    false => entry.pool.base() as u64,
                },
                mappable: fd.is_some(),
                device: entry.announce(agent, process.as_ref()),
            });
            fds.extend(fd);
        });
        let mapped = |pool: &wire::PoolMemory| {
            let device = pool.device.as_ref();
            device.is_some_and(|device| !device.handle.is_empty())
        };
        let holder = process.filter(|_| pools.iter().any(mapped));
        let memory = wire::Memory {
            pools,
            nonce: leases.nonce().to_vec(),
            lease_bytes: leases.bytes(),
            lease_address: leases.address(),
            descriptors: fds.len() as u32,
            token,
            ucx,
        };
        link.send_with(Body::Memory(memory), fds);
        if let Some(process) = holder {
            self.watch_holder(agent, &process);
        }
    }

    /// A source's memory came: map it on a worker, since populating takes its time.
    pub fn memory(
        &mut self,
        agent: Incarnation,
        id: LinkId,
        memory: wire::Memory,
        fds: Vec<OwnedFd>,
    ) {
        let Some(remote) = self.remotes.get(&agent) else {
            return;
        };
        let (Some(link), info) = (remote.link(), remote.info()) else {
            return;
        };
        if remote.memory_asked != Some(id) {
            return;
        }
        let (source, process) = (info.clone(), link.process.clone());
        let shared = self.shared.clone();
        self.shared.workers.submit(i32::MAX, move || {
            let path = make_path(&shared, &source, process, &memory, fds);
            shared.send(Command::Path(agent, id, path));
        });
    }

    pub fn path_made(&mut self, agent: Incarnation, link: LinkId, path: Result<Arc<dyn DataPath>>) {
        let Some(remote) = self.remotes.get_mut(&agent) else {
            return;
        };
        if remote.memory_asked != Some(link) {
            return;
        }
        let name = remote.info().name.clone();
        match &path {
            Ok(path) => self.shared.log.info(format_args!(
                "agent {name}: transport {} ({})",
                path.name(),
                path.reason()
            )),
            Err(e) => self
                .shared
                .log
                .warn(format_args!("agent {name}: no transport: {e}")),
        }
        let ready = path.is_ok();
        let status = path.as_ref().err().map_or(Status::KVF_OK, |e| e.status);
        let unmap = std::mem::take(&mut remote.unmap);
        if ready {
            remote.reach.made();
        } else {
            // Whoever adds the peer again has it tried again.
            remote.memory_asked = None;
        }
        remote.route.set(Some(path));
        for pool in unmap {
            self.on_unmap(agent, pool);
        }
        for peer in self.peers.values() {
            let all = peer
                .needed
                .iter()
                .all(|r| matches!(peer.routes[*r].get(), Some(Ok(_))));
            let concerned = peer
                .needed
                .iter()
                .any(|r| peer.routes[*r].incarnation == agent);
            if concerned && (all || !ready) {
                self.shared.events.push(Event {
                    kind: if ready {
                        EventKind::PeerReady
                    } else {
                        EventKind::PeerLost
                    },
                    object: peer.id,
                    user_data: peer.user_data,
                    key: Key::default(),
                    status,
                });
            }
        }
        self.route_changed(agent);
    }
}

/// Whether the configuration (empty = all) and `KVFERRY_TRANSPORTS` (unset = all) allow it.
pub(super) fn allowed(configured: &[String], name: &str) -> bool {
    let named = |list: &str| list.split(',').any(|t| t.trim() == name);
    (configured.is_empty() || configured.iter().any(|t| t == name))
        && std::env::var("KVFERRY_TRANSPORTS").map_or(true, |list| list.is_empty() || named(&list))
}

/// Chooses how to read an agent's memory and proves that it works.
fn make_path(
    shared: &Arc<Shared>,
    source: &RankInfo,
    process: Option<Arc<PeerProcess>>,
    memory: &wire::Memory,
    fds: Vec<OwnedFd>,
) -> Result<Arc<dyn DataPath>> {
    let may = |name: &str| allowed(&shared.config.transports, name);
    let nonce = incarnation(&memory.nonce)?.0;
    let mut reasons = Vec::new();
    if !may("inproc") {
        reasons.push("inproc: not allowed by the configuration".to_owned());
    } else if source.process != shared.process {
        reasons.push("inproc: another process".into());
    } else {
        let Some(other) = shared::find(source.incarnation) else {
            bail!(KVF_ERR_PEER_LOST, "the agent in this process has ended");
        };
        let state = other.lock();
        let pools = state.layout_pools().map(|e| (e.pool.id(), e.pool.clone()));
        let pools: BTreeMap<_, Arc<Pool>> = pools.collect();
        drop(state);
        let devices = pools.values().any(|pool| pool.is_device());
        let path = InprocPath::new(pools, other.leases.clone(), nonce)?;
        if devices || has_device_pools(shared) {
            let (host, devices) = (HostPath::Inproc(path), shared.devices.clone());
            return Ok(Arc::new(DevicePath::new(host, devices, BTreeMap::new())));
        }
        return Ok(Arc::new(path));
    }
    let same_host = process.is_some();
    let devices = memory.pools.iter().filter(|p| p.device.is_some()).count();
    if devices == 0 {
        reasons.push("cuda_ipc: the peer has no device memory".into());
    }
    // Leases of a peer with nothing but device memory are of no transport.
    let only_devices = devices > 0 && devices == memory.pools.len();
    match process {
        _ if !(may("shm") || only_devices && may("cuda_ipc")) => {
            reasons.push("shm: not allowed by the configuration".into());
        }
        None => reasons.push("shm: another host, or no Unix socket to it".into()),
        Some(process) => match host_path(shared, source, process, memory, fds, nonce) {
            Ok(path) => return Ok(path),
            Err(e) if e.status == Status::KVF_ERR_PEER_LOST => return Err(e),
            Err(e) if devices > 0 => reasons.push(e.text),
            Err(e) => reasons.push(format!("shm: {e}")),
        },
    }
    match ucx::path(shared, source, memory, nonce, &reasons) {
        Ok(path) => return Ok(path),
        Err(e) => reasons.push(format!("ucx: {}", e.text)),
    }
    let doors = [
        (
            "unix",
            same_host.then(|| Door::Unix(unix_name(source.incarnation))),
        ),
        ("tcp", source.address.map(Door::Tcp)),
    ];
    for (name, door) in doors {
        let why_not = match (&door, may(name)) {
            (_, false) => Some("not allowed by the configuration"),
            (None, _) if name == "unix" => Some("another host, or no Unix socket to it"),
            (None, _) => Some("the peer announces no address"),
            _ => None,
        };
        let Some(door) = door.filter(|_| why_not.is_none()) else {
            reasons.push(format!("{name}: {}", why_not.unwrap_or_default()));
            continue;
        };
        let dial = serving::dialler(shared, source, door, memory.token.clone());
        let pools = memory.pools.iter().map(|p| (p.id, p.bytes)).collect();
        let reason = match reasons.as_slice() {
            [] => "the first one allowed".to_owned(),
            refused => format!("not {}", refused.join("; not ")),
        };
        let connections = match shared.config.data_connections {
            0 => shared.workers.count(),
            given => given as usize,
        };
        let spin = shared.config.spin;
        let devices = shared.devices.clone();
        let path = TcpPath::new(name, reason, pools, connections, spin, devices, dial);
        match path.prove() {
            Ok(()) => return Ok(Arc::new(path)),
            Err(e) => reasons.push(format!("{name}: {e}")),
        }
    }
    bail!(
        KVF_ERR_UNSUPPORTED,
        "no transport to agent {}: {}",
        source.name,
        reasons.join("; ")
    )
}

fn has_device_pools(shared: &Shared) -> bool {
    !shared.contexts().is_empty()
}

/// The path within a host: shared memory, with devices where there are any.
fn host_path(
    shared: &Arc<Shared>,
    source: &RankInfo,
    process: Arc<PeerProcess>,
    memory: &wire::Memory,
    fds: Vec<OwnedFd>,
    nonce: [u8; 16],
) -> Result<Arc<dyn DataPath>> {
    let theirs = memory.pools.iter().any(|pool| pool.device.is_some());
    if theirs && !allowed(&shared.config.transports, "cuda_ipc") {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "cuda_ipc: not allowed by the configuration"
        );
    }
    let path = shm_path(process, memory, fds, nonce)?;
    if !theirs && !has_device_pools(shared) {
        return Ok(Arc::new(path));
    }
    let mapped =
        device_pools::map(shared, source.incarnation, memory).map_err(|e| e.context("cuda_ipc"))?;
    let (host, devices) = (HostPath::Shm(path), shared.devices.clone());
    Ok(Arc::new(DevicePath::new(host, devices, mapped)))
}

fn shm_path(
    process: Arc<PeerProcess>,
    memory: &wire::Memory,
    fds: Vec<OwnedFd>,
    nonce: [u8; 16],
) -> Result<ShmPath> {
    let mut fds = fds.into_iter();
    let mut next = |what: String| match fds.next() {
        Some(fd) => Ok(fd),
        None => Err(err!(KVF_ERR_PROTOCOL, "no descriptor for {what}")),
    };
    let view = match memory.descriptors {
        0 => None,
        _ => {
            let fd = next("the lease table".into())?;
            Some(LeaseView::new(Mapping::new(
                fd.as_fd(),
                memory.lease_bytes,
            )?)?)
        }
    };
    let mut pools = BTreeMap::new();
    for pool in &memory.pools {
        if pool.device.is_some() {
            continue;
        }
        let reached = if pool.mappable {
            let fd = next(format!("pool {}", pool.id))?;
            let mapping = Mapping::new(fd.as_fd(), pool.bytes)
                .map_err(|e| e.context(format!("pool {}", pool.id)))?;
            PeerPool::Mapped(mapping)
        } else {
            PeerPool::Private {
                address: pool.address,
                bytes: pool.bytes,
            }
        };
        pools.insert(pool.id, reached);
    }
    let head = crate::memory::LEASE_HEAD_BYTES;
    let capacity = memory.lease_bytes.saturating_sub(head) / 8;
    let leases = PeerLeases {
        view,
        address: memory.lease_address,
        capacity: u32::try_from(capacity).unwrap_or(u32::MAX),
        nonce,
    };
    let private = pools
        .values()
        .any(|p| matches!(p, PeerPool::Private { .. }));
    let path = ShmPath::new(process, pools, leases)?;
    if private {
        // Where the kernel refuses it, another transport is chosen now and not a transfer failed.
        path.prove_private()?;
    }
    Ok(path)
}
