//! Every example of `docs/layouts.md` is a valid layout, and the table is what explain prints.

#![allow(clippy::panic, clippy::expect_used, clippy::unwrap_used)] // a test's way to fail

use std::collections::BTreeSet;

use kvferry::layout::shapes::{Mamba2, Shape, Shard};
use kvferry::layout::{Layout, shapes, validate};
use kvferry::layout::{Tensor, View};
use kvferry::plan::file::LayoutFile;
use kvferry::plan::{Policy, explain, explain_layouts};

const PAGE: &str = include_str!("../docs/layouts.md");

fn blocks(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    let after = PAGE.split(fence.as_str()).skip(1);
    after
        .map(|text| text.split("```").next().expect("text"))
        .collect()
}

fn example(name: &str) -> Layout {
    let json = blocks("json")
        .into_iter()
        .find(|j| j.contains(name))
        .expect("example");
    let mut ranks = LayoutFile::parse(json)
        .expect("parses")
        .layouts()
        .expect("layouts");
    assert_eq!(ranks.len(), 1);
    ranks.remove(0)
}

#[test]
fn lesson62_every_example_is_valid() {
    let all = blocks("json");
    assert_eq!(all.len(), 6);
    for json in all {
        let file = LayoutFile::parse(json).expect("parses");
        for rank in file.layouts().expect("layouts") {
            validate(&rank, &|_| Some(1 << 32)).expect("valid");
        }
        // Written and read again it is the same.
        let ranks = file.layouts().expect("layouts");
        let again = serde_json::to_string(&LayoutFile::of(&ranks)).expect("json");
        assert_eq!(
            LayoutFile::parse(&again)
                .expect("parses")
                .layouts()
                .expect("layouts"),
            ranks
        );
    }
}

#[test]
fn examples_are_what_the_constructors_give() {
    let shape = |layers, slots, tokens, heads, bytes_per_head, element_bits| Shape {
        layers,
        slots,
        tokens_per_block: tokens,
        heads,
        bytes_per_head,
        element_bits,
        shard: Shard::default(),
    };
    let at = |pool| Tensor { pool, offset: 0 };
    let same = |name: &str, views: Vec<View>| {
        let group = &example(name).groups[0];
        assert_eq!(group.views[..views.len()], views[..], "{name}");
    };
    let half = |shard| Shard {
        shards: 2,
        shard,
        ..Shard::default()
    };
    same(
        "megatron-example",
        shapes::megatron(
            &Shape {
                shard: half(1),
                ..shape(16, 1000, 64, 4, 256, 16)
            },
            at(0),
        ),
    );
    same(
        "trtllm-example",
        shapes::trtllm(&shape(4, 512, 32, 2, 256, 16), at(0)),
    );
    same(
        "vllm-example",
        shapes::vllm_nhd(&shape(2, 2048, 16, 8, 128, 8), &[at(0), at(1)]),
    );
    let hnd = shapes::vllm_hnd(&shape(2, 2048, 16, 8, 128, 8), &[at(0), at(1)]);
    assert_eq!((hnd[0].strides.token, hnd[0].strides.head), (128, 2048));
    // Strides of axes of length 1 are left out in the examples.
    let no_head = |mut views: Vec<View>| {
        views.iter_mut().for_each(|v| v.strides.head = 0);
        views
    };
    let shard = Shard {
        shards: 4,
        shard: 2,
        replicas: 2,
        replica: 1,
    };
    same(
        "sglang-example",
        no_head(shapes::per_layer(
            &Shape {
                shard,
                ..shape(2, 4096, 64, 1, 256, 16)
            },
            &[at(0), at(1)],
            &[at(2), at(3)],
        )),
    );
    let shard = Shard {
        replicas: 4,
        replica: 1,
        ..Shard::default()
    };
    let second = Tensor {
        pool: 0,
        offset: 75_497_472,
    };
    same(
        "mla-example",
        no_head(shapes::mla_latent(
            &Shape {
                shard,
                ..shape(2, 1024, 64, 1, 1152, 16)
            },
            &[at(0), second],
        )),
    );
    let sizes = Mamba2 {
        layers: 2,
        slots: 64,
        d_inner: 512,
        bc_width: 256,
        d_conv: 4,
        heads: 8,
        head_dim: 64,
        d_state: 128,
        conv_bits: 16,
        recurrent_bits: 32,
        shard: half(0),
    };
    same(
        "mamba-example",
        vec![
            shapes::mamba2_conv(&sizes, at(0)),
            shapes::mamba2_recurrent(&sizes, at(1)),
        ],
    );
}

#[test]
fn an_engine_hands_over_to_its_like() {
    for json in blocks("json") {
        let mut ranks = LayoutFile::parse(json)
            .expect("parses")
            .layouts()
            .expect("layouts");
        // One rank of several: alone it is incomplete, and that is all that is wrong.
        let alone = explain_layouts(&ranks, &ranks, Policy::Spread);
        let incomplete = ranks[0].groups[0]
            .views
            .iter()
            .any(|v| v.shards * v.replicas > 1);
        assert_eq!(alone.has_errors(), incomplete, "{}", alone.to_table());
        for view in &mut ranks[0].groups[0].views {
            view.replicas = 1;
            view.replica = 0;
            for section in &mut view.sections {
                section.total /= view.shards;
            }
            (view.shards, view.shard) = (1, 0);
        }
        let whole = explain_layouts(&ranks, &ranks, Policy::Spread);
        assert!(!whole.has_errors(), "{}", whole.to_table());
        let roles: BTreeSet<_> = whole.transfers.iter().map(|t| t.role).collect();
        assert_eq!(roles.len(), ranks[0].groups[0].views.len());
    }
}

#[test]
fn the_table_is_what_explain_prints() {
    let rank = |rank: u32, heads: u32, shards: u32| {
        format!(
            r#"{{"global_rank": {rank}, "groups": [{{"kind": "paged", "tokens_per_block": 16, "window": 0,
                "layers": [0, 1], "views": [{{"role": "key", "element_bits": 16, "heads": {heads},
                "bytes_per_head": 256, "shards": {shards}, "shard": {}, "replicas": 1, "replica": 0}}]}}]}}"#,
            rank % shards
        )
    };
    let file = |ranks: String| format!(r#"{{"fingerprint": "m", "ranks": [{ranks}]}}"#);
    let src = file(format!("{}, {}", rank(0, 1, 2), rank(1, 1, 2)));
    let printed = explain(&src, &file(rank(9, 2, 1)), Policy::Spread).to_table();
    let shown = blocks("text")
        .into_iter()
        .find(|t| t.starts_with("source  dest"))
        .expect("table");
    assert_eq!(shown, printed);
}
