//! From rectangles of layers and heads to strided pieces of memory, as few and as long as the
//! two layouts allow.

use super::form::{Axes, Form, Piece, Segment};
use super::meeting::Meeting;
use super::{Dim, Pattern, Share};
use crate::err;
use crate::error::Result;
use crate::layout::{Group, Layout, Tensor, View};

/// The copies of one group between one pair of ranks, without slots.
#[derive(Debug)]
pub(super) struct Template {
    pub shares: Vec<Share>,
    pub pieces: Vec<Piece>,
    pub forms: Vec<Form>,
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
        let bytes = |p: &Piece| self.forms[p.form].axes().bytes_per_token();
        self.pieces.iter().map(bytes).sum()
    }

    pub fn bytes_per_block(&self) -> u64 {
        let tokens = self.meeting.as_ref().map_or(0, |m| m.tokens * m.dst.ratio);
        self.bytes_per_token() * tokens
    }

    /// The copy of a piece for a segment. `tokens` < a fine block's only for a single one.
    pub fn pattern(&self, at: &Piece, meeting: &Meeting, seg: &Segment, tokens: u64) -> Pattern {
        self.forms[at.form].pattern(at, meeting, seg, tokens)
    }
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
        forms: Vec::new(),
        meeting: None,
        kind,
    };
    if shares.is_empty() {
        return Ok(template);
    }
    let meeting = Meeting::new(src, dst)?;
    let mut draft = Draft::default();
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
        draft.pieces(&meeting, (from, to), first, heads)?;
        rest = &more[joined..];
    }
    if meeting.ratio() == 1 {
        draft = draft.join_planes();
    }
    template.forms = draft
        .axes
        .into_iter()
        .map(|a| Form::new(a, &meeting))
        .collect();
    template.pieces = draft.pieces;
    template.shares = shares;
    template.meeting = Some(meeting);
    Ok(template)
}

/// Pieces whose forms are not coalesced yet.
#[derive(Default)]
struct Draft {
    pieces: Vec<Piece>,
    /// Each once.
    axes: Vec<Axes>,
}

impl Draft {
    fn form(&mut self, axes: Axes) -> usize {
        match self.axes.iter().position(|a| *a == axes) {
            Some(known) => known,
            None => {
                self.axes.push(axes);
                self.axes.len() - 1
            }
        }
    }

    /// Joins pieces of one form that are equally spaced on both sides: keys and values of one
    /// buffer, sections of one width.
    fn join_planes(mut self) -> Self {
        let place = |p: &Piece| (p.src_pool, p.dst_pool, p.form);
        self.pieces
            .sort_unstable_by_key(|p| (p.src_pool, p.dst_pool, p.form, p.src));
        let step = |a: &Piece, b: &Piece| {
            let ahead = place(a) == place(b) && b.src > a.src && b.dst > a.dst;
            ahead.then(|| (b.src - a.src, b.dst - a.dst))
        };
        let mut joined = Self::default();
        let mut rest = self.pieces.as_slice();
        while let Some(first) = rest.first() {
            let mut planes = Dim {
                count: 1,
                src: 0,
                dst: 0,
            };
            if let Some((src, dst)) = rest.get(1).and_then(|next| step(first, next)) {
                let even = rest
                    .windows(2)
                    .take_while(|w| step(&w[0], &w[1]) == Some((src, dst)));
                planes = Dim {
                    count: even.count() as u64 + 1,
                    src,
                    dst,
                };
            }
            let form = joined.form(Axes {
                planes,
                ..self.axes[first.form]
            });
            joined.pieces.push(Piece { form, ..*first });
            rest = &rest[planes.count as usize..];
        }
        joined
    }

    /// The pieces of one range of heads: one for all layers that are equally spaced on both sides.
    fn pieces(
        &mut self,
        meeting: &Meeting,
        (from, to): (&View, &View),
        share: &Share,
        heads: u64,
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
            let (src, dst) = (from.strides, to.strides);
            let dim = |count, src, dst| Dim { count, src, dst };
            let form = self.form(Axes {
                bytes_per_head: from.bytes_per_head,
                layers,
                planes: dim(1, 0, 0),
                heads: dim(heads, src.head, dst.head),
                token: dim(meeting.tokens, src.token, dst.token),
                slot: dim(1, src.slot, dst.slot),
            });
            self.pieces.push(Piece {
                src_pool: s.pool,
                dst_pool: d.pool,
                src: s.offset + share.src_head * src.head,
                dst: d.offset + share.dst_head * dst.head,
                form,
            });
        }
        Ok(())
    }
}
