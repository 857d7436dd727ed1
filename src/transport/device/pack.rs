//! Patterns through a staging buffer: the same runs, one behind the other on one side.

use crate::plan::{Dim, Pattern};

/// The id that a staging buffer has in place of a pool's; agents count from 1.
pub(in crate::transport) const STAGING: u32 = u32::MAX;

/// The pattern with its destination packed from offset `at` of the staging buffer.
pub(in crate::transport) fn into_staging(pattern: &Pattern, at: u64) -> Pattern {
    let mut packed = *pattern;
    packed.dst_pool = STAGING;
    packed.dst_offset = at;
    each_stride(&mut packed, |dim, stride| dim.dst = stride);
    packed
}

/// The pattern with its source packed from offset `at` of the staging buffer.
pub(in crate::transport) fn out_of_staging(pattern: &Pattern, at: u64) -> Pattern {
    let mut packed = *pattern;
    packed.src_pool = STAGING;
    packed.src_offset = at;
    each_stride(&mut packed, |dim, stride| dim.src = stride);
    packed
}

fn each_stride(pattern: &mut Pattern, set: impl Fn(&mut Dim, u64)) {
    let mut stride = pattern.run;
    for dim in pattern.dims[..usize::from(pattern.rank)].iter_mut().rev() {
        set(dim, stride);
        stride *= dim.count;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::span::Runs;

    #[test]
    fn runs_are_packed_in_order_and_keep_the_other_side() {
        let mut pattern = Pattern {
            src_pool: 1,
            dst_pool: 2,
            src_offset: 100,
            dst_offset: 1000,
            run: 8,
            rank: 2,
            ..Pattern::default()
        };
        pattern.dims[0] = Dim {
            count: 2,
            src: 64,
            dst: 640,
        };
        pattern.dims[1] = Dim {
            count: 3,
            src: 16,
            dst: 160,
        };
        let before: Vec<_> = Runs::new(&pattern).collect();
        let into: Vec<_> = Runs::new(&into_staging(&pattern, 32)).collect();
        let out: Vec<_> = Runs::new(&out_of_staging(&pattern, 32)).collect();
        for (i, (src, dst)) in before.iter().enumerate() {
            assert_eq!(into[i], (*src, 32 + 8 * i as u64));
            assert_eq!(out[i], (32 + 8 * i as u64, *dst));
        }
        assert_eq!(before.len(), 6);
    }
}
