//! libucp, opened when it is first needed and never closed: UCX leaves threads and hooks behind.

use std::ffi::{CStr, CString, OsString};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::signals::KeptHandlers;
use super::ucx_sys::{self as sys, Ucp, ucs_status_t};
use crate::bail;
use crate::error::{Error, Result, Status};

/// Names the library to open instead of the system's.
pub const LIBRARY_VARIABLE: &str = "KVFERRY_UCX_LIBRARY";
const DEFAULT: &str = "libucp.so.0";
/// The oldest version that is supported, whose headers the declarations come from.
const OLDEST: (u32, u32) = (1, 13);

/// The calls of an opened libucp: every one that kvferry makes is there.
pub struct Library {
    ucp: Ucp,
    /// As in `1.13.1`.
    version: String,
    /// What was opened, for people.
    path: String,
}

/// Opened and checked; several agents share it.
static OPENED: Mutex<Option<&'static Library>> = Mutex::new(None);
/// One thread at a time is inside UCX's set-up, so that handlers are saved and put back in turn.
pub(super) static SETTING_UP: Mutex<()> = Mutex::new(());

impl std::ops::Deref for Library {
    type Target = Ucp;

    fn deref(&self) -> &Ucp {
        &self.ucp
    }
}

impl Library {
    /// The process's UCX, opened now if it was not yet. A failure is not remembered.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED`: it cannot be loaded, is too old, or lacks a call.
    pub fn get() -> Result<&'static Self> {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *opened {
            return Ok(library);
        }
        let path = match std::env::var_os(LIBRARY_VARIABLE) {
            Some(path) if !path.is_empty() => path,
            _ => OsString::from(DEFAULT),
        };
        let library: &'static Self = Box::leak(Box::new(Self::open(path)?));
        *opened = Some(library);
        Ok(library)
    }

    /// As in `1.13.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What was opened, for people.
    pub fn path(&self) -> &str {
        &self.path
    }

    fn open(path: OsString) -> Result<Self> {
        let name = path.to_string_lossy().into_owned();
        let ucp = {
            let _handlers = set_up();
            // SAFETY: loading runs UCX's constructors; whoever names another library answers for it.
            let handle = unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_LOCAL) };
            let handle = handle.map_err(|e| {
                Error::new(
                    Status::KVF_ERR_UNSUPPORTED,
                    format!(
                        "{name} cannot be loaded: {}; install UCX or name the library in {LIBRARY_VARIABLE}",
                        reason(&e)
                    ),
                )
            })?;
            // SAFETY: only looks names up; the types are those of UCX's headers.
            unsafe { Ucp::from_library(handle) }.map_err(|e| {
                Error::new(
                    Status::KVF_ERR_UNSUPPORTED,
                    format!("{name}: {}", reason(&e)),
                )
            })?
        };
        match check(&ucp, &name) {
            Ok(version) => Ok(Self {
                ucp,
                version,
                path: name,
            }),
            Err(e) => {
                std::mem::forget(ucp); // never closed, whatever it is
                Err(e)
            }
        }
    }

    /// Options for the sizes of TCP's segments.
    pub fn tcp_segments(&self) -> [&'static str; 2] {
        // 1.13 looks for a transport's options without the transport's name.
        match self.version.starts_with("1.13.") {
            true => ["TX_SEG_SIZE", "RX_SEG_SIZE"],
            false => ["TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE"],
        }
    }

    /// Whether it is at least of this version.
    pub fn is_at_least(&self, major: u32, minor: u32) -> bool {
        let mut numbers = self.version.split('.').map(|n| n.parse().unwrap_or(0));
        let mut next = || numbers.next().unwrap_or(0);
        (next(), next()) >= (major, minor)
    }

    /// Whether a context can tell memory of a CUDA device from memory of the host.
    ///
    /// # Safety
    /// The context must be open, and no other thread be in a call with it.
    pub unsafe fn knows_cuda(&self, context: sys::ucp_context_h) -> bool {
        // SAFETY: every field may be zero.
        let mut attributes: sys::ucp_context_attr_t = unsafe { std::mem::zeroed() };
        attributes.field_mask = u64::from(sys::UCP_ATTR_FIELD_MEMORY_TYPES);
        // SAFETY: passed on to the caller; the mask says which field is written.
        let status = unsafe { self.ucp.ucp_context_query(context, &raw mut attributes) };
        status == sys::UCS_OK && attributes.memory_types & (1 << sys::UCS_MEMORY_TYPE_CUDA) != 0
    }

    /// UCX's words for a status.
    pub fn text(&self, status: ucs_status_t) -> String {
        // SAFETY: the call takes any number and returns a string that lives for ever.
        let text = unsafe { CStr::from_ptr(self.ucp.ucs_status_string(status)) };
        format!("{} ({status})", text.to_string_lossy())
    }

    /// Fails with UCX's words unless the status is `UCS_OK`.
    ///
    /// # Errors
    /// `KVF_ERR_TRANSFER`, "ucx: WHAT: UCX's text".
    pub fn check(&self, status: ucs_status_t, what: impl std::fmt::Display) -> Result<()> {
        if status != sys::UCS_OK {
            bail!(KVF_ERR_TRANSFER, "ucx: {what}: {}", self.text(status));
        }
        Ok(())
    }

    /// A context with these features, to be waited for, and these options, on top of UCX's configuration; one that this version does not
    /// know is left out.
    ///
    /// # Errors
    /// `KVF_ERR_UNSUPPORTED` with UCX's text.
    pub fn context(
        &self,
        features: sys::ucp_feature,
        options: &[(&str, &str)],
    ) -> Result<sys::ucp_context_h> {
        let unsupported = |mut e: Error| {
            e.status = Status::KVF_ERR_UNSUPPORTED;
            e
        };
        let _handlers = set_up();
        let mut config = std::ptr::null_mut();
        // SAFETY: no prefix and no file; the out-pointer is ours.
        let status = unsafe {
            self.ucp
                .ucp_config_read(std::ptr::null(), std::ptr::null(), &raw mut config)
        };
        self.check(status, "ucp_config_read").map_err(unsupported)?;
        for (name, value) in options {
            if let (Ok(name), Ok(value)) = (CString::new(*name), CString::new(*value)) {
                // SAFETY: the configuration is open, both are C strings.
                let _ = unsafe {
                    self.ucp
                        .ucp_config_modify(config, name.as_ptr(), value.as_ptr())
                };
            }
        }
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(sys::UCP_PARAM_FIELD_FEATURES);
        params.features = u64::from(features | sys::UCP_FEATURE_WAKEUP);
        let mut context = std::ptr::null_mut();
        let (major, minor) = OLDEST;
        // SAFETY: the mask says which fields are there; the configuration is released afterwards.
        let status = unsafe {
            let status = self.ucp.ucp_init_version(
                major,
                minor,
                &raw const params,
                config,
                &raw mut context,
            );
            self.ucp.ucp_config_release(config);
            status
        };
        self.check(status, "ucp_init").map_err(unsupported)?;
        Ok(context)
    }
}

