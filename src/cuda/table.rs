//! The driver's functions, each looked up by itself. Results are integers: a newer driver may
//! answer with codes that no list here knows.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUhostFn, CUipcMemHandle, CUmodule,
    CUstream, CUuuid,
};
use libloading::Library;

/// A `CUresult`.
pub(super) type Code = c_int;

pub(super) const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const STUB_LIBRARY: Code = 34;
pub(super) const NO_DEVICE: Code = 100;
pub(super) const NOT_READY: Code = 600;
pub(super) const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
pub(super) const NOT_SUPPORTED: Code = 801;
pub(super) const SYSTEM_DRIVER_MISMATCH: Code = 803;
pub(super) const CAPTURE_IMPLICIT: Code = 906;

macro_rules! table {
    (
        required { $($name:ident: $symbol:literal, ($($arg:ty),*);)* }
        optional { $($other:ident: $other_symbol:literal, ($($other_arg:ty),*);)* }
    ) => {
        /// Pointers into the loaded library, which is never unloaded.
        #[derive(Clone, Copy)]
        pub(super) struct Table {
            $(pub $name: unsafe extern "C" fn($($arg),*) -> Code,)*
            $(pub $other: Option<unsafe extern "C" fn($($other_arg),*) -> Code>,)*
        }

        impl Table {
            /// Looks everything up.
            ///
            /// # Errors
            /// The first required symbol that is missing.
            ///
            /// # Safety
            /// The library must be a CUDA driver: its symbols must have these types.
            pub unsafe fn fetch(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the one of the driver's header.
                        let symbol = unsafe { library.get($symbol.to_bytes_with_nul()) };
                        *symbol.map_err(|_| text($symbol))?
                    },)*
                    // SAFETY: as above.
                    $($other: unsafe { library.get($other_symbol.to_bytes_with_nul()) }
                        .ok()
                        .map(|symbol| *symbol),)*
                })
            }
        }
    };
}

fn text(symbol: &'static CStr) -> &'static str {
    symbol.to_str().unwrap_or("?")
}

table! {
    required {
        init: c"cuInit", (c_uint);
        driver_version: c"cuDriverGetVersion", (*mut c_int);
        device_count: c"cuDeviceGetCount", (*mut c_int);
        device_get: c"cuDeviceGet", (*mut CUdevice, c_int);
        device_name: c"cuDeviceGetName", (*mut c_char, c_int, CUdevice);
        device_attribute: c"cuDeviceGetAttribute", (*mut c_int, c_uint, CUdevice);
        device_uuid: c"cuDeviceGetUuid", (*mut CUuuid, CUdevice);
        ctx_push: c"cuCtxPushCurrent_v2", (CUcontext);
        ctx_pop: c"cuCtxPopCurrent_v2", (*mut CUcontext);
        ctx_current: c"cuCtxGetCurrent", (*mut CUcontext);
        ctx_device: c"cuCtxGetDevice", (*mut CUdevice);
        pointer_attribute: c"cuPointerGetAttribute", (*mut c_void, c_uint, CUdeviceptr);
        address_range: c"cuMemGetAddressRange_v2", (*mut CUdeviceptr, *mut usize, CUdeviceptr);
        stream_create: c"cuStreamCreate", (*mut CUstream, c_uint);
        stream_destroy: c"cuStreamDestroy_v2", (CUstream);
        stream_query: c"cuStreamQuery", (CUstream);
        stream_wait_event: c"cuStreamWaitEvent", (CUstream, CUevent, c_uint);
        stream_context: c"cuStreamGetCtx", (CUstream, *mut CUcontext);
        event_create: c"cuEventCreate", (*mut CUevent, c_uint);
        event_destroy: c"cuEventDestroy_v2", (CUevent);
        event_record: c"cuEventRecord", (CUevent, CUstream);
        event_query: c"cuEventQuery", (CUevent);
        launch_host: c"cuLaunchHostFunc", (CUstream, CUhostFn, *mut c_void);
        copy: c"cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, usize, CUstream);
        host_alloc: c"cuMemHostAlloc", (*mut *mut c_void, usize, c_uint);
        host_free: c"cuMemFreeHost", (*mut c_void);
        host_register: c"cuMemHostRegister_v2", (*mut c_void, usize, c_uint);
        host_unregister: c"cuMemHostUnregister", (*mut c_void);
        host_pointer: c"cuMemHostGetDevicePointer_v2", (*mut CUdeviceptr, *mut c_void, c_uint);
    }
    optional {
        error_name: c"cuGetErrorName", (Code, *mut *const c_char);
        error_string: c"cuGetErrorString", (Code, *mut *const c_char);
        stream_capturing: c"cuStreamIsCapturing", (CUstream, *mut c_uint);
        wait_value: c"cuStreamWaitValue32_v2", (CUstream, CUdeviceptr, u32, c_uint);
        wait_value_old: c"cuStreamWaitValue32", (CUstream, CUdeviceptr, u32, c_uint);
        copy_peer: c"cuMemcpyPeerAsync",
            (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, usize, CUstream);
        can_access_peer: c"cuDeviceCanAccessPeer", (*mut c_int, CUdevice, CUdevice);
        flush_remote_writes: c"cuFlushGPUDirectRDMAWrites", (c_uint, c_uint);
        device_alloc: c"cuMemAlloc_v2", (*mut CUdeviceptr, usize);
        device_free: c"cuMemFree_v2", (CUdeviceptr);
        ipc_get: c"cuIpcGetMemHandle", (*mut CUipcMemHandle, CUdeviceptr);
        ipc_open: c"cuIpcOpenMemHandle_v2", (*mut CUdeviceptr, CUipcMemHandle, c_uint);
        ipc_close: c"cuIpcCloseMemHandle", (CUdeviceptr);
        module_load: c"cuModuleLoadData", (*mut CUmodule, *const c_void);
        module_unload: c"cuModuleUnload", (CUmodule);
        module_function: c"cuModuleGetFunction", (*mut CUfunction, CUmodule, *const c_char);
        launch_kernel: c"cuLaunchKernel",
            (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
             *mut *mut c_void, *mut *mut c_void);
    }
}
