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
