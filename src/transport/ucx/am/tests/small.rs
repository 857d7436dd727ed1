//! Small jobs, asked for before anybody waits for them.

use super::*;

impl Two {
    fn small() -> Self {
        let two = Self::new();
        two.served.small.store(true, Ordering::SeqCst);
        two
    }

    fn one_block(&mut self) -> Arc<ReadJob> {
        let pools = BTreeMap::from([(1, Arc::new(register(1, &mut self.ours)))]);
        let lease = self.served.lease;
        Arc::new(ReadJob::new(block(2), pools, lease, DataOpen::default))
    }

    /// One block, asked for.
    pub(super) fn asked(&mut self, path: &MessagePath) -> Arc<ReadJob> {
        let job = self.one_block();
        assert!(!path.run_at_once(&job).unwrap());
        assert!(path.may_be_joined(&job));
        job
    }

    /// Pulls the block to somewhere else: its answer comes behind all that the source was asked for before.
    fn outruns_nothing(&mut self, path: &MessagePath) {
        let elsewhere = vec![0xee; 2 * Cache::BYTES as usize];
        let ours = std::mem::replace(&mut self.ours, elsewhere);
        path.run(&self.asked(path)).unwrap();
        assert!(self.has_the_block());
        self.ours = ours;
    }

    fn is_untouched(&self) -> bool {
        self.ours.iter().all(|byte| *byte == 0xee)
    }

    fn has_the_block(&self) -> bool {
        self.ours[..BLOCK] == filled(2, BLOCK) && self.ours[BLOCK..].iter().all(|b| *b == 0xee)
    }
}

#[test]
fn a_waiting_thread_takes_a_small_job() {
    if ucx("a_waiting_thread").is_none() {
        return;
    }
    let mut two = Two::small();
    let path = two.good_path();
    let job = two.asked(&path);
    assert!(path.run_until(&job, Instant::now() + LONG).unwrap());
    assert_eq!(job.moved(), BLOCK as u64);
    assert!(path.attest(&job).unwrap());
    assert!(!path.may_be_joined(&job));
    drop(job);
    assert!(two.has_the_block());
    // A job that nobody has asked for is a worker's.
    let job = two.one_block();
    assert!(!path.run_until(&job, Instant::now() + LONG).unwrap());
    path.run(&job).unwrap();
    assert_eq!(job.moved(), BLOCK as u64);
    drop((job, path));
    two.end();
}

#[test]
fn a_large_job_is_not_asked_for_by_who_begins_it() {
    if ucx("a_large_job").is_none() {
        return;
    }
    let mut two = Two::new();
    let path = two.good_path();
    let job = two.job();
    assert!(!path.run_at_once(&job).unwrap());
    assert!(!path.may_be_joined(&job));
    path.run(&job).unwrap();
    assert_eq!((job.moved(), two.served.heard("open")), (Cache::MOVED, 1));
    drop((job, path));
    two.end();
}

#[test]
fn what_a_waiting_thread_gives_up_a_worker_takes_without_asking_again() {
    if ucx("what_a_waiting_thread").is_none() {
        return;
    }
    let mut two = Two::small();
    let path = two.good_path();
    let served = two.served.clone();
    let held_up = served.gate.lock().unwrap();
    let job = two.asked(&path);
    for _ in 0..3 {
        let until = Instant::now() + Duration::from_millis(2);
        assert!(!path.run_until(&job, until).unwrap());
        assert!(Instant::now() >= until);
        assert_eq!(job.moved(), 0);
    }
    drop(held_up);
    path.run(&job).unwrap();
    assert_eq!((job.moved(), served.heard("open")), (BLOCK as u64, 1));
    drop(job);
    assert!(two.has_the_block());
    drop(path);
    two.end();
}

#[test]
fn an_answer_that_nobody_takes_writes_nothing() {
    if ucx("an_answer_that_nobody_takes").is_none() {
        return;
    }
    let mut two = Two::small();
    let path = two.good_path();
    let served = two.served.clone();
    // Before the answer comes, and after it has come.
    for before in [true, false] {
        let held_up = served.gate.lock().unwrap();
        let job = two.asked(&path);
        if before {
            job.cancel();
            drop(job);
            drop(held_up);
            two.outruns_nothing(&path);
        } else {
            drop(held_up);
            two.outruns_nothing(&path);
            assert_eq!(job.moved(), 0);
            assert!(path.may_be_joined(&job));
        }
        assert!(two.is_untouched(), "{before}");
    }
    drop(path);
    two.end();
}

