//! Messages between the ranks of one engine: in order, each once, kept until the receiver has them.
//!
//! A rank that another one must talk to is its **mate**. Mates share the links that peers use; a
//! link is dialled by whoever needs it. What was sent stays here until it is acknowledged and is
//! sent again over a new link, so that a link that breaks loses nothing. A mate is lost when its
//! agent is (process ended, silent for too long, gone); that is final: it is refused when it comes
//! back, so that it learns that the others went on without it.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::Agent;
use super::control::{Command, Control, Timer};
use super::lock;
use super::shared::{OwnEngine, Shared};
use crate::error::{Error, Result, Status};
use crate::ids::Incarnation;
use crate::session::{End, Now};
use crate::wire::{Body, GroupMessage};
use crate::{bail, err};

/// Longest payload in bytes.
const MAX_PAYLOAD: usize = 4 << 20;
/// Messages to one mate that nobody has taken yet.
const MAX_WAITING: usize = 1 << 16;
/// Messages after which the sender is told that they have come.
const ACK_EVERY: u64 = 32;
/// How long a dead process's last messages are waited for where its socket does not end with it.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Hears what comes on a channel, on the agent's control thread: it must not wait.
pub trait GroupEvents: Send + Sync {
    /// Bytes that another rank sent; those of one rank come in order, each once.
    fn message(&self, from: u32, bytes: &[u8]);
    /// A rank is lost, or has left the channel; `None`: all are, this agent is broken. It may be
    /// said more than once.
    fn lost(&self, rank: Option<u32>, why: &Error);
    /// The time given to [`Agent::group_alarm`] has come.
    fn alarm(&self);
}

/// What callers' threads can see.
#[derive(Default)]
pub(super) struct Board {
    joined: HashMap<u64, Weak<dyn GroupEvents>>,
    lost: BTreeMap<Incarnation, Error>,
}

impl Board {
    /// The control thread is gone: everybody's work on this agent ends.
    pub fn take_all(&mut self) -> Vec<Arc<dyn GroupEvents>> {
        let all = std::mem::take(&mut self.joined);
        all.into_values().filter_map(|e| e.upgrade()).collect()
    }
}

/// What callers ask of the control thread.
pub(super) enum Order {
    /// Channel, places of the needed ranks in our engine, who hears.
    Join(u64, Vec<usize>, Weak<dyn GroupEvents>),
    Leave(u64),
    /// Receiver's place in our engine, channel, bytes.
    Send(usize, u64, Vec<u8>),
    Alarm(u64, Now),
}

/// The control thread's part.
#[derive(Default)]
pub(super) struct Groups {
    /// A dead reference: left, what still comes is dropped.
    channels: HashMap<u64, Weak<dyn GroupEvents>>,
    mates: HashMap<Incarnation, Mate>,
    alarms: HashMap<u64, Now>,
    /// Their process has ended, their last messages may still be in the socket.
    dying: BTreeSet<Incarnation>,
}

struct Mate {
    rank: u32,
    lost: Option<Error>,
    /// Number of the last message to it.
    sent: u64,
    unacked: VecDeque<GroupMessage>,
    /// Number of the last message from it, and what it was told of that.
    received: u64,
    acked: u64,
    /// Came for channels that nobody has joined yet.
    early: Vec<GroupMessage>,
}

impl Groups {
    /// Whether a link to this agent must be kept up.
    pub fn needs(&self, agent: Incarnation) -> bool {
        self.mates.get(&agent).is_some_and(|m| m.lost.is_none())
    }

    fn events(&self, channel: u64) -> Option<Arc<dyn GroupEvents>> {
        self.channels.get(&channel)?.upgrade()
    }
}

