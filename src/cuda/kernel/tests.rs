//! The table, against the plainest loop; its layout, against the header that the kernel is made of.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::process::Command;

use proptest::prelude::*;

use super::*;

/// The bytes of the pieces, as (source, destination, length) of runs, in the kernel's order.
fn runs(table: &Table) -> Vec<(u64, u64, u64)> {
    let mut all = Vec::new();
    for piece in &table.pieces {
        let shape = &table.shapes[piece.shape as usize];
        assert!(piece.begin.is_multiple_of(16) && piece.begin < piece.end);
        assert!(piece.end.is_multiple_of(16) || piece.end == shape.bytes);
        let dims = &shape.dims[..shape.rank as usize];
        let rows: u32 = dims.iter().map(|d| d.count).product();
        assert_eq!(
            u64::from(shape.run) * u64::from(rows),
            u64::from(shape.bytes)
        );
        let mut at = piece.begin;
        while at < piece.end {
            let (mut row, within) = (at / shape.run, at % shape.run);
            let (mut src, mut dst) = (piece.src + u64::from(within), piece.dst + u64::from(within));
            for dim in dims.iter().rev() {
                src += u64::from(row % dim.count) * dim.src;
                dst += u64::from(row % dim.count) * dim.dst;
                row /= dim.count;
            }
            let length = (shape.run - within).min(piece.end - at);
            all.push((src, dst, u64::from(length)));
            at += length;
        }
    }
    all
}

