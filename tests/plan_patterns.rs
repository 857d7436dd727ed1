//! How few and how long the copies are, how they are split, and who talks to whom.

#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)] // a test's way to fail

use std::sync::Arc;

use kvferry::error::Status;
use kvferry::layout::shapes::{self, Mamba2, Shape, Shard};
use kvferry::layout::{Coordinates, Group, GroupKind, Layout, Ordinals, Tensor, View};
use kvferry::plan::{Batch, Binding, Cursor, Dim, Pair, Pattern, Plan, Policy, Request};

const AT: Tensor = Tensor { pool: 0, offset: 0 };
const LAYERS: u64 = 4;
const HEADS: u64 = 8;
const HEAD: u64 = 64; // bytes
const SLOTS: u64 = 128;

type Build = fn(&Shape) -> Vec<View>;

fn paged(rank: u32, dp: u32, tokens: u32, shard: Shard, build: Build) -> Layout {
    let shape = Shape {
        layers: LAYERS as u32,
        slots: SLOTS as u32,
        tokens_per_block: tokens,
        heads: HEADS as u32 / shard.shards,
        bytes_per_head: HEAD,
        element_bits: 16,
        shard,
    };
    Layout {
        fingerprint: "m".into(),
        coordinates: Coordinates {
            global_rank: rank,
            dp_rank: dp,
            ..Coordinates::default()
        },
        groups: vec![Group {
            kind: GroupKind::Paged {
                tokens_per_block: tokens,
                window: 0,
            },
            layers: (0..shape.layers).collect(),
            ordinals: Ordinals::default(),
            views: build(&shape),
        }],
    }
}

fn engine(tp: u32, tokens: u32, build: Build) -> Vec<Layout> {
    let shard = |shard| Shard {
        shards: tp,
        shard,
        ..Shard::default()
    };
    (0..tp)
        .map(|r| paged(r, 0, tokens, shard(r), build))
        .collect()
}

fn pair(src: &[Layout], dst: &[Layout], at: usize) -> Arc<Pair> {
    Arc::clone(&Plan::new(src, dst, Policy::Spread).expect("plan").pairs()[at])
}

fn bind(pair: &Arc<Pair>, src: &[i32], dst: &[i32], token_end: u64) -> Binding {
    let request = Request {
        src_slots: src,
        dst_slots: dst,
        token_end,
        ..Request::default()
    };
    Binding::new(pair, request).expect("binds")
}

fn take_all(binding: &Binding, max: u64) -> Vec<Vec<Pattern>> {
    let mut cursor = Cursor::default();
    let mut parts = Vec::new();
    loop {
        let mut out = Batch::new();
        if binding.take(&mut cursor, max, &mut out) == 0 {
            return parts;
        }
        parts.push(out.iter().collect());
    }
}

/// The copies of a request: (source offset, destination offset, run, axes).
type Copy = (u64, u64, u64, Vec<(u64, u64, u64)>);

fn copies(binding: &Binding) -> Vec<Copy> {
    let axes = |p: &Pattern| {
        p.axes()
            .iter()
            .map(|d: &Dim| (d.count, d.src, d.dst))
            .collect()
    };
    take_all(binding, u64::MAX)
        .concat()
        .iter()
        .map(|p| (p.src_offset, p.dst_offset, p.run, axes(p)))
        .collect()
}

fn megatron(shape: &Shape) -> Vec<View> {
    shapes::megatron(shape, AT)
}

fn trtllm(shape: &Shape) -> Vec<View> {
    shapes::trtllm(shape, AT)
}

fn nhd_layers(shape: &Shape) -> Vec<View> {
    let tensors: Vec<Tensor> = (0..shape.layers)
        .map(|pool| Tensor { pool, offset: 0 })
        .collect();
    shapes::vllm_nhd(shape, &tensors)
}

#[test]
fn equal_block_major_pools_move_whole_blocks() {
    let block = LAYERS * 2 * HEADS * 16 * HEAD;
    let p = pair(&engine(1, 16, trtllm), &engine(1, 16, trtllm), 0);
    assert_eq!(p.patterns_per_block(0), 1);
    assert_eq!(p.bytes_per_block(0), block);
    // Blocks 3 4 5 are neighbours on both sides: one run. 9 stands alone.
    let b = bind(&p, &[3, 4, 5, 9], &[0, 1, 2, 7], 64);
    assert_eq!(
        copies(&b),
        [
            (3 * block, 0, 3 * block, vec![]),
            (9 * block, 7 * block, block, vec![])
        ]
    );
    // 5 tokens of the last block: a head's tokens are contiguous, heads and planes are not.
    let tail = HEAD * 5;
    assert_eq!(
        copies(&bind(&p, &[3, 4], &[0, 1], 21)),
        [
            (3 * block, 0, block, vec![]),
            (
                4 * block,
                block,
                tail,
                vec![(LAYERS * 2 * HEADS, 16 * HEAD, 16 * HEAD)]
            ),
        ]
    );
}

