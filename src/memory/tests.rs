//! Pools as the kernel sees them. Most of it cannot run under Miri, which knows no memfds.

use super::*;
use crate::error::Status;

#[test]
fn bad_ranges_are_not_registered() {
    let mut memory = [0u8; 64];
    let base = memory.as_mut_ptr();
    // SAFETY: refused before anything is kept.
    let refused = |base, bytes| unsafe { Pool::register(1, base, bytes) }.unwrap_err();
    for (err, part) in [
        (refused(std::ptr::null_mut(), 64), "NULL"),
        (refused(base, 0), "0 bytes"),
        (refused(base, u64::MAX), "wrap"),
        (refused(base, 1 << 63), "wrap"),
        (
            refused(std::ptr::without_provenance_mut(usize::MAX - 7), 64),
            "wrap",
        ),
    ] {
        assert_eq!(err.status, Status::KVF_ERR_INVALID_ARGUMENT);
        assert!(err.text.contains(part), "{}", err.text);
    }
}

#[test]
fn a_registered_pool_is_the_range() {
    let mut memory = [0u8; 64];
    let base = memory.as_mut_ptr();
    // SAFETY: `memory` outlives the pools.
    let (a, b, c) = unsafe {
        (
            Pool::register(7, base, 64).unwrap(),
            Pool::register(8, base.add(32), 32).unwrap(),
            Pool::register(9, base, 32).unwrap(),
        )
    };
    assert_eq!((a.id(), a.base(), a.bytes()), (7, base, 64));
    assert_eq!(a.kind(), PoolKind::Registered);
    assert!(a.fd().is_none());
    assert!(a.overlaps(&b) && b.overlaps(&a) && a.overlaps(&c) && a.overlaps(&a));
    assert!(!b.overlaps(&c) && !c.overlaps(&b));
}

#[cfg(not(miri))]
mod kernel {
    use super::*;
    use std::fs::{self, File};
    use std::io::{self, Write};
    use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
    use std::ptr;
    use std::time::{Duration, Instant};

