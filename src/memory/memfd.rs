//! Sealed memfds: made by the source, checked by the peer that maps them.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::available;
use super::region::Region;
use crate::error::{Error, Result, Status};
use crate::{bail, err};

/// What a mapped file must promise, or its mapping could fault (SHRINK), differ from what was
/// announced (GROW), be written by its readers (FUTURE_WRITE), or lose the promises (SEAL).
const SEALS: libc::c_int =
    libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;

/// Pages behind a shared pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PageSize {
    /// The system's pages, huge ones where the kernel gives them to shared memory that asks.
    #[default]
    Default,
    /// The system's pages.
    Base,
    /// 2 MiB pages from the reserved ones (`vm.nr_hugepages`).
    Huge2M,
    /// 1 GiB pages from the reserved ones.
    Huge1G,
}

impl PageSize {
    /// From the C ABI's number: 0, the system's page size, 2 MiB or 1 GiB, in bytes.
    ///
    /// # Errors
    /// `KVF_ERR_INVALID_ARGUMENT` for any other number.
    pub fn from_bytes(bytes: u64) -> Result<Self> {
        match bytes {
            0 => Ok(Self::Default),
            0x20_0000 => Ok(Self::Huge2M),
            0x4000_0000 => Ok(Self::Huge1G),
            _ if bytes == system_page() => Ok(Self::Base),
            _ => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "page size {bytes}: choose 0, {}, 2097152 or 1073741824",
                system_page()
            ),
        }
    }

    /// In bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Default | Self::Base => system_page(),
            Self::Huge2M => 2 << 20,
            Self::Huge1G => 1 << 30,
        }
    }

    fn is_reserved(self) -> bool {
        matches!(self, Self::Huge2M | Self::Huge1G)
    }
}

/// The system's page size in bytes.
pub(super) fn system_page() -> u64 {
    // SAFETY: sysconf reads a constant.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// A sealed file, mapped writable here; nobody else can map it writable.
#[derive(Debug)]
pub(super) struct Sealed {
    // Unmapped before the file is closed; either order would do.
    region: Region,
    fd: OwnedFd,
}

impl Sealed {
    /// Makes, maps, populates and seals a file of at least `bytes` zero bytes (more only if the
    /// pages are reserved huge ones).
    ///
    /// # Errors
    /// `KVF_ERR_NO_MEMORY` before the machine is short of memory, `KVF_ERR_INVALID_ARGUMENT` for a
    /// size or node that cannot be, `KVF_ERR_UNSUPPORTED` where the kernel lacks something.
    pub(super) fn create(
        name: &str,
        bytes: u64,
        numa_node: Option<u32>,
        pages: PageSize,
    ) -> Result<Self> {
        if bytes == 0 {
            bail!(KVF_ERR_INVALID_ARGUMENT, "{name}: 0 bytes");
        }
        let file_bytes = if pages.is_reserved() {
            bytes.checked_next_multiple_of(pages.bytes())
        } else {
            Some(bytes)
        };
        let too_long = || {
            err!(
                KVF_ERR_NO_MEMORY,
                "{name}: {bytes} bytes do not fit in an address space"
            )
        };
        let file_bytes = file_bytes
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or_else(too_long)?;
        let len = usize::try_from(file_bytes).map_err(|_| too_long())?;
        let named = |err: Error| err.context(name);
        available::check_file_size(file_bytes).map_err(named)?;
        if !pages.is_reserved() {
            available::check(file_bytes, numa_node).map_err(named)?;
        }

        let fd = create(name, pages)?;
        let fail = |what: &str, err: io::Error| no_memory(name, what, file_bytes, pages, &err);
        let end = libc::off_t::try_from(file_bytes).map_err(|_| too_long())?;
        // SAFETY: resizes our own file.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), end) } != 0 {
            return Err(fail("sizing", io::Error::last_os_error()));
        }
        // Reserved huge pages are claimed here, so a lack of them is this call's error.
        let region =
            Region::map_shared(fd.as_fd(), len, true).map_err(|err| fail("mapping", err))?;
        if let Some(node) = numa_node {
            bind(&region, node).map_err(named)?;
        }
        if pages == PageSize::Default {
            // Only a wish: kernels without huge shared pages refuse it.
            let _ = region.advise(libc::MADV_HUGEPAGE);
        }
        populate(&region, fd.as_fd()).map_err(|err| fail("filling", err))?;
        // After our own writable mapping, which FUTURE_WRITE leaves as it is.
        // SAFETY: changes our own file's seals.
        if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) } != 0 {
            return Err(Error::os(
                Status::KVF_ERR_UNSUPPORTED,
                format!("{name}: sealing (needs Linux 5.1)"),
                &io::Error::last_os_error(),
            ));
        }
        Ok(Self { region, fd })
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn create(name: &str, pages: PageSize) -> Result<OwnedFd> {
    let c_name =
        CString::new(name).map_err(|_| err!(KVF_ERR_INVALID_ARGUMENT, "NUL in {name:?}"))?;
    let mut flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    flags |= match pages {
        PageSize::Default | PageSize::Base => 0,
        PageSize::Huge2M => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        PageSize::Huge1G => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
    };
    // SAFETY: the name is NUL-terminated and outlives the call.
    let fd = unsafe { libc::memfd_create(c_name.as_ptr(), flags) };
    if fd < 0 {
        let err = io::Error::last_os_error();
        let status = match err.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => Status::KVF_ERR_SYSTEM,
            Some(libc::ENOMEM) => Status::KVF_ERR_NO_MEMORY,
            _ => Status::KVF_ERR_UNSUPPORTED,
        };
        return Err(Error::os(
            status,
            format!("{name}: memfd_create with {} byte pages", pages.bytes()),
            &err,
        ));
    }
    // SAFETY: a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn no_memory(name: &str, what: &str, bytes: u64, pages: PageSize, err: &io::Error) -> Error {
    let mut text = format!("{name}: {what} {bytes} bytes of shared memory");
    if pages.is_reserved() {
        text.push_str(&format!(
            " in huge pages (reserved ones: /sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages)",
            pages.bytes() / 1024
        ));
    }
    Error::os(Status::KVF_ERR_NO_MEMORY, text, err)
}

