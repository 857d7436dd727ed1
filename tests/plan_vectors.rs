//! The golden reshard plans of `vectors/reshard.json` and the peer tables of TensorRT-LLM's
//! cache transceiver tests.

#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)] // a test's way to fail

use std::collections::{BTreeMap, BTreeSet};

use kvferry::plan::{Explanation, Policy, TransferRow, explain};
use serde_json::{Value, json};

fn vectors() -> Value {
    serde_json::from_str(include_str!("vectors/reshard.json")).expect("the vectors are JSON")
}

fn num(v: &Value, field: &str) -> u64 {
    v[field]
        .as_u64()
        .unwrap_or_else(|| panic!("{field} in {v}"))
}

fn explained(src: &Value, dst: &Value, name: &str) -> Explanation {
    let all = explain(&src.to_string(), &dst.to_string(), Policy::Lowest);
    assert!(!all.has_errors(), "{name}:\n{}", all.to_table());
    all
}

fn layers(rank: &Value) -> Vec<u64> {
    let start = num(rank, "layer_start");
    (start..start + num(rank, "num_layers")).collect()
}

/// One row per layer: what is left of a plan when merged layers are split.
type Row = (u64, u64, String, [u64; 3], [u64; 2], [u64; 2]);

fn per_layer(t: &TransferRow, view: &str) -> Vec<Row> {
    let span = |s: [u64; 2]| s[1] - s[0];
    assert_eq!(span(t.layers), span(t.src_layers));
    assert_eq!(span(t.layers), span(t.dst_layers));
    assert_eq!(span(t.heads), span(t.src_range));
    (0..span(t.layers))
        .map(|i| {
            let layer = [t.layers[0] + i, t.src_layers[0] + i, t.dst_layers[0] + i];
            (
                u64::from(t.src),
                u64::from(t.dst),
                view.to_owned(),
                layer,
                t.src_range,
                t.dst_range,
            )
        })
        .collect()
}

fn pair(v: &Value) -> [u64; 2] {
    [v[0].as_u64().expect("lo"), v[1].as_u64().expect("hi")]
}

#[test]
fn kv_vectors() {
    let all = vectors();
    let cases = all["kv"].as_array().expect("kv cases");
    assert_eq!(cases.len(), 30);
    for case in cases {
        let name = case["name"].as_str().expect("name");
        let heads = num(case, "kv_heads");
        let file = |side: &str| {
            let ranks = case[side].as_array().expect("ranks");
            let replicas = 1 + ranks.iter().map(|r| num(r, "replica")).max().unwrap_or(0);
            let ranks: Vec<Value> = ranks
                .iter()
                .map(|r| {
                    let view = |role: &str| {
                        json!({"role": role, "element_bits": 16, "heads": heads / num(r, "tp_size"),
                            "bytes_per_head": 256, "shards": num(r, "tp_size"), "shard": num(r, "tp_rank"),
                            "replicas": replicas, "replica": num(r, "replica")})
                    };
                    json!({"global_rank": num(r, "rank"), "groups": [{"kind": "paged", "tokens_per_block": 16,
                        "window": 0, "layers": layers(r), "views": [view("key"), view("value")]}]})
                })
                .collect();
            json!({"fingerprint": name, "ranks": ranks})
        };
        let plan = explained(&file("src"), &file("dst"), name);
        for role in ["key", "value"] {
            let got: BTreeSet<Row> = plan
                .transfers
                .iter()
                .filter(|t| t.role == role)
                .inspect(|t| {
                    assert_eq!(t.patterns, 1, "{name}: {t:?}");
                    let area = (t.layers[1] - t.layers[0]) * (t.heads[1] - t.heads[0]);
                    assert_eq!(t.bytes_per_block, area * 16 * 256);
                })
                .flat_map(|t| per_layer(t, role))
                .collect();
            let mut want = BTreeSet::new();
            for t in case["transfers"].as_array().expect("transfers") {
                let [layers, src, dst] =
                    ["layers", "src_layers", "dst_layers"].map(|field| pair(&t[field]));
                for i in 0..layers[1] - layers[0] {
                    want.insert((
                        num(t, "src"),
                        num(t, "dst"),
                        role.to_owned(),
                        [layers[0] + i, src[0] + i, dst[0] + i],
                        pair(&t["src_heads"]),
                        pair(&t["dst_heads"]),
                    ));
                }
            }
            assert_eq!(got, want, "{name}, {role}");
        }
    }
}

