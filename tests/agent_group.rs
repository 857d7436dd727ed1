//! Messages between the ranks of one engine: order, arrival before the join, loss, alarm.
#![allow(missing_docs, clippy::unwrap_used)]

mod small_layout;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, RwLock, Weak};
use std::time::Duration;

use kvferry::agent::*;
use kvferry::error::{Error, Status};
use small_layout::small_layout;

const LONG: Duration = Duration::from_secs(20);

#[derive(Debug, PartialEq)]
enum Heard {
    Message(u32, Vec<u8>),
    Lost(Option<u32>, Status),
    Alarm,
}

struct Ear(Mutex<Sender<Heard>>);

impl Ear {
    fn new() -> (Arc<Self>, Receiver<Heard>) {
        let (sender, heard) = channel();
        (Arc::new(Self(Mutex::new(sender))), heard)
    }
    fn say(&self, heard: Heard) {
        let _ = self.0.lock().unwrap().send(heard);
    }
}

impl GroupEvents for Ear {
    fn message(&self, from: u32, bytes: &[u8]) {
        self.say(Heard::Message(from, bytes.to_vec()));
    }
    fn lost(&self, rank: Option<u32>, why: &Error) {
        self.say(Heard::Lost(rank, why.status));
    }
    fn alarm(&self) {
        self.say(Heard::Alarm);
    }
}

/// The ranks of one engine, tensor-parallel.
fn engine(world: u32) -> Vec<Agent> {
    let agents: Vec<Agent> = (0..world).map(|rank| rank_of(world, rank)).collect();
    let all: Vec<_> = agents.iter().map(|a| a.metadata().unwrap()).collect();
    agents.iter().for_each(|a| a.set_engine(&all).unwrap());
    agents
}

fn rank_of(world: u32, rank: u32) -> Agent {
    let config = AgentConfig {
        name: format!("rank{rank}"),
        fingerprint: "group".into(),
        ..AgentConfig::default()
    };
    let agent = Agent::create(config, None).unwrap();
    let pool = agent.create_pool(4096, None, 0).unwrap();
    let mut layout = small_layout(pool, 64, 16);
    let view = &mut layout.groups[0].views[0];
    (view.shards, view.shard) = (world, rank);
    layout.coordinates.global_rank = rank;
    layout.coordinates.tp_rank = rank;
    layout.coordinates.tp_size = world;
    agent.set_layout(layout).unwrap();
    agent
}

fn join(agent: &Agent, channel: u64, ranks: &[u32]) -> (Arc<Ear>, Receiver<Heard>) {
    let (ear, heard) = Ear::new();
    let weak: Weak<Ear> = Arc::downgrade(&ear);
    agent.group_join(channel, ranks, weak).unwrap();
    (ear, heard)
}

#[test]
fn messages_come_in_order_each_once_also_before_the_join() {
    let ranks = engine(3);
    let (_ear, _) = join(&ranks[1], 5, &[0]);
    for i in 0..500u32 {
        ranks[1].group_send(0, 5, i.to_le_bytes().into()).unwrap();
        ranks[2].group_send(0, 5, i.to_le_bytes().into()).unwrap();
        ranks[1]
            .group_send(0, 6, b"another channel".into())
            .unwrap();
    }
    std::thread::sleep(Duration::from_millis(50));
    let (_ear, heard) = join(&ranks[0], 5, &[1, 2]);
    for i in 500..1000u32 {
        ranks[1].group_send(0, 5, i.to_le_bytes().into()).unwrap();
        ranks[2].group_send(0, 5, i.to_le_bytes().into()).unwrap();
    }
    let mut next = [0u32; 3];
    while next[1] < 1000 || next[2] < 1000 {
        let Heard::Message(from, bytes) = heard.recv_timeout(LONG).unwrap() else {
            panic!("nobody is lost");
        };
        let i = u32::from_le_bytes(bytes.try_into().unwrap());
        assert_eq!(i, next[from as usize], "from rank {from}");
        next[from as usize] += 1;
    }
    let (_other, heard) = join(&ranks[0], 6, &[]);
    for _ in 0..500 {
        let message = heard.recv_timeout(LONG).unwrap();
        assert_eq!(message, Heard::Message(1, b"another channel".into()));
    }
}

/// Held by who breaks all links of this process, and by who would not survive that.
static LINKS: RwLock<()> = RwLock::new(());

/// Ends both directions of every connection of this process.
fn break_links() -> usize {
    let fds: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    let is_connected = |fd: &&i32| {
        let (mut listens, mut len) = (0i32, 4);
        // SAFETY: an int and its size; anything but a socket is refused.
        let known = unsafe {
            let listens = (&raw mut listens).cast();
            libc::getsockopt(
                **fd,
                libc::SOL_SOCKET,
                libc::SO_ACCEPTCONN,
                listens,
                &raw mut len,
            )
        };
        known == 0 && listens == 0
    };
    // SAFETY: what is not connected (any more) is refused.
    let ended = |fd: &&i32| unsafe { libc::shutdown(**fd, libc::SHUT_RDWR) == 0 };
    fds.iter().filter(is_connected).filter(ended).count()
}

