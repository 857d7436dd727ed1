//! Patterns between two pools of this process, against the plainest loop.

use proptest::prelude::*;

use super::*;
use crate::error::Status;
use crate::layout::{Coordinates, Group, GroupKind, Layout, Ordinals, Role, Strides, Tensor, View};
use crate::plan::{Batch, Binding, Dim, MAX_DIMS, Plan, Policy, Request};

/// A pattern from (count, source stride, destination stride) axes, outermost first.
pub(in crate::transport) fn pattern(
    src_pool: u32,
    src_offset: u64,
    dst_pool: u32,
    dst_offset: u64,
    run: u64,
    axes: &[(u64, u64, u64)],
) -> Pattern {
    let mut dims = [Dim::default(); MAX_DIMS];
    for (dim, &(count, src, dst)) in dims.iter_mut().zip(axes) {
        *dim = Dim { count, src, dst };
    }
    Pattern {
        src_pool,
        dst_pool,
        src_offset,
        dst_offset,
        run,
        dims,
        rank: axes.len() as u8,
    }
}

/// Bytes that a pattern moves.
pub(in crate::transport) fn moved(pattern: &Pattern) -> u64 {
    let dims = &pattern.dims[..usize::from(pattern.rank)];
    pattern.run * dims.iter().map(|dim| dim.count).product::<u64>()
}

/// What a destination of `bytes`, filled with `fresh`, holds after the batch.
pub(in crate::transport) fn naive(
    batch: &[Pattern],
    source_byte: impl Fn(u32, usize) -> u8,
    bytes: usize,
    fresh: u8,
) -> Vec<u8> {
    let mut dst = vec![fresh; bytes];
    for p in batch {
        let dims = &p.dims[..usize::from(p.rank)];
        let repetitions: u64 = dims.iter().map(|dim| dim.count).product();
        for mut i in 0..repetitions {
            let (mut from, mut to) = (p.src_offset, p.dst_offset);
            for dim in dims.iter().rev() {
                from += i % dim.count * dim.src;
                to += i % dim.count * dim.dst;
                i /= dim.count;
            }
            for byte in 0..p.run {
                dst[(to + byte) as usize] = source_byte(p.src_pool, (from + byte) as usize);
            }
        }
    }
    dst
}

/// Batches of up to eight patterns out of `pools` of `src_bytes` into disjoint eighths of pool 1
/// with `dst_bytes`. Sources may overlap, destinations never do.
pub(in crate::transport) fn patterns(
    pools: &'static [u32],
    src_bytes: u64,
    dst_bytes: u64,
) -> impl Strategy<Value = Vec<Pattern>> {
    let eighth = dst_bytes / 8;
    let axis = (1u64..5, 0u64..3000, 0u64..40);
    let one = (
        prop::sample::select(pools),
        1u64..300,
        prop::collection::vec(axis, 0..=MAX_DIMS),
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
    );
    prop::collection::vec(one, 1..=8).prop_map(move |drawn| {
        let place = |(i, (pool, run, axes, src_at, dst_at)): (
            usize,
            (_, u64, Vec<_>, prop::sample::Index, prop::sample::Index),
        )| {
            let mut dims = Vec::new();
            let (mut src_extent, mut dst_extent) = (run, run);
            // Inside out, dropping axes that would leave the eighth.
            for (count, src, gap) in axes {
                let dst = dst_extent + gap;
                let longer = dst * (count - 1) + dst_extent;
                if longer <= eighth {
                    dst_extent = longer;
                    src_extent += src * (count - 1);
                    dims.insert(0, (count, src, dst));
                }
            }
            let src_offset = src_at.index((src_bytes - src_extent + 1) as usize) as u64;
            let dst_offset = dst_at.index((eighth - dst_extent + 1) as usize) as u64;
            pattern(
                pool,
                src_offset,
                1,
                i as u64 * eighth + dst_offset,
                run,
                &dims,
            )
        };
        drawn.into_iter().enumerate().map(place).collect()
    })
}

/// A job with many strided pieces: keys from one source pool, values from another, token-major
/// slots into head-major layers of pool 1; odd blocks of the source, in reverse.
#[cfg_attr(miri, allow(dead_code))] // whole jobs are run where there are memfds
pub(in crate::transport) struct Cache;

