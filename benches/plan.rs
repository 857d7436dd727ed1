//! Template and bind times: medians of many runs in one process. `--json` prints one object.
//!
//! Requirements: template for 64 layers, TP 8 to 4, below 1 ms; binding 4096 blocks and taking the
//! first copies below 50 us.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use kvferry::layout::shapes::{self, Shape, Shard};
use kvferry::layout::{Coordinates, Group, GroupKind, Layout, Ordinals, Tensor};
use kvferry::plan::{Batch, Binding, Cursor, Plan, Policy, Request};

const LAYERS: u32 = 64;
const HEADS: u32 = 8;
const TOKENS: u32 = 16;
const SLOTS: u32 = 32_768;
const BLOCKS: usize = 4096;
const CHUNK: u64 = 4 << 20;

/// A tensor-parallel engine; `per_layer` = a tensor per layer in NHD, else Megatron's one buffer.
fn engine(tp: u32, per_layer: bool, cp: u32) -> Vec<Layout> {
    let mut ranks = Vec::new();
    for rank in 0..tp * cp {
        let shape = Shape {
            layers: LAYERS,
            slots: SLOTS,
            tokens_per_block: TOKENS,
            heads: HEADS / tp,
            bytes_per_head: 256,
            element_bits: 16,
            shard: Shard {
                shards: tp,
                shard: rank / cp,
                ..Shard::default()
            },
        };
        let views = if per_layer {
            let tensors: Vec<Tensor> = (0..LAYERS).map(|pool| Tensor { pool, offset: 0 }).collect();
            shapes::vllm_nhd(&shape, &tensors)
        } else {
            shapes::megatron(&shape, Tensor { pool: 0, offset: 0 })
        };
        ranks.push(Layout {
            fingerprint: "bench".into(),
            coordinates: Coordinates {
                global_rank: rank,
                ..Coordinates::default()
            },
            groups: vec![Group {
                kind: GroupKind::Paged {
                    tokens_per_block: TOKENS,
                    window: 0,
                },
                layers: (0..LAYERS).collect(),
                ordinals: Ordinals {
                    offset: rank % cp,
                    stride: cp,
                },
                views,
            }],
        });
    }
    ranks
}

/// Median nanoseconds of a run.
fn median(runs: usize, mut f: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..runs)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64() * 1e9
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[runs / 2]
}

/// Slots without neighbours, every slot once.
fn scattered(blocks: usize, salt: u64) -> Vec<i32> {
    (0..blocks as u64)
        .map(|i| ((i * 7919 + salt * 13) % u64::from(SLOTS)) as i32)
        .collect()
}

fn bind(pair: &Arc<kvferry::plan::Pair>, src: &[i32], dst: &[i32]) -> Binding {
    let request = Request {
        src_slots: src,
        dst_slots: dst,
        token_end: BLOCKS as u64 * u64::from(TOKENS),
        ..Request::default()
    };
    #[allow(clippy::expect_used)] // a bench's way to fail
    Binding::new(pair, request).expect("the tables are valid")
}

#[allow(clippy::expect_used)]
fn main() {
    let json = std::env::args().any(|a| a == "--json");
    let mut results: Vec<(&str, f64)> = Vec::new();
    for (name, per_layer) in [
        ("template_tp8_to_tp4_ns", false),
        ("template_tp8_to_tp4_per_layer_ns", true),
    ] {
        let (src, dst) = (engine(8, per_layer, 1), engine(4, per_layer, 1));
        results.push((
            name,
            median(201, || {
                black_box(
                    Plan::new(black_box(&src), black_box(&dst), Policy::Spread).expect("plan"),
                );
            }),
        ));
    }
    let plan = Plan::new(&engine(8, false, 1), &engine(4, false, 1), Policy::Spread).expect("plan");
    let pair = &plan.pairs()[0];
    let neighbours: Vec<i32> = (0..BLOCKS as i32).collect();
    let (a, b) = (scattered(BLOCKS, 1), scattered(BLOCKS, 2));
    results.push((
        "bind_4096_scattered_ns",
        median(501, || {
            black_box(bind(pair, &a, &b));
        }),
    ));
    results.push((
        "bind_4096_neighbours_ns",
        median(501, || {
            black_box(bind(pair, &neighbours, &neighbours));
        }),
    ));
    let mut out = Batch::new();
    results.push((
        "bind_4096_and_take_first_ns",
        median(501, || {
            out.clear();
            let binding = bind(pair, &a, &b);
            black_box(binding.take(&mut Cursor::default(), CHUNK, &mut out));
        }),
    ));
    let cp = Plan::new(&engine(8, false, 1), &engine(4, false, 2), Policy::Spread).expect("plan");
    let half = &b[..BLOCKS / 2];
    results.push((
        "bind_4096_context_parallel_2_ns",
        median(501, || {
            black_box(bind(&cp.pairs()[0], &a, half));
        }),
    ));
    let binding = bind(pair, &a, &b);
    let mut patterns = 0;
    let all = median(21, || {
        let mut cursor = Cursor::default();
        patterns = 0;
        loop {
            out.clear();
            if binding.take(&mut cursor, CHUNK, &mut out) == 0 {
                break;
            }
            patterns += out.len();
        }
    });
    results.push(("take_per_pattern_ns", all / patterns as f64));
    if json {
        let fields: Vec<String> = results
            .iter()
            .map(|(n, v)| format!("\"{n}\": {v:.1}"))
            .collect();
        println!("{{{}}}", fields.join(", "));
    } else {
        for (name, value) in &results {
            println!("{name:36} {value:12.1}");
        }
    }
}
