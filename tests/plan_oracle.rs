//! Random engines, random requests, and a naive oracle that knows only the address formula: it
//! tags every source byte with what it is, runs the copies cell by cell, and looks at every
//! destination byte. No code is shared with the planner.

#![allow(clippy::panic, clippy::expect_used)] // a test's way to fail

use std::collections::HashMap;

use kvferry::layout::{
    Coordinates, Group, GroupKind, Layout, Ordinals, Role, Section, Strides, Tensor, View,
    validate, validate_engine,
};
use kvferry::plan::{Batch, Binding, Cursor, Pattern, Plan, Policy, Request};
use proptest::prelude::*;

/// Choices from a list of numbers; 0 is always the simplest one, so that proptest's shrinking of
/// the numbers simplifies the case.
struct Draw<'a> {
    numbers: std::slice::Iter<'a, u16>,
}

impl Draw<'_> {
    /// 0..n
    fn below(&mut self, n: u32) -> u32 {
        u32::from(self.numbers.next().copied().unwrap_or(0)) % n
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == n - 1
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u32) as usize]
    }

    /// A permutation of 0..n, often the identity.
    fn order(&mut self, n: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..n).collect();
        if self.one_in(2) {
            for i in 0..n {
                let j = i + self.below((n - i) as u32) as usize;
                all.swap(i, j);
            }
        }
        all
    }
}

#[derive(Debug)]
struct ViewModel {
    role: Role,
    bytes_per_head: u64,
    /// Name and width; one nameless entry = no sections.
    parts: Vec<(String, u32)>,
}

#[derive(Debug)]
struct GroupModel {
    layers: Vec<u32>,
    views: Vec<ViewModel>,
    /// Tokens per block at source and destination; `None` = state.
    tokens: Option<[u32; 2]>,
    windows: [u32; 2],
}

fn model(draw: &mut Draw<'_>) -> Vec<GroupModel> {
    let mut groups: Vec<GroupModel> = (0..1 + draw.below(3)).map(|_| group_model(draw)).collect();
    for layer in 0..1 + draw.below(6) {
        let group = draw.below(groups.len() as u32) as usize;
        groups[group].layers.push(layer * 2 + draw.below(2));
    }
    groups
}

fn group_model(draw: &mut Draw<'_>) -> GroupModel {
    let state = draw.one_in(3);
    let fine = draw.of(&[2, 1, 3, 4]);
    let ratio = draw.of(&[1, 2, 3, 4]);
    let coarse_side = draw.below(2) as usize;
    let mut tokens = [fine; 2];
    tokens[coarse_side] *= ratio;
    let mut windows = [0, 0];
    if !state && draw.one_in(3) {
        windows[1] = 1 + draw.below(12);
        windows[0] = draw.of(&[windows[1], 0, windows[1] + 3]);
    }
    let roles = [Role::Key, Role::Value, Role::Scale, Role::Conv];
    let first = draw.below(4) as usize;
    let mut views: Vec<ViewModel> = Vec::new();
    for i in 0..1 + draw.below(3) as usize {
        let role = roles[(first + i) % 4];
        if i > 0 && draw.one_in(2) {
            // Like keys and values.
            let (bytes_per_head, parts) = (views[0].bytes_per_head, views[0].parts.clone());
            views.push(ViewModel {
                role,
                bytes_per_head,
                parts,
            });
            continue;
        }
        views.push(ViewModel {
            role,
            bytes_per_head: u64::from(1 + draw.below(5)),
            parts: if draw.one_in(3) {
                let names = ["x", "B", "C"];
                let count = 1 + draw.below(3) as usize;
                (0..count)
                    .map(|s| (names[s].to_owned(), draw.of(&[4, 12, 8])))
                    .collect()
            } else {
                vec![(String::new(), draw.of(&[1, 2, 4, 3, 6, 8, 12]))]
            },
        });
    }
    GroupModel {
        layers: Vec::new(),
        views,
        tokens: (!state).then_some(tokens),
        windows,
    }
}

const SLOTS: u32 = 40;

