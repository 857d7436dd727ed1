//! Two agents in one process: publish, import, push, and everything that ends them.
#![allow(missing_docs, clippy::unwrap_used)]

use std::time::Duration;

use kvferry::agent::*;
use kvferry::error::Status::{self, *};
use kvferry::ids::Key;
use kvferry::layout::*;

const SLOTS: u32 = 16;
const TOKENS: u32 = 4;
const HEADS: u32 = 2;
const HEAD_BYTES: u64 = 64;
const LAYERS: u32 = 3;
const LONG: Duration = Duration::from_secs(20);

struct Side {
    agent: Agent,
    pool: (*mut u8, u64),
}

fn view(role: Role, pool: u32, offset: u64) -> View {
    let token = HEAD_BYTES * u64::from(HEADS);
    let layer = token * u64::from(TOKENS);
    let slot = layer * u64::from(LAYERS);
    View {
        role,
        element_bits: 16,
        heads: HEADS,
        bytes_per_head: HEAD_BYTES,
        shards: 1,
        shard: 0,
        replicas: 1,
        replica: 0,
        sections: Vec::new(),
        tensors: vec![Tensor { pool, offset }],
        slots: SLOTS,
        strides: Strides {
            slot,
            layer,
            token,
            head: HEAD_BYTES,
        },
    }
}

fn view_bytes() -> u64 {
    HEAD_BYTES * u64::from(HEADS * TOKENS * LAYERS * SLOTS)
}

fn side(name: &str, timeouts: Timeouts) -> Side {
    let agent = Agent::create(
        AgentConfig {
            name: name.into(),
            fingerprint: "test".into(),
            timeouts,
            ..AgentConfig::default()
        },
        std::env::var_os("KVF_TEST_LOG").map(|_| {
            let name = name.to_owned();
            let sink: LogSink = Box::new(move |level, text| eprintln!("{name} {level} {text}"));
            (4, sink)
        }),
    )
    .unwrap();
    let pool = agent.create_pool(2 * view_bytes(), None, 0).unwrap();
    let layout = Layout {
        groups: vec![Group {
            kind: GroupKind::Paged {
                tokens_per_block: TOKENS,
                window: 0,
            },
            layers: (0..LAYERS).collect(),
            ordinals: Ordinals::default(),
            views: vec![
                view(Role::Key, pool, 0),
                view(Role::Value, pool, view_bytes()),
            ],
        }],
        ..Layout::default()
    };
    agent.set_layout(layout).unwrap();
    agent.set_engine(&[agent.metadata().unwrap()]).unwrap();
    let memory = agent.pool_memory(pool).unwrap();
    Side {
        agent,
        pool: memory,
    }
}

impl Side {
    #[allow(clippy::mut_from_ref)] // raw memory that the agent owns
    fn bytes(&self) -> &mut [u8] {
        // SAFETY: the pool lives as long as the agent; the test does not touch it in parallel.
        unsafe { std::slice::from_raw_parts_mut(self.pool.0, self.pool.1 as usize) }
    }

    fn block(&self, view: u64, slot: usize) -> &[u8] {
        let slot_bytes = (view_bytes() / u64::from(SLOTS)) as usize;
        let at = (view * view_bytes()) as usize + slot * slot_bytes;
        &self.bytes()[at..at + slot_bytes]
    }

    fn fill(&self, seed: u8) {
        for (i, b) in self.bytes().iter_mut().enumerate() {
            *b = (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed;
        }
    }

    fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        self.agent.take_events(&mut events, 100);
        events
    }
}

fn pair(timeouts: Timeouts) -> (Side, Side, Peer) {
    let (source, sink) = (side("src", timeouts), side("dst", timeouts));
    source.fill(0x5a);
    let peer = sink
        .agent
        .add_peer(&source.agent.engine_metadata().unwrap(), 7)
        .unwrap();
    assert_eq!(peer.wait(LONG), KVF_OK, "{}", peer.info().text);
    (source, sink, peer)
}

fn offer(key: u64, slots: &[i32], token_end: u64) -> PublishDesc {
    PublishDesc {
        key: Key {
            request: key,
            attempt: 0,
        },
        groups: vec![PublishedGroup {
            group: 0,
            slots: slots.to_vec(),
            token_begin: 0,
            token_end,
            ..PublishedGroup::default()
        }],
        ..PublishDesc::default()
    }
}

