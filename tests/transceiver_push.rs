//! Push through the request level: the generation side offers, the offer travels, the context side
//! answers it. First on injected outcomes, then with real agents.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod transceiver_fake;

use std::sync::Arc;
use std::time::Duration;

use kvferry::agent::*;
use kvferry::error::Status::*;
use kvferry::layout::*;
use kvferry::transceiver::{
    AgentPort, Cancel, Config, Direction, ReceiveRequest, RecordFormat, RequestResult, ResultKind,
    Side, Transceiver,
};
use transceiver_fake::{Half, done, half, key, send_request, ticket};

const LONG: Duration = Duration::from_secs(20);

fn push() -> Config {
    Config {
        direction: Direction::Push,
        transfer: Duration::from_secs(7),
        ..Config::default()
    }
}

fn receive(request: u64) -> ReceiveRequest {
    ReceiveRequest {
        key: key(request),
        import: ImportDesc {
            user_data: request + 1000,
            ..ImportDesc::default()
        },
    }
}

fn ends(half: &Half) -> Vec<(u64, Outcome, u64)> {
    let line = |r: &RequestResult| (r.key.request, r.outcome, r.user_data);
    half.sweep().iter().map(line).collect()
}

#[test]
fn the_offer_travels_from_the_generation_to_the_context_side() {
    let (context, generation) = (half(Side::Context, push()), half(Side::Generation, push()));
    generation
        .t
        .request_and_receive_async(&(), receive(5))
        .unwrap();
    let offer = generation.t.offer(key(5)).unwrap();
    assert_eq!(generation.t.ticket(key(5)), None);
    context
        .t
        .push_async(&(), &offer, send_request(5), Duration::ZERO)
        .unwrap();
    assert_eq!(
        context.t.ticket(key(5)),
        Some(ticket(key(5))),
        "the operation's own"
    );
    for half in [&context, &generation] {
        let seven = [Duration::from_secs(7)];
        assert_eq!(*half.fake.deadlines.lock().unwrap(), seven);
        assert!(half.t.has_inflight(key(5)));
        half.fake.op(5).end(done());
        assert_eq!(ends(half), [(5, Outcome::Done, 1005)]);
        assert!(!half.t.has_inflight(key(5)));
    }
    assert_eq!(generation.t.offer(key(5)), None, "over");
}

#[test]
fn each_direction_refuses_the_other_ones_calls() {
    let h = half(Side::Context, push());
    let error = h.t.respond_and_send_async(send_request(1)).unwrap_err();
    assert_eq!(error.status, KVF_ERR_STATE);
    let mut with_ticket = receive(1);
    with_ticket.import.ticket = ticket(key(1));
    let error = h.t.request_and_receive_async(&(), with_ticket).unwrap_err();
    assert_eq!(error.status, KVF_ERR_STATE);
    let other = ticket(key(2));
    let error =
        h.t.push_async(&(), &other, send_request(1), Duration::ZERO)
            .unwrap_err();
    assert_eq!(
        error.status, KVF_ERR_INVALID_ARGUMENT,
        "another key: {error}"
    );
    let pull = half(Side::Context, Config::default());
    let offer = ticket(key(1));
    let error = pull
        .t
        .push_async(&(), &offer, send_request(1), Duration::ZERO)
        .unwrap_err();
    assert_eq!(error.status, KVF_ERR_STATE);
    let error = pull
        .t
        .request_and_receive_async(&(), receive(1))
        .unwrap_err();
    assert_eq!(error.status, KVF_ERR_INVALID_ARGUMENT);
    assert_eq!(h.fake.begun() + pull.fake.begun(), 0, "nothing was begun");
}

#[test]
fn a_cancel_from_before_ends_either_half() {
    let (context, generation) = (half(Side::Context, push()), half(Side::Generation, push()));
    assert_eq!(generation.t.cancel(key(3)), Cancel::Remembered);
    generation
        .t
        .request_and_receive_async(&(), receive(3))
        .unwrap();
    assert_eq!(generation.fake.begun(), 0, "no slot was offered");
    assert_eq!(ends(&generation), [(3, Outcome::Cancelled, 1003)]);
    assert!(
        generation.fake.declined.lock().unwrap().is_empty(),
        "there is no source yet"
    );

    assert_eq!(context.t.cancel(key(3)), Cancel::Remembered);
    context
        .t
        .push_async(&(), &ticket(key(3)), send_request(3), Duration::ZERO)
        .unwrap();
    assert_eq!(ends(&context), [(3, Outcome::Cancelled, 1003)]);
}

#[test]
fn records_are_written_as_lines() {
    let h = half(Side::Generation, push());
    for request in [1, 2] {
        h.t.request_and_receive_async(&(), receive(request))
            .unwrap();
        h.fake.op(request).end(done());
        h.sweep();
    }
    let record = h.t.record(key(1)).unwrap();
    assert_eq!((record.first_byte_ns, record.last_byte_ns), (100, 1124));
    assert_eq!(record.gb_per_s(), 4.0, "4096 bytes in 1024 ns");
    let json = h.t.records_text(RecordFormat::JsonLines).unwrap();
    let lines: Vec<serde_json::Value> = json
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 2);
    assert_eq!(lines[1]["request"], 2);
    assert_eq!(lines[1]["side"], "generation");
    assert_eq!(lines[1]["cause"], "KVF_OK");
    assert_eq!(lines[1]["bytes"], 4096);
    assert_eq!(lines[1]["gb_per_s"], 4.0);
    let csv = h.t.records_text(RecordFormat::Csv).unwrap();
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 3);
    let column = |name: &str| rows[0].iter().position(|cell| *cell == name).unwrap();
    assert_eq!(rows[2][column("request")], "2");
    assert_eq!(rows[2][column("last_byte_ns")], "1124");
    assert_eq!(rows[2][column("outcome")], "Done");
}

