//! What is counted of reads, transfers and publications.

use std::time::Duration;

use super::api::Outcome;
use super::cells::outcome;
use super::import_cell::ImportCell;
use super::shared::Shared;
use super::wants::Wants;
use crate::error::Status;
use crate::ids::Incarnation;
use crate::layout::Layout;
use crate::observe::Times;
use crate::observe::metrics::{Notice, Operation, Read};
use crate::session::End;
use crate::transport::{DataPath, ReadJob};
use crate::wire;

/// The word for how something ended.
pub(super) fn word(status: Status) -> &'static str {
    match outcome(status) {
        Outcome::Pending => "pending",
        Outcome::Done => "done",
        Outcome::Failed => "failed",
        Outcome::Cancelled => "cancelled",
        Outcome::CancelledByPeer => "cancelled_by_peer",
        Outcome::Expired => "expired",
        Outcome::Declined => "declined",
    }
}

impl Shared {
    /// One source rank's copies have returned; `queued` is when they began.
    pub fn count_read(
        &self,
        peer: &str,
        path: &dyn DataPath,
        job: &ReadJob,
        times: &Times,
        queued: Duration,
        end: &End,
    ) {
        self.metrics.read(&Read {
            peer,
            transport: path.name(),
            bytes: job.moved(),
            patterns: job.patterns(),
            queued,
            copying: times.elapsed().saturating_sub(queued),
            status: end.status,
            outcome: word(end.status),
        });
    }

    /// An import or receive has its outcome.
    pub fn count_import(&self, cell: &ImportCell, end: &End) {
        self.metrics.ended(cell.kind, word(end.status), end.status);
        if end.is_ok()
            && let Some((peer, bytes)) = cell.saved.get()
        {
            self.metrics.prefix_saved(peer, *bytes);
        }
    }

    /// A push or publication has ended.
    pub fn count_publication(&self, push: bool, end: &End) {
        let kind = if push {
            Operation::Push
        } else {
            Operation::Publication
        };
        self.metrics.ended(kind, word(end.status), end.status);
        if end.status == Status::KVF_ERR_EXPIRED {
            self.metrics.lease_expired();
        }
    }
}

impl super::control::Control {
    /// A notice changed nothing.
    pub fn count_late(&self, agent: Incarnation, notice: Notice) {
        if let Some(remote) = self.remotes.get(&agent) {
            self.shared.metrics.late(&remote.route.name, notice);
        }
    }
}

/// Bytes that were published, lie in our layout, and are skipped because they are here already.
pub(super) fn saved_bytes(wants: &Wants, layout: &Layout, ticket: &wire::Ticket) -> u64 {
    let published = |group| {
        let groups = ticket.entries.iter().flat_map(|e| &e.groups);
        groups.into_iter().find(|g| g.group == group)
    };
    let saved = wants.groups.iter().filter_map(|want| {
        let held = layout.groups.get(want.group as usize)?;
        let offered = published(want.group)?;
        let window = match held.window() {
            0 => u64::MAX,
            window => u64::from(window),
        };
        let begin = offered
            .token_begin
            .max(want.token_end.saturating_sub(window));
        let skipped = want.skip_token.min(want.token_end).saturating_sub(begin);
        let per_block = u64::from(held.tokens_per_slot().max(1));
        let tokens = match held.ordinals.stride {
            0 | 1 => skipped,
            // Context parallel: only the blocks that this rank owns.
            _ => {
                let owned = |token: u64| held.ordinals.owned_below(token / per_block);
                owned(begin + skipped).saturating_sub(owned(begin)) * per_block
            }
        };
        let layers = held.layers.len() as u64;
        let head_bytes = held.views.iter();
        let per_token: u64 = head_bytes
            .map(|v| layers * u64::from(v.heads) * v.bytes_per_head)
            .sum();
        Some(tokens.saturating_mul(per_token))
    });
    saved.sum()
}
