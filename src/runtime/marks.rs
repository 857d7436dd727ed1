//! The marks of `observe`, under the names that this module's threads use.

pub use crate::observe::marks::{
    forked, mark_own_thread as mark_kvferry_thread, own_thread as on_kvferry_thread, watch_forks,
};
