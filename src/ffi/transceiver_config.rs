//! Parameters of transceivers.

use std::ffi::c_void;

use super::checks::{must_be_zero, nanos_or};
use super::import::{KVF_DIRECTION_PULL, KVF_DIRECTION_PUSH};
use super::structs::abi_struct;
use super::transceiver::{KVF_CONSENSUS_COLLECTIVE, KVF_CONSENSUS_NONE, KVF_CONSENSUS_VOTES};
use crate::bail;
use crate::error::Result;
use crate::observe::marks::InCallback;
use crate::transceiver::{Config, Consensus, Direction, Group, framed};

/// All-gather inside a group of a domain's ranks, as MPI_Allgather on bytes.
///
/// Called only on the thread that is inside a status call, with the same @p bytes on all members
/// of the group; once per group and call, rarely twice. It may block; how long is the caller's
/// choice. It must not throw (declare it `noexcept` in C++) and must not call kvferry
/// (KVF_ERR_REENTRANT).
///
/// @param      arg    `exchange_arg` of the configuration.
/// @param      group  KVF_EXCHANGE_TENSOR or KVF_EXCHANGE_PIPELINE.
/// @param[in]  mine   This rank's contribution, @p bytes long.
/// @param[out] all    Receives members * @p bytes: the contributions in the same order on every
///                    member, this rank's included.
/// @param      bytes  Length of one contribution.
/// @return 0 when @p all is filled; anything else fails the status call, which has then committed
///         nothing.
pub type kvf_group_exchange_fn = Option<
    unsafe extern "C" fn(
        arg: *mut c_void,
        group: u32,
        mine: *const c_void,
        all: *mut c_void,
        bytes: usize,
    ) -> i32,
>;

/// Parameters of a transceiver.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kvf_transceiver_config {
    /// `sizeof(kvf_transceiver_config)`.
    pub struct_size: usize,
    /// KVF_ABI_VERSION.
    pub abi_version: u32,
    /// KVF_DIRECTION_*. Pull: the context side's ticket travels to the generation side; push: the
    /// generation side's offer travels to the context side.
    pub direction: u32,
    /// Longest wait of a context status call with KVF_TIMEOUT_CONFIGURED, in ns; 0 = 1 s.
    pub context_poll_ns: u64,
    /// The same for a generation status call; 0 = 5 s.
    pub generation_poll_ns: u64,
    /// For a receive, from its call to its end, where its request names no deadline, in ns; 0 =
    /// 60 s.
    pub transfer_ns: u64,
    /// How long a cancel for a key that is not known yet waits for it, in ns; 0 = 60 s.
    pub cancel_memory_ns: u64,
    /// KVF_CONSENSUS_*.
    pub consensus: u32,
    /// Ranks in the scheduling domain (tp x pp x cp inside one dp index); 0 = 1.
    pub world: u32,
    /// This rank inside the domain; rank 0 leads. KVF_CONSENSUS_VOTES: the engine's ranks of one
    /// dp index in ascending global rank.
    pub rank: u32,
    /// KVF_CONSENSUS_COLLECTIVE: members of this rank's tensor group; 0 = 1.
    pub tensor_ranks: u32,
    /// Names the domain; equal on all its ranks.
    pub domain: u64,
    /// KVF_CONSENSUS_VOTES: a context request is decided at the latest this long after the first
    /// rank knows it, in ns; 0 = 390 s (claim, lease and transfer).
    pub context_limit_ns: u64,
    /// The same for a generation request; 0 = 65 s.
    pub generation_limit_ns: u64,
    /// KVF_CONSENSUS_COLLECTIVE: members of this rank's pipeline group; 0 = 1.
    pub pipeline_ranks: u32,
    /// KVF_CONSENSUS_COLLECTIVE: 1 = all ranks have agreed to pass equal `at_least` and
    /// `timeout_ns`, so that a status call may wait for this rank's own requests before it
    /// exchanges; 0 = it exchanges at once.
    pub wait_before_exchange: u32,
    /// KVF_CONSENSUS_COLLECTIVE: the exchange; otherwise NULL.
    pub exchange: kvf_group_exchange_fn,
    /// First argument of `exchange`.
    pub exchange_arg: *mut c_void,
    /// Ended requests whose record is kept; 0 = 1024.
    pub records: u32,
    /// Must be 0.
    pub reserved: u32,
}
abi_struct!(head kvf_transceiver_config {
    struct_size, abi_version, direction, context_poll_ns, generation_poll_ns, transfer_ns,
    cancel_memory_ns, consensus, world, rank, tensor_ranks, domain, context_limit_ns,
    generation_limit_ns, pipeline_ranks, wait_before_exchange, exchange, exchange_arg, records,
    reserved,
});