#[test]
fn ssm_vectors() {
    let all = vectors();
    let cases = all["ssm"].as_array().expect("ssm cases");
    assert_eq!(cases.len(), 24);
    for case in cases {
        let name = case["name"].as_str().expect("name");
        let dim = |field: &str| num(&case["dims"], field);
        let inner = dim("nheads") * dim("headdim");
        let grouped = dim("ngroups") * dim("d_state");
        let file = |side: &str| {
            let ranks = case[side].as_array().expect("ranks");
            // Ranks with equal (tp rank, layers) are replicas.
            let mut seen: BTreeMap<(u64, u64), u64> = BTreeMap::new();
            let mut replica = Vec::new();
            for r in ranks {
                let count = seen
                    .entry((num(r, "tp_rank"), num(r, "layer_start")))
                    .or_default();
                replica.push(*count);
                *count += 1;
            }
            let ranks: Vec<Value> = ranks
                .iter()
                .zip(replica)
                .map(|(r, replica)| {
                    let tp = num(r, "tp_size");
                    let replicas = seen[&(num(r, "tp_rank"), num(r, "layer_start"))];
                    let shared = json!({"element_bits": 32, "shards": tp, "shard": num(r, "tp_rank"),
                        "replicas": replicas, "replica": replica});
                    let view = |own: Value| {
                        let mut view = shared.clone();
                        view.as_object_mut().expect("object").extend(own.as_object().expect("object").clone());
                        view
                    };
                    let section = |name: &str, total: u64| json!({"name": name, "total": total});
                    let conv = view(json!({"role": "conv", "heads": (inner + 2 * grouped) / tp,
                        "bytes_per_head": dim("d_conv") * 4,
                        "sections": [section("x", inner), section("B", grouped), section("C", grouped)]}));
                    let recurrent = view(json!({"role": "recurrent", "heads": dim("nheads") / tp,
                        "bytes_per_head": dim("headdim") * dim("d_state") * 4}));
                    json!({"global_rank": num(r, "rank"), "groups": [{"kind": "state", "tokens_per_block": 0,
                        "layers": layers(r), "views": [conv, recurrent]}]})
                })
                .collect();
            json!({"fingerprint": name, "ranks": ranks})
        };
        let plan = explained(&file("src"), &file("dst"), name);
        let got: BTreeSet<Row> = plan
            .transfers
            .iter()
            .flat_map(|t| per_layer(t, t.section.as_deref().unwrap_or(t.role)))
            .collect();
        let want: BTreeSet<Row> = case["transfers"]
            .as_array()
            .expect("transfers")
            .iter()
            .map(|t| {
                (
                    num(t, "src"),
                    num(t, "dst"),
                    t["band"].as_str().expect("band").to_owned(),
                    ["layer", "src_layer", "dst_layer"].map(|f| num(t, f)),
                    pair(&t["src_range"]),
                    pair(&t["dst_range"]),
                )
            })
            .collect();
        assert_eq!(got, want, "{name}");
    }
}

/// tp, pp, cp, dp sizes; attention DP splits tp.
#[derive(Clone, Copy)]
struct Sizes {
    tp: u64,
    pp: u64,
    cp: u64,
    dp: u64,
}

const fn sizes(tp: u64, pp: u64) -> Sizes {
    Sizes {
        tp,
        pp,
        cp: 1,
        dp: 1,
    }
}

const LAYERS: u64 = 16;