/// All ranks of one side (0 = source, 1 = destination).
fn engine(draw: &mut Draw<'_>, groups: &[GroupModel], side: usize) -> Vec<Layout> {
    let tp = draw.of(&[1, 2, 4, 3]);
    let pp = 1 + draw.below(3);
    let cp = draw.of(&[1, 1, 2, 3]);
    let dp = draw.of(&[1, 1, 2]);
    let copies = if draw.one_in(4) { 2 } else { 1 };
    let cp = if tp * pp * dp * copies > 8 { 1 } else { cp };
    let stages: HashMap<u32, u32> = groups
        .iter()
        .flat_map(|g| &g.layers)
        .map(|layer| (*layer, draw.below(pp)))
        .collect();
    // One decision per group and view for the whole engine.
    let split_cp: Vec<bool> = groups
        .iter()
        .map(|g| g.tokens.is_some() && !draw.one_in(3))
        .collect();
    let shards: Vec<Vec<u32>> = groups
        .iter()
        .map(|g| {
            let mut pick = |v: &ViewModel| {
                let ok = |n: &u32| {
                    tp.is_multiple_of(*n) && v.parts.iter().all(|(_, w)| w.is_multiple_of(*n))
                };
                let fit: Vec<u32> = (1..=tp).filter(ok).collect();
                fit[fit.len() - 1 - draw.below(fit.len() as u32) as usize]
            };
            g.views.iter().map(&mut pick).collect()
        })
        .collect();
    let total = tp * pp * cp * dp * copies;
    let numbers = draw.order(total as usize);
    let mut ranks = Vec::new();
    for i in 0..total {
        let (cp_rank, rest) = (i % cp, i / cp);
        let (tp_rank, rest) = (rest % tp, rest / tp);
        let (pp_rank, rest) = (rest % pp, rest / pp);
        let (copy, dp_rank) = (rest % copies, rest / copies);
        let mut pools = Pools {
            draw,
            next: 0,
            shared: 0,
        };
        let groups = groups.iter().enumerate().map(|(g, model)| {
            let mut layers: Vec<u32> = model
                .layers
                .iter()
                .copied()
                .filter(|l| stages[l] == pp_rank)
                .collect();
            if pools.draw.one_in(4) {
                layers.reverse();
            }
            let ordinals = if split_cp[g] {
                Ordinals {
                    offset: cp_rank,
                    stride: cp,
                }
            } else {
                Ordinals::default()
            };
            let kind = match model.tokens {
                Some(t) => GroupKind::Paged {
                    tokens_per_block: t[side],
                    window: model.windows[side],
                },
                None => GroupKind::State,
            };
            let views = model.views.iter().zip(&shards[g]).map(|(view, shards)| {
                let per_shard = tp / shards;
                let outside = if split_cp[g] { 1 } else { cp };
                let sharding = View {
                    shards: *shards,
                    shard: tp_rank / per_shard,
                    replicas: per_shard * outside * copies,
                    replica: (tp_rank % per_shard * outside + cp_rank % outside) * copies + copy,
                    ..blank(view)
                };
                pools.place(
                    sharding,
                    view,
                    layers.len() as u64,
                    model.tokens.map_or(1, |t| t[side]),
                )
            });
            let views = views.collect();
            Group {
                kind,
                layers,
                ordinals,
                views,
            }
        });
        let groups = groups.collect();
        ranks.push(Layout {
            fingerprint: "m".to_owned(),
            coordinates: Coordinates {
                global_rank: 100 * side as u32 + numbers[i as usize] as u32,
                dp_rank,
                ..Coordinates::default()
            },
            groups,
        });
    }
    ranks
}

fn blank(view: &ViewModel) -> View {
    View {
        role: view.role,
        element_bits: 8,
        heads: 0,
        bytes_per_head: view.bytes_per_head,
        shards: 1,
        shard: 0,
        replicas: 1,
        replica: 0,
        sections: Vec::new(),
        tensors: Vec::new(),
        slots: SLOTS,
        strides: Strides::default(),
    }
}

struct Pools<'a, 'b> {
    draw: &'a mut Draw<'b>,
    next: u32,
    /// Bytes used of the common pool 0.
    shared: u64,
}

