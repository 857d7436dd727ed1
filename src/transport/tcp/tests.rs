//! A reader against a source that cuts its answers anywhere.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::client::TcpPath;
use super::stream::Stream;
use super::{HEAD_BYTES, TRAILER_BYTES};
use crate::cuda::Devices;
use crate::error::{Result, Status};
use crate::memory::Lease;
use crate::plan::Batch;
use crate::transport::span::tests::{BLOCK, block, filled, register};
use crate::transport::{DataPath, ReadJob};

const LONG: Duration = Duration::from_secs(60);

/// Waits until everything that was written has been read.
fn wait_until_read(source: &UnixStream) {
    for _ in 0..20_000_000 {
        let mut left: libc::c_int = 0;
        // SAFETY: an integer that lives here.
        let done = unsafe { libc::ioctl(source.as_raw_fd(), libc::TIOCOUTQ, &raw mut left) };
        assert_eq!(done, 0);
        if left == 0 {
            return;
        }
        std::thread::yield_now();
    }
    panic!("nobody reads");
}

/// A path to a source at the other end of a socket, and a job that reads the block into `memory`.
fn reader(memory: &mut [u8]) -> (UnixStream, TcpPath, ReadJob) {
    let (ours, source) = UnixStream::pair().unwrap();
    let stream = Stream::new(OwnedFd::from(ours)).unwrap();
    let first = Mutex::new(Some(stream));
    let path = TcpPath::new(
        "unix",
        "for a test".into(),
        BTreeMap::from([(2, BLOCK as u64)]),
        1,
        Duration::ZERO,
        Arc::new(Devices::default()),
        Box::new(move |_| Ok(first.lock().unwrap().take().unwrap())),
    );
    let pool = Arc::new(register(1, memory));
    let lease = Lease {
        index: 0,
        generation: 1,
    };
    let pools = BTreeMap::from([(1, pool)]);
    let job = ReadJob::new(block(2), pools, lease, crate::wire::DataOpen::default);
    (source, path, job)
}

/// Pulls the block from a source that answers with `parts`, each once the one before was read; then what
/// the destination holds.
fn pull(parts: &[&[u8]]) -> (Result<()>, ReadJob, Vec<u8>) {
    let mut memory = vec![0xee; BLOCK];
    let (mut source, path, job) = reader(&mut memory);
    let outcome = std::thread::scope(|scope| {
        let reader = scope.spawn(|| path.run(&job));
        let mut asked = [0; 4096];
        assert!(source.read(&mut asked).unwrap() > 0);
        for part in parts {
            source.write_all(part).unwrap();
            wait_until_read(&source);
        }
        drop(source);
        reader.join().unwrap()
    });
    (outcome, job, memory)
}

/// As [`reader`], when the begin call has asked and nothing has come.
fn asked(memory: &mut [u8]) -> (UnixStream, TcpPath, ReadJob) {
    let (mut source, path, job) = reader(memory);
    path.prove().unwrap();
    assert!(!path.run_at_once(&job).unwrap());
    assert!(source.read(&mut [0; 4096]).unwrap() > 0);
    assert!(path.may_be_joined(&job));
    (source, path, job)
}

fn head(status: i32, text: usize, bytes: u64) -> Vec<u8> {
    let mut head = status.to_le_bytes().to_vec();
    head.extend((text as u32).to_le_bytes());
    head.extend(bytes.to_le_bytes());
    assert_eq!(head.len(), HEAD_BYTES);
    head
}

fn answer(held: u32) -> Vec<u8> {
    let mut answer = head(0, 0, BLOCK as u64);
    answer.extend(filled(2, BLOCK));
    answer.extend(held.to_le_bytes());
    answer
}

#[test]
fn a_small_answer_may_be_cut_anywhere() {
    let (whole, data) = (answer(1), HEAD_BYTES + BLOCK);
    for at in [
        1,
        15,
        16,
        17,
        1000,
        data - 1,
        data,
        data + 1,
        data + 3,
        whole.len(),
    ] {
        let (first, rest) = whole.split_at(at);
        let parts: &[&[u8]] = if rest.is_empty() {
            &[first]
        } else {
            &[first, rest]
        };
        let (outcome, job, memory) = pull(parts);
        outcome.unwrap();
        assert_eq!(
            (job.moved(), job.lease_lost()),
            (BLOCK as u64, false),
            "cut at {at}"
        );
        assert!(memory == filled(2, BLOCK), "cut at {at}");
    }
    assert_eq!(whole.len(), data + TRAILER_BYTES);
}

#[test]
fn a_small_answer_without_its_lease_or_its_end_is_told() {
    let (outcome, job, _) = pull(&[&answer(0)]);
    outcome.unwrap();
    assert!(job.lease_lost());
    for end in [3, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + BLOCK + 1] {
        let (outcome, job, _) = pull(&[&answer(1)[..end]]);
        assert_eq!(
            outcome.unwrap_err().status,
            Status::KVF_ERR_TRANSFER,
            "{end}"
        );
        assert_eq!(job.moved(), 0);
    }
}

