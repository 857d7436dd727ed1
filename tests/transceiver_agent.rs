//! The request level over real agents in one process: bytes arrive, ends are told, slots come back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a test fails by panicking

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::agent::*;
use kvferry::error::Status;
use kvferry::ids::Key;
use kvferry::layout::*;
use kvferry::transceiver::{
    AgentPort, Cancel, Config, ReceiveRequest, RequestResult, ResultKind, SendRequest, Transceiver,
};

const SLOTS: u32 = 64;
const TOKENS: u32 = 8;
const LAYERS: u32 = 2;
const TOKEN_BYTES: u64 = 64;
const LONG: Duration = Duration::from_secs(20);

type Core = Transceiver<AgentPort<Arc<Agent>>>;

struct Rank {
    agent: Arc<Agent>,
    memory: (*mut u8, u64),
    t: Core,
}

fn slot_bytes() -> u64 {
    TOKEN_BYTES * u64::from(TOKENS * LAYERS)
}

fn rank(name: &str, config: Config) -> Rank {
    let agent = Agent::create(
        AgentConfig {
            name: name.into(),
            fingerprint: "transceiver test".into(),
            ..AgentConfig::default()
        },
        None,
    );
    let agent = Arc::new(agent.unwrap());
    let pool = agent
        .create_pool(slot_bytes() * u64::from(SLOTS), None, 0)
        .unwrap();
    let view = View {
        role: Role::Key,
        element_bits: 16,
        heads: 1,
        bytes_per_head: TOKEN_BYTES,
        shards: 1,
        shard: 0,
        replicas: 1,
        replica: 0,
        sections: Vec::new(),
        tensors: vec![Tensor { pool, offset: 0 }],
        slots: SLOTS,
        strides: Strides {
            slot: slot_bytes(),
            layer: TOKEN_BYTES * u64::from(TOKENS),
            token: TOKEN_BYTES,
            head: TOKEN_BYTES,
        },
    };
    let layout = Layout {
        groups: vec![Group {
            kind: GroupKind::Paged {
                tokens_per_block: TOKENS,
                window: 0,
            },
            layers: (0..LAYERS).collect(),
            ordinals: Ordinals::default(),
            views: vec![view],
        }],
        ..Layout::default()
    };
    agent.set_layout(layout).unwrap();
    agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
    Rank {
        memory: agent.pool_memory(pool).unwrap(),
        t: Transceiver::create(agent.clone(), config).unwrap(),
        agent,
    }
}

fn pair() -> (Rank, Rank, Peer) {
    let context = rank("context", Config::default());
    let generation = rank("generation", Config::default());
    let metadata = context.agent.engine_metadata().unwrap();
    let peer = generation.agent.add_peer(&metadata, 0).unwrap();
    assert_eq!(peer.wait(LONG), Status::KVF_OK, "{}", peer.info().text);
    (context, generation, peer)
}

impl Rank {
    #[allow(clippy::mut_from_ref)] // the pool is no part of this struct
    fn block(&self, slot: i32) -> &mut [u8] {
        let bytes = slot_bytes() as usize;
        // SAFETY: the pool lives as long as the agent; the test copies and compares at different
        // times.
        unsafe { std::slice::from_raw_parts_mut(self.memory.0.add(slot as usize * bytes), bytes) }
    }

    fn fill(&self, slots: &[i32], request: u64) {
        for (i, slot) in slots.iter().enumerate() {
            for (j, byte) in self.block(*slot).iter_mut().enumerate() {
                *byte = (request as usize * 31 + i * 7 + j) as u8;
            }
        }
    }

    fn send(&self, request: u64, slots: &[i32], tokens: u64) -> Vec<u8> {
        self.t
            .respond_and_send_async(offer(request, slots, tokens))
            .unwrap()
    }

    fn context(&self, at_least: Option<u32>) -> (Status, Vec<RequestResult>) {
        let mut out = Vec::new();
        let checked = self
            .t
            .check_context_transfer_status(at_least, Some(LONG), 99, &mut out);
        (checked.unwrap().status, out)
    }

    fn generation(&self, at_least: Option<u32>) -> (Status, Vec<RequestResult>) {
        let mut out = Vec::new();
        let checked = self
            .t
            .check_gen_transfer_status(at_least, Some(LONG), 99, &mut out);
        (checked.unwrap().status, out)
    }
}

fn key(request: u64) -> Key {
    Key {
        request,
        attempt: 0,
    }
}