/// Neighbouring runs joined, so that both sides cut alike.
fn joined(runs: Vec<(u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
    let mut all: Vec<(u64, u64, u64)> = Vec::new();
    for (src, dst, run) in runs {
        match all.last_mut() {
            Some(last) if last.0 + last.2 == src && last.1 + last.2 == dst => last.2 += run,
            _ => all.push((src, dst, run)),
        }
    }
    all
}

fn plainest(src: u64, dst: u64, run: u64, axes: &[Dim]) -> Vec<(u64, u64, u64)> {
    match axes.split_first() {
        None if run == 0 => Vec::new(),
        None => vec![(src, dst, run)],
        Some((axis, rest)) => (0..axis.count)
            .flat_map(|n| plainest(src + n * axis.src, dst + n * axis.dst, run, rest))
            .collect(),
    }
}

proptest! {
    #[test]
    #[cfg_attr(miri, ignore)]
    fn copies_become_the_same_bytes(
        run in 0u64..200,
        axes in prop::collection::vec((0u64..5, 0u64..300, 0u64..300), 0..=MAX_DIMS),
        times in 1u64..4,
    ) {
        let axes: Vec<Dim> =
            axes.into_iter().map(|(count, src, dst)| Dim { count, src, dst }).collect();
        let mut table = Table::new();
        let mut expected = Vec::new();
        for n in 0..times {
            table.push(n << 20, n << 30, run, &axes).unwrap();
            expected.extend(plainest(n << 20, n << 30, run, &axes));
        }
        prop_assert_eq!(joined(runs(&table)), joined(expected));
        prop_assert!(table.shapes.len() <= 1);
    }
}

#[test]
fn large_copies_are_cut() {
    let mut table = Table::new();
    let run = (5u64 << 30) + 7;
    table.push(1 << 40, 1 << 41, run, &[]).unwrap();
    assert_eq!(joined(runs(&table)), [(1 << 40, 1 << 41, run)]);
    assert!(table.pieces.len() > 1);

    table.clear();
    let axes = [
        Dim {
            count: 3,
            src: 1 << 33,
            dst: 1 << 34,
        },
        Dim {
            count: 3 << 10,
            src: 2 << 20,
            dst: 1 << 20,
        },
    ];
    table.push(0, 0, 1 << 20, &axes).unwrap();
    assert_eq!(joined(runs(&table)), joined(plainest(0, 0, 1 << 20, &axes)));
    assert!(
        table
            .shapes
            .iter()
            .all(|shape| u64::from(shape.bytes) < MAX_SHAPE)
    );
}

#[test]
fn blocks_of_one_shape_share_it() {
    let mut table = Table::new();
    let axes = [Dim {
        count: 8,
        src: 4096,
        dst: 8192,
    }];
    for block in 0..4096 {
        table.push(block << 20, block << 21, 256, &axes).unwrap();
    }
    assert_eq!((table.shapes.len(), table.pieces.len()), (1, 4096));
    assert_eq!(table.bytes(), 136 + 4096 * 32);
    let launch = table.launch(0x1000, 132);
    assert_eq!(launch.shapes, 0x1000 + 4096 * 32);
    assert_eq!((launch.piece_count, launch.blocks), (4096, 132 * 8));
    let mut short = vec![0; table.bytes() - 1];
    assert!(table.write(&mut short).is_err());
    let mut written = vec![0; table.bytes()];
    table.write(&mut written).unwrap();
    assert_eq!(&written[32..40], &(1u64 << 20).to_ne_bytes());
    assert_eq!(&written[4096 * 32..4096 * 32 + 4], &256u32.to_ne_bytes());
}

#[test]
fn too_much_is_refused() {
    let mut table = Table::new();
    let axis = Dim {
        count: 2,
        src: 1,
        dst: 1,
    };
    assert!(table.push(0, 0, 1, &[axis; MAX_DIMS + 1]).is_err());
    let axis = Dim {
        count: 1 << 40,
        src: 1,
        dst: 1,
    };
    assert!(table.push(0, 0, 1 << 30, &[axis]).is_err());
}

#[test]
fn the_ptx_has_the_entry() {
    let text = PTX.to_str().unwrap();
    assert!(text.contains(".version 8.0") && text.contains(".target sm_70"));
    assert!(text.contains(&format!(".visible .entry {}(", ENTRY.to_str().unwrap())));
}

/// Sizes and offsets, as a C++ compiler sees the header.
#[test]
#[cfg_attr(miri, ignore)]
fn the_layout_is_the_headers() {
    use std::mem::offset_of;
    let checks = [
        ("sizeof(Dim)", size_of::<Axis>()),
        ("offsetof(Dim, src)", offset_of!(Axis, src)),
        ("offsetof(Dim, dst)", offset_of!(Axis, dst)),
        ("offsetof(Dim, count)", offset_of!(Axis, count)),
        ("sizeof(Shape)", size_of::<Shape>()),
        ("offsetof(Shape, run)", offset_of!(Shape, run)),
        ("offsetof(Shape, bytes)", offset_of!(Shape, bytes)),
        ("offsetof(Shape, rank)", offset_of!(Shape, rank)),
        ("offsetof(Shape, dims)", offset_of!(Shape, dims)),
        ("sizeof(Piece)", size_of::<Piece>()),
        ("offsetof(Piece, src)", offset_of!(Piece, src)),
        ("offsetof(Piece, dst)", offset_of!(Piece, dst)),
        ("offsetof(Piece, begin)", offset_of!(Piece, begin)),
        ("offsetof(Piece, end)", offset_of!(Piece, end)),
        ("offsetof(Piece, shape)", offset_of!(Piece, shape)),
        ("kMaxDims", MAX_DIMS),
        ("kThreads", THREADS as usize),
        ("alignof(Piece)", align_of::<Piece>()),
    ];
    let mut program = String::from(
        "#include <copy_patterns.h>\n#include <cstddef>\nusing namespace kvf_kernel;\n",
    );
    for (what, value) in checks {
        program += &format!("static_assert({what} == {value}, \"{what}\");\n");
    }
    let dir = std::env::temp_dir().join(format!("kvferry-kernel-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("layout.cpp");
    std::fs::write(&file, program).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernel");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let output = Command::new(&compiler)
        .args(["-std=c++17", "-fsyntax-only", "-I"])
        .args([&include, &file])
        .output()
        .unwrap_or_else(|e| panic!("no C++ compiler {compiler}: {e}"));
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
