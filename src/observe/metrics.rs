//! An agent's metrics, as Prometheus' text format.
//!
//! Everything is counted once per operation, or once per operation and source rank; nothing per
//! copy. What a series is labelled with is looked up under a read lock and then counted with
//! atomics.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use prometheus::{
    Encoder, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts,
    Registry, TextEncoder,
};

use crate::error::{Error, Result, Status};

/// Upper bounds of the time histograms, in seconds: from a small copy inside its call to a lease.
const SECONDS: [f64; 16] = [
    2e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 1e-3, 5e-3, 0.02, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0,
];

/// An operation that has its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// A read that this side began with a ticket.
    Import,
    /// A read that this side offered slots for.
    Receive,
    /// Slots named for the other side's offer.
    Push,
    /// Slots offered by ticket.
    Publication,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Import => "import",
            Self::Receive => "receive",
            Self::Push => "push",
            Self::Publication => "publication",
        }
    }
}

/// A message of another agent that changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A claim of, or a question for, what has ended.
    Claim,
    /// A renewal of what has ended.
    Renew,
    /// "Finished", about what has ended or from who had finished.
    Finished,
    /// "Ended", about what nobody reads here.
    Ended,
    /// A push for an offer that has ended.
    Push,
}

impl Notice {
    fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Renew => "renew",
            Self::Finished => "finished",
            Self::Ended => "ended",
            Self::Push => "push",
        }
    }
}

/// What is looked at when the text is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    /// Publications whose lease holds.
    pub leases: u64,
    /// Ended transfers whose slots may still be touched.
    pub quarantined_transfers: u64,
    /// Those slots.
    pub quarantined_slots: u64,
    /// Publications and transfers that have not ended or are not safe.
    pub operations: u64,
}

/// One source rank's part of a transfer, after its copy has returned.
#[derive(Clone, Copy, Debug)]
pub struct Read<'a> {
    /// Name of the agent that was read from.
    pub peer: &'a str,
    /// Data path.
    pub transport: &'static str,
    /// Bytes that were written here: each once, whoever else holds a replica.
    pub bytes: u64,
    /// Strided patterns it consisted of.
    pub patterns: u64,
    /// From the begin of the transfer to the begin of this copy.
    pub queued: Duration,
    /// From there to the attested end, or to the failure.
    pub copying: Duration,
    /// How it ended.
    pub status: Status,
    /// The word for that.
    pub outcome: &'static str,
}

/// Series of one peer over one transport.
#[derive(Debug)]
struct Path {
    bytes: IntCounter,
    patterns: IntCounter,
    done: IntCounter,
    queued: Histogram,
    copying: Histogram,
}

/// Counters of one agent.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    received: IntCounterVec,
    discarded: IntCounterVec,
    patterns: IntCounterVec,
    reads: IntCounterVec,
    queued: HistogramVec,
    copying: HistogramVec,
    sent: IntCounterVec,
    saved: IntCounterVec,
    operations: IntCounterVec,
    granted: IntCounter,
    expired: IntCounter,
    late: IntCounterVec,
    refused: IntCounterVec,
    dropped: IntCounterVec,
    leases: IntGauge,
    running: IntGauge,
    quarantined_transfers: IntGauge,
    quarantined_slots: IntGauge,
    paths: RwLock<HashMap<String, PeerPaths>>,
}

