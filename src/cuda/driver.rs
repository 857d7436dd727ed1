//! The loaded driver, or why there is none.

use std::ffi::{CStr, c_char, c_int};
use std::sync::OnceLock;

use libloading::Library;

use super::table::{
    CAPTURE_IMPLICIT, Code, NO_DEVICE, OUT_OF_MEMORY, STUB_LIBRARY, SUCCESS,
    SYSTEM_DRIVER_MISMATCH, Table,
};
use crate::error::{Error, Result, Status};
use crate::observe::marks;
use crate::{bail, err};

/// Names the driver library to load instead of the system's.
pub const LIBRARY_VARIABLE: &str = "KVFERRY_CUDA_LIBRARY";

/// The driver's own name first: a toolkit's stub is installed without the number.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The CUDA driver of this process.
pub struct Driver {
    pub(super) table: Table,
    /// As `cuDriverGetVersion` says: 12080 = CUDA 12.8.
    version: i32,
    devices: i32,
    path: String,
}

impl Driver {
    /// Loads and initialises the driver once; later calls get the same answer.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED`: no library, a stub, too old a driver, no device, or `cuInit` failed;
    /// the text says which and what to do. `KVF_ERR_FORKED` in a forked child.
    pub fn get() -> Result<&'static Self> {
        static DRIVER: OnceLock<Result<Driver>> = OnceLock::new();
        if marks::forked() {
            bail!(KVF_ERR_FORKED, "a forked child has no CUDA");
        }
        let driver = DRIVER.get_or_init(|| {
            let named = std::env::var(LIBRARY_VARIABLE).ok();
            Self::load(named.as_deref().filter(|name| !name.is_empty()))
        });
        driver.as_ref().map_err(Clone::clone)
    }

    /// Loads the named library, or the system's.
    pub(super) fn load(named: Option<&str>) -> Result<Self> {
        let (library, path) = open(named)?;
        // SAFETY: a library of that name is the driver; whoever names another one answers for it.
        let table = unsafe { Table::fetch(&library) };
        let table = match table {
            Ok(table) => table,
            Err(symbol) => bail!(
                KVF_ERR_UNSUPPORTED,
                "the CUDA driver {path} ({}) is too old: it has no {symbol}; install a newer one",
                version_of(&library)
            ),
        };
        // The pointers stay valid: the driver must never be unloaded.
        std::mem::forget(library);
        let mut driver = Self {
            table,
            version: 0,
            devices: 0,
            path,
        };
        // SAFETY: no arguments but flags, which must be 0.
        let code = unsafe { (table.init)(0) };
        if code != SUCCESS {
            return Err(driver.no_init(code));
        }
        // SAFETY: both write one integer.
        let codes = unsafe {
            (
                (table.driver_version)(&mut driver.version),
                (table.device_count)(&mut driver.devices),
            )
        };
        driver.check(codes.0, "cuDriverGetVersion")?;
        driver.check(codes.1, "cuDeviceGetCount")?;
        if driver.devices == 0 {
            return Err(driver.no_init(NO_DEVICE));
        }
        Ok(driver)
    }

    fn no_init(&self, code: Code) -> Error {
        let path = &self.path;
        match code {
            STUB_LIBRARY => err!(
                KVF_ERR_UNSUPPORTED,
                "{path} is the CUDA toolkit's stub and no driver: take the toolkit's stubs folder \
                 out of LD_LIBRARY_PATH, or name the driver in {LIBRARY_VARIABLE}"
            ),
            NO_DEVICE => err!(
                KVF_ERR_UNSUPPORTED,
                "the CUDA driver {path} sees no device (CUDA_VISIBLE_DEVICES is {:?})",
                std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "not set".into())
            ),
            SYSTEM_DRIVER_MISMATCH => err!(
                KVF_ERR_UNSUPPORTED,
                "the CUDA library {path} does not fit the kernel's driver: {}; reboot, or install \
                 both in one version",
                self.name(code)
            ),
            _ => err!(
                KVF_ERR_UNSUPPORTED,
                "the CUDA driver {path} does not start: cuInit: {}",
                self.name(code)
            ),
        }
    }

    /// Name, number and text of a result.
    pub(super) fn name(&self, code: Code) -> String {
        let ask = |call: Option<unsafe extern "C" fn(Code, *mut *const c_char) -> Code>| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: writes one pointer, to a text that is never freed.
            let known = unsafe { call?(code, &mut text) } == SUCCESS && !text.is_null();
            // SAFETY: a NUL-terminated text of the driver.
            let text = known.then(|| unsafe { CStr::from_ptr(text) });
            text.map(|text| text.to_string_lossy().into_owned())
        };
        match (ask(self.table.error_name), ask(self.table.error_string)) {
            (Some(name), Some(text)) => format!("{name} ({code}): {text}"),
            (Some(name), None) => format!("{name} ({code})"),
            _ => format!("CUDA error {code}"),
        }
    }

    /// An error for a result other than success. `what` names the call and its subject.
    ///
    /// # Errors
    /// `KVF_ERR_NO_MEMORY`, `KVF_ERR_UNSUPPORTED` for a stream that is being captured,
    /// `KVF_ERR_TRANSFER` for everything else.
    pub(super) fn check(&self, code: Code, what: impl std::fmt::Display) -> Result<()> {
        let status = match code {
            SUCCESS => return Ok(()),
            OUT_OF_MEMORY => Status::KVF_ERR_NO_MEMORY,
            // All of graph capture.
            CAPTURE_FIRST..=CAPTURE_LAST => Status::KVF_ERR_UNSUPPORTED,
            _ => Status::KVF_ERR_TRANSFER,
        };
        Err(Error::new(status, format!("{what}: {}", self.name(code))))
    }

    /// Devices that the driver sees.
    pub fn devices(&self) -> u32 {
        self.devices.unsigned_abs()
    }

    /// One line for people.
    pub fn describe(&self) -> String {
        let name = |ordinal| {
            let mut name = [0 as c_char; 128];
            let mut device = 0;
            // SAFETY: writes one integer, then at most the array with a NUL.
            unsafe {
                let code = (self.table.device_get)(&mut device, ordinal);
                if code != SUCCESS
                    || (self.table.device_name)(name.as_mut_ptr(), 128, device) != SUCCESS
                {
                    return format!("device {ordinal}");
                }
                CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
            }
        };
        let names: Vec<String> = (0..self.devices).map(name).collect();
        format!(
            "CUDA {} from {}: {}",
            version(self.version),
            self.path,
            names.join(", ")
        )
    }
}

