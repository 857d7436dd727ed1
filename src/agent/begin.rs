//! The caller's part of an import: check everything, bind slots, mark them; copy right away what
//! is small. A bad argument fails here and changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::api::{EventKind, ImportDesc};
use super::cells::{Cell, Observer};
use super::control::Command;
use super::copying::{Run, run_inline};
use super::count::saved_bytes;
use super::gates::Gated;
use super::import_cell::ImportCell;
use super::metadata::incarnation;
use super::notices::Finished;
use super::peers::{PeerShared, Route};
use super::reader::{NewImport, NewJob};
use super::serving::data_open;
use super::shared::{Shared, State, remember};
use super::ticket::{decode_ticket, entry_of, key};
use super::wants::{
    Wants, add_part_bytes, bind, check_owned_only, check_prefix, check_wants, groups_of,
    parts_moved, parts_of, resolve_ends, wants_nothing, written_slots,
};
use crate::bail;
use crate::error::Result;
use crate::ids::{Epoch, PublicationId};
use crate::memory::Lease;
use crate::observe::Times;
use crate::observe::metrics::Operation;
use crate::plan::Pair;
use crate::session::End;
use crate::transport::ReadJob;
use crate::wire;

/// Begins an import.
pub(super) fn import(
    shared: &Arc<Shared>,
    peer: &Arc<PeerShared>,
    desc: ImportDesc,
    observer: Option<Observer>,
) -> Result<Arc<ImportCell>> {
    shared.check_open()?;
    let id = shared.new_id();
    let gate = shared.gate(desc.stream, Gated::Import(id))?;
    let ticket = decode_ticket(desc.ticket)?;
    let engine = peer.engine.id();
    if ticket.engine != engine.0 {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "the ticket of {} is from engine {:?}, the peer is engine {engine:?} ({}): add that engine as a peer",
            key(ticket.key),
            incarnation(&ticket.engine).unwrap_or_default(),
            peer.routes
                .first()
                .map(|r| r.name.as_str())
                .unwrap_or_default()
        );
    }
    check_prefix(desc.prefix_tag, &ticket)?;
    let mut state = shared.lock();
    let own = state.engine()?;
    let pairs: Vec<Arc<Pair>> = peer
        .inward()?
        .sources_of(own.index, ticket.dp_rank)?
        .cloned()
        .collect();
    let layout = own.info.ranks[own.index].layout.clone();
    let mut wants = Wants {
        groups: desc.groups,
        states: desc.states,
        prefix_tag: desc.prefix_tag,
    };
    check_wants(&wants, &layout, &state)?;
    resolve_ends(&mut wants, &ticket)?;
    let wants = Arc::new(wants);
    let slots: Arc<[_]> = written_slots(&wants, &layout)?.into();
    check_owned_only(&desc.owned_only, &slots, &state)?;

    // Bind what the ticket tells; other source ranks are asked by the control thread.
    let mut bound = Vec::new();
    for pair in &pairs {
        let rank = &peer.engine.ranks[pair.src];
        bound.push(match entry_of(&ticket, rank.incarnation) {
            Some(entry) => Some((bind(pair, &wants, entry)?, entry)),
            None => None,
        });
    }
    let groups = groups_of(&wants);
    let pools = state.pools_of(groups.iter().copied());
    // Nothing is changed before here; each step undoes itself.
    state.use_pools(&pools)?;
    if let Err(e) = state.slots.begin_write(id, key(ticket.key), &slots) {
        state.leave_pools(&pools);
        return Err(e);
    }
    let pool_map = pool_map(&state, &pools);
    drop(state);

    let lease = Duration::from_nanos(ticket.lease_ns).max(Duration::from_millis(100));
    let deadline = match desc.deadline {
        Duration::ZERO => shared.config.timeouts.transfer,
        given => given,
    };
    let parts = parts_of(&wants);
    let mut part_bytes = vec![0; parts.len()];
    let mut jobs = Vec::new();
    for (pair, bound) in pairs.iter().zip(bound) {
        let source = peer.engine.ranks[pair.src].incarnation;
        let mut job = NewJob {
            pair: pair.clone(),
            id: PublicationId {
                source,
                key: key(ticket.key),
                epoch: Epoch(0),
            },
            job: None,
            parts: Vec::new(),
            gated: false,
            started: false,
        };
        if let Some((bindings, entry)) = bound {
            job.id.epoch = Epoch(entry.epoch);
            job.gated = entry.gated;
            add_part_bytes(&mut part_bytes, &bindings);
            job.parts = parts_moved(pair, &wants, &bindings);
            let bindings = bindings.into_iter().map(|(_, b)| b).collect();
            job.job = Some(Arc::new(ReadJob::new(
                bindings,
                pool_map.clone(),
                lease_of(entry),
                data_open(wants.clone(), key(ticket.key), entry.epoch),
            )));
        }
        jobs.push(job);
    }
    let saved = OnceLock::new();
    match saved_bytes(&wants, &layout, &ticket) {
        0 => {}
        bytes => {
            let peer = peer.routes.first().map(|route| route.name.clone());
            let _ = saved.set((peer.unwrap_or_default(), bytes)); // new, so it was not set
        }
    }
    let cell = Arc::new(ImportCell {
        cell: Cell::new(
            id,
            key(ticket.key),
            desc.user_data,
            EventKind::TransferEnded,
            shared.events.clone(),
            observer,
        ),
        part_bytes: Mutex::new(part_bytes),
        jobs: Mutex::new(jobs.iter().filter_map(|j| j.job.clone()).collect()),
        settled: AtomicU64::new(0),
        submitted: Mutex::new(vec![false; parts.len()]),
        parts,
        transport: Mutex::new(""),
        aux: Mutex::new(ticket.aux),
        slots,
        pools,
        times: Arc::new(Times::begin()),
        elapsed_ns: AtomicU64::new(0),
        kind: Operation::Import,
        saved,
        decider: OnceLock::new(),
        runs: Mutex::default(),
    });
    if wants_nothing(&wants) {
        end_empty(shared, &cell, &jobs);
        return Ok(cell);
    }
    if gate.is_none() && run_small(shared, peer, &cell, &jobs) {
        return Ok(cell);
    }
    remember(&mut shared.lock().running, &cell);
    let routes: Vec<Arc<Route>> = pairs.iter().map(|p| peer.routes[p.src].clone()).collect();
    let early = match (&mut jobs[..], &routes[..], gate.is_none()) {
        ([job], [route], true) => early_run(job, route, desc.priority),
        _ => None,
    };
    let import = Command::Import(Box::new(NewImport {
        cell: cell.clone(),
        routes,
        jobs,
        wants,
        pools: pool_map,
        deadline: shared.now().saturating_add(deadline),
        lease,
        priority: desc.priority,
        offer: None,
        sender: None,
        gate,
    }));
    match early {
        Some((run, parts)) => run.submit_early(shared, &cell, &parts, || shared.send(import)),
        None => shared.send(import),
    }
    Ok(cell)
}

