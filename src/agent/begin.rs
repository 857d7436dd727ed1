//! The caller's part of an import: check everything, bind slots, mark them; copy right away what
//! is small. A bad argument fails here and changes nothing.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use super::api::{
    EventKind, ImportDesc, ImportGroup, ImportState, Outcome, PartInfo, PartKind, PartState,
    TransferInfo,
};
use super::cells::{Cell, Observer};
use super::control::Command;
use super::copying::{Run, run_inline};
use super::count::saved_bytes;
use super::gates::Gated;
use super::metadata::incarnation;
use super::notices::Finished;
use super::peers::{PeerShared, Route};
use super::reader::{NewImport, NewJob};
use super::serving::data_open;
use super::shared::{Shared, State, remember};
use super::slots::{GroupSlots, held_slots};
use super::ticket::{decode_ticket, entry_of, key};
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::{Epoch, PublicationId};
use crate::layout::{GroupKind, Layout};
use crate::memory::Lease;
use crate::observe::metrics::Operation;
use crate::observe::{Times, fault};
use crate::plan::{Binding, Pair, Request};
use crate::session::End;
use crate::transport::ReadJob;
use crate::wire;

/// Imports up to this size are given to a worker by the call that begins them: for larger ones the
/// way over the control thread is nothing, and the source hears of the reader first.
const EARLY_BYTES: u64 = 256 << 10;

/// What an import wants, checked against our layout.
#[derive(Clone, Debug)]
pub(super) struct Wants {
    pub groups: Vec<ImportGroup>,
    pub states: Vec<ImportState>,
    pub prefix_tag: u64,
}

/// What an import's handle, the workers and the control thread share.
#[derive(Debug)]
pub(super) struct ImportCell {
    pub cell: Cell,
    /// Group, kind, whether anything is wanted.
    pub parts: Vec<(u32, PartKind, bool)>,
    /// Bytes of each part, over all sources that are bound.
    pub part_bytes: Mutex<Vec<u64>>,
    pub jobs: Mutex<Vec<Arc<ReadJob>>>,
    /// Bytes that the jobs before [`Self::settle`] have moved.
    pub settled: AtomicU64,
    /// For each part: bytes of it were given to a data path.
    pub submitted: Mutex<Vec<bool>>,
    pub transport: Mutex<&'static str>,
    pub aux: Mutex<Vec<u8>>,
    pub slots: Vec<GroupSlots>,
    pub pools: Vec<u32>,
    pub times: Arc<Times>,
    pub elapsed_ns: AtomicU64,
    /// Import or receive, for the metrics.
    pub kind: Operation,
    /// From whom, and how many bytes, a prefix saved; not set if none.
    pub saved: OnceLock<(String, u64)>,
    /// See [`Self::decide`].
    pub decider: OnceLock<Decider>,
}

/// Who gives an import its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decider {
    /// The control thread, by its session machine.
    Control,
    /// The worker whose copy was the whole import, and was attested.
    Worker,
}

impl ImportCell {
    /// A job of these parts goes to a data path.
    pub fn submit(&self, parts: &[usize], transport: &'static str) {
        let mut submitted = super::lock(&self.submitted);
        for part in parts {
            submitted[*part] = true;
        }
        *super::lock(&self.transport) = transport;
    }

    /// The first to ask decides: true for it, then and later.
    pub fn decide(&self, who: Decider) -> bool {
        *self.decider.get_or_init(|| who) == who
    }

    /// The slots may be written by others again; before that is said to anybody.
    pub fn free_slots(&self, shared: &Shared) {
        shared.lock().slots.end_write(self.cell.id, &self.slots);
    }

    /// Counts, logs and tells the outcome; `safe`: also that the slots may be reused.
    pub fn report(&self, shared: &Shared, end: End, safe: bool) {
        self.ended_now();
        shared.count_import(self, &end);
        shared.log.debug(format_args!(
            "import {} of {} ended: {:?} {}",
            self.cell.id, self.cell.key, end.status, end.text
        ));
        if safe {
            self.cell.end_safe(end);
        } else {
            self.cell.end(end);
        }
    }

