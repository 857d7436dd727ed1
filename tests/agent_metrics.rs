//! The metrics text of two agents: it is Prometheus' format, and its numbers are those of the
//! transfers that were made.
#![allow(clippy::panic, missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvferry::agent::*;
use kvferry::error::Status::*;
use kvferry::ids::Key;
use kvferry::layout::*;

const LONG: Duration = Duration::from_secs(20);
const SLOTS: u32 = 64;
const TOKENS: u32 = 4;
/// Two views of 3 layers, 2 heads of 64 bytes.
const TOKEN_BYTES: u64 = 2 * 3 * 2 * 64;
/// One view of 2 layers, 5 heads of 32 bytes.
const STATE_BYTES: u64 = 2 * 5 * 32;

fn view(
    role: Role,
    pool: u32,
    offset: u64,
    (layers, tokens): (u64, u64),
    head: (u32, u64),
) -> View {
    let (heads, bytes_per_head) = head;
    let token = u64::from(heads) * bytes_per_head;
    View {
        role,
        element_bits: 16,
        heads,
        bytes_per_head,
        shards: 1,
        shard: 0,
        replicas: 1,
        replica: 0,
        sections: Vec::new(),
        tensors: vec![Tensor { pool, offset }],
        slots: SLOTS,
        strides: Strides {
            slot: layers * tokens * token,
            layer: tokens * token,
            token,
            head: bytes_per_head,
        },
    }
}

fn agent(name: &str) -> Agent {
    let config = AgentConfig {
        name: name.into(),
        fingerprint: "test".into(),
        ..AgentConfig::default()
    };
    let agent = Agent::create(config, None).unwrap();
    let pool = agent.create_pool(4 << 20, None, 0).unwrap();
    let tokens = u64::from(TOKENS);
    let layout = Layout {
        groups: vec![
            Group {
                kind: GroupKind::Paged {
                    tokens_per_block: TOKENS,
                    window: 0,
                },
                layers: vec![0, 1, 2],
                ordinals: Ordinals::default(),
                views: vec![
                    view(Role::Key, pool, 0, (3, tokens), (2, 64)),
                    view(Role::Value, pool, 1 << 20, (3, tokens), (2, 64)),
                ],
            },
            Group {
                kind: GroupKind::State,
                layers: vec![3, 4],
                ordinals: Ordinals::default(),
                views: vec![view(Role::Recurrent, pool, 2 << 20, (2, 1), (5, 32))],
            },
        ],
        ..Layout::default()
    };
    agent.set_layout(layout).unwrap();
    agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
    agent
}

fn offer(request: u64, slots: std::ops::Range<i32>) -> PublishDesc {
    PublishDesc {
        key: Key {
            request,
            attempt: 0,
        },
        groups: vec![PublishedGroup {
            group: 0,
            token_end: slots.len() as u64 * u64::from(TOKENS),
            slots: slots.collect(),
            ..PublishedGroup::default()
        }],
        states: vec![PublishedState {
            group: 1,
            slot: 5,
            as_of_token: 8,
        }],
        ..PublishDesc::default()
    }
}

fn want(ticket: &[u8], slots: std::ops::Range<i32>, skip_token: u64) -> ImportDesc {
    ImportDesc {
        ticket: ticket.to_vec(),
        groups: vec![ImportGroup {
            group: 0,
            slots: slots.collect(),
            skip_token,
            token_end: u64::MAX,
            ..ImportGroup::default()
        }],
        states: vec![ImportState {
            group: 1,
            slot: 6,
            as_of_token: 8,
        }],
        ..ImportDesc::default()
    }
}

/// Name with sorted labels, to value.
type Samples = BTreeMap<String, f64>;

