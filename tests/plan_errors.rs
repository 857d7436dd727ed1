//! Golden errors: every kind of bad layout, incompatible pair and bad request, status and text.

#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)] // a test's way to fail

use std::sync::Arc;

use kvferry::error::{Result, Status, Status::*};
use kvferry::layout::shapes::{self, Mamba2, Shape, Shard};
use kvferry::layout::{
    Coordinates, Group, GroupKind, Layout, Ordinals, Role, Section, Tensor, compatible, validate,
    validate_engine,
};
use kvferry::plan::{Batch, Binding, Pair, Plan, Policy, Request, explain};

const AT: Tensor = Tensor { pool: 1, offset: 0 };

/// 4 layers of 4 heads over `tp` ranks and `pp` stages, keys and values in one buffer of 64
/// blocks of 16 tokens, and one Mamba state group.
fn engine(tp: u32, pp: u32) -> Vec<Layout> {
    let mut ranks = Vec::new();
    for rank in 0..tp * pp {
        let (stage, shard) = (
            rank / tp,
            Shard {
                shards: tp,
                shard: rank % tp,
                ..Shard::default()
            },
        );
        let layers = 4 / pp;
        let shape = Shape {
            layers,
            slots: 64,
            tokens_per_block: 16,
            heads: 4 / tp,
            bytes_per_head: 8,
            element_bits: 16,
            shard,
        };
        let sizes = Mamba2 {
            layers,
            slots: 8,
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
        let first = stage * layers;
        ranks.push(Layout {
            fingerprint: "model-a".into(),
            coordinates: Coordinates {
                global_rank: rank,
                ..Coordinates::default()
            },
            groups: vec![
                Group {
                    kind: GroupKind::Paged {
                        tokens_per_block: 16,
                        window: 0,
                    },
                    layers: (first..first + layers).collect(),
                    ordinals: Ordinals::default(),
                    views: shapes::megatron(&shape, AT),
                },
                Group {
                    kind: GroupKind::State,
                    layers: (10 + first..10 + first + layers).collect(),
                    ordinals: Ordinals::default(),
                    views: vec![
                        shapes::mamba2_conv(&sizes, Tensor { pool: 2, offset: 0 }),
                        shapes::mamba2_recurrent(&sizes, Tensor { pool: 3, offset: 0 }),
                    ],
                },
            ],
        });
    }
    ranks
}

#[track_caller]
fn refused<T>(result: Result<T>, status: Status, text: &str) {
    let error = result.err().expect("must be refused");
    assert_eq!((error.text.as_str(), error.status), (text, status));
}

#[track_caller]
fn bad_layout(change: impl FnOnce(&mut Layout), status: Status, text: &str) {
    let mut layout = engine(1, 1).remove(0);
    let pools = |pool| {
        Some(if pool == 1 {
            4 * 2 * 64 * 16 * 4 * 8
        } else {
            1 << 20
        })
        .filter(|_| pool < 4)
    };
    validate(&layout, &pools).expect("good before the change");
    change(&mut layout);
    refused(validate(&layout, &pools), status, text);
}

#[test]
fn bad_groups() {
    bad_layout(
        |l| {
            l.groups[0].ordinals = Ordinals {
                offset: 2,
                stride: 2,
            }
        },
        KVF_ERR_INVALID_ARGUMENT,
        "group 0: ordinals start at 2 with stride 2; the offset must be below the stride (all blocks: 0 and 1)",
    );
    bad_layout(
        |l| l.groups[0].ordinals.stride = 5000,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0: ordinals have stride 5000; at most 4096 is supported",
    );
    bad_layout(
        |l| l.groups[0].ordinals.stride = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0: ordinals start at 0 with stride 0; the offset must be below the stride (all blocks: 0 and 1)",
    );
    bad_layout(
        |l| {
            l.groups[1].ordinals = Ordinals {
                offset: 0,
                stride: 2,
            }
        },
        KVF_ERR_INVALID_ARGUMENT,
        "group 1: a state group has ordinals with stride 2; a state is one slot and belongs to ordinal 0",
    );
    bad_layout(
        |l| {
            l.groups[0].kind = GroupKind::Paged {
                tokens_per_block: 0,
                window: 0,
            }
        },
        KVF_ERR_INVALID_ARGUMENT,
        "group 0: a paged group has 0 tokens per block; at least 1 is needed",
    );
    bad_layout(
        |l| l.groups[0].layers[3] = 1,
        KVF_ERR_DUPLICATE,
        "group 0: layer 1 is listed twice",
    );
    bad_layout(
        |l| l.groups[0].views.clear(),
        KVF_ERR_INVALID_ARGUMENT,
        "group 0: 4 layers but no view; a group with layers has at least one",
    );
    bad_layout(
        |l| l.groups[0].views[1].role = Role::Key,
        KVF_ERR_DUPLICATE,
        "group 0: two views have the role key",
    );
}

#[test]
fn bad_counts() {
    bad_layout(
        |l| l.groups[0].views[0].heads = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: heads is 0; at least 1 is needed",
    );
    bad_layout(
        |l| l.groups[0].views[0].bytes_per_head = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: bytes per head is 0; at least 1 is needed",
    );
    bad_layout(
        |l| l.groups[0].views[0].slots = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: slots is 0; at least 1 is needed",
    );
    bad_layout(
        |l| l.groups[0].views[0].shards = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: shards is 0; at least 1 is needed",
    );
    bad_layout(
        |l| l.groups[0].views[0].replicas = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: replicas is 0; at least 1 is needed",
    );
    bad_layout(
        |l| l.groups[0].views[0].shard = 1,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: shard 1 of 1; the index must be below the count",
    );
    bad_layout(
        |l| l.groups[0].views[0].replica = 3,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: replica 3 of 1; the index must be below the count",
    );
    bad_layout(
        |l| l.groups[0].views[0].element_bits = 64,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: elements have 64 bits; 4 to 32 are known",
    );
    bad_layout(
        |l| l.groups[0].views[0].slots = u32::MAX,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: 4294967295 slots; at most 2147483647 can be named",
    );
    bad_layout(
        |l| l.groups[0].views[0].shards = u32::MAX,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: 4 heads in each of 4294967295 shards; at most 4294967295 together",
    );
    bad_layout(
        |l| l.groups[0].views[0].tensors = vec![AT; 3],
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: 3 tensors for 4 layers; one for all or one per layer is needed",
    );
    bad_layout(
        |l| l.groups[0].views[0].tensors.clear(),
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: 0 tensors for 4 layers; one for all or one per layer is needed",
    );
}

#[test]
fn bad_sections() {
    let section = |name: &str, total| Section {
        name: name.into(),
        total,
    };
    bad_layout(
        |l| l.groups[1].views[0].sections[1].name.clear(),
        KVF_ERR_INVALID_ARGUMENT,
        "group 1, view conv: section 1 has no name",
    );
    bad_layout(
        |l| l.groups[1].views[0].sections[2].name = "B".into(),
        KVF_ERR_DUPLICATE,
        "group 1, view conv: two sections have the name B",
    );
    bad_layout(
        |l| l.groups[1].views[0].sections[0] = section("x", 0),
        KVF_ERR_INVALID_ARGUMENT,
        "group 1, view conv: section x has 0 channels, which 1 shards do not divide",
    );
    bad_layout(
        |l| l.groups[1].views[0].sections[0] = section("x", 20),
        KVF_ERR_INVALID_ARGUMENT,
        "group 1, view conv: heads is 32 but the sections give 36 channels for each of 1 shards",
    );
    bad_layout(
        |l| l.groups[1].views[0].shards = 3,
        KVF_ERR_INVALID_ARGUMENT,
        "group 1, view conv: section x has 16 channels, which 3 shards do not divide",
    );
}

#[test]
fn bad_memory() {
    bad_layout(
        |l| l.groups[0].views[0].strides.token = 24,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: the token stride is 24 bytes but what lies inside it (up to the head) takes 32; 16 tokens would overlap",
    );
    bad_layout(
        |l| l.groups[0].views[0].strides.head = 4,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: the head stride is 4 bytes but what lies inside it (up to the bytes of one head) takes 8; 4 heads would overlap",
    );
    bad_layout(
        |l| l.groups[0].views[0].strides.slot = 0,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: the slot stride is 0 bytes but what lies inside it (up to the bytes of one head) takes 8; 64 slots would overlap",
    );
    bad_layout(
        |l| l.groups[0].views[0].strides.layer = 1 << 62,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key: the strides span 13835058055282196480 bytes from offset 0; no memory is that large",
    );
    bad_layout(
        |l| l.groups[0].views[1].tensors[0].offset += 1,
        KVF_ERR_OUT_OF_RANGE,
        "group 0, view value: layer 3: needs bytes 229377..262145 of pool 1, which has 262144",
    );
    bad_layout(
        |l| l.groups[0].views[1].tensors[0].pool = 7,
        KVF_ERR_NOT_FOUND,
        "group 0, view value: layer 0: pool 7 is not registered",
    );
    bad_layout(
        |l| l.groups[0].views[1].tensors[0].offset -= 8,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key (from byte 0) and group 0, view value (from byte 131064) share bytes in pool 1",
    );
    bad_layout(
        |l| l.groups[1].views[0].tensors[0] = AT,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key (from byte 0) and group 1, view conv (from byte 0) share bytes in pool 1",
    );
    // Tensors of two layers in one place.
    bad_layout(
        |l| {
            let pool = |offset| Tensor { pool: 2, offset };
            l.groups[0].views[0].tensors =
                vec![pool(60000), pool(120000), pool(160000), pool(120512)];
        },
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view key, layer 1 (from byte 120000) and group 0, view key, layer 3 (from byte 120512) share bytes in pool 2",
    );
}

#[track_caller]
fn bad_engine(change: impl FnOnce(&mut Vec<Layout>), status: Status, text: &str) {
    let mut ranks = engine(2, 2);
    validate_engine(&ranks).expect("good before the change");
    change(&mut ranks);
    refused(validate_engine(&ranks), status, text);
}

#[test]
fn bad_engines() {
    bad_engine(
        |r| r.clear(),
        KVF_ERR_INVALID_ARGUMENT,
        "an engine has no ranks; at least 1 is needed",
    );
    bad_engine(
        |r| r[1].coordinates.global_rank = 0,
        KVF_ERR_DUPLICATE,
        "two ranks have the global rank 0",
    );
    bad_engine(
        |r| r[3].fingerprint = "model-b".into(),
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: fingerprint: rank 0 has model-a, rank 3 has model-b; they must be equal",
    );
    bad_engine(
        |r| drop(r[2].groups.pop()),
        KVF_ERR_INVALID_ARGUMENT,
        "rank 0 lists 2 groups and rank 2 lists 1; a rank without layers of a group lists it empty",
    );
    bad_engine(
        |r| r[1].groups[0].kind = GroupKind::State,
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0: kind: rank 0 has paged, rank 1 has state; they must be equal",
    );
    bad_engine(
        |r| drop(r[1].groups[0].views.pop()),
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0: view roles: rank 0 has key value, rank 1 has key; they must be equal",
    );
    bad_engine(
        |r| r[2].groups[1].views[0].element_bits = 8,
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 1, view conv: element bits: rank 0 has 16, rank 2 has 8; they must be equal",
    );
    bad_engine(
        |r| r[2].groups[0].views[0].bytes_per_head = 4,
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0, view key: bytes per head: rank 0 has 8, rank 2 has 4; they must be equal",
    );
    bad_engine(
        |r| r[2].groups[0].views[0].shards = 3,
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0, view key: total heads: rank 0 has 4, rank 2 has 6; they must be equal",
    );
    bad_engine(
        |r| r[2].groups[1].views[0].sections[0].name = "z".into(),
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 1, view conv: sections: rank 0 has B:8 C:8 x:16, rank 2 has B:8 C:8 z:16; they must be equal",
    );
    bad_engine(
        |r| {
            r[3].groups[0].kind = GroupKind::Paged {
                tokens_per_block: 8,
                window: 0,
            }
        },
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0: tokens per block: rank 0 has 16, rank 3 has 8; they must be equal",
    );
    bad_engine(
        |r| {
            r[3].groups[0].kind = GroupKind::Paged {
                tokens_per_block: 16,
                window: 64,
            }
        },
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0: window: rank 0 has 0, rank 3 has 64; they must be equal",
    );
    bad_engine(
        |r| r[1].groups[0].ordinals.stride = 2,
        KVF_ERR_INVALID_ARGUMENT,
        "two ranks of one engine contradict each other: group 0: ordinal stride: rank 0 has 1, rank 1 has 2; they must be equal",
    );
    // Incomplete engines: a rank, a shard that nobody has, block ordinals, a dp index, a replica.
    bad_engine(
        |r| drop(r.remove(1)),
        KVF_ERR_INVALID_ARGUMENT,
        "the engine is incomplete: no rank of dp index 0 holds heads 2..4 (shard 1) of layers 0..2 (group 0, view key); 5 more gaps",
    );
    bad_engine(
        |r| r[2].groups[1].views[0].shard = 1,
        KVF_ERR_INVALID_ARGUMENT,
        "the engine is incomplete: no rank of dp index 0 holds heads 0..8 (shard 0) of section x of layers 12..14 (group 1, view conv); 2 more gaps",
    );
    bad_engine(
        |r| {
            r.iter_mut().for_each(|r| {
                r.groups[0].ordinals = Ordinals {
                    offset: 1,
                    stride: 4,
                }
            })
        },
        KVF_ERR_INVALID_ARGUMENT,
        "the engine is incomplete: no rank of dp index 0 holds heads 0..2 (shard 0) of layers 0..2 (group 0, view key, block ordinals 0, 4, ...); 23 more gaps",
    );
    bad_engine(
        |r| r[3].coordinates.dp_rank = 1,
        KVF_ERR_INVALID_ARGUMENT,
        "the engine is incomplete: no rank of dp index 1 holds heads 0..4 of layers 0..2 (group 0, view key); 17 more gaps",
    );
    bad_engine(
        |r| r[3].groups[0].views[1].replicas = 2,
        KVF_ERR_INVALID_ARGUMENT,
        "group 0, view value, layer 2, shard 1 of 2: rank 3 says there are 2 replicas, but no rank is replica 1",
    );
    bad_engine(
        |r| {
            for (rank, replica) in [(0, 1), (1, 1)] {
                let view = &mut r[rank].groups[0].views[0];
                (view.shards, view.shard, view.heads) = (1, 0, 4);
                (view.replicas, view.replica) = (2, replica);
                view.strides = engine(1, 2)[0].groups[0].views[0].strides;
            }
        },
        KVF_ERR_DUPLICATE,
        "group 0, view key, layer 0, shard 0 of 1: ranks 0 and 1 both say they are replica 1 of 2",
    );
}

#[track_caller]
fn bad_pair(change: impl FnOnce(&mut Vec<Layout>), status: Status, text: &str) {
    let (src, mut dst) = (engine(2, 2), engine(4, 1));
    compatible(&src, &dst).expect("good before the change");
    change(&mut dst);
    refused(Plan::new(&src, &dst, Policy::Spread), status, text);
}

/// The same change on every rank of the destination.
fn all(change: impl Fn(&mut Layout)) -> impl FnOnce(&mut Vec<Layout>) {
    move |ranks| ranks.iter_mut().for_each(change)
}

#[test]
fn incompatible_pairs() {
    use KVF_ERR_INCOMPATIBLE as NO;
    bad_pair(
        all(|r| r.fingerprint = "model-b".into()),
        NO,
        "fingerprint: source model-a, destination model-b; they must be equal",
    );
    bad_pair(
        all(|r| drop(r.groups.pop())),
        NO,
        "number of layer groups: source 2, destination 1; they must be equal",
    );
    bad_pair(
        all(|r| r.groups[0].kind = GroupKind::State),
        NO,
        "group 0: kind: source paged, destination state; they must be equal",
    );
    bad_pair(
        all(|r| r.groups[0].layers[3] = 7),
        NO,
        "group 0: layers: source 0..4, destination 0..3, 7; the source lacks 7, the destination lacks 3: is a pipeline stage missing?",
    );
    bad_pair(
        all(|r| r.groups[0].layers.truncate(3)),
        NO,
        "group 0: layers: source 0..4, destination 0..3; the source lacks nothing, the destination lacks 3: is a pipeline stage missing?",
    );
    bad_pair(
        all(|r| drop(r.groups[0].views.pop())),
        NO,
        "group 0: view roles: source key value, destination key; they must be equal",
    );
    bad_pair(
        all(|r| r.groups[0].views[1].role = Role::Latent),
        NO,
        "group 0: view roles: source key value, destination key latent; they must be equal",
    );
    bad_pair(
        all(|r| r.groups[0].views[1].element_bits = 8),
        NO,
        "group 0, view value: element bits: source 16, destination 8; they must be equal",
    );
    bad_pair(
        all(|r| r.groups[0].views[1].bytes_per_head = 4),
        NO,
        "group 0, view value: bytes per head: source 8, destination 4; they must be equal",
    );
    bad_pair(
        all(|r| {
            let view = &mut r.groups[0].views[0];
            (view.shards, view.shard) = (2, view.shard / 2);
        }),
        NO,
        "group 0, view key: total heads: source 4, destination 2; they must be equal",
    );
    bad_pair(
        all(|r| {
            for section in &mut r.groups[1].views[0].sections[1..] {
                section.name = section.name.to_lowercase();
            }
        }),
        NO,
        "group 1, view conv: sections: source B:8 C:8 x:16, destination b:8 c:8 x:16; they must be equal",
    );
    bad_pair(
        all(|r| r.groups[1].views[0].sections.clear()),
        NO,
        "group 1, view conv: sections: source B:8 C:8 x:16, destination none; they must be equal",
    );
    bad_pair(
        all(|r| {
            r.groups[0].kind = GroupKind::Paged {
                tokens_per_block: 12,
                window: 0,
            }
        }),
        NO,
        "group 0: tokens per block: source 16, destination 12; one must divide the other",
    );
    // What is wrong inside one engine says in which.
    bad_pair(
        |r| r[2].groups[0].views[0].element_bits = 8,
        KVF_ERR_INVALID_ARGUMENT,
        "destination engine: two ranks of one engine contradict each other: group 0, view key: element bits: rank 0 has 16, rank 2 has 8; they must be equal",
    );
    bad_pair(
        |r| drop(r.remove(3)),
        NO,
        "destination engine: the engine is incomplete: no rank of dp index 0 holds heads 3..4 (shard 3) of layers 0..4 (group 0, view key); 5 more gaps",
    );
}

#[test]
fn source_window_is_too_short() {
    let windowed = |window| {
        let mut ranks = engine(1, 1);
        ranks[0].groups[0].kind = GroupKind::Paged {
            tokens_per_block: 16,
            window,
        };
        ranks
    };
    for (src, dst) in [(0, 0), (0, 64), (64, 64), (96, 64)] {
        compatible(&windowed(src), &windowed(dst)).expect("holds enough");
    }
    refused(
        compatible(&windowed(64), &windowed(96)),
        KVF_ERR_INCOMPATIBLE,
        "group 0: window: source 64, destination 96; the source keeps fewer live tokens than the destination needs",
    );
    refused(
        compatible(&windowed(64), &windowed(0)),
        KVF_ERR_INCOMPATIBLE,
        "group 0: window: source 64, destination 0 (all tokens); the source keeps fewer live tokens than the destination needs",
    );
}

#[test]
fn missing_stage_rank_or_head_is_named() {
    let plan = |src: &[Layout]| Plan::new(src, &engine(1, 1), Policy::Spread);
    let ranks = engine(2, 2);
    refused(
        plan(&ranks[..2]),
        KVF_ERR_INCOMPATIBLE,
        "group 0: layers: source 0..2, destination 0..4; the source lacks 2..4, the destination lacks nothing: is a pipeline stage missing?",
    );
    refused(
        plan(&ranks[..3]),
        KVF_ERR_INCOMPATIBLE,
        "source engine: the engine is incomplete: no rank of dp index 0 holds heads 2..4 (shard 1) of layers 2..4 (group 0, view key); 5 more gaps",
    );
    refused(
        plan(&[&ranks[..1], &ranks[2..]].concat()),
        KVF_ERR_INCOMPATIBLE,
        "source engine: the engine is incomplete: no rank of dp index 0 holds heads 2..4 (shard 1) of layers 0..2 (group 0, view key); 5 more gaps",
    );
    let mut replicated = engine(1, 1);
    let mut second = replicated[0].clone();
    second.coordinates = Coordinates {
        global_rank: 1,
        dp_rank: 1,
        ..Coordinates::default()
    };
    second.groups[1].layers.clear();
    replicated.push(second);
    refused(
        plan(&replicated),
        KVF_ERR_INCOMPATIBLE,
        "source engine: the engine is incomplete: no rank of dp index 1 holds heads 0..16 (shard 0) of section x of layers 10..14 (group 1, view conv); 3 more gaps",
    );
}

fn pair(tp: u32, change: impl Fn(&mut Layout)) -> Arc<Pair> {
    let mut dst = engine(tp, 1);
    dst.iter_mut().for_each(change);
    let plan = Plan::new(&engine(2, 1), &dst, Policy::Spread).expect("plan");
    Arc::clone(&plan.pairs()[0])
}

#[track_caller]
fn bad_request(pair: &Arc<Pair>, request: Request<'_>, status: Status, text: &str) {
    refused(Binding::new(pair, request), status, text);
}

#[test]
fn bad_requests() {
    let p = pair(1, |_| ());
    let good = Request {
        src_slots: &[5, 6, 7, 8],
        dst_slots: &[1, 0, 3, 2],
        token_end: 60,
        ..Request::default()
    };
    // 4 layers, keys and values, 2 heads of 8 bytes.
    assert_eq!(
        Binding::new(&p, good).expect("good").bytes(),
        60 * 4 * 2 * 2 * 8
    );
    let invalid = KVF_ERR_INVALID_ARGUMENT;
    bad_request(
        &p,
        Request { group: 2, ..good },
        KVF_ERR_NOT_FOUND,
        "group 2 of 2; groups are counted from 0",
    );
    // More skipped than there is; not a whole destination block.
    bad_request(
        &p,
        Request {
            skip_token: 64,
            ..good
        },
        KVF_ERR_OUT_OF_RANGE,
        "group 0: cannot skip 64 of 60 tokens",
    );
    bad_request(
        &p,
        Request {
            skip_token: 8,
            ..good
        },
        invalid,
        "group 0: skip_token 8 is not a multiple of the destination's 16 tokens per block",
    );
    // Tables of other lengths than the tokens.
    bad_request(
        &p,
        Request {
            src_slots: &[5, 6, 7],
            ..good
        },
        invalid,
        "group 0: source rank 0: the table has 3 entries; owned block ordinals 0..4 need at least 4",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[1, 0, 3],
            ..good
        },
        invalid,
        "group 0: destination rank 0: the table has 3 entries; owned block ordinals 0..4 need exactly 4",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[1, 0, 3, 2, 4],
            ..good
        },
        invalid,
        "group 0: destination rank 0: the table has 5 entries; owned block ordinals 0..4 need exactly 4",
    );
    bad_request(
        &p,
        Request {
            src_slots: &[],
            ..good
        },
        invalid,
        "group 0: source rank 0: the table has 0 entries; owned block ordinals 0..4 need at least 4",
    );
    bad_request(
        &p,
        Request {
            token_end: 65,
            ..good
        },
        invalid,
        "group 0: source rank 0: the table has 4 entries; owned block ordinals 0..5 need at least 5",
    );
    bad_request(
        &p,
        Request {
            token_end: u64::MAX,
            ..good
        },
        invalid,
        "group 0: source rank 0: the table has 4 entries; owned block ordinals 0..1152921504606846976 need at least 1152921504606846976",
    );
    // A table that starts after what is needed.
    bad_request(
        &p,
        Request {
            src_first_ordinal: 1,
            ..good
        },
        invalid,
        "group 0: source rank 0: the table starts at block ordinal 1, but blocks from ordinal 0 on are needed",
    );
    bad_request(
        &p,
        Request {
            dst_first_ordinal: 2,
            skip_token: 16,
            ..good
        },
        invalid,
        "group 0: destination rank 0: the table starts at block ordinal 2, but blocks from ordinal 1 on are needed",
    );
    // Holes where data is needed, on either side; elsewhere they are fine.
    bad_request(
        &p,
        Request {
            src_slots: &[5, -1, 7, 8],
            ..good
        },
        invalid,
        "group 0: source table entry 1 (block ordinal 1) is -1, but its tokens are to be moved",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[1, 0, 3, -1],
            ..good
        },
        invalid,
        "group 0: destination table entry 3 (block ordinal 3) is -1, but its tokens are to be moved",
    );
    let skipped = Request {
        src_slots: &[-1, 6, 7, 8],
        dst_slots: &[-1, 0, 3, 2],
        skip_token: 16,
        ..good
    };
    assert_eq!(
        Binding::new(&p, skipped).expect("good").bytes(),
        44 * 4 * 2 * 2 * 8
    );
    // Ids.
    bad_request(
        &p,
        Request {
            src_slots: &[5, 6, 64, 8],
            ..good
        },
        KVF_ERR_OUT_OF_RANGE,
        "group 0: source rank 0: entry 2 of the table is slot 64; the view has 64",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[1, -2, 3, 2],
            ..good
        },
        KVF_ERR_OUT_OF_RANGE,
        "group 0: destination rank 0: entry 1 of the table is slot -2; the view has 64",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[1, 0, 3, 1],
            ..good
        },
        KVF_ERR_DUPLICATE,
        "group 0: destination rank 0: entries 0 and 3 of the table are both slot 1",
    );
    bad_request(
        &p,
        Request {
            src_slots: &[5, 5, 7, 8],
            ..good
        },
        KVF_ERR_DUPLICATE,
        "group 0: source rank 0: entries 0 and 1 of the table are both slot 5",
    );
    // States.
    let state = Request {
        group: 1,
        src_slots: &[3],
        dst_slots: &[4],
        ..Request::default()
    };
    Binding::new(&p, state).expect("good");
    bad_request(
        &p,
        Request {
            src_slots: &[],
            ..state
        },
        invalid,
        "group 1: a state is one slot on each side; 0 source and 1 destination slots were given",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[1, 2],
            ..state
        },
        invalid,
        "group 1: a state is one slot on each side; 1 source and 2 destination slots were given",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[-1],
            ..state
        },
        invalid,
        "group 1: a state has to be moved from slot 3 to slot -1; -1 is no slot",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[8],
            ..state
        },
        KVF_ERR_OUT_OF_RANGE,
        "group 1: destination rank 0: entry 0 of the table is slot 8; the view has 8",
    );
}