impl Pools<'_, '_> {
    /// Gives a view heads, strides in a random order with random gaps, and tensors.
    fn place(&mut self, mut v: View, model: &ViewModel, layers: u64, tokens: u32) -> View {
        v.heads = model.parts.iter().map(|(_, w)| w / v.shards).sum();
        if !model.parts[0].0.is_empty() {
            let order = self.draw.order(model.parts.len());
            let section = |i: &usize| Section {
                name: model.parts[*i].0.clone(),
                total: model.parts[*i].1,
            };
            v.sections = order.iter().map(section).collect();
        }
        let per_layer = self.draw.one_in(3) && layers > 1;
        let counts = [
            u64::from(v.slots),
            if per_layer { 1 } else { layers },
            u64::from(tokens),
            u64::from(v.heads),
        ];
        let mut strides = [0; 4];
        let mut extent = v.bytes_per_head;
        for axis in self.draw.order(4).into_iter().rev() {
            if counts[axis] > 1 {
                strides[axis] = extent + u64::from(self.draw.of(&[0u32, 0, 0, 1, 7]));
                extent = strides[axis] * counts[axis];
            }
        }
        let [slot, layer, token, head] = strides;
        v.strides = Strides {
            slot,
            layer,
            token,
            head,
        };
        for _ in 0..if per_layer { layers } else { 1 } {
            let offset = u64::from(self.draw.below(3));
            if self.draw.one_in(2) {
                v.tensors.push(Tensor {
                    pool: 0,
                    offset: self.shared + offset,
                });
                self.shared += offset + extent;
            } else {
                self.next += 1;
                v.tensors.push(Tensor {
                    pool: self.next,
                    offset,
                });
            }
        }
        v
    }
}

/// Address formula of `docs/layouts.md`, once more.
fn address(v: &View, local: usize, slot: u64, token: u64, head: u64) -> (u32, u64) {
    let (tensor, layer) = if v.tensors.len() == 1 {
        (v.tensors[0], local as u64 * v.strides.layer)
    } else {
        (v.tensors[local], 0)
    };
    let s = v.strides;
    (
        tensor.pool,
        tensor.offset + slot * s.slot + layer + token * s.token + head * s.head,
    )
}

/// Global name of a local head: (section, head), the section by its letter.
fn global_head(v: &View, local: u64) -> (u8, u64) {
    if v.sections.is_empty() {
        return (0, u64::from(v.shard * v.heads) + local);
    }
    let mut start = 0;
    for s in &v.sections {
        let width = u64::from(s.total / v.shards);
        if local < start + width {
            return (
                s.name.as_bytes()[0],
                u64::from(v.shard) * width + local - start,
            );
        }
        start += width;
    }
    panic!("head {local} of {v:?}");
}

type Cell = (usize, Role, u32, u64, (u8, u64), u64); // group, role, layer, token, head, byte
type Memory = HashMap<(u32, u64), Cell>;
type Tables = Vec<(Vec<i32>, u64)>;

/// A request's table for one rank: (slots, first ordinal).
fn table(
    draw: &mut Draw<'_>,
    group: &Group,
    end: u64,
    needed_from: u64,
    longer: bool,
) -> (Vec<i32>, u64) {
    let t = u64::from(group.tokens_per_slot());
    if group.kind == GroupKind::State {
        return (vec![draw.below(SLOTS) as i32], 0);
    }
    let mut first = 0;
    if draw.one_in(2) {
        first = needed_from / t;
    }
    let until = end.div_ceil(t) + if longer { u64::from(draw.below(2)) } else { 0 };
    // Mostly neighbours, some swapped: both joined and single blocks occur.
    let mut free: Vec<u32> = (0..SLOTS).collect();
    free.rotate_left(draw.below(8) as usize);
    for _ in 0..draw.below(5) {
        free.swap(draw.below(12) as usize, draw.below(SLOTS) as usize);
    }
    let mut free = free.into_iter();
    let mut slots = Vec::new();
    for ordinal in first..until {
        let o = group.ordinals;
        if ordinal % u64::from(o.stride) == u64::from(o.offset) {
            let needed = (ordinal + 1) * t > needed_from && ordinal * t < end;
            let slot = free.next().expect("enough slots") as i32;
            slots.push(if needed || draw.one_in(2) { slot } else { -1 });
        }
    }
    (slots, first)
}

