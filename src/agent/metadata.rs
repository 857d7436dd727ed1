//! Metadata: what an engine tells another one once. A fixed head comes first, then the invariants,
//! so that they are compared before the body is decoded.
//!
//! Head, little-endian: magic (4), major version (2), kind (2: 0 agent, 1 engine), total bytes
//! (4), bytes of the invariants (4), digest of all that follows (16). Then the invariants, then the
//! body, both protobuf messages.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use prost::Message;
use sha2::{Digest, Sha256};

use super::layout_wire::{invariants, invariants_message, layout, layout_message};
use crate::error::{Result, Status};
use crate::ids::Incarnation;
use crate::layout::{Invariants, Layout};
use crate::wire;
use crate::{bail, err};

const MAJOR: u16 = 1;
const HEAD: usize = 32;
/// Longest metadata that is looked at.
const MAX_BYTES: usize = 64 << 20;
/// Longest invariant section that is decoded for a stranger.
const MAX_INVARIANTS: usize = 1 << 20;

/// What a blob describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    Agent = 0,
    Engine = 1,
}

/// One rank, as its engine announces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankInfo {
    pub incarnation: Incarnation,
    pub name: String,
    pub process: [u8; 16],
    pub host: String,
    pub address: Option<SocketAddr>,
    pub layout: Layout,
}

/// An engine: its ranks in ascending global rank.
#[derive(Clone, Debug)]
pub(super) struct EngineInfo {
    pub ranks: Vec<RankInfo>,
}

impl EngineInfo {
    /// The engine's identity: its first rank's lifetime.
    pub fn id(&self) -> Incarnation {
        self.ranks
            .first()
            .map(|r| r.incarnation)
            .unwrap_or_default()
    }

    pub fn layouts(&self) -> Vec<Layout> {
        self.ranks.iter().map(|r| r.layout.clone()).collect()
    }

    /// The first thing in which two descriptions of one engine differ.
    pub fn difference(&self, other: &Self) -> Option<String> {
        let (a, b) = (&self.ranks, &other.ranks);
        if a.len() != b.len() {
            return Some(format!("{} ranks and {}", a.len(), b.len()));
        }
        let (i, (a, b)) = (a.iter().zip(b).enumerate()).find(|(_, (a, b))| a != b)?;
        Some(if a.incarnation != b.incarnation {
            format!(
                "rank {i} is agent {:?} and {:?}",
                a.incarnation, b.incarnation
            )
        } else if a.address != b.address {
            let at = |address: Option<SocketAddr>| address.map_or("none".into(), |a| a.to_string());
            format!(
                "rank {i} is at address {} and {}",
                at(a.address),
                at(b.address)
            )
        } else if a.name != b.name {
            format!("rank {i} is named {} and {}", a.name, b.name)
        } else if a.layout != b.layout {
            format!("rank {i} has two layouts")
        } else {
            format!(
                "rank {i} is in process {:x?} on {} and in {:x?} on {}",
                a.process, a.host, b.process, b.host
            )
        })
    }

    pub fn index_of(&self, incarnation: Incarnation) -> Option<usize> {
        self.ranks.iter().position(|r| r.incarnation == incarnation)
    }
}

/// A rank and the bytes and address of its pools: what goes into its metadata.
pub(super) struct Announced<'a> {
    pub rank: &'a RankInfo,
    pub pools: Vec<wire::PoolMemory>,
}

pub(super) fn encode_agent(announced: &Announced<'_>) -> Result<Vec<u8>> {
    let body = wire::EngineMetadata {
        ranks: vec![agent_message(announced)],
    };
    let invariants = Invariants::of(std::slice::from_ref(&announced.rank.layout))?;
    encode(Kind::Agent, &invariants, &body)
}

