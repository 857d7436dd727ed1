//! Two agents of this process with one large layout each, for tests of what they move.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::time::Duration;

use kvferry::agent::*;
use kvferry::error::Status::*;
use kvferry::ids::Key;
use kvferry::layout::*;

pub const LONG: Duration = Duration::from_secs(100);

/// Who makes the memory of the pools.
#[derive(Clone, Copy, PartialEq)]
pub enum Memory {
    Own,
    Kvferry,
}

/// An agent with one pool for each tensor.
pub struct Side {
    pub agent: Agent,
    /// First word of each tensor.
    pub tensors: Vec<*mut u64>,
    pub tensor_words: usize,
    _own: Vec<u64>,
}

impl Side {
    /// `layers` tensors of `slots` blocks of `block` bytes.
    pub fn new(transport: &str, memory: Memory, layers: u32, slots: u32, block: u64) -> Self {
        Self::spinning(Duration::ZERO, transport, memory, layers, slots, block)
    }

    pub fn spinning(
        spin: Duration,
        transport: &str,
        memory: Memory,
        layers: u32,
        slots: u32,
        block: u64,
    ) -> Self {
        let spinning = |config: &mut AgentConfig| config.spin = spin;
        Self::made(transport, memory, layers, slots, block, spinning)
    }

    pub fn made(
        transport: &str,
        memory: Memory,
        layers: u32,
        slots: u32,
        block: u64,
        change: impl FnOnce(&mut AgentConfig),
    ) -> Self {
        let mut config = AgentConfig {
            name: "side".into(),
            fingerprint: "scale".into(),
            transports: vec![transport.into()],
            ..AgentConfig::default()
        };
        change(&mut config);
        let agent = Agent::create(config, None).unwrap();
        let bytes = u64::from(slots) * block;
        // 64 bytes between two tensors belong to no pool.
        let own_words = u64::from(layers) * (bytes + 64) / 8;
        let mut own = vec![0u64; own_words as usize];
        let base: *mut u8 = own.as_mut_ptr().cast();
        let pools: Vec<u32> = (0..u64::from(layers))
            .map(|i| match memory {
                Memory::Kvferry => agent.create_pool(bytes, None, 0).unwrap(),
                Memory::Own => {
                    let at = base.wrapping_add((i * (bytes + 64)) as usize);
                    // SAFETY: inside `own`, which outlives the agent (fields drop in their order).
                    unsafe { agent.register_pool(at, bytes) }.unwrap()
                }
            })
            .collect();
        let first = |pool: &u32| agent.pool_memory(*pool).unwrap().0.cast();
        let tensors = pools.iter().map(first).collect();
        let view = View {
            role: Role::Opaque,
            element_bits: 8,
            heads: 1,
            bytes_per_head: block,
            shards: 1,
            shard: 0,
            replicas: 1,
            replica: 0,
            sections: Vec::new(),
            tensors: pools
                .into_iter()
                .map(|pool| Tensor { pool, offset: 0 })
                .collect(),
            slots,
            strides: Strides {
                slot: block,
                layer: 0,
                token: block,
                head: block,
            },
        };
        let layout = Layout {
            groups: vec![Group {
                kind: GroupKind::Paged {
                    tokens_per_block: 1,
                    window: 0,
                },
                layers: (0..layers).collect(),
                ordinals: Ordinals::default(),
                views: vec![view],
            }],
            ..Layout::default()
        };
        agent.set_layout(layout).unwrap();
        agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
        Self {
            agent,
            tensors,
            tensor_words: bytes as usize / 8,
            _own: own,
        }
    }

    #[allow(clippy::mut_from_ref)] // raw memory, used by one side at a time
    pub fn words(&self, tensor: usize) -> &mut [u64] {
        // SAFETY: a whole pool, which lives as long as the agent; no transfer runs meanwhile.
        unsafe { std::slice::from_raw_parts_mut(self.tensors[tensor], self.tensor_words) }
    }
}

pub fn word(tensor: usize, at: usize) -> u64 {
    ((tensor as u64) << 32 | (at as u64 + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Fills the source and makes it the sink's peer.
pub fn meet(source: &Side, sink: &Side) -> Peer {
    for tensor in 0..source.tensors.len() {
        for (at, place) in source.words(tensor).iter_mut().enumerate() {
            *place = word(tensor, at);
        }
    }
    let peer = sink
        .agent
        .add_peer(&source.agent.engine_metadata().unwrap(), 0)
        .unwrap();
    assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
    peer
}

pub fn publish(source: &Side, from: &[i32]) -> Publication {
    let offer = PublishDesc {
        key: Key::default(),
        groups: vec![PublishedGroup {
            group: 0,
            slots: from.to_vec(),
            token_begin: 0,
            token_end: from.len() as u64,
            ..PublishedGroup::default()
        }],
        ..PublishDesc::default()
    };
    source.agent.publish(offer).unwrap()
}

pub fn import(ticket: &[u8], to: &[i32]) -> ImportDesc {
    ImportDesc {
        ticket: ticket.to_vec(),
        groups: vec![ImportGroup {
            group: 0,
            slots: to.to_vec(),
            token_end: u64::MAX,
            ..ImportGroup::default()
        }],
        ..ImportDesc::default()
    }
}

pub fn pull(sink: &Side, peer: &Peer, ticket: &[u8], to: &[i32]) -> Transfer {
    sink.agent.import_begin(peer, import(ticket, to)).unwrap()
}
