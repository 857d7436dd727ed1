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
    /// Also of device memory: the reader looks at `UcxKey.address` and tries the keys.
    #[prost(bool, tag = "3")]
    pub ucx_device_gets: bool,
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
    /// Why there are no keys for a reader that wanted gets; empty if there are.
    #[prost(string, tag = "6")]
    pub no_gets: String,
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
    /// Of device memory: where it lies there. 0: memory of the host, at the pool's address.
    #[prost(uint64, tag = "3")]
    pub address: u64,
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

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::{MemoryRequest, UcxKey};

    /// Before there were gets of device memory.
    #[derive(Clone, PartialEq, Message)]
    struct OldRequest {
        #[prost(bool, tag = "1")]
        ucx: bool,
        #[prost(bool, tag = "2")]
        ucx_gets: bool,
    }

    #[derive(Clone, PartialEq, Message)]
    struct OldKey {
        #[prost(uint32, tag = "1")]
        pool: u32,
        #[prost(bytes = "vec", tag = "2")]
        key: Vec<u8>,
    }

    #[test]
    fn gets_of_device_memory_are_unknown_to_older_peers_and_not_asked_for_by_them() {
        let new = MemoryRequest {
            ucx: true,
            ucx_gets: true,
            ucx_device_gets: true,
        };
        let old = OldRequest::decode(&new.encode_to_vec()[..]).unwrap();
        assert!(old.ucx && old.ucx_gets);
        let back = MemoryRequest::decode(&old.encode_to_vec()[..]).unwrap();
        assert!(back.ucx && back.ucx_gets && !back.ucx_device_gets);
        let key = UcxKey {
            pool: 3,
            key: vec![1, 2],
            address: 0x7000,
        };
        let old = OldKey::decode(&key.encode_to_vec()[..]).unwrap();
        assert_eq!((old.pool, &old.key[..]), (3, &[1, 2][..]));
        let back = UcxKey::decode(&old.encode_to_vec()[..]).unwrap();
        assert_eq!(back.address, 0);
    }
}