/// What promtool's check of the text format asks for: HELP and TYPE once and before the samples,
/// one block per metric, legal names, unique series, cumulative buckets that end in the count.
fn parse(text: &str) -> Samples {
    let mut samples = Samples::new();
    let mut types = BTreeMap::new();
    let mut helps = BTreeSet::new();
    let mut current = String::new();
    for line in text.lines() {
        let mut words = line.split(' ');
        match (words.next().unwrap(), words.next(), words.next()) {
            ("#", Some("HELP"), Some(name)) => {
                assert!(helps.insert(name.to_owned()), "two HELP lines: {line}");
                assert!(words.next().is_some(), "no help: {line}");
            }
            ("#", Some("TYPE"), Some(name)) => {
                assert!(helps.contains(name), "TYPE before HELP: {line}");
                let kind = words.next().unwrap().to_owned();
                let known = ["counter", "gauge", "histogram"].contains(&kind.as_str());
                assert!(known, "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert!(types.insert(name.to_owned(), kind).is_none(), "{line}");
                current = name.to_owned();
            }
            _ => {
                let (series, value) = line.rsplit_once(' ').unwrap();
                let name = series.split('{').next().unwrap();
                let legal = |c: char| c.is_ascii_lowercase() || c == '_';
                assert!(name.chars().all(legal), "{line}");
                let suffixes = ["_bucket", "_sum", "_count"];
                let stem = match types[&current].as_str() {
                    "histogram" => suffixes.iter().find_map(|s| name.strip_suffix(s)).unwrap(),
                    _ => name,
                };
                assert_eq!(stem, current, "a sample outside its block: {line}");
                let value: f64 = value.parse().unwrap();
                assert!(value >= 0.0, "{line}");
                assert!(samples.insert(series.to_owned(), value).is_none(), "{line}");
            }
        }
    }
    check_histograms(&samples, text);
    samples
}

fn check_histograms(samples: &Samples, text: &str) {
    let mut last: BTreeMap<String, f64> = BTreeMap::new();
    for line in text.lines().filter(|l| l.contains("_bucket{")) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        let (labels, le) = series.rsplit_once(",le=").unwrap();
        let value: f64 = value.parse().unwrap();
        let before = last.insert(labels.to_owned(), value).unwrap_or(0.0);
        assert!(before <= value, "buckets are cumulative: {line}");
        if le == "\"+Inf\"}" {
            let count = labels.replace("_bucket{", "_count{") + "}";
            assert_eq!(samples[&count], value, "{line}");
        }
    }
}

impl Get for Samples {
    fn get_of(&self, name: &str, labels: &[&str]) -> f64 {
        let mut found = self.iter().filter(|(series, _)| {
            series.split('{').next() == Some(name) && labels.iter().all(|l| series.contains(l))
        });
        match (found.next(), found.next()) {
            (Some((_, value)), None) => *value,
            (None, _) => 0.0,
            more => panic!("{name} {labels:?} is not one series: {more:?}"),
        }
    }
}

trait Get {
    fn get_of(&self, name: &str, labels: &[&str]) -> f64;
}