/// Binds the file's pages to a NUMA node; must come before the first page exists.
fn bind(region: &Region, node: u32) -> Result<()> {
    const WORDS: usize = 16; // 1024 nodes, the kernel's own maximum
    let mut mask = [0u64; WORDS];
    let Some(word) = mask.get_mut(node as usize / 64) else {
        bail!(KVF_ERR_INVALID_ARGUMENT, "there is no NUMA node {node}");
    };
    *word = 1 << (node % 64);
    // SAFETY: the range is ours and the mask lives through the call. The kernel reads one bit
    // less than `maxnode` says.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            region.base().as_ptr(),
            region.len(),
            libc::MPOL_BIND,
            mask.as_ptr(),
            WORDS * 64 + 1,
            0,
        )
    };
    if rc == 0 {
        return Ok(());
    }
    let err = io::Error::last_os_error();
    let status = match err.raw_os_error() {
        Some(libc::EINVAL) => Status::KVF_ERR_INVALID_ARGUMENT,
        _ => Status::KVF_ERR_UNSUPPORTED,
    };
    Err(Error::os(
        status,
        format!("binding to NUMA node {node}"),
        &err,
    ))
}

/// Gives every page memory now, so that its lack is an error here and not a SIGBUS later.
fn populate(region: &Region, fd: BorrowedFd<'_>) -> io::Result<()> {
    match region.advise(libc::MADV_POPULATE_WRITE) {
        Err(err) if err.raw_os_error() == Some(libc::EINVAL) => {}
        done => return done,
    }
    // Before Linux 5.14: allocate through the file, which fails properly, then fault pages in.
    let len = libc::off_t::try_from(region.len()).map_err(io::Error::other)?;
    // SAFETY: allocates blocks of our own file.
    if unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let page = usize::try_from(system_page()).map_err(io::Error::other)?;
    for offset in (0..region.len()).step_by(page) {
        // SAFETY: inside our own writable mapping, which nobody else knows yet; it is zero.
        unsafe { region.base().as_ptr().add(offset).write_volatile(0) };
    }
    Ok(())
}

/// Checks that a file from a peer is a sealed, completely allocated memfd of `bytes`.
///
/// # Errors
/// `KVF_ERR_PROTOCOL` with the numbers.
pub(super) fn verify(fd: BorrowedFd<'_>, bytes: u64) -> Result<u64> {
    // SAFETY: reads the seals of a descriptor that is borrowed for the call.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 {
        return Err(Error::os(
            Status::KVF_ERR_PROTOCOL,
            "the peer's pool is not a memfd",
            &io::Error::last_os_error(),
        ));
    }
    if seals & SEALS != SEALS {
        bail!(
            KVF_ERR_PROTOCOL,
            "the peer's pool has seals {seals:#x}, not {SEALS:#x}; it is not mapped"
        );
    }
    let stat = stat(fd)?;
    let page = huge_page(fd)?;
    let expected = match page {
        Some(page) => bytes.checked_next_multiple_of(page),
        None => Some(bytes),
    };
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if bytes == 0 || expected != Some(size) {
        bail!(
            KVF_ERR_PROTOCOL,
            "the peer's pool has {size} bytes but was announced with {bytes}; it is not mapped"
        );
    }
    // A hole would be filled on our account, or fault where memory is short.
    let allocated = u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512);
    if allocated < size {
        bail!(
            KVF_ERR_PROTOCOL,
            "the peer's pool has memory behind {allocated} of its {size} bytes; it is not mapped"
        );
    }
    Ok(size)
}

fn stat(fd: BorrowedFd<'_>) -> Result<libc::stat> {
    // SAFETY: all-zero is a valid stat.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: fstat writes one struct, which lives here.
    if unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } != 0 {
        return Err(Error::os(
            Status::KVF_ERR_SYSTEM,
            "fstat of the peer's pool",
            &io::Error::last_os_error(),
        ));
    }
    Ok(stat)
}

/// The page size of a file of reserved huge pages; `None`: ordinary pages.
fn huge_page(fd: BorrowedFd<'_>) -> Result<Option<u64>> {
    // SAFETY: all-zero is a valid statfs.
    let mut fs: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: fstatfs writes one struct, which lives here.
    if unsafe { libc::fstatfs(fd.as_raw_fd(), &mut fs) } != 0 {
        return Err(Error::os(
            Status::KVF_ERR_SYSTEM,
            "fstatfs of the peer's pool",
            &io::Error::last_os_error(),
        ));
    }
    let huge = fs.f_type == libc::HUGETLBFS_MAGIC;
    Ok(huge
        .then(|| u64::try_from(fs.f_bsize).unwrap_or(0))
        .filter(|page| *page > 0))
}