    /// Lets go of the jobs, and with them of the pools: nothing is copied any more.
    pub fn settle(&self) {
        let mut jobs = super::lock(&self.jobs);
        for job in jobs.drain(..) {
            self.settled.fetch_add(job.moved(), Ordering::Relaxed);
        }
    }

    pub fn ended_now(&self) {
        let ns = self.times.elapsed().as_nanos().max(1) as u64;
        let _ = self
            .elapsed_ns
            .compare_exchange(0, ns, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Fills in what an import adds to its outcome.
    pub fn describe(&self, info: &mut TransferInfo) {
        let submitted = super::lock(&self.submitted);
        info.submitted = submitted.iter().filter(|s| **s).count() as u32;
        drop(submitted);
        info.elapsed_ns = self.elapsed_ns.load(Ordering::Relaxed);
        info.first_byte_ns = self.times.first_ns();
        info.last_byte_ns = self.times.last_ns();
        info.transport = *super::lock(&self.transport);
        let bytes = super::lock(&self.part_bytes).clone();
        info.bytes_total = bytes.iter().sum();
        info.bytes = match info.outcome {
            Outcome::Done => info.bytes_total,
            _ => {
                let jobs = super::lock(&self.jobs);
                let moved = jobs.iter().map(|j| j.moved()).sum::<u64>();
                moved + self.settled.load(Ordering::Relaxed)
            }
        };
        // What a part moves is known once its sources are; that it moves nothing, before.
        let state = |wanted: bool, bytes: u64| match info.outcome {
            _ if !wanted => PartState::NotNeeded,
            Outcome::Pending => PartState::InProgress,
            Outcome::Done if bytes == 0 => PartState::NotNeeded,
            Outcome::Done => PartState::Done,
            _ => PartState::Failed,
        };
        let cause = |state| match state {
            PartState::Failed => info.cause,
            _ => Status::KVF_OK,
        };
        let parts = self.parts.iter().zip(bytes);
        info.parts = parts
            .map(|((group, kind, wanted), bytes)| PartInfo {
                group: *group,
                kind: *kind,
                state: state(*wanted, bytes),
                cause: cause(state(*wanted, bytes)),
                bytes,
            })
            .collect();
    }
}

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
    let slots = written_slots(&wants, &layout)?;
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
        ([job], [route], true) => start_early(&cell, job, route),
        _ => None,
    };
    shared.send(Command::Import(Box::new(NewImport {
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
    })));
    if let Some((run, parts)) = early {
        // After the message: the control thread knows the import before it hears of its end.
        run.submit(shared, &parts, desc.priority);
    }
    Ok(cell)
}

/// A small import from one source that has all it needs does not wait for the control thread.
fn start_early(
    cell: &Arc<ImportCell>,
    new: &mut NewJob,
    route: &Arc<Route>,
) -> Option<(Run, Vec<usize>)> {
    let job = new.job.clone()?;
    let path = route.get()?.ok()?;
    if new.gated || new.parts.is_empty() || job.bytes() > EARLY_BYTES || !path.is_usable() {
        return None;
    }
    new.started = true;
    let run = Run::new(cell, 0, true, job, path, route.clone());
    Some((run, new.parts.clone()))
}

