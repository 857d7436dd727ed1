//! What callers give to a transceiver and what they get back.

use std::fmt;
use std::time::Duration;

use crate::agent::{ImportDesc, Outcome, PublishDesc};
use crate::bail;
use crate::error::{Result, Status};
use crate::ids::Key;

/// Which half of a handoff a request is here. The numbers are the wire's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// This engine prefilled: it offers.
    Context = 0,
    /// This engine decodes: it fetches.
    Generation = 1,
}

impl Side {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Context, Self::Generation];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Context => "context",
            Self::Generation => "generation",
        }
    }
}

/// Who moves the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Direction {
    /// The generation side reads.
    #[default]
    Pull,
    /// The context side writes into what the generation side has offered.
    Push,
}

/// How the ranks of an engine come to act on a request in the same iteration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Consensus {
    /// One rank: what ends here is reported here.
    #[default]
    None,
    /// Ranks vote, rank 0 of the domain decides, the engine broadcasts its decision bytes.
    Votes,
    /// Every rank's status call exchanges what it knows through [`Gather`].
    Collective,
}

/// Ranks that exchange in one call of [`Gather`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Group {
    /// The tensor- and context-parallel ranks of one pipeline stage.
    Tensor = 0,
    /// The pipeline stages' ranks of equal tensor- and context-parallel coordinates.
    Pipeline = 1,
}

/// The caller's all-gather: gives this rank's bytes to a group and returns every member's, in the
/// same order on every member (ours among them). Lengths differ from rank to rank.
///
/// It runs only on the thread inside a status call; its wait is the caller's. An error fails that
/// call, which then has committed nothing.
pub type Gather = Box<dyn Fn(Group, &[u8]) -> Result<Vec<Vec<u8>>> + Send + Sync>;

/// Parameters of a transceiver.
pub struct Config {
    /// Who moves the bytes.
    pub direction: Direction,
    /// Longest wait of a context status call that names no time-out.
    pub context_poll: Duration,
    /// Longest wait of a generation status call that names no time-out.
    pub generation_poll: Duration,
    /// For a receive, from its call to its end, where its request names no deadline.
    pub transfer: Duration,
    /// How long a cancel for a key that is not known yet waits for it.
    pub cancel_memory: Duration,
    /// How ranks agree.
    pub consensus: Consensus,
    /// Names the scheduling domain (tp x pp x cp inside one dp index); equal on all its ranks.
    pub domain: u64,
    /// Ranks in the domain.
    pub world: u32,
    /// This rank inside the domain; rank 0 leads. `Votes`: the engine's ranks of one data-parallel
    /// index in ascending global rank.
    pub rank: u32,
    /// `Votes`: a context request is decided at the latest this long after the first rank knows it.
    pub context_limit: Duration,
    /// The same for generation requests.
    pub generation_limit: Duration,
    /// `Collective`: members of this rank's tensor group.
    pub tensor_ranks: u32,
    /// `Collective`: members of this rank's pipeline group.
    pub pipeline_ranks: u32,
    /// `Collective`: the exchange.
    pub gather: Option<Gather>,
    /// `Collective`: all ranks have agreed to pass equal `at_least`, so that a status call may
    /// wait for its own requests before it exchanges. Otherwise it exchanges at once.
    pub wait_before_gather: bool,
    /// Ended requests whose record is kept.
    pub records: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            direction: Direction::Pull,
            context_poll: Duration::from_secs(1),
            generation_poll: Duration::from_secs(5),
            transfer: Duration::from_secs(60),
            cancel_memory: Duration::from_secs(60),
            consensus: Consensus::None,
            domain: 0,
            world: 1,
            rank: 0,
            // Claim (300 s) and lease (30 s) of a publication, and a reader's whole transfer.
            context_limit: Duration::from_secs(390),
            generation_limit: Duration::from_secs(65),
            tensor_ranks: 1,
            pipeline_ranks: 1,
            gather: None,
            wait_before_gather: false,
            records: 1024,
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("direction", &self.direction)
            .field("consensus", &self.consensus)
            .field("domain", &self.domain)
            .field("rank", &format_args!("{} of {}", self.rank, self.world))
            .finish_non_exhaustive()
    }
}

