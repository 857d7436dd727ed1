//! What comes in, on the progress thread: asks for our connections, answers for our channels.

use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::message::{END, Head, Kind};
use super::{Channel, Connection, KEY_BYTES};
use crate::error::{Error, Result};
use crate::transport::ucx::library::Library;
use crate::transport::ucx::ucx_sys::{self as sys, ucs_status_t};
use crate::wire::{Body, Decoder};

/// Longest hello that is looked at.
const MAX_HELLO: usize = 72 << 10;
/// Hellos that wait between two looks of the progress thread.
const MAX_HELLOS: usize = 64;

/// Token and secret: the head of every ask.
type ConnectionKey = [u8; 2 * KEY_BYTES];

pub fn connection_key(token: &[u8; KEY_BYTES], secret: &[u8; KEY_BYTES]) -> ConnectionKey {
    let mut key = [0; 2 * KEY_BYTES];
    key[..KEY_BYTES].copy_from_slice(token);
    key[KEY_BYTES..].copy_from_slice(secret);
    key
}

/// What became of a message.
pub type Taken = std::result::Result<(), Dropped>;

/// Why a message changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// For what has ended, or was never asked for.
    Late,
    /// Without a valid token or secret.
    Stranger,
    /// Not of the protocol.
    Garbage,
}

impl Dropped {
    fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Stranger => "stranger",
            Self::Garbage => "garbage",
        }
    }
}

pub(super) fn ended_by_source() -> Error {
    crate::err!(KVF_ERR_TRANSFER, "the source has ended the connection")
}

/// What an agent does for readers that come over UCX.
pub trait Accept: Send + Sync {
    /// The name of the reader that has this token.
    ///
    /// # Errors
    /// A token that was not given out.
    fn admits(&self, token: &[u8; KEY_BYTES]) -> Result<String>;

    /// Serves a reader on a thread of its own ([`Connection::serve`]). Must not wait for the progress
    /// thread, which calls it.
    ///
    /// # Errors
    /// Too many connections, or the token is not valid any more.
    fn accept(&self, connection: &Arc<Connection>) -> Result<()>;

