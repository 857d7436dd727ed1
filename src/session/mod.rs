//! Both sides of a handoff, and the notice between them, as pure state machines: (state, event,
//! now) -> (state, actions), plus the next deadline. Time is a duration since the agent's start; nothing here waits or sends.

pub mod collective;
pub mod notice;
pub mod reader;
pub mod source;
pub mod votes;

use crate::error::Status;

/// Time since the agent started.
pub type Now = std::time::Duration;

/// Why something ended, with a line for people.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct End {
    /// `KVF_OK` or the cause.
    pub status: Status,
    /// For people; empty for a success.
    pub text: String,
}

impl End {
    /// A success.
    pub fn ok() -> Self {
        Self {
            status: Status::KVF_OK,
            text: String::new(),
        }
    }

    /// An end with a cause.
    pub fn new(status: Status, text: impl Into<String>) -> Self {
        Self {
            status,
            text: text.into(),
        }
    }

    /// Whether everything went well.
    pub fn is_ok(&self) -> bool {
        self.status == Status::KVF_OK
    }
}
