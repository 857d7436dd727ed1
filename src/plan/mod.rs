//! From two engines' layouts to exact byte copies.
//!
//! A [`Plan`] is made once per pair of engines; a request only binds slots and a token range to
//! it. Copies are strided patterns, never one descriptor per token or head.
//!
//! The steps: `reshard` intersects what the ranks hold and elects one source for every byte,
//! `proof` checks the result against the destination layouts, `lower` turns rectangles of
//! layers and heads into strided pieces (`form` coalesces their axes), `bind` adds slots and a token range (`table` pairs the
//! blocks, `meeting` knows which ones two ranks both own).

mod batch;
mod bind;
mod explain;
pub mod file;
mod form;
mod lower;
mod meeting;
mod proof;
mod reshard;
mod table;

use std::sync::Arc;

use crate::error::{Result, Status::KVF_ERR_INVALID_ARGUMENT};
use crate::layout::{Layout, compatible, complete};
use crate::{bail, err};

pub use batch::{Batch, Place};
pub use bind::{Binding, Cursor, Request};
pub use explain::{Explanation, Span, TransferRow, UncoveredRow, explain, explain_layouts};
pub use reshard::{LayerAt, Share, Uncovered};
pub use table::{slot_twice, unknown_slot};

use lower::Template;

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

impl Pattern {
    /// The axes in use, outermost first.
    pub fn axes(&self) -> &[Dim] {
        &self.dims[..usize::from(self.rank).min(MAX_DIMS)]
    }

    /// Bytes that the pattern copies.
    pub fn bytes(&self) -> u64 {
        self.axes().iter().map(|d| d.count).product::<u64>() * self.run
    }
}

/// Which of several replicas of a shard serves a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Policy {
    /// Destination `i` of `d` reads source `floor(i * s / d)`. The `s` sources hold the same
    /// bytes, the `d` destinations of one attention-DP index want them; both count by global rank.
    #[default]
    Spread,
    /// The smallest global rank serves everybody.
    Lowest,
}

/// The copies between all ranks of two engines.
///
/// With attention data parallelism a request lives in the ranks of one dp index on each side. The
/// plan holds the pairs of every source index with every destination index; each of those
/// combinations covers its destinations exactly once. [`Plan::sources_of`] picks the source index
/// that the ticket names.
#[derive(Debug)]
pub struct Plan {
    /// By destination, then source.
    pairs: Vec<Arc<Pair>>,
    src_dps: Vec<u32>,
    dst_dps: Vec<u32>,
}

/// The copies from one source rank to one destination rank.
#[derive(Debug)]
pub struct Pair {
    /// Index into the source layouts.
    pub src: usize,
    /// Index into the destination layouts.
    pub dst: usize,
    /// Global rank of the source in its engine.
    pub src_rank: u32,
    /// Global rank of the destination in its engine.
    pub dst_rank: u32,
    /// Attention-DP index of the source.
    pub src_dp: u32,
    /// Attention-DP index of the destination.
    pub dst_dp: u32,
    /// By group id.
    templates: Vec<Template>,
}

impl Plan {
    /// Checks that the two engines fit and derives the copies, proving that every byte of every
    /// destination view is written exactly once.
    ///
    /// # Errors
    /// `KVF_ERR_INCOMPATIBLE` with the field and both values, or the missing stage, rank, head;
    /// `KVF_ERR_INVALID_ARGUMENT` or `KVF_ERR_DUPLICATE` for a bad layout, or for ranks of one engine
    /// that contradict each other.
    pub fn new(src: &[Layout], dst: &[Layout], policy: Policy) -> Result<Self> {
        compatible(src, dst)?;
        for (side, ranks) in [("source engine", src), ("destination engine", dst)] {
            complete(ranks).map_err(|e| match e.status {
                // Alone a bad argument; here one side lacks what the other has.
                KVF_ERR_INVALID_ARGUMENT => err!(KVF_ERR_INCOMPATIBLE, "{side}: {e}"),
                _ => e.context(side),
            })?;
        }
        let (plan, uncovered) = Self::derive(src, dst, policy)?;
        if let Some(first) = uncovered.first() {
            bail!(
                KVF_ERR_INCOMPATIBLE,
                "{first}; {} such gaps together",
                uncovered.len()
            );
        }
        proof::every_byte_once(&plan, src, dst)?;
        Ok(plan)
    }

