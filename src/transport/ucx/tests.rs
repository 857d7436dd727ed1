//! What needs a UCX on this machine.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::*;
use crate::bail;
use crate::error::Result;
use crate::transport::span::tests::{Cache, filled, register};

/// UCX, or a loud line why the test was skipped.
pub fn ucx(test: &str) -> Option<&'static Library> {
    match Library::get() {
        Ok(ucx) => Some(ucx),
        Err(e) => {
            let line = format!("NOT TESTED, NO UCX HERE: transport::ucx {test}: {e}");
            println!("{line}");
            if let Some(path) = std::env::var_os("KVFERRY_SKIP_FILE") {
                use std::io::Write;
                let mut options = std::fs::OpenOptions::new();
                let file = options.append(true).create(true).open(path);
                writeln!(file.unwrap(), "{line}").unwrap();
            }
            None
        }
    }
}

extern "C" fn handler(_: libc::c_int) {}

#[test]
fn signal_handlers_of_the_process_stay_as_they_are() {
    let signals = [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGILL,
        libc::SIGFPE,
        libc::SIGTERM,
        libc::SIGHUP,
        libc::SIGUSR1,
        libc::SIGCHLD,
    ];
    let action = |signal, new: Option<&libc::sigaction>| {
        let new = new.map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: both are valid actions or null; the handler does nothing.
        unsafe {
            let mut old: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(signal, new, &raw mut old), 0);
            old
        }
    };
    // SAFETY: all zero is a valid action.
    let mut ours: libc::sigaction = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
    ours.sa_flags = libc::SA_RESTART;
    // Other tests' engines put back what they have found: not while it is changed here.
    let set_up = || library::SETTING_UP.lock().unwrap();
    let before: Vec<_> = {
        let _set_up = set_up();
        signals.iter().map(|s| action(*s, Some(&ours))).collect()
    };
    let opened =
        ucx("signal_handlers").map(|ucx| (ucx, ucx.context(ucx_sys::UCP_FEATURE_AM, &[]).unwrap()));
    let after: Vec<_> = {
        let _set_up = set_up();
        let restored = signals.iter().zip(&before);
        restored.map(|(s, old)| action(*s, Some(old))).collect()
    };
    let Some((ucx, context)) = opened else { return };
    // SAFETY: made above and not used any more.
    unsafe { ucx.ucp_cleanup(context) };
    for (signal, now) in signals.iter().zip(&after) {
        assert_eq!(now.sa_sigaction, ours.sa_sigaction, "signal {signal}");
        assert_eq!(
            now.sa_flags & libc::SA_RESTART,
            libc::SA_RESTART,
            "signal {signal}"
        );
    }
}

/// Lets nobody in.
pub struct Nobody;

impl Accept for Nobody {
    fn admits(&self, _: &[u8; 16]) -> Result<String> {
        bail!(KVF_ERR_AUTH, "nobody is let in");
    }

    fn accept(&self, _: &Arc<Connection>) -> Result<()> {
        bail!(KVF_ERR_AUTH, "nobody is let in");
    }

    fn dropped(&self, _: &'static str) {}
}

fn config(name: &str, gets: bool) -> Config {
    Config {
        name: name.into(),
        affinity: Vec::new(),
        gets,
        software: true,
        cuda: None,
        lanes: "^mm",
        loopback: true,
        spin: Duration::ZERO,
        patience: Duration::from_secs(20),
    }
}

pub fn engine(name: &str, gets: bool, accept: Box<dyn Accept>) -> Arc<Engine> {
    Engine::start(config(name, gets), accept, || {}).unwrap()
}

/// With gets, over TCP alone, where the source's thread answers them.
pub fn engine_over_tcp(name: &str) -> Arc<Engine> {
    let lanes = "tcp";
    let config = Config {
        lanes,
        ..config(name, true)
    };
    Engine::start(config, Box::new(Nobody), || {}).unwrap()
}

/// An engine whose answers all come too late: nobody waits for them, and its thread is held up until the sender
/// is dropped.
pub fn late_engine(name: &str) -> (Arc<Engine>, Sender<()>) {
    let mut engine = engine(name, true, Box::new(Nobody));
    let mut memory = filled(1, 4096);
    let pool = Arc::new(register(1, &mut memory));
    engine.register_pool(&pool).unwrap();
    let ((held, is_held), (let_go, wait)) = (channel(), channel());
    engine.unregister_pool(1, move || {
        held.send(()).unwrap();
        let _ = wait.recv(); // its end
    });
    is_held.recv_timeout(Duration::from_secs(20)).unwrap();
    Arc::get_mut(&mut engine).unwrap().patience = Duration::ZERO;
    (engine, let_go)
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn an_ended_engine_answers_with_errors() {
    if ucx("an_ended_engine").is_none() {
        return;
    }
    let engine = engine("kvf-end-ucx", true, Box::new(Nobody));
    let mut memory = filled(2, Cache::BYTES as usize);
    let pool = Arc::new(register(2, &mut memory));
    assert!(engine.close(soon()));
    assert!(engine.has_ended());
    let e = engine.register_pool(&pool).unwrap_err();
    assert!(e.text.contains("shut down"), "{e}");
    let (send, receive) = channel();
    engine.end(Some(Box::new(move || send.send(()).unwrap())));
    receive.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn an_engine_that_starts_too_late_ends_at_once() {
    if ucx("an_engine_that_starts_too_late").is_none() {
        return;
    }
    let mut config = config("kvf-late-ucx", true);
    config.patience = Duration::ZERO;
    let (of_the_thread, ended) = channel::<()>();
    let e = Engine::start(config, Box::new(Nobody), move || {
        drop(of_the_thread.clone())
    });
    assert!(e.unwrap_err().text.contains("UCX did not start within 0ns"));
    let gone = ended.recv_timeout(Duration::from_secs(20)).unwrap_err();
    assert_eq!(gone, RecvTimeoutError::Disconnected);
}

#[test]
fn what_was_registered_too_late_is_had_by_who_asks_again() {
    if ucx("what_was_registered_too_late").is_none() {
        return;
    }
    let (mut engine, held_up) = late_engine("kvf-late-ucx");
    let mut memory = filled(2, Cache::BYTES as usize);
    let pool = Arc::new(register(2, &mut memory));
    let e = engine.register_pool(&pool).unwrap_err();
    assert_eq!(e.status, crate::error::Status::KVF_ERR_TRANSFER);
    assert!(
        e.text.contains("pool 2: ucx's thread did not answer"),
        "{e}"
    );
    assert!(engine.has_pool(2));
    drop(held_up);
    Arc::get_mut(&mut engine).unwrap().patience = Duration::from_secs(20);
    let key = engine.register_pool(&pool).unwrap();
    assert!(!key.is_empty());
    assert_eq!(engine.register_pool(&pool).unwrap(), key);
    let kept = Arc::downgrade(&pool);
    drop(pool);
    let (send, receive) = channel();
    let taken_back = !engine.unregister_pool(2, move || send.send(kept.strong_count()).unwrap());
    assert!(taken_back && !engine.has_pool(2));
    assert_eq!(receive.recv_timeout(Duration::from_secs(20)), Ok(0));
    assert!(engine.close(soon()));
}