/// Joins agents' metadata into an engine's.
pub(super) fn join(blobs: &[Vec<u8>]) -> Result<(EngineInfo, Vec<u8>)> {
    let mut ranks = Vec::new();
    for (i, blob) in blobs.iter().enumerate() {
        let (_, body) =
            open(blob, Kind::Agent, None).map_err(|e| e.context(format!("rank metadata {i}")))?;
        ranks.extend(body.ranks);
    }
    let mut parsed = ranks
        .iter()
        .map(|m| Ok((rank_info(m)?, m.clone())))
        .collect::<Result<Vec<_>>>()?;
    parsed.sort_by_key(|(info, _)| info.layout.coordinates.global_rank);
    for pair in parsed.windows(2) {
        let (a, b) = (&pair[0].0, &pair[1].0);
        let rank = a.layout.coordinates.global_rank;
        if rank == b.layout.coordinates.global_rank {
            bail!(
                KVF_ERR_DUPLICATE,
                "global rank {rank} is both agent {:?} ({}) and agent {:?} ({})",
                a.incarnation,
                a.name,
                b.incarnation,
                b.name
            );
        }
    }
    let (ranks, messages): (Vec<_>, Vec<_>) = parsed.into_iter().unzip();
    let engine = EngineInfo { ranks };
    crate::layout::validate_engine(&engine.layouts())?;
    let invariants = Invariants::of(&engine.layouts())?;
    let bytes = encode(
        Kind::Engine,
        &invariants,
        &wire::EngineMetadata { ranks: messages },
    )?;
    Ok((engine, bytes))
}

/// Reads a remote engine's metadata. `ours` is compared first.
///
/// # Errors
/// `KVF_ERR_INCOMPATIBLE` naming the field and both values; `KVF_ERR_ABI_MISMATCH` for another
/// major version; `KVF_ERR_INVALID_ARGUMENT` for bytes that are no metadata.
pub(super) fn decode_engine(bytes: &[u8], ours: &Invariants) -> Result<EngineInfo> {
    let (_, body) = open(bytes, Kind::Engine, Some(ours))?;
    let ranks = body
        .ranks
        .iter()
        .map(rank_info)
        .collect::<Result<Vec<_>>>()?;
    if ranks.is_empty() {
        bail!(KVF_ERR_INVALID_ARGUMENT, "engine metadata without ranks");
    }
    Ok(EngineInfo { ranks })
}

fn encode(kind: Kind, invariants: &Invariants, body: &wire::EngineMetadata) -> Result<Vec<u8>> {
    let invariants = invariants_message(invariants).encode_to_vec();
    let total = HEAD + invariants.len() + body.encoded_len();
    if total > MAX_BYTES || invariants.len() > MAX_INVARIANTS {
        bail!(
            KVF_ERR_LIMIT,
            "metadata of {total} bytes with {} bytes of invariants is over the limit of {MAX_BYTES} and {MAX_INVARIANTS}",
            invariants.len()
        );
    }
    let mut out = Vec::with_capacity(total);
    out.extend_from_slice(&wire::METADATA_MAGIC);
    out.extend_from_slice(&MAJOR.to_le_bytes());
    out.extend_from_slice(&(kind as u16).to_le_bytes());
    out.extend_from_slice(&(total as u32).to_le_bytes());
    out.extend_from_slice(&(invariants.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 16]);
    out.extend_from_slice(&invariants);
    body.encode_raw(&mut out);
    let digest = digest(&out[HEAD..]);
    out[HEAD - digest.len()..HEAD].copy_from_slice(&digest);
    Ok(out)
}

/// Of all that follows the head: a changed stride would be read without an error.
fn digest(content: &[u8]) -> [u8; 16] {
    let full = Sha256::digest(content);
    std::array::from_fn(|i| full[i])
}