fn want(ticket: &[u8], slots: &[i32], skip: u64) -> ImportDesc {
    ImportDesc {
        ticket: ticket.to_vec(),
        groups: vec![ImportGroup {
            group: 0,
            slots: slots.to_vec(),
            skip_token: skip,
            token_end: u64::MAX,
            ..ImportGroup::default()
        }],
        ..ImportDesc::default()
    }
}

fn ended(publication: &Publication) -> Status {
    publication.wait(LONG)
}

#[test]
fn a_pull_moves_exactly_the_wanted_tokens() {
    let (source, sink, peer) = pair(Timeouts::default());
    // 10 tokens: two whole blocks and half of a third.
    let publication = source.agent.publish(offer(1, &[3, 9, 4], 10)).unwrap();
    let transfer = sink
        .agent
        .import_begin(&peer, want(publication.ticket(), &[7, 0, 2], 0))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    for view in 0..2 {
        assert_eq!(sink.block(view, 7), source.block(view, 3));
        assert_eq!(sink.block(view, 0), source.block(view, 9));
        // Tokens 8 and 9 of each layer arrived, 10 and 11 did not.
        let token = (HEAD_BYTES * u64::from(HEADS)) as usize;
        for layer in 0..LAYERS as usize {
            let at = layer * token * TOKENS as usize;
            let (got, there) = (sink.block(view, 2), source.block(view, 4));
            assert_eq!(got[at..at + 2 * token], there[at..at + 2 * token]);
            assert!(got[at + 2 * token..at + 4 * token].iter().all(|b| *b == 0));
        }
        assert!(sink.block(view, 1).iter().all(|b| *b == 0));
    }
    let info = transfer.info();
    assert_eq!(
        (
            info.outcome,
            info.memory_safe,
            info.submitted,
            info.transport
        ),
        (Outcome::Done, true, 1, "inproc")
    );
    assert_eq!(info.bytes, 10 * 2 * u64::from(LAYERS * HEADS) * HEAD_BYTES);
    assert_eq!(ended(&publication), KVF_OK);
    assert!(publication.info().memory_safe);
    assert_eq!(publication.info().readers_done, 1);
}

#[test]
fn an_empty_pull_is_born_complete_and_the_source_is_told() {
    let (source, sink, peer) = pair(Timeouts::default());
    let publication = source.agent.publish(offer(1, &[3, 9], 8)).unwrap();
    let transfer = sink
        .agent
        .import_begin(&peer, want(publication.ticket(), &[7, 0], 8))
        .unwrap();
    assert_eq!(transfer.poll(), KVF_OK);
    let info = transfer.info();
    assert_eq!((info.submitted, info.bytes, info.memory_safe), (0, 0, true));
    assert_eq!(info.parts[0].state, PartState::NotNeeded);
    assert_eq!(ended(&publication), KVF_OK);
    assert!(sink.bytes().iter().all(|b| *b == 0));
}

/// Who adds a peer right after removing it got the removed one's route, and the late removal ended
/// the new handle with it.
#[test]
fn a_peer_that_is_added_again_is_not_ended_by_the_removal_before() {
    let (source, sink, mut peer) = pair(Timeouts::default());
    let metadata = source.agent.engine_metadata().unwrap();
    for round in 0..200 {
        let publication = source.agent.publish(offer(round, &[3], 4)).unwrap();
        let transfer = sink
            .agent
            .import_begin(&peer, want(publication.ticket(), &[7], 0))
            .unwrap();
        let text = || format!("round {round}: {}", transfer.error_text());
        assert_eq!(transfer.wait(LONG), KVF_OK, "{}", text());
        peer.remove();
        peer = sink.agent.add_peer(&metadata, 7).unwrap();
        let text = || format!("round {round}: {}", peer.info().text);
        assert_eq!(peer.wait(LONG), KVF_OK, "{}", text());
    }
    // A second handle keeps what the first one shared with it.
    let second = sink.agent.add_peer(&metadata, 8).unwrap();
    peer.remove();
    peer.remove();
    let publication = source.agent.publish(offer(1000, &[3], 4)).unwrap();
    let transfer = sink
        .agent
        .import_begin(&second, want(publication.ticket(), &[7], 0))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
    second.remove();
    while second.wait(Duration::ZERO) == KVF_OK {
        std::thread::yield_now();
    }
    assert_eq!(second.wait(LONG), KVF_ERR_CANCELLED);
    assert_eq!(
        second.info().text,
        "rank 0 (src): the peer was removed by this side"
    );
}

