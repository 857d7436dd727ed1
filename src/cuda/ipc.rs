//! Allocations of `cudaMalloc` between the processes of one host.

use cudarc::driver::sys::{CUipcMem_flags, CUipcMemHandle};

use super::current::Current;
use super::memory::{self, Uuid};
use super::{Context, Driver};
use crate::bail;
use crate::error::Result;
use crate::observe::fault;

/// Names an allocation to another process.
pub type Handle = [u8; 64];

/// Makes the handle of the allocation at `base`, in the current context.
pub(super) fn export(driver: &Driver, base: u64) -> Result<Handle> {
    let Some(get) = driver.table.ipc_get else {
        bail!(KVF_ERR_UNSUPPORTED, "this driver has no CUDA IPC");
    };
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: writes 64 bytes.
    let code = unsafe { get(&mut handle, base) };
    driver.check(code, format_args!("cuIpcGetMemHandle of {base:#x}"))?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// A peer's allocation, mapped for one context of ours; unmapped when dropped. The peer must not
/// free it before.
#[derive(Debug)]
pub struct Mapping {
    driver: &'static Driver,
    context: Context,
    base: u64,
    bytes: u64,
}

impl Mapping {
    /// Opens an allocation of the device `uuid` for `context`.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` if that device is not seen here, cannot be reached from the context's,
    /// or the driver has no CUDA IPC; `KVF_ERR_TRANSFER` if the driver refuses.
    pub fn open(context: Context, uuid: &Uuid, handle: &Handle) -> Result<Self> {
        let driver = Driver::get()?;
        let (Some(open), Some(_)) = (driver.table.ipc_open, driver.table.ipc_close) else {
            bail!(KVF_ERR_UNSUPPORTED, "this driver has no CUDA IPC");
        };
        let Some(source) = memory::by_uuid(driver, uuid) else {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "the peer's device is not visible here (see CUDA_VISIBLE_DEVICES)"
            );
        };
        check_access(driver, context.device, source)?;
        let _current = Current::push(driver, context)?;
        let handle = CUipcMemHandle {
            reserved: handle.map(|byte| byte as _),
        };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: writes one address; the driver checks the handle.
        let code = unsafe { open(&mut base, handle, flags) };
        driver.check(code, "cuIpcOpenMemHandle")?;
        let mut mapping = Self {
            driver,
            context,
            base,
            bytes: 0,
        };
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: writes an address and a length.
        let code = unsafe { (driver.table.address_range)(&mut start, &mut bytes, base) };
        driver.check(code, "cuMemGetAddressRange of a peer's memory")?;
        mapping.bytes = (start + bytes as u64).saturating_sub(base);
        Ok(mapping)
    }

    /// First address in our process.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes from there to the allocation's end, as the driver says.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The context that it is mapped for.
    pub fn context(&self) -> Context {
        self.context
    }
}

fn check_access(driver: &Driver, ours: u32, source: u32) -> Result<()> {
    if ours == source {
        return Ok(());
    }
    let Some(can) = driver.table.can_access_peer else {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "this driver knows no access between devices"
        );
    };
    let mut yes = 0;
    // SAFETY: writes one integer.
    let code = unsafe {
        can(
            &mut yes,
            memory::device(driver, ours)?,
            memory::device(driver, source)?,
        )
    };
    driver.check(code, "cuDeviceCanAccessPeer")?;
    if yes == 0 {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "device {ours} cannot access memory of device {source}"
        );
    }
    Ok(())
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if fault::deviates("cuda_keep_mapping") {
            return;
        }
        let Ok(_current) = Current::push(self.driver, self.context) else {
            return; // the context is gone, and with it the mapping
        };
        if let Some(close) = self.driver.table.ipc_close {
            // SAFETY: opened by `open`, closed once; no copy from it is running, by the contract
            // of the paths that hold it.
            unsafe { close(self.base) };
        }
    }
}
