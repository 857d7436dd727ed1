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
use crate::cuda::Context;
use crate::error::{Result, Status};
use crate::memory::Pool;
use crate::observe::{fault, marks};
use crate::transport::DataPath;
use crate::transport::ucx::{
    self, Engine, MessagePath, MessageSource, Region, Source, SourcePool, UcxPath,
};
use crate::wire;
use crate::{bail, err};

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

/// Gets between agents of one host, in software: for tests, which have no card.
fn in_software() -> bool {
    fault::deviates("ucx_gets_in_software")
}

/// Whether the configuration or `KVFERRY_TRANSPORTS` names it, which forces it.
pub(super) fn is_named(shared: &Shared) -> bool {
    if in_software() {
        return false;
    }
    let in_list = |list: &str| list.split(',').any(|name| name.trim() == "ucx");
    allowed(&shared.config.transports, "ucx")
        && (shared.config.transports.iter().any(|name| name == "ucx")
            || std::env::var("KVFERRY_TRANSPORTS").is_ok_and(|list| in_list(&list)))
}

/// Whether to ask a source for its UCX address; it would have to load UCX for an answer.
pub(super) fn is_wanted(shared: &Shared, same_host: bool) -> bool {
    is_named(shared)
        || (allowed(&shared.config.transports, "ucx")
            && (!same_host && ucx::has_card() || in_software()))
}

/// Whether to ask a source for gets.
pub(super) fn wants_gets(shared: &Shared) -> bool {
    !is_named(shared) && (ucx::has_card() || in_software())
}

/// Why UCX may be used here, and whether a card serves gets.
fn chosen(shared: &Shared) -> Result<(&'static str, bool)> {
    if !allowed(&shared.config.transports, "ucx") {
        bail!(KVF_ERR_UNSUPPORTED, "not allowed by the configuration");
    }
    if is_named(shared) {
        return Ok(("forced by the configuration", false));
    }
    if in_software() {
        return Ok(("in software, for a test", true));
    }
    ucx::hardware_rma()?;
    Ok(("hardware RMA", true))
}

/// The context of all device pools, and UCX's lanes for an engine with gets.
fn device_and_lanes(shared: &Shared) -> (Option<Context>, &'static str) {
    let contexts = shared.contexts();
    let context = match contexts.as_slice() {
        [one] => Some(*one),
        // UCX's calls for one device cannot be told from those for another on its one thread.
        _ => None,
    };
    let lanes = match context {
        Some(_) if in_software() => "tcp,cuda_copy",
        None if in_software() => "tcp",
        // A host without UCX's module for CUDA is left alone.
        Some(_) if ucx::knows_cuda().is_ok_and(|knows| knows) => ucx::DEVICE_LANES,
        _ => "ib",
    };
    (context, lanes)
}