    /// A message was dropped: `late`, `stranger` or `garbage`.
    fn dropped(&self, why: &'static str);
}

/// A reader's first message.
pub struct Hello {
    pub token: [u8; KEY_BYTES],
    pub secret: [u8; KEY_BYTES],
    pub address: Vec<u8>,
    pub job: u64,
    pub anew: bool,
}

/// Where messages go.
pub struct Incoming {
    channels: Mutex<HashMap<u64, Arc<Channel>>>,
    connections: Mutex<HashMap<ConnectionKey, Arc<Connection>>>,
    /// Ways to sources that they have not ended, by the secret that they know.
    sources: Mutex<HashSet<[u8; KEY_BYTES]>>,
    hellos: Mutex<Vec<Hello>>,
    next_channel: AtomicU64,
    accept: Box<dyn Accept>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Incoming {
    pub fn new(accept: Box<dyn Accept>) -> Self {
        Self {
            channels: Mutex::default(),
            connections: Mutex::default(),
            sources: Mutex::default(),
            hellos: Mutex::default(),
            next_channel: AtomicU64::new(1),
            accept,
        }
    }

    /// Makes UCX call us. The incoming must live as long as the worker.
    pub fn listen(self: &Arc<Self>, ucx: &Library, worker: sys::ucp_worker_h) -> Result<()> {
        for kind in [Kind::Hello, Kind::Ask, Kind::Answer] {
            // SAFETY: every field may be zero.
            let mut params: sys::ucp_am_handler_param_t = unsafe { std::mem::zeroed() };
            params.field_mask = u64::from(
                sys::UCP_AM_HANDLER_PARAM_FIELD_ID
                    | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
                    | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG,
            );
            params.id = kind as u32;
            params.cb = Some(match kind {
                Kind::Hello => hello_came,
                Kind::Ask => ask_came,
                Kind::Answer => answer_came,
            });
            params.arg = Arc::as_ptr(self).cast_mut().cast();
            // SAFETY: the worker is open; the mask says which fields are there.
            let status = unsafe { ucx.ucp_worker_set_am_recv_handler(worker, &raw const params) };
            ucx.check(status, "ucp_worker_set_am_recv_handler")?;
        }
        Ok(())
    }

    /// A source that may say that it ends the connection; to be taken back by [`Self::forget`].
    pub(super) fn trust(&self, secret: [u8; KEY_BYTES]) {
        lock(&self.sources).insert(secret);
    }

    /// Whether the source has not ended the connection.
    pub(super) fn is_trusted(&self, secret: &[u8; KEY_BYTES]) -> bool {
        lock(&self.sources).contains(secret)
    }

    pub(super) fn forget(&self, secret: &[u8; KEY_BYTES]) {
        lock(&self.sources).remove(secret);
    }

    /// A channel for a job; to be closed by [`Self::close_channel`].
    pub(super) fn open_channel(
        &self,
        endpoint: u64,
        secret: [u8; KEY_BYTES],
    ) -> Result<Arc<Channel>> {
        let number = self.next_channel.fetch_add(1, Ordering::Relaxed);
        let channel = Arc::new(Channel::new(number, endpoint, secret)?);
        lock(&self.channels).insert(number, channel.clone());
        Ok(channel)
    }

    /// When this returns, nothing of the channel is written any more.
    pub(super) fn close_channel(&self, channel: &Channel) {
        lock(&self.channels).remove(&channel.number);
        channel.fail(crate::err!(KVF_ERR_CANCELLED, "the channel was closed"));
    }

    /// An endpoint is gone: what was read through it fails, who was served through it has ended.
    pub fn endpoint_closed(&self, endpoint: u64, e: &Error) {
        for connection in lock(&self.connections).values() {
            if connection.endpoint == endpoint {
                connection.end(e.text.clone());
            }
        }
        for channel in lock(&self.channels).values() {
            if channel.endpoint == endpoint {
                channel.fail(e.clone());
            }
        }
    }

    /// Whether answers are awaited.
    pub fn is_awaiting(&self) -> bool {
        !lock(&self.channels).is_empty()
    }

    /// The hellos since the last call.
    pub fn take_hellos(&self) -> Vec<Hello> {
        std::mem::take(&mut *lock(&self.hellos))
    }

    /// Lets a reader in.
    pub fn connect(&self, connection: &Arc<Connection>) -> Result<()> {
        self.accept.accept(connection)?;
        let key = connection_key(&connection.token, &connection.secret);
        let earlier = lock(&self.connections).insert(key, connection.clone());
        if let Some(earlier) = earlier {
            earlier.end("the reader has connected again".into());
        }
        Ok(())
    }

    /// The reader's name, if it may come in.
    pub fn admits(&self, hello: &Hello) -> Result<String> {
        self.accept.admits(&hello.token)
    }

    /// A reader is served no more.
    pub fn disconnect(&self, connection: &Arc<Connection>) {
        let mut connections = lock(&self.connections);
        let key = connection_key(&connection.token, &connection.secret);
        let known = connections.get(&key);
        if known.is_some_and(|known| Arc::ptr_eq(known, connection)) {
            connections.remove(&key);
        }
    }

    /// Everything ends.
    pub fn end(&self, e: &Error) {
        for channel in lock(&self.channels).values() {
            channel.fail(e.clone());
        }
        for connection in lock(&self.connections).drain() {
            connection.1.end(e.text.clone());
        }
    }

    pub fn count(&self, why: Dropped) {
        self.accept.dropped(why.name());
    }

    fn hello(&self, frame: &[u8]) -> Taken {
        if frame.len() > MAX_HELLO {
            return Err(Dropped::Garbage);
        }
        let mut decoder = Decoder::new(MAX_HELLO);
        decoder.push(frame);
        let Ok(Some(frame)) = decoder.next_frame() else {
            return Err(Dropped::Garbage);
        };
        let Some(Body::DataHello(hello)) = frame.body else {
            return Err(Dropped::Garbage);
        };
        let (Ok(token), Ok(secret)) = (hello.token.try_into(), hello.secret.try_into()) else {
            return Err(Dropped::Garbage);
        };
        let mut hellos = lock(&self.hellos);
        if hellos.len() >= MAX_HELLOS {
            return Err(Dropped::Stranger);
        }
        hellos.push(Hello {
            token,
            secret,
            address: hello.address,
            job: hello.job,
            anew: hello.anew,
        });
        Ok(())
    }

    fn ask(&self, key: &[u8], frames: &[u8]) -> Taken {
        let Ok(key) = <&ConnectionKey>::try_from(key) else {
            return Err(Dropped::Garbage);
        };
        let connection = lock(&self.connections).get(key).cloned();
        match connection {
            Some(connection) if frames.is_empty() => {
                connection.end("the reader ends it".into());
                Ok(())
            }
            Some(connection) if connection.ask(frames) => Ok(()),
            Some(_) => Err(Dropped::Garbage),
            None => Err(Dropped::Stranger),
        }
    }

    fn answer(&self, head: &[u8], data: &[u8]) -> Taken {
        let Some(head) = Head::decode(head) else {
            return Err(Dropped::Garbage);
        };
        if head.job == END {
            if !lock(&self.sources).remove(&head.secret) {
                return Err(Dropped::Late);
            }
            let e = ended_by_source();
            for channel in lock(&self.channels).values() {
                if channel.secret == head.secret {
                    channel.fail(e.clone());
                }
            }
            return Ok(());
        }
        let channel = lock(&self.channels).get(&head.job).cloned();
        match channel {
            Some(channel) => channel.take(&head, data),
            None => Err(Dropped::Late),
        }
    }
}

/// What UCX hands to a callback.
type Came = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    usize,
    *mut c_void,
    usize,
    *const sys::ucp_am_recv_param_t,
) -> ucs_status_t;
const _: [Came; 3] = [hello_came, ask_came, answer_came];

unsafe extern "C" fn hello_came(
    incoming: *mut c_void,
    _: *const c_void,
    _: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: UCX's call with what `listen` gave it.
    unsafe { came(incoming, (data, bytes), param, Incoming::hello) }
}

unsafe extern "C" fn ask_came(
    incoming: *mut c_void,
    head: *const c_void,
    head_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: as above; the head is readable during the call.
    unsafe {
        let head = slice(head, head_bytes);
        came(incoming, (data, bytes), param, |incoming, data| {
            incoming.ask(head, data)
        })
    }
}

unsafe extern "C" fn answer_came(
    incoming: *mut c_void,
    head: *const c_void,
    head_bytes: usize,
    data: *mut c_void,
    bytes: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: as above.
    unsafe {
        let head = slice(head, head_bytes);
        came(incoming, (data, bytes), param, |incoming, data| {
            incoming.answer(head, data)
        })
    }
}

/// # Safety
/// The arguments of a callback: a [`Incoming`], and data that is readable during the call.
unsafe fn came(
    incoming: *mut c_void,
    (data, bytes): (*mut c_void, usize),
    param: *const sys::ucp_am_recv_param_t,
    take: impl FnOnce(&Incoming, &[u8]) -> Taken,
) -> ucs_status_t {
    // SAFETY: the incoming outlives the worker; UCX gives a parameter block.
    let (incoming, attributes) = unsafe { (&*incoming.cast::<Incoming>(), (*param).recv_attr) };
    let taken = match attributes & u64::from(sys::UCP_AM_RECV_ATTR_FLAG_RNDV) {
        // SAFETY: eager: the data is there, during the call.
        0 => take(incoming, unsafe { slice(data, bytes) }),
        _ => Err(Dropped::Garbage), // nobody of us offers a rendezvous; UCX drops it
    };
    if let Err(why) = taken {
        incoming.count(why);
    }
    sys::UCS_OK
}

/// # Safety
/// Readable for so many bytes, unless there are none.
unsafe fn slice<'a>(data: *const c_void, bytes: usize) -> &'a [u8] {
    if bytes == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: by contract.
    unsafe { std::slice::from_raw_parts(data.cast(), bytes) }
}
