//! One control connection: frames in, frames out, file descriptors beside them.
//!
//! A link is two tasks on the agent's control thread. The reading task hands whole frames to the
//! core through a bounded channel, so a peer that talks too fast is slowed down by its own socket;
//! the writing task sends what the core queued.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, oneshot};

use crate::error::{Error, Result, Status};
use crate::transport::shm::PeerProcess;
use crate::transport::shm::fds::{MAX_FDS, try_recv, try_send};
use crate::transport::tcp::Stream;
use crate::wire::{self, Body, Frame};

/// Names a link in the agent.
pub(super) type LinkId = u64;

/// Frames that wait for the core before the peer is slowed down.
pub(super) const INBOX: usize = 256;

/// Longest frame before the peer has said hello.
const HELLO_LIMIT: usize = 8 << 20;

/// A connected control socket.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(s) => s.as_fd(),
            Self::Unix(s) => s.as_fd(),
        }
    }

    pub async fn io<R>(
        &self,
        interest: Interest,
        call: impl FnMut() -> io::Result<R>,
    ) -> io::Result<R> {
        match self {
            Self::Tcp(s) => s.async_io(interest, call).await,
            Self::Unix(s) => s.async_io(interest, call).await,
        }
    }

    /// Who is at the other end; only for Unix sockets.
    pub fn process(&self) -> Option<Result<PeerProcess>> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(s) => Some(PeerProcess::of_stream(s.as_fd())),
        }
    }

    /// Where the other end is; `None` for Unix sockets.
    pub fn remote_ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(s) => s.peer_addr().ok().map(|a| a.ip()),
            Self::Unix(_) => None,
        }
    }

    pub fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }
}

/// Something to send.
enum Outgoing {
    Bytes(Vec<u8>, Vec<OwnedFd>),
    /// Answered when everything before it has been written.
    Close(oneshot::Sender<()>),
}

/// What a link's tasks tell the core.
pub(super) enum Incoming {
    Frame(Body, Vec<OwnedFd>),
    Closed(Error),
}

/// The core's end of a link. Dropping it closes the connection.
#[derive(Debug)]
pub(super) struct Link {
    pub id: LinkId,
    pub process: Option<Arc<PeerProcess>>,
    pub unix: bool,
    out: mpsc::UnboundedSender<Outgoing>,
    socket: Arc<Socket>,
    reader: tokio::task::AbortHandle,
    writer: tokio::task::AbortHandle,
    /// Waits for the end of the process at the other end.
    pub watcher: Option<tokio::task::AbortHandle>,
    finishing: bool,
}

impl Link {
    /// Starts the tasks of a connected socket.
    pub fn start(
        id: LinkId,
        socket: Socket,
        process: Option<Arc<PeerProcess>>,
        inbox: mpsc::Sender<(LinkId, Incoming)>,
    ) -> Self {
        let unix = socket.is_unix();
        let socket = Arc::new(socket);
        let (out, queue) = mpsc::unbounded_channel();
        let read = tokio::spawn(read(id, socket.clone(), inbox.clone()));
        let write = tokio::spawn(write(id, socket.clone(), queue, inbox));
        Self {
            id,
            process,
            unix,
            out,
            socket,
            reader: read.abort_handle(),
            writer: write.abort_handle(),
            watcher: None,
            finishing: false,
        }
    }

    /// Queues a message; lost if the connection is, which the core hears of.
    pub fn send(&self, body: Body) {
        self.send_with(body, Vec::new());
    }

    /// Queues a message with file descriptors.
    pub fn send_with(&self, body: Body, fds: Vec<OwnedFd>) {
        let mut bytes = Vec::new();
        // A message over the limit was refused where it was made (aux, slots, metadata).
        if wire::encode(&Frame { body: Some(body) }, &mut bytes).is_ok() {
            let _ = self.out.send(Outgoing::Bytes(bytes, fds));
        }
    }

    /// Stops both tasks and gives the socket away.
    pub fn into_fd(self) -> io::Result<OwnedFd> {
        self.socket.fd().try_clone_to_owned()
    }

    /// Stops reading at once; what is queued is still written, then the connection closes. The
    /// receiver is told when that is done.
    pub fn finish(mut self) -> oneshot::Receiver<()> {
        let (done, written) = oneshot::channel();
        self.finishing = self.out.send(Outgoing::Close(done)).is_ok();
        written
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.reader.abort();
        if let Some(watcher) = &self.watcher {
            watcher.abort();
        }
        if !self.finishing {
            self.writer.abort();
        }
    }
}

async fn read(id: LinkId, socket: Arc<Socket>, inbox: mpsc::Sender<(LinkId, Incoming)>) {
    let end = match read_frames(id, &socket, &inbox).await {
        Ok(()) => Error::new(Status::KVF_ERR_PEER_LOST, "the peer closed the connection"),
        Err(e) => e,
    };
    let _ = inbox.send((id, Incoming::Closed(end))).await;
}