#[test]
fn lesson57_one_buffer_moves_planes_layers_and_neighbours_in_one_pattern() {
    let block = HEADS * 16 * HEAD;
    let p = pair(&engine(1, 16, megatron), &engine(1, 16, megatron), 0);
    // Keys and values are equally spaced like the layers: one axis of 2 x LAYERS.
    assert_eq!(
        copies(&bind(&p, &[3, 4], &[8, 9], 32)),
        [(
            3 * block,
            8 * block,
            2 * block,
            vec![(2 * LAYERS, SLOTS * block, SLOTS * block)]
        )]
    );
}

#[test]
fn head_split_is_one_pattern_per_block_not_one_per_token() {
    // TP 2 to 1: the second source's four heads of each token.
    let (src, dst) = (engine(2, 16, megatron), engine(1, 16, megatron));
    let p = pair(&src, &dst, 1);
    assert_eq!((p.src, p.dst), (1, 0));
    assert_eq!(p.patterns_per_block(0), 1);
    let (half, whole) = (HEADS / 2 * HEAD, HEADS * HEAD);
    // Planes and layers share one step; blocks that are neighbours join the token axis.
    assert_eq!(
        copies(&bind(&p, &[5, 6], &[1, 2], 32)),
        [(
            5 * 16 * half,
            16 * whole + half,
            half,
            vec![
                (2 * LAYERS, SLOTS * 16 * half, SLOTS * 16 * whole),
                (32, half, whole)
            ]
        )]
    );
    assert_eq!(p.bytes_per_block(0), 2 * LAYERS * 16 * half);
}

#[test]
fn transposed_heads_and_tokens() {
    // NHD to HND: every (head, token) is a run of its own, in one pattern.
    let p = pair(&engine(1, 16, megatron), &engine(1, 16, trtllm), 0);
    let plane = HEADS * 16 * HEAD;
    assert_eq!(
        copies(&bind(&p, &[1], &[2], 16)),
        [(
            plane,
            2 * 2 * LAYERS * plane,
            HEAD,
            vec![
                (LAYERS, SLOTS * plane, 2 * plane),
                (2, LAYERS * SLOTS * plane, plane),
                (HEADS, HEAD, 16 * HEAD),
                (16, HEADS * HEAD, HEAD),
            ]
        )]
    );
}

#[test]
fn a_tensor_per_layer_is_a_piece_per_layer() {
    let p = pair(&engine(1, 16, nhd_layers), &engine(1, 16, nhd_layers), 0);
    assert_eq!(p.patterns_per_block(0), LAYERS as usize);
    let all = copies(&bind(&p, &[0, 1, 2], &[4, 5, 6], 48));
    let block = HEADS * 16 * HEAD;
    let planes = vec![(2, SLOTS * block, SLOTS * block)];
    assert_eq!(
        all,
        vec![(0, 4 * block, 3 * block, planes); LAYERS as usize]
    );
}

