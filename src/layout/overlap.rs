//! Do two strided regions of one pool touch the same byte? Exact, without listing bytes.

/// One axis: repetitions and the bytes between them.
pub(super) type Axis = (u64, u64);

/// `run` contiguous bytes at `base`, repeated over axes that nest: an axis' stride is at least
/// the extent of the axes after it.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub base: u64,
    pub run: u64,
    /// Descending strides, no axis of length 1.
    pub axes: Vec<Axis>,
}

impl Region {
    /// Bytes from the first to the last.
    pub fn extent(&self) -> u64 {
        extent(&self.axes, self.run)
    }
}

/// Of two regions, whether they share a byte; `None` if that takes more than `budget` steps
/// (strides that have nothing to do with each other).
pub(super) fn meet(a: &Region, b: &Region, budget: &mut u32) -> Option<bool> {
    let delta = i128::from(b.base) - i128::from(a.base);
    search((&a.axes, a.run), (&b.axes, b.run), delta, budget)
}

fn extent(axes: &[Axis], run: u64) -> u64 {
    run + axes
        .iter()
        .map(|(count, stride)| (count - 1) * stride)
        .sum::<u64>()
}

/// `delta` = start of `b` minus start of `a`. Only the repetitions whose envelopes can touch are
/// followed: at most three per level for equal strides, which is what real pools have.
fn search(a: (&[Axis], u64), b: (&[Axis], u64), delta: i128, budget: &mut u32) -> Option<bool> {
    *budget = budget.checked_sub(1)?;
    let (ea, eb) = (i128::from(extent(a.0, a.1)), i128::from(extent(b.0, b.1)));
    if delta >= ea || -delta >= eb {
        return Some(false);
    }
    let (next_a, next_b, stride, lo, hi) = match (a.0.split_first(), b.0.split_first()) {
        (None, None) => return Some(true),
        (Some((x, ra)), Some((y, rb))) if x.1 == y.1 => {
            (ra, rb, x.1, 1 - i128::from(y.0), i128::from(x.0) - 1)
        }
        (Some((x, ra)), y) if y.is_none_or(|(y, _)| y.1 < x.1) => {
            (ra, b.0, x.1, 0, i128::from(x.0) - 1)
        }
        (_, Some((y, rb))) => (a.0, rb, y.1, 1 - i128::from(y.0), 0),
        (Some(_), None) => return None, // not reached: the arm above takes it
    };
    // Repetition i of a against j of b starts `delta - (i - j) * stride` apart.
    let stride = i128::from(stride);
    let (ea, eb) = (
        i128::from(extent(next_a, a.1)),
        i128::from(extent(next_b, b.1)),
    );
    let first = lo.max((delta - ea).div_euclid(stride) + 1);
    let last = hi.min((delta + eb - 1).div_euclid(stride));
    for k in first..=last {
        if search((next_a, a.1), (next_b, b.1), delta - k * stride, budget)? {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    /// A region with nested axes from (count, gap) pairs, innermost first.
    fn region(base: u64, run: u64, nested: &[(u64, u64)]) -> Region {
        let mut axes = Vec::new();
        let mut inside = run;
        for (count, gap) in nested {
            let stride = inside + gap;
            if *count > 1 {
                axes.push((*count, stride));
                inside = stride * count;
            }
        }
        axes.reverse();
        Region { base, run, axes }
    }

    fn bytes(r: &Region) -> HashSet<u64> {
        let mut starts = vec![r.base];
        for (count, stride) in &r.axes {
            starts = starts
                .iter()
                .flat_map(|s| (0..*count).map(move |i| s + i * stride))
                .collect();
        }
        starts.iter().flat_map(|s| *s..s + r.run).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn agrees_with_listing_every_byte(
            a in (0u64..60, 1u64..6, prop::collection::vec((1u64..5, 0u64..9), 0..4)),
            b in (0u64..60, 1u64..6, prop::collection::vec((1u64..5, 0u64..9), 0..4)),
        ) {
            let (a, b) = (region(a.0, a.1, &a.2), region(b.0, b.1, &b.2));
            let shared = bytes(&a).intersection(&bytes(&b)).next().is_some();
            prop_assert_eq!(meet(&a, &b, &mut 100_000), Some(shared));
            prop_assert_eq!(meet(&b, &a, &mut 100_000), Some(shared));
        }
    }

    /// Keys and values of a pool with 10^6 blocks: layers interleaved in each block.
    #[test]
    fn interleaved_planes_take_few_steps() {
        let axes = vec![(1_000_000, 64 * 8192), (64, 8192), (8, 512), (16, 32)];
        let keys = Region {
            base: 0,
            run: 32,
            axes,
        };
        let values = Region {
            base: 4096,
            ..keys.clone()
        };
        assert_eq!(meet(&keys, &values, &mut 100), Some(false));
        let late = Region {
            base: 4095,
            ..keys.clone()
        };
        assert_eq!(meet(&keys, &late, &mut 100), Some(true));
        assert_eq!(meet(&keys, &values, &mut 1), None);
    }
}