async fn read_frames(
    id: LinkId,
    socket: &Socket,
    inbox: &mpsc::Sender<(LinkId, Incoming)>,
) -> Result<()> {
    let mut decoder = wire::Decoder::new(HELLO_LIMIT);
    let mut fds: VecDeque<OwnedFd> = VecDeque::new();
    let mut buffer = vec![0u8; 64 << 10];
    let max_fds = if socket.is_unix() { MAX_FDS } else { 0 };
    loop {
        let (n, mut new) = socket
            .io(Interest::READABLE, || {
                try_recv(socket.fd(), &mut buffer, max_fds)
            })
            .await
            .map_err(|e| match e.kind() {
                // Another attempt would end the same way.
                io::ErrorKind::InvalidData => Error::new(
                    Status::KVF_ERR_PROTOCOL,
                    format!("{e}, or this process may not open as many (RLIMIT_NOFILE)"),
                ),
                _ => Error::os(Status::KVF_ERR_PEER_LOST, "control connection", &e),
            })?;
        if n == 0 {
            return Ok(());
        }
        fds.extend(new.drain(..));
        decoder.push(&buffer[..n]);
        while let Some(frame) = decoder.next_frame()? {
            // A message of a newer peer that we do not know is skipped.
            let Some(body) = frame.body else { continue };
            let count = match &body {
                Body::Memory(m) => m.descriptors as usize,
                _ => 0,
            };
            if count > fds.len() {
                return Err(Error::new(
                    Status::KVF_ERR_PROTOCOL,
                    format!("a message with {count} descriptors came with {}", fds.len()),
                ));
            }
            let with = fds.drain(..count).collect();
            decoder.set_limit(wire::MAX_FRAME);
            if inbox.send((id, Incoming::Frame(body, with))).await.is_err() {
                return Ok(());
            }
        }
        if fds.len() > 4 * MAX_FDS {
            return Err(Error::new(
                Status::KVF_ERR_PROTOCOL,
                "file descriptors without a message",
            ));
        }
    }
}

async fn write(
    id: LinkId,
    socket: Arc<Socket>,
    mut queue: mpsc::UnboundedReceiver<Outgoing>,
    inbox: mpsc::Sender<(LinkId, Incoming)>,
) {
    while let Some(outgoing) = queue.recv().await {
        let (bytes, mut fds) = match outgoing {
            Outgoing::Bytes(bytes, fds) => (bytes, fds),
            Outgoing::Close(done) => {
                let _ = done.send(());
                return;
            }
        };
        let mut sent = 0;
        while sent < bytes.len() {
            // Descriptors beyond one call's worth go with the next byte.
            let now = fds.len().min(MAX_FDS);
            let end = if fds.len() > now {
                sent + 1
            } else {
                bytes.len()
            };
            let result = socket
                .io(Interest::WRITABLE, || {
                    let some: Vec<_> = fds[..now].iter().map(AsFd::as_fd).collect();
                    try_send(socket.fd(), &bytes[sent..end], &some)
                })
                .await;
            match result {
                Ok(n) => {
                    sent += n;
                    fds.drain(..now);
                }
                Err(e) => {
                    let end = Error::os(Status::KVF_ERR_PEER_LOST, "control connection", &e);
                    let _ = inbox.send((id, Incoming::Closed(end))).await;
                    return;
                }
            }
        }
    }
}

/// Connects to an agent: its Unix socket if it may be on this host, else TCP.
///
/// # Errors
/// `KVF_ERR_PEER_LOST` if every address there is was refused, `KVF_ERR_PEER_UNREACHABLE` otherwise.
pub(super) async fn connect(
    unix_name: Option<Vec<u8>>,
    address: Option<std::net::SocketAddr>,
) -> Result<Socket> {
    if unix_name.is_none() && address.is_none() {
        let text = "it announces no address, and is on another host";
        return Err(Error::new(Status::KVF_ERR_PEER_UNREACHABLE, text));
    }
    let mut reasons = Vec::new();
    let mut refused = true;
    if let Some(name) = unix_name {
        match connect_unix(&name) {
            Ok(stream) => return Ok(Socket::Unix(stream)),
            Err(e) => {
                refused &= e.kind() == io::ErrorKind::ConnectionRefused;
                reasons.push(format!("unix socket: {e}"));
            }
        }
    }
    if let Some(address) = address {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                let _ = stream.set_nodelay(true);
                return Ok(Socket::Tcp(stream));
            }
            Err(e) => {
                refused &= e.kind() == io::ErrorKind::ConnectionRefused;
                reasons.push(format!("tcp {address}: {e}"));
            }
        }
    }
    let status = if refused {
        Status::KVF_ERR_PEER_LOST
    } else {
        Status::KVF_ERR_PEER_UNREACHABLE
    };
    Err(Error::new(status, reasons.join("; ")))
}

/// Connects to an agent's Unix socket; an error at once if its backlog is full.
fn connect_unix(name: &[u8]) -> io::Result<UnixStream> {
    let stream = Stream::connect_unix(name, None)?;
    UnixStream::from_std(OwnedFd::from(stream).into())
}

/// Listens on the agent's abstract Unix socket.
pub(super) fn listen_unix(name: &[u8]) -> io::Result<tokio::net::UnixListener> {
    use std::os::linux::net::SocketAddrExt;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    let listener = std::os::unix::net::UnixListener::bind_addr(&address)?;
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}

/// Name of an agent's abstract Unix socket.
pub(super) fn unix_name(incarnation: crate::ids::Incarnation) -> Vec<u8> {
    format!("kvferry-{incarnation}").into_bytes()
}