/// Ordinals of a table, the naive way.
fn tokens_of(group: &Group, slots: &[i32], first: u64) -> Vec<(u64, u64, u64)> {
    // (slot, token in block, token of the request)
    let t = u64::from(group.tokens_per_slot());
    let mut ordinal = first;
    let mut out = Vec::new();
    for slot in slots {
        let o = group.ordinals;
        while ordinal % u64::from(o.stride) != u64::from(o.offset) {
            ordinal += 1;
        }
        if *slot >= 0 {
            out.extend((0..t).map(|i| (*slot as u64, i, ordinal * t + i)));
        }
        ordinal += 1;
    }
    out
}

fn cells(g: usize, group: &Group, slots: &[i32], first: u64) -> Vec<((u32, u64), Cell)> {
    let mut out = Vec::new();
    for (slot, token, global) in tokens_of(group, slots, first) {
        for v in &group.views {
            for (local, layer) in group.layers.iter().enumerate() {
                for head in 0..u64::from(v.heads) {
                    let (pool, at) = address(v, local, slot, token, head);
                    for byte in 0..v.bytes_per_head {
                        let cell = (g, v.role, *layer, global, global_head(v, head), byte);
                        out.push(((pool, at + byte), cell));
                    }
                }
            }
        }
    }
    out
}

/// Every (source byte, destination byte) of a pattern, by counting.
fn each(p: &Pattern, mut f: impl FnMut((u32, u64), (u32, u64))) {
    let mut index = vec![0; p.axes().len()];
    loop {
        let (mut s, mut d) = (p.src_offset, p.dst_offset);
        for (i, axis) in index.iter().zip(p.axes()) {
            s += i * axis.src;
            d += i * axis.dst;
        }
        for b in 0..p.run {
            f((p.src_pool, s + b), (p.dst_pool, d + b));
        }
        let mut axis = index.len();
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            if index[axis] < p.axes()[axis].count {
                break;
            }
            index[axis] = 0;
        }
    }
}

struct Tokens {
    skip: u64,
    end: u64,
    /// First token that must arrive.
    from: u64,
}

fn tokens(draw: &mut Draw<'_>, model: &GroupModel) -> Tokens {
    let Some([src, dst]) = model.tokens else {
        return Tokens {
            skip: 0,
            end: 5,
            from: 0,
        };
    };
    let (src, dst, window) = (u64::from(src), u64::from(dst), u64::from(model.windows[1]));
    let end = u64::from(draw.below(4 * src.max(dst) as u32 + 1));
    let skip = if draw.one_in(6) {
        end
    } else {
        u64::from(draw.below((end / dst + 1) as u32)) * dst
    };
    // Whole blocks of the finer side from the first live token on.
    let live = if window == 0 || window > end {
        0
    } else {
        end - window
    };
    let fine = src.min(dst);
    Tokens {
        skip,
        end,
        from: skip.max(live / fine * fine),
    }
}