#[test]
fn a_released_publication_gives_no_bytes() {
    let (source, sink, peer) = pair(Timeouts::default());
    let publication = source.agent.publish(offer(1, &[3], 4)).unwrap();
    publication.release();
    publication.release();
    assert_eq!(ended(&publication), KVF_ERR_CANCELLED);
    let transfer = sink
        .agent
        .import_begin(&peer, want(publication.ticket(), &[7], 0))
        .unwrap();
    assert_eq!(transfer.wait(LONG), KVF_ERR_EXPIRED);
    let text = transfer.error_text();
    assert!(
        text.contains("agent src: the publication had ended"),
        "{text}"
    );
    assert!(transfer.info().memory_safe);
    assert_eq!(transfer.info().parts[0].state, PartState::Failed);
}

#[test]
fn nobody_comes_and_the_claim_deadline_ends_the_offer() {
    let side = side("src", Timeouts::default());
    let mut desc = offer(1, &[3], 4);
    desc.claim = Duration::from_millis(30);
    desc.user_data = 99;
    let publication = side.agent.publish(desc).unwrap();
    assert_eq!(ended(&publication), KVF_ERR_EXPIRED);
    let events = side.events();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].kind, EventKind::PublicationEnded);
    assert_eq!(
        (events[0].user_data, events[0].object),
        (99, publication.id())
    );
}

#[test]
fn bad_arguments_change_nothing() {
    let (source, sink, peer) = pair(Timeouts::default());
    let refuse = |desc: PublishDesc, status: Status, text: &str| {
        let err = source.agent.publish(desc).unwrap_err();
        assert_eq!(err.status, status, "{err}");
        assert!(err.text.contains(text), "{err}");
    };
    refuse(
        offer(1, &[3, 16], 8),
        KVF_ERR_OUT_OF_RANGE,
        "slot 16 of group 0",
    );
    refuse(
        offer(1, &[3, -2], 8),
        KVF_ERR_OUT_OF_RANGE,
        "slot -2 of group 0",
    );
    refuse(offer(1, &[3, 3], 8), KVF_ERR_DUPLICATE, "slot 3 of group 0");
    refuse(
        offer(1, &[3], 8),
        KVF_ERR_INVALID_ARGUMENT,
        "1 slots for the 2 blocks",
    );
    let from = |first: u64, slots: &[i32]| {
        let mut offer = offer(1, slots, 8);
        offer.groups[0].first_ordinal = first;
        offer
    };
    for (first, slots) in [(2, &[3][..]), (3, &[]), (3, &[3]), (u64::MAX, &[3])] {
        let text = format!(
            "group 0: a table of {} slots from block ordinal {first} on, but the 8 tokens end with \
             the 2 blocks of 4 tokens before it",
            slots.len()
        );
        refuse(from(first, slots), KVF_ERR_INVALID_ARGUMENT, &text);
    }
    for (first, slots) in [(1, &[3][..]), (2, &[])] {
        let publication = source.agent.publish(from(first, slots)).unwrap();
        publication.release();
        assert_eq!(ended(&publication), KVF_ERR_CANCELLED);
    }
    let text = "token_end is KVF_TOKEN_END_ALL";
    refuse(offer(1, &[3], u64::MAX), KVF_ERR_INVALID_ARGUMENT, text);
    let publication = source.agent.publish(offer(1, &[3, 9], 8)).unwrap();
    let refuse = |desc: ImportDesc, status: Status, text: &str| {
        let err = sink.agent.import_begin(&peer, desc).unwrap_err();
        assert_eq!(err.status, status, "{err}");
        assert!(err.text.contains(text), "{err}");
    };
    let t = publication.ticket();
    refuse(
        want(t, &[16, 1], 0),
        KVF_ERR_OUT_OF_RANGE,
        "slot 16 of group 0",
    );
    refuse(want(t, &[1, 1], 0), KVF_ERR_DUPLICATE, "slot 1");
    refuse(
        want(&t[1..], &[1, 2], 0),
        KVF_ERR_INVALID_ARGUMENT,
        "ticket",
    );
    refuse(want(t, &[1, 2], 3), KVF_ERR_INVALID_ARGUMENT, "group 0");
    let mut beyond = want(t, &[1, 2, 3], 0);
    beyond.groups[0].token_end = 12;
    refuse(beyond, KVF_ERR_OUT_OF_RANGE, "published 0..8");
    let mut late = want(t, &[1], 0);
    (late.groups[0].first_ordinal, late.groups[0].token_end) = (2, 8);
    let text = "group 0: a table of 1 slots from block ordinal 2 on, but the 8 tokens";
    refuse(late, KVF_ERR_INVALID_ARGUMENT, text);
    // Nothing was marked: the slots are free.
    let transfer = sink.agent.import_begin(&peer, want(t, &[1, 2], 0)).unwrap();
    assert_eq!(transfer.wait(LONG), KVF_OK);
    assert_eq!(source.agent.quarantine(), []);
}

