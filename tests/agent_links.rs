//! Peers that cannot be reached, or whose links do not last: how often and how long they are tried,
//! and what is said of them in the end.
#![allow(missing_docs, clippy::unwrap_used)]

mod small_layout;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use kvferry::agent::*;
use kvferry::error::Status::{self, *};
use kvferry::ids::Incarnation;
use kvferry::wire::opening::Answerer;
use kvferry::wire::{self, Body, Frame};
use prost::Message;
use sha2::{Digest, Sha256};
use small_layout::small_layout;

const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(1500);
const KEY: [u8; 16] = [7; 16];

fn side(name: &str, listen: SocketAddr, peer_silence: Duration) -> Agent {
    agent(config(name, listen, peer_silence))
}

fn config(name: &str, listen: SocketAddr, peer_silence: Duration) -> AgentConfig {
    AgentConfig {
        name: name.into(),
        listen: listen.to_string(),
        auth_key: Some(AuthKey::new(KEY.into()).unwrap()),
        timeouts: Timeouts {
            peer_silence,
            heartbeat: Duration::from_millis(500),
            ..Timeouts::default()
        },
        ..AgentConfig::default()
    }
}

fn agent(config: AgentConfig) -> Agent {
    let agent = Agent::create(config, None).unwrap();
    let pool = agent.create_pool(4096, None, 0).unwrap();
    agent.set_layout(small_layout(pool, 64, 4)).unwrap();
    agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
    agent
}

fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Where the body of metadata begins.
fn body_of(metadata: &[u8]) -> usize {
    32 + u32::from_le_bytes(metadata[12..16].try_into().unwrap()) as usize
}

/// The address in an engine's metadata.
fn listens_at(metadata: &[u8]) -> SocketAddr {
    let engine = wire::EngineMetadata::decode(&metadata[body_of(metadata)..]).unwrap();
    engine.ranks[0].address.parse().unwrap()
}

/// An engine's metadata as if its one rank were on another host, at `address`.
fn elsewhere(metadata: &[u8], address: SocketAddr) -> (Vec<u8>, Incarnation) {
    let body = body_of(metadata);
    let mut engine = wire::EngineMetadata::decode(&metadata[body..]).unwrap();
    let rank = &mut engine.ranks[0];
    rank.host = "another host".into();
    rank.process = vec![9; 16];
    rank.address = address.to_string();
    let incarnation = Incarnation(rank.incarnation.clone().try_into().unwrap());
    let mut out = metadata[..body].to_vec();
    engine.encode(&mut out).unwrap();
    let total = out.len() as u32;
    out[8..12].copy_from_slice(&total.to_le_bytes());
    let digest = Sha256::digest(&out[32..]);
    out[16..32].copy_from_slice(&digest[..16]);
    (out, incarnation)
}

/// An address of this host that is not the loopback interface's.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    // Nothing is sent.
    socket.connect("198.51.100.1:9").ok()?;
    let own = socket.local_addr().unwrap().ip();
    if own.is_loopback() || own.is_unspecified() {
        return None;
    }
    Some(own)
}

fn no_address() {
    println!("SKIPPED: THIS HOST HAS NO ADDRESS BUT LOOPBACK, A REFUSAL ELSEWHERE IS NOT TESTED");
}

/// Serves every connection with `with`; counts them.
fn serve(
    listener: TcpListener,
    with: impl Fn(TcpStream) + Send + Sync + 'static,
) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            counted.fetch_add(1, Ordering::Relaxed);
            with(stream.unwrap());
        }
    });
    count
}

fn send(stream: &mut TcpStream, body: Body) -> Option<()> {
    let mut bytes = Vec::new();
    wire::encode(&Frame { body: Some(body) }, &mut bytes).unwrap();
    stream.write_all(&bytes).ok()
}

fn hear(stream: &mut TcpStream) -> Option<Body> {
    let mut head = [0; 4];
    stream.read_exact(&mut head).ok()?;
    let mut body = vec![0; u32::from_le_bytes(head) as usize];
    stream.read_exact(&mut body).ok()?;
    wire::decode(&body).unwrap().body
}

/// Does all of the handshake, then hangs up.
fn shake_hands(mut stream: TcpStream, own: Incarnation) -> Option<()> {
    let key = AuthKey::new(KEY.into()).unwrap();
    let mut answerer = Answerer::new(Some(key), own, [3; 32]);
    loop {
        let step = answerer.hears(hear(&mut stream)?).ok()?;
        send(&mut stream, step.send?)?;
        if step.open {
            break;
        }
    }
    assert!(matches!(hear(&mut stream)?, Body::Hello(_)));
    let welcome = wire::Welcome {
        protocol: wire::PROTOCOL,
        incarnation: own.0.to_vec(),
    };
    send(&mut stream, Body::Welcome(welcome))
}