    /// Open files and mappings of this process that carry the name; other tests run meanwhile.
    fn traces_of(name: &str) -> usize {
        let files = fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| fs::read_link(entry.ok()?.path()).ok())
            .filter(|link| link.to_string_lossy().contains(name))
            .count();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        files + maps.lines().filter(|line| line.contains(name)).count()
    }

    fn memfd(name: &std::ffi::CStr, bytes: u64, seals: libc::c_int) -> OwnedFd {
        // SAFETY: a new descriptor of a new file.
        let fd = unsafe {
            OwnedFd::from_raw_fd(libc::memfd_create(
                name.as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            ))
        };
        let mut file = File::from(fd);
        file.write_all(&vec![1; bytes as usize]).unwrap();
        // SAFETY: seals our own file.
        let rc = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
        assert_eq!(rc, 0);
        file.into()
    }

    fn map(fd: BorrowedFd<'_>, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: a new mapping, unmapped at once.
        unsafe {
            let at = libc::mmap(
                ptr::null_mut(),
                4096,
                protection,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            );
            if at == libc::MAP_FAILED {
                return Err(io::Error::last_os_error());
            }
            libc::munmap(at, 4096);
        }
        Ok(())
    }

    #[test]
    fn a_shared_pool_is_zero_present_writable_and_mapped_by_its_peer() {
        let bytes = 3 * 4096 + 5;
        let pool = Pool::create_shared(901, bytes, None, PageSize::Default).unwrap();
        assert_eq!((pool.id(), pool.bytes()), (901, bytes));
        assert_eq!((pool.kind(), pool.page_bytes()), (PoolKind::Shared, 4096));
        let mut present = [0u8; 4];
        // SAFETY: the pool's own pages.
        unsafe {
            assert_eq!(
                libc::mincore(pool.base().cast(), bytes as usize, present.as_mut_ptr()),
                0
            );
            assert!((0..bytes as usize).all(|i| pool.base().add(i).read() == 0));
        }
        assert_eq!(present.map(|p| p & 1), [1; 4]);
        let fd = pool.fd().unwrap();
        // SAFETY: reads flags.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_ne!(flags & libc::FD_CLOEXEC, 0);

        let mapping = Mapping::new(fd, bytes).unwrap();
        assert_eq!(mapping.bytes(), bytes);
        assert_ne!(mapping.base(), pool.base().cast_const());
        // SAFETY: last byte of both.
        unsafe {
            pool.base().add(bytes as usize - 1).write_volatile(0xa5);
            assert_eq!(mapping.base().add(bytes as usize - 1).read_volatile(), 0xa5);
        }
        drop(pool);
        // SAFETY: the mapping keeps the memory.
        unsafe { assert_eq!(mapping.base().add(bytes as usize - 1).read_volatile(), 0xa5) };
        drop(mapping);
        assert_eq!(traces_of("kvferry-pool-901"), 0);
    }

    #[test]
    fn an_impossible_size_fails_at_once() {
        for bytes in [1 << 42, 1 << 50, i64::MAX as u64, 1 << 63, u64::MAX] {
            for pages in [PageSize::Default, PageSize::Huge2M] {
                let start = Instant::now();
                let err = Pool::create_shared(902, bytes, None, pages).unwrap_err();
                assert_eq!(err.status, Status::KVF_ERR_NO_MEMORY, "{err}");
                assert!(err.text.contains(&bytes.to_string()), "{err}");
                assert!(start.elapsed() < Duration::from_secs(1));
            }
        }
        let err = Pool::create_shared(902, 0, None, PageSize::Default).unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_INVALID_ARGUMENT);
        assert_eq!(traces_of("kvferry-pool-902"), 0);
    }

    /// True in a child process that runs this one test alone; elsewhere starts that child and
    /// expects it to succeed.
    fn alone(test: &str) -> bool {
        const CHILD: &str = "KVFERRY_TEST_ALONE";
        if std::env::var_os(CHILD).is_some() {
            return true;
        }
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("memory::tests::kernel::{test}")])
            .env(CHILD, "1")
            .status()
            .unwrap();
        assert!(status.success(), "{status}");
        false
    }

    #[test]
    fn the_file_size_limit_is_an_error_and_not_a_signal() {
        if !alone("the_file_size_limit_is_an_error_and_not_a_signal") {
            return;
        }
        let limit = libc::rlimit {
            rlim_cur: 1 << 20,
            rlim_max: 1 << 20,
        };
        // SAFETY: limits this child only.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
        let err = Pool::create_shared(903, 2 << 20, None, PageSize::Default).unwrap_err();
        assert_eq!(err.status, Status::KVF_ERR_NO_MEMORY);
        assert!(err.text.contains("1048576"), "{err}");
        Pool::create_shared(903, 1 << 20, None, PageSize::Default).unwrap();
    }

    #[test]
    fn reserved_huge_pages_are_there_or_refused() {
        let text = fs::read_to_string("/proc/meminfo").unwrap();
        let free = text
            .lines()
            .find_map(|line| line.strip_prefix("HugePages_Free:"))
            .map_or(0, |n| n.trim().parse::<u64>().unwrap());
        match Pool::create_shared(904, 5, None, PageSize::Huge2M) {
            Ok(pool) => {
                assert!(free > 0);
                assert_eq!((pool.bytes(), pool.page_bytes()), (5, 2 << 20));
                Mapping::new(pool.fd().unwrap(), 5).unwrap();
            }
            Err(err) => {
                assert_eq!(free, 0, "{err}");
                assert!(
                    matches!(
                        err.status,
                        Status::KVF_ERR_NO_MEMORY | Status::KVF_ERR_UNSUPPORTED
                    ),
                    "{err}"
                );
            }
        }
        assert_eq!(traces_of("kvferry-pool-904"), 0);
    }

    #[test]
    fn page_sizes_have_numbers() {
        for (bytes, pages) in [
            (0, PageSize::Default),
            (4096, PageSize::Base),
            (2 << 20, PageSize::Huge2M),
            (1 << 30, PageSize::Huge1G),
        ] {
            assert_eq!(PageSize::from_bytes(bytes).unwrap(), pages);
        }
        for bytes in [1, 4095, 8192, 4 << 20] {
            let err = PageSize::from_bytes(bytes).unwrap_err();
            assert_eq!(err.status, Status::KVF_ERR_INVALID_ARGUMENT);
            assert!(err.text.contains(&bytes.to_string()), "{err}");
        }
    }

    #[test]
    fn pages_are_bound_or_refused() {
        match Pool::create_shared(905, 8192, Some(0), PageSize::Base) {
            Ok(pool) => {
                let mut node = -1i32;
                // SAFETY: asks where one page of the pool is (MPOL_F_NODE | MPOL_F_ADDR).
                let rc = unsafe {
                    libc::syscall(
                        libc::SYS_get_mempolicy,
                        &mut node,
                        ptr::null::<u64>(),
                        0,
                        pool.base(),
                        3,
                    )
                };
                assert_eq!((rc, node), (0, 0));
            }
            Err(err) => assert_eq!(err.status, Status::KVF_ERR_UNSUPPORTED, "{err}"),
        }
        for node in [1023, 1024, u32::MAX] {
            let err = Pool::create_shared(905, 8192, Some(node), PageSize::Base).unwrap_err();
            assert!(
                matches!(
                    err.status,
                    Status::KVF_ERR_INVALID_ARGUMENT | Status::KVF_ERR_UNSUPPORTED
                ),
                "{err}"
            );
            assert!(err.text.contains(&node.to_string()), "{err}");
        }
        assert_eq!(traces_of("kvferry-pool-905"), 0);
    }

    #[test]
    fn a_hole_or_a_protected_page_is_named() {
        // Another test's thread might map something into the hole.
        if !alone("a_hole_or_a_protected_page_is_named") {
            return;
        }
        let page = 4096usize;
        // SAFETY: an anonymous mapping of our own, cut and protected below.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        }
        .cast::<u8>();
        // SAFETY: refused, or dropped before the range is unmapped.
        let register = |offset: usize, pages: usize| unsafe {
            Pool::register(906, base.add(offset), (pages * page) as u64)
        };
        register(0, 4).unwrap();
        register(1, 3).unwrap();
        // SAFETY: our own range.
        unsafe {
            assert_eq!(
                libc::mprotect(base.add(2 * page).cast(), page, libc::PROT_READ),
                0
            );
        }
        let err = register(0, 4).unwrap_err();
        let named = format!("{:#x} of the range", base.addr() + 2 * page);
        assert!(err.text.contains(&named), "{err} without {named}");
        assert!(err.text.contains("not readable and writable"), "{err}");
        register(0, 2).unwrap();
        // SAFETY: our own range.
        unsafe { assert_eq!(libc::munmap(base.add(page).cast(), page), 0) };
        let err = register(8, 2).unwrap_err();
        let named = format!("{:#x} of the range", base.addr() + page);
        assert!(err.text.contains(&named), "{err} without {named}");
        assert_eq!(err.status, Status::KVF_ERR_INVALID_ARGUMENT);
        // SAFETY: our own range; the hole stays a hole.
        unsafe { libc::munmap(base.cast(), 4 * page) };
    }

    #[test]
    fn a_sealed_pool_stays_as_it_is_for_everybody_else() {
        let pool = Pool::create_shared(907, 8192, None, PageSize::Base).unwrap();
        let fd = pool.fd().unwrap();
        map(fd, libc::PROT_READ).unwrap();
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        assert_eq!(
            map(fd, writable).unwrap_err().raw_os_error(),
            Some(libc::EPERM)
        );
        let reopened = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .unwrap();
        assert_eq!(
            map(reopened.as_fd(), writable).unwrap_err().raw_os_error(),
            Some(libc::EPERM)
        );
        assert!((&reopened).write_all(b"x").is_err());
        assert!(reopened.set_len(4096).is_err() && reopened.set_len(1 << 20).is_err());
        // SAFETY: calls on our own file and mapping, all refused.
        unsafe {
            let hole = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            assert_eq!(libc::fallocate(reopened.as_raw_fd(), hole, 0, 4096), -1);
            assert_eq!(
                libc::fcntl(reopened.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_WRITE),
                -1
            );
            let mapping = Mapping::new(fd, 8192).unwrap();
            assert_eq!(
                libc::mprotect(mapping.base().cast_mut().cast(), 4096, writable),
                -1
            );
            // The source itself goes on writing.
            pool.base().write_volatile(9);
            assert_eq!(mapping.base().read_volatile(), 9);
        }
    }

    #[test]
    fn files_that_may_change_under_us_are_not_mapped() {
        let all =
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL;
        let refused = |fd: &OwnedFd, bytes: u64, part: &str| {
            let err = Mapping::new(fd.as_fd(), bytes).unwrap_err();
            assert_eq!(err.status, Status::KVF_ERR_PROTOCOL, "{err}");
            assert!(err.text.contains(part), "{err} without {part}");
        };
        let name = c"kvferry-test-908";
        Mapping::new(memfd(name, 8192, all).as_fd(), 8192).unwrap();
        for missing in [
            all,
            libc::F_SEAL_SHRINK,
            libc::F_SEAL_GROW,
            libc::F_SEAL_FUTURE_WRITE,
            libc::F_SEAL_SEAL,
        ] {
            let seals = all & !missing;
            refused(
                &memfd(name, 8192, seals),
                8192,
                &format!("seals {seals:#x}"),
            );
        }
        for bytes in [0, 1, 4096, 8191, 8193, 12288, u64::MAX] {
            refused(
                &memfd(name, 8192, all),
                bytes,
                &format!("announced with {bytes}"),
            );
        }
        // SAFETY: a new file of our own.
        let sparse = unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            assert_eq!(libc::ftruncate(fd, 1 << 40), 0);
            assert_eq!(libc::fcntl(fd, libc::F_ADD_SEALS, all), 0);
            OwnedFd::from_raw_fd(fd)
        };
        refused(
            &sparse,
            1 << 40,
            "memory behind 0 of its 1099511627776 bytes",
        );
        refused(
            &OwnedFd::from(File::open("/proc/self/exe").unwrap()),
            4096,
            "memfd",
        );
        refused(&OwnedFd::from(io::pipe().unwrap().0), 4096, "memfd");
        drop(sparse);
        assert_eq!(traces_of("kvferry-test-908"), 0);
    }
}
