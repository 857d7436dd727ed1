//! One request's slots and token range on a pair's template.

use std::sync::Arc;

use super::lower::{Piece, Segment, Template, TemplateKind};
use super::meeting::{Meeting, Side};
use super::{Pair, Pattern};
use crate::error::Result;
use crate::{bail, err};

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
    /// Whole fine blocks, in token order.
    segments: Vec<Segment>,
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
            segments: Vec::new(),
            tail: None,
            bytes: 0,
        };
        if let Some(meeting) = &template.meeting {
            binding
                .fill(template, meeting, &request)
                .map_err(|e| e.context(format!("group {}", request.group)))?;
        }
        Ok(binding)
    }

    /// Bytes that will be moved.
    pub fn bytes(&self) -> u64 {
        self.bytes
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
                self.segments.push(Segment {
                    coarse: *dst as u32,
                    fine: *src as u32,
                    sub: 0,
                    len: 1,
                    count: 1,
                });
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
        if r.skip_token > r.token_end {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "cannot skip {} of {} tokens",
                r.skip_token,
                r.token_end
            );
        }
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

        let mut walk = Walk {
            src,
            dst,
            src_is_coarse: m.src.ratio > 1,
            ratio: m.ratio() as u32,
            segments: &mut self.segments,
        };
        let blocks = walk.run(m, begin, end)?;
        let mut tokens = blocks * m.tokens;
        if tail > 0 {
            let mut rest = Vec::new();
            walk.segments = &mut rest;
            walk.run(m, end, end + 1)?;
            self.tail = rest.first().map(|segment| (*segment, tail));
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
    pub fn take(&self, cursor: &mut Cursor, max_bytes: u64, out: &mut Vec<Pattern>) -> u64 {
        let template = self.template();
        let Some(meeting) = &template.meeting else {
            return 0;
        };
        let max_bytes = max_bytes.max(1);
        let per_piece = self.segments.len() + usize::from(self.tail.is_some());
        let mut sum = 0;
        while let Some(piece) = template.pieces.get(cursor.piece) {
            while cursor.segment < per_piece {
                let Some(pattern) = self.pattern(meeting, piece, cursor.segment) else {
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

    fn pattern(&self, m: &Meeting, piece: &Piece, segment: usize) -> Option<Pattern> {
        match self.segments.get(segment) {
            Some(s) => Some(piece.pattern(m, s, m.tokens)),
            None => self.tail.map(|(s, tokens)| piece.pattern(m, &s, tokens)),
        }
    }
}

/// Appends at most `max` bytes of a pattern from byte `from` of its iteration order on, whole
/// runs only unless `cut_run`. Returns the bytes.
fn split(p: &Pattern, from: u64, max: u64, cut_run: bool, out: &mut Vec<Pattern>) -> u64 {
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

/// Ids must be slots that the views have, none twice.
fn check_ids(slots: &[i32], limit: u32) -> Result<()> {
    let mut seen = vec![0u64; limit.div_ceil(64) as usize];
    for (i, slot) in slots.iter().enumerate() {
        let id = *slot as u32;
        if id >= limit {
            if *slot == -1 {
                continue;
            }
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "entry {i} of the table is slot {slot}; the view has {limit}"
            );
        }
        let (word, bit) = (&mut seen[(id / 64) as usize], 1u64 << (id % 64));
        if *word & bit != 0 {
            let first = slots.iter().position(|s| s == slot).unwrap_or(i);
            bail!(
                KVF_ERR_DUPLICATE,
                "entries {first} and {i} of the table are both slot {slot}"
            );
        }
        *word |= bit;
    }
    Ok(())
}

/// One side's table.
#[derive(Clone, Copy)]
struct Table<'a> {
    slots: &'a [i32],
    side: Side,
    first_ordinal: u64,
    /// Owned blocks before the first entry.
    before: u64,
}

impl<'a> Table<'a> {
    fn new(slots: &'a [i32], first_ordinal: u64, side: Side) -> Self {
        Self {
            slots,
            side,
            first_ordinal,
            before: side.ordinals.owned_below(first_ordinal),
        }
    }

    /// Checks that there is an entry for every owned block of fine blocks `[begin, last)`.
    fn covers(&self, begin: u64, last: u64, exact: bool) -> Result<()> {
        let owned = |ordinal| self.side.ordinals.owned_below(ordinal);
        let end = last.div_ceil(self.side.ratio);
        let first = begin / self.side.ratio;
        if owned(first) < self.before && owned(end) > owned(first) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the table starts at block ordinal {}, but blocks from ordinal {first} on are needed",
                self.first_ordinal
            );
        }
        let (needed, given) = (
            owned(end).saturating_sub(self.before),
            self.slots.len() as u64,
        );
        if given < needed || (exact && given != needed) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the table has {given} entries; owned block ordinals {}..{end} need {}{needed}",
                self.first_ordinal,
                if exact { "exactly " } else { "at least " }
            );
        }
        Ok(())
    }

    /// Error for an entry that says "not held".
    fn hole(&self, entry: u64, side: &str) -> crate::error::Error {
        let o = self.side.ordinals;
        let ordinal = (self.before + entry) * u64::from(o.stride) + u64::from(o.offset);
        err!(
            KVF_ERR_INVALID_ARGUMENT,
            "{side} table entry {entry} (block ordinal {ordinal}) is -1, but its tokens are to be moved"
        )
    }
}

