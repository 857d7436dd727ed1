//! Gets, where a card reads the peer's memory without the peer's processor: both sides register theirs
//! once, and the reader copies by itself.

mod flight;
mod path;

pub use flight::{Batch, Flight, Get, Region};
pub use path::{Source, UcxPath};

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