#[test]
fn larger_and_smaller_destination_blocks() {
    let row = HEADS * HEAD;
    let planes = |src: u64, dst: u64| (2 * LAYERS, SLOTS * src * row, SLOTS * dst * row);
    let flat = |c: Vec<Copy>| {
        c.into_iter()
            .map(|(s, d, run, axes)| (s / row, d / row, run / row, axes.len()))
            .collect::<Vec<_>>()
    };
    // 16 tokens into 64. Keys and values are two pieces here.
    let p = pair(&engine(1, 16, megatron), &engine(1, 64, megatron), 0);
    assert_eq!(p.patterns_per_block(0), 2);
    assert_eq!(p.bytes_per_block(0), 2 * LAYERS * 64 * row);
    let all = copies(&bind(
        &p,
        &[8, 9, 10, 11, 12, 20, 21, 7],
        &[1, 2],
        7 * 16 + 3,
    ));
    let keys = all.len() / 2;
    // Four neighbours are one destination block; 12 | 20 21 are parts of the next; 3 tokens of 7.
    assert_eq!(
        flat(all[..keys].to_vec()),
        [
            (128, 64, 64, 1),
            (192, 128, 16, 1),
            (320, 144, 32, 1),
            (112, 176, 3, 1)
        ]
    );
    assert_eq!(all[0].3, [(LAYERS, planes(16, 64).1, planes(16, 64).2)]);
    // 64 tokens into 16: the same the other way round.
    let p = pair(&engine(1, 64, megatron), &engine(1, 16, megatron), 0);
    assert_eq!(p.bytes_per_block(0), 2 * LAYERS * 16 * row);
    let all = copies(&bind(
        &p,
        &[1, 2],
        &[8, 9, 10, 11, 12, 20, 21, 7],
        7 * 16 + 3,
    ));
    assert_eq!(
        flat(all[..keys].to_vec()),
        [
            (64, 128, 64, 1),
            (128, 192, 16, 1),
            (144, 320, 32, 1),
            (176, 112, 3, 1)
        ]
    );
}

#[test]
fn lesson36_a_state_is_one_pattern_per_run_of_channels() {
    let engine = |tp: u32| -> Vec<Layout> {
        (0..tp)
            .map(|r| {
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
                    shard: Shard {
                        shards: tp,
                        shard: r,
                        ..Shard::default()
                    },
                };
                let mut layout = paged(r, 0, 1, Shard::default(), megatron);
                layout.groups = vec![Group {
                    kind: GroupKind::State,
                    layers: vec![3, 5],
                    ordinals: Ordinals::default(),
                    views: vec![
                        shapes::mamba2_conv(&sizes, AT),
                        shapes::mamba2_recurrent(&sizes, Tensor { pool: 1, offset: 0 }),
                    ],
                }];
                layout
            })
            .collect()
    };
    // Equal shards: x, B and C are neighbours on both sides.
    let p = pair(&engine(1), &engine(1), 0);
    assert_eq!(
        (p.patterns_per_block(0), p.bytes_per_block(0)),
        (2, 2 * (32 * 8 + 4 * 32))
    );
    // A TP slice of the convolution channels is three intervals; B and C are equally spaced.
    let p = pair(&engine(2), &engine(1), 1);
    assert_eq!(
        (p.patterns_per_block(0), p.bytes_per_block(0)),
        (3, 2 * (16 * 8 + 2 * 32))
    );
    let request = Request {
        src_slots: &[2],
        dst_slots: &[1],
        ..Request::default()
    };
    let b = Binding::new(&p, request).expect("binds");
    let layers = |src: u64, dst: u64| (2, 4 * src, 4 * dst);
    assert_eq!(
        copies(&b),
        [
            // x: channels 0..8 of 16 to 8..16 of 32, 8 bytes each
            (2 * 128, 256 + 64, 64, vec![layers(128, 256)]),
            // B 8..12 to 20..24, C 12..16 to 28..32
            (
                2 * 128 + 64,
                256 + 160,
                32,
                vec![layers(128, 256), (2, 32, 64)]
            ),
            // heads 0..2 of 2 to 2..4 of 4, 32 bytes each
            (2 * 64, 128 + 64, 64, vec![layers(64, 128)]),
        ]
    );
}

#[test]
fn chunks_cut_at_runs_and_long_runs_at_the_limit() {
    let p = pair(&engine(2, 16, megatron), &engine(1, 16, megatron), 0);
    let b = bind(&p, &[5, 6, 9], &[1, 2, 0], 48);
    let run = HEADS / 2 * HEAD;
    for max in [run - 1, run, run + 1, 10 * run, 33 * run + 5, u64::MAX] {
        let parts = take_all(&b, max);
        let sizes: Vec<u64> = parts
            .iter()
            .map(|part| part.iter().map(Pattern::bytes).sum())
            .collect();
        assert_eq!(sizes.iter().sum::<u64>(), b.bytes());
        assert!(sizes.iter().all(|s| *s <= max));
        if max >= run {
            // A run is never cut, and a chunk takes all that fits.
            assert!(parts.iter().flatten().all(|p| p.run == run));
            let full = (max / run).saturating_mul(run).min(b.bytes());
            assert!(
                sizes[..sizes.len() - 1].iter().all(|s| *s == full),
                "{max}: {sizes:?}"
            );
        }
        // Few pieces: what a cut adds is bounded by the number of axes, not by the bytes.
        if max >= 10 * run {
            assert!(
                parts.iter().all(|part| part.len() <= 12),
                "{max}: {parts:?}"
            );
        }
    }
}

