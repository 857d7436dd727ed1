//! A peer's shared pool in this process.

use std::os::fd::BorrowedFd;

use super::memfd;
use super::region::Region;
use crate::err;
use crate::error::{Error, Result, Status};

/// A peer's sealed file, mapped read-only and populated. Unmapped when dropped; the peer's death
/// leaves it readable.
#[derive(Debug)]
pub struct Mapping {
    region: Region,
    bytes: u64,
}

impl Mapping {
    /// Checks the file's seals, size and allocation, then maps it. The descriptor is not needed
    /// afterwards.
    ///
    /// # Errors
    /// `KVF_ERR_PROTOCOL` with the numbers if the file is not what was announced (nothing is
    /// mapped), `KVF_ERR_NO_MEMORY` if mapping fails.
    pub fn new(fd: BorrowedFd<'_>, bytes: u64) -> Result<Self> {
        let file_bytes = memfd::verify(fd, bytes)?;
        let len = usize::try_from(file_bytes)
            .ok()
            .filter(|len| isize::try_from(*len).is_ok())
            .ok_or_else(|| {
                err!(
                    KVF_ERR_NO_MEMORY,
                    "the peer's pool of {bytes} bytes does not fit in an address space"
                )
            })?;
        let region = Region::map_shared(fd, len, false).map_err(|err| {
            Error::os(
                Status::KVF_ERR_NO_MEMORY,
                format!("mapping the peer's pool of {bytes} bytes"),
                &err,
            )
        })?;
        // Both only save page faults during the first transfer, and an old kernel knows neither;
        // the pages exist in any case.
        let _ = region.advise(libc::MADV_HUGEPAGE);
        let _ = region.advise(libc::MADV_POPULATE_READ);
        Ok(Self { region, bytes })
    }

    /// First byte. Readable for [`Self::bytes`] bytes while the mapping exists; the peer may write
    /// there at any time.
    pub fn base(&self) -> *const u8 {
        self.region.base().as_ptr()
    }

    /// Length in bytes, as announced.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}