/// Walks the common blocks of two tables and joins neighbours.
struct Walk<'a> {
    src: Table<'a>,
    dst: Table<'a>,
    src_is_coarse: bool,
    ratio: u32,
    segments: &'a mut Vec<Segment>,
}

impl Walk<'_> {
    /// Walks fine blocks `[begin, end)`; returns how many both own.
    fn run(&mut self, m: &Meeting, begin: u64, end: u64) -> Result<u64> {
        if m.period == 1 {
            return self.run_equal(begin, end);
        }
        let (src_step, dst_step) = m.entries_per_period();
        let mut blocks = 0;
        for period in begin / m.period..end.div_ceil(m.period) {
            let at = period * m.period;
            for phase in &m.phases {
                let block = at + phase.at;
                if block < begin || block >= end {
                    continue;
                }
                let src = period * src_step + phase.src - self.src.before;
                let dst = period * dst_step + phase.dst - self.dst.before;
                self.join(src, dst, phase.sub)?;
                blocks += 1;
            }
        }
        Ok(blocks)
    }

    /// The common case: equal blocks, and both sides own all of them.
    fn run_equal(&mut self, begin: u64, end: u64) -> Result<u64> {
        let of = |t: &Table<'_>| (begin - t.before) as usize..(end - t.before) as usize;
        let src = &self.src.slots[of(&self.src)];
        let dst = &self.dst.slots[of(&self.dst)];
        let breaks = |w: &[i32]| w[1] != w[0].wrapping_add(1);
        let joints = src.windows(2).zip(dst.windows(2));
        let segments = 1 + joints.filter(|(s, d)| breaks(s) | breaks(d)).count();
        self.segments.reserve_exact(segments);
        let mut next = (0, 0); // slots that continue the last segment
        for (i, (s, d)) in src.iter().zip(dst).enumerate() {
            if *s < 0 {
                return Err(self.src.hole(begin - self.src.before + i as u64, "source"));
            }
            if *d < 0 {
                return Err(self
                    .dst
                    .hole(begin - self.dst.before + i as u64, "destination"));
            }
            let (coarse, fine) = (*d as u32, *s as u32);
            match self.segments.last_mut() {
                Some(last) if next == (coarse, fine) => last.count += 1,
                _ => self.segments.push(Segment {
                    coarse,
                    fine,
                    sub: 0,
                    len: 1,
                    count: 1,
                }),
            }
            next = (coarse + 1, fine + 1);
        }
        Ok(end - begin)
    }

    /// Adds one fine block: table entries and its place in the coarser block.
    #[inline]
    fn join(&mut self, src: u64, dst: u64, sub: u32) -> Result<()> {
        let s = self.src.slots[src as usize];
        let d = self.dst.slots[dst as usize];
        if s < 0 {
            return Err(self.src.hole(src, "source"));
        }
        if d < 0 {
            return Err(self.dst.hole(dst, "destination"));
        }
        let (coarse, fine) = if self.src_is_coarse { (s, d) } else { (d, s) };
        let (coarse, fine) = (coarse as u32, fine as u32);
        let mut new = Segment {
            coarse,
            fine,
            sub,
            len: 1,
            count: 1,
        };
        if let Some(last) = self.segments.last_mut()
            && last.len < self.ratio
            && last.coarse == coarse
            && last.sub + last.len == sub
            && last.fine + last.len == fine
        {
            last.len += 1;
            if last.len < self.ratio {
                return Ok(());
            }
            new = *last;
            self.segments.pop();
        }
        // A whole coarse block may continue the whole blocks before it.
        if new.len == self.ratio
            && let Some(last) = self.segments.last_mut()
            && last.len == self.ratio
            && last.coarse + last.count == new.coarse
            && last.fine + last.count * self.ratio == new.fine
        {
            last.count += 1;
            return Ok(());
        }
        self.segments.push(new);
        Ok(())
    }
}
