//! From rectangles of layers and heads to strided pieces of memory, as few and as long as the
//! two layouts allow.

use super::meeting::Meeting;
use super::{Dim, MAX_DIMS, Pattern, Share};
use crate::err;
use crate::error::Result;
use crate::layout::{Group, Layout, Tensor, View};

/// The copies of one group between one pair of ranks, without slots.
#[derive(Debug)]
pub(super) struct Template {
    pub shares: Vec<Share>,
    pub pieces: Vec<Piece>,
    /// Which blocks both own; `None` = nothing to move.
    pub meeting: Option<Meeting>,
    pub kind: TemplateKind,
}

/// What a table of the group means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TemplateKind {
    /// Blocks of tokens; the destination needs the last `window` tokens (0 = all).
    Paged { window: u64 },
    /// One state.
    State,
}

impl Template {
    pub fn moves(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// Bytes of one token over all pieces.
    pub fn bytes_per_token(&self) -> u64 {
        self.pieces.iter().map(Piece::bytes_per_token).sum()
    }

    pub fn bytes_per_block(&self) -> u64 {
        let tokens = self.meeting.as_ref().map_or(0, |m| m.tokens * m.dst.ratio);
        self.bytes_per_token() * tokens
    }
}

/// Bytes on both sides that repeat over layers, tokens, heads and slots, in one pool each.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    src_pool: u32,
    dst_pool: u32,
    src: u64,
    dst: u64,
    bytes_per_head: u64,
    layers: Dim,
    heads: Dim,
    /// Token to token; the count is the fine block's.
    token: Dim,
    /// Slot to slot.
    slot: Dim,
    /// One whole fine block, and one whole block of the coarser side, coalesced.
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

impl Piece {
    pub fn bytes_per_token(&self) -> u64 {
        self.bytes_per_head * self.heads.count * self.layers.count
    }

    /// The copy of this piece for a segment. `tokens` < a fine block's only for a single one.
    pub fn pattern(&self, meeting: &Meeting, seg: &Segment, tokens: u64) -> Pattern {
        let src_is_coarse = meeting.src.ratio > 1;
        let (src_slot, dst_slot) = if src_is_coarse {
            (seg.coarse, seg.fine)
        } else {
            (seg.fine, seg.coarse)
        };
        let (mut src_offset, mut dst_offset) = (
            self.src + u64::from(src_slot) * self.slot.src,
            self.dst + u64::from(dst_slot) * self.slot.dst,
        );
        let into_block = u64::from(seg.sub) * meeting.tokens;
        if src_is_coarse {
            src_offset += into_block * self.token.src;
        } else {
            dst_offset += into_block * self.token.dst;
        }
        let whole_fine = tokens == meeting.tokens;
        let shape = if seg.count == 1 && u64::from(seg.len) == meeting.ratio() && whole_fine {
            self.coarse
        } else if seg.count == 1 && seg.len == 1 && whole_fine {
            self.fine
        } else {
            self.shape(meeting, tokens, u64::from(seg.len), u64::from(seg.count))
        };
        Pattern {
            src_pool: self.src_pool,
            dst_pool: self.dst_pool,
            src_offset,
            dst_offset,
            run: shape.run,
            dims: shape.dims,
            rank: shape.rank,
        }
    }