#[test]
fn a_cancel_wakes_who_waits_for_a_small_job() {
    if ucx("a_cancel_wakes").is_none() {
        return;
    }
    let mut two = Two::small();
    let path = two.good_path();
    let served = two.served.clone();
    let held_up = served.gate.lock().unwrap();
    let job = two.asked(&path);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| path.run_until(&job, Instant::now() + LONG));
        job.cancel();
        assert!(waiting.join().unwrap().unwrap());
    });
    assert!(begun.elapsed() < LONG);
    assert_eq!(job.moved(), 0);
    drop((job, held_up));
    two.outruns_nothing(&path);
    assert!(two.is_untouched());
    drop(path);
    two.end();
}

#[test]
fn a_refusal_or_the_end_of_the_source_is_told_to_who_waits() {
    if ucx("a_refusal_or_the_end").is_none() {
        return;
    }
    let mut two = Two::small();
    let path = two.good_path();
    let served = two.served.clone();
    served.refuse.store(true, Ordering::SeqCst);
    let job = two.asked(&path);
    let e = path.run_until(&job, Instant::now() + LONG).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_EXPIRED);
    assert!(e.text.contains("agent source after 0 of 4096"), "{e}");
    served.refuse.store(false, Ordering::SeqCst);
    let held_up = served.gate.lock().unwrap();
    let job = two.asked(&path);
    let address = two.source.address().to_vec();
    let shared = two.here.connect("agent source".into(), address, Vec::new());
    two.here.close_endpoint(shared.unwrap().0);
    let e = path.run_until(&job, Instant::now() + LONG).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
    assert!(e.text.contains("agent source"), "{e}");
    // One that is begun now cannot ask: a worker hears why.
    let job = two.one_block();
    assert!(!path.run_at_once(&job).unwrap());
    assert!(!path.may_be_joined(&job));
    assert_eq!(path.run(&job).unwrap_err().status, Status::KVF_ERR_TRANSFER);
    drop((job, held_up, path));
    assert!(two.is_untouched());
    two.end();
}

/// What one path was asked for is gone on with by it, and by no other.
#[test]
fn what_another_connection_was_asked_for_is_asked_for_anew() {
    if ucx("what_another_connection").is_none() {
        return;
    }
    let mut two = Two::small();
    let path: Arc<dyn DataPath> = Arc::new(two.good_path());
    let served = two.served.clone();
    for (asked_by_another, times) in [(false, 1), (true, 2)] {
        let opened = served.heard("open");
        let held_up = served.gate.lock().unwrap();
        let job = two.one_block();
        {
            let earlier: Arc<dyn DataPath> = match asked_by_another {
                true => Arc::new(two.good_path()),
                false => path.clone(),
            };
            assert!(!earlier.run_at_once(&job).unwrap());
            job.begun_by(&earlier);
            served.wait_heard("open", opened + 1);
            job.goes_to(&path); // the last word of an earlier one may never come
        }
        drop(held_up);
        path.run(&job).unwrap();
        assert_eq!(job.moved(), BLOCK as u64);
        assert_eq!(served.heard("open"), opened + times);
    }
    assert!(two.has_the_block());
    drop(path);
    two.end();
}

#[test]
fn a_connection_that_the_source_has_ended_is_not_asked() {
    if ucx("a_connection_that_the_source_has_ended").is_none() {
        return;
    }
    let mut two = Two::small();
    let path = two.good_path();
    path.ask(vec![0xff; 8]).unwrap(); // nonsense
    let deadline = soon();
    while path.is_usable() {
        assert!(Instant::now() < deadline, "it is not ended");
        std::thread::yield_now();
    }
    let job = two.one_block();
    assert!(!path.run_at_once(&job).unwrap());
    assert!(!path.may_be_joined(&job));
    let e = run_for_a_while(&path, &job).unwrap_err();
    assert_eq!(e.status, Status::KVF_ERR_TRANSFER);
    assert!(
        e.text.contains("the source has ended the connection"),
        "{e}"
    );
    drop((job, path));
    two.end();
}
