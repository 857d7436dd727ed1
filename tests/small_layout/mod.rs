//! The smallest layout there is: one layer, one token a block, one head.

use kvferry::layout::*;

/// `slots` blocks of `bytes` bytes at the begin of a pool.
pub fn small_layout(pool: u32, bytes: u64, slots: u32) -> Layout {
    let view = View {
        role: Role::Key,
        element_bits: 8,
        heads: 1,
        bytes_per_head: bytes,
        shards: 1,
        shard: 0,
        replicas: 1,
        replica: 0,
        sections: Vec::new(),
        tensors: vec![Tensor { pool, offset: 0 }],
        slots,
        strides: Strides {
            slot: bytes,
            layer: 0,
            token: bytes,
            head: bytes,
        },
    };
    let group = Group {
        kind: GroupKind::Paged {
            tokens_per_block: 1,
            window: 0,
        },
        layers: vec![0],
        ordinals: Ordinals::default(),
        views: vec![view],
    };
    Layout {
        groups: vec![group],
        ..Layout::default()
    }
}
