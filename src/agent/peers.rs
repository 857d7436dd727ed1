//! A remote engine as a caller's handle sees it, and the routes to its agents.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::api::PeerInfo;
use super::metadata::{EngineInfo, RankInfo};
use crate::bail;
use crate::error::{Error, Status};
use crate::ids::Incarnation;
use crate::plan::Plan;
use crate::transport::DataPath;

/// Whether and how one remote agent's memory can be read. Shared by all handles to its engine.
pub(super) struct Route {
    pub incarnation: Incarnation,
    pub name: String,
    state: Mutex<RouteState>,
    changed: Condvar,
}

#[derive(Default)]
struct RouteState {
    /// The way in, or why there is none for good; `None` = not known yet.
    outcome: Option<Result<Arc<dyn DataPath>, Error>>,
    /// Why the last attempt to connect failed, for people.
    trouble: String,
}

impl Route {
    pub fn new(incarnation: Incarnation, name: String) -> Self {
        Self {
            incarnation,
            name,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RouteState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The way in, or why there is none; `None` = still connecting.
    pub fn get(&self) -> Option<Result<Arc<dyn DataPath>, Error>> {
        self.lock().outcome.clone()
    }

    /// Changes it; `None` = connecting again. What was wrong before says nothing any more.
    pub fn set(&self, outcome: Option<Result<Arc<dyn DataPath>, Error>>) {
        let now = RouteState {
            outcome,
            trouble: String::new(),
        };
        let before = std::mem::replace(&mut *self.lock(), now);
        self.changed.notify_all();
        // Unmapping may take a while: not under the lock.
        drop(before);
    }

    /// An attempt to connect has failed, and others follow.
    pub fn attempt_failed(&self, why: &Error) {
        self.lock().trouble = why.text.clone();
    }

    /// What is said of it while it is not known.
    fn connecting(&self) -> String {
        match self.lock().trouble.as_str() {
            "" => "connecting".into(),
            why => format!("connecting; the last attempt failed: {why}"),
        }
    }

    /// The agent and how it is reached, for people.
    pub fn describe(&self) -> String {
        match self.get() {
            Some(Ok(path)) => format!("agent {} through {}", self.name, path.name()),
            Some(Err(e)) => format!("agent {}: {e}", self.name),
            None => format!("agent {}: {}", self.name, self.connecting()),
        }
    }

    /// Waits until it is known.
    fn wait(&self, deadline: Option<Instant>) -> Status {
        let mut state = self.lock();
        loop {
            match &state.outcome {
                Some(Ok(_)) => return Status::KVF_OK,
                Some(Err(e)) => return e.status,
                None => {}
            }
            let left = match deadline {
                Some(at) => at.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            if left.is_zero() {
                return Status::KVF_TIMED_OUT;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl std::fmt::Debug for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Route")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The routes that a new handle shares with others.
#[derive(Default)]
pub(super) struct Routes(BTreeMap<Incarnation, Used>);

/// A route, how many handles have it, and what they know of its agent's engine.
struct Used {
    route: Weak<Route>,
    handles: usize,
    engine: Weak<EngineInfo>,
}

impl Routes {
    /// The engine as other handles know it, which is the same: an agent's metadata never changes.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` naming the agent and what differs.
    pub fn known(&self, engine: EngineInfo) -> Result<Arc<EngineInfo>, Error> {
        let mut shared = None;
        for rank in &engine.ranks {
            let used = self.0.get(&rank.incarnation);
            let Some(known) = used.and_then(|used| used.engine.upgrade()) else {
                continue;
            };
            if let Some(what) = known.difference(&engine) {
                bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "agent {} ({:?}) is a rank of a peer that was added with other metadata: {what}; \
                     metadata of an agent never changes, so one of the two is damaged or forged",
                    rank.name,
                    rank.incarnation
                );
            }
            shared = Some(known);
        }
        Ok(shared.unwrap_or_else(|| Arc::new(engine)))
    }

    /// The route to an agent: the one that other handles use, unless that one is dead.
    pub fn take(&mut self, rank: &RankInfo, engine: &Arc<EngineInfo>) -> Arc<Route> {
        if let Some(used) = self.0.get_mut(&rank.incarnation)
            && let Some(route) = used.route.upgrade()
            && !matches!(route.get(), Some(Err(_)))
        {
            used.handles += 1;
            return route;
        }
        self.0.retain(|_, used| used.route.strong_count() > 0);
        let route = Arc::new(Route::new(rank.incarnation, rank.name.clone()));
        let used = Used {
            route: Arc::downgrade(&route),
            handles: 1,
            engine: Arc::downgrade(engine),
        };
        self.0.insert(rank.incarnation, used);
        route
    }

    /// A handle is removed. After the last one nobody is given the route any more, although the
    /// control thread has yet to end it: who adds the peer again must not be ended with it.
    pub fn give_back(&mut self, route: &Arc<Route>) {
        if let Some(used) = self.0.get_mut(&route.incarnation)
            && std::ptr::eq(used.route.as_ptr(), Arc::as_ptr(route))
        {
            used.handles -= 1;
            if used.handles == 0 {
                self.0.remove(&route.incarnation);
            }
        }
    }
}

/// One `peer_add`.
#[derive(Debug)]
pub(super) struct PeerShared {
    pub id: u64,
    pub user_data: u64,
    pub engine: Arc<EngineInfo>,
    /// From that engine to ours, or why we cannot read from it.
    pub plan: Result<Arc<Plan>, Error>,
    /// One for each rank of the engine.
    pub routes: Vec<Arc<Route>>,
    /// Ranks that our rank reads from, ascending.
    pub needed: Vec<usize>,
    /// The caller has removed it.
    pub removed: AtomicBool,
}

impl PeerShared {
    /// The plan for reading from that engine.
    ///
    /// # Errors
    /// Why there is none: the two fit in the other direction only.
    pub fn inward(&self) -> Result<&Arc<Plan>, Error> {
        self.plan.as_ref().map_err(Clone::clone)
    }

    pub fn wait(&self, timeout: Duration) -> Status {
        let deadline = Instant::now().checked_add(timeout);
        for rank in &self.needed {
            match self.routes[*rank].wait(deadline) {
                Status::KVF_OK => {}
                other => return other,
            }
        }
        Status::KVF_OK
    }

    pub fn info(&self) -> PeerInfo {
        let mut info = PeerInfo {
            status: Status::KVF_OK,
            ranks: self.needed.len() as u32,
            ranks_ready: 0,
            transport: "",
            text: String::new(),
        };
        for rank in &self.needed {
            let route = &self.routes[*rank];
            let line = match route.get() {
                Some(Ok(path)) => {
                    info.ranks_ready += 1;
                    if info.transport.is_empty() {
                        info.transport = path.name();
                    }
                    format!("{}: {}", path.name(), path.reason())
                }
                Some(Err(e)) => {
                    info.status = e.status;
                    e.text
                }
                None => {
                    if info.status == Status::KVF_OK {
                        info.status = Status::KVF_IN_PROGRESS;
                    }
                    route.connecting()
                }
            };
            if !info.text.is_empty() {
                info.text.push_str("; ");
            }
            info.text
                .push_str(&format!("rank {rank} ({}): {line}", route.name));
        }
        info
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::err;
    use crate::memory::LeaseTable;
    use crate::transport::inproc::InprocPath;

    #[test]
    fn who_waits_for_a_peer_is_told_why_the_last_attempt_failed() {
        let route = Arc::new(Route::new(Incarnation([1; 16]), "there".into()));
        let peer = PeerShared {
            id: 1,
            user_data: 0,
            engine: Arc::new(EngineInfo { ranks: Vec::new() }),
            plan: Err(err!(KVF_ERR_STATE, "not needed")),
            routes: vec![route.clone()],
            needed: vec![0],
            removed: AtomicBool::new(false),
        };
        assert_eq!(peer.info().text, "rank 0 (there): connecting");
        route.attempt_failed(&err!(KVF_ERR_SYSTEM, "no more files"));
        let info = peer.info();
        assert_eq!(info.status, Status::KVF_IN_PROGRESS);
        assert_eq!(
            info.text,
            "rank 0 (there): connecting; the last attempt failed: no more files"
        );
    }

    #[test]
    fn a_way_that_is_made_takes_the_old_trouble_with_it() {
        let route = Route::new(Incarnation([1; 16]), "there".into());
        route.attempt_failed(&err!(KVF_ERR_SYSTEM, "no more files"));
        let leases = Arc::new(LeaseTable::create(1).unwrap());
        let nonce = leases.nonce();
        let path = InprocPath::new(BTreeMap::new(), leases, nonce).unwrap();
        route.set(Some(Ok(Arc::new(path))));
        assert_eq!(route.describe(), "agent there through inproc");
        // The transport has failed and another way is sought: that is no failed attempt.
        route.set(None);
        assert_eq!(route.describe(), "agent there: connecting");
    }
}