#[test]
fn bad_requests_of_other_blocks() {
    let invalid = KVF_ERR_INVALID_ARGUMENT;
    // Destination blocks of 4 tokens instead of 16, of which this rank owns the odd ones.
    let p = pair(1, |r| {
        r.groups[0].kind = GroupKind::Paged {
            tokens_per_block: 4,
            window: 0,
        };
    });
    let good = Request {
        src_slots: &[9, 8],
        dst_slots: &[0, 1, 2, 3, 9],
        token_end: 20,
        ..Request::default()
    };
    assert_eq!(
        Binding::new(&p, good).expect("good").bytes(),
        20 * 4 * 2 * 2 * 8
    );
    Binding::new(
        &p,
        Request {
            skip_token: 4,
            ..good
        },
    )
    .expect("a destination block");
    bad_request(
        &p,
        Request {
            skip_token: 6,
            ..good
        },
        invalid,
        "group 0: skip_token 6 is not a multiple of the destination's 4 tokens per block",
    );
    bad_request(
        &p,
        Request {
            src_slots: &[9],
            ..good
        },
        invalid,
        "group 0: source rank 0: the table has 1 entries; owned block ordinals 0..2 need at least 2",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[0, 1],
            ..good
        },
        invalid,
        "group 0: destination rank 0: the table has 2 entries; owned block ordinals 0..5 need exactly 5",
    );
    bad_request(
        &p,
        Request {
            dst_slots: &[0, 1, 2, -1, 9],
            ..good
        },
        invalid,
        "group 0: destination table entry 3 (block ordinal 3) is -1, but its tokens are to be moved",
    );
    bad_request(
        &p,
        Request {
            src_slots: &[-1, 8],
            skip_token: 12,
            ..good
        },
        invalid,
        "group 0: source table entry 0 (block ordinal 0) is -1, but its tokens are to be moved",
    );
    Binding::new(
        &p,
        Request {
            src_slots: &[-1, 8],
            skip_token: 16,
            ..good
        },
    )
    .expect("not needed");
}

