//! Every kernel of this machine against a naive loop.

use proptest::prelude::*;

use super::rows::{self, LEAD, Row, Rows};
use super::*;

/// What the destination holds before, and must hold after wherever nothing was to be written.
const CANARY: u8 = 0xA5;
/// Canary bytes on both sides.
const MARGIN: usize = 256;

fn kernels() -> Vec<Kernel> {
    let mut all = vec![plain::KERNEL];
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    all.extend(x86_64::kernels());
    all
}

/// A copy in offsets, to be laid over buffers.
#[derive(Clone, Debug)]
struct Shape {
    src: usize,
    dst: usize,
    run: usize,
    dims: Vec<Dim>,
}

impl Shape {
    /// Offsets of all runs, naively.
    fn runs(&self) -> Vec<(usize, usize)> {
        let mut at = vec![(self.src, self.dst)];
        for dim in &self.dims {
            at = at
                .iter()
                .flat_map(|&(src, dst)| {
                    (0..dim.count).map(move |i| (src + i * dim.src, dst + i * dim.dst))
                })
                .collect();
        }
        at
    }

    fn place(&self, src: *const u8, dst: *mut u8) -> Place {
        Place {
            src: src.wrapping_add(self.src),
            dst: dst.wrapping_add(self.dst),
        }
    }

    /// With places of the same run and axes.
    fn strided<'a>(&'a self, places: &'a [Place]) -> Strided<'a> {
        Strided {
            run: self.run,
            dims: &self.dims,
            places,
        }
    }
}

/// A buffer whose first byte is at a multiple of 64.
struct Aligned(Vec<[u64; 8]>);

impl Aligned {
    fn new(bytes: usize) -> Aligned {
        Aligned(vec![[0; 8]; bytes.div_ceil(64) + 1])
    }

    fn base(&mut self) -> *mut u8 {
        let at = self.0.as_mut_ptr().cast::<u8>();
        at.wrapping_add(at.addr().wrapping_neg() % 64)
    }

    fn slice(&mut self, bytes: usize) -> &mut [u8] {
        assert!(bytes <= (self.0.len() - 1) * 64);
        // SAFETY: `base` skips less than the 64 bytes that were allocated in excess.
        unsafe { std::slice::from_raw_parts_mut(self.base(), bytes) }
    }
}