const CAPTURE_FIRST: Code = 900;
const CAPTURE_LAST: Code = CAPTURE_IMPLICIT + 2;

fn open(named: Option<&str>) -> Result<(Library, String)> {
    let mut reasons = Vec::new();
    for name in named.as_slice().iter().chain(match named {
        Some(_) => [].iter(),
        None => NAMES.iter(),
    }) {
        // SAFETY: runs the library's initialisers, which is what loading the driver means.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok((library, (*name).to_owned())),
            Err(e) => reasons.push(reason(&e)),
        }
    }
    let reasons: Vec<String> = reasons.into_iter().map(|r| r.trim().to_owned()).collect();
    bail!(
        KVF_ERR_UNSUPPORTED,
        "no CUDA driver: {}",
        reasons.join("; ")
    )
}

/// The loader's own words.
fn reason(e: &libloading::Error) -> String {
    match std::error::Error::source(e) {
        Some(source) => source.to_string(),
        None => e.to_string(),
    }
}

/// "CUDA 12.8" of a library that may lack everything else.
fn version_of(library: &Library) -> String {
    type Get = unsafe extern "C" fn(*mut c_int) -> Code;
    let mut number = 0;
    // SAFETY: the driver's type of that function, which writes one integer.
    let known = unsafe {
        library
            .get::<Get>(b"cuDriverGetVersion\0")
            .is_ok_and(|get| get(&mut number) == SUCCESS)
    };
    match known {
        true => format!("CUDA {}", version(number)),
        false => "no CUDA version".into(),
    }
}

fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