/// Checks the head, compares the invariants with `ours`, decodes the body.
fn open(
    bytes: &[u8],
    kind: Kind,
    ours: Option<&Invariants>,
) -> Result<(Invariants, wire::EngineMetadata)> {
    let number = |at: usize, n: usize| -> u64 {
        bytes[at..at + n]
            .iter()
            .rev()
            .fold(0, |acc, b| acc << 8 | u64::from(*b))
    };
    if bytes.len() < HEAD || bytes[..4] != wire::METADATA_MAGIC {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "{} bytes that are not kvferry metadata",
            bytes.len()
        );
    }
    let major = number(4, 2);
    if major != u64::from(MAJOR) {
        bail!(
            KVF_ERR_ABI_MISMATCH,
            "metadata of major version {major}, this library reads {MAJOR}; use the same release on both sides"
        );
    }
    if number(6, 2) != kind as u64 {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "metadata of kind {} where kind {} ({kind:?}) is needed: agents' metadata goes into kvf_engine_create, an engine's into kvf_peer_add",
            number(6, 2),
            kind as u16
        );
    }
    let (total, invariants_len) = (number(8, 4) as usize, number(12, 4) as usize);
    if total != bytes.len() || total > MAX_BYTES {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "metadata of {} bytes says it has {total}",
            bytes.len()
        );
    }
    if invariants_len > MAX_INVARIANTS || HEAD + invariants_len > total {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "metadata with {invariants_len} bytes of invariants in {total}"
        );
    }
    let section = &bytes[HEAD..HEAD + invariants_len];
    if digest(&bytes[HEAD..]) != bytes[16..HEAD] {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "metadata is damaged: its digest does not fit"
        );
    }
    let theirs = wire::Invariants::decode(section)
        .map_err(|e| err!(KVF_ERR_INVALID_ARGUMENT, "metadata invariants: {e}"))?;
    let theirs = invariants(&theirs)?;
    if let Some(ours) = ours {
        theirs
            .compare(ours)
            .map_err(|e| e.context("the peer engine (source) and this one (destination)"))?;
    }
    let body = wire::EngineMetadata::decode(&bytes[HEAD + invariants_len..])
        .map_err(|e| err!(KVF_ERR_INVALID_ARGUMENT, "metadata body: {e}"))?;
    Ok((theirs, body))
}

/// 16 bytes of an identity.
pub(super) fn incarnation(bytes: &[u8]) -> Result<Incarnation> {
    match bytes.try_into() {
        Ok(bytes) => Ok(Incarnation(bytes)),
        Err(_) => bail!(
            KVF_ERR_PROTOCOL,
            "an incarnation of {} bytes, it has 16",
            bytes.len()
        ),
    }
}

fn agent_message(announced: &Announced<'_>) -> wire::AgentMetadata {
    let rank = announced.rank;
    wire::AgentMetadata {
        incarnation: rank.incarnation.0.to_vec(),
        name: rank.name.clone(),
        process: rank.process.to_vec(),
        host: rank.host.clone(),
        address: rank.address.map(|a| a.to_string()).unwrap_or_default(),
        pools: announced.pools.clone(),
        layout: Some(layout_message(&rank.layout)),
    }
}

fn rank_info(m: &wire::AgentMetadata) -> Result<RankInfo> {
    // It appears in texts of one line.
    if m.name.contains(char::is_control) {
        bail!(
            KVF_ERR_INVALID_ARGUMENT,
            "metadata: the agent's name {:?} has control characters",
            m.name
        );
    }
    let Some(message) = &m.layout else {
        bail!(KVF_ERR_INVALID_ARGUMENT, "agent {} has no layout", m.name);
    };
    let layout = layout(message)?;
    let pools: BTreeMap<u32, u64> = m.pools.iter().map(|p| (p.id, p.bytes)).collect();
    let bytes = |id: u32| pools.get(&id).copied();
    // A peer's claims about its memory are checked like our own; its pools' real lengths are
    // checked again when they are mapped.
    crate::layout::validate(&layout, &bytes)
        .map_err(|e| e.context(format!("layout of agent {}", m.name)))?;
    let address = match m.address.as_str() {
        "" => None,
        text => Some(text.parse().map_err(|_| {
            err!(
                KVF_ERR_INVALID_ARGUMENT,
                "agent {}: address {text:?}",
                m.name
            )
        })?),
    };
    Ok(RankInfo {
        incarnation: incarnation(&m.incarnation)?,
        name: m.name.clone(),
        process: incarnation(&m.process)?.0,
        host: m.host.clone(),
        address,
        layout,
    })
}

/// A status that came over the wire.
pub(super) fn status(code: i32) -> Status {
    match Status::from_code(code) {
        Some(Status::KVF_OK | Status::KVF_IN_PROGRESS) | None => Status::KVF_ERR_TRANSFER,
        Some(status) => status,
    }
}