/// An import from one source that has all it needs does not wait for the control thread.
fn early_run(new: &mut NewJob, route: &Arc<Route>, priority: i32) -> Option<(Run, Vec<usize>)> {
    let job = new.job.clone()?;
    let path = route.get()?.ok()?;
    if new.gated || new.parts.is_empty() || !path.is_usable() || path.needs_claim() {
        return None;
    }
    new.started = true;
    let run = Run::new(0, true, priority, job, path, route.clone());
    Some((run, new.parts.clone()))
}

/// Ends an import inside its begin call if nothing has to be moved, or little and everything is
/// ready for it. True: it has ended.
fn run_small(
    shared: &Arc<Shared>,
    peer: &PeerShared,
    cell: &Arc<ImportCell>,
    jobs: &[NewJob],
) -> bool {
    let mut ready = Vec::new();
    let mut bytes = 0;
    for new in jobs {
        let Some(job) = &new.job else { return false };
        if new.parts.is_empty() {
            continue;
        }
        if new.gated {
            return false;
        }
        bytes += job.bytes();
        let Some(Ok(path)) = peer.routes[new.pair.src].get() else {
            return false;
        };
        if bytes > path.inline_bytes() {
            return false;
        }
        ready.push((path, job.clone(), &new.parts, new.pair.src));
    }
    // An answer that is still on its way is waited for as part of the whole import.
    if ready.len() > 1 && ready.iter().any(|(path, ..)| path.has_to_ask()) {
        return false;
    }
    let mut end = End::ok();
    for (path, job, parts, src) in ready {
        cell.submit(parts, path.name());
        let (times, peer) = (&*cell.times, &peer.routes[src].name);
        let queued = times.copying();
        match run_inline(&path, &job, times, peer) {
            Some(ended) => end = ended,
            None => return false,
        }
        shared.count_read(peer, &*path, &job, times, queued, &end);
        if !end.is_ok() {
            break;
        }
    }
    end_here(shared, cell, jobs, end);
    true
}

/// Ends an import that the control thread has never seen.
fn end_here(shared: &Arc<Shared>, cell: &Arc<ImportCell>, jobs: &[NewJob], end: End) {
    let told = jobs.iter().map(|new| Finished {
        id: new.id,
        status: end.status,
        bytes: new.job.as_ref().map_or(0, |job| job.moved()),
        lease: shared.config.timeouts.lease,
    });
    let told: Vec<Finished> = told.collect();
    cell.ended_now();
    shared.count_import(cell, &end);
    cell.settle();
    let idle = {
        let mut state = shared.lock();
        state.slots.end_write(cell.cell.id);
        state.leave_pools(&cell.pools)
    };
    cell.cell.end_safe(end);
    shared.send(Command::Tell(told));
    if idle {
        shared.send(Command::Idle);
    }
}

/// An import of nothing: complete at once, and every source is told.
pub(super) fn end_empty(shared: &Arc<Shared>, cell: &Arc<ImportCell>, jobs: &[NewJob]) {
    end_here(shared, cell, jobs, End::ok());
}

pub(super) fn lease_of(entry: &wire::TicketEntry) -> Lease {
    Lease {
        index: entry.lease_index,
        generation: entry.lease_generation,
    }
}

pub(super) fn pool_map(state: &State, pools: &[u32]) -> BTreeMap<u32, Arc<crate::memory::Pool>> {
    let pool = |id: &u32| Some((*id, state.pools.get(*id)?.pool.clone()));
    pools.iter().filter_map(pool).collect()
}
