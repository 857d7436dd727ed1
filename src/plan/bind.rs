//! One request's slots and token range on a pair's template.

use std::sync::Arc;

use super::form::{Piece, Segment};
use super::lower::{Template, TemplateKind};
use super::meeting::Meeting;
use super::table::{Segments, Table, Walk, check_ids};
use super::{Batch, Pair, Pattern, Place};
use crate::bail;
use crate::error::Result;

/// What a request adds to a pair's template for one group.
///
/// Entry `i` of a table is the block of the `i`-th ordinal that the rank owns, counted from the
/// first owned one at or after the side's `first_ordinal`. A table that covers only the live
/// window of a sliding-window group ends with the block of the last token and says where it
/// starts ([`crate::layout::Group::end_aligned`] computes that from its length).
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// Group id.
    pub group: usize,
    /// Source block of each ordinal the source rank owns; -1 = not held (state: the slot). May go
    /// on beyond `token_end`.
    pub src_slots: &'a [i32],
    /// Destination block of each ordinal the destination rank owns; -1 = not held. Ends with the
    /// block of the last token.
    pub dst_slots: &'a [i32],
    /// Block ordinal, in source blocks, from which `src_slots` counts; 0 = the first block.
    pub src_first_ordinal: u64,
    /// Block ordinal, in destination blocks, from which `dst_slots` counts; 0 = the first block.
    pub dst_first_ordinal: u64,
    /// Tokens before this one are not moved; a multiple of the destination's block size (or equal
    /// to `token_end`: nothing is moved). A state is moved whatever the tokens are.
    pub skip_token: u64,
    /// Tokens from this one on are not moved.
    pub token_end: u64,
}

/// A template with slots: the copies of one request, one group, one pair of ranks.
#[derive(Debug)]
pub struct Binding {
    pair: Arc<Pair>,
    group: usize,
    segments: Segments,
    /// The last block if only its first tokens are moved.
    tail: Option<(Segment, u64)>,
    bytes: u64,
}

/// A position in a binding's copies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    piece: usize,
    /// Index into the segments; the tail comes last.
    segment: usize,
    /// Bytes of the current pattern that have been taken.
    taken: u64,
}

impl Cursor {
    /// The position as numbers, for a peer that derives the same binding: piece, segment, bytes.
    pub fn to_parts(self) -> (u64, u64, u64) {
        (self.piece as u64, self.segment as u64, self.taken)
    }

    /// A position that a peer named. One that does not exist in a binding is its end.
    pub fn from_parts(piece: u64, segment: u64, taken: u64) -> Self {
        let number = |n: u64| {
            usize::try_from(n)
                .unwrap_or(usize::MAX >> 1)
                .min(usize::MAX >> 1)
        };
        Self {
            piece: number(piece),
            segment: number(segment),
            taken: taken.min(1 << 60),
        }
    }
}

