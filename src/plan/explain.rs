//! A deployment checked on paper: which rank sends what to whom, from two layout files.

use std::fmt::Write as _;
use std::str::FromStr;

use serde::Serialize;

use super::file::LayoutFile;
use super::{LayerAt, Pair, Plan, Policy, Share, Uncovered, lower, proof};
use crate::bail;
use crate::error::{Error, Result};
use crate::layout::{Invariants, Layout, blocks_fit, complete};

/// Half-open range.
pub type Span = [u64; 2];

/// What `kvf_plan_explain` answers.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Explanation {
    /// One row per source, destination, view, section and run of contiguous layers.
    pub transfers: Vec<TransferRow>,
    /// What a destination holds and no source has.
    pub uncovered: Vec<UncoveredRow>,
    /// Status name and text of everything that is wrong.
    pub errors: Vec<String>,
}

/// A rectangle of layers and heads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TransferRow {
    /// Global rank of the source.
    pub src: u32,
    /// Global rank of the destination.
    pub dst: u32,
    /// Group id.
    pub group: usize,
    /// Role name.
    pub role: &'static str,
    /// Section name, `null` = none.
    pub section: Option<String>,
    /// Global layers.
    pub layers: Span,
    /// Global heads (channels of the section).
    pub heads: Span,
    /// Layers of the source rank.
    pub src_layers: Span,
    /// Layers of the destination rank.
    pub dst_layers: Span,
    /// Heads of the source rank (channels in its whole axis).
    pub src_range: Span,
    /// Heads of the destination rank (channels in its whole axis).
    pub dst_range: Span,
    /// Strided copies for one block.
    pub patterns: usize,
    /// Bytes of one destination block (state: of the state).
    pub bytes_per_block: u64,
    /// Attention-DP index of the source: a request is served by one of them.
    pub src_dp: u32,
    /// Attention-DP index of the destination.
    pub dst_dp: u32,
}

/// Layers and heads without a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct UncoveredRow {
    /// Global rank of the destination.
    pub dst: u32,
    /// Attention-DP index of the source that lacks it.
    pub src_dp: u32,
    /// Group id.
    pub group: usize,
    /// Role name.
    pub role: &'static str,
    /// Section name, `null` = none.
    pub section: Option<String>,
    /// Global layers.
    pub layers: Span,
    /// Global heads (channels of the section).
    pub heads: Span,
    /// Source block ordinals as offset and stride, `null` = all.
    pub ordinals: Option<[u32; 2]>,
}

/// Explains the plan from one layout file to another. Whatever is wrong with the files is told in
/// [`Explanation::errors`]; if the engines fit but for missing ranks, the rest is still explained.
pub fn explain(src_json: &str, dst_json: &str, policy: Policy) -> Explanation {
    let mut all = Explanation::default();
    let mut read = |side: &str, json: &str| {
        let layouts = LayoutFile::parse(json).and_then(|file| file.layouts());
        layouts
            .map_err(|e| all.fail(e.context(format!("{side} layout file"))))
            .ok()
    };
    let (src, dst) = (read("source", src_json), read("destination", dst_json));
    if let (Some(src), Some(dst)) = (src, dst) {
        all.explain(&src, &dst, policy);
    }
    all
}

/// [`explain`] for layouts that are at hand.
pub fn explain_layouts(src: &[Layout], dst: &[Layout], policy: Policy) -> Explanation {
    let mut all = Explanation::default();
    all.explain(src, dst, policy);
    all
}

impl Explanation {
    /// Whether the deployment cannot work.
    pub fn has_errors(&self) -> bool {
        !self.errors.is_empty() || !self.uncovered.is_empty()
    }

