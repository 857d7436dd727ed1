//! A TP 4 to 2 reshard through the whole data path, against one memcpy of the same bytes.
//!
//!     cargo bench --bench reshard -- [--quick] [--json] [--cpu-time] [--begin-only]
//!
//! One destination rank of two pulls 1024 blocks of 16 tokens in 32 layers (keys and values, a
//! tensor per layer, NHD) from its two source ranks of four: publish, import, one copying thread,
//! attested outcome. All agents are in this process, pools are kvferry's own (memfd), slots have no
//! neighbours. The memcpy is single-threaded, from the same two source pools into the same
//! destination pool. Both by turns, medians; ratios count. A run, the contiguous bytes of one copy,
//! is a source rank's heads of one token. `--cpu-time` takes the process's own time in place of wall
//! time, for a crowded machine.
//!
//! Requirements: at least 0.5 of the memcpy's speed; beginning an import of 4096 blocks takes the
//! caller below 50 us (checks, binding, marking the slots). Wall time and the thread's own; that of
//! 16 blocks and of one show what does not depend on the number.
#![allow(clippy::expect_used, clippy::panic)] // a bench's way to fail

use std::time::Duration;

use kvferry::agent::{
    Agent, AgentConfig, ImportDesc, ImportGroup, Peer, Publication, PublishDesc, PublishedGroup,
};
use kvferry::error::Status;
use kvferry::ids::Key;
use kvferry::layout::shapes::{self, Shape, Shard};
use kvferry::layout::{Coordinates, Group, GroupKind, Layout, Ordinals, Tensor};

const LONG: Duration = Duration::from_secs(60);
const HEADS: u32 = 8;

/// What is measured.
#[derive(Clone, Copy)]
struct Case {
    layers: u32,
    blocks: u32,
    tokens: u32,
    head_bytes: u64,
}

impl Case {
    /// Bytes of one token in one layer of a rank with this many heads, keys or values.
    fn token(&self, heads: u32) -> u64 {
        u64::from(heads) * self.head_bytes
    }

    /// Bytes of one layer's tensor, keys and values.
    fn layer(&self, heads: u32, slots: u32) -> u64 {
        2 * u64::from(slots) * u64::from(self.tokens) * self.token(heads)
    }
}

struct Rank {
    agent: Agent,
    base: *mut u8,
    bytes: usize,
}

impl Rank {
    /// Rank `rank` of `tp`; only those that take part have memory for all blocks.
    fn new(case: &Case, tp: u32, rank: u32, takes_part: bool) -> Rank {
        let agent = Agent::create(
            AgentConfig {
                name: format!("tp{tp}-{rank}"),
                fingerprint: "bench".into(),
                workers: 1,
                ..AgentConfig::default()
            },
            None,
        )
        .expect("agent");
        let (heads, slots) = (HEADS / tp, if takes_part { case.blocks } else { 1 });
        let layer = case.layer(heads, slots);
        let bytes = layer * u64::from(case.layers);
        let pool = agent.create_pool(bytes, None, 0).expect("pool");
        let tensors: Vec<Tensor> = (0..u64::from(case.layers))
            .map(|l| Tensor {
                pool,
                offset: l * layer,
            })
            .collect();
        let shape = Shape {
            layers: case.layers,
            slots,
            tokens_per_block: case.tokens,
            heads,
            bytes_per_head: case.head_bytes,
            element_bits: 16,
            shard: Shard {
                shards: tp,
                shard: rank,
                ..Shard::default()
            },
        };
        let layout = Layout {
            coordinates: Coordinates {
                global_rank: rank,
                ..Coordinates::default()
            },
            groups: vec![Group {
                kind: GroupKind::Paged {
                    tokens_per_block: case.tokens,
                    window: 0,
                },
                layers: (0..case.layers).collect(),
                ordinals: Ordinals::default(),
                views: shapes::vllm_nhd(&shape, &tensors),
            }],
            ..Layout::default()
        };
        agent.set_layout(layout).expect("layout");
        let (base, size) = agent.pool_memory(pool).expect("memory");
        for at in (0..size as usize).step_by(8) {
            // SAFETY: inside the pool, which lives as long as the agent; nobody else is here yet.
            unsafe { base.add(at).cast::<u64>().write(word(at, rank)) };
        }
        Rank {
            agent,
            base,
            bytes: size as usize,
        }
    }
}

