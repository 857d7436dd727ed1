//! A network card that reaches device memory by itself (GPUDirect RDMA): whether the device allows it,
//! when its work sees what the card has written, and a few bytes to try it with.
//!
//! What the card reads needs nothing here: the publication's event has passed, so the work that wrote the
//! memory is done. `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, which makes copies that only look synchronous wait, is
//! not set: it slows down every such call of the engine on the whole allocation, and an engine that gives its
//! stream, or has waited for it, does not need it.

use std::ffi::c_int;

use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering, CUdevice_attribute, CUflushGPUDirectRDMAWritesOptions,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget,
};

use super::table::{INVALID_VALUE, SUCCESS};
use super::{Context, Current, Driver, memory};
use crate::bail;
use crate::error::Result;
use crate::observe::{fault, marks};

/// When work of a device sees what a card has written to its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteWrites {
    /// As soon as the card says that it is done.
    Ordered,
    /// After [`Context::flush_remote_writes`].
    Flushed,
}

impl Context {
    /// Whether a card may reach memory of this context, and what has to be done after it has written.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED`: the device has no GPUDirect RDMA, or nothing makes its writes visible.
    pub fn remote_writes(self) -> Result<RemoteWrites> {
        use CUdevice_attribute as A;
        let driver = Driver::get()?;
        let ordinal = self.device;
        let ask = |attribute| attribute_of(driver, ordinal, attribute);
        // From CUDA 13 on some devices have the second one alone.
        let reached = ask(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)? != 0
            || ask(A::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? != 0;
        if !reached {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "device {ordinal} has no GPUDirect RDMA"
            );
        }
        let ordering = ask(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        let options = ask(A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        let by_host =
            CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int;
        let flushes = driver.table.flush_remote_writes.is_some() && options & by_host != 0;
        let all =
            CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES as c_int;
        let owner =
            CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as c_int;
        match ordering {
            _ if ordering >= all => Ok(RemoteWrites::Ordered),
            _ if flushes => Ok(RemoteWrites::Flushed),
            _ if ordering >= owner => Ok(RemoteWrites::Ordered),
            _ => bail!(
                KVF_ERR_UNSUPPORTED,
                "device {ordinal} neither orders what a card writes nor flushes it"
            ),
        }
    }

    /// Blocks until all devices see what a card has written to memory of this context before.
    ///
    /// # Errors
    /// The driver's.
    pub fn flush_remote_writes(self) -> Result<()> {
        if fault::deviates("ucx_no_flush") {
            return Ok(());
        }
        let driver = Driver::get()?;
        let Some(flush) = driver.table.flush_remote_writes else {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "the driver has no cuFlushGPUDirectRDMAWrites"
            );
        };
        let _current = Current::push(driver, self)?;
        let target =
            CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
        let scope = CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES;
        // SAFETY: numbers only.
        let code = unsafe { flush(target as _, scope as _) };
        driver.check(code, "cuFlushGPUDirectRDMAWrites")
    }
}

/// A device's attribute; 0 if the driver does not know it.
fn attribute_of(driver: &Driver, ordinal: u32, attribute: CUdevice_attribute) -> Result<c_int> {
    let device = memory::device(driver, ordinal)?;
    let mut value = 0;
    // SAFETY: writes one integer.
    let code = unsafe { (driver.table.device_attribute)(&mut value, attribute as _, device) };
    match code {
        SUCCESS => Ok(value),
        INVALID_VALUE => Ok(0),
        _ => driver.check(code, "cuDeviceGetAttribute").map(|()| 0),
    }
}

/// Device memory of our own, freed when dropped.
#[derive(Debug)]
pub struct DeviceBytes {
    context: Context,
    address: u64,
}

impl DeviceBytes {
    /// # Errors
    /// `KVF_ERR_NO_MEMORY`, or the driver's.
    pub fn new(context: Context, bytes: usize) -> Result<Self> {
        let driver = Driver::get()?;
        let (Some(alloc), Some(_)) = (driver.table.device_alloc, driver.table.device_free) else {
            bail!(KVF_ERR_UNSUPPORTED, "the driver has no cuMemAlloc");
        };
        let _current = Current::push(driver, context)?;
        let mut address = 0;
        // SAFETY: writes one address.
        let code = unsafe { alloc(&mut address, bytes) };
        driver.check(code, format_args!("cuMemAlloc of {bytes} bytes"))?;
        Ok(Self { context, address })
    }

    /// First address.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for DeviceBytes {
    fn drop(&mut self) {
        if marks::forked() {
            return;
        }
        // In a context that has ended there is nothing to free.
        if let Ok(driver) = Driver::get()
            && let Some(free) = driver.table.device_free
            && let Ok(_current) = Current::push(driver, self.context)
        {
            // SAFETY: allocated in `new`, and nobody uses it any more.
            unsafe { free(self.address) };
        }
    }
}