    /// The fixed JSON of `kvf_plan_explain`.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL` if it cannot be written (it can).
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string_pretty(self)
            .map_err(|e| crate::err!(KVF_ERR_INTERNAL, "explanation as JSON: {e}"))
    }

    /// A table for people.
    pub fn to_table(&self) -> String {
        let span = |s: &Span| format!("{}..{}", s[0], s[1]);
        let view = |role: &str, section: &Option<String>| match section {
            Some(name) => format!("{role}.{name}"),
            None => role.to_owned(),
        };
        let mut rows = vec![
            [
                "source",
                "destination",
                "group",
                "view",
                "layers",
                "heads",
                "from",
                "to",
                "patterns",
                "bytes/block",
            ]
            .map(str::to_owned),
        ];
        rows.extend(self.transfers.iter().map(|t| {
            [
                t.src.to_string(),
                t.dst.to_string(),
                t.group.to_string(),
                view(t.role, &t.section),
                span(&t.layers),
                span(&t.heads),
                format!(
                    "layers {} heads {}",
                    span(&t.src_layers),
                    span(&t.src_range)
                ),
                format!(
                    "layers {} heads {}",
                    span(&t.dst_layers),
                    span(&t.dst_range)
                ),
                t.patterns.to_string(),
                t.bytes_per_block.to_string(),
            ]
        }));
        let mut widths = [0; 10];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.len().max(*width);
            }
        }
        let mut text = String::new();
        for row in &rows {
            let cells = row
                .iter()
                .zip(widths)
                .map(|(cell, w)| format!("{cell:<w$}"));
            let line = cells.collect::<Vec<_>>().join("  ");
            text.push_str(line.trim_end());
            text.push('\n');
        }
        for u in &self.uncovered {
            let ordinals = u.ordinals.map_or(String::new(), |[offset, stride]| {
                format!(", block ordinals {offset} + n * {stride}")
            });
            let _ = writeln!(
                text,
                "uncovered: destination {}, group {}, {}, layers {}, heads {}{ordinals} (source dp index {})",
                u.dst,
                u.group,
                view(u.role, &u.section),
                span(&u.layers),
                span(&u.heads),
                u.src_dp
            );
        }
        for e in &self.errors {
            let _ = writeln!(text, "error: {e}");
        }
        text
    }

    fn fail(&mut self, e: Error) {
        self.errors.push(format!("{:?}: {}", e.status, e.text));
    }

    fn explain(&mut self, src: &[Layout], dst: &[Layout], policy: Policy) {
        if let Err(e) = self.try_explain(src, dst, policy) {
            self.fail(e);
        }
    }

    fn try_explain(&mut self, src: &[Layout], dst: &[Layout], policy: Policy) -> Result<()> {
        let ours = Invariants::of(src).map_err(|e| e.context("source engine"))?;
        let theirs = Invariants::of(dst).map_err(|e| e.context("destination engine"))?;
        for (side, ranks) in [("source engine", src), ("destination engine", dst)] {
            if let Err(e) = complete(ranks) {
                self.fail(e.context(side));
            }
        }
        if let Err(e) = ours.compare(&theirs) {
            self.fail(e);
            // Missing layers are explained as such; with any other difference there is no plan.
            let mut same_layers = ours;
            for (a, b) in same_layers.groups.iter_mut().zip(&theirs.groups) {
                a.layers.clone_from(&b.layers);
                if a.views.is_empty() {
                    a.views.clone_from(&b.views);
                }
            }
            if same_layers.compare(&theirs).is_err() {
                return Ok(());
            }
        }
        blocks_fit(src, dst)?;
        let (plan, uncovered) = Plan::derive(src, dst, policy)?;
        for pair in plan.pairs() {
            for group in 0..pair.templates.len() {
                for share in pair.shares(group) {
                    self.rows(src, dst, pair, share)?;
                }
            }
        }
        for u in &uncovered {
            self.fail(crate::err!(KVF_ERR_INCOMPATIBLE, "{u}"));
            self.gap(u);
        }
        if !self.has_errors() {
            proof::every_byte_once(&plan, src, dst)?;
        }
        Ok(())
    }

    fn rows(&mut self, src: &[Layout], dst: &[Layout], pair: &Pair, share: &Share) -> Result<()> {
        let (from, to) = (
            &src[pair.src].groups[share.group],
            &dst[pair.dst].groups[share.group],
        );
        let mut layers = share.layers.clone();
        layers.sort_by_key(|l| l.global);
        let next = |a: &LayerAt, b: &LayerAt| {
            (a.global + 1, a.src + 1, a.dst + 1) == (b.global, b.src, b.dst)
        };
        for run in layers.chunk_by(next) {
            let (first, count) = (run[0], run.len() as u64);
            let span = |first: u64, count: u64| [first, first + count];
            let heads = share.heads.end - share.heads.start;
            let one = Share {
                layers: run.to_vec(),
                ..share.clone()
            };
            let row = lower::template(from, to, vec![one])?;
            self.transfers.push(TransferRow {
                src: pair.src_rank,
                dst: pair.dst_rank,
                group: share.group,
                role: share.role.name(),
                section: share.section.clone(),
                layers: span(u64::from(first.global), count),
                heads: [share.heads.start, share.heads.end],
                src_layers: span(u64::from(first.src), count),
                dst_layers: span(u64::from(first.dst), count),
                src_range: span(share.src_head, heads),
                dst_range: span(share.dst_head, heads),
                patterns: row.pieces.len(),
                bytes_per_block: row.bytes_per_block(),
                src_dp: pair.src_dp,
                dst_dp: pair.dst_dp,
            });
        }
        Ok(())
    }

    fn gap(&mut self, u: &Uncovered) {
        for run in u.gap.layers.chunk_by(|a, b| a + 1 == *b) {
            let first = u64::from(run[0]);
            self.uncovered.push(UncoveredRow {
                dst: u.dst_rank,
                src_dp: u.gap.dp_rank,
                group: u.gap.group,
                role: u.gap.role.name(),
                section: u.gap.section.clone(),
                layers: [first, first + run.len() as u64],
                heads: [u.gap.heads.start, u.gap.heads.end],
                ordinals: u.gap.ordinals.map(|o| [o.offset, o.stride]),
            });
        }
    }
}

impl FromStr for Policy {
    type Err = Error;

    /// `spread` or `lowest`.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "spread" => Ok(Self::Spread),
            "lowest" => Ok(Self::Lowest),
            other => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "unknown policy {other:?}; known are spread and lowest"
            ),
        }
    }
}