impl Config {
    /// # Errors
    /// What contradicts or is not served.
    pub(super) fn check(&self) -> Result<()> {
        if self.world == 0 || self.rank >= self.world {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "rank {} of a domain of {} ranks",
                self.rank,
                self.world
            );
        }
        let zero = [
            ("poll time-out (context)", self.context_poll),
            ("poll time-out (generation)", self.generation_poll),
            ("transfer time-out", self.transfer),
            ("cancel memory", self.cancel_memory),
            ("context limit", self.context_limit),
            ("generation limit", self.generation_limit),
        ];
        if let Some((name, _)) = zero.iter().find(|(_, value)| value.is_zero()) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "the {name} is 0; every wait has a deadline, give one"
            );
        }
        match self.consensus {
            Consensus::None if self.world > 1 => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{} ranks without consensus would act on a request in different iterations; \
                 choose votes or collective",
                self.world
            ),
            Consensus::Collective => {
                if self.gather.is_none() {
                    bail!(
                        KVF_ERR_INVALID_ARGUMENT,
                        "collective consensus needs the all-gather callback"
                    );
                }
                if self.tensor_ranks.checked_mul(self.pipeline_ranks) != Some(self.world) {
                    bail!(
                        KVF_ERR_INVALID_ARGUMENT,
                        "{} tensor ranks x {} pipeline ranks is not the domain's {} ranks",
                        self.tensor_ranks,
                        self.pipeline_ranks,
                        self.world
                    );
                }
            }
            Consensus::None | Consensus::Votes => {}
        }
        Ok(())
    }
}

/// A context request: what to offer.
pub type SendRequest = PublishDesc;

/// A generation request: what to fetch.
#[derive(Clone, Debug, Default)]
pub struct ReceiveRequest {
    /// Must be the ticket's.
    pub key: Key,
    /// The ticket and where its bytes go. Push: without a ticket; the request makes an offer.
    pub import: ImportDesc,
}

/// What a result says. The numbers are the C ABI's.
#[repr(u32)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResultKind {
    /// The request has ended; its memory may be reused if `memory_safe` says so.
    Ended = 1,
    /// The memory of a request that was reported as ended may be reused now.
    MemorySafe = 2,
}

/// One line of a status call's answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RequestResult {
    /// The request.
    pub key: Key,
    /// The caller's word from the request; 0 if the request never came to this rank.
    pub user_data: u64,
    /// Ended, or safe later.
    pub kind: ResultKind,
    /// How it ended.
    pub outcome: Outcome,
    /// Why; `KVF_OK` for a success.
    pub cause: Status,
    /// The request's slots may be reused (on every rank, where ranks agree).
    pub memory_safe: bool,
    /// The rank of the domain that decided the outcome; for a success this one.
    pub rank: u32,
    /// Bytes moved on this rank.
    pub bytes: u64,
    /// From the request's call to its end on this rank, in nanoseconds.
    pub elapsed_ns: u64,
}

/// How a status call ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Checked {
    /// `KVF_OK`: as many as asked for, or all that were in flight. `KVF_TIMED_OUT`,
    /// `KVF_INTERRUPTED`: fewer, the rest goes on.
    pub status: Status,
    /// More results are waiting for the next call.
    pub more: bool,
    /// `Votes`, leader: the same results for the followers' `apply`; empty if there are none.
    pub decision: Vec<u8>,
}

/// What [`super::Transceiver::cancel`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cancel {
    /// Nothing of that key is in use here; the cancel waits for the request, for a while.
    Remembered,
    /// The request has ended and its memory is safe; its result says how.
    Over,
    /// Accepted or too late; its result will say how it ended and when its memory is safe.
    Pending,
}

/// What became of one request, for people and tables. Times are since its call, in nanoseconds;
/// 0 = not yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// The request.
    pub key: Key,
    /// Which half.
    pub side: Side,
    /// How it ended, as far as known.
    pub outcome: Outcome,
    /// Why.
    pub cause: Status,
    /// The rank of the domain that decided the outcome; this one for a success and while pending.
    pub rank: u32,
    /// For people; empty for a success.
    pub text: String,
    /// The request's call, since the transceiver was made.
    pub queued_ns: u64,
    /// The first byte on this rank (context side: the first reader's contact).
    pub first_byte_ns: u64,
    /// The last byte on this rank, not attested yet (context side: the last reader's end).
    pub last_byte_ns: u64,
    /// The end on this rank, attested.
    pub ended_ns: u64,
    /// The memory became safe on this rank.
    pub safe_ns: u64,
    /// The ranks agreed.
    pub decided_ns: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Bytes to move.
    pub bytes_total: u64,
    /// Data path; empty if none was needed.
    pub transport: &'static str,
    /// Bytes that the publisher attached.
    pub aux: Vec<u8>,
}
