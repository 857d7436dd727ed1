//! Whether a range that the engine registers is there at all.

use std::fs::File;
use std::io::{BufRead, BufReader};

use crate::error::{Error, Result, Status};
use crate::{bail, err};

/// One line of `/proc/self/maps`: addresses and whether it may be read and written.
struct Area {
    start: usize,
    end: usize,
    read_write: bool,
}

impl Area {
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
}

/// Checks that every byte of `[base, base + bytes)` is mapped readable and writable.
///
/// The kernel's list of mappings is read, no page is touched: a registered range may be as large
/// as the machine and not yet filled. What it cannot see is a file mapping beyond the file's end.
///
/// # Errors
/// `KVF_ERR_INVALID_ARGUMENT` with the first address that is missing or protected;
/// `KVF_ERR_SYSTEM` if the list cannot be read.
pub(super) fn readable_and_writable(base: usize, bytes: usize) -> Result<()> {
    let unreadable = |err: std::io::Error| {
        Error::os(
            Status::KVF_ERR_SYSTEM,
            "reading /proc/self/maps to check a registered range",
            &err,
        )
    };
    let maps = BufReader::new(File::open("/proc/self/maps").map_err(unreadable)?);
    let end = base
        .checked_add(bytes)
        .ok_or_else(|| err!(KVF_ERR_INVALID_ARGUMENT, "the range wraps around"))?;
    let mut next = base;
    for line in maps.lines() {
        let line = line.map_err(unreadable)?;
        // Ascending and disjoint, so the first area that ends behind `next` decides about it.
        let Some(area) = Area::parse(&line).filter(|area| area.end > next) else {
            continue;
        };
        if area.start > next {
            break;
        }
        if !area.read_write {
            bail!(
                KVF_ERR_INVALID_ARGUMENT,
                "address {next:#x} of the range {base:#x}..{end:#x} is not readable and writable"
            );
        }
        next = area.end;
        if next >= end {
            return Ok(());
        }
    }
    bail!(
        KVF_ERR_INVALID_ARGUMENT,
        "address {next:#x} of the range {base:#x}..{end:#x} is not mapped"
    )
}