#[test]
fn a_refusal_is_read_whole_and_nothing_is_written() {
    let text = b"the source's lease has ended";
    let mut refusal = head(Status::KVF_ERR_EXPIRED as i32, text.len(), 0);
    refusal.extend(text);
    for at in [1, 16, 20, refusal.len() - 1] {
        let (first, rest) = refusal.split_at(at);
        let (outcome, _, memory) = pull(&[first, rest]);
        let e = outcome.unwrap_err();
        assert_eq!(e.status, Status::KVF_ERR_EXPIRED);
        assert_eq!(e.text, "the source refused: the source's lease has ended");
        assert!(memory.iter().all(|byte| *byte == 0xee));
    }
    for wrong in [head(0, 0, 1), head(-1, 1 << 20, 0)] {
        let (outcome, _, memory) = pull(&[&wrong]);
        assert_eq!(outcome.unwrap_err().status, Status::KVF_ERR_PROTOCOL);
        assert!(memory.iter().all(|byte| *byte == 0xee));
    }
}

#[test]
fn a_waiting_thread_takes_an_answer_that_is_there() {
    let mut memory = vec![0xee; BLOCK];
    let (mut source, path, job) = asked(&mut memory);
    source.write_all(&answer(1)).unwrap();
    assert!(path.run_until(&job, Instant::now() + LONG).unwrap());
    assert_eq!((job.moved(), job.lease_lost()), (BLOCK as u64, false));
    assert!(!path.may_be_joined(&job));
    drop(job);
    assert!(memory == filled(2, BLOCK));
}

/// However little has come when the waiting thread gives up: nothing was written, and a worker goes
/// on where it was.
#[test]
fn what_a_waiting_thread_gives_up_is_gone_on_with() {
    let whole = answer(1);
    for at in [0, 1, HEAD_BYTES, 1000, whole.len() - 1] {
        let mut memory = vec![0xee; BLOCK];
        let (mut source, path, job) = asked(&mut memory);
        let (first, rest) = whole.split_at(at);
        source.write_all(first).unwrap();
        for _ in 0..3 {
            let until = Instant::now() + Duration::from_millis(2);
            assert!(!path.run_until(&job, until).unwrap(), "cut at {at}");
            assert!(Instant::now() >= until);
            assert_eq!(job.moved(), 0);
        }
        source.write_all(rest).unwrap();
        path.run(&job).unwrap();
        assert_eq!((job.moved(), job.lease_lost()), (BLOCK as u64, false));
        drop(job);
        assert!(memory == filled(2, BLOCK), "cut at {at}");
    }
}

#[test]
fn a_cancel_wakes_a_waiting_thread() {
    let mut memory = vec![0xee; BLOCK];
    let (source, path, job) = asked(&mut memory);
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| path.run_until(&job, Instant::now() + LONG));
        job.cancel();
        assert!(waiting.join().unwrap().unwrap());
    });
    assert!(begun.elapsed() < LONG);
    assert_eq!(job.moved(), 0);
    drop((job, source));
    assert!(memory.iter().all(|byte| *byte == 0xee));
}

#[test]
fn a_source_that_goes_away_or_refuses_is_told_to_a_waiting_thread() {
    let mut refusal = head(Status::KVF_ERR_EXPIRED as i32, 4, 0);
    refusal.extend(b"over");
    for (said, expected) in [
        (&refusal[..], Status::KVF_ERR_EXPIRED),
        (&[][..], Status::KVF_ERR_TRANSFER),
        (&answer(1)[..HEAD_BYTES + 5], Status::KVF_ERR_TRANSFER),
    ] {
        let mut memory = vec![0xee; BLOCK];
        let (mut source, path, job) = asked(&mut memory);
        source.write_all(said).unwrap();
        drop(source);
        let outcome = path.run_until(&job, Instant::now() + LONG);
        assert_eq!(outcome.unwrap_err().status, expected);
        drop(job);
        assert!(memory.iter().all(|byte| *byte == 0xee));
    }
}

/// A way of another kind, which finds what is left to do in the job alone.
struct Other;

impl DataPath for Other {
    fn name(&self) -> &'static str {
        "other"
    }

    fn reason(&self) -> String {
        "a test".into()
    }

    fn run(&self, job: &ReadJob) -> Result<()> {
        let mut batch = Batch::new();
        while job.next(u64::MAX, &mut batch) {}
        job.add_moved(batch.iter().map(|pattern| pattern.bytes()).sum());
        Ok(())
    }

    fn attest(&self, _: &ReadJob) -> Result<bool> {
        Ok(true)
    }

    fn inline_bytes(&self) -> u64 {
        0
    }
}

#[test]
fn a_job_that_was_asked_for_on_one_way_starts_over_on_another() {
    let mut memory = vec![0xee; BLOCK];
    let (source, path, job) = asked(&mut memory);
    let (path, other): (Arc<dyn DataPath>, Arc<dyn DataPath>) = (Arc::new(path), Arc::new(Other));
    job.begun_by(&path);
    job.goes_to(&path);
    assert!(path.may_be_joined(&job));
    job.goes_to(&other);
    assert!(!path.may_be_joined(&job));
    other.run(&job).unwrap();
    assert_eq!(job.moved(), BLOCK as u64);
    drop((source, path));
}