    fn shape(&self, meeting: &Meeting, tokens: u64, len: u64, count: u64) -> Shape {
        let Dim { src, dst, .. } = self.slot;
        let token = self.token;
        let ratio = meeting.ratio();
        // Over fine blocks one side steps through slots, the other through the tokens of a block.
        let (blocks, fines) = if meeting.src.ratio > 1 {
            let fine = meeting.tokens * token.src;
            (
                Dim {
                    count,
                    src,
                    dst: dst * ratio,
                },
                Dim {
                    count: len,
                    src: fine,
                    dst,
                },
            )
        } else {
            let fine = meeting.tokens * token.dst;
            (
                Dim {
                    count,
                    src: src * ratio,
                    dst,
                },
                Dim {
                    count: len,
                    src,
                    dst: fine,
                },
            )
        };
        let token = Dim {
            count: tokens,
            ..token
        };
        coalesce(
            self.bytes_per_head,
            [blocks, fines, self.layers, token, self.heads],
        )
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

/// All groups of a pair.
pub(super) fn templates(src: &Layout, dst: &Layout, shares: Vec<Share>) -> Result<Vec<Template>> {
    let mut by_group: Vec<Vec<Share>> = src.groups.iter().map(|_| Vec::new()).collect();
    for share in shares {
        if let Some(group) = by_group.get_mut(share.group) {
            group.push(share);
        }
    }
    let pairs = src.groups.iter().zip(&dst.groups).zip(by_group);
    pairs
        .map(|((s, d), shares)| template(s, d, shares))
        .collect()
}

/// One group of a pair.
pub(super) fn template(src: &Group, dst: &Group, mut shares: Vec<Share>) -> Result<Template> {
    let kind = match dst.kind {
        crate::layout::GroupKind::Paged { window, .. } => TemplateKind::Paged {
            window: u64::from(window),
        },
        crate::layout::GroupKind::State => TemplateKind::State,
    };
    let mut template = Template {
        shares: Vec::new(),
        pieces: Vec::new(),
        meeting: None,
        kind,
    };
    if shares.is_empty() {
        return Ok(template);
    }
    let meeting = Meeting::new(src, dst)?;
    shares.sort_by_key(|s| (s.role, s.dst_head));
    let mut rest = shares.as_slice();
    while let Some((first, more)) = rest.split_first() {
        let (Some(from), Some(to)) = (src.view(first.role), dst.view(first.role)) else {
            return Err(err!(
                KVF_ERR_INTERNAL,
                "a share has the role {} without a view",
                first.role
            ));
        };
        // Sections that are neighbours on both sides are one range of heads.
        let mut heads = first.heads.end - first.heads.start;
        let mut joined = 0;
        for next in more {
            if next.role != first.role
                || next.layers != first.layers
                || next.src_head != first.src_head + heads
                || next.dst_head != first.dst_head + heads
            {
                break;
            }
            heads += next.heads.end - next.heads.start;
            joined += 1;
        }
        pieces(&meeting, (from, to), first, heads, &mut template.pieces)?;
        rest = &more[joined..];
    }
    template.shares = shares;
    template.meeting = Some(meeting);
    Ok(template)
}

/// The pieces of one range of heads: one for all layers that are equally spaced on both sides.
fn pieces(
    meeting: &Meeting,
    (from, to): (&View, &View),
    share: &Share,
    heads: u64,
    out: &mut Vec<Piece>,
) -> Result<()> {
    let base = |view: &View, local: u32| -> Result<Tensor> {
        view.layer_base(local as usize).ok_or_else(|| {
            err!(
                KVF_ERR_INTERNAL,
                "view {} has no tensor for local layer {local}",
                view.role
            )
        })
    };
    let bases = share
        .layers
        .iter()
        .map(|l| Ok((base(from, l.src)?, base(to, l.dst)?)))
        .collect::<Result<Vec<_>>>()?;
    let step = |a: &(Tensor, Tensor), b: &(Tensor, Tensor)| -> Option<(u64, u64)> {
        if a.0.pool != b.0.pool || a.1.pool != b.1.pool {
            return None;
        }
        let src = b.0.offset.checked_sub(a.0.offset)?;
        let dst = b.1.offset.checked_sub(a.1.offset)?;
        (src > 0 && dst > 0).then_some((src, dst))
    };
    let mut at = 0;
    while let Some((s, d)) = bases.get(at) {
        let mut layers = Dim {
            count: 1,
            src: 0,
            dst: 0,
        };
        let first = bases.get(at + 1).and_then(|next| step(&bases[at], next));
        if let Some((src, dst)) = first {
            let even = bases[at..]
                .windows(2)
                .take_while(|w| step(&w[0], &w[1]) == first);
            layers = Dim {
                count: even.count() as u64 + 1,
                src,
                dst,
            };
        }
        at += layers.count as usize;
        let mut piece = Piece {
            src_pool: s.pool,
            dst_pool: d.pool,
            src: s.offset + share.src_head * from.strides.head,
            dst: d.offset + share.dst_head * to.strides.head,
            bytes_per_head: from.bytes_per_head,
            layers,
            heads: Dim {
                count: heads,
                src: from.strides.head,
                dst: to.strides.head,
            },
            token: Dim {
                count: meeting.tokens,
                src: from.strides.token,
                dst: to.strides.token,
            },
            slot: Dim {
                count: 1,
                src: from.strides.slot,
                dst: to.strides.slot,
            },
            fine: Shape::default(),
            coarse: Shape::default(),
        };
        piece.fine = piece.shape(meeting, meeting.tokens, 1, 1);
        piece.coarse = piece.shape(meeting, meeting.tokens, meeting.ratio(), 1);
        out.push(piece);
    }
    Ok(())
}