fn offer(request: u64, slots: &[i32], tokens: u64) -> SendRequest {
    PublishDesc {
        key: key(request),
        groups: vec![PublishedGroup {
            group: 0,
            slots: slots.to_vec(),
            token_begin: 0,
            token_end: tokens,
            ..PublishedGroup::default()
        }],
        aux: format!("first token of {request}").into_bytes(),
        user_data: request,
        ..PublishDesc::default()
    }
}

fn wanted(request: u64, ticket: &[u8], slots: &[i32]) -> ReceiveRequest {
    ReceiveRequest {
        key: key(request),
        import: ImportDesc {
            ticket: ticket.to_vec(),
            groups: vec![ImportGroup {
                group: 0,
                slots: slots.to_vec(),
                token_end: u64::MAX,
                ..ImportGroup::default()
            }],
            deadline: LONG,
            user_data: request,
            ..ImportDesc::default()
        },
    }
}

#[test]
fn requests_move_and_both_sides_are_told_with_aux_and_numbers() {
    let (context, generation, peer) = pair();
    // Two rounds, for reuse of slots and keys.
    for round in 0..2 {
        let mut expected = Vec::new();
        for (request, tokens) in [1, 7, 8, 9, 23, 24, 25].into_iter().enumerate() {
            let request = request as u64;
            let blocks = (tokens as usize).div_ceil(TOKENS as usize);
            let from: Vec<i32> = (0..blocks)
                .map(|b| (request as i32) * 8 + b as i32)
                .collect();
            let to: Vec<i32> = from.iter().rev().map(|s| 63 - s).collect();
            context.fill(&from, request + round);
            let ticket = context.send(request, &from, tokens);
            generation
                .t
                .request_and_receive_async(&peer, wanted(request, &ticket, &to))
                .unwrap();
            expected.push((request, tokens, from, to));
        }
        let (status, received) = generation.generation(None);
        assert_eq!((status, received.len()), (Status::KVF_OK, expected.len()));
        for r in &received {
            assert_eq!(
                (r.outcome, r.cause, r.memory_safe),
                (Outcome::Done, Status::KVF_OK, true)
            );
            let (request, tokens, from, to) = &expected[r.user_data as usize];
            assert_eq!((r.key, r.kind), (key(*request), ResultKind::Ended));
            let per_layer = TOKEN_BYTES as usize * TOKENS as usize;
            for token in 0..*tokens as usize {
                let (block, within) = (token / TOKENS as usize, token % TOKENS as usize);
                for layer in 0..LAYERS as usize {
                    let at = layer * per_layer + within * TOKEN_BYTES as usize;
                    let range = at..at + TOKEN_BYTES as usize;
                    assert_eq!(
                        generation.block(to[block])[range.clone()],
                        context.block(from[block])[range],
                        "request {request} token {token} layer {layer}"
                    );
                }
            }
            assert_eq!(r.bytes, tokens * TOKEN_BYTES * u64::from(LAYERS));
            let record = generation.t.record(r.key).unwrap();
            assert_eq!(record.aux, format!("first token of {request}").into_bytes());
            assert_eq!((record.bytes, record.bytes_total), (r.bytes, r.bytes));
            assert!(record.ended_ns > 0 && record.safe_ns > 0, "{record:?}");
            assert_eq!(record.transport, "inproc");
        }
        let (status, sent) = context.context(None);
        assert_eq!((status, sent.len()), (Status::KVF_OK, expected.len()));
        assert!(
            sent.iter()
                .all(|r| r.outcome == Outcome::Done && r.memory_safe)
        );
        assert!(generation.t.check_gen_transfer_complete());
    }
    // Nothing of this reached the agents' own event queues.
    for rank in [&context, &generation] {
        let mut events = Vec::new();
        rank.agent.take_events(&mut events, 99);
        assert!(
            events
                .iter()
                .all(|e| e.kind == EventKind::PeerReady || e.kind == EventKind::PeerLost),
            "{events:?}"
        );
    }
}

#[test]
fn a_blocking_receive_over_a_real_agent() {
    let (context, generation, peer) = pair();
    context.fill(&[3, 4], 9);
    let ticket = context.send(9, &[3, 4], 16);
    let r = generation
        .t
        .request_and_receive_sync(&peer, wanted(9, &ticket, &[10, 11]))
        .unwrap();
    assert_eq!(
        (r.outcome, r.memory_safe, r.bytes),
        (Outcome::Done, true, 2 * slot_bytes())
    );
    assert_eq!(generation.block(10), context.block(3));
    assert_eq!(generation.block(11), context.block(4));
    assert_eq!(context.context(None).1[0].outcome, Outcome::Done);
}