#[test]
fn a_receive_gets_what_is_pushed() {
    let (source, sink, _peer) = pair(Timeouts::default());
    let back = source
        .agent
        .add_peer(&sink.agent.engine_metadata().unwrap(), 0)
        .unwrap();
    assert_eq!(back.wait(LONG), KVF_OK);
    let desc = |skip| ReceiveDesc {
        key: Key {
            request: 5,
            attempt: 0,
        },
        groups: want(&[], &[7, 0], skip).groups,
        ..ReceiveDesc::default()
    };
    let receive = sink.agent.receive_begin(None, desc(4), None).unwrap();
    let push = source
        .agent
        .push_begin(
            &back,
            receive.offer().unwrap(),
            offer(5, &[3, 9], 8),
            LONG,
            None,
        )
        .unwrap();
    assert_eq!(receive.wait(LONG), KVF_OK, "{}", receive.error_text());
    assert_eq!(push.wait(LONG), KVF_OK, "{}", push.error_text());
    for view in 0..2 {
        assert!(sink.block(view, 7).iter().all(|b| *b == 0), "skipped");
        assert_eq!(sink.block(view, 0), source.block(view, 9));
    }
    assert_eq!(push.info().bytes, receive.info().bytes);
    // The same with a full hit: nothing moves, both ends are told.
    let mut nothing = desc(8);
    nothing.groups[0].token_end = 8;
    let receive = sink.agent.receive_begin(None, nothing, None).unwrap();
    assert_eq!(receive.poll(), KVF_OK);
    let push = source
        .agent
        .push_begin(
            &back,
            receive.offer().unwrap(),
            offer(5, &[3, 9], 8),
            LONG,
            None,
        )
        .unwrap();
    assert_eq!(push.wait(LONG), KVF_OK, "{}", push.error_text());
}

#[test]
fn blocks_behind_the_last_valid_token_are_kept_and_not_read() {
    let (source, sink, peer) = pair(Timeouts::default());
    let publication = source.agent.publish(offer(1, &[3, 9, 4], 8)).unwrap();
    let busy = ReceiveDesc {
        groups: want(&[], &[4], 0).groups,
        ..ReceiveDesc::default()
    };
    let err = source.agent.receive_begin(None, busy, None).unwrap_err();
    assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
    let ticket = publication.ticket();
    let err = sink.agent.import_begin(&peer, want(ticket, &[0, 1, 2], 0));
    assert_eq!(err.unwrap_err().status, KVF_ERR_INVALID_ARGUMENT);
    let pull = sink.agent.import_begin(&peer, want(ticket, &[0, 1], 0));
    let pull = pull.unwrap();
    assert_eq!(pull.wait(LONG), KVF_OK, "{}", pull.error_text());
    assert_eq!(pull.info().bytes, 2 * 2 * view_bytes() / u64::from(SLOTS));
    assert_eq!(sink.block(0, 1), source.block(0, 9));
    assert_eq!(ended(&publication), KVF_OK);
}

#[test]
fn a_slot_is_busy_while_it_is_published_and_free_after() {
    let (source, _sink, _peer) = pair(Timeouts::default());
    let first = source.agent.publish(offer(1, &[3], 4)).unwrap();
    let second = source.agent.publish(offer(2, &[3], 4)).unwrap();
    let receive = |slot| ReceiveDesc {
        groups: want(&[], &[slot], 0).groups,
        ..ReceiveDesc::default()
    };
    let err = source
        .agent
        .receive_begin(None, receive(3), None)
        .unwrap_err();
    assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
    assert!(
        err.text
            .contains("slot 3 of group 0 is in 2 publication(s)"),
        "{err}"
    );
    first.release();
    second.release();
    assert_eq!(ended(&first), KVF_ERR_CANCELLED);
    assert_eq!(ended(&second), KVF_ERR_CANCELLED);
    let receive = source.agent.receive_begin(None, receive(3), None).unwrap();
    let err = source.agent.publish(offer(3, &[3], 4)).unwrap_err();
    assert_eq!(err.status, KVF_ERR_SLOT_BUSY);
    receive.cancel();
    assert_eq!(receive.wait(LONG), KVF_ERR_CANCELLED);
}