    /// The pairs and what no source holds. The engines must be [`compatible`] but for missing
    /// ranks.
    fn derive(src: &[Layout], dst: &[Layout], policy: Policy) -> Result<(Self, Vec<Uncovered>)> {
        let resharding = reshard::reshard(src, dst, policy);
        let mut pairs = Vec::with_capacity(resharding.shares.len());
        for ((d, s), shares) in resharding.shares {
            pairs.push(Arc::new(Pair {
                src: s,
                dst: d,
                src_rank: src[s].coordinates.global_rank,
                dst_rank: dst[d].coordinates.global_rank,
                src_dp: src[s].coordinates.dp_rank,
                dst_dp: dst[d].coordinates.dp_rank,
                templates: lower::templates(&src[s], &dst[d], shares)?,
            }));
        }
        let plan = Self {
            pairs,
            src_dps: dp_indices(src),
            dst_dps: dp_indices(dst),
        };
        Ok((plan, resharding.uncovered))
    }

    /// The pairs that move something for the destination with this index, from every source
    /// attention-DP index.
    pub fn into_destination(&self, dst: usize) -> impl Iterator<Item = &Arc<Pair>> {
        self.pairs.iter().filter(move |p| p.dst == dst)
    }

    /// The pairs that move something out of the source with this index.
    pub fn out_of_source(&self, src: usize) -> impl Iterator<Item = &Arc<Pair>> {
        self.pairs.iter().filter(move |p| p.src == src)
    }

    /// The pairs that serve a request of the source attention-DP index `src_dp` to the
    /// destination with this index: together they write each of its bytes once.
    ///
    /// # Errors
    /// `KVF_ERR_NOT_FOUND` if no source rank has that index.
    pub fn sources_of(&self, dst: usize, src_dp: u32) -> Result<impl Iterator<Item = &Arc<Pair>>> {
        if !self.src_dps.contains(&src_dp) {
            bail!(
                KVF_ERR_NOT_FOUND,
                "no source rank has the attention-DP index {src_dp}; known are {:?}",
                self.src_dps
            );
        }
        Ok(self
            .into_destination(dst)
            .filter(move |p| p.src_dp == src_dp))
    }

    /// The destinations of the attention-DP index `dst_dp` that read something of this source in
    /// one of the groups: the expected consumers of a publication.
    pub fn consumers<'a>(
        &'a self,
        src: usize,
        dst_dp: u32,
        groups: &'a [usize],
    ) -> impl Iterator<Item = usize> + 'a {
        self.out_of_source(src)
            .filter(move |p| p.dst_dp == dst_dp && groups.iter().any(|g| p.moves(*g)))
            .map(|p| p.dst)
    }

    /// Attention-DP indices of the source engine, ascending.
    pub fn src_dps(&self) -> &[u32] {
        &self.src_dps
    }

    /// Attention-DP indices of the destination engine, ascending.
    pub fn dst_dps(&self) -> &[u32] {
        &self.dst_dps
    }

    /// All pairs, by destination, then source.
    pub fn pairs(&self) -> &[Arc<Pair>] {
        &self.pairs
    }
}

impl Pair {
    /// Whether the pair moves something of this group.
    pub fn moves(&self, group: usize) -> bool {
        self.templates.get(group).is_some_and(Template::moves)
    }

    /// The first token that a request for `[skip_token, token_end)` needs of this group: of a
    /// sliding window only the destination's last tokens.
    pub fn needed_from(&self, group: usize, skip_token: u64, token_end: u64) -> u64 {
        match self.templates.get(group).map(|t| t.kind) {
            Some(lower::TemplateKind::Paged { window }) if window != 0 => {
                skip_token.max(token_end.saturating_sub(window))
            }
            _ => skip_token,
        }
    }

    /// Bytes of one whole destination block (state: of one slot) that this pair moves when it
    /// owns all of the block's tokens.
    pub fn bytes_per_block(&self, group: usize) -> u64 {
        self.templates
            .get(group)
            .map_or(0, Template::bytes_per_block)
    }

    /// The rectangles of layers and heads that the pair moves of this group.
    pub fn shares(&self, group: usize) -> &[Share] {
        self.templates.get(group).map_or(&[], |t| &t.shares)
    }

    /// Strided pieces in the template of this group: patterns for one block.
    pub fn patterns_per_block(&self, group: usize) -> usize {
        self.templates.get(group).map_or(0, |t| t.pieces.len())
    }
}

fn dp_indices(ranks: &[Layout]) -> Vec<u32> {
    let mut all: Vec<u32> = ranks.iter().map(|r| r.coordinates.dp_rank).collect();
    all.sort_unstable();
    all.dedup();
    all
}