/// MLA: one latent head that every tensor-parallel rank holds. Ranks count pp, tp, cp (cp fastest).
fn mla(s: Sizes) -> Value {
    let mut ranks = Vec::new();
    let per_dp = s.tp / s.dp;
    for pp in 0..s.pp {
        for tp in 0..s.tp {
            for cp in 0..s.cp {
                let layers: Vec<u64> = (pp * LAYERS / s.pp..(pp + 1) * LAYERS / s.pp).collect();
                ranks.push(json!({
                    "global_rank": (pp * s.tp + tp) * s.cp + cp, "dp_rank": tp / per_dp,
                    "groups": [{"kind": "paged", "tokens_per_block": 16, "layers": layers,
                        "ordinals": {"offset": cp, "stride": s.cp},
                        "views": [{"role": "latent", "element_bits": 16, "heads": 1, "bytes_per_head": 1152,
                            "replicas": per_dp, "replica": tp % per_dp}]}]
                }));
            }
        }
    }
    json!({"fingerprint": "mla", "ranks": ranks})
}

/// Which destinations read each source rank; `expected[rank]`, "" = not elected.
fn readers(src: Sizes, dst: Sizes, expected: &[&[u32]]) {
    let plan = explain(&mla(src).to_string(), &mla(dst).to_string(), Policy::Spread);
    assert!(!plan.has_errors(), "{}", plan.to_table());
    let mut got = vec![BTreeSet::new(); expected.len()];
    for t in &plan.transfers {
        got[t.src as usize].insert(t.dst);
    }
    let want: Vec<BTreeSet<u32>> = expected
        .iter()
        .map(|e| e.iter().copied().collect())
        .collect();
    assert_eq!(got, want);
}

// The tables give for each context rank its peers and whether it sends. Peers of a rank that does
// not send are empty here; everybody who sends has exactly the table's peers.

#[test]
fn peers_tp4_pp2_to_tp2_pp2() {
    readers(
        sizes(4, 2),
        sizes(2, 2),
        &[&[0], &[], &[1], &[], &[2], &[], &[3], &[]],
    );
}

#[test]
fn peers_tp2_pp2_to_tp4_pp2() {
    readers(
        sizes(2, 2),
        sizes(4, 2),
        &[&[0, 1], &[2, 3], &[4, 5], &[6, 7]],
    );
}

#[test]
fn peers_tp2_to_tp4_pp2() {
    readers(sizes(2, 1), sizes(4, 2), &[&[0, 4, 1, 5], &[2, 6, 3, 7]]);
}

#[test]
fn peers_tp2_to_pp2() {
    readers(sizes(2, 1), sizes(1, 2), &[&[0, 1], &[]]);
}

/// Every context rank is alone in its dp index, every generation rank too: whichever index a
/// request lives in, that rank sends.
#[test]
fn peers_dp4_to_dp2() {
    let (src, dst) = (
        Sizes {
            dp: 4,
            ..sizes(4, 1)
        },
        Sizes {
            dp: 2,
            ..sizes(2, 1)
        },
    );
    readers(src, dst, &[&[0, 1], &[0, 1], &[0, 1], &[0, 1]]);
}

/// Re-derived: TensorRT-LLM spreads over context ranks by the generation dp index; SPREAD counts
/// destinations inside one dp index, so each of them is destination 0 of 1 and reads replica 0.
#[test]
fn peers_tp4_to_dp2() {
    let dst = Sizes {
        dp: 2,
        ..sizes(2, 1)
    };
    readers(sizes(4, 1), dst, &[&[0, 1], &[], &[], &[]]);
}

/// TP 4 in 2 dp indices of 2 replicas each: destination i of 2 reads replica 2 i.
#[test]
fn peers_tp4_to_tp4_dp2() {
    let dst = Sizes {
        dp: 2,
        ..sizes(4, 1)
    };
    readers(sizes(4, 1), dst, &[&[0, 2], &[], &[1, 3], &[]]);
}

