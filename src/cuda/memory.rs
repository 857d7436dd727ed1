//! What the driver knows about a pointer of the engine.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{CUcontext, CUmemorytype, CUpointer_attribute, CUuuid};

use super::current::Current;
use super::ipc::{self, Handle};
use super::table::{Code, INVALID_VALUE, SUCCESS};
use super::{Context, Driver};
use crate::bail;
use crate::error::Result;

/// Names a device on every host.
pub type Uuid = [u8; 16];

/// A checked range of device memory. The memory stays the engine's.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    /// Where it was allocated.
    pub context: Context,
    /// The device's identity.
    pub uuid: Uuid,
    /// First address of the allocation that it lies in.
    pub allocation: u64,
    /// Length of that allocation.
    pub allocation_bytes: u64,
    /// For other processes on this host, or why there is none.
    pub export: std::result::Result<Handle, String>,
}

impl DeviceMemory {
    /// Looks up `bytes` bytes at `base`, which the caller says are on `device`.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for host memory, managed memory, another device;
    /// `KVF_ERR_OUT_OF_RANGE` for a range that leaves its allocation; `KVF_ERR_UNSUPPORTED` without
    /// a driver, and for memory of `cuMemCreate` or a memory pool; `KVF_ERR_TRANSFER` with the driver's
    /// reason.
    pub fn find(base: u64, bytes: u64, device: u32) -> Result<Self> {
        let driver = Driver::get()?;
        if device >= driver.devices() {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "device {device} does not exist: there are {}",
                driver.devices()
            );
        }
        let Some(kind) = number(
            driver,
            base,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        )?
        else {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{base:#x} is no memory of the CUDA driver: register it as host memory, or give a \
                 pointer of cudaMalloc"
            );
        };
        let managed = number(
            driver,
            base,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
        )?;
        if managed.is_some_and(|managed| managed & 0xff != 0) {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{base:#x} is managed memory, which moves between host and devices: use cudaMalloc"
            );
        }
        if kind == CUmemorytype::CU_MEMORYTYPE_HOST as u32 {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{base:#x} is pinned host memory: register it as host memory"
            );
        }
        let ordinal = number(
            driver,
            base,
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        )?;
        match ordinal {
            Some(found) if found == device => {}
            found => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "{base:#x} is memory of device {}, not of device {device}",
                found.map_or("?".to_owned(), |found| found.to_string())
            ),
        }
        let Some(context) = context_of(driver, base, device)? else {
            bail!(
                KVF_ERR_UNSUPPORTED,
                "{base:#x} belongs to no context: memory of cuMemCreate (VMM) and of a memory pool \
                 (cudaMallocAsync) is not served yet; use cudaMalloc"
            );
        };
        let _current = Current::push(driver, context)?;
        let (mut allocation, mut allocation_bytes) = (0, 0);
        // SAFETY: writes an address and a length.
        let code =
            unsafe { (driver.table.address_range)(&mut allocation, &mut allocation_bytes, base) };
        driver.check(code, format_args!("cuMemGetAddressRange of {base:#x}"))?;
        let end = allocation.saturating_add(allocation_bytes as u64);
        if base.checked_add(bytes).is_none_or(|last| last > end) {
            bail!(
                KVF_ERR_OUT_OF_RANGE,
                "{bytes} bytes at {base:#x} leave their allocation, which is {allocation_bytes} \
                 bytes at {allocation:#x}: register each allocation as a pool of its own"
            );
        }
        Ok(Self {
            context,
            uuid: uuid(driver, device)?,
            allocation,
            allocation_bytes: allocation_bytes as u64,
            export: ipc::export(driver, allocation).map_err(|e| e.text),
        })
    }
}

/// A pointer's attribute that is a number; `None`: the driver does not know the pointer.
fn number(driver: &Driver, base: u64, attribute: CUpointer_attribute) -> Result<Option<u32>> {
    let mut value: c_uint = 0;
    // SAFETY: attributes asked for here write at most one integer.
    let code = unsafe {
        (driver.table.pointer_attribute)((&raw mut value).cast(), attribute as c_uint, base)
    };
    known(driver, code, base).map(|known| known.then_some(value))
}

/// Whether the driver has answered.
fn known(driver: &Driver, code: Code, base: u64) -> Result<bool> {
    match code {
        SUCCESS => Ok(true),
        INVALID_VALUE => Ok(false),
        _ => {
            let what = format_args!("cuPointerGetAttribute of {base:#x}");
            driver.check(code, what).map(|()| true)
        }
    }
}

fn context_of(driver: &Driver, base: u64, device: u32) -> Result<Option<Context>> {
    let mut context: CUcontext = std::ptr::null_mut();
    let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT as c_uint;
    // SAFETY: this attribute writes one pointer.
    let code =
        unsafe { (driver.table.pointer_attribute)((&raw mut context).cast(), attribute, base) };
    let known = known(driver, code, base)? && !context.is_null();
    Ok(known.then(|| Context::new(context, device)))
}

/// The device's number for the driver.
pub(super) fn device(driver: &Driver, ordinal: u32) -> Result<c_int> {
    let mut device = 0;
    // SAFETY: writes one integer.
    let code = unsafe { (driver.table.device_get)(&mut device, ordinal as c_int) };
    driver.check(code, format_args!("cuDeviceGet of device {ordinal}"))?;
    Ok(device)
}

impl Driver {
    /// Identity of a device.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`: there is no such device.
    pub fn uuid(&self, device: u32) -> Result<Uuid> {
        uuid(self, device)
    }
}

pub(super) fn uuid(driver: &Driver, ordinal: u32) -> Result<Uuid> {
    let device = device(driver, ordinal)?;
    let mut uuid = CUuuid { bytes: [0; 16] };
    // SAFETY: writes 16 bytes.
    let code = unsafe { (driver.table.device_uuid)(&mut uuid, device) };
    driver.check(code, format_args!("cuDeviceGetUuid of device {ordinal}"))?;
    Ok(uuid.bytes.map(|byte| byte as u8))
}

/// The device with this identity that this process sees.
pub(super) fn by_uuid(driver: &Driver, wanted: &Uuid) -> Option<u32> {
    (0..driver.devices()).find(|ordinal| uuid(driver, *ordinal).is_ok_and(|id| id == *wanted))
}
