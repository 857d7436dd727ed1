//! How much memory can be taken without waking the kernel's out-of-memory killer.
//!
//! Pages of a memfd are charged when they are first touched, and a charge that cannot be met kills
//! a process instead of failing. So a pool is compared with what is free *before* it is touched.

use std::fs;
use std::path::{Path, PathBuf};

use crate::bail;
use crate::error::Result;

/// One limit and what is left of it.
struct Left {
    bytes: u64,
    of: String,
}

/// Fails if `bytes` of ordinary pages, on `numa_node` if given, are more than what is available.
///
/// # Errors
/// `KVF_ERR_NO_MEMORY` with the limit that does not suffice. Where the kernel tells nothing,
/// nothing is refused.
pub(super) fn check(bytes: u64, numa_node: Option<u32>) -> Result<()> {
    let lefts = system()
        .into_iter()
        .chain(numa_node.and_then(node))
        .chain(cgroups());
    for left in lefts {
        // The last few percent are needed by everybody else to go on running.
        let usable = left.bytes - left.bytes / 32;
        if bytes > usable {
            bail!(
                KVF_ERR_NO_MEMORY,
                "a pool of {bytes} bytes does not fit: {} leaves {usable} bytes; ask for less or free memory",
                left.of
            );
        }
    }
    Ok(())
}

/// Fails if a file of `bytes` is longer than RLIMIT_FSIZE allows; the kernel would send SIGXFSZ.
pub(super) fn check_file_size(bytes: u64) -> Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: libc::RLIM_INFINITY,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: getrlimit writes one struct, which lives here.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    if limit.rlim_cur != libc::RLIM_INFINITY && bytes > limit.rlim_cur {
        bail!(
            KVF_ERR_NO_MEMORY,
            "a pool of {bytes} bytes is longer than the file size limit of {} bytes; raise it with ulimit -f",
            limit.rlim_cur
        );
    }
    Ok(())
}

fn system() -> Option<Left> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    Some(Left {
        bytes: kibibytes(&text, "MemAvailable:")?,
        of: "the machine's MemAvailable".into(),
    })
}

/// Free pages of a node and its page cache, which the kernel gives up for a bound allocation.
fn node(node: u32) -> Option<Left> {
    let text = fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).ok()?;
    let bytes = ["MemFree:", "Active(file):", "Inactive(file):"]
        .iter()
        .filter_map(|field| kibibytes(&text, field))
        .sum();
    Some(Left {
        bytes,
        of: format!("NUMA node {node}"),
    })
}

/// The number of KiB after `field`, in bytes.
fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let mut words = text.split_whitespace().skip_while(|word| *word != field);
    words.nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// What is left in this process's control group and in each group above it.
fn cgroups() -> Vec<Left> {
    let Ok(text) = fs::read_to_string("/proc/self/cgroup") else {
        return Vec::new();
    };
    text.lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let v2 = controllers.is_empty();
            let root = match v2 {
                true => "/sys/fs/cgroup",
                false if controllers.split(',').any(|c| c == "memory") => "/sys/fs/cgroup/memory",
                false => return None,
            };
            Some(groups_up_to(Path::new(root), path).filter_map(move |dir| group(&dir, v2)))
        })
        .flatten()
        .collect()
}

/// `root/path` and its parents down to `root`. In a container the path may not be visible; the
/// container's own group then is the root.
fn groups_up_to(root: &Path, path: &str) -> impl Iterator<Item = PathBuf> {
    let root = root.to_owned();
    let leaf = root.join(path.trim_start_matches('/'));
    leaf.ancestors()
        .take_while(|dir| dir.starts_with(&root))
        .map(Path::to_owned)
        .collect::<Vec<_>>()
        .into_iter()
}

fn group(dir: &Path, v2: bool) -> Option<Left> {
    let number = |file: &str| -> Option<u64> {
        // "max" (v2: no limit) is not a number and ends here.
        fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
    };
    let (limit, used, cache) = match v2 {
        true => ("memory.max", "memory.current", "inactive_file"),
        false => (
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    };
    let (limit, used) = (number(limit)?, number(used)?);
    // Page cache counts as used but is given up first.
    let cache = fs::read_to_string(dir.join("memory.stat"))
        .ok()
        .and_then(|stat| {
            let mut words = stat.split_whitespace().skip_while(|word| *word != cache);
            words.nth(1)?.parse::<u64>().ok()
        })
        .unwrap_or(0);
    Some(Left {
        bytes: limit.saturating_sub(used.saturating_sub(cache)),
        of: format!("control group {}", dir.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_by_field() {
        let text = "MemTotal:       24 kB\nMemAvailable:  7 kB\nNode 0 Active(file):  3 kB\n";
        assert_eq!(kibibytes(text, "MemAvailable:"), Some(7 << 10));
        assert_eq!(kibibytes(text, "Active(file):"), Some(3 << 10));
        assert_eq!(kibibytes(text, "MemFree:"), None);
    }

    #[test]
    fn parents_of_a_group_count_too() {
        let dirs: Vec<_> = groups_up_to(Path::new("/r/g"), "/a/b").collect();
        let expected = ["/r/g/a/b", "/r/g/a", "/r/g"].map(PathBuf::from);
        assert_eq!(dirs, expected);
    }

    #[test]
    fn a_group_without_limit_refuses_nothing() {
        let dir = std::env::temp_dir().join(format!("kvferry-group-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("memory.max"), "max\n").unwrap();
        fs::write(dir.join("memory.current"), "5000\n").unwrap();
        assert!(group(&dir, true).is_none());
        fs::write(dir.join("memory.max"), "9000\n").unwrap();
        assert_eq!(group(&dir, true).unwrap().bytes, 4000);
        fs::write(dir.join("memory.stat"), "anon 1\ninactive_file 1500\n").unwrap();
        assert_eq!(group(&dir, true).unwrap().bytes, 5500);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_error_names_the_limit() {
        let err = check(1 << 50, None).unwrap_err();
        assert_eq!(err.status, crate::error::Status::KVF_ERR_NO_MEMORY);
        assert!(err.text.contains("MemAvailable"), "{}", err.text);
        assert!(check(4096, None).is_ok());
    }
}