/// Copies `shapes` with `copy` and compares the whole destination with a naive loop's.
fn check(shapes: &[Shape], who: &str, copy: impl FnOnce(&[Strided<'_>])) {
    let (mut src_end, mut dst_end) = (0, 0);
    for shape in shapes {
        for (src, dst) in shape.runs() {
            src_end = src_end.max(src + shape.run);
            dst_end = dst_end.max(dst + shape.run);
        }
    }
    dst_end += MARGIN;
    let (mut from, mut to) = (Aligned::new(src_end), Aligned::new(dst_end));
    // A period that no power of two divides, so that a shifted line shows.
    let period: Vec<u8> = (0..251).collect();
    for part in from.slice(src_end).chunks_mut(251) {
        part.copy_from_slice(&period[..part.len()]);
    }
    let mut want = vec![CANARY; dst_end];
    for shape in shapes {
        for (src, dst) in shape.runs() {
            want[dst..dst + shape.run].copy_from_slice(&from.slice(src_end)[src..src + shape.run]);
        }
    }
    to.slice(dst_end).fill(CANARY);
    let (src, dst) = (from.base(), to.base());
    let places: Vec<_> = shapes.iter().map(|shape| shape.place(src, dst)).collect();
    // Those of one shape that follow each other are one copy at several places.
    let mut batch = Vec::new();
    let mut left = &places[..];
    for alike in shapes.chunk_by(|a, b| a.run == b.run && a.dims == b.dims) {
        let (now, later) = left.split_at(alike.len());
        batch.push(alike[0].strided(now));
        left = later;
    }
    copy(&batch);
    let got = to.slice(dst_end);
    if got != want {
        let at = (0..dst_end).find(|&i| got[i] != want[i]).unwrap();
        panic!(
            "{who}: byte {at} of the destination is {:#x}, should be {:#x}, for {shapes:?}",
            got[at], want[at]
        );
    }
}

fn check_all(shapes: &[Shape]) {
    for kernel in kernels() {
        // SAFETY: `check` lays the batch over buffers that hold it.
        check(shapes, kernel.name, |batch| unsafe {
            run_with(kernel, batch)
        });
    }
    // SAFETY: as above.
    check(shapes, "run", |batch| unsafe { run(batch) });
}

/// One axis before the extent of what lies inside it is known.
#[derive(Clone, Copy, Debug)]
struct Axis {
    count: usize,
    src_gap: usize,
    dst_gap: usize,
    dense: bool,
}

/// Builds disjoint destinations: each axis steps over all that is inside it.
fn shape(src: usize, dst: usize, run: usize, axes: &[Axis]) -> Shape {
    let (mut src_extent, mut dst_extent) = (run, run);
    let mut dims: Vec<Dim> = axes
        .iter()
        .map(|axis| {
            let gap = |gap| if axis.dense { 0 } else { gap };
            let dim = Dim {
                count: axis.count,
                src: src_extent + gap(axis.src_gap),
                dst: dst_extent + gap(axis.dst_gap),
            };
            src_extent = dim.src * axis.count;
            dst_extent = dim.dst * axis.count;
            dim
        })
        .collect();
    dims.reverse();
    Shape {
        src,
        dst: MARGIN + dst,
        run,
        dims,
    }
}

fn axis() -> impl Strategy<Value = Axis> {
    let gap = || prop_oneof![Just(0usize), (1usize..6).prop_map(|n| n * 64), 0usize..200];
    (0usize..4, gap(), gap(), any::<bool>()).prop_map(|(count, src_gap, dst_gap, dense)| Axis {
        // Empty axes have their own test; here they would leave nothing to look at.
        count: count.max(1),
        src_gap,
        dst_gap,
        dense,
    })
}

fn shapes() -> impl Strategy<Value = Shape> {
    let run = prop_oneof![0usize..5000, 0usize..200, (1usize..40).prop_map(|n| n * 64)];
    let align = || prop_oneof![Just(0usize), 0usize..64];
    (run, prop::collection::vec(axis(), 0..=5), align(), align())
        .prop_map(|(run, axes, src, dst)| shape(src, dst, run, &axes))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: if cfg!(miri) { 4 } else { 256 },
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn any_shape_matches_the_naive_loop(shape in shapes()) {
        check_all(&[shape]);
    }

    #[test]
    fn any_batch_matches_the_naive_loop(
        runs in prop::collection::vec((0usize..700, 0usize..64, 0usize..100_000), 0..100),
    ) {
        let mut dst = MARGIN;
        let batch: Vec<_> = runs
            .iter()
            .map(|&(run, gap, src)| {
                dst += gap;
                let shape = Shape { src, dst, run, dims: Vec::new() };
                dst += run;
                shape
            })
            .collect();
        check_all(&batch);
    }
}

#[test]
fn every_alignment_of_both_sides() {
    let runs: &[usize] = if cfg!(miri) {
        &[1, 65]
    } else {
        &[
            1, 63, 64, 65, 128, 300, 1023, 1024, 4096, 5000, 16384, 20_001,
        ]
    };
    for &run in runs {
        for src in 0..64 {
            for dst in [src, 0, src * 7 % 64, 63 - src] {
                check_all(&[shape(src, dst, run, &[])]);
            }
        }
    }
}

#[test]
fn head_slices_of_a_block_table() {
    // [block, 2, token, half of the heads], longer than one chunk of rows.
    for run in [64, 96, 128, 256, 512] {
        for (src, dst) in [(2 * run, run), (run, 2 * run)] {
            let dims = vec![
                Dim {
                    count: 2,
                    src: 16 * src + 64,
                    dst: 16 * dst,
                },
                Dim {
                    count: 16,
                    src,
                    dst,
                },
            ];
            let blocks = if cfg!(miri) { 3 } else { 50 };
            let batch: Vec<_> = (0..blocks)
                .map(|i| Shape {
                    src: i * 7 % blocks * (32 * src + 64),
                    dst: MARGIN + i * 32 * dst,
                    run,
                    dims: dims.clone(),
                })
                .collect();
            check_all(&batch);
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "too many bytes")]
fn large_batches_stream() {
    let total = 3 * STREAM_FROM;
    assert_eq!(pick(total).streams, cfg!(target_arch = "x86_64"));
    assert!(!pick(STREAM_FROM - 1).streams);
    check_all(&[shape(3, 5, total as usize, &[])]);
    check_all(&[shape(0, 0, total as usize, &[])]);
    let blocks: Vec<_> = (0..96)
        .map(|i| shape(i * 31 % 96 * 65_536, i * 65_536, 65_536, &[]))
        .collect();
    check_all(&blocks);
}

#[test]
fn later_copies_win() {
    let twice = |src| Shape {
        src,
        dst: MARGIN,
        run: 4096,
        dims: Vec::new(),
    };
    check_all(&[twice(0), twice(100), twice(7)]);
}

#[test]
fn nothing_to_do() {
    check_all(&[]);
    check_all(&[shape(0, 0, 0, &[])]);
    let axis = |count| Axis {
        count,
        src_gap: 64,
        dst_gap: 64,
        dense: false,
    };
    for empty in 0..4 {
        let axes: Vec<_> = (0..4)
            .map(|i| axis(if i == empty { 0 } else { 3 }))
            .collect();
        check_all(&[shape(0, 0, 64, &axes)]);
    }
    // Not even the pointers matter then, nor do counts that overflow.
    let dims = [
        Dim {
            count: usize::MAX,
            src: 1,
            dst: 1,
        },
        Dim {
            count: 3,
            src: usize::MAX,
            dst: 8,
        },
        Dim {
            count: 0,
            src: 0,
            dst: 0,
        },
        Dim {
            count: usize::MAX,
            src: 64,
            dst: 64,
        },
    ];
    let place = Place {
        src: std::ptr::null(),
        dst: std::ptr::null_mut(),
    };
    let nothing = Strided {
        run: 64,
        dims: &dims,
        places: &[place, place],
    };
    for kernel in kernels() {
        // SAFETY: nothing is read or written.
        unsafe { run_with(kernel, &[nothing]) };
    }
    // SAFETY: nothing is read or written.
    unsafe { run(&[nothing, nothing]) };
}

/// The rows of one copy of 64-byte runs that starts at 0.
fn rows_of(dims: &[Dim]) -> Vec<Row> {
    let place = Place {
        src: std::ptr::null(),
        dst: std::ptr::null_mut(),
    };
    let places = &[place];
    let run = 64;
    Rows::new(&Strided { run, dims, places }).collect()
}

#[test]
fn contiguous_axes_become_one_run() {
    let dims = [
        Dim {
            count: 5,
            src: 768,
            dst: 768,
        },
        Dim {
            count: 1,
            src: 9,
            dst: 9,
        },
        Dim {
            count: 3,
            src: 256,
            dst: 256,
        },
        Dim {
            count: 4,
            src: 64,
            dst: 64,
        },
    ];
    let rows = rows_of(&dims);
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].run, rows[0].count), (64 * 4 * 3 * 5, 1));
}

