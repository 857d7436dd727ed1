//! Whether a range that the engine registers is there at all.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::AsRawFd;

use crate::error::{Error, Result, Status};
use crate::{bail, err};

/// Addresses and whether they may be read and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    start: usize,
    end: usize,
    read_write: bool,
}

impl Area {
    /// One line of the list of mappings.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let access = words.next()?;
        Some(Self {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            read_write: access.starts_with("rw"),
        })
    }

    /// The mapping that an address is in, found by the kernel in O(log n): Linux 6.11 and newer.
    /// `Ok(None)`: the address is not mapped.
    fn query(maps: &File, address: usize) -> io::Result<Option<Self>> {
        let mut query = ProcmapQuery {
            size: size_of::<ProcmapQuery>() as u64,
            address: address as u64,
            ..ProcmapQuery::default()
        };
        // SAFETY: the kernel reads and writes one struct of the size that it says, which lives here;
        // the lengths of its strings are 0, so nothing else is written.
        let rc = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut query) };
        if rc == 0 {
            return Ok(Some(Self {
                start: query.start as usize,
                end: query.end as usize,
                read_write: query.flags & READ_WRITE == READ_WRITE,
            }));
        }
        match io::Error::last_os_error() {
            err if err.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            err => Err(err),
        }
    }
}

/// `struct procmap_query` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    address: u64,
    start: u64,
    end: u64,
    flags: u64,
    page_size: u64,
    offset: u64,
    inode: u64,
    device: [u32; 2],
    name_size: u32,
    build_id_size: u32,
    name_address: u64,
    build_id_address: u64,
}

/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: libc::Ioctl =
    (3 << 30 | (size_of::<ProcmapQuery>() as u64) << 16 | (b'f' as u64) << 8 | 17) as libc::Ioctl;
/// `PROCMAP_QUERY_VMA_READABLE | PROCMAP_QUERY_VMA_WRITABLE`.
const READ_WRITE: u64 = 3;
const _: () = assert!(size_of::<ProcmapQuery>() == 104);

/// Checks that every byte of `[base, base + bytes)` is mapped readable and writable.
///
/// The kernel is asked, no page is touched: a registered range may be as large as the machine and
/// not yet filled. What it cannot see is a file mapping beyond the file's end.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` with the first address that is missing or protected;
/// `KVF_ERR_SYSTEM` if the list of mappings cannot be read.
pub(super) fn readable_and_writable(base: usize, bytes: usize) -> Result<()> {
    let unreadable = |err: io::Error| {
        Error::os(
            Status::KVF_ERR_SYSTEM,
            "reading /proc/self/maps to check a registered range",
            &err,
        )
    };
    let end = base
        .checked_add(bytes)
        .ok_or_else(|| err!(KVF_ERR_INVALID_ARGUMENT, "the range wraps around"))?;
    let maps = File::open("/proc/self/maps").map_err(unreadable)?;
    let mut covered = Covered { next: base, end };
    while covered.next < end {
        match Area::query(&maps, covered.next) {
            Ok(area) => covered.add(area)?,
            // An older kernel, or one that forbids it: the whole list, which grows with the
            // number of mappings.
            Err(_) => return in_list(&maps, covered).map_err(unreadable)?,
        }
    }
    Ok(())
}

fn in_list(maps: &File, mut covered: Covered) -> io::Result<Result<()>> {
    for line in BufReader::new(maps).lines() {
        // Ascending and disjoint, so the first area that ends behind `next` decides about it.
        let Some(area) = Area::parse(&line?).filter(|area| area.end > covered.next) else {
            continue;
        };
        if let Err(e) = covered.add(Some(area)) {
            return Ok(Err(e));
        }
        if covered.next >= covered.end {
            return Ok(Ok(()));
        }
    }
    Ok(covered.add(None))
}

/// How far a range is known to be there.
#[derive(Clone, Copy)]
struct Covered {
    next: usize,
    end: usize,
}

impl Covered {
    /// Takes the area that decides about `next`; `None`: there is none.
    fn add(&mut self, area: Option<Area>) -> Result<()> {
        let (next, end) = (self.next, self.end);
        match area.filter(|area| area.start <= next) {
            None => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "address {next:#x} of the range up to {end:#x} is not mapped"
            ),
            Some(area) if !area.read_write => bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "address {next:#x} of the range up to {end:#x} is not readable and writable"
            ),
            Some(area) => self.next = area.end,
        }
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(miri))]
mod tests {
    use super::*;
    use crate::error::Status::*;

    /// Below every mapping (vm.mmap_min_addr); elsewhere another thread may map at any time.
    const HOLE: usize = 4096;

    /// Three pages, the last one read-only.
    fn pages() -> usize {
        // SAFETY: a new mapping at an address of the kernel's choice, of which we change our own
        // pages; it stays mapped for the test's life.
        unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                3 * 4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at.byte_add(8192), 4096, libc::PROT_READ), 0);
            at.addr()
        }
    }

    #[test]
    fn both_ways_see_the_same() {
        let at = pages();
        let maps = || File::open("/proc/self/maps").unwrap();
        for (base, bytes, wrong) in [
            (at, 8192, ""),
            (at + 100, 1, ""),
            (at + 4096, 4096, ""),
            (at + 4096, 4097, "not readable and writable"),
            (at + 8192, 1, "not readable and writable"),
            (HOLE, 1, "not mapped"),
        ] {
            let end = base + bytes;
            let listed = in_list(&maps(), Covered { next: base, end }).unwrap();
            for outcome in [readable_and_writable(base, bytes), listed] {
                match outcome {
                    Ok(()) => assert_eq!(wrong, "", "{base:#x} {bytes}"),
                    Err(e) => {
                        assert_eq!(e.status, KVF_ERR_INVALID_ARGUMENT);
                        assert!(!wrong.is_empty() && e.text.contains(wrong), "{e}");
                        let address = if base == HOLE { HOLE } else { at + 8192 };
                        assert!(e.text.contains(&format!("{address:#x}")), "{e}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_kernel_answers_as_its_list_says() {
        let maps = File::open("/proc/self/maps").unwrap();
        let at = pages();
        let asked = match Area::query(&maps, at + 8192) {
            Ok(area) => area.unwrap(),
            Err(e) => {
                eprintln!("SKIPPED: THIS KERNEL HAS NO PROCMAP_QUERY ({e}), LINUX 6.11 HAS");
                return;
            }
        };
        assert_eq!((asked.start, asked.read_write), (at + 8192, false));
        let lines = BufReader::new(File::open("/proc/self/maps").unwrap()).lines();
        let mut listed = lines.filter_map(|line| Area::parse(&line.unwrap()));
        assert_eq!(listed.find(|a| a.start == asked.start), Some(asked));
        assert_eq!(Area::query(&maps, HOLE).unwrap(), None);
    }
}