/// One peer's paths, by transport.
type PeerPaths = Vec<(&'static str, Arc<Path>)>;

fn broken(e: prometheus::Error) -> Error {
    Error::new(Status::KVF_ERR_INTERNAL, format!("metrics: {e}"))
}

impl Metrics {
    /// Metrics labelled with the agent's name.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL`: two metrics contradict each other (a bug).
    pub fn new(agent: &str) -> Result<Self> {
        let labels = HashMap::from([("agent".to_owned(), agent.to_owned())]);
        let registry =
            Registry::new_custom(Some("kvferry".to_owned()), Some(labels)).map_err(broken)?;
        let make = Make(&registry);
        let path = ["peer", "transport"];
        Ok(Self {
            received: make.counters(
                "received_bytes_total",
                "Bytes read from a peer and attested",
                &path,
            )?,
            discarded: make.counters(
                "discarded_bytes_total",
                "Bytes of reads that were cancelled, failed or not attested",
                &path,
            )?,
            patterns: make.counters(
                "read_patterns_total",
                "Strided patterns that reads consisted of",
                &path,
            )?,
            reads: make.counters(
                "reads_total",
                "Source ranks' parts of transfers, by how they ended",
                &["peer", "transport", "outcome", "cause"],
            )?,
            queued: make.times(
                "read_queue_seconds",
                "From the begin of a transfer to its first byte from a peer",
            )?,
            copying: make.times(
                "read_seconds",
                "From the first byte of a read to its attested end",
            )?,
            sent: make.counters(
                "sent_bytes_total",
                "Bytes that peers say they have read from here",
                &["peer"],
            )?,
            saved: make.counters(
                "prefix_saved_bytes_total",
                "Published bytes that a transfer skipped because they were here already",
                &["peer"],
            )?,
            operations: make.counters(
                "transfers_total",
                "Transfers and publications, by how they ended",
                &["kind", "outcome", "cause"],
            )?,
            granted: make.counter("leases_granted_total", "Leases granted to publications")?,
            expired: make.counter(
                "leases_expired_total",
                "Leases that ended because nobody claimed or renewed them",
            )?,
            late: make.counters(
                "late_notices_total",
                "Late, repeated or unknown notices of a peer, which changed nothing",
                &["peer", "notice"],
            )?,
            refused: make.counters(
                "refused_connections_total",
                "Connections of others that were refused, by reason",
                &["reason"],
            )?,
            dropped: make.counters(
                "dropped_messages_total",
                "Messages over UCX that changed nothing, by reason",
                &["reason"],
            )?,
            leases: make.gauge("leases", "Publications whose lease holds")?,
            running: make.gauge(
                "running_operations",
                "Publications and transfers that have not ended or are not safe",
            )?,
            quarantined_transfers: make.gauge(
                "quarantined_transfers",
                "Ended transfers whose slots may still be touched",
            )?,
            quarantined_slots: make.gauge(
                "quarantined_slots",
                "Slots that an ended transfer may still touch",
            )?,
            paths: RwLock::default(),
            registry,
        })
    }

    /// Counts a read that is over.
    pub fn read(&self, read: &Read<'_>) {
        let path = self.path(read.peer, read.transport);
        path.patterns.inc_by(read.patterns);
        path.queued.observe(read.queued.as_secs_f64());
        path.copying.observe(read.copying.as_secs_f64());
        if read.status == Status::KVF_OK {
            path.bytes.inc_by(read.bytes);
            path.done.inc();
        } else {
            let labels = [read.peer, read.transport];
            self.discarded.with_label_values(&labels).inc_by(read.bytes);
            let cause = format!("{:?}", read.status);
            let labels = [read.peer, read.transport, read.outcome, &cause];
            self.reads.with_label_values(&labels).inc();
        }
    }

    fn path(&self, peer: &str, transport: &'static str) -> Arc<Path> {
        let find = |paths: &HashMap<String, Vec<(&'static str, Arc<Path>)>>| {
            let of_peer = paths.get(peer)?;
            let found = of_peer.iter().find(|(name, _)| *name == transport)?;
            Some(found.1.clone())
        };
        let paths = self.paths.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = find(&paths) {
            return path;
        }
        drop(paths);
        let mut paths = self.paths.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(path) = find(&paths) {
            return path; // another thread was faster
        }
        let labels = [peer, transport];
        let path = Arc::new(Path {
            bytes: self.received.with_label_values(&labels),
            patterns: self.patterns.with_label_values(&labels),
            done: self
                .reads
                .with_label_values(&[peer, transport, "done", "KVF_OK"]),
            queued: self.queued.with_label_values(&labels),
            copying: self.copying.with_label_values(&labels),
        });
        let of_peer = paths.entry(peer.to_owned()).or_default();
        of_peer.push((transport, path.clone()));
        path
    }

    /// Counts an operation that has its outcome, in a word and as a status.
    pub fn ended(&self, operation: Operation, outcome: &'static str, status: Status) {
        let cause = format!("{status:?}");
        let labels = [operation.name(), outcome, &cause];
        self.operations.with_label_values(&labels).inc();
    }

    /// Counts bytes that a peer says it has read here.
    pub fn sent(&self, peer: &str, bytes: u64) {
        self.sent.with_label_values(&[peer]).inc_by(bytes);
    }

    /// Counts published bytes that a transfer did not need.
    pub fn prefix_saved(&self, peer: &str, bytes: u64) {
        if bytes > 0 {
            self.saved.with_label_values(&[peer]).inc_by(bytes);
        }
    }

    /// Counts a lease.
    pub fn lease_granted(&self) {
        self.granted.inc();
    }

    /// Counts a lease that ended by time.
    pub fn lease_expired(&self) {
        self.expired.inc();
    }

    /// Counts a notice that changed nothing.
    pub fn late(&self, peer: &str, notice: Notice) {
        self.late.with_label_values(&[peer, notice.name()]).inc();
    }

    /// Counts a connection of somebody else that was refused.
    pub fn refused(&self, reason: &str) {
        self.refused.with_label_values(&[reason]).inc();
    }

    /// Counts a message over UCX that changed nothing.
    pub fn dropped_message(&self, reason: &str) {
        self.dropped.with_label_values(&[reason]).inc();
    }

    /// All metrics with their present values.
    ///
    /// # Errors
    /// `KVF_ERR_INTERNAL`: they cannot be written as text (a bug).
    pub fn text(&self, levels: &Levels) -> Result<String> {
        let whole = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        self.leases.set(whole(levels.leases));
        self.running.set(whole(levels.operations));
        self.quarantined_transfers
            .set(whole(levels.quarantined_transfers));
        self.quarantined_slots.set(whole(levels.quarantined_slots));
        let mut text = Vec::new();
        TextEncoder::new()
            .encode(&self.registry.gather(), &mut text)
            .map_err(broken)?;
        String::from_utf8(text)
            .map_err(|e| Error::new(Status::KVF_ERR_INTERNAL, format!("metrics: {e}")))
    }
}

/// Makes and registers metrics.
struct Make<'a>(&'a Registry);