/// Carries bytes between two sockets until one of them ends.
fn forward(from: TcpStream, to: SocketAddr) {
    let Ok(to) = TcpStream::connect(to) else {
        return;
    };
    for (mut a, mut b) in [
        (from.try_clone().unwrap(), to.try_clone().unwrap()),
        (to, from),
    ] {
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut a, &mut b);
            let _ = a.shutdown(std::net::Shutdown::Both);
            let _ = b.shutdown(std::net::Shutdown::Both);
        });
    }
}

/// What a peer came to, its text, and how long that took.
fn end_of(peer: &Peer) -> (Status, String, Duration) {
    let started = Instant::now();
    let status = peer.wait(LONG);
    (status, peer.info().text, started.elapsed())
}

#[test]
fn agents_that_are_connected_by_sockets_end_in_success_without_a_time_out() {
    for round in 0..5 {
        let source = side("source", loopback(), LONG);
        let sink = side("sink", loopback(), LONG);
        let metadata = source.engine_metadata().unwrap();
        let (metadata, _) = elsewhere(&metadata, listens_at(&metadata));
        let peer = sink.add_peer(&metadata, 0).unwrap();
        let (status, text, _) = end_of(&peer);
        assert_eq!(status, KVF_OK, "{text}");
        assert!(text.contains("tcp"), "{text}");
        assert_eq!(source.shutdown(Duration::ZERO), Ok(()), "{round}");
        assert_eq!(sink.shutdown(Duration::ZERO), Ok(()), "{round}");
    }
}

#[test]
fn metadata_that_contradicts_a_peers_is_refused_and_the_same_gives_another_handle() {
    let source = side("source", loopback(), LONG);
    let metadata = source.engine_metadata().unwrap();
    let address = listens_at(&metadata);
    let sink = side("sink", loopback(), LONG);
    let first = sink.add_peer(&metadata, 1).unwrap();
    let second = sink.add_peer(&metadata, 2).unwrap();
    assert_ne!(first.id(), second.id());
    for peer in [&first, &second] {
        assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
    }
    let other = SocketAddr::new(address.ip(), address.port() ^ 1);
    let (moved, incarnation) = elsewhere(&metadata, other);
    let err = sink.add_peer(&moved, 3).unwrap_err();
    assert_eq!(err.status, KVF_ERR_INVALID_ARGUMENT, "{err}");
    let text = format!(
        "agent source ({incarnation:?}) is a rank of a peer that was added with other metadata: \
         rank 0 is at address {address} and {other}"
    );
    assert!(err.text.starts_with(&text), "{err}");
    let err = sink
        .add_peer(&elsewhere(&metadata, address).0, 3)
        .unwrap_err();
    assert!(err.text.contains("on another host"), "{err}");
    // One of two handles keeps it, none does not.
    first.remove();
    drop(first);
    assert!(sink.add_peer(&moved, 3).is_err());
    assert_eq!(second.wait(LONG), KVF_OK, "{}", second.info().text);
    second.remove();
    drop(second);
    // A namesake is another agent.
    let namesake = side("source", loopback(), LONG);
    let peer = sink
        .add_peer(&namesake.engine_metadata().unwrap(), 4)
        .unwrap();
    assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
    drop(sink.add_peer(&moved, 3).unwrap());
}

#[test]
fn a_peer_without_a_way_is_tried_again_for_who_adds_it_again() {
    let source = side("source", loopback(), LONG);
    let metadata = source.engine_metadata().unwrap();
    let (metadata, _) = elsewhere(&metadata, listens_at(&metadata));
    let sink = agent(AgentConfig {
        transports: vec!["shm".into()],
        ..config("sink", loopback(), LONG)
    });
    let peers = [1, 2].map(|user_data| {
        let peer = sink.add_peer(&metadata, user_data).unwrap();
        let (status, text, _) = end_of(&peer);
        assert_eq!(status, KVF_ERR_UNSUPPORTED, "{user_data}: {text}");
        assert!(text.contains("no transport to agent source"), "{text}");
        peer
    });
    drop(peers);
}

#[test]
fn who_accepts_and_closes_at_once_is_given_up_after_the_silence() {
    let source = side("source", loopback(), SHORT);
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let (metadata, _) = elsewhere(&source.engine_metadata().unwrap(), address);
    let tried = serve(listener, drop);
    let sink = side("sink", loopback(), SHORT);
    let peer = sink.add_peer(&metadata, 0).unwrap();
    let (status, text, _) = end_of(&peer);
    assert_eq!(status, KVF_ERR_PEER_UNREACHABLE, "{text}");
    assert!(text.contains("source cannot be reached"), "{text}");
    assert!(text.contains("it failed"), "{text}");
    // 40, 80, ... ms between the attempts.
    let tried = tried.load(Ordering::Relaxed);
    assert!((2..=8).contains(&tried), "{tried} attempts");
}

