//! Making an agent: configuration, sockets, threads.

use std::io::Read;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

use super::api::AgentConfig;
use super::control::{Command, Control, Inputs};
use super::link::{listen_unix, unix_name};
use super::log::{Log, LogSink};
use super::paths::allowed;
use super::shared::{Shared, random, register};
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::memory::LeaseTable;
use crate::observe::marks;
use crate::runtime::{EventQueue, Thread, Workers, check_affinity, spawn};
use crate::wire::{AUTH_KEY_MAX, AuthKey};
use crate::{bail, err};

const DEFAULT_WORKERS: u32 = 2;
const MAX_WORKERS: u32 = 256;
const DEFAULT_PUBLICATIONS: u32 = 65_536;
const MAX_PUBLICATIONS: u32 = 1 << 24;
/// Environment variable with the path of a file that holds the pre-shared key.
const KEY_FILE: &str = "KVFERRY_AUTH_KEY_FILE";
const TRANSPORTS: [&str; 6] = ["inproc", "shm", "unix", "tcp", "ucx", "cuda_ipc"];

pub(super) fn start(
    mut config: AgentConfig,
    log: Option<(u32, LogSink)>,
) -> Result<(Arc<Shared>, Thread)> {
    if config.auth_key.is_none() {
        config.auth_key = key_file()?;
    }
    let listen = check(&config)?;
    marks::watch_forks()?;
    let incarnation = Incarnation(random()?);
    let publications = match config.max_publications {
        0 => DEFAULT_PUBLICATIONS,
        given => given,
    };
    let leases = Arc::new(LeaseTable::create(publications)?);
    let tcp = std::net::TcpListener::bind(listen)
        .and_then(|l| l.set_nonblocking(true).map(|()| l))
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, format!("listen on {listen}"), &e))?;
    let address = tcp
        .local_addr()
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "listen", &e))?;
    let address = announced(&config, address)?;
    let (commands, received) = mpsc::unbounded_channel();
    let name = thread_name(&config.name);
    let count = match config.workers {
        0 => DEFAULT_WORKERS,
        given => given,
    };
    let panicked = commands.clone();
    let workers = Workers::start(&name, count as usize, &config.affinity, move || {
        let _ = panicked.send(Command::Panicked(marks::take_panic()));
    })?;
    let events = Arc::new(EventQueue::new()?);
    let affinity = config.affinity.clone();
    let shared = Arc::new(Shared::new(
        config,
        incarnation,
        address,
        events,
        leases,
        commands,
        workers,
        Log::new(log),
    )?);
    let thread = control(&shared, &name, &affinity, tcp, received)?;
    register(&shared);
    Ok((shared, thread))
}

fn control(
    shared: &Arc<Shared>,
    name: &str,
    affinity: &[u32],
    tcp: std::net::TcpListener,
    commands: mpsc::UnboundedReceiver<Command>,
) -> Result<Thread> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "event loop", &e))?;
    let inputs = {
        let _inside = runtime.enter();
        let system = |e: std::io::Error| Error::os(Status::KVF_ERR_SYSTEM, "listen", &e);
        Inputs {
            tcp: tokio::net::TcpListener::from_std(tcp).map_err(system)?,
            unix: listen_unix(&unix_name(shared.incarnation)).map_err(system)?,
            commands,
        }
    };
    let shared = shared.clone();
    spawn(format!("{name}-ctl"), affinity, move || {
        let run = std::panic::AssertUnwindSafe(|| {
            runtime.block_on(Control::run(shared.clone(), inputs));
        });
        if std::panic::catch_unwind(run).is_err() {
            // Its own state may be broken: everything that handles can see fails at once.
            shared.closed.store(true, Ordering::Release);
            shared.fail_everything(&format!(
                "the control thread panicked ({}); destroy this agent",
                marks::take_panic()
            ));
        }
        drop(runtime);
    })
}

/// Thread names are cut at 15 bytes by the kernel; the end tells the threads apart.
pub(super) fn thread_name(agent: &str) -> String {
    let short: String = agent
        .chars()
        .filter(|c| c.is_ascii_graphic())
        .take(7)
        .collect();
    format!("kvf-{short}")
}