#[test]
fn axes_that_continue_each_other_become_one_row() {
    let dims = [
        Dim {
            count: 2,
            src: 2048,
            dst: 1024,
        },
        Dim {
            count: 16,
            src: 128,
            dst: 64,
        },
    ];
    let rows = rows_of(&dims);
    assert_eq!(rows.len(), 1);
    assert_eq!((rows[0].run, rows[0].count), (64, 32));
    assert_eq!((rows[0].src_stride, rows[0].dst_stride), (128, 64));
}

#[test]
fn rows_go_outermost_first() {
    let dims = [
        Dim {
            count: 2,
            src: 100_000,
            dst: 50_000,
        },
        Dim {
            count: 2,
            src: 10_000,
            dst: 5_000,
        },
        Dim {
            count: 3,
            src: 1_000,
            dst: 500,
        },
        Dim {
            count: 4,
            src: 100,
            dst: 64,
        },
    ];
    let at: Vec<_> = rows_of(&dims)
        .iter()
        .map(|row| (row.src.addr(), row.dst.addr(), row.count))
        .collect();
    let mut want = Vec::new();
    for a in 0..2 {
        for b in 0..2 {
            for c in 0..3 {
                let unit = a * 100 + b * 10 + c;
                want.push((unit * 1_000, unit * 500, 4));
            }
        }
    }
    assert_eq!(at, want);
}

#[test]
fn the_later_row_is_one_lead_ahead() {
    for (run, lead) in [(LEAD / 4, 4), (LEAD, 1), (10 * LEAD, 1), (64, 8)] {
        for count in [0, 1, 2, 31, 32, 33, 100] {
            let places: Vec<_> = (0..count)
                .map(|i| Place {
                    src: std::ptr::without_provenance(i + 1),
                    dst: std::ptr::null_mut(),
                })
                .collect();
            // However they are given: together, alone, and by three.
            let by = |size| {
                places.chunks(size).map(|places| Strided {
                    run,
                    dims: &[],
                    places,
                })
            };
            let [pairs, alone, by_three] = [count.max(1), 1, 3].map(|size| {
                let batch: Vec<_> = by(size).collect();
                let mut pairs = Vec::new();
                rows::each(&batch, |rows, later| {
                    assert_eq!(rows.len(), later.len());
                    let pair = |(a, b): (&Row, &Row)| (a.src.addr(), b.src.addr(), b.count);
                    pairs.extend(rows.iter().zip(later).map(pair));
                });
                pairs
            });
            assert_eq!((&alone, &by_three), (&pairs, &pairs));
            let want: Vec<_> = (1..=count)
                .map(|i| {
                    if i + lead <= count {
                        (i, i + lead, 1)
                    } else {
                        (i, 0, 0)
                    }
                })
                .collect();
            assert_eq!(pairs, want, "runs of {run} bytes");
        }
    }
}
