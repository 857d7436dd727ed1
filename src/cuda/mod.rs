//! The CUDA driver, loaded at run time when first needed. The library works without it.
//!
//! * [`Driver`]: one per process; its absence is a status with the reason.
//! * [`DeviceMemory`]: what the driver knows about a pointer that the engine gave us.
//! * [`CallerStream`], [`Gate`]: waiting for work that the engine has enqueued.
//! * [`Devices`], [`Lane`]: an agent's own streams and pinned buffers, and copies on them.
//! * [`Word`]: what engine streams wait for in `kvf_transfer_stream_wait`.
//! * [`kernel`]: any number of strided copies in one launch.
//! * [`Mapping`]: a peer's allocation, opened through CUDA IPC.
//! * [`RemoteWrites`], [`DeviceBytes`]: a network card that reads and writes device memory by itself.
//!
//! Contexts, streams and memory of the engine are never owned, destroyed or made current beyond
//! a push and its pop. Our own streams do not synchronise with the legacy default stream.

mod current;
mod devices;
mod driver;
mod gate;
mod gpu_direct;
mod ipc;
pub mod kernel;
mod lane;
mod memory;
mod pinned;
mod stream;
mod table;
mod words;

pub use current::{Context, Current};
pub use devices::Devices;
pub use driver::{Driver, LIBRARY_VARIABLE};
pub use gate::Gate;
pub use gpu_direct::{DeviceBytes, RemoteWrites};
pub use ipc::{Handle, Mapping};
pub use lane::{Copy, Dim, Lane, MAX_DIMS, Waited};
pub use memory::{DeviceMemory, Uuid};
pub use pinned::PinnedRange;
pub use stream::CallerStream;
pub use words::Word;

#[cfg(test)]
mod tests;