#[cfg_attr(miri, allow(dead_code))]
impl Cache {
    const LAYERS: u64 = 8;
    const HEADS: u64 = 2;
    const TOKENS: u64 = 16;
    const HEAD_BYTES: u64 = 128;
    const SLOTS: u64 = 128;
    /// Bytes of keys, and of values, on either side.
    pub(in crate::transport) const BYTES: u64 =
        Self::LAYERS * Self::HEADS * Self::TOKENS * Self::HEAD_BYTES * Self::SLOTS;
    /// Bytes that the job moves: half of the slots.
    pub(in crate::transport) const MOVED: u64 = Self::BYTES;

    fn layout(keys: Tensor, values: Tensor, strides: Strides) -> Layout {
        let view = |role, tensor| View {
            role,
            element_bits: 16,
            heads: Self::HEADS as u32,
            bytes_per_head: Self::HEAD_BYTES,
            shards: 1,
            shard: 0,
            replicas: 1,
            replica: 0,
            sections: Vec::new(),
            tensors: vec![tensor],
            slots: Self::SLOTS as u32,
            strides,
        };
        Layout {
            fingerprint: "test".into(),
            coordinates: Coordinates::default(),
            groups: vec![Group {
                kind: GroupKind::Paged {
                    tokens_per_block: Self::TOKENS as u32,
                    window: 0,
                },
                layers: (0..Self::LAYERS as u32).collect(),
                ordinals: Ordinals::default(),
                views: vec![view(Role::Key, keys), view(Role::Value, values)],
            }],
        }
    }

    fn src_strides() -> Strides {
        let token = Self::HEADS * Self::HEAD_BYTES;
        let layer = Self::TOKENS * token;
        Strides {
            slot: Self::LAYERS * layer,
            layer,
            token,
            head: Self::HEAD_BYTES,
        }
    }

    fn dst_strides() -> Strides {
        let head = Self::TOKENS * Self::HEAD_BYTES;
        let slot = Self::HEADS * head;
        Strides {
            slot,
            layer: Self::SLOTS * slot,
            token: Self::HEAD_BYTES,
            head,
        }
    }

    fn slots() -> (Vec<i32>, Vec<i32>) {
        let src = (0..Self::SLOTS as i32 / 2)
            .map(|i| 2 * i + 1)
            .rev()
            .collect();
        let dst = (0..Self::SLOTS as i32 / 2).collect();
        (src, dst)
    }

    /// The job's bindings for these source pools.
    pub(in crate::transport) fn bindings(keys: u32, values: u32) -> Vec<Binding> {
        let at = |pool, offset| Tensor { pool, offset };
        let src = Self::layout(at(keys, 0), at(values, 0), Self::src_strides());
        let dst = Self::layout(at(1, 0), at(1, Self::BYTES), Self::dst_strides());
        let plan = Plan::new(&[src], &[dst], Policy::Spread).unwrap();
        let (src_slots, dst_slots) = Self::slots();
        let request = Request {
            group: 0,
            src_first_ordinal: 0,
            dst_first_ordinal: 0,
            src_slots: &src_slots,
            dst_slots: &dst_slots,
            skip_token: 0,
            token_end: Self::TOKENS * Self::SLOTS / 2,
        };
        plan.into_destination(0)
            .map(|pair| Binding::new(pair, request).unwrap())
            .collect()
    }

    /// What pool 1 (2 * BYTES, filled with `fresh`) holds afterwards, from the strides alone.
    pub(in crate::transport) fn expected(
        (keys, values): (u32, u32),
        source_byte: impl Fn(u32, usize) -> u8,
        fresh: u8,
    ) -> Vec<u8> {
        let (from, to) = (Self::src_strides(), Self::dst_strides());
        let mut bytes = vec![fresh; 2 * Self::BYTES as usize];
        let (src_slots, dst_slots) = Self::slots();
        for (src, dst) in src_slots.into_iter().zip(dst_slots) {
            for layer in 0..Self::LAYERS {
                for token in 0..Self::TOKENS {
                    for head in 0..Self::HEADS {
                        let offset = |slot: i32, s: &Strides| {
                            slot as u64 * s.slot + layer * s.layer + token * s.token + head * s.head
                        };
                        let (from, to) = (offset(src, &from), offset(dst, &to));
                        for byte in 0..Self::HEAD_BYTES {
                            for (pool, start) in [(keys, 0), (values, Self::BYTES)] {
                                bytes[(start + to + byte) as usize] =
                                    source_byte(pool, (from + byte) as usize);
                            }
                        }
                    }
                }
            }
        }
        bytes
    }
}

