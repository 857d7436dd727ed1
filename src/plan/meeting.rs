//! Which blocks two ranks both own, when block sizes and context-parallel ordinals differ.
//!
//! Both sides are counted in *fine* blocks, the smaller of the two block sizes. What the two
//! ranks own together repeats with a period, so a request is walked without a division per block.

use crate::bail;
use crate::error::Result;
use crate::layout::{Group, Ordinals};

/// One side's blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    pub ordinals: Ordinals,
    /// Fine blocks in one of this side's blocks.
    pub ratio: u64,
    /// Slots that every view of the group has.
    pub slots: u32,
}

impl Side {
    /// Ordinal of the block that holds a fine block.
    pub fn ordinal(&self, fine: u64) -> u64 {
        fine / self.ratio
    }

    fn owns(&self, fine: u64) -> bool {
        let o = self.ordinals;
        self.ordinal(fine) % u64::from(o.stride) == u64::from(o.offset)
    }

    fn period(&self) -> u64 {
        u64::from(self.ordinals.stride) * self.ratio
    }
}

/// A fine block that both sides own, in the first period.
#[derive(Clone, Copy, Debug)]
pub(super) struct Phase {
    /// Its number.
    pub at: u64,
    /// How many owned blocks come before it on either side.
    pub src: u64,
    pub dst: u64,
    /// Its place in the coarser side's block.
    pub sub: u32,
}

/// All fine blocks that both sides own: the phases, repeated every `period`.
#[derive(Clone, Debug)]
pub(super) struct Meeting {
    pub src: Side,
    pub dst: Side,
    /// Tokens in a fine block.
    pub tokens: u64,
    pub period: u64,
    pub phases: Vec<Phase>,
}

/// Phases of a period; real engines have at most a few dozen.
const MAX_PHASES: u64 = 1 << 16;

impl Meeting {
    pub fn new(src: &Group, dst: &Group) -> Result<Self> {
        let tokens = src.tokens_per_slot().min(dst.tokens_per_slot());
        let side = |group: &Group| Side {
            ordinals: group.ordinals,
            ratio: u64::from(group.tokens_per_slot() / tokens),
            slots: group.views.iter().map(|v| v.slots).min().unwrap_or(0),
        };
        let (src, dst) = (side(src), side(dst));
        let (a, b) = (src.period(), dst.period());
        // Both are below 2^44: ordinal strides and block sizes are bounded.
        let period = (a / gcd(a, b)).saturating_mul(b);
        if period > MAX_PHASES {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "block ordinals with strides {} and {} (blocks of {} and {} x {tokens} tokens) repeat only after {period} blocks; at most {MAX_PHASES} are supported",
                src.ordinals.stride,
                dst.ordinals.stride,
                src.ratio,
                dst.ratio
            );
        }
        let phases = (0..period)
            .filter(|at| src.owns(*at) && dst.owns(*at))
            .map(|at| Phase {
                at,
                src: src.ordinals.owned_below(src.ordinal(at)),
                dst: dst.ordinals.owned_below(dst.ordinal(at)),
                sub: (at % src.ratio.max(dst.ratio)) as u32,
            })
            .collect();
        Ok(Self {
            src,
            dst,
            tokens: u64::from(tokens),
            period,
            phases,
        })
    }

    /// Fine blocks in a block of the coarser side.
    pub fn ratio(&self) -> u64 {
        self.src.ratio.max(self.dst.ratio)
    }

    /// Owned blocks in one period on either side.
    pub fn entries_per_period(&self) -> (u64, u64) {
        (
            self.period / self.src.period(),
            self.period / self.dst.period(),
        )
    }
}

/// Whether two ranks with these tokens per block and ordinals own a common token.
pub(super) fn meet((st, a): (u32, Ordinals), (dt, b): (u32, Ordinals)) -> bool {
    let (st, dt) = (u64::from(st), u64::from(dt));
    // In units of tokens the two sets repeat with these periods; modulo their common divisor
    // each is one interval, and both start at multiples of the smaller block.
    let g = gcd(u64::from(a.stride) * st, u64::from(b.stride) * dt);
    let (x, y) = (u64::from(a.offset) * st % g, u64::from(b.offset) * dt % g);
    let ahead = |from: u64, to: u64| (to + g - from) % g;
    ahead(x, y) < st || ahead(y, x) < dt
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
