//! The begin of every connection, before anything of it reaches the rest of the agent: frames of a
//! few hundred bytes, one at a time, between a socket and the machines of `wire::opening`.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;

use tokio::io::Interest;

use super::link::Socket;
use super::shared::{Shared, random};
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::transport::shm::fds::{try_recv, try_send};
use crate::transport::tcp::{Stream, Until};
use crate::wire::opening::{
    ANSWERER_FRAME, Answerer, CALLER_FRAME, Caller, Nonce, Opened, Purpose, Refusal,
};
use crate::wire::{self, AuthKey, Body, Frame};
use crate::{bail, err};

/// Connections that have not said yet who they are; one goes when there are more, so that a flood
/// of them takes neither descriptors nor a peer's turn.
pub(super) const MAX_STRANGERS: usize = 256;

/// A nonce from the kernel.
fn nonce() -> Result<Nonce> {
    let mut nonce = [0; 32];
    let (a, b) = nonce.split_at_mut(16);
    a.copy_from_slice(&random()?);
    b.copy_from_slice(&random()?);
    Ok(nonce)
}

/// How an attempt to open a connection failed.
pub(super) enum Failure {
    /// Told, or proven, once and for all.
    Final(Error),
    /// The connection broke: the next attempt may do better.
    Broken(Error),
}

/// What an agent says of itself when a connection begins.
#[derive(Clone)]
pub(super) struct Identity {
    pub incarnation: Incarnation,
    pub name: String,
    pub key: Option<AuthKey>,
}

impl Identity {
    pub fn of(shared: &Shared) -> Self {
        Self {
            incarnation: shared.incarnation,
            name: shared.config.name.clone(),
            key: shared.config.auth_key.clone(),
        }
    }

    fn caller(&self, purpose: Purpose, target: Incarnation) -> Result<(Caller, Body)> {
        let own = (self.incarnation, self.name.as_str());
        Ok(Caller::new(
            self.key.clone(),
            purpose,
            own,
            target,
            nonce()?,
        ))
    }
}

/// Opens a control link that this side has dialled.
pub(super) async fn call(
    own: &Identity,
    target: Incarnation,
    socket: &Socket,
) -> std::result::Result<(), Failure> {
    let broken = |e: io::Error| {
        Failure::Broken(Error::os(Status::KVF_ERR_PEER_UNREACHABLE, "handshake", &e))
    };
    let (mut caller, first) = own
        .caller(Purpose::Control, target)
        .map_err(Failure::Broken)?;
    send(socket, first).await.map_err(broken)?;
    loop {
        let body = receive(socket, ANSWERER_FRAME).await.map_err(broken)?;
        let step = body
            .map_err(stranger)
            .and_then(|body| caller.hears(body))
            .map_err(Failure::Final)?;
        if let Some(body) = step.send {
            send(socket, body).await.map_err(broken)?;
        }
        if step.open {
            return Ok(());
        }
    }
}

/// Answers a connection that somebody has made: who it is, or why not.
pub(super) async fn answer(
    own: &Identity,
    socket: &Socket,
) -> io::Result<std::result::Result<Opened, Refusal>> {
    let nonce = nonce().map_err(io::Error::other)?;
    let mut answerer = Answerer::new(own.key.clone(), own.incarnation, nonce);
    loop {
        let step = receive(socket, CALLER_FRAME)
            .await?
            .map_err(Refusal::malformed)
            .and_then(|body| answerer.hears(body));
        let step = match step {
            Ok(step) => step,
            Err(refusal) => {
                // The caller reads it if it can; it waits for nothing else.
                let _ = send(socket, refusal.answer()).await;
                return Ok(Err(refusal));
            }
        };
        if let Some(body) = step.send {
            send(socket, body).await?;
        }
        if step.open
            && let Some(opened) = answerer.opened()
        {
            return Ok(Ok(opened));
        }
    }
}