#[test]
fn a_cancelled_context_request_ends_on_both_sides() {
    let (context, generation, peer) = pair();
    let ticket = context.send(1, &[0], 8);
    context.t.cancel(key(1));
    let (_, sent) = context.context(None);
    assert_eq!((sent.len(), sent[0].outcome), (1, Outcome::Cancelled));
    assert!(sent[0].memory_safe);
    generation
        .t
        .request_and_receive_async(&peer, wanted(1, &ticket, &[0]))
        .unwrap();
    let (_, received) = generation.generation(None);
    assert_eq!(received.len(), 1);
    // A source keeps no list of what it took back: a ticket that comes after that is expired.
    let r = received[0];
    assert_eq!(
        (r.outcome, r.cause),
        (Outcome::Expired, Status::KVF_ERR_EXPIRED)
    );
    let text = generation.t.record(key(1)).unwrap().text;
    assert!(!text.is_empty(), "why, for people");
}

#[test]
fn a_cancel_before_the_receive_declines_the_ticket() {
    let (context, generation, peer) = pair();
    let ticket = context.send(1, &[0], 8);
    assert_eq!(generation.t.cancel(key(1)), Cancel::Remembered);
    generation
        .t
        .request_and_receive_async(&peer, wanted(1, &ticket, &[0]))
        .unwrap();
    assert_eq!(generation.generation(None).1[0].outcome, Outcome::Cancelled);
    let (_, sent) = context.context(None);
    assert_eq!(sent[0].outcome, Outcome::Declined);
    assert!(sent[0].memory_safe, "{sent:?}");
}

#[test]
fn a_refused_request_leaves_no_trace() {
    let (context, generation, peer) = pair();
    let refused = context
        .t
        .respond_and_send_async(offer(1, &[64], 8))
        .unwrap_err();
    assert_eq!(refused.status, Status::KVF_ERR_OUT_OF_RANGE);
    assert!(!context.t.has_inflight(key(1)));
    let ticket = context.send(1, &[0], 8);
    let refused = generation
        .t
        .request_and_receive_async(&peer, wanted(1, &ticket, &[64]));
    assert_eq!(refused.unwrap_err().status, Status::KVF_ERR_OUT_OF_RANGE);
    assert!(generation.t.check_gen_transfer_complete());
    let refused = generation
        .t
        .request_and_receive_async(&peer, wanted(2, &ticket, &[0]));
    let text = refused.unwrap_err().text;
    assert!(
        text.contains("request 1") && text.contains("request 2"),
        "{text}"
    );
    let refused = generation
        .t
        .request_and_receive_async(&peer, wanted(1, b"hello", &[0]));
    assert_eq!(
        refused.unwrap_err().status,
        Status::KVF_ERR_INVALID_ARGUMENT
    );
    generation
        .t
        .request_and_receive_async(&peer, wanted(1, &ticket, &[0]))
        .unwrap();
    assert_eq!(generation.generation(None).1[0].outcome, Outcome::Done);
}

#[test]
fn never_claimed_requests_do_not_delay_a_status_call_and_shutdown_takes_them_back() {
    let (context, _generation, _peer) = pair();
    for request in 0..60 {
        context.send(request, &[request as i32], 8);
    }
    let start = Instant::now();
    for _ in 0..1000 {
        assert_eq!(context.context(Some(0)), (Status::KVF_OK, vec![]));
    }
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    context.t.shutdown(LONG).unwrap();
    let (_, ended) = context.context(None);
    assert_eq!(ended.len(), 60);
    assert!(
        ended
            .iter()
            .all(|r| r.outcome == Outcome::Cancelled && r.memory_safe)
    );
    // The agent has them back: the same keys and slots can be published.
    let publication = context.agent.publish(offer(5, &[5], 8)).unwrap();
    publication.release();
}

#[test]
fn the_end_of_an_agent_ends_the_requests() {
    let (context, generation, peer) = pair();
    let ticket = context.send(1, &[0], 8);
    context.agent.shutdown(LONG).unwrap();
    let (status, ended) = context.context(None);
    assert_eq!((status, ended.len()), (Status::KVF_OK, 1));
    assert_ne!(ended[0].outcome, Outcome::Done);
    // Whether the reader hears of it as a loss or as a cancel, it hears of it before its deadline.
    match generation
        .t
        .request_and_receive_async(&peer, wanted(1, &ticket, &[0]))
    {
        Ok(()) => assert_ne!(generation.generation(None).1[0].outcome, Outcome::Done),
        Err(e) => assert_eq!(e.status, Status::KVF_ERR_PEER_LOST, "{e}"),
    }
}