/// Bytes of [`block`].
#[cfg_attr(miri, allow(dead_code))]
pub(in crate::transport) const BLOCK: usize = 4096;

/// A binding of block 0 of both sides, of `pool` and of pool 1.
#[cfg_attr(miri, allow(dead_code))]
pub(in crate::transport) fn block(pool: u32) -> Vec<Binding> {
    let layout = |pool| Layout {
        fingerprint: "test".into(),
        coordinates: Coordinates::default(),
        groups: vec![Group {
            kind: GroupKind::Paged {
                tokens_per_block: 16,
                window: 0,
            },
            layers: vec![0],
            ordinals: Ordinals::default(),
            views: vec![View {
                role: Role::Key,
                element_bits: 16,
                heads: 1,
                bytes_per_head: BLOCK as u64 / 16,
                shards: 1,
                shard: 0,
                replicas: 1,
                replica: 0,
                sections: Vec::new(),
                tensors: vec![Tensor { pool, offset: 0 }],
                slots: 1,
                strides: Strides {
                    slot: BLOCK as u64,
                    layer: BLOCK as u64,
                    token: BLOCK as u64 / 16,
                    head: BLOCK as u64 / 16,
                },
            }],
        }],
    };
    let plan = Plan::new(&[layout(pool)], &[layout(1)], Policy::Spread).unwrap();
    let request = Request {
        src_slots: &[0],
        dst_slots: &[0],
        token_end: 16,
        ..Request::default()
    };
    let pairs = plan.into_destination(0);
    pairs
        .map(|pair| Binding::new(pair, request).unwrap())
        .collect()
}

pub(in crate::transport) fn source_byte(pool: u32, offset: usize) -> u8 {
    (offset.wrapping_mul(2_654_435_761) >> 11) as u8 ^ pool as u8
}

pub(in crate::transport) fn filled(pool: u32, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| source_byte(pool, i)).collect()
}

pub(in crate::transport) fn register(id: u32, memory: &mut [u8]) -> Pool {
    // SAFETY: the tests keep the memory longer than the pool and use no reference meanwhile.
    unsafe { Pool::register(id, memory.as_mut_ptr(), memory.len() as u64).unwrap() }
}

fn copy(patterns: &[Pattern], sources: &[&Pool], destinations: &[&Pool]) -> Result<u64> {
    let find = |pools: &[&Pool], id| pools.iter().position(|pool: &&Pool| pool.id() == id);
    let batch: Batch = patterns.iter().copied().collect();
    copy_batch(
        batch.shapes(),
        |id| find(sources, id).map(|i| Source::from(sources[i])),
        |id| find(destinations, id).map(|i| destinations[i]),
        0,
        &mut Scratch::default(),
    )
}

#[test]
fn runs_come_in_order() {
    let p = pattern(0, 100, 0, 7, 4, &[(2, 50, 10), (1, 9, 9), (3, 5, 4)]);
    let runs: Vec<_> = Runs::new(&p).collect();
    let expected = [
        (100, 7),
        (105, 11),
        (110, 15),
        (150, 17),
        (155, 21),
        (160, 25),
    ];
    assert_eq!(runs, expected);
    assert_eq!(
        Runs::new(&pattern(0, 3, 0, 4, 1, &[])).collect::<Vec<_>>(),
        [(3, 4)]
    );
}