impl Agent {
    /// Global ranks that schedule together with this one (those of its data-parallel index), in
    /// ascending order, and this rank's own.
    ///
    /// # Errors
    /// `KVF_ERR_STATE`: no engine yet.
    pub fn domain_ranks(&self) -> Result<(Vec<u32>, u32)> {
        let own = self.shared.lock().engine()?;
        let mine = own.info.ranks[own.index].layout.coordinates;
        let ranks = own.info.ranks.iter().map(|r| r.layout.coordinates);
        let same = ranks.filter(|c| c.dp_rank == mine.dp_rank);
        Ok((same.map(|c| c.global_rank).collect(), mine.global_rank))
    }

    /// Hears the messages of a channel, and of the loss of any rank of this engine that is talked
    /// to; connects to `ranks` (global ranks), so that theirs is noticed whoever speaks first.
    /// Messages that came before are delivered.
    ///
    /// # Errors
    /// `KVF_ERR_STATE`: no engine yet; `KVF_ERR_OUT_OF_RANGE`: no such rank;
    /// `KVF_ERR_DUPLICATE`: the channel is joined already.
    pub fn group_join(
        &self,
        channel: u64,
        ranks: &[u32],
        events: Weak<dyn GroupEvents>,
    ) -> Result<()> {
        self.shared.check_open()?;
        let own = self.shared.lock().engine()?;
        let places = ranks.iter().map(|rank| place(&own, *rank));
        let places = places.collect::<Result<Vec<_>>>()?;
        let mut board = lock(&self.shared.groups);
        if board
            .joined
            .get(&channel)
            .is_some_and(|e| e.strong_count() > 0)
        {
            bail!(
                KVF_ERR_DUPLICATE,
                "channel {channel} of agent {} is joined already; a domain has one transceiver on \
                 each rank",
                self.shared.config.name
            );
        }
        board.joined.insert(channel, events.clone());
        drop(board);
        self.order(Order::Join(channel, places, events));
        Ok(())
    }

    /// Tells the other ranks that nothing more will come on the channel.
    pub fn group_leave(&self, channel: u64) {
        lock(&self.shared.groups).joined.remove(&channel);
        self.order(Order::Leave(channel));
    }

    /// Sends bytes to a rank of this engine. Never waits; they are kept until the rank has them.
    ///
    /// # Errors
    /// The rank is lost (with the cause), `KVF_ERR_OUT_OF_RANGE`: no such rank or this one,
    /// `KVF_ERR_LIMIT`: too long.
    pub fn group_send(&self, rank: u32, channel: u64, payload: Vec<u8>) -> Result<()> {
        if payload.len() > MAX_PAYLOAD {
            bail!(
                KVF_ERR_LIMIT,
                "a message of {} bytes to rank {rank}, the longest is {MAX_PAYLOAD}",
                payload.len()
            );
        }
        let own = self.shared.lock().engine()?;
        let place = place(&own, rank)?;
        let agent = own.info.ranks[place].incarnation;
        if let Some(e) = lock(&self.shared.groups).lost.get(&agent) {
            return Err(e.clone());
        }
        self.order(Order::Send(place, channel, payload));
        Ok(())
    }

    /// Calls the channel's [`GroupEvents::alarm`] once, after so long or earlier if it was asked
    /// for an earlier time that has not come yet.
    pub fn group_alarm(&self, channel: u64, after: Duration) {
        let at = self.shared.now().saturating_add(after);
        self.order(Order::Alarm(channel, at));
    }

    fn order(&self, order: Order) {
        self.shared.send(Command::Group(order));
    }
}

/// Place of another rank in our engine.
fn place(own: &OwnEngine, rank: u32) -> Result<usize> {
    let mut ranks = own.info.ranks.iter();
    let place = ranks.position(|r| r.layout.coordinates.global_rank == rank);
    match place {
        Some(place) if place != own.index => Ok(place),
        Some(_) => bail!(KVF_ERR_OUT_OF_RANGE, "rank {rank} is this rank itself"),
        None => bail!(
            KVF_ERR_OUT_OF_RANGE,
            "no rank {rank} among the {} of this engine",
            own.info.ranks.len()
        ),
    }
}