impl Make<'_> {
    fn add<C: prometheus::core::Collector + Clone + 'static>(
        &self,
        made: prometheus::Result<C>,
    ) -> Result<C> {
        let metric = made.map_err(broken)?;
        self.0.register(Box::new(metric.clone())).map_err(broken)?;
        Ok(metric)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> Result<IntCounterVec> {
        self.add(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn counter(&self, name: &str, help: &str) -> Result<IntCounter> {
        self.add(IntCounter::new(name, help))
    }

    fn gauge(&self, name: &str, help: &str) -> Result<IntGauge> {
        self.add(IntGauge::new(name, help))
    }

    fn times(&self, name: &str, help: &str) -> Result<HistogramVec> {
        let options = HistogramOpts::new(name, help).buckets(SECONDS.to_vec());
        self.add(HistogramVec::new(options, &["peer", "transport"]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_labels_are_in_the_text() {
        let metrics = Metrics::new("decode \"0\"").unwrap();
        let read = Read {
            peer: "prefill-0",
            transport: "shm",
            bytes: 4096,
            patterns: 3,
            queued: Duration::from_micros(3),
            copying: Duration::from_micros(40),
            status: Status::KVF_OK,
            outcome: "done",
        };
        metrics.read(&read);
        metrics.read(&read);
        metrics.read(&Read {
            bytes: 100,
            status: Status::KVF_ERR_EXPIRED,
            outcome: "expired",
            ..read
        });
        metrics.ended(Operation::Import, "done", Status::KVF_OK);
        metrics.late("prefill-0", Notice::Ended);
        metrics.prefix_saved("prefill-0", 512);
        let levels = Levels {
            leases: 7,
            ..Levels::default()
        };
        let text = metrics.text(&levels).unwrap();
        let agent = r#"agent="decode \"0\"""#;
        let path = format!(r#"{{peer="prefill-0",transport="shm",{agent}}}"#);
        for line in [
            format!("kvferry_received_bytes_total{path} 8192"),
            format!("kvferry_discarded_bytes_total{path} 100"),
            format!("kvferry_read_patterns_total{path} 9"),
            format!("kvferry_read_queue_seconds_count{path} 3"),
            format!(
                r#"kvferry_read_seconds_bucket{{peer="prefill-0",transport="shm",{agent},le="0.00005"}} 3"#
            ),
            format!(
                r#"kvferry_reads_total{{cause="KVF_OK",outcome="done",peer="prefill-0",transport="shm",{agent}}} 2"#
            ),
            format!(
                r#"kvferry_reads_total{{cause="KVF_ERR_EXPIRED",outcome="expired",peer="prefill-0",transport="shm",{agent}}} 1"#
            ),
            format!(
                r#"kvferry_transfers_total{{cause="KVF_OK",kind="import",outcome="done",{agent}}} 1"#
            ),
            format!(r#"kvferry_late_notices_total{{notice="ended",peer="prefill-0",{agent}}} 1"#),
            format!(r#"kvferry_prefix_saved_bytes_total{{peer="prefill-0",{agent}}} 512"#),
            format!("kvferry_leases{{{agent}}} 7"),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\nnot in\n{text}");
        }
    }
}