const SLOTS: u32 = 16;
const TOKENS: u32 = 8;
const TOKEN_BYTES: u64 = 64;
const SLOT_BYTES: u64 = TOKEN_BYTES * TOKENS as u64;

struct Rank {
    agent: Arc<Agent>,
    memory: (*mut u8, u64),
    t: Transceiver<AgentPort<Arc<Agent>>>,
}

fn rank(name: &str) -> Rank {
    let config = AgentConfig {
        name: name.into(),
        fingerprint: "push test".into(),
        ..AgentConfig::default()
    };
    let agent = Arc::new(Agent::create(config, None).unwrap());
    let bytes = SLOT_BYTES * u64::from(SLOTS);
    let pool = agent.create_pool(bytes, None, 0).unwrap();
    let view = View {
        role: Role::Latent,
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
            slot: SLOT_BYTES,
            layer: SLOT_BYTES,
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
            layers: vec![0],
            ordinals: Ordinals::default(),
            views: vec![view],
        }],
        ..Layout::default()
    };
    agent.set_layout(layout).unwrap();
    agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
    Rank {
        memory: agent.pool_memory(pool).unwrap(),
        t: Transceiver::create(agent.clone(), push()).unwrap(),
        agent,
    }
}

impl Rank {
    #[allow(clippy::mut_from_ref)] // the pool is no part of this struct
    fn slot(&self, slot: i32) -> &mut [u8] {
        let (at, bytes) = (slot as u64 * SLOT_BYTES, SLOT_BYTES as usize);
        assert!(at + SLOT_BYTES <= self.memory.1);
        // SAFETY: inside the pool, which lives as long as the agent; filled before and compared
        // after the transfer.
        unsafe { std::slice::from_raw_parts_mut(self.memory.0.add(at as usize), bytes) }
    }

    fn one(&self, side: Side) -> RequestResult {
        let mut out = Vec::new();
        let checked = match side {
            Side::Context => self
                .t
                .check_context_transfer_status(None, Some(LONG), 9, &mut out),
            Side::Generation => self
                .t
                .check_gen_transfer_status(None, Some(LONG), 9, &mut out),
        };
        assert_eq!(checked.unwrap().status, KVF_OK);
        assert_eq!((out.len(), out[0].kind), (1, ResultKind::Ended));
        out[0]
    }
}

#[test]
fn real_agents_push_every_byte_and_the_first_tokens() {
    let (context, generation) = (rank("context"), rank("generation"));
    let connect = |from: &Rank, to: &Rank| {
        let metadata = to.agent.engine_metadata().unwrap();
        let peer = from.agent.add_peer(&metadata, 0).unwrap();
        assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
        peer
    };
    let to_generation = connect(&context, &generation);
    let to_context = connect(&generation, &context);
    for slot in 0..SLOTS as i32 {
        let byte = |i: usize| (slot as usize * 37 + i) as u8;
        let slot = context.slot(slot);
        slot.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
    }
    let (from, to) = (vec![3, 9, 4], vec![11, 0, 7]);
    let mut request = receive(1);
    request.import.groups = vec![ImportGroup {
        group: 0,
        slots: to.clone(),
        token_end: u64::MAX,
        ..ImportGroup::default()
    }];
    generation
        .t
        .request_and_receive_async(&to_context, request)
        .unwrap();
    let offer = generation.t.offer(key(1)).unwrap();
    let send = PublishDesc {
        groups: vec![PublishedGroup {
            group: 0,
            slots: from.clone(),
            token_end: 3 * u64::from(TOKENS),
            ..PublishedGroup::default()
        }],
        aux: b"first".to_vec(),
        ..PublishDesc::default()
    };
    context
        .t
        .push_async(&to_generation, &offer, send, Duration::ZERO)
        .unwrap();
    for (rank, side) in [(&generation, Side::Generation), (&context, Side::Context)] {
        let result = rank.one(side);
        assert_eq!((result.key, result.outcome), (key(1), Outcome::Done));
        assert!(result.memory_safe);
        assert_eq!(result.bytes, 3 * SLOT_BYTES, "{side:?}");
        let record = rank.t.record(key(1)).unwrap();
        assert!(0 < record.first_byte_ns, "{record:?}");
        assert!(record.first_byte_ns <= record.last_byte_ns, "{record:?}");
    }
    assert_eq!(generation.t.record(key(1)).unwrap().aux, b"first");
    for (from, to) in from.iter().zip(&to) {
        assert_eq!(generation.slot(*to), context.slot(*from));
    }
    assert!(
        generation.slot(1).iter().all(|b| *b == 0),
        "nothing else was written"
    );
}