fn check(numbers: &[u16]) -> Result<(), TestCaseError> {
    let mut draw = Draw {
        numbers: numbers.iter(),
    };
    let draw = &mut draw;
    let models = model(draw);
    let (src, dst) = (engine(draw, &models, 0), engine(draw, &models, 1));
    for rank in src.iter().chain(&dst) {
        validate(rank, &|_| Some(1 << 40)).map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
    for side in [&src, &dst] {
        validate_engine(side).map_err(|e| TestCaseError::fail(e.to_string()))?;
    }
    let policy = draw.of(&[Policy::Spread, Policy::Lowest]);
    let plan = Plan::new(&src, &dst, policy).map_err(|e| TestCaseError::fail(e.to_string()))?;
    let dp_of = |ranks: &[Layout], i: u32| ranks[i as usize % ranks.len()].coordinates.dp_rank;
    let (src_dp, dst_dp) = (dp_of(&src, draw.below(64)), dp_of(&dst, draw.below(64)));
    let ranges: Vec<Tokens> = models.iter().map(|m| tokens(draw, m)).collect();

    // Tables and tagged memory of every source rank of the dp index.
    let mut sources: HashMap<usize, (Tables, Memory)> = HashMap::new();
    for (i, rank) in src.iter().enumerate() {
        if rank.coordinates.dp_rank != src_dp {
            continue;
        }
        let mut memory = Memory::new();
        let mut tables = Vec::new();
        for (g, group) in rank.groups.iter().enumerate() {
            let (slots, first) = table(draw, group, ranges[g].end, ranges[g].from, true);
            for (at, cell) in cells(g, group, &slots, first) {
                prop_assert!(
                    memory.insert(at, cell).is_none(),
                    "source layout overlaps at {at:?}"
                );
            }
            tables.push((slots, first));
        }
        sources.insert(i, (tables, memory));
    }

    for (d, rank) in dst.iter().enumerate() {
        if rank.coordinates.dp_rank != dst_dp {
            continue;
        }
        let mut written = Memory::new();
        let mut expected = Memory::new();
        let mut tables = Vec::new();
        for (g, group) in rank.groups.iter().enumerate() {
            let Tokens { end, from, .. } = ranges[g];
            let (slots, first) = table(draw, group, end, from, false);
            let state = group.kind == GroupKind::State;
            for (at, cell) in cells(g, group, &slots, first) {
                if state || (cell.3 >= from && cell.3 < end) {
                    expected.insert(at, cell);
                }
            }
            tables.push((slots, first));
        }
        let max_bytes = u64::from(draw.of(&[u16::MAX, 1, 2, 3, 7, 16, 50, 200]));
        for pair in plan
            .sources_of(d, src_dp)
            .map_err(|e| TestCaseError::fail(e.to_string()))?
        {
            let (src_tables, memory) = &sources[&pair.src];
            for g in 0..models.len() {
                let request = Request {
                    group: g,
                    src_slots: &src_tables[g].0,
                    src_first_ordinal: src_tables[g].1,
                    dst_slots: &tables[g].0,
                    dst_first_ordinal: tables[g].1,
                    skip_token: ranges[g].skip,
                    token_end: ranges[g].end,
                };
                let binding =
                    Binding::new(pair, request).map_err(|e| TestCaseError::fail(e.to_string()))?;
                let (mut cursor, mut sum) = (Cursor::default(), 0);
                loop {
                    let mut patterns = Batch::new();
                    let bytes = binding.take(&mut cursor, max_bytes, &mut patterns);
                    prop_assert!(bytes <= max_bytes);
                    prop_assert_eq!(bytes, patterns.iter().map(|p| p.bytes()).sum::<u64>());
                    if bytes == 0 {
                        prop_assert!(patterns.is_empty());
                        break;
                    }
                    sum += bytes;
                    for p in patterns.iter() {
                        let mut double = None;
                        each(&p, |from, to| match memory.get(&from) {
                            Some(cell) => {
                                if written.insert(to, *cell).is_some() {
                                    double = Some(to);
                                }
                            }
                            None => double = Some(from),
                        });
                        prop_assert!(
                            double.is_none(),
                            "{double:?} written twice or read from nowhere"
                        );
                    }
                }
                prop_assert_eq!(sum, binding.bytes());
            }
        }
        let missing = expected
            .iter()
            .find(|(at, cell)| written.get(*at) != Some(*cell));
        prop_assert!(
            missing.is_none(),
            "rank {d}: {missing:?} is {:?}",
            missing.map(|m| written.get(m.0))
        );
        prop_assert_eq!(written.len(), expected.len(), "bytes outside were written");
    }
    Ok(())
}

#[test]
fn lesson28_50_52_every_byte_arrives_once_and_nothing_else() {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok());
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: cases.unwrap_or(2000),
        failure_persistence: None,
        max_shrink_iters: 4000,
        ..ProptestConfig::default()
    });
    let numbers = proptest::collection::vec(any::<u16>(), 600);
    let result = runner.run(&numbers, |numbers| check(&numbers));
    if let Err(e) = result {
        panic!("{e}");
    }
}
