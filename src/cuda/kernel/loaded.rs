//! The kernel as one context has it.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ptr::{from_mut, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUdevice_attribute, CUfunction, CUmodule, CUstream};

use super::{ENTRY, Launch, PTX, THREADS};
use crate::cuda::current::Current;
use crate::cuda::{Context, Driver, memory};
use crate::err;
use crate::error::Result;

/// An agent's kernels, one for each context that needs it.
#[derive(Debug, Default)]
pub(in crate::cuda) struct Kernels(Mutex<BTreeMap<Context, Option<Arc<Kernel>>>>);

impl Kernels {
    /// The context's kernel, loaded now if it was not before: not for a caller's thread. `None` where
    /// it could not be loaded; everything works without it, slower.
    pub fn get(&self, driver: &'static Driver, context: Context) -> Option<Arc<Kernel>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kernel = all
            .entry(context)
            .or_insert_with(|| Kernel::load(driver, context).ok().map(Arc::new));
        kernel.clone()
    }

    /// Unloads those that no lane uses; the others with their lanes.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        drop(all);
    }
}

/// A module of ours in a context of the engine.
#[derive(Debug)]
pub(in crate::cuda) struct Kernel {
    driver: &'static Driver,
    context: Context,
    module: usize,
    function: usize,
    /// Of the device.
    pub multiprocessors: u32,
}

impl Kernel {
    /// Has the driver compile the PTX, which takes a moment the first time on a machine.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` for a driver that cannot launch kernels, `KVF_ERR_TRANSFER` with the
    /// driver's reason, as for a PTX that is newer than it.
    pub fn load(driver: &'static Driver, context: Context) -> Result<Self> {
        let table = &driver.table;
        let (Some(load), Some(find), Some(_), Some(_)) = (
            table.module_load,
            table.module_function,
            table.module_unload,
            table.launch_kernel,
        ) else {
            return Err(err!(
                KVF_ERR_UNSUPPORTED,
                "the CUDA driver loads no modules"
            ));
        };
        let _current = Current::push(driver, context)?;
        let device = memory::device(driver, context.device)?;
        let mut number = 0;
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as u32;
        // SAFETY: writes one integer.
        let code = unsafe { (table.device_attribute)(&mut number, attribute, device) };
        driver.check(code, "cuDeviceGetAttribute")?;
        let mut module: CUmodule = null_mut();
        // SAFETY: writes one pointer; the text is NUL-terminated.
        let code = unsafe { load(&mut module, PTX.as_ptr().cast()) };
        driver.check(code, "loading the copy kernel: cuModuleLoadData")?;
        let mut kernel = Self {
            driver,
            context,
            module: module.expose_provenance(),
            function: 0,
            multiprocessors: u32::try_from(number).unwrap_or(1),
        };
        let mut function: CUfunction = null_mut();
        // SAFETY: writes one pointer; our module.
        let code = unsafe { find(&mut function, module, ENTRY.as_ptr()) };
        driver.check(code, "cuModuleGetFunction")?;
        kernel.function = function.expose_provenance();
        Ok(kernel)
    }

    /// Enqueues a launch; the context must be current.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER` with the driver's reason.
    ///
    /// # Safety
    /// The table, and all that it names, must stay valid until the launch is done.
    pub unsafe fn launch(&self, launch: &Launch, stream: CUstream) -> Result<()> {
        let Some(call) = self.driver.table.launch_kernel else {
            return Ok(()); // checked by `load`
        };
        let mut launch = *launch;
        let mut arguments: [*mut c_void; 3] = [
            from_mut(&mut launch.shapes).cast(),
            from_mut(&mut launch.pieces).cast(),
            from_mut(&mut launch.piece_count).cast(),
        ];
        let function = std::ptr::with_exposed_provenance_mut(self.function);
        let arguments = arguments.as_mut_ptr();
        let blocks = launch.blocks;
        // SAFETY: three arguments, as the kernel has; they are read during the call.
        let code = unsafe {
            call(
                function,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                arguments,
                null_mut(),
            )
        };
        let pieces = launch.piece_count;
        let device = self.context.device;
        self.driver.check(
            code,
            format_args!("copying {pieces} pieces on device {device}: cuLaunchKernel"),
        )
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let Some(unload) = self.driver.table.module_unload else {
            return;
        };
        if let Ok(_current) = Current::push(self.driver, self.context) {
            // SAFETY: ours, unloaded once.
            unsafe { unload(std::ptr::with_exposed_provenance_mut(self.module)) };
        }
    }
}
