//! The agent's UCX: made when a peer first needs it, announced to readers, and taken down before
//! memory that a lost reader may still ask for can be freed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use super::control::Command;
use super::lock;
use super::metadata::{RankInfo, incarnation};
use super::paths::allowed;
use super::serving::OverUcx;
use super::shared::Shared;
use crate::bail;
use crate::error::Result;
use crate::memory::Pool;
use crate::observe::marks;
use crate::transport::DataPath;
use crate::transport::ucx::{self, Engine, MessagePath, MessageSource, Region, Source, UcxPath};
use crate::wire;

/// The engine, if one was needed.
#[derive(Default)]
pub(super) struct Ucx {
    state: Arc<Mutex<State>>,
    /// Held while an engine is made, which takes longer than `state` may be held.
    making: Mutex<()>,
}

#[derive(Default)]
struct State {
    engine: Option<Arc<Engine>>,
    /// A reader was lost, or gave up: its gets may still come.
    suspect: bool,
    /// Engines that are being taken down.
    ending: usize,
    /// Pools that are being unregistered.
    leaving: BTreeSet<u32>,
}

impl Ucx {
    /// A publication ended before all its readers said that they are done, or a reader said so
    /// before its memory was quiet.
    pub fn suspect(&self) {
        let mut state = lock(&self.state);
        state.suspect |= state.engine.is_some();
    }

    /// No peer reads the pool through UCX any more. False: it has to be taken back first, and `idle`
    /// is called then, of this or of an earlier call.
    ///
    /// Where UCX answers gets in software, one that comes late would read memory that may be gone,
    /// and its endpoints cannot be closed from this side; so all of UCX is taken down if one may come.
    pub fn release(&self, pool: u32, idle: impl FnOnce() + Send + 'static) -> bool {
        let mut state = lock(&self.state);
        if state.ending > 0 || state.leaving.contains(&pool) {
            return false;
        }
        let Some(engine) = state.engine.clone() else {
            return true;
        };
        if !engine.has_pool(pool) {
            return true;
        }
        let shared = self.state.clone();
        if state.suspect {
            state.engine = None;
            state.suspect = false;
            state.ending += 1;
            drop(state);
            engine.end(Some(Box::new(move || {
                lock(&shared).ending -= 1;
                idle();
            })));
        } else {
            state.leaving.insert(pool);
            drop(state);
            engine.unregister_pool(pool, move || {
                lock(&shared).leaving.remove(&pool);
                idle();
            });
        }
        false
    }

    /// Ends it and waits for its thread; false: it was left behind.
    pub fn close(&self, deadline: std::time::Instant) -> bool {
        let engine = lock(&self.state).engine.take();
        engine.is_none_or(|engine| engine.close(deadline))
    }
}

/// Whether the configuration or `KVFERRY_TRANSPORTS` names it, which forces it.
pub(super) fn is_named(shared: &Shared) -> bool {
    let in_list = |list: &str| list.split(',').any(|name| name.trim() == "ucx");
    allowed(&shared.config.transports, "ucx")
        && (shared.config.transports.iter().any(|name| name == "ucx")
            || std::env::var("KVFERRY_TRANSPORTS").is_ok_and(|list| in_list(&list)))
}

/// Whether to ask a source for its UCX address; it would have to load UCX for an answer.
pub(super) fn is_wanted(shared: &Shared, same_host: bool) -> bool {
    is_named(shared) || (allowed(&shared.config.transports, "ucx") && !same_host && ucx::has_card())
}

/// Whether to ask a source for gets.
pub(super) fn wants_gets(shared: &Shared) -> bool {
    !is_named(shared) && ucx::has_card()
}

/// Why UCX may be used here, and whether a card serves gets.
fn chosen(shared: &Shared) -> Result<(&'static str, bool)> {
    if !allowed(&shared.config.transports, "ucx") {
        bail!(KVF_ERR_UNSUPPORTED, "not allowed by the configuration");
    }
    if is_named(shared) {
        return Ok(("forced by the configuration", false));
    }
    ucx::hardware_rma()?;
    Ok(("hardware RMA", true))
}

