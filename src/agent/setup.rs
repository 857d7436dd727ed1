//! Making an agent: configuration, sockets, threads.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

use super::api::AgentConfig;
use super::control::{Command, Control, Inputs};
use super::link::{listen_unix, unix_name};
use super::log::{Log, LogSink};
use super::shared::{Shared, random, register};
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::memory::LeaseTable;
use crate::observe::marks;
use crate::runtime::{EventQueue, Thread, Workers, check_affinity, spawn};
use crate::{bail, err};

const DEFAULT_WORKERS: u32 = 2;
const MAX_WORKERS: u32 = 256;
const DEFAULT_PUBLICATIONS: u32 = 65_536;
const MAX_PUBLICATIONS: u32 = 1 << 24;
const TRANSPORTS: [&str; 6] = ["inproc", "shm", "unix", "tcp", "ucx", "cuda_ipc"];

pub(super) fn start(
    config: AgentConfig,
    log: Option<(u32, LogSink)>,
) -> Result<(Arc<Shared>, Thread)> {
    let address = check(&config)?;
    marks::watch_forks()?;
    let incarnation = Incarnation(random()?);
    let publications = match config.max_publications {
        0 => DEFAULT_PUBLICATIONS,
        given => given,
    };
    let leases = Arc::new(LeaseTable::create(publications)?);
    let tcp = std::net::TcpListener::bind(address)
        .and_then(|l| l.set_nonblocking(true).map(|()| l))
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, format!("listen on {address}"), &e))?;
    let address = tcp
        .local_addr()
        .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "listen", &e))?;
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
    if let Ok(list) = std::env::var("KVFERRY_TRANSPORTS")
        && let Some(unknown) = list
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
    check_affinity(&config.affinity)?;
    let listen = match config.listen.as_str() {
        "" => "127.0.0.1:0",
        given => given,
    };
    let mut addresses = listen
        .to_socket_addrs()
        .map_err(|e| err!(KVF_ERR_INVALID_ARGUMENT, "listen {listen:?}: {e}"))?;
    let Some(address) = addresses.next() else {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "listen {listen:?} names no address"
        );
    };
    if !address.ip().is_loopback() {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "listening on {address}: only loopback addresses are served until connections can be authenticated"
        );
    }
    Ok(address)
}