/// Opens a data connection, on a thread that may wait.
///
/// # Errors
/// The other side's refusal, or why there was no answer.
pub(super) fn call_blocking(
    own: &Identity,
    target: Incarnation,
    stream: &Stream,
    until: Until<'_>,
) -> Result<()> {
    let (mut caller, first) = own.caller(Purpose::Data, target)?;
    let mut send = Some(first);
    loop {
        if let Some(body) = send.take() {
            let mut bytes = Vec::new();
            wire::encode(&Frame { body: Some(body) }, &mut bytes)?;
            stream.send_all(&bytes, until)?;
        }
        let step = caller.hears(receive_blocking(stream, until)?)?;
        send = step.send;
        if step.open {
            return Ok(());
        }
    }
}

/// The answerer's next message, on a thread that may wait.
///
/// # Errors
/// Why there is none.
pub(super) fn receive_blocking(stream: &Stream, until: Until<'_>) -> Result<Body> {
    let mut head = [0; 4];
    stream.receive_exact(&mut head, until)?;
    let mut body = vec![0; length(head, ANSWERER_FRAME)?];
    stream.receive_exact(&mut body, until)?;
    known(&body)
}

fn stranger(e: Error) -> Error {
    let text = format!("somebody else answers there, who does not speak kvferry's protocol: {e}");
    Error::new(Status::KVF_ERR_PEER_LOST, text)
}

fn length(head: [u8; 4], limit: usize) -> Result<usize> {
    let len = u32::from_le_bytes(head) as usize;
    if len > limit {
        bail!(
            KVF_ERR_PROTOCOL,
            "a frame of {len} bytes at the begin of a connection, over the limit of {limit}"
        );
    }
    Ok(len)
}

fn known(body: &[u8]) -> Result<Body> {
    wire::decode(body)?.body.ok_or_else(|| {
        err!(
            KVF_ERR_PROTOCOL,
            "an unknown message at the begin of a connection"
        )
    })
}

async fn send(socket: &Socket, body: Body) -> io::Result<()> {
    let mut bytes = Vec::new();
    wire::encode(&Frame { body: Some(body) }, &mut bytes).map_err(io::Error::other)?;
    let mut sent = 0;
    while sent < bytes.len() {
        sent += socket
            .io(Interest::WRITABLE, || {
                try_send(socket.fd(), &bytes[sent..], &[])
            })
            .await?;
    }
    Ok(())
}

/// The next message; exactly its bytes are taken from the socket.
async fn receive(socket: &Socket, limit: usize) -> io::Result<Result<Body>> {
    let mut head = [0; 4];
    fill(socket, &mut head).await?;
    let mut body = match length(head, limit) {
        Ok(len) => vec![0; len],
        Err(e) => return Ok(Err(e)),
    };
    fill(socket, &mut body).await?;
    Ok(known(&body))
}

async fn fill(socket: &Socket, bytes: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while at < bytes.len() {
        let rest = &mut bytes[at..];
        // Descriptors that a stranger sends are closed by the kernel.
        let (n, _) = socket
            .io(Interest::READABLE, || try_recv(socket.fd(), rest, 0))
            .await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        at += n;
    }
    Ok(())
}

/// Connections that are being answered, the oldest first.
#[derive(Default)]
pub(super) struct Strangers {
    next: u64,
    waiting: VecDeque<Stranger>,
}

struct Stranger {
    number: u64,
    /// `None`: this host, by a Unix socket.
    from: Option<IpAddr>,
    task: tokio::task::AbortHandle,
}

impl Strangers {
    /// The number of the next one.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn add(&mut self, number: u64, from: Option<IpAddr>, task: tokio::task::AbortHandle) {
        self.waiting.push_back(Stranger { number, from, task });
    }

    /// Its answer is there.
    pub fn remove(&mut self, number: u64) {
        self.waiting.retain(|s| s.number != number);
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Ends the oldest of the address that has the most, so that who floods us pushes out its own
    /// and not a peer that is far away; false: there is none.
    pub fn drop_one(&mut self) -> bool {
        let mut counts = HashMap::<_, usize>::new();
        for stranger in &self.waiting {
            *counts.entry(stranger.from).or_default() += 1;
        }
        let most = counts.values().max().copied();
        let crowd = |s: &Stranger| counts.get(&s.from).copied() == most;
        let found = self.waiting.iter().position(crowd);
        match found.and_then(|at| self.waiting.remove(at)) {
            Some(stranger) => {
                stranger.task.abort();
                true
            }
            None => false,
        }
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        for stranger in &self.waiting {
            stranger.task.abort();
        }
    }
}