fn word(at: usize, rank: u32) -> u64 {
    (at as u64 + u64::from(rank)).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

fn engine(case: &Case, tp: u32, taking_part: u32) -> Vec<Rank> {
    let ranks: Vec<Rank> = (0..tp)
        .map(|r| Rank::new(case, tp, r, r < taking_part))
        .collect();
    let all: Vec<Vec<u8>> = ranks
        .iter()
        .map(|r| r.agent.metadata().expect("metadata"))
        .collect();
    for rank in &ranks {
        rank.agent.set_engine(&all).expect("engine");
    }
    ranks
}

/// Every slot once, none beside its neighbour.
fn scattered(blocks: u32, salt: u64) -> Vec<i32> {
    let n = u64::from(blocks);
    (0..n)
        .map(|i| ((i * 7919 + salt * 13) % n) as i32)
        .collect()
}

/// A clock of the system, in seconds.
#[derive(Clone, Copy)]
struct Clock(libc::clockid_t);

impl Clock {
    fn now(self) -> f64 {
        let mut at = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `at` is writable.
        assert_eq!(unsafe { libc::clock_gettime(self.0, &mut at) }, 0);
        at.tv_sec as f64 + at.tv_nsec as f64 * 1e-9
    }
}

/// Two engines that know each other.
struct Setup {
    clock: Clock,
    case: Case,
    sources: Vec<Rank>,
    sinks: Vec<Rank>,
    peer: Peer,
    reading: usize,
    request: u64,
}

impl Setup {
    fn new(clock: Clock, case: Case, src_tp: u32, dst_tp: u32) -> Setup {
        let reading = src_tp / dst_tp;
        let sources = engine(&case, src_tp, reading);
        let sinks = engine(&case, dst_tp, 1);
        let metadata = sources[0].agent.engine_metadata().expect("metadata");
        let peer = sinks[0].agent.add_peer(&metadata, 0).expect("peer");
        assert_eq!(peer.wait(LONG), Status::KVF_OK, "{}", peer.info().text);
        Setup {
            clock,
            case,
            sources,
            sinks,
            peer,
            reading: reading as usize,
            request: 0,
        }
    }

    fn token_end(&self) -> u64 {
        u64::from(self.case.blocks) * u64::from(self.case.tokens)
    }

    fn publish(&mut self) -> Vec<Publication> {
        self.request += 1;
        let request = self.request;
        let end = self.token_end();
        let publish = |(i, rank): (usize, &Rank)| {
            let group = PublishedGroup {
                slots: scattered(self.case.blocks, i as u64),
                token_end: end,
                ..PublishedGroup::default()
            };
            let desc = PublishDesc {
                key: Key {
                    request,
                    attempt: 0,
                },
                groups: vec![group],
                ..PublishDesc::default()
            };
            rank.agent.publish(desc).expect("publish")
        };
        let taking_part = self.sources.iter().take(self.reading);
        taking_part.enumerate().map(publish).collect()
    }

    /// One import; seconds inside the begin call (and of the calling thread's own time), and until
    /// the outcome.
    fn import(&mut self) -> ((f64, f64), f64) {
        let publications = self.publish();
        let desc = ImportDesc {
            ticket: publications[0].ticket().to_vec(),
            groups: vec![ImportGroup {
                slots: scattered(self.case.blocks, 5),
                token_end: self.token_end(),
                ..ImportGroup::default()
            }],
            ..ImportDesc::default()
        };
        let agent = &self.sinks[0].agent;
        let (start, thread) = (self.clock.now(), Clock(libc::CLOCK_THREAD_CPUTIME_ID));
        let begin = thread.now();
        let transfer = agent.import_begin(&self.peer, desc).expect("import");
        let begun = (self.clock.now() - start, thread.now() - begin);
        let status = transfer.wait(LONG);
        let ended = self.clock.now() - start;
        assert_eq!(status, Status::KVF_OK, "{}", transfer.error_text());
        assert_eq!(
            transfer.info().bytes as usize,
            self.bytes(),
            "all the bytes"
        );
        for publication in publications {
            assert_eq!(publication.wait(LONG), Status::KVF_OK);
        }
        (begun, ended)
    }

    fn bytes(&self) -> usize {
        self.sinks[0].bytes
    }

    /// The same bytes as one stretch from each source.
    fn memcpy(&self) -> f64 {
        let start = self.clock.now();
        let mut to = 0;
        for source in self.sources.iter().take(self.reading) {
            // SAFETY: both pools live, and no transfer runs.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    source.base,
                    self.sinks[0].base.add(to),
                    source.bytes,
                );
            }
            to += source.bytes;
        }
        assert_eq!(to, self.bytes());
        self.clock.now() - start
    }

    /// Compares some tokens of every layer: a fast copy of the wrong bytes is no result.
    fn check(&self) {
        let case = &self.case;
        let sink_heads = HEADS / (self.sources.len() / self.reading) as u32;
        let source_heads = HEADS / self.sources.len() as u32;
        let to = scattered(case.blocks, 5);
        let tokens = u64::from(case.tokens);
        for (i, source) in self.sources.iter().take(self.reading).enumerate() {
            let from = scattered(case.blocks, i as u64);
            for layer in 0..u64::from(case.layers) {
                for block in (0..case.blocks as usize).step_by(97) {
                    let token = (block as u64 * 5 + layer) % tokens;
                    let at = |heads: u32, slot: i32| {
                        layer * case.layer(heads, case.blocks)
                            + (slot as u64 * tokens + token) * case.token(heads)
                    };
                    let run = case.token(source_heads);
                    let read = at(source_heads, from[block]) as usize;
                    let wrote = (at(sink_heads, to[block]) + i as u64 * run) as usize;
                    // SAFETY: inside the pools; no transfer runs.
                    let (a, b) = unsafe {
                        (
                            std::slice::from_raw_parts(source.base.add(read), run as usize),
                            std::slice::from_raw_parts(self.sinks[0].base.add(wrote), run as usize),
                        )
                    };
                    assert!(a == b, "layer {layer} block {block} token {token}");
                }
            }
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let has = |name: &str| std::env::args().any(|a| a == name);
    let quick = has("--quick");
    let mut results: Vec<(String, f64)> = Vec::new();
    let (blocks, layers, rounds) = if quick { (256, 8, 5) } else { (1024, 32, 9) };
    let clock = Clock(match has("--cpu-time") {
        true => libc::CLOCK_PROCESS_CPUTIME_ID,
        false => libc::CLOCK_MONOTONIC,
    });
    let runs: &[u64] = match has("--begin-only") {
        true => &[],
        false => &[256, 128, 64],
    };
    for &head_bytes in runs {
        let case = Case {
            layers,
            blocks,
            tokens: 16,
            head_bytes,
        };
        let mut setup = Setup::new(clock, case, 4, 2);
        let (_, _) = (setup.import(), setup.memcpy());
        setup.import();
        setup.check();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(setup.import().1);
            theirs.push(setup.memcpy());
        }
        let (ours, theirs) = (median(ours), median(theirs));
        let run = case.token(HEADS / 4);
        let gb = setup.bytes() as f64 / 1e9;
        for (name, value) in [
            ("gb", gb),
            ("gb_s", gb / ours),
            ("memcpy_gb_s", gb / theirs),
            ("ratio", theirs / ours),
        ] {
            results.push((format!("tp4_to_tp2_run{run}_{name}"), value));
        }
    }
    // Little to copy, much to bind; more than what begin copies itself. Then hardly anything to bind.
    for (name, src_tp, blocks, tokens, head_bytes) in [
        ("4096", 1, 4096, 1, 8),
        ("4096_tp2_to_tp1", 2, 4096, 1, 8),
        ("16", 1, 16, 1, 4096),
        ("1", 1, 1, 1, 4096),
    ] {
        let case = Case {
            layers: 1,
            blocks,
            tokens,
            head_bytes,
        };
        let mut setup = Setup::new(clock, case, src_tp, 1);
        let begun = (0..if quick { 51 } else { 301 }).map(|_| setup.import().0);
        let (wall, own): (Vec<f64>, Vec<f64>) = begun.unzip();
        results.push((format!("begin_{name}_us"), median(wall) * 1e6));
        results.push((format!("begin_{name}_thread_us"), median(own) * 1e6));
    }
    if has("--json") {
        let fields: Vec<String> = results
            .iter()
            .map(|(n, v)| format!("\"{n}\": {v:.3}"))
            .collect();
        println!("{{{}}}", fields.join(", "));
    } else {
        for (name, value) in &results {
            println!("{name:32} {value:12.3}");
        }
    }
}