/// The source's side of a transfer is counted when its reader's notice has come.
fn text_when(agent: &Agent, ready: impl Fn(&Samples) -> bool) -> Samples {
    let deadline = Instant::now() + LONG;
    loop {
        let samples = parse(&agent.metrics_text().unwrap());
        if ready(&samples) || Instant::now() > deadline {
            return samples;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_agent_that_did_nothing_says_so() {
    let samples = parse(&agent("idle").metrics_text().unwrap());
    assert_eq!(samples.get_of("kvferry_leases", &["agent=\"idle\""]), 0.0);
    assert_eq!(samples.get_of("kvferry_leases_granted_total", &[]), 0.0);
}

#[test]
fn the_numbers_are_those_of_the_transfers() {
    let (source, sink) = (agent("prefill"), agent("decode"));
    let peer = sink
        .add_peer(&source.engine_metadata().unwrap(), 0)
        .unwrap();
    assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);

    // One whole, on the calling thread; one with a prefix of 2 of its 8 blocks, by the workers;
    // one that is released; one that is never read.
    let whole = source.publish(offer(1, 0..2)).unwrap();
    let transfer = sink
        .import_begin(&peer, want(whole.ticket(), 0..2, 0))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    let prefixed = source.publish(offer(2, 2..42)).unwrap();
    let transfer = sink
        .import_begin(&peer, want(prefixed.ticket(), 2..42, 8))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    let info = transfer.info();
    assert!(0 < info.first_byte_ns && info.first_byte_ns <= info.last_byte_ns);
    assert!(info.last_byte_ns <= info.elapsed_ns, "{info:?}");
    let released = source.publish(offer(3, 42..44)).unwrap();
    released.release();
    assert_eq!(released.wait(LONG), KVF_ERR_CANCELLED);
    let transfer = sink
        .import_begin(&peer, want(released.ticket(), 42..44, 0))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_ERR_EXPIRED);
    let mut short = offer(4, 44..46);
    short.claim = Duration::from_millis(5);
    assert_eq!(source.publish(short).unwrap().wait(LONG), KVF_ERR_EXPIRED);
    let _idle = source.publish(offer(5, 46..48)).unwrap();

    // State slots count by their layers and views; the skipped prefix was not moved.
    let moved = (8 * TOKEN_BYTES + STATE_BYTES) + (152 * TOKEN_BYTES + STATE_BYTES);
    let at = [
        "agent=\"decode\"",
        "peer=\"prefill\"",
        "transport=\"inproc\"",
    ];
    let samples = text_when(&sink, |s| {
        s.get_of("kvferry_running_operations", &[]) == 0.0
    });
    let get = |name: &str, labels: &[&str]| samples.get_of(name, labels);
    assert_eq!(get("kvferry_received_bytes_total", &at), moved as f64);
    assert_eq!(
        get("kvferry_prefix_saved_bytes_total", &at[..2]),
        (8 * TOKEN_BYTES) as f64
    );
    // The reader of what was released copied before it learned that the lease was gone.
    assert_eq!(
        get("kvferry_discarded_bytes_total", &at),
        (8 * TOKEN_BYTES + STATE_BYTES) as f64
    );
    let reads = ["outcome=\"done\"", "cause=\"KVF_OK\"", at[1], at[2]];
    assert_eq!(get("kvferry_reads_total", &reads), 2.0);
    assert_eq!(get("kvferry_read_seconds_count", &at[1..]) as u64, {
        2 + get("kvferry_reads_total", &["outcome=\"expired\""]) as u64
    });
    assert!(get("kvferry_read_patterns_total", &at) >= 2.0 * 3.0);
    let imports = ["kind=\"import\"", "outcome=\"done\"", "cause=\"KVF_OK\""];
    assert_eq!(get("kvferry_transfers_total", &imports), 2.0);
    let expired = ["kind=\"import\"", "outcome=\"expired\""];
    assert_eq!(get("kvferry_transfers_total", &expired), 1.0);
    assert_eq!(get("kvferry_quarantined_slots", &[]), 0.0);

    let samples = text_when(&source, |s| s.get_of("kvferry_leases", &[]) == 1.0);
    let get = |name: &str, labels: &[&str]| samples.get_of(name, labels);
    assert_eq!(get("kvferry_leases", &[]), 1.0);
    assert_eq!(get("kvferry_leases_granted_total", &[]), 5.0);
    assert_eq!(get("kvferry_leases_expired_total", &[]), 1.0);
    assert_eq!(
        get("kvferry_sent_bytes_total", &["peer=\"decode\""]),
        moved as f64
    );
    let kind = "kind=\"publication\"";
    let ended = |outcome: &str| get("kvferry_transfers_total", &[kind, outcome]);
    assert_eq!(ended("outcome=\"done\""), 2.0);
    assert_eq!(ended("outcome=\"cancelled\""), 1.0);
    assert_eq!(ended("outcome=\"expired\""), 1.0);
    // The reader of what was released told its end to a publication that was gone.
    let late = text_when(&source, |s| {
        s.get_of("kvferry_late_notices_total", &["notice=\"finished\""]) >= 1.0
    });
    let notices = ["notice=\"finished\"", "peer=\"decode\""];
    assert_eq!(late.get_of("kvferry_late_notices_total", &notices), 1.0);
}