/// Holds the process's handlers until the result is dropped.
pub fn set_up() -> (KeptHandlers, MutexGuard<'static, ()>) {
    // Handlers are dropped, and so put back, before the next thread is let in.
    let inside = SETTING_UP.lock().unwrap_or_else(PoisonError::into_inner);
    (KeptHandlers::save(), inside)
}

/// The loader's own words.
fn reason(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// The first of these that the library lacks.
macro_rules! first_missing {
    ($ucp:expr; $($name:ident)*) => {{
        let mut missing = None;
        $(if missing.is_none() && $ucp.$name.is_err() { missing = Some(stringify!($name)); })*
        missing
    }};
}

/// Checks version and calls, so that no generated wrapper ever meets a missing one.
fn check(ucp: &Ucp, name: &str) -> Result<String> {
    if let Some(missing) = first_missing!(ucp; ucp_get_version ucp_get_version_string) {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "{name} has no {missing}: it is no libucp"
        );
    }
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three numbers to write; the call is there.
    unsafe { ucp.ucp_get_version(&raw mut major, &raw mut minor, &raw mut release) };
    let version = format!("{major}.{minor}.{release}");
    if major != OLDEST.0 || minor < OLDEST.1 {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "{name} is UCX {version}; at least {}.{} is needed",
            OLDEST.0,
            OLDEST.1
        );
    }
    let missing = first_missing!(ucp;
        ucp_config_read ucp_config_modify ucp_config_release ucp_init_version ucp_cleanup
        ucp_context_query
        ucp_worker_create ucp_worker_destroy ucp_worker_get_efd ucp_worker_arm ucp_worker_progress
        ucp_worker_get_address ucp_worker_release_address
        ucp_mem_map ucp_mem_unmap ucp_rkey_pack ucp_rkey_buffer_release ucp_rkey_destroy
        ucp_ep_create ucp_ep_close_nbx ucp_ep_rkey_unpack
        ucp_worker_set_am_recv_handler ucp_am_send_nbx
        ucp_get_nbx ucp_request_free ucp_request_check_status ucs_status_string
    );
    if let Some(missing) = missing {
        bail!(
            KVF_ERR_UNSUPPORTED,
            "{name} (UCX {version}) has no {missing}"
        );
    }
    Ok(version)
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;

    #[test]
    fn every_declared_call_is_checked_for() {
        let declared: Vec<&str> = include_str!("ucx_sys.rs")
            .lines()
            .filter_map(|line| line.trim().strip_prefix("pub unsafe fn "))
            .filter_map(|line| line.split(['(', '<']).next())
            .filter(|name| !["new", "from_library"].contains(name))
            .collect();
        assert!(declared.len() > 20, "{declared:?}");
        let checks = include_str!("library.rs");
        let checks = &checks[..checks.find("#[cfg(test)]").unwrap()];
        let checks = &checks[checks.find("fn check(ucp").unwrap()..];
        for name in declared {
            let named = |word: &str| word == name;
            let words = checks.split(|c: char| !c.is_alphanumeric() && c != '_');
            assert!(words.into_iter().any(named), "{name} is not checked for");
        }
    }

    #[test]
    fn versions_are_compared_by_number() {
        let Some(ucx) = crate::transport::ucx::tests::ucx("versions") else {
            return;
        };
        assert!(ucx.is_at_least(1, 13) && ucx.is_at_least(1, 0) && ucx.is_at_least(0, 99));
        assert!(!ucx.is_at_least(1, 1000) && !ucx.is_at_least(2, 0));
    }

    #[test]
    fn a_library_that_is_not_there_is_an_error_with_what_to_do() {
        let e = Library::open("/nowhere/libucp.so.0".into()).err().unwrap();
        assert_eq!(e.status, Status::KVF_ERR_UNSUPPORTED);
        assert!(
            e.text.contains("/nowhere/libucp.so.0 cannot be loaded"),
            "{e}"
        );
        assert!(e.text.contains("No such file"), "{e}");
        assert!(e.text.contains(LIBRARY_VARIABLE), "{e}");
    }

    #[test]
    fn a_library_that_is_something_else_names_the_missing_call() {
        let e = Library::open("libm.so.6".into()).err().unwrap();
        assert_eq!(e.status, Status::KVF_ERR_UNSUPPORTED);
        assert!(e.text.contains("libm.so.6 has no ucp_get_version"), "{e}");
    }
}
