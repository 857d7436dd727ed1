// The gather/scatter kernel: any number of strided copies in one launch. One body for two compilers:
// NVRTC makes the PTX that ships (copy_patterns.cu, scripts/ptx), g++ makes what the tests and the
// test double of the driver run.
//
// A table holds shapes (a run of bytes, repeated over up to five axes) and pieces (which bytes of such
// a shape are copied, counted through its axes, and where it is read and written). Pieces are small
// and of similar size; they are dealt out to the grid's blocks, each of which reads its piece and the
// shape, and nothing else: the table may lie in host memory, where a look takes a microsecond.
#pragma once

#ifdef __CUDACC__
#define KVF_KERNEL_INLINE __device__ __forceinline__
#define KVF_KERNEL_UNROLL _Pragma("unroll")
#else
#define KVF_KERNEL_INLINE inline
#define KVF_KERNEL_UNROLL
#endif

namespace kvf_kernel {

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 kMaxDims = 5;
constexpr u32 kThreads = 256;  // of a block; any number works

struct Dim {
  u64 src;    // bytes between repetitions where it is read
  u64 dst;    // bytes between repetitions where it is written
  u32 count;  // repetitions, at least 1
  u32 reserved;
};

// Less than 2 GiB, because 32-bit divisions are several times faster.
struct Shape {
  u32 run;    // contiguous bytes, at least 1
  u32 bytes;  // run times all counts, less than 2^31
  u32 rank;   // axes in use
  u32 reserved;
  Dim dims[kMaxDims];  // outermost first
};

struct alignas(16) Piece {
  u64 src;    // device-readable address of the shape's first byte
  u64 dst;    // device-writable address of the shape's first byte
  u32 begin;  // which of the shape's bytes: a multiple of 16
  u32 end;    // a multiple of 16, or the shape's last
  u32 shape;  // index
  u32 reserved;
};

static_assert(sizeof(Dim) == 24 && sizeof(Shape) == 136 && sizeof(Piece) == 32, "as mod.rs has them");

// What a thread moves at once.
template <u32 kBytes>
struct Word;
template <>
struct Word<1> {
  unsigned char a;
};
template <>
struct Word<2> {
  unsigned short a;
};
template <>
struct Word<4> {
  u32 a;
};
template <>
struct alignas(8) Word<8> {
  u32 a, b;
};
template <>
struct alignas(16) Word<16> {
  u32 a, b, c, d;
};

// Where a byte of a piece lies, from its first byte on: `at` counts through run and axes.
KVF_KERNEL_INLINE void locate(const Shape& shape, u32 at, u64& src, u64& dst) {
  u32 row = at / shape.run;
  src = dst = at - row * shape.run;
  KVF_KERNEL_UNROLL
  for (u32 back = 1; back <= kMaxDims; ++back) {
    const Dim& dim = shape.dims[kMaxDims - back];
    if (kMaxDims - back >= shape.rank) continue;
    const u32 next = row / dim.count;
    const u64 n = row - next * dim.count;
    src += n * dim.src;
    dst += n * dim.dst;
    row = next;
  }
}

// One thread's part of a piece. Four loads are on their way before the
// first store, since each takes as long as hundreds of instructions.
template <u32 kBytes, class Memory>
KVF_KERNEL_INLINE void copy_words(Memory& memory, const Shape& shape, const Piece& piece, u32 thread,
                                  u32 threads) {
  constexpr u32 kAtOnce = 4;
  const u32 step = threads * kBytes;
  for (u32 at = piece.begin + thread * kBytes; at < piece.end; at += kAtOnce * step) {
    Word<kBytes> words[kAtOnce];
    u64 to[kAtOnce];
    KVF_KERNEL_UNROLL
    for (u32 i = 0; i < kAtOnce; ++i) {
      if (at + i * step >= piece.end) continue;
      u64 src = 0;
      locate(shape, at + i * step, src, to[i]);
      words[i] = memory.template load<Word<kBytes>>(piece.src + src);
    }
    KVF_KERNEL_UNROLL
    for (u32 i = 0; i < kAtOnce; ++i) {
      if (at + i * step < piece.end) memory.store(piece.dst + to[i], words[i]);
    }
  }
}

// The widest word that everything about the piece is a multiple of. Then no word crosses the end
// of a run or of a piece.
KVF_KERNEL_INLINE u32 word_bytes(const Shape& shape, const Piece& piece) {
  u64 all = piece.src | piece.dst | shape.run | 16;
  KVF_KERNEL_UNROLL
  for (u32 d = 0; d < kMaxDims; ++d) {
    if (d < shape.rank) all |= shape.dims[d].src | shape.dims[d].dst;
  }
  return static_cast<u32>(all & (~all + 1));
}

template <class Memory>
KVF_KERNEL_INLINE void copy_piece(Memory& memory, const Shape& shape, const Piece& piece, u32 thread,
                                  u32 threads) {
  switch (word_bytes(shape, piece)) {
    case 16: return copy_words<16>(memory, shape, piece, thread, threads);
    case 8: return copy_words<8>(memory, shape, piece, thread, threads);
    case 4: return copy_words<4>(memory, shape, piece, thread, threads);
    case 2: return copy_words<2>(memory, shape, piece, thread, threads);
    default: return copy_words<1>(memory, shape, piece, thread, threads);
  }
}

// The whole kernel for one thread. `shapes` and `pieces` are addresses of the table's two arrays.
template <class Memory>
KVF_KERNEL_INLINE void copy_patterns(Memory& memory, u64 shapes, u64 pieces, u32 piece_count, u32 block,
                                     u32 blocks, u32 thread, u32 threads) {
  for (u64 at = block; at < piece_count; at += blocks) {
    const Piece piece = memory.template load<Piece>(pieces + at * sizeof(Piece));
    const Shape shape = memory.template load<Shape>(shapes + u64{piece.shape} * sizeof(Shape));
    copy_piece(memory, shape, piece, thread, threads);
  }
}

}  // namespace kvf_kernel