pub(super) fn wants_nothing(wants: &Wants) -> bool {
    wants.states.is_empty()
        && wants.groups.iter().all(|g| g.skip_token >= g.token_end)
        && !fault::deviates("submit_empty")
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
    // An answer that is still on its way is waited for by a worker, as part of the whole import.
    if ready.len() > 1 && ready.iter().any(|(path, ..)| path.has_to_ask()) {
        return false;
    }
    let mut end = End::ok();
    for (path, job, parts, src) in ready {
        cell.submit(parts, path.name());
        let (times, peer) = (&*cell.times, &peer.routes[src].name);
        let queued = times.copying();
        match run_inline(&*path, &job, times, peer) {
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
        state.slots.end_write(cell.cell.id, &cell.slots);
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

pub(super) fn groups_of(wants: &Wants) -> Vec<u32> {
    let groups = wants.groups.iter().map(|g| g.group);
    groups.chain(wants.states.iter().map(|s| s.group)).collect()
}

/// Group, kind and whether anything is wanted of each part.
pub(super) fn parts_of(wants: &Wants) -> Vec<(u32, PartKind, bool)> {
    let groups = wants
        .groups
        .iter()
        .map(|g| (g.group, PartKind::Paged, g.skip_token < g.token_end));
    let states = wants
        .states
        .iter()
        .map(|s| (s.group, PartKind::State, true));
    groups.chain(states).collect()
}

/// The parts that a source's bindings move bytes of; a part with nothing to move is not submitted.
pub(super) fn parts_moved(pair: &Pair, wants: &Wants, bindings: &[(usize, Binding)]) -> Vec<usize> {
    if fault::deviates("submit_empty") {
        let groups = groups_of(wants).into_iter().enumerate();
        return groups
            .filter(|(_, group)| pair.moves(*group as usize))
            .map(|(part, _)| part)
            .collect();
    }
    let moving = bindings.iter().filter(|(_, binding)| binding.bytes() > 0);
    moving.map(|(part, _)| *part).collect()
}

pub(super) fn add_part_bytes(part_bytes: &mut [u64], bindings: &[(usize, Binding)]) {
    for (part, binding) in bindings {
        part_bytes[*part] += binding.bytes();
    }
}

/// Both sides' prefix tags, if both are set.
pub(super) fn check_prefix(ours: u64, ticket: &wire::Ticket) -> Result<()> {
    if ours != 0 && ticket.prefix_tag != 0 && ours != ticket.prefix_tag {
        bail!(
            KVF_ERR_PREFIX_MISMATCH,
            "{}: the prefix tag is {ours:#x} here and {:#x} at the source: the cached prefix is another one",
            key(ticket.key),
            ticket.prefix_tag
        );
    }
    Ok(())
}

/// Checks groups against our layout, and that none is named twice.
pub(super) fn check_wants(wants: &Wants, layout: &Layout, state: &State) -> Result<()> {
    let mut seen = Vec::new();
    let mut check = |group: u32, paged: bool| {
        let Some(held) = layout.groups.get(group as usize) else {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {group} of a layout with {} groups",
                layout.groups.len()
            );
        };
        if matches!(held.kind, GroupKind::Paged { .. }) != paged {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "group {group} is {}: give it as one",
                if paged {
                    "a state group"
                } else {
                    "a paged group"
                }
            );
        }
        if seen.contains(&group) {
            bail!(KVF_ERR_DUPLICATE, "group {group} is given twice");
        }
        seen.push(group);
        Ok(held.layers.is_empty())
    };
    for want in &wants.groups {
        check_skip(want)?;
        if !check(want.group, true)? {
            state.slots.check_table(want.group, &want.slots)?;
        }
    }
    for want in &wants.states {
        if !check(want.group, false)? {
            state.slots.check(want.group, i64::from(want.slot))?;
        }
    }
    Ok(())
}

/// Replaces "all that were published" by the number.
pub(super) fn resolve_ends(wants: &mut Wants, ticket: &wire::Ticket) -> Result<()> {
    for want in &mut wants.groups {
        let published = ticket
            .entries
            .iter()
            .flat_map(|e| &e.groups)
            .find(|g| g.group == want.group);
        let Some(published) = published else {
            if want.token_end == u64::MAX {
                bail!(
                    KVF_ERR_NOT_FOUND,
                    "{}: group {} is not in the ticket",
                    key(ticket.key),
                    want.group
                );
            }
            continue;
        };
        if want.token_end == u64::MAX {
            want.token_end = published.token_end;
            check_skip(want)?;
        }
    }
    Ok(())
}

/// Skipping all tokens is fine, skipping more is a mistake in somebody's table. Also where this
/// rank has nothing to move: all ranks refuse alike.
fn check_skip(want: &ImportGroup) -> Result<()> {
    if want.skip_token > want.token_end {
        bail!(
            KVF_ERR_OUT_OF_RANGE,
            "group {}: cannot skip {} of {} tokens",
            want.group,
            want.skip_token,
            want.token_end
        );
    }
    Ok(())
}

/// Our slots that will be written.
pub(super) fn written_slots(wants: &Wants, layout: &Layout) -> Result<Vec<GroupSlots>> {
    let mut all = Vec::new();
    for want in &wants.groups {
        let Some(group) = layout.groups.get(want.group as usize) else {
            continue;
        };
        if group.layers.is_empty() {
            continue;
        }
        // The entries whose blocks have a token of [skip_token, token_end).
        let per_block = u64::from(group.tokens_per_slot().max(1));
        let before = group.ordinals.owned_below(want.first_ordinal);
        let entry = |ordinal| {
            let at = group.ordinals.owned_below(ordinal).saturating_sub(before);
            usize::try_from(at).map_or(want.slots.len(), |at| at.min(want.slots.len()))
        };
        let written = match want.skip_token < want.token_end {
            true => entry(want.skip_token / per_block)..entry(want.token_end.div_ceil(per_block)),
            false => 0..0,
        };
        all.push((want.group, held_slots(&want.slots[written])));
    }
    for want in &wants.states {
        let held = layout.groups.get(want.group as usize);
        if held.is_some_and(|g| !g.layers.is_empty()) {
            all.push((want.group, vec![want.slot as u32]));
        }
    }
    Ok(all)
}

pub(super) fn check_owned_only(
    owned: &[(u32, i32)],
    written: &[GroupSlots],
    state: &State,
) -> Result<()> {
    for (group, slot) in owned {
        state
            .slots
            .check(*group, i64::from(*slot))
            .map_err(|e| e.context("owned_only_slots"))?;
        let hit = written
            .iter()
            .any(|(g, slots)| g == group && slots.contains(&(*slot as u32)));
        if hit {
            bail!(
                KVF_ERR_DUPLICATE,
                "slot {slot} of group {group} is both owned-only and a destination"
            );
        }
    }
    Ok(())
}

/// The copies from one source rank: (part, binding).
pub(super) fn bind(
    pair: &Arc<Pair>,
    wants: &Wants,
    entry: &wire::TicketEntry,
) -> Result<Vec<(usize, Binding)>> {
    let mut bindings = Vec::new();
    for (part, want) in wants.groups.iter().enumerate() {
        if !pair.moves(want.group as usize) || want.skip_token >= want.token_end {
            continue;
        }
        let Some(published) = entry.groups.iter().find(|g| g.group == want.group) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "group {} was not published by source rank {}",
                want.group,
                entry.rank
            );
        };
        let first = pair.needed_from(want.group as usize, want.skip_token, want.token_end);
        if first < published.token_begin || want.token_end > published.token_end {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "group {}: tokens {}..{} are wanted, source rank {} published {}..{}",
                want.group,
                first,
                want.token_end,
                entry.rank,
                published.token_begin,
                published.token_end
            );
        }
        let binding = Binding::new(
            pair,
            Request {
                group: want.group as usize,
                src_slots: &wire::unpack_slots(&published.slots)?,
                dst_slots: &want.slots,
                src_first_ordinal: published.first_ordinal,
                dst_first_ordinal: want.first_ordinal,
                skip_token: want.skip_token,
                token_end: want.token_end,
            },
        );
        bindings.push((part, binding?));
    }
    for (i, want) in wants.states.iter().enumerate() {
        if !pair.moves(want.group as usize) {
            continue;
        }
        let Some(published) = entry.states.iter().find(|s| s.group == want.group) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "the state of group {} was not published by source rank {}",
                want.group,
                entry.rank
            );
        };
        if want.as_of_token != u64::MAX && want.as_of_token != published.as_of_token {
            bail!(
                KVF_ERR_INCOMPATIBLE,
                "the state of group {} is the one after token {} at source rank {}, {} is wanted",
                want.group,
                published.as_of_token,
                entry.rank,
                want.as_of_token
            );
        }
        let binding = Binding::new(
            pair,
            Request {
                group: want.group as usize,
                src_slots: &[published.slot],
                dst_slots: &[want.slot],
                src_first_ordinal: 0,
                dst_first_ordinal: 0,
                skip_token: 0,
                token_end: published.as_of_token,
            },
        );
        let part = wants.groups.len() + i;
        bindings.push((part, binding?));
    }
    Ok(bindings)
}