#[test]
fn only_short_lists_whatever_the_number_of_tokens() {
    let p = pair(&engine(2, 16, megatron), &engine(1, 16, megatron), 0);
    let neighbours: Vec<i32> = (0..SLOTS as i32).collect();
    let b = bind(&p, &neighbours, &neighbours, SLOTS * 16);
    assert_eq!(take_all(&b, u64::MAX).concat().len(), 1);
    assert_eq!(b.bytes(), SLOTS * 16 * 2 * LAYERS * HEADS / 2 * HEAD);
}

#[test]
fn attention_dp_picks_its_sources_and_consumers() {
    // Source: 2 dp indices of 2 ranks. Destination: 2 dp indices of 1 rank.
    let half = |shard| Shard {
        shards: 2,
        shard,
        ..Shard::default()
    };
    let src: Vec<Layout> = (0..4)
        .map(|r| paged(r, r / 2, 16, half(r % 2), megatron))
        .collect();
    let dst: Vec<Layout> = (0..2)
        .map(|r| paged(r, r, 16, Shard::default(), trtllm))
        .collect();
    let plan = Plan::new(&src, &dst, Policy::Spread).expect("plan");
    assert_eq!(
        (plan.src_dps(), plan.dst_dps()),
        ([0, 1].as_slice(), [0, 1].as_slice())
    );
    let sources = |dst, dp| -> Vec<usize> {
        plan.sources_of(dst, dp)
            .expect("known")
            .map(|p| p.src)
            .collect()
    };
    assert_eq!(
        [sources(0, 0), sources(0, 1), sources(1, 0), sources(1, 1)],
        [[0, 1], [2, 3], [0, 1], [2, 3]]
    );
    let unknown = plan.sources_of(0, 7).err().expect("unknown index");
    assert_eq!(
        (unknown.status, unknown.text.as_str()),
        (
            Status::KVF_ERR_NOT_FOUND,
            "no source rank has the attention-DP index 7; known are [0, 1]"
        )
    );
    let consumers = |src, dp, groups: &[usize]| plan.consumers(src, dp, groups).collect::<Vec<_>>();
    assert_eq!(consumers(3, 0, &[0]), [0]);
    assert_eq!(consumers(3, 1, &[0]), [1]);
    assert!(consumers(3, 1, &[]).is_empty());
    assert!(consumers(3, 1, &[1]).is_empty());
    assert_eq!(plan.out_of_source(3).count(), 2);
}

#[test]
fn stages_without_a_layer_of_a_group_take_no_part() {
    let mut src = engine(1, 16, megatron);
    let mut empty = paged(1, 0, 16, Shard::default(), megatron);
    empty.groups[0].layers.clear();
    src.push(empty.clone());
    let mut dst = engine(1, 16, megatron);
    empty.groups[0].views.clear();
    dst.push(empty);
    let plan = Plan::new(&src, &dst, Policy::Spread).expect("plan");
    assert_eq!(plan.pairs().len(), 1);
    assert_eq!(plan.into_destination(1).count(), 0);
    assert_eq!(plan.out_of_source(1).count(), 0);
}

#[test]
fn lesson35_tables_of_a_window_are_aligned_at_their_end() {
    let group = |offset, stride| {
        let mut layout = paged(0, 0, 16, Shard::default(), megatron);
        layout.groups[0].ordinals = Ordinals { offset, stride };
        layout.groups.remove(0)
    };
    let all = group(0, 1);
    // 100 tokens are blocks 0..7; a table of 3 holds blocks 4 5 6.
    assert_eq!(all.table_len(0, 100), 7);
    assert_eq!(all.end_aligned(3, 100), Some(4));
    assert_eq!(all.end_aligned(7, 100), Some(0));
    assert_eq!(all.end_aligned(8, 100), None);
    assert_eq!(all.end_aligned(0, 0), Some(0));
    // Of ordinals 1 4 (7 is beyond the end) the last is 4.
    let part = group(1, 3);
    assert_eq!(part.table_len(0, 100), 2);
    assert_eq!(part.table_len(2, 100), 1);
    assert_eq!(part.end_aligned(1, 100), Some(4));
    assert_eq!(part.table_len(4, 100), 1);
}
