//! What an agent tells a reader of its memory.

use prost::Message;

/// Please send [`Memory`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct MemoryRequest {
    /// Also for UCX, which the source may have to load for it.
    #[prost(bool, tag = "1")]
    pub ucx: bool,
    /// By gets, if the source can serve them too; else by messages.
    #[prost(bool, tag = "2")]
    pub ucx_gets: bool,
}

/// Memory of the sending agent. File descriptors: the lease table, then each mappable pool.
#[derive(Clone, PartialEq, Message)]
pub struct Memory {
    /// Pools in ascending id.
    #[prost(message, repeated, tag = "1")]
    pub pools: Vec<PoolMemory>,
    /// The nonce at the head of the lease table.
    #[prost(bytes = "vec", tag = "2")]
    pub nonce: Vec<u8>,
    /// Bytes of the lease table.
    #[prost(uint64, tag = "3")]
    pub lease_bytes: u64,
    /// Its address in the sending process.
    #[prost(uint64, tag = "4")]
    pub lease_address: u64,
    /// File descriptors that travel with this message.
    #[prost(uint32, tag = "5")]
    pub descriptors: u32,
    /// Proves on a data connection that it belongs to this link.
    #[prost(bytes = "vec", tag = "6")]
    pub token: Vec<u8>,
    /// If the reader asked for it.
    #[prost(message, optional, boxed, tag = "7")]
    pub ucx: Option<Box<UcxMemory>>,
}

/// How the sending agent's memory is read through UCX.
#[derive(Clone, PartialEq, Message)]
pub struct UcxMemory {
    /// UCX's version.
    #[prost(string, tag = "1")]
    pub version: String,
    /// Of its worker.
    #[prost(bytes = "vec", tag = "2")]
    pub address: Vec<u8>,
    /// Packed key of the lease table. Empty: messages, not gets.
    #[prost(bytes = "vec", tag = "3")]
    pub lease_key: Vec<u8>,
    /// Packed keys of the pools.
    #[prost(message, repeated, tag = "4")]
    pub keys: Vec<UcxKey>,
    /// Why UCX cannot be used there; empty if it can.
    #[prost(string, tag = "5")]
    pub refused: String,
}

/// A pool's packed key.
#[derive(Clone, PartialEq, Message)]
pub struct UcxKey {
    /// Pool id.
    #[prost(uint32, tag = "1")]
    pub pool: u32,
    /// The key.
    #[prost(bytes = "vec", tag = "2")]
    pub key: Vec<u8>,
}

/// One pool of the sending agent.
#[derive(Clone, PartialEq, Message)]
pub struct PoolMemory {
    /// Pool id.
    #[prost(uint32, tag = "1")]
    pub id: u32,
    /// Length.
    #[prost(uint64, tag = "2")]
    pub bytes: u64,
    /// Address in the sending process.
    #[prost(uint64, tag = "3")]
    pub address: u64,
    /// A descriptor of it travels along.
    #[prost(bool, tag = "4")]
    pub mappable: bool,
    /// Set if it is memory of a CUDA device; `address` is 0 then.
    #[prost(message, optional, tag = "20")]
    pub device: Option<DeviceMemory>,
}

/// Where a device pool is.
#[derive(Clone, PartialEq, Message)]
pub struct DeviceMemory {
    /// The device, 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub uuid: Vec<u8>,
    /// CUDA IPC handle of the allocation, 64 bytes; empty = it cannot be mapped.
    #[prost(bytes = "vec", tag = "2")]
    pub handle: Vec<u8>,
    /// Where the pool begins in its allocation.
    #[prost(uint64, tag = "3")]
    pub offset: u64,
    /// Why there is no handle.
    #[prost(string, tag = "4")]
    pub reason: String,
}

/// A pool of the source that the reader has mapped.
#[derive(Clone, PartialEq, Message)]
pub struct Unmap {
    /// Pool id.
    #[prost(uint32, tag = "1")]
    pub pool: u32,
}