#[test]
fn a_link_that_comes_up_and_breaks_at_once_is_no_sign_of_life() {
    let source = side("source", loopback(), SHORT);
    let listener = TcpListener::bind(loopback()).unwrap();
    let address = listener.local_addr().unwrap();
    let (metadata, incarnation) = elsewhere(&source.engine_metadata().unwrap(), address);
    let tried = serve(listener, move |stream| {
        shake_hands(stream, incarnation).unwrap();
    });
    let sink = side("sink", loopback(), SHORT);
    let peer = sink.add_peer(&metadata, 0).unwrap();
    let (status, text, _) = end_of(&peer);
    assert_eq!(status, KVF_ERR_PEER_LOST, "{text}");
    assert!(text.contains("source cannot be reached"), "{text}");
    assert!(text.contains("it failed"), "{text}");
    let tried = tried.load(Ordering::Relaxed);
    assert!((2..=8).contains(&tried), "{tried} attempts");
}

#[test]
fn nobody_listening_on_this_host_is_a_death_notice() {
    let source = side("source", loopback(), LONG);
    let nobody = TcpListener::bind(loopback()).unwrap();
    let address = nobody.local_addr().unwrap();
    drop(nobody);
    let (metadata, _) = elsewhere(&source.engine_metadata().unwrap(), address);
    let sink = side("sink", loopback(), 2 * LONG);
    let peer = sink.add_peer(&metadata, 0).unwrap();
    let (status, text, _) = end_of(&peer);
    assert_eq!(status, KVF_ERR_PEER_UNREACHABLE, "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn a_refusal_elsewhere_is_tried_again_until_the_silence() {
    let Some(own) = own_address() else {
        return no_address();
    };
    let source = side("source", loopback(), LONG);
    let nobody = TcpListener::bind((own, 0)).unwrap();
    let address = nobody.local_addr().unwrap();
    drop(nobody);
    let (metadata, _) = elsewhere(&source.engine_metadata().unwrap(), address);
    let sink = side("sink", loopback(), SHORT);
    let peer = sink.add_peer(&metadata, 0).unwrap();
    let until = Instant::now() + LONG;
    while !peer.info().text.contains("the last attempt failed") {
        assert!(Instant::now() < until, "{}", peer.info().text);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(peer.info().status, KVF_IN_PROGRESS);
    assert!(peer.info().text.contains("refused"), "{}", peer.info().text);
    let (status, text, _) = end_of(&peer);
    assert_eq!(status, KVF_ERR_PEER_UNREACHABLE, "{text}");
    assert!(
        text.contains("refused") && text.contains("it failed"),
        "{text}"
    );
}

#[test]
fn a_way_that_opens_late_is_found_and_its_end_is_told_at_once() {
    let Some(own) = own_address() else {
        return no_address();
    };
    let source = side("source", SocketAddr::new(own, 0), 3 * LONG);
    let behind = listens_at(&source.engine_metadata().unwrap());
    let gateway = TcpListener::bind((own, 0)).unwrap();
    let address = gateway.local_addr().unwrap();
    drop(gateway);
    let (metadata, _) = elsewhere(&source.engine_metadata().unwrap(), address);
    let sink = side("sink", loopback(), 3 * LONG);
    let peer = sink.add_peer(&metadata, 0).unwrap();
    let until = Instant::now() + LONG;
    while !peer.info().text.contains("the last attempt failed") {
        assert!(Instant::now() < until, "{}", peer.info().text);
        std::thread::sleep(Duration::from_millis(1));
    }
    // Now the gateway knows the way: one that can be closed with all that it carries.
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let gateway = TcpListener::bind(address).unwrap();
    gateway.set_nonblocking(true).unwrap();
    let carrier = std::thread::spawn(move || {
        let mut carried = Vec::new();
        while stopped.recv_timeout(Duration::from_millis(5)).is_err() {
            if let Ok((stream, _)) = gateway.accept() {
                stream.set_nonblocking(false).unwrap();
                carried.push(stream.try_clone().unwrap());
                forward(stream, behind);
            }
        }
        drop(gateway);
        for stream in carried {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    });
    let (status, text, _) = end_of(&peer);
    assert_eq!(status, KVF_OK, "{text}");
    assert!(text.contains("tcp"), "{text}");
    assert!(!text.contains("failed"), "old trouble: {text}");
    // The link breaks and is refused: the process it was met in is gone, far before the silence.
    stop.send(()).unwrap();
    carrier.join().unwrap();
    let until = Instant::now() + LONG;
    while peer.info().status == KVF_OK {
        assert!(Instant::now() < until, "{}", peer.info().text);
        std::thread::sleep(Duration::from_millis(1));
    }
    let info = peer.info();
    assert_eq!(info.status, KVF_ERR_PEER_LOST, "{}", info.text);
    assert!(info.text.contains("refused"), "{}", info.text);
}
