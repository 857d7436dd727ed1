//! The error type of the whole crate: a status (what is lost) and a text (what, who, which
//! numbers, what to do).

/// Result of every fallible kvferry function.
///
/// 0 is success, positive values are states, negative values are errors grouped by what is lost:
/// -1..-19 this call (nothing changed), -20..-39 this transfer, -40..-59 the peer, -60..-99 the
/// agent. Numbers are never reused.
#[repr(i32)]
#[allow(non_camel_case_types)] // the C names are the names
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum kvf_status {
    /// Done.
    KVF_OK = 0,
    /// Accepted and not ended yet.
    KVF_IN_PROGRESS = 1,
    /// A wait was ended by kvf_transceiver_interrupt() or by the end of the object.
    KVF_INTERRUPTED = 2,
    /// A wait's time-out passed; what was waited for goes on.
    KVF_TIMED_OUT = 3,

    /// An argument is NULL, unknown or contradicts another one.
    KVF_ERR_INVALID_ARGUMENT = -1,
    /// `struct_size` or `abi_version` names something that this library does not know.
    KVF_ERR_ABI_MISMATCH = -2,
    /// Known, but not served by this build, this machine or this combination.
    KVF_ERR_UNSUPPORTED = -3,
    /// A slot, offset, token or index is outside of what it indexes.
    KVF_ERR_OUT_OF_RANGE = -4,
    /// A slot is used by a transfer, a publication or the quarantine; the text names it.
    KVF_ERR_SLOT_BUSY = -5,
    /// The same thing was given twice (slot, key, layer, rank, memory of a pool).
    KVF_ERR_DUPLICATE = -6,
    /// No such key, group, peer or file.
    KVF_ERR_NOT_FOUND = -7,
    /// Memory could not be allocated or mapped.
    KVF_ERR_NO_MEMORY = -8,
    /// A bounded table is full; try again when something has ended.
    KVF_ERR_LIMIT = -9,
    /// Called from one of kvferry's own threads (inside a callback).
    KVF_ERR_REENTRANT = -10,
    /// Called in a forked child.
    KVF_ERR_FORKED = -11,
    /// The object is still used by another one.
    KVF_ERR_BUSY = -12,
    /// The object is not in a state that allows this call (for example no layout set yet).
    KVF_ERR_STATE = -13,
    /// The two sides' descriptions do not fit; the text gives the field and both values.
    KVF_ERR_INCOMPATIBLE = -14,

    /// Cancelled by this side.
    KVF_ERR_CANCELLED = -20,
    /// Cancelled or released by the peer before the transfer had ended.
    KVF_ERR_CANCELLED_BY_PEER = -21,
    /// The source's lease ended before the last byte was attested.
    KVF_ERR_EXPIRED = -22,
    /// The other side declined the ticket or offer.
    KVF_ERR_DECLINED = -23,
    /// The operation's own deadline passed.
    KVF_ERR_DEADLINE = -24,
    /// The data path failed; the text names transport, operation, bytes and the system's reason.
    KVF_ERR_TRANSFER = -25,
    /// Both sides set a prefix tag and they differ.
    KVF_ERR_PREFIX_MISMATCH = -26,

    /// The peer died, was stopped for too long, or was replaced by a new incarnation.
    KVF_ERR_PEER_LOST = -40,
    /// The peer could not be reached before the deadline.
    KVF_ERR_PEER_UNREACHABLE = -41,
    /// The peer sent something that is not the protocol.
    KVF_ERR_PROTOCOL = -42,
    /// The peer could not prove that it knows the shared key.
    KVF_ERR_AUTH = -43,

    /// The agent is shutting down or draining.
    KVF_ERR_SHUTDOWN = -60,
    /// The engine's ranks no longer agree; the engine must stop this iteration.
    KVF_ERR_GROUP_LOST = -61,
    /// The operating system refused something the agent cannot do without.
    KVF_ERR_SYSTEM = -62,
    /// A bug in kvferry: a panic was caught. The object is poisoned; destroy it.
    KVF_ERR_INTERNAL = -99,
}

pub use kvf_status as Status;
use kvf_status::*;

impl kvf_status {
    /// Every status, for tables and tests.
    /// cbindgen:ignore
    pub const ALL: [Self; 33] = [
        KVF_OK,
        KVF_IN_PROGRESS,
        KVF_INTERRUPTED,
        KVF_TIMED_OUT,
        KVF_ERR_INVALID_ARGUMENT,
        KVF_ERR_ABI_MISMATCH,
        KVF_ERR_UNSUPPORTED,
        KVF_ERR_OUT_OF_RANGE,
        KVF_ERR_SLOT_BUSY,
        KVF_ERR_DUPLICATE,
        KVF_ERR_NOT_FOUND,
        KVF_ERR_NO_MEMORY,
        KVF_ERR_LIMIT,
        KVF_ERR_REENTRANT,
        KVF_ERR_FORKED,
        KVF_ERR_BUSY,
        KVF_ERR_STATE,
        KVF_ERR_INCOMPATIBLE,
        KVF_ERR_CANCELLED,
        KVF_ERR_CANCELLED_BY_PEER,
        KVF_ERR_EXPIRED,
        KVF_ERR_DECLINED,
        KVF_ERR_DEADLINE,
        KVF_ERR_TRANSFER,
        KVF_ERR_PREFIX_MISMATCH,
        KVF_ERR_PEER_LOST,
        KVF_ERR_PEER_UNREACHABLE,
        KVF_ERR_PROTOCOL,
        KVF_ERR_AUTH,
        KVF_ERR_SHUTDOWN,
        KVF_ERR_GROUP_LOST,
        KVF_ERR_SYSTEM,
        KVF_ERR_INTERNAL,
    ];

    /// The status with this number; `None` for a number of a newer library.
    pub fn from_code(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|s| *s as i32 == code)
    }
}

/// What failed: a status and one line of text for people.
///
/// The text says what happened, to which peer, request or pool, with the numbers, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct Error {
    /// What is lost.
    pub status: Status,
    /// One line, lower case, cause first.
    pub text: String,
}

impl Error {
    /// An error with its text.
    pub fn new(status: Status, text: impl Into<String>) -> Self {
        Self {
            status,
            text: text.into(),
        }
    }

    /// `text` with the failing operating-system call's reason after it.
    pub fn os(status: Status, text: impl std::fmt::Display, err: &std::io::Error) -> Self {
        Self::new(status, format!("{text}: {err}"))
    }

    /// Puts the place where it happened before the text.
    #[must_use]
    pub fn context(mut self, place: impl std::fmt::Display) -> Self {
        self.text = format!("{place}: {}", self.text);
        self
    }
}

/// Builds an [`Error`]: `err!(KVF_ERR_OUT_OF_RANGE, "slot {slot} of {count}")`.
#[macro_export]
macro_rules! err {
    ($status:ident, $($arg:tt)*) => {
        $crate::error::Error::new($crate::error::Status::$status, format!($($arg)*))
    };
}

/// Returns early with an [`Error`]: `bail!(KVF_ERR_OUT_OF_RANGE, "slot {slot} of {count}")`.
#[macro_export]
macro_rules! bail {
    ($status:ident, $($arg:tt)*) => { return Err($crate::err!($status, $($arg)*)) };
}

/// Result with the crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