impl Control {
    pub fn group(&mut self, order: Order) {
        match order {
            Order::Join(channel, places, events) => self.group_join(channel, &places, events),
            Order::Leave(channel) => {
                // What still comes for it is dropped: the reference is dead.
                self.groups.alarms.remove(&channel);
                self.timers.set(Timer::Group(channel), None);
                let mates: Vec<Incarnation> = self.groups.mates.keys().copied().collect();
                for agent in mates {
                    self.group_queue(agent, channel, Vec::new(), true);
                }
            }
            Order::Send(place, channel, payload) => {
                if let Some(agent) = self.mate(place) {
                    self.group_queue(agent, channel, payload, false);
                }
            }
            Order::Alarm(channel, at) => {
                let alarm = self.groups.alarms.entry(channel).or_insert(at);
                *alarm = at.min(*alarm);
                let at = *alarm;
                self.timers.set(Timer::Group(channel), Some(at));
            }
        }
    }

    fn group_join(&mut self, channel: u64, places: &[usize], events: Weak<dyn GroupEvents>) {
        let hears = events.upgrade();
        self.groups.channels.insert(channel, events);
        for place in places {
            self.mate(*place);
        }
        let Some(hears) = hears else { return };
        for mate in self.groups.mates.values_mut() {
            let (now, later) = std::mem::take(&mut mate.early)
                .into_iter()
                .partition::<Vec<_>, _>(|m| m.channel == channel);
            mate.early = later;
            for message in now {
                deliver(&hears, mate.rank, &message);
            }
            if let Some(e) = &mate.lost {
                hears.lost(Some(mate.rank), e);
            }
        }
    }

    /// Makes a rank of our engine a mate and sees that there is a link to it.
    fn mate(&mut self, place: usize) -> Option<Incarnation> {
        let own = self.shared.lock().engine().ok()?;
        let agent = own.info.ranks.get(place)?.incarnation;
        if let Entry::Vacant(new) = self.groups.mates.entry(agent) {
            new.insert(Mate::new(
                own.info.ranks[place].layout.coordinates.global_rank,
            ));
            if self.remotes.contains_key(&agent) {
                return Some(agent); // it has dialled us
            }
            self.remote(&own.info, place);
            self.dial(agent);
        }
        Some(agent)
    }

    fn group_queue(&mut self, agent: Incarnation, channel: u64, payload: Vec<u8>, leaves: bool) {
        let mate = self.groups.mates.get_mut(&agent);
        let Some(mate) = mate.filter(|m| m.lost.is_none()) else {
            return;
        };
        mate.sent += 1;
        mate.acked = mate.received;
        let message = GroupMessage {
            channel,
            payload,
            sequence: mate.sent,
            acked: mate.received,
            leaves,
        };
        mate.unacked.push_back(message.clone());
        if mate.unacked.len() > MAX_WAITING {
            let text = format!(
                "rank {} has not taken {MAX_WAITING} messages: its control thread hangs",
                mate.rank
            );
            return self.remote_lost(agent, End::new(Status::KVF_ERR_PEER_LOST, text));
        }
        self.send_to(agent, Body::Group(message));
    }

    /// A new link: what was not acknowledged goes again.
    pub fn group_up(&mut self, agent: Incarnation) {
        let Some(mate) = self.groups.mates.get_mut(&agent) else {
            return;
        };
        mate.acked = mate.received;
        let acked = mate.received;
        let again: Vec<GroupMessage> = mate.unacked.iter().cloned().collect();
        for message in again {
            self.send_to(agent, Body::Group(GroupMessage { acked, ..message }));
        }
    }