/// The key in the file that the environment names.
fn key_file() -> Result<Option<AuthKey>> {
    let Some(path) = std::env::var_os(KEY_FILE).filter(|p| !p.is_empty()) else {
        return Ok(None);
    };
    let place = || format!("the environment variable {KEY_FILE} names {path:?}");
    // No more than shows that it is too long: the path may name a device without an end.
    let mut bytes = Vec::new();
    std::fs::File::open(&path)
        .and_then(|file| file.take(AUTH_KEY_MAX as u64 + 2).read_to_end(&mut bytes))
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, place(), &e))?;
    // What an editor or `echo` adds is no part of the key.
    if bytes.ends_with(b"\n") {
        bytes.pop();
    }
    AuthKey::new(bytes)
        .map(Some)
        .map_err(|e| e.context(place()))
}

/// Checks the configuration; the address to listen on.
fn check(config: &AgentConfig) -> Result<SocketAddr> {
    if config.workers > MAX_WORKERS {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "workers is {}, at most {MAX_WORKERS} make sense",
            config.workers
        );
    }
    if config.max_publications > MAX_PUBLICATIONS {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "max_publications is {}, at most {MAX_PUBLICATIONS}",
            config.max_publications
        );
    }
    if config.data_connections > MAX_WORKERS {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "data_connections is {}, at most {MAX_WORKERS}: each needs a worker",
            config.data_connections
        );
    }
    if let Some(unknown) = config
        .transports
        .iter()
        .find(|t| !TRANSPORTS.contains(&t.as_str()))
    {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "transport {unknown:?} is not known; known are {}",
            TRANSPORTS.join(", ")
        );
    }
    let environment = std::env::var_os("KVFERRY_TRANSPORTS").unwrap_or_default();
    let list = environment.to_string_lossy();
    if let Some(unknown) = list
        .split(',')
        .map(str::trim)
        .find(|t| !t.is_empty() && !TRANSPORTS.contains(t))
    {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the environment variable KVFERRY_TRANSPORTS names {unknown:?}; known are {}",
            TRANSPORTS.join(", ")
        );
    }
    if !TRANSPORTS.iter().any(|t| allowed(&config.transports, t)) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "no transport is left: the configuration names {:?} (none = all), the environment \
             variable KVFERRY_TRANSPORTS allows {list:?}",
            config.transports.join(",")
        );
    }
    if let Some(control) = config.name.chars().find(|c| c.is_control()) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "name {:?} has the control character {control:?}: it appears in log lines",
            config.name
        );
    }
    let times = &config.timeouts;
    if times.heartbeat >= times.peer_silence {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "heartbeat_ns ({:?}) is not below peer_silence_ns ({:?}): a peer with nothing to do \
             would be taken for lost; give a third of it or less",
            times.heartbeat,
            times.peer_silence
        );
    }
    check_affinity(&config.affinity)?;
    let listen = match config.listen.as_str() {
        "" => "127.0.0.1:0",
        given => given,
    };
    let address = resolve("listen", listen)?;
    if !address.ip().is_loopback() && config.auth_key.is_none() && !config.allow_unauthenticated {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "listening on {address} lets other hosts connect: give a pre-shared key (auth_key, or the \
             environment variable {KEY_FILE}), or set allow_unauthenticated, which opens the agent to \
             everybody who can connect"
        );
    }
    // Known before anything is made.
    announced(config, address)?;
    Ok(address)
}

fn resolve(what: &str, text: &str) -> Result<SocketAddr> {
    let mut addresses = text.to_socket_addrs().map_err(|e| {
        err!(
            KVF_ERR_INVALID_ARGUMENT,
            "{what} {text:?}: {e}; give host:port, with port 0 for any"
        )
    })?;
    addresses
        .next()
        .ok_or_else(|| err!(KVF_ERR_INVALID_ARGUMENT, "{what} {text:?} names no address"))
}

/// The address that goes into the metadata: one that others can connect to.
fn announced(config: &AgentConfig, listening: SocketAddr) -> Result<SocketAddr> {
    let mut address = match config.advertise.as_str() {
        "" => listening,
        given => resolve("advertise", given)?,
    };
    if address.port() == 0 {
        address.set_port(listening.port());
    }
    let local = match address.ip() {
        IpAddr::V4(_) => false,
        // Its zone means something on this host only.
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    if address.ip().is_unspecified() || address.ip().is_multicast() || local {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "peers cannot connect to {}: set advertise to an address of this host that they reach, as \
             host:port, or host:0 for the port that is listened on",
            address.ip()
        );
    }
    Ok(address)
}