#[test]
fn nothing_to_move_is_fine_in_every_shape() {
    let p = pair(1, |_| ());
    let empty: [Request<'_>; 5] = [
        Request::default(),
        Request {
            skip_token: 64,
            token_end: 64,
            ..Request::default()
        },
        Request {
            skip_token: 60,
            token_end: 60,
            src_slots: &[1, 2],
            ..Request::default()
        },
        Request {
            skip_token: 16,
            token_end: 16,
            src_slots: &[1],
            dst_slots: &[2],
            ..Request::default()
        },
        Request {
            group: 1,
            token_end: 60,
            ..Request::default()
        },
    ];
    for request in empty {
        let binding = Binding::new(&p, request).expect("nothing to move");
        assert_eq!(binding.bytes(), 0, "{request:?}");
        let (mut cursor, mut out) = (Default::default(), Batch::new());
        assert_eq!(binding.take(&mut cursor, 1 << 20, &mut out), 0);
        assert!(out.is_empty());
    }
}

#[test]
fn explanations_tell_what_is_wrong() {
    let good = r#"{"fingerprint": "m", "ranks": [{"global_rank": 0, "groups": [{"kind": "paged",
        "tokens_per_block": 16, "window": 0, "layers": [0, 1], "views": [{"role": "key", "element_bits": 16,
        "heads": 2, "bytes_per_head": 8, "shards": 1, "shard": 0, "replicas": 1, "replica": 0}]}]}]}"#;
    let told = |src: &str, text: &str| {
        let all = explain(src, good, Policy::Lowest);
        assert!(all.has_errors());
        assert_eq!(all.errors, [text]);
        assert!(all.to_table().ends_with(&format!("\nerror: {text}\n")));
    };
    assert!(!explain(good, good, Policy::Lowest).has_errors());
    told(
        "{",
        "KVF_ERR_INVALID_ARGUMENT: source layout file: not a layout file: EOF while parsing an object at line 1 column 1",
    );
    told(
        r#"{"ranks": []}"#,
        "KVF_ERR_INVALID_ARGUMENT: source layout file: not a layout file: missing field `fingerprint` at line 1 column 13",
    );
    told(
        &good.replace(r#""heads": 2"#, r#""heads": "2""#),
        "KVF_ERR_INVALID_ARGUMENT: source layout file: not a layout file: invalid type: string \"2\", expected u32 at line 3 column 20",
    );
    told(
        &good.replace("paged", "pages"),
        "KVF_ERR_INVALID_ARGUMENT: source layout file: not a layout file: unknown variant `pages`, expected `paged` or `state` at line 1 column 77",
    );
    told(
        &good.replace(r#""key""#, r#""keys""#),
        "KVF_ERR_INVALID_ARGUMENT: source layout file: rank 0: unknown role \"keys\"; known are key, value, key_value, latent, index_key, scale, conv, recurrent, opaque",
    );
    told(
        r#"{"fingerprint": "m", "ranks": []}"#,
        "KVF_ERR_INVALID_ARGUMENT: source engine: an engine has no ranks; at least 1 is needed",
    );
    told(
        &good
            .replace(r#""heads": 2"#, r#""heads": 4294967295"#)
            .replace(": 8", ": 18446744073709551615"),
        "KVF_ERR_INVALID_ARGUMENT: source layout file: rank 0: view key: 4294967295 heads of 18446744073709551615 bytes in 1024 slots are more than any memory",
    );
    told(
        &good.replace(r#""bytes_per_head": 8"#, r#""bytes_per_head": 16"#),
        "KVF_ERR_INCOMPATIBLE: group 0, view key: bytes per head: source 16, destination 8; they must be equal",
    );
}

#[test]
fn explanation_lists_what_is_uncovered() {
    let view = |heads: u32, shards: u32, shard: u32| {
        format!(
            r#"[{{"role": "key", "element_bits": 16, "heads": {heads}, "bytes_per_head": 8, "shards": {shards}, "shard": {shard}}}]"#
        )
    };
    let rank = |rank: u32, layers: &str, view: &str| {
        format!(
            r#"{{"global_rank": {rank}, "groups": [{{"kind": "paged", "tokens_per_block": 16, "layers": {layers}, "views": {view}}}]}}"#
        )
    };
    let file =
        |ranks: &[String]| format!(r#"{{"fingerprint": "m", "ranks": [{}]}}"#, ranks.join(","));
    let dst = file(&[rank(7, "[0, 1, 2]", &view(4, 1, 0))]);
    // Layer 2 has lost its stage; of layers 0 and 1 the second shard is missing.
    let src = file(&[rank(3, "[0, 1]", &view(2, 2, 0))]);
    let all = explain(&src, &dst, Policy::Spread);
    let rows: Vec<_> = all
        .uncovered
        .iter()
        .map(|u| (u.dst, u.group, u.role, u.layers, u.heads))
        .collect();
    assert_eq!(
        rows,
        [(7, 0, "key", [0, 2], [2, 4]), (7, 0, "key", [2, 3], [0, 4])]
    );
    assert_eq!(all.transfers.len(), 1);
    let row = &all.transfers[0];
    assert_eq!(
        (row.src, row.dst, row.layers, row.heads),
        (3, 7, [0, 2], [0, 2])
    );
    assert_eq!((row.patterns, row.bytes_per_block), (1, 2 * 2 * 16 * 8));
    let json: serde_json::Value =
        serde_json::from_str(&all.to_json().expect("json")).expect("json");
    assert_eq!(json["transfers"][0]["section"], serde_json::Value::Null);
    assert_eq!(json["uncovered"][1]["layers"], serde_json::json!([2, 3]));
    assert_eq!(json["errors"].as_array().expect("errors").len(), 4);
    let table = all.to_table();
    assert!(
        table.contains("uncovered: destination 7, group 0, key, layers 2..3, heads 0..4"),
        "{table}"
    );
}
