//! Gets, where a card reads the peer's memory without the peer's processor: both sides register theirs
//! once, and the reader copies by itself. Memory of a CUDA device too, where the card and UCX can.

mod device;
mod flight;
mod path;

pub use device::{DeviceGets, LANES as DEVICE_LANES, SCRATCH_BYTES, options as card_options};
pub use flight::{Batch, Flight, Get, Region};
pub use path::{Source, SourcePool, UcxPath};

#[cfg(test)]
#[cfg(not(miri))]
mod tests;