#[test]
fn shutdown_fails_what_runs_and_tells_the_peer() {
    let (source, sink, peer) = pair(Timeouts::default());
    let publication = source.agent.publish(offer(1, &[3], 4)).unwrap();
    source.agent.shutdown(LONG).unwrap();
    assert_eq!(ended(&publication), KVF_ERR_SHUTDOWN);
    assert_eq!(
        source.agent.publish(offer(2, &[3], 4)).unwrap_err().status,
        KVF_ERR_SHUTDOWN
    );
    let deadline = std::time::Instant::now() + LONG;
    while peer.info().status != KVF_ERR_PEER_LOST && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    let err = sink
        .agent
        .import_begin(&peer, want(publication.ticket(), &[1], 0))
        .map(|t| t.wait(LONG));
    assert!(matches!(err, Ok(KVF_ERR_PEER_LOST)), "{err:?}");
    let kinds: Vec<EventKind> = sink.events().iter().map(|e| e.kind).collect();
    assert!(kinds.contains(&EventKind::PeerReady) && kinds.contains(&EventKind::PeerLost));
}

#[test]
fn an_agent_with_nothing_in_flight_ends_in_success_whatever_the_time_out() {
    for round in 0..20 {
        let (source, sink, peer) = pair(Timeouts::default());
        let publication = source.agent.publish(offer(1, &[3], 4)).unwrap();
        let wanted = want(publication.ticket(), &[7], 0);
        let transfer = sink.agent.import_begin(&peer, wanted).unwrap();
        assert_eq!(transfer.wait(LONG), KVF_OK, "{}", transfer.error_text());
        assert_eq!(sink.agent.shutdown(Duration::ZERO), Ok(()), "{round}");
        assert_eq!(ended(&publication), KVF_OK);
        // A publication that nobody reads is ended and needs no time either.
        let unread = source.agent.publish(offer(2, &[4], 4)).unwrap();
        assert_eq!(source.agent.shutdown(Duration::ZERO), Ok(()), "{round}");
        assert_eq!(ended(&unread), KVF_ERR_SHUTDOWN);
    }
}

#[test]
fn a_drained_agent_is_idle_and_closed() {
    let (source, _sink, _peer) = pair(Timeouts::default());
    let publication = source.agent.publish(offer(1, &[3], 4)).unwrap();
    let err = source.agent.drain(Duration::from_millis(20)).unwrap_err();
    assert_eq!(err.status, KVF_ERR_DEADLINE);
    publication.release();
    source.agent.drain(LONG).unwrap();
}

#[test]
fn an_unregistered_pool_is_released_when_its_users_have_ended() {
    let (source, _sink, _peer) = pair(Timeouts::default());
    let publication = source.agent.publish(offer(1, &[3], 4)).unwrap();
    source.agent.unregister_pool(1, LONG, 42).unwrap();
    assert_eq!(source.agent.pool_status(1), KVF_IN_PROGRESS);
    assert_eq!(
        source.agent.publish(offer(2, &[4], 4)).unwrap_err().status,
        KVF_ERR_STATE
    );
    publication.release();
    let deadline = std::time::Instant::now() + LONG;
    while source.agent.pool_status(1) != KVF_OK && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(source.agent.pool_status(1), KVF_OK);
    let events = source.events();
    let released: Vec<_> = events
        .iter()
        .filter(|e| e.kind == EventKind::PoolReleased)
        .collect();
    assert_eq!(released.len(), 1);
    assert_eq!((released[0].object, released[0].user_data), (1, 42));
    let again = source.agent.unregister_pool(1, LONG, 42).unwrap_err();
    assert_eq!(
        (again.status, again.text.as_str()),
        (KVF_ERR_STATE, "pool 1 has been released: destroy it")
    );
}