impl Binding {
    /// Checks tables and token range against the pair's two layouts and binds them.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`, `KVF_ERR_DUPLICATE` or `KVF_ERR_INVALID_ARGUMENT` with the numbers;
    /// `KVF_ERR_NOT_FOUND` for an unknown group.
    pub fn new(pair: &Arc<Pair>, request: Request<'_>) -> Result<Self> {
        let Some(template) = pair.templates.get(request.group) else {
            bail!(
                KVF_ERR_NOT_FOUND,
                "group {} of {}; groups are counted from 0",
                request.group,
                pair.templates.len()
            );
        };
        let mut binding = Self {
            pair: Arc::clone(pair),
            group: request.group,
            segments: Segments::Joined(Vec::new()),
            tail: None,
            bytes: 0,
        };
        let place = || format!("group {}", request.group);
        if template.kind != TemplateKind::State && request.skip_token > request.token_end {
            // Also where this pair has nothing to move: all ranks refuse alike.
            let (skip, end) = (request.skip_token, request.token_end);
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "{}: cannot skip {skip} of {end} tokens",
                place()
            );
        }
        if let Some(meeting) = &template.meeting {
            binding
                .fill(template, meeting, &request)
                .map_err(|e| e.context(place()))?;
        }
        Ok(binding)
    }

    /// Bytes that will be moved.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Strided patterns that the copies consist of, before any is split.
    pub fn patterns(&self) -> u64 {
        let per_piece = self.segments.len() + usize::from(self.tail.is_some());
        (self.template().pieces.len() * per_piece) as u64
    }

    /// Whether `holds` for the (source, destination) pools of all copies.
    pub fn all_pools(&self, holds: impl Fn(u32, u32) -> bool) -> bool {
        let pieces = &self.template().pieces;
        pieces.iter().all(|p| holds(p.src_pool, p.dst_pool))
    }

    /// The pair whose template is bound.
    pub fn pair(&self) -> &Arc<Pair> {
        &self.pair
    }

    fn fill(&mut self, t: &Template, m: &Meeting, r: &Request<'_>) -> Result<()> {
        let (src, dst) = (&self.pair.src_rank, &self.pair.dst_rank);
        check_ids(r.src_slots, m.src.slots).map_err(|e| e.context(format!("source rank {src}")))?;
        check_ids(r.dst_slots, m.dst.slots)
            .map_err(|e| e.context(format!("destination rank {dst}")))?;
        let tokens = match t.kind {
            TemplateKind::State => self.fill_state(r)?,
            TemplateKind::Paged { window } => self.fill_blocks(m, r, window)?,
        };
        self.bytes = tokens * t.bytes_per_token();
        Ok(())
    }

    /// Returns 1 "token", or 0 if both tables are empty.
    fn fill_state(&mut self, r: &Request<'_>) -> Result<u64> {
        match (r.src_slots, r.dst_slots) {
            ([], []) => Ok(0),
            ([src], [dst]) if *src >= 0 && *dst >= 0 => {
                self.segments = Segments::Single(vec![(*src as u32, *dst as u32)]);
                Ok(1)
            }
            ([_], [_]) => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "a state has to be moved from slot {} to slot {}; -1 is no slot",
                r.src_slots[0],
                r.dst_slots[0]
            ),
            (src, dst) => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "a state is one slot on each side; {} source and {} destination slots were given",
                src.len(),
                dst.len()
            ),
        }
    }

    /// Returns the tokens that this pair moves.
    fn fill_blocks(&mut self, m: &Meeting, r: &Request<'_>, window: u64) -> Result<u64> {
        let dst_block = m.tokens * m.dst.ratio;
        if r.skip_token == r.token_end {
            return Ok(0);
        }
        if !r.skip_token.is_multiple_of(dst_block) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "skip_token {} is not a multiple of the destination's {dst_block} tokens per block",
                r.skip_token
            );
        }
        // Fine blocks [begin, end), the last with `tail` tokens. Of a window only the live tokens
        // are needed, rounded down to whole fine blocks: both sides hold those.
        let live = if window == 0 {
            0
        } else {
            r.token_end.saturating_sub(window)
        };
        let begin = r.skip_token.max(live) / m.tokens;
        let (end, tail) = (r.token_end / m.tokens, r.token_end % m.tokens);
        let last = r.token_end.div_ceil(m.tokens);
        let src = Table::new(r.src_slots, r.src_first_ordinal, m.src);
        let dst = Table::new(r.dst_slots, r.dst_first_ordinal, m.dst);
        src.covers(begin, last, false)
            .map_err(|e| e.context(format!("source rank {}", self.pair.src_rank)))?;
        dst.covers(begin, last, true)
            .map_err(|e| e.context(format!("destination rank {}", self.pair.dst_rank)))?;

        let walk = Walk {
            src,
            dst,
            src_is_coarse: m.src.ratio > 1,
            ratio: m.ratio() as u32,
        };
        let blocks;
        (self.segments, blocks) = walk.run(m, begin, end)?;
        let mut tokens = blocks * m.tokens;
        if tail > 0 {
            let (rest, _) = walk.run(m, end, end + 1)?;
            self.tail = rest.get(0).map(|segment| (segment, tail));
            tokens += self.tail.map_or(0, |(_, tail)| tail);
        }
        Ok(tokens)
    }

    fn template(&self) -> &Template {
        &self.pair.templates[self.group]
    }

    /// Appends the next copies, together at most `max_bytes` (a longer piece is split), and
    /// advances the cursor. Returns their bytes; 0 = no more.
    ///
    /// A contiguous run is split only if it alone is longer than `max_bytes`.
    pub fn take(&self, cursor: &mut Cursor, max_bytes: u64, out: &mut Batch) -> u64 {
        let template = self.template();
        let Some(meeting) = &template.meeting else {
            return 0;
        };
        let max_bytes = max_bytes.max(1);
        let per_piece = self.segments.len() + usize::from(self.tail.is_some());
        let mut sum = 0;
        while let Some(piece) = template.pieces.get(cursor.piece) {
            while cursor.segment < per_piece {
                sum += self.take_whole(meeting, piece, cursor, max_bytes - sum, out);
                if sum == max_bytes {
                    return sum;
                }
                let Some(pattern) = self.pattern(template, meeting, piece, cursor.segment) else {
                    break;
                };
                let left = max_bytes - sum;
                let bytes = pattern.bytes();
                if cursor.taken == 0 && bytes <= left {
                    out.push(pattern);
                    sum += bytes;
                } else {
                    let took = split(&pattern, cursor.taken, left, sum == 0, out);
                    sum += took;
                    cursor.taken += took;
                    if cursor.taken < bytes {
                        return sum;
                    }
                    cursor.taken = 0;
                }
                cursor.segment += 1;
                if sum == max_bytes {
                    return sum;
                }
            }
            cursor.segment = 0;
            cursor.piece += 1;
        }
        sum
    }

    /// Of single blocks, as many as fit: the common case, without a look at each.
    fn take_whole(
        &self,
        meeting: &Meeting,
        piece: &Piece,
        cursor: &mut Cursor,
        max_bytes: u64,
        out: &mut Batch,
    ) -> u64 {
        let (Segments::Single(pairs), 0, 1) = (&self.segments, cursor.taken, meeting.ratio())
        else {
            return 0;
        };
        let left = pairs.get(cursor.segment..).unwrap_or_default();
        let form = &self.template().forms[piece.form];
        let shape = form.whole(piece);
        let bytes = shape.bytes();
        let count = (max_bytes / bytes.max(1)).min(left.len() as u64) as usize;
        if count == 0 {
            return 0;
        }
        let slot = form.axes().slot;
        let places = left[..count].iter().map(|(src, dst)| Place {
            src: piece.src + u64::from(*src) * slot.src,
            dst: piece.dst + u64::from(*dst) * slot.dst,
        });
        out.extend(&shape, places);
        cursor.segment += count;
        bytes * count as u64
    }

    fn pattern(&self, t: &Template, m: &Meeting, at: &Piece, segment: usize) -> Option<Pattern> {
        match self.segments.get(segment) {
            Some(s) => Some(t.pattern(at, m, &s, m.tokens)),
            None => self.tail.map(|(s, tokens)| t.pattern(at, m, &s, tokens)),
        }
    }
}

