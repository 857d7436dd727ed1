//! Gets of and into memory of a CUDA device, which the card moves by itself: what that needs of UCX, the
//! driver and the device. Without it, messages pass device memory through pinned buffers.

use crate::bail;
use crate::cuda::{Context, RemoteWrites};
use crate::error::Result;
use crate::transport::ucx::library::Library;

/// The first UCX that is trusted to leave a get to the card or to refuse it (the option came with 1.21). Older
/// ones would copy device memory in software in the source's process, or, before 1.16, as if it was the host's.
const FIRST: (u32, u32) = (1, 22);

/// Bytes of our own that peers' device memory is tried with.
pub const SCRATCH_BYTES: u64 = 64;

/// Lanes for an agent with device memory. Without `cuda_copy` UCX cannot tell device memory; the rest of
/// its lanes for CUDA is for peers on this host, or for copies by the processor.
pub const LANES: &str = "ib,cuda_copy";

/// Options of an engine with gets on a card: no get is answered in software. With `cuda`, the card answers into
/// the memory itself however small a get is, and never into a place that the processor copies it out of.
pub fn options(ucx: &Library, cuda: bool) -> Vec<(&'static str, &'static str)> {
    let mut options = Vec::new();
    if ucx.is_at_least(FIRST.0, FIRST.1) {
        // Nor by a rendezvous (1.22, off unless asked for), in which the source's process takes part.
        options.extend([("PROTO_EMULATION_ENABLE", "n"), ("RMA_PPLN_ENABLE", "n")]);
        if cuda && std::env::var_os("UCX_IB_TX_INLINE_RESP").is_none() {
            options.push(("IB_TX_INLINE_RESP", "0"));
        }
    }
    options
}

/// What an engine can do with device memory, or why not.
#[derive(Debug)]
pub struct DeviceGets {
    /// Peers' device memory is read.
    pub reads: Result<()>,
    /// Memory of this context is registered, so that peers read it and gets write it.
    pub own: Result<(Context, RemoteWrites)>,
}

impl DeviceGets {
    /// Of a UCX whose context knows CUDA memory or not; `context`: of the agent's device pools.
    /// `software`: gets may be answered in software.
    pub fn of(ucx: &Library, knows_cuda: bool, context: Option<Context>, software: bool) -> Self {
        let reads = match ucx.is_at_least(FIRST.0, FIRST.1) || software {
            true => Ok(()),
            false => too_old(ucx),
        };
        let own = reads.clone().and_then(|()| own(ucx, knows_cuda, context));
        Self { reads, own }
    }

    /// Of an engine without gets.
    pub fn none() -> Self {
        let why = || crate::err!(KVF_ERR_UNSUPPORTED, "gets are not used");
        Self {
            reads: Err(why()),
            own: Err(why()),
        }
    }
}

fn too_old(ucx: &Library) -> Result<()> {
    bail!(
        KVF_ERR_UNSUPPORTED,
        "UCX {} may copy device memory in software, {}.{} or newer is needed",
        ucx.version(),
        FIRST.0,
        FIRST.1
    );
}

fn own(
    ucx: &Library,
    knows_cuda: bool,
    context: Option<Context>,
) -> Result<(Context, RemoteWrites)> {
    let Some(context) = context else {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "there was not one CUDA context with device pools when UCX was started"
        );
    };
    if !knows_cuda {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "UCX {} does not know CUDA memory (it has no module for CUDA, or UCX_TLS leaves out cuda_copy)",
            ucx.version()
        );
    }
    Ok((context, context.remote_writes()?))
}