    pub fn on_group(&mut self, agent: Incarnation, message: GroupMessage) {
        let own = self.shared.lock().engine().ok();
        let Some(place) = own.and_then(|own| own.info.index_of(agent)) else {
            return; // only ranks of our own engine are listened to
        };
        self.mate(place);
        let Some(mate) = self.groups.mates.get_mut(&agent) else {
            return;
        };
        while mate
            .unacked
            .front()
            .is_some_and(|m| m.sequence <= message.acked)
        {
            mate.unacked.pop_front();
        }
        if message.sequence <= mate.received {
            return; // only an acknowledgement, or sent again
        }
        if message.sequence != mate.received + 1 || mate.early.len() >= MAX_WAITING {
            let text = format!(
                "rank {} sent message {} after {}, {} wait for their channel",
                mate.rank,
                message.sequence,
                mate.received,
                mate.early.len()
            );
            return self.remote_lost(agent, End::new(Status::KVF_ERR_PROTOCOL, text));
        }
        mate.received += 1;
        let ack = mate.received - mate.acked >= ACK_EVERY;
        if ack {
            mate.acked = mate.received;
        }
        let (rank, acked) = (mate.rank, mate.received);
        match self.groups.channels.get(&message.channel) {
            Some(events) => {
                if let Some(events) = events.upgrade() {
                    deliver(&events, rank, &message);
                }
            }
            None => mate.early.push(message),
        }
        if ack {
            let ack = GroupMessage {
                acked,
                ..GroupMessage::default()
            };
            self.send_to(agent, Body::Group(ack));
        }
    }

    /// Why an agent of our engine that connects is refused.
    pub fn group_fence(&self, agent: Incarnation) -> Option<Error> {
        let mate = self.groups.mates.get(&agent)?;
        mate.lost.as_ref().map(|e| {
            err!(
                KVF_ERR_GROUP_LOST,
                "rank {} was given up by this rank ({e}) and the others go on without it; restart \
                 it",
                mate.rank
            )
        })
    }

    /// A process behind a link has ended. True: what it has said is still coming, its agent is
    /// lost with its link's end or when this is asked again.
    pub fn group_last_words(&mut self, agent: Incarnation) -> bool {
        if !self.groups.needs(agent) || !self.groups.dying.insert(agent) {
            return false;
        }
        let at = self.now() + LAST_WORDS;
        self.timers.set(Timer::Remote(agent), Some(at));
        true
    }

    /// Whether an agent's last words were waited for long enough.
    pub fn group_dying(&self, agent: Incarnation) -> bool {
        self.groups.dying.contains(&agent)
    }

    pub fn group_lost(&mut self, agent: Incarnation, end: &End) {
        self.groups.dying.remove(&agent);
        let Some(mate) = self.groups.mates.get_mut(&agent) else {
            return;
        };
        if mate.lost.is_some() {
            return;
        }
        let e = Error::new(end.status, format!("rank {}: {}", mate.rank, end.text));
        mate.lost = Some(e.clone());
        mate.unacked = VecDeque::new();
        let rank = mate.rank;
        lock(&self.shared.groups).lost.insert(agent, e.clone());
        let channels = self.groups.channels.values();
        let hear: Vec<_> = channels.filter_map(Weak::upgrade).collect();
        for events in hear {
            events.lost(Some(rank), &e);
        }
    }

    pub fn group_alarm_due(&mut self, channel: u64) {
        self.groups.alarms.remove(&channel);
        if let Some(events) = self.groups.events(channel) {
            events.alarm();
        }
    }
}

/// This agent is broken: nobody waits for the others any more.
pub(super) fn fail_all(shared: &Shared, end: &End) {
    let e = Error::new(end.status, end.text.clone());
    let all = lock(&shared.groups).take_all();
    for events in all {
        events.lost(None, &e);
    }
}

impl Mate {
    fn new(rank: u32) -> Self {
        Self {
            rank,
            lost: None,
            sent: 0,
            unacked: VecDeque::new(),
            received: 0,
            acked: 0,
            early: Vec::new(),
        }
    }
}

fn deliver(events: &Arc<dyn GroupEvents>, rank: u32, message: &GroupMessage) {
    if message.leaves {
        let e = err!(
            KVF_ERR_PEER_LOST,
            "rank {rank} has ended its transceiver; its agent lives"
        );
        events.lost(Some(rank), &e);
    } else {
        events.message(rank, &message.payload);
    }
}