/// The caller's exchange with its argument.
#[derive(Clone, Copy)]
struct Exchange(
    unsafe extern "C" fn(*mut c_void, u32, *const c_void, *mut c_void, usize) -> i32,
    *mut c_void,
);

// SAFETY: the caller promises that both are usable from the threads that make status calls; only
// the caller's function looks at the argument.
unsafe impl Send for Exchange {}
// SAFETY: as above; one exchange per side runs at a time.
unsafe impl Sync for Exchange {}

impl Exchange {
    fn run(&self, group: Group, mine: &[u8], all: &mut [u8]) -> Result<()> {
        let _mark = InCallback::enter();
        let (from, to) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: the caller's function with the caller's argument; `all` has members * bytes
        // bytes.
        match unsafe { (self.0)(self.1, group as u32, from, to, mine.len()) } {
            0 => Ok(()),
            code => bail!(
                KVF_ERR_GROUP_LOST,
                "config.exchange returned {code} for {} bytes of the {group:?} group",
                mine.len()
            ),
        }
    }
}

impl kvf_transceiver_config {
    pub(crate) fn convert(&self) -> Result<Config> {
        must_be_zero(self.reserved, "config.reserved")?;
        let defaults = Config::default();
        let tensor_ranks = self.tensor_ranks.max(1);
        let pipeline_ranks = self.pipeline_ranks.max(1);
        let exchange = self.exchange.map(|f| Exchange(f, self.exchange_arg));
        Ok(Config {
            direction: match self.direction {
                KVF_DIRECTION_PULL => Direction::Pull,
                KVF_DIRECTION_PUSH => Direction::Push,
                unknown => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "config.direction {unknown} is unknown"
                ),
            },
            context_poll: nanos_or(self.context_poll_ns, defaults.context_poll),
            generation_poll: nanos_or(self.generation_poll_ns, defaults.generation_poll),
            transfer: nanos_or(self.transfer_ns, defaults.transfer),
            cancel_memory: nanos_or(self.cancel_memory_ns, defaults.cancel_memory),
            consensus: match self.consensus {
                KVF_CONSENSUS_NONE => Consensus::None,
                KVF_CONSENSUS_VOTES => Consensus::Votes,
                KVF_CONSENSUS_COLLECTIVE => Consensus::Collective,
                unknown => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "config.consensus {unknown} is unknown"
                ),
            },
            domain: self.domain,
            world: self.world.max(1),
            rank: self.rank,
            context_limit: nanos_or(self.context_limit_ns, defaults.context_limit),
            generation_limit: nanos_or(self.generation_limit_ns, defaults.generation_limit),
            tensor_ranks,
            pipeline_ranks,
            gather: exchange.map(|exchange| {
                framed([tensor_ranks, pipeline_ranks], move |group, mine, all| {
                    exchange.run(group, mine, all)
                })
            }),
            wait_before_gather: match self.wait_before_exchange {
                0 => false,
                1 => true,
                unknown => bail!(
                    KVF_ERR_INVALID_ARGUMENT,
                    "config.wait_before_exchange is {unknown}, not 0 or 1"
                ),
            },
            records: match self.records {
                0 => defaults.records,
                records => records as usize,
            },
        })
    }
}
