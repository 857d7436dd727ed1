//! UCX's context and its two workers. Only the progress thread uses them.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::null_mut;

use super::library::{Library, set_up};
use super::ucx_sys as sys;
use crate::error::{Error, Result, Status};
use crate::observe;

/// Destroyed when dropped, but not in a forked child.
pub struct Workers {
    ucx: &'static Library,
    pub context: sys::ucp_context_h,
    /// Has all endpoints that we make: asks, answers and gets go out.
    pub outward: sys::ucp_worker_h,
    /// Has the address, and makes none. UCX would let two workers that both make endpoints to each other
    /// share connections, and one side's end of one would reset the other's next.
    pub inward: sys::ucp_worker_h,
    /// Readable when one of the workers has something.
    events: OwnedFd,
}

impl Workers {
    /// Takes the context over.
    pub fn new(ucx: &'static Library, context: sys::ucp_context_h) -> Result<Self> {
        let events = match new_events() {
            Ok(events) => events,
            Err(e) => {
                // SAFETY: open, and not used for anything.
                unsafe { ucx.ucp_cleanup(context) };
                return Err(Error::os(Status::KVF_ERR_SYSTEM, "epoll", &e));
            }
        };
        let mut workers = Self {
            ucx,
            context,
            outward: null_mut(),
            inward: null_mut(),
            events,
        };
        // What was made so far is undone by Drop.
        workers.outward = workers.worker()?;
        workers.inward = workers.worker()?;
        Ok(workers)
    }

    /// Where peers connect to.
    pub fn address(&self) -> Result<Vec<u8>> {
        let ucx = self.ucx;
        let (mut address, mut len) = (null_mut(), 0);
        // SAFETY: the worker is open; the buffer is copied and given back.
        unsafe {
            let status = ucx.ucp_worker_get_address(self.inward, &raw mut address, &raw mut len);
            ucx.check(status, "ucp_worker_get_address")?;
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            ucx.ucp_worker_release_address(self.inward, address);
            Ok(bytes)
        }
    }

    /// A worker whose descriptor is in `events`.
    fn worker(&self) -> Result<sys::ucp_worker_h> {
        let ucx = self.ucx;
        // SAFETY: every field may be zero.
        let mut params: sys::ucp_worker_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = sys::UCS_THREAD_MODE_SINGLE;
        let mut worker = null_mut();
        let status = {
            let _handlers = set_up();
            // SAFETY: the context is open, the mask says which fields are there.
            unsafe { ucx.ucp_worker_create(self.context, &raw const params, &raw mut worker) }
        };
        ucx.check(status, "ucp_worker_create")?;
        let mut efd = -1;
        // SAFETY: the worker is open; the descriptor stays UCX's.
        let status = unsafe { ucx.ucp_worker_get_efd(worker, &raw mut efd) };
        let watched = ucx.check(status, "ucp_worker_get_efd").and_then(|()| {
            // SAFETY: UCX keeps its descriptor open as long as the worker.
            watch(&self.events, unsafe { BorrowedFd::borrow_raw(efd) })
                .map_err(|e| Error::os(Status::KVF_ERR_SYSTEM, "epoll", &e))
        });
        if let Err(e) = watched {
            // SAFETY: open, and not used for anything.
            unsafe { ucx.ucp_worker_destroy(worker) };
            return Err(e);
        }
        Ok(worker)
    }

    /// Lets UCX do what it has to; false: there was nothing.
    pub fn progress(&self) -> bool {
        // SAFETY: the workers are open and only this thread uses them.
        unsafe {
            self.ucx.ucp_worker_progress(self.inward) | self.ucx.ucp_worker_progress(self.outward)
                != 0
        }
    }

    /// Before a wait for the descriptor: `UCS_OK`, or `UCS_ERR_BUSY` if there is something to do.
    pub fn arm(&self) -> sys::ucs_status_t {
        // SAFETY: the workers are open and only this thread uses them.
        unsafe {
            match self.ucx.ucp_worker_arm(self.inward) {
                sys::UCS_OK => self.ucx.ucp_worker_arm(self.outward),
                status => status,
            }
        }
    }

    /// When this returns, UCX touches no memory of ours any more. What is registered stays so.
    pub fn stop(&mut self) {
        for worker in [&mut self.outward, &mut self.inward] {
            if !worker.is_null() {
                // SAFETY: it is open, and nothing uses it afterwards.
                unsafe { self.ucx.ucp_worker_destroy(*worker) };
                *worker = null_mut();
            }
        }
    }

    /// Nothing may be registered any more.
    pub fn destroy(&mut self) {
        self.stop();
        if !self.context.is_null() {
            // SAFETY: it is open and has no workers, and nothing uses it afterwards.
            unsafe { self.ucx.ucp_cleanup(self.context) };
            self.context = null_mut();
        }
    }
}

impl AsFd for Workers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if !observe::marks::forked() {
            self.destroy();
        }
    }
}

/// A descriptor for [`watch`].
fn new_events() -> std::io::Result<OwnedFd> {
    // SAFETY: an integer only.
    match unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) } {
        fd if fd < 0 => Err(std::io::Error::last_os_error()),
        // SAFETY: just made, and nobody else has it.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// Makes `events` readable whenever `fd` is.
fn watch(events: &OwnedFd, fd: BorrowedFd<'_>) -> std::io::Result<()> {
    let mut event = libc::epoll_event {
        events: libc::EPOLLIN as u32,
        u64: 0,
    };
    let (events, fd) = (events.as_raw_fd(), fd.as_raw_fd());
    // SAFETY: two open descriptors, and an event that lives during the call.
    match unsafe { libc::epoll_ctl(events, libc::EPOLL_CTL_ADD, fd, &raw mut event) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}