/// The agent's engine; not on the control thread, since loading UCX takes its time.
fn engine(shared: &Arc<Shared>, gets: bool) -> Result<Arc<Engine>> {
    let _making = lock(&shared.ucx.making);
    if let Some(engine) = &lock(&shared.ucx.state).engine
        && !engine.has_ended()
    {
        return Ok(engine.clone());
    }
    let config = ucx::Config {
        name: format!("{}-ucx", super::setup::thread_name(&shared.config.name)),
        affinity: shared.config.affinity.clone(),
        gets,
        // With a card it opens no sockets. Shared memory is `shm`'s, whose peers' deaths and files
        // kvferry looks after itself.
        lanes: if gets { "ib" } else { "^mm" },
        loopback: shared.address.ip().is_loopback(),
        spin: shared.config.spin,
        patience: shared.config.timeouts.connect,
    };
    let commands = shared.commands.clone();
    let accept = Box::new(OverUcx(Arc::downgrade(shared)));
    let made = Engine::start(config, accept, move || {
        let _ = commands.send(Command::Panicked(marks::take_panic()));
    })?;
    lock(&shared.ucx.state).engine = Some(made.clone());
    Ok(made)
}

/// What a reader that wants to use UCX is told; `gets`: it could use gets.
pub(super) fn announce(shared: &Arc<Shared>, gets: bool) -> wire::UcxMemory {
    announced(shared, gets).unwrap_or_else(|e| wire::UcxMemory {
        refused: e.text,
        ..Default::default()
    })
}

fn announced(shared: &Arc<Shared>, gets: bool) -> Result<wire::UcxMemory> {
    let (_, card) = chosen(shared)?;
    let engine = engine(shared, card)?;
    let mut memory = wire::UcxMemory {
        version: engine.version().to_owned(),
        address: engine.address().to_vec(),
        ..Default::default()
    };
    let pools: Vec<Arc<Pool>> = {
        let state = shared.lock();
        state.layout_pools().map(|e| e.pool.clone()).collect()
    };
    // Nobody has measured gets of device memory; messages pass it through host buffers.
    if !gets || !engine.has_gets() || pools.iter().any(|pool| pool.is_device()) {
        return Ok(memory);
    }
    for pool in pools {
        // Not while it is taken back, nor the other way round.
        if let Some(_open) = pool.enter() {
            memory.keys.push(wire::UcxKey {
                pool: pool.id(),
                key: engine.register_pool(&pool)?,
            });
        }
    }
    memory.lease_key = engine.register_leases(&shared.leases)?;
    Ok(memory)
}

/// A way through UCX, proven by the nonce; `refused`: ways that were not taken, and why.
///
/// # Errors
/// Why it cannot be used; without the transport's name.
pub(super) fn path(
    shared: &Arc<Shared>,
    source: &RankInfo,
    memory: &wire::Memory,
    nonce: [u8; 16],
    refused: &[String],
) -> Result<Arc<dyn DataPath>> {
    let (why, card) = chosen(shared)?;
    let Some(announced) = &memory.ucx else {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "the source was not asked, since it is on this host; force it by naming ucx"
        );
    };
    if !announced.refused.is_empty() {
        bail!(KVF_ERR_UNSUPPORTED, "the source: {}", announced.refused);
    }
    let engine = engine(shared, card)?;
    let gets = engine.has_gets() && !announced.lease_key.is_empty();
    let gets = gets && shared.contexts().is_empty();
    let how = if gets { "gets" } else { "messages" };
    let mut reason = format!("{how}; the source's is {}; {why}", announced.version);
    if !refused.is_empty() {
        reason.push_str(&format!("; not {}", refused.join("; not ")));
    }
    let (name, patience) = (
        format!("agent {}", source.name),
        shared.config.timeouts.connect,
    );
    if !gets {
        let source = MessageSource {
            name,
            address: announced.address.clone(),
            token: incarnation(&memory.token)?.0,
            pools: memory.pools.iter().map(|p| (p.id, p.bytes)).collect(),
            nonce,
        };
        let devices = shared.devices.clone();
        let path = MessagePath::new(engine, source, reason, patience, devices)?;
        return Ok(Arc::new(path));
    }
    let keys = announced
        .keys
        .iter()
        .map(|key| (Region::Pool(key.pool), key.key.clone()));
    let source = Source {
        name,
        address: announced.address.clone(),
        keys: keys
            .chain([(Region::Leases, announced.lease_key.clone())])
            .collect(),
        pools: memory
            .pools
            .iter()
            .map(|pool| (pool.id, (pool.address, pool.bytes)))
            .collect::<BTreeMap<_, _>>(),
        leases: (memory.lease_address, memory.lease_bytes),
        nonce,
    };
    Ok(Arc::new(UcxPath::new(engine, source, reason, patience)?))
}
