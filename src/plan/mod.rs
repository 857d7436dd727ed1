//! From two engines' layouts to exact byte copies.
//!
//! A [`Plan`] is made once per pair of engines; a request only binds slots and a token range to
//! it. Copies are strided patterns, never one descriptor per token or head.

use std::sync::Arc;

use crate::error::Result;
use crate::layout::Layout;

/// Axes a pattern can have besides its contiguous run.
pub const MAX_DIMS: usize = 5;

/// One axis of a pattern: `count` repetitions, so many bytes apart on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Dim {
    /// Repetitions, at least 1.
    pub count: u64,
    /// Bytes between them at the source.
    pub src: u64,
    /// Bytes between them at the destination.
    pub dst: u64,
}

/// `run` contiguous bytes, repeated over the axes (outermost first).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Pattern {
    /// Source agent's pool id.
    pub src_pool: u32,
    /// Destination agent's pool id.
    pub dst_pool: u32,
    /// First source byte in its pool.
    pub src_offset: u64,
    /// First destination byte in its pool.
    pub dst_offset: u64,
    /// Contiguous bytes.
    pub run: u64,
    /// Axes; only the first `rank` are used.
    pub dims: [Dim; MAX_DIMS],
    /// Number of axes.
    pub rank: u8,
}

/// Which of several replicas of a shard serves a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// Destination `i` of `d` reads source `floor(i * s / d)`.
    #[default]
    Spread,
    /// The smallest global rank serves everybody.
    Lowest,
}

/// The copies between all ranks of two engines.
#[derive(Debug)]
pub struct Plan {
    pairs: Vec<Arc<Pair>>,
}

/// The copies from one source rank to one destination rank.
#[derive(Debug)]
pub struct Pair {
    /// Index into the source layouts.
    pub src: usize,
    /// Index into the destination layouts.
    pub dst: usize,
}

impl Plan {
    /// Checks that the two engines fit and derives the copies, proving that every byte of every
    /// destination view is written exactly once.
    ///
    /// # Errors
    /// `KVF_ERR_INCOMPATIBLE` with the field and both values, or the missing stage, rank, head.
    pub fn new(_src: &[Layout], _dst: &[Layout], _policy: Policy) -> Result<Self> {
        crate::bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }

    /// The pairs that move something for the destination with this index.
    pub fn into_destination(&self, dst: usize) -> impl Iterator<Item = &Arc<Pair>> {
        self.pairs.iter().filter(move |p| p.dst == dst)
    }

    /// The pairs that move something out of the source with this index.
    pub fn out_of_source(&self, src: usize) -> impl Iterator<Item = &Arc<Pair>> {
        self.pairs.iter().filter(move |p| p.src == src)
    }
}

/// What a request adds to a pair's template for one group.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Group id.
    pub group: usize,
    /// Source block of each ordinal the source rank owns; -1 = not held (state: the slot).
    pub src_slots: &'a [i32],
    /// Destination block of each ordinal the destination rank owns; -1 = not held.
    pub dst_slots: &'a [i32],
    /// Tokens before this one are not moved; a multiple of the destination's block size.
    pub skip_token: u64,
    /// Tokens from this one on are not moved.
    pub token_end: u64,
}

/// A template with slots: the copies of one request, one group, one pair of ranks.
#[derive(Debug)]
pub struct Binding;

/// A position in a binding's copies.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor;

impl Binding {
    /// Checks tables and token range against the pair's two layouts and binds them.
    ///
    /// # Errors
    /// `KVF_ERR_OUT_OF_RANGE`, `KVF_ERR_DUPLICATE` or `KVF_ERR_INVALID_ARGUMENT` with the numbers.
    pub fn new(_pair: &Arc<Pair>, _request: Request<'_>) -> Result<Self> {
        crate::bail!(KVF_ERR_UNSUPPORTED, "not built yet")
    }

    /// Bytes that will be moved.
    pub fn bytes(&self) -> u64 {
        0
    }

    /// Appends the next copies, together at most `max_bytes` (a longer piece is split), and
    /// advances the cursor. Returns their bytes; 0 = no more.
    pub fn take(&self, _cursor: &mut Cursor, _max_bytes: u64, _out: &mut Vec<Pattern>) -> u64 {
        0
    }
}