/// The agent's engine; not on the control thread, since loading UCX takes its time.
fn engine(shared: &Arc<Shared>, gets: bool) -> Result<Arc<Engine>> {
    let _making = lock(&shared.ucx.making);
    if let Some(engine) = &lock(&shared.ucx.state).engine
        && !engine.has_ended()
    {
        return Ok(engine.clone());
    }
    // With a card it opens no sockets. Shared memory is `shm`'s, whose peers' deaths and files
    // kvferry looks after itself.
    let (cuda, lanes) = match gets {
        true => device_and_lanes(shared),
        false => (None, "^mm"),
    };
    let config = ucx::Config {
        name: format!("{}-ucx", super::setup::thread_name(&shared.config.name)),
        affinity: shared.config.affinity.clone(),
        gets,
        software: in_software(),
        cuda,
        lanes,
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

/// What a reader that wants to use UCX is told.
pub(super) fn announce(shared: &Arc<Shared>, request: &wire::MemoryRequest) -> wire::UcxMemory {
    announced(shared, request).unwrap_or_else(|e| wire::UcxMemory {
        refused: e.text,
        ..Default::default()
    })
}

fn announced(shared: &Arc<Shared>, request: &wire::MemoryRequest) -> Result<wire::UcxMemory> {
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
    if !request.ucx_gets || !engine.has_gets() {
        return Ok(memory);
    }
    let ready = match pools.iter().any(|pool| pool.is_device()) {
        true if !request.ucx_device_gets => Err(err!(
            KVF_ERR_UNSUPPORTED,
            "the reader's kvferry is too old for it"
        )),
        true => own_devices(shared, &engine),
        false => Ok(()),
    };
    if let Err(e) = ready {
        memory.no_gets = e.text;
        return Ok(memory);
    }
    for pool in pools {
        // Not while it is taken back, nor the other way round.
        if let Some(_open) = pool.enter() {
            memory.keys.push(wire::UcxKey {
                pool: pool.id(),
                key: engine.register_pool(&pool)?,
                address: match pool.is_device() {
                    true => pool.base().expose_provenance() as u64,
                    false => 0,
                },
            });
        }
    }
    memory.lease_key = engine.register_leases(&shared.leases)?;
    Ok(memory)
}

/// Registers the agent's own device pools, so that gets reach them.
///
/// # Errors
/// Why not.
fn own_devices(shared: &Shared, engine: &Engine) -> Result<()> {
    let contexts = shared.contexts();
    if contexts.len() > 1 {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "device pools of {} CUDA contexts",
            contexts.len()
        );
    }
    let (context, _) = engine.device()?;
    if contexts.first() != Some(&context) {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "the device pools are in another CUDA context than those that UCX was started with"
        );
    }
    // All of them now: a pool that does not fit what the device lets cards see shall not fail a transfer, and UCX
    // may change the context's flags, which is not for a time when streams wait for transfers.
    let pools: Vec<Arc<Pool>> = {
        let state = shared.lock();
        let pools = state.layout_pools().map(|e| e.pool.clone());
        pools.filter(|pool| pool.is_device()).collect()
    };
    for pool in pools {
        if let Some(_open) = pool.enter() {
            engine.register_device_pool(&pool)?;
        }
    }
    Ok(())
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
    let from_devices = announced.keys.iter().any(|key| key.address != 0);
    let mut no_gets = match announced.no_gets.as_str() {
        "" => String::new(),
        why => format!("the source: {why}"),
    };
    if gets && !shared.contexts().is_empty() {
        no_gets = own_devices(shared, &engine).map_or_else(|e| e.text, |()| String::new());
    }
    if gets && no_gets.is_empty() && from_devices {
        no_gets = engine
            .reads_devices()
            .map_or_else(|e| e.text, |()| String::new());
    }
    let reason = |how: &str| {
        let mut reason = format!("{how}; the source's is {}; {why}", announced.version);
        if !refused.is_empty() {
            reason.push_str(&format!("; not {}", refused.join("; not ")));
        }
        reason
    };
    let (name, patience) = (
        format!("agent {}", source.name),
        shared.config.timeouts.connect,
    );
    if gets && no_gets.is_empty() {
        let devices = from_devices || !shared.contexts().is_empty();
        let source = gets_source(name.clone(), announced, memory, nonce);
        let how = match devices {
            true => "gets, of device memory too",
            false => "gets",
        };
        match UcxPath::new(engine.clone(), source, reason(how), patience) {
            Ok(path) => return Ok(Arc::new(path)),
            // What was tried says only that gets do not do.
            Err(e) if e.status == Status::KVF_ERR_PEER_LOST || engine.has_ended() => return Err(e),
            Err(e) => no_gets = e.text,
        }
    }
    let devices = from_devices || !shared.contexts().is_empty();
    let how = match no_gets.as_str() {
        "" => "messages".to_owned(),
        why if devices => format!("messages, through pinned memory for device pools: {why}"),
        why => format!("messages: {why}"),
    };
    let source = MessageSource {
        name,
        address: announced.address.clone(),
        token: incarnation(&memory.token)?.0,
        pools: memory.pools.iter().map(|p| (p.id, p.bytes)).collect(),
        nonce,
    };
    let devices = shared.devices.clone();
    let path = MessagePath::new(engine, source, reason(&how), patience, devices)?;
    Ok(Arc::new(path))
}

/// A source that gave keys.
fn gets_source(
    name: String,
    announced: &wire::UcxMemory,
    memory: &wire::Memory,
    nonce: [u8; 16],
) -> Source {
    let keys = announced
        .keys
        .iter()
        .map(|key| (Region::Pool(key.pool), key.key.clone()));
    let on_device = announced.keys.iter().filter(|key| key.address != 0);
    let on_device: BTreeMap<u32, u64> = on_device.map(|key| (key.pool, key.address)).collect();
    let pools = memory.pools.iter().map(|pool| {
        let device = on_device.get(&pool.id);
        let place = SourcePool {
            address: device.copied().unwrap_or(pool.address),
            bytes: pool.bytes,
            on_device: device.is_some(),
        };
        (pool.id, place)
    });
    Source {
        name,
        address: announced.address.clone(),
        pools: pools.collect(),
        keys: keys
            .chain([(Region::Leases, announced.lease_key.clone())])
            .collect(),
        leases: (memory.lease_address, memory.lease_bytes),
        nonce,
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::transport::ucx::tests::{late_engine, ucx};

    #[test]
    fn a_pool_that_is_registered_too_late_is_not_free_before_it_is_taken_back() {
        if ucx("a_pool_that_is_registered_too_late").is_none() {
            return;
        }
        for a_reader_was_lost in [false, true] {
            let (engine, held_up) = late_engine("kvf-late-ucx");
            let own = Ucx::default();
            lock(&own.state).engine = Some(engine.clone());
            if a_reader_was_lost {
                own.suspect();
            }
            let mut memory = vec![0_u8; 8192];
            // SAFETY: the memory lives until the pool is idle.
            let pool = unsafe { Pool::register(2, memory.as_mut_ptr(), memory.len() as u64) };
            let pool = Arc::new(pool.unwrap());
            let e = engine.register_pool(&pool).unwrap_err();
            assert!(e.text.contains("did not answer"), "{e}");

            // UCX has not even begun; what it was asked keeps the pool.
            let kept = Arc::downgrade(&pool);
            drop(pool);
            let (idle, is_idle) = channel();
            let at_idle = kept.clone();
            assert!(!own.release(2, move || idle.send(at_idle.strong_count()).unwrap()));
            assert!(!own.release(2, || unreachable!("the first call's is called")));
            assert_eq!((kept.strong_count(), is_idle.try_recv().ok()), (1, None));
            drop(held_up);
            assert_eq!(is_idle.recv_timeout(Duration::from_secs(20)), Ok(0));
            assert!(own.release(2, || unreachable!("it is free")));
            assert!(engine.has_ended() == a_reader_was_lost);
        }
    }
}