/// Votes travel by these messages: a link that breaks must lose none, double none and reorder none.
#[test]
fn a_broken_link_loses_no_message() {
    let _alone = LINKS.write().unwrap();
    let ranks = engine(2);
    let (_ear, heard) = join(&ranks[0], 5, &[1]);
    let (_other, back) = join(&ranks[1], 5, &[0]);
    for i in 0..2000u32 {
        ranks[1].group_send(0, 5, i.to_le_bytes().into()).unwrap();
        ranks[0].group_send(1, 5, i.to_le_bytes().into()).unwrap();
        if i % 200 == 100 {
            // Some of the messages have come, some are on their way, more follow.
            let message = heard.recv_timeout(LONG).unwrap();
            assert_eq!(message, Heard::Message(1, (i / 200).to_le_bytes().into()));
            while break_links() == 0 {
                std::thread::sleep(Duration::from_millis(1)); // the next link is being made
            }
        }
    }
    for i in 10..2000u32 {
        assert_eq!(
            heard.recv_timeout(LONG).unwrap(),
            Heard::Message(1, i.to_le_bytes().into())
        );
    }
    for i in 0..2000u32 {
        assert_eq!(
            back.recv_timeout(LONG).unwrap(),
            Heard::Message(0, i.to_le_bytes().into())
        );
    }
}

#[test]
fn a_rank_that_leaves_or_ends_is_lost_after_its_last_message() {
    let _beside = LINKS.read().unwrap();
    let mut ranks = engine(3);
    let (_ear, heard) = join(&ranks[0], 5, &[1, 2]);
    let (_one, _) = join(&ranks[1], 5, &[0]);
    ranks[1].group_send(0, 5, vec![1]).unwrap();
    ranks[1].group_leave(5);
    assert_eq!(
        heard.recv_timeout(LONG).unwrap(),
        Heard::Message(1, vec![1])
    );
    let left = Heard::Lost(Some(1), Status::KVF_ERR_PEER_LOST);
    assert_eq!(heard.recv_timeout(LONG).unwrap(), left);
    ranks[2].group_send(0, 5, vec![2]).unwrap();
    assert_eq!(
        heard.recv_timeout(LONG).unwrap(),
        Heard::Message(2, vec![2])
    );
    drop(ranks.pop());
    let lost = Heard::Lost(Some(2), Status::KVF_ERR_PEER_LOST);
    assert_eq!(heard.recv_timeout(LONG).unwrap(), lost);
    let refused = ranks[0].group_send(2, 5, vec![3]).unwrap_err();
    assert_eq!(refused.status, Status::KVF_ERR_PEER_LOST);
    // Who joins later hears of it at once.
    let (_late, heard) = join(&ranks[0], 9, &[2]);
    assert_eq!(heard.recv_timeout(LONG).unwrap(), lost);
}

#[test]
fn a_rank_that_ended_before_anybody_spoke_to_it_is_lost() {
    let mut ranks = engine(2);
    drop(ranks.pop());
    let (_ear, heard) = join(&ranks[0], 5, &[1]);
    assert!(matches!(
        heard.recv_timeout(LONG).unwrap(),
        Heard::Lost(Some(1), _)
    ));
}

#[test]
fn the_earliest_alarm_counts_and_comes_once() {
    let ranks = engine(1);
    let (_ear, heard) = join(&ranks[0], 5, &[]);
    let begun = std::time::Instant::now();
    ranks[0].group_alarm(5, Duration::from_secs(600));
    ranks[0].group_alarm(5, Duration::from_millis(30));
    ranks[0].group_alarm(5, Duration::from_secs(300));
    assert_eq!(heard.recv_timeout(LONG).unwrap(), Heard::Alarm);
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert!(heard.recv_timeout(Duration::from_millis(100)).is_err());
}

#[test]
fn what_cannot_be_sent_or_joined_is_refused() {
    let ranks = engine(2);
    assert_eq!(ranks[1].domain_ranks().unwrap(), (vec![0, 1], 1));
    let send = |rank, bytes| ranks[0].group_send(rank, 5, bytes).unwrap_err().status;
    assert_eq!(send(0, vec![]), Status::KVF_ERR_OUT_OF_RANGE);
    assert_eq!(send(2, vec![]), Status::KVF_ERR_OUT_OF_RANGE);
    assert_eq!(send(1, vec![0; (4 << 20) + 1]), Status::KVF_ERR_LIMIT);
    let (ear, _) = join(&ranks[0], 5, &[1]);
    let (other, _) = Ear::new();
    let weak: Weak<Ear> = Arc::downgrade(&other);
    let twice = ranks[0].group_join(5, &[1], weak.clone()).unwrap_err();
    assert_eq!(twice.status, Status::KVF_ERR_DUPLICATE);
    drop(ear);
    ranks[0].group_join(5, &[1], weak).unwrap();
}