#[test]
fn the_last_byte_decides() {
    // 16 + 2 * 100 source bytes, 16 + 2 * 20 destination bytes.
    let p = pattern(0, 10, 0, 5, 16, &[(3, 100, 20)]);
    assert_eq!(check(&p, 226, 61).unwrap(), 48);
    let err = check(&p, 225, 61).unwrap_err();
    assert!(err.text.contains("reads 216 bytes from offset 10"), "{err}");
    let err = check(&p, 226, 60).unwrap_err();
    assert!(err.text.contains("writes 56 bytes from offset 5"), "{err}");
    assert_eq!(err.status, Status::KVF_ERR_TRANSFER);
}

#[test]
fn numbers_that_overflow_are_refused() {
    for axes in [
        &[(u64::MAX, 1, 1), (2, 0, 0)][..],
        &[(3, u64::MAX, 0)],
        &[(3, 0, u64::MAX)],
        &[(2, u64::MAX, 0)],
    ] {
        assert!(check(&pattern(0, 1, 0, 1, 1, axes), u64::MAX, u64::MAX).is_err());
    }
    let mut p = pattern(0, 0, 0, 0, 1, &[]);
    p.rank = MAX_DIMS as u8 + 1;
    assert!(check(&p, 10, 10).is_err());
}

#[test]
fn nothing_to_move_is_fine_wherever_it_points() {
    let (mut a, mut b) = ([1; 8], [2; 8]);
    let (src, dst) = (register(0, &mut a), register(1, &mut b));
    let batch = [
        pattern(0, 1000, 1, 1000, 0, &[]),
        pattern(0, 1000, 1, 1000, 8, &[(0, 1, 1)]),
    ];
    assert_eq!(copy(&batch, &[&src], &[&dst]).unwrap(), 0);
    assert_eq!(copy(&[], &[&src], &[&dst]).unwrap(), 0);
    drop((src, dst));
    assert_eq!(b, [2; 8]);
}

#[test]
fn a_bad_pattern_stops_the_whole_batch() {
    let (mut a, mut b) = (filled(0, 64), vec![2; 64]);
    let (src, dst) = (register(0, &mut a), register(1, &mut b));
    let good = pattern(0, 0, 1, 0, 8, &[]);
    for bad in [
        pattern(0, 57, 1, 0, 8, &[]),
        pattern(0, 0, 1, 57, 8, &[]),
        pattern(5, 0, 1, 0, 8, &[]),
        pattern(0, 0, 5, 0, 8, &[]),
    ] {
        let err = copy(&[good, bad], &[&src], &[&dst]).unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_TRANSFER);
    }
    drop((src, dst));
    assert_eq!(b, [2; 64]);
}

#[test]
fn one_range_on_both_sides_works_as_long_as_runs_are_disjoint() {
    let mut memory = filled(0, 64);
    let mut expected = memory.clone();
    for i in 0..4 {
        expected.copy_within(i * 16..i * 16 + 8, i * 16 + 8);
    }
    let both = register(0, &mut memory);
    let halves = pattern(0, 0, 0, 8, 8, &[(4, 16, 16)]);
    assert_eq!(copy(&[halves], &[&both], &[&both]).unwrap(), 32);
    for overlapping in [
        pattern(0, 0, 0, 7, 8, &[(3, 16, 16)]),
        pattern(0, 0, 0, 0, 1, &[]),
        pattern(0, 16, 0, 24, 9, &[(2, 4, 9)]),
    ] {
        let before = copy(&[overlapping], &[&both], &[&both]).unwrap_err();
        assert!(before.text.contains("also reads"), "{before}");
    }
    drop(both);
    assert_eq!(memory, expected);
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn strided_copies_equal_the_naive_copy(batch in patterns(&[0, 2], 1 << 16, 1 << 14)) {
        let (mut a, mut b) = (filled(0, 1 << 16), filled(2, 1 << 16));
        let mut memory = vec![0xee; 1 << 14];
        let (first, second) = (register(0, &mut a), register(2, &mut b));
        let dst = register(1, &mut memory);
        let bytes = copy(&batch, &[&first, &second], &[&dst]).unwrap();
        drop((first, second, dst));
        prop_assert_eq!(bytes, batch.iter().map(moved).sum::<u64>());
        prop_assert!(memory == naive(&batch, source_byte, 1 << 14, 0xee));
    }
}