/// Appends at most `max` bytes of a pattern from byte `from` of its iteration order on, whole
/// runs only unless `cut_run`. Returns the bytes.
fn split(p: &Pattern, from: u64, max: u64, cut_run: bool, out: &mut Batch) -> u64 {
    let mut at = from;
    let end = from + max;
    let total = p.bytes();
    while at < total && at < end {
        // The sub-box of axes `level..` that starts here: as large as fits.
        let (mut src, mut dst, mut rest) = (p.src_offset, p.dst_offset, at);
        let mut size = total; // bytes of one repetition of the axes above
        let mut best: Option<(usize, u64, u64)> = None; // level, repetitions, bytes of each
        for (level, axis) in p.axes().iter().enumerate() {
            size /= axis.count;
            let index = rest / size;
            (src, dst, rest) = (src + index * axis.src, dst + index * axis.dst, rest % size);
            let fits = ((end - at) / size).min(axis.count - index);
            if rest == 0 && fits > 0 && best.is_none() {
                best = Some((level, fits, size));
            }
        }
        let mut part = Pattern {
            src_offset: src + rest,
            dst_offset: dst + rest,
            rank: 0,
            dims: Default::default(),
            ..*p
        };
        if let Some((level, count, size)) = best {
            let inner = &p.axes()[level..];
            part.dims[..inner.len()].copy_from_slice(inner);
            part.dims[0].count = count;
            part.rank = inner.len() as u8;
            at += count * size;
        } else {
            // Inside a run, or a run that does not fit.
            let left = p.run - rest;
            if left > end - at && !(cut_run && at == from) {
                break;
            }
            part.run = left.min(end - at);
            at += part.run;
        }
        out.push(part);
    }
    at - from
}
