//! The form of a piece: its axes on both sides, coalesced for one block and for neighbours.

use super::meeting::Meeting;
use super::{Dim, MAX_DIMS, Pattern};

/// Where a piece lies; many pieces (a tensor per layer) share one form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Piece {
    pub src_pool: u32,
    pub dst_pool: u32,
    pub src: u64,
    pub dst: u64,
    /// Index into the template's forms.
    pub form: usize,
}

/// How the bytes of a piece repeat over layers, tokens, heads and slots on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axes {
    pub bytes_per_head: u64,
    pub layers: Dim,
    /// Further pieces of the same form, equally spaced (values after keys). Only for equal blocks:
    /// a pattern has no axis left for them otherwise.
    pub planes: Dim,
    pub heads: Dim,
    /// Token to token; the count is the fine block's.
    pub token: Dim,
    /// Slot to slot.
    pub slot: Dim,
}

/// [`Axes`] with the patterns of the most frequent segments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    axes: Axes,
    /// One whole fine block, and one whole block of the coarser side.
    fine: Shape,
    coarse: Shape,
}

/// Coalesced axes.
#[derive(Clone, Copy, Debug, Default)]
struct Shape {
    run: u64,
    dims: [Dim; MAX_DIMS],
    rank: u8,
}

/// Consecutive blocks on both sides. `ratio` fine blocks make a block of the coarser side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Slot of the coarser side (the destination if both are equal).
    pub coarse: u32,
    /// Slot of the other side.
    pub fine: u32,
    /// First fine block in the coarser side's block.
    pub sub: u32,
    /// Fine blocks in it, in consecutive slots of the finer side.
    pub len: u32,
    /// Repetitions over consecutive coarse slots; more than 1 only if `len` is the ratio.
    pub count: u32,
}

impl Segment {
    /// Equal blocks, `count` of them in consecutive slots of both sides.
    pub fn new(src: u32, dst: u32, count: u32) -> Self {
        Self {
            coarse: dst,
            fine: src,
            sub: 0,
            len: 1,
            count,
        }
    }
}

impl Axes {
    pub fn bytes_per_token(&self) -> u64 {
        self.bytes_per_head * self.heads.count * self.layers.count * self.planes.count
    }

    /// From the first to the last byte that any slots and tokens can lead to, at source and
    /// destination.
    pub fn extent(&self, meeting: &Meeting) -> (u64, u64) {
        let Meeting {
            src, dst, tokens, ..
        } = meeting;
        let mut extent = (self.bytes_per_head, self.bytes_per_head);
        for (dim, src_count, dst_count) in [
            (self.layers, self.layers.count, self.layers.count),
            (self.planes, self.planes.count, self.planes.count),
            (self.heads, self.heads.count, self.heads.count),
            (self.token, tokens * src.ratio, tokens * dst.ratio),
            (self.slot, u64::from(src.slots), u64::from(dst.slots)),
        ] {
            extent.0 += src_count.saturating_sub(1) * dim.src;
            extent.1 += dst_count.saturating_sub(1) * dim.dst;
        }
        extent
    }

    /// Coalesced for `count` neighbouring blocks of the coarser side, `len` fine blocks in each.
    fn shape(&self, meeting: &Meeting, tokens: u64, len: u64, count: u64) -> Shape {
        let Dim { src, dst, .. } = self.slot;
        let (ratio, fine) = (meeting.ratio(), meeting.tokens);
        let dim = |count, src, dst| Dim { count, src, dst };
        // Over fine blocks one side steps through slots, the other through the tokens of a block.
        // (Saturation cannot be seen: with so few slots `count` is 1 and the axis is dropped.)
        let (blocks, fines) = if ratio == 1 {
            (dim(count, src, dst), self.planes)
        } else if meeting.src.ratio > 1 {
            (
                dim(count, src, dst.saturating_mul(ratio)),
                dim(len, fine * self.token.src, dst),
            )
        } else {
            (
                dim(count, src.saturating_mul(ratio), dst),
                dim(len, src, fine * self.token.dst),
            )
        };
        let token = Dim {
            count: tokens,
            ..self.token
        };
        coalesce(
            self.bytes_per_head,
            [blocks, fines, self.layers, token, self.heads],
        )
    }
}

impl Form {
    pub fn new(axes: Axes, meeting: &Meeting) -> Self {
        Self {
            axes,
            fine: axes.shape(meeting, meeting.tokens, 1, 1),
            coarse: axes.shape(meeting, meeting.tokens, meeting.ratio(), 1),
        }
    }

    pub fn axes(&self) -> &Axes {
        &self.axes
    }

    /// The copy of a piece for one whole block of the coarser side, wherever it is.
    pub fn whole(&self, at: &Piece) -> Pattern {
        Pattern {
            src_pool: at.src_pool,
            dst_pool: at.dst_pool,
            run: self.coarse.run,
            dims: self.coarse.dims,
            rank: self.coarse.rank,
            ..Pattern::default()
        }
    }

    /// The copy of a piece for a segment. `tokens` < a fine block's only for a single one.
    pub fn pattern(&self, at: &Piece, meeting: &Meeting, seg: &Segment, tokens: u64) -> Pattern {
        let src_is_coarse = meeting.src.ratio > 1;
        let (src_slot, dst_slot) = if src_is_coarse {
            (seg.coarse, seg.fine)
        } else {
            (seg.fine, seg.coarse)
        };
        let Axes { slot, token, .. } = &self.axes;
        let mut src_offset = at.src + u64::from(src_slot) * slot.src;
        let mut dst_offset = at.dst + u64::from(dst_slot) * slot.dst;
        let into_block = u64::from(seg.sub) * meeting.tokens;
        if src_is_coarse {
            src_offset += into_block * token.src;
        } else {
            dst_offset += into_block * token.dst;
        }
        let (len, count) = (u64::from(seg.len), u64::from(seg.count));
        let shape = if count > 1 || tokens != meeting.tokens {
            self.axes.shape(meeting, tokens, len, count)
        } else if len == meeting.ratio() {
            self.coarse
        } else if len == 1 {
            self.fine
        } else {
            self.axes.shape(meeting, tokens, len, count)
        };
        Pattern {
            src_pool: at.src_pool,
            dst_pool: at.dst_pool,
            src_offset,
            dst_offset,
            run: shape.run,
            dims: shape.dims,
            rank: shape.rank,
        }
    }
}

/// Orders the axes by destination address and joins what is contiguous, or equally spaced, on
/// both sides.
fn coalesce(run: u64, mut axes: [Dim; MAX_DIMS]) -> Shape {
    axes.sort_unstable_by_key(|d| (d.dst, d.src));
    let mut shape = Shape {
        run,
        ..Shape::default()
    };
    let mut kept = [Dim::default(); MAX_DIMS]; // innermost first
    let mut n = 0;
    for axis in axes.into_iter().filter(|d| d.count > 1) {
        if n == 0 && axis.src == shape.run && axis.dst == shape.run {
            shape.run *= axis.count;
            continue;
        }
        if let Some(inner) = kept[..n].last_mut()
            && axis.src == inner.count * inner.src
            && axis.dst == inner.count * inner.dst
        {
            inner.count *= axis.count;
            continue;
        }
        kept[n] = axis;
        n += 1;
    }
    kept[..n].reverse();
    shape.dims = kept;
    shape.rank = n as u8;
    shape
}