#[test]
fn peers_dp4_to_tp2() {
    let src = Sizes {
        dp: 4,
        ..sizes(4, 1)
    };
    readers(src, sizes(2, 1), &[&[0, 1], &[0, 1], &[0, 1], &[0, 1]]);
}

/// Context parallelism only splits block ordinals: each of the two generation ranks of a stage is
/// the only one that wants its blocks, so replica 0 of the stage serves both.
#[test]
fn peers_tp2_pp2_to_pp2_cp2() {
    let dst = Sizes {
        cp: 2,
        ..sizes(1, 2)
    };
    readers(sizes(2, 2), dst, &[&[0, 1], &[], &[2, 3], &[]]);
}

/// Two replicas on either side of each context-parallel index (rank = tp * 2 + cp).
#[test]
fn peers_tp2_to_tp2_cp2() {
    let dst = Sizes {
        cp: 2,
        ..sizes(2, 1)
    };
    readers(sizes(2, 1), dst, &[&[0, 1], &[2, 3]]);
}

/// One of two KV heads per pair of ranks (fewer KV heads than TP) to whole heads on two ranks.
#[test]
fn fewer_heads_than_tp() {
    let file = |tp: u64, heads: u64| {
        let shards = tp.min(2);
        let ranks: Vec<Value> = (0..tp)
            .map(|r| {
                let per = tp / shards;
                json!({"global_rank": r, "groups": [{"kind": "paged", "tokens_per_block": 16, "layers": [0, 1],
                    "views": [{"role": "key", "element_bits": 16, "heads": heads, "bytes_per_head": 64,
                        "shards": shards, "shard": r / per, "replicas": per, "replica": r % per}]}]})
            })
            .collect();
        json!({"fingerprint": "gqa", "ranks": ranks}).to_string()
    };
    let rows = |src: &str, dst: &str, policy| {
        let plan = explain(src, dst, policy);
        assert!(!plan.has_errors(), "{}", plan.to_table());
        plan.transfers
            .iter()
            .map(|t| (t.src, t.dst, t.heads, t.src_range, t.dst_range))
            .collect::<Vec<_>>()
    };
    let (one, four, eight) = (file(1, 2), file(4, 1), file(8, 1));
    assert_eq!(
        rows(&four, &one, Policy::Spread),
        [
            (0, 0, [0, 1], [0, 1], [0, 1]),
            (2, 0, [1, 2], [0, 1], [1, 2])
        ]
    );
    let head = |src, dst, h| (src, dst, [h, h + 1], [0, 1], [0, 1]);
    assert_eq!(
        rows(&four, &eight, Policy::Spread),
        [0, 0, 1, 1, 2, 2, 3, 3]
            .iter()
            .zip(0..8)
            .map(|(s, d)| head(*s, d, u64::from(d > 3)))
            .collect::<Vec<_>>()
    );
    assert_eq!(
        rows(&four, &eight, Policy::Lowest),
        [0, 0, 0, 0, 2, 2, 2, 2]
            .iter()
            .zip(0..8)
            .map(|(s, d)| head(*s, d, u64::from(d > 3)))
            .collect::<Vec<_>>()
    );
    // An odd split: head 0 of three shards of 2 heads against two of 3.
    let six = |shards: u64| {
        let ranks: Vec<Value> = (0..shards)
            .map(|r| {
                json!({"global_rank": r, "groups": [{"kind": "paged", "tokens_per_block": 16, "layers": [0],
                    "views": [{"role": "key", "element_bits": 16, "heads": 6 / shards, "bytes_per_head": 64,
                        "shards": shards, "shard": r}]}]})
            })
            .collect();
        json!({"fingerprint": "six", "ranks": ranks}).to_string()
    };
    assert_eq!(
        rows(&six(3), &six(2), Policy::Spread),
        [
            (0, 0, [0, 2], [0, 2], [0, 2]),
            (1, 0, [2, 3], [0, 1], [2, 3]),
            (1, 1, [3, 4], [1, 2], [0, 1]),
            (2, 1, [4, 6], [0, 2], [1, 3]),
        ]
    );
}
