//! Layouts and tables come from peers: whatever their numbers are, the answer is an error or a
//! plan that stays inside the memory it was given, never a panic, an overflow or a long wait.

#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)] // a test's way to fail

use kvferry::layout::shapes::{self, Mamba2, Shape, Shard};
use kvferry::layout::{
    Coordinates, Group, GroupKind, Invariants, Layout, Ordinals, Section, Tensor, validate,
    validate_engine,
};
use kvferry::plan::{Batch, Binding, Cursor, Plan, Policy, Request, explain_layouts};
use proptest::prelude::*;

const POOL: u64 = 1 << 20;

fn rank(shard: Shard, tokens: u32) -> Layout {
    let shape = Shape {
        layers: 3,
        slots: 8,
        tokens_per_block: tokens,
        heads: 4 / shard.shards,
        bytes_per_head: 8,
        element_bits: 16,
        shard,
    };
    let sizes = Mamba2 {
        layers: 2,
        slots: 4,
        d_inner: 16,
        bc_width: 8,
        d_conv: 4,
        heads: 4,
        head_dim: 4,
        d_state: 2,
        conv_bits: 16,
        recurrent_bits: 32,
        shard,
    };
    let at = |pool| Tensor { pool, offset: 0 };
    let tensors: Vec<Tensor> = (0..3).map(at).collect();
    Layout {
        fingerprint: "m".into(),
        coordinates: Coordinates {
            global_rank: shard.shard,
            ..Coordinates::default()
        },
        groups: vec![
            Group {
                kind: GroupKind::Paged {
                    tokens_per_block: tokens,
                    window: 0,
                },
                layers: vec![0, 1, 2],
                ordinals: Ordinals::default(),
                views: shapes::vllm_nhd(&shape, &tensors),
            },
            Group {
                kind: GroupKind::State,
                layers: vec![3, 4],
                ordinals: Ordinals::default(),
                views: vec![
                    shapes::mamba2_conv(&sizes, at(3)),
                    shapes::mamba2_recurrent(&sizes, at(4)),
                ],
            },
        ],
    }
}

/// Replaces one number.
fn poison(layout: &mut Layout, field: u8, group: usize, view: usize, value: u64) {
    let small = value as u32;
    let group = &mut layout.groups[group % 2];
    match field % 24 {
        0 => group.ordinals.offset = small,
        1 => group.ordinals.stride = small,
        2 => group.layers.iter_mut().take(1).for_each(|l| *l = small),
        3 => group.layers.clear(),
        4 => {
            group.kind = GroupKind::Paged {
                tokens_per_block: small,
                window: 0,
            };
        }
        5 => {
            group.kind = GroupKind::Paged {
                tokens_per_block: 4,
                window: small,
            };
        }
        6 => layout.coordinates.global_rank = small,
        7 => layout.coordinates.dp_rank = small,
        field => {
            let view = &mut group.views[view % 2];
            match field {
                8 => view.element_bits = small,
                9 => view.heads = small,
                10 => view.bytes_per_head = value,
                11 => view.shards = small,
                12 => view.shard = small,
                13 => view.replicas = small,
                14 => view.replica = small,
                15 => view.slots = small,
                16 => view.strides.slot = value,
                17 => view.strides.layer = value,
                18 => view.strides.token = value,
                19 => view.strides.head = value,
                20 => view
                    .tensors
                    .iter_mut()
                    .take(1)
                    .for_each(|t| t.offset = value),
                21 => view.tensors.iter_mut().take(1).for_each(|t| t.pool = small),
                22 => {
                    view.tensors.pop();
                }
                _ => {
                    view.sections.push(Section {
                        name: "q".into(),
                        total: small,
                    });
                }
            }
        }
    }
}

fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..20,
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        Just(1 << 31),
        Just(1 << 61),
        Just(1 << 62),
        Just(u64::MAX / 3),
        any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_numbers_are_survived(
        poisons in prop::collection::vec((any::<u8>(), any::<bool>(), 0usize..2, 0usize..2, numbers()), 0..3),
        same_on_all in any::<bool>(),
        tokens in prop::sample::select(vec![[4u32, 4], [2, 4], [8, 4]]),
        tables in prop::collection::vec(prop::collection::vec(prop_oneof![0i32..9, any::<i32>(), Just(-1)], 0..5), 2),
        (first, skip, end) in (numbers(), numbers(), numbers()),
    ) {
        let halves = [0, 1].map(|shard| rank(Shard { shards: 2, shard, ..Shard::default() }, tokens[0]));
        let mut src = halves.to_vec();
        let mut dst = vec![rank(Shard::default(), tokens[1])];
        for (field, at_src, group, view, value) in poisons {
            let ranks = if at_src { &mut src } else { &mut dst };
            let count = if same_on_all { ranks.len() } else { 1 };
            ranks[..count].iter_mut().for_each(|r| poison(r, field, group, view, value));
        }
        let in_memory = src.iter().chain(&dst).all(|r| validate(r, &|p| (p < 8).then_some(POOL)).is_ok());
        let _ = (validate_engine(&src), Invariants::of(&dst));
        explain_layouts(&src, &dst, Policy::Lowest).to_table();
        let Ok(plan) = Plan::new(&src, &dst, Policy::Spread) else {
            return Ok(());
        };
        for pair in plan.pairs() {
            for group in 0..2 {
                let request = Request {
                    group,
                    src_slots: &tables[0],
                    dst_slots: &tables[1],
                    src_first_ordinal: first,
                    dst_first_ordinal: if first > 100 { 0 } else { first },
                    skip_token: skip,
                    token_end: end,
                };
                let Ok(binding) = Binding::new(pair, request) else { continue };
                let mut out = Batch::new();
                binding.take(&mut Cursor::default(), 4096, &mut out);
                for p in out.iter().filter(|_| in_memory) {
                    let reach = |axis: fn(&kvferry::plan::Dim) -> u64| {
                        p.axes().iter().map(|d| (d.count - 1) * axis(d)).sum::<u64>() + p.run
                    };
                    prop_assert!(p.src_offset + reach(|d| d.src) <= POOL);
                    prop_assert!(p.dst_offset + reach(|d| d.dst) <= POOL);
                }
            }
        }
    }
}
