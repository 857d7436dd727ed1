//! Byte ranges that are sent or filled in order.

/// Byte ranges in order; neighbours are merged.
#[derive(Default)]
pub(in crate::transport) struct Ranges {
    list: Vec<libc::iovec>,
}

// SAFETY: addresses and lengths; nothing is accessed but by the unsafe calls, whose callers answer
// for the memory.
unsafe impl Send for Ranges {}

/// A position in ranges.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::transport) struct Walk {
    range: usize,
    offset: usize,
}

impl Ranges {
    /// Adds a range. Nothing is accessed before a call that takes the ranges.
    pub fn push(&mut self, base: *mut u8, len: usize) {
        let base: *mut libc::c_void = base.cast();
        match self.list.last_mut() {
            Some(last) if last.iov_base.addr() + last.iov_len == base.addr() => last.iov_len += len,
            _ => self.list.push(libc::iovec {
                iov_base: base,
                iov_len: len,
            }),
        }
    }

    pub fn clear(&mut self) {
        self.list.clear();
    }

    /// As the kernel takes them.
    pub fn as_iovecs(&mut self) -> &mut [libc::iovec] {
        &mut self.list
    }

    /// Appends the next bytes, at most so many, to `out`.
    ///
    /// # Safety
    /// All ranges must be readable; another thread or process may write them meanwhile.
    pub unsafe fn read(&self, at: &mut Walk, bytes: usize, out: &mut Vec<u8>) {
        out.reserve(bytes);
        self.walk(at, bytes, |base, len| {
            let end = out.len();
            // SAFETY: readable by contract; `reserve` has made room behind the end, which nobody
            // else has, and all of it is written before the length says so.
            unsafe {
                std::ptr::copy_nonoverlapping(base, out.as_mut_ptr().add(end), len);
                out.set_len(end + len);
            }
        });
    }

    /// Writes the bytes to where the walk has come; what does not fit is left out.
    ///
    /// # Safety
    /// All ranges must be writable; nobody may hold references to them.
    pub unsafe fn write(&self, at: &mut Walk, bytes: &[u8]) {
        let mut done = 0;
        self.walk(at, bytes.len(), |base, len| {
            // SAFETY: writable by contract; `walk` gives no more than the slice has.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().add(done), base, len) };
            done += len;
        });
    }

    fn walk(&self, at: &mut Walk, mut bytes: usize, mut each: impl FnMut(*mut u8, usize)) {
        while bytes > 0
            && let Some(range) = self.list.get(at.range)
        {
            let len = (range.iov_len - at.offset).min(bytes);
            each(range.iov_base.cast::<u8>().wrapping_add(at.offset), len);
            bytes -= len;
            at.offset += len;
            if at.offset == range.iov_len {
                (at.range, at.offset) = (at.range + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_in_order_however_they_are_cut() {
        let from: Vec<u8> = (0..100).collect();
        for cut in [1, 7, 30, 99, 100, 200] {
            let mut memory = vec![0xee_u8; 120];
            let base = memory.as_mut_ptr();
            let mut ranges = Ranges::default();
            for (at, len) in [(80, 30), (0, 10), (10, 5), (20, 55)] {
                ranges.push(base.wrapping_add(at), len);
            }
            assert_eq!(ranges.as_iovecs().len(), 3); // two are neighbours
            let (mut at, mut back) = (Walk::default(), Walk::default());
            let mut read = Vec::new();
            // SAFETY: the ranges lie in `memory`, to which nobody holds a reference.
            unsafe {
                for piece in from.chunks(cut) {
                    ranges.write(&mut at, piece);
                }
                ranges.write(&mut at, &[1, 2, 3]); // the ranges have ended
                for _ in 0..100_usize.div_ceil(cut) {
                    ranges.read(&mut back, cut, &mut read);
                }
            }
            assert_eq!(read, from);
            assert_eq!(memory[80..110], from[..30]);
            assert_eq!(memory[0..15], from[30..45]);
            assert_eq!(memory[20..75], from[45..]);
            assert!(memory[110..].iter().all(|byte| *byte == 0xee));
        }
    }
}
