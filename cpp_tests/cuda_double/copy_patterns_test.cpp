// The gather/scatter kernel: its host build over plain memory against the plainest loop, and its PTX
// through the double.
#include "fixture.hpp"

#include <copy_patterns.h>

#include <fstream>
#include <random>
#include <sstream>

namespace {

using kvf_kernel::Piece;
using kvf_kernel::Shape;
using kvf_kernel::u32;
using kvf_kernel::u64;

struct Table {
  std::vector<Shape> shapes;
  std::vector<Piece> pieces;

  // Cut into pieces of this many bytes.
  void add(const Shape& shape, u64 src, u64 dst, u32 each = 16 * 1024) {
    shapes.push_back(shape);
    for (u32 begin = 0; begin < shape.bytes; begin += each) {
      pieces.push_back({src, dst, begin, std::min(begin + each, shape.bytes), static_cast<u32>(shapes.size() - 1), 0});
    }
  }
};

Shape shape_of(u32 run, const std::vector<kvf_kernel::Dim>& dims) {
  Shape shape{};
  shape.run = shape.bytes = run;
  shape.rank = static_cast<u32>(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    shape.dims[i] = dims[i];
    shape.bytes *= dims[i].count;
  }
  return shape;
}

// Memory without a driver; faults on a word that is not aligned, as a device does.
struct PlainMemory {
  template <class T>
  T load(u64 address) {
    check<T>(address);
    T value;
    std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return value;
  }
  template <class T>
  void store(u64 address, const T& value) {
    check<T>(address);
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
    ++stores;
    bytes += sizeof value;
  }
  template <class T>
  static void check(u64 address) {
    if (address % alignof(T) != 0) throw std::runtime_error("not aligned");
  }
  u64 stores = 0, bytes = 0;
};

// All threads of a grid; returns what was stored.
PlainMemory run(const Table& table, u32 blocks, u32 threads) {
  PlainMemory memory;
  for (u32 block = blocks; block-- > 0;) {
    for (u32 thread = 0; thread < threads; ++thread) {
      kvf_kernel::copy_patterns(memory, reinterpret_cast<u64>(table.shapes.data()),
                                reinterpret_cast<u64>(table.pieces.data()),
                                static_cast<u32>(table.pieces.size()), block, blocks, thread, threads);
    }
  }
  return memory;
}

// What a piece means, without any cleverness.
void plainest(const Shape& shape, u32 d, const unsigned char* src, unsigned char* dst) {
  if (d == kvf_kernel::kMaxDims || d == shape.rank) {
    for (u32 i = 0; i < shape.run; ++i) dst[i] = src[i];
    return;
  }
  for (u32 n = 0; n < shape.dims[d].count; ++n) {
    plainest(shape, d + 1, src + n * shape.dims[d].src, dst + n * shape.dims[d].dst);
  }
}

size_t extent(const Shape& shape, bool src) {
  size_t bytes = shape.run;
  for (u32 d = 0; d < shape.rank; ++d) {
    bytes += (shape.dims[d].count - 1) * (src ? shape.dims[d].src : shape.dims[d].dst);
  }
  return bytes;
}

// A shape of random rank whose destination runs do not overlap, all multiples of `unit`.
Shape random_shape(std::mt19937& random, u32 unit) {
  const auto pick = [&](u32 least, u32 most) { return least + random() % (most - least + 1); };
  const u32 run = pick(1, 40) * unit;
  const u32 rank = pick(0, kvf_kernel::kMaxDims);
  std::vector<kvf_kernel::Dim> dims(rank);
  u64 src = run, dst = run;
  for (u32 d = rank; d-- > 0;) {
    dims[d].count = pick(1, 5);
    dims[d].src = (src + pick(0, 3) * unit) * (random() % 8 != 0);  // 0: a broadcast
    dims[d].dst = dst + pick(0, 3) * unit;
    src = std::max<u64>(src, dims[d].count * dims[d].src);
    dst = dims[d].count * dims[d].dst;
  }
  return shape_of(run, dims);
}

class CopyPatterns : public ::testing::TestWithParam<u32> {};

// Any unit from 1 to 16 bytes, bases at any multiple of it, several pieces, odd grids.
TEST_P(CopyPatterns, RandomTablesAgainstThePlainestLoop) {
  const u32 unit = GetParam();
  for (u32 seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed * 31 + unit);
    const u32 count = 1 + random() % 12;
    std::vector<Shape> shapes;
    std::vector<size_t> from, to;
    size_t src_bytes = 64, dst_bytes = 64;
    for (u32 i = 0; i < count; ++i) {
      shapes.push_back(random_shape(random, unit));
      src_bytes += random() % 4 * unit;
      dst_bytes += random() % 4 * unit;
      from.push_back(src_bytes);
      to.push_back(dst_bytes);
      src_bytes += extent(shapes.back(), true);
      dst_bytes += extent(shapes.back(), false);
      dst_bytes = (dst_bytes + unit - 1) / unit * unit;
      src_bytes = (src_bytes + unit - 1) / unit * unit;
    }
    struct alignas(16) Lump {
      unsigned char bytes[16];
    };
    std::vector<Lump> src_memory(src_bytes / 16 + 2), dst_memory(dst_bytes / 16 + 2), wanted;
    auto* src = src_memory[0].bytes;
    for (size_t i = 0; i < src_bytes; ++i) src[i] = static_cast<unsigned char>(random());
    std::memset(dst_memory.data(), 0xee, dst_memory.size() * 16);
    wanted = dst_memory;
    Table table;
    size_t total = 0;
    for (u32 i = 0; i < count; ++i) {
      table.add(shapes[i], reinterpret_cast<u64>(src + from[i]),
                reinterpret_cast<u64>(dst_memory[0].bytes + to[i]), 16 * (1 + random() % 200));
      plainest(shapes[i], 0, src + from[i], wanted[0].bytes + to[i]);
      total += shapes[i].bytes;
    }
    const auto stored = run(table, 1 + random() % 5, 1 + random() % 64);
    ASSERT_EQ(total, stored.bytes) << "unit " << unit << " seed " << seed;
    ASSERT_EQ(0, std::memcmp(wanted.data(), dst_memory.data(), wanted.size() * 16))
        << "unit " << unit << " seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Units, CopyPatterns, ::testing::Values(1, 2, 3, 4, 8, 12, 16, 48));

// Copies that are aligned move in 16-byte words, whatever their axes.
TEST(CopyPatternsWords, AlignedCopiesUseTheWidest) {
  struct alignas(16) Block {
    unsigned char bytes[1 << 16];
  };
  auto src = std::make_unique<Block>(), dst = std::make_unique<Block>();
  Table table;
  const auto from = reinterpret_cast<u64>(src->bytes), to = reinterpret_cast<u64>(dst->bytes);
  table.add(shape_of(256, {{512, 256, 100, 0}}), from, to);
  EXPECT_EQ(25600u / 16, run(table, 2, 32).stores);
  Table odd;
  odd.add(shape_of(256, {{512, 256, 100, 0}}), from + 8, to);
  EXPECT_EQ(25600u / 8, run(odd, 2, 32).stores);
}

// Shapes of several pieces, the last of which is shorter.
TEST(CopyPatternsWords, LargePieces) {
  struct alignas(16) Block {
    unsigned char bytes[200000];
  };
  auto src = std::make_unique<Block>(), dst = std::make_unique<Block>();
  for (size_t i = 0; i < sizeof src->bytes; ++i) src->bytes[i] = static_cast<unsigned char>(i * 13 / 7);
  Table table;
  table.add(shape_of(100004, {}), reinterpret_cast<u64>(src->bytes), reinterpret_cast<u64>(dst->bytes));
  table.add(shape_of(99996, {}), reinterpret_cast<u64>(src->bytes + 100004),
            reinterpret_cast<u64>(dst->bytes + 100004));
  EXPECT_EQ(14u, table.pieces.size());
  run(table, 3, 7);
  EXPECT_EQ(0, std::memcmp(src->bytes, dst->bytes, sizeof src->bytes));
}

// ---- the PTX that ships, through the driver --------------------------------------------------

class Shipped : public Double {
 protected:
  void SetUp() override {
    Double::SetUp();
    std::ifstream file(KERNEL_PTX);
    std::stringstream text;
    text << file.rdbuf();
    CU_OK(cuModuleLoadData(&module, text.str().c_str()));
    CU_OK(cuModuleGetFunction(&function, module, "kvf_copy_patterns"));
  }
  // Copies with a table in device memory.
  CUresult launch(const Table& table, CUstream stream) {
    const size_t shapes = table.shapes.size() * sizeof(Shape), pieces = table.pieces.size() * sizeof(Piece);
    CUdeviceptr at = 0;
    cuMemAlloc_v2(&at, pieces + shapes);
    cuMemcpyHtoD_v2(at, table.pieces.data(), pieces);
    cuMemcpyHtoD_v2(at + pieces, table.shapes.data(), shapes);
    CUdeviceptr second = at + pieces;
    u32 piece_count = static_cast<u32>(table.pieces.size());
    void* params[] = {&second, &at, &piece_count};
    return cuLaunchKernel(function, 2, 1, 1, kvf_kernel::kThreads, 1, 1, 0, stream, params, nullptr);
  }
  CUmodule module = nullptr;
  CUfunction function = nullptr;
};

TEST_F(Shipped, CopiesDeviceMemory) {
  std::vector<unsigned char> host(1 << 16), back(1 << 15);
  for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<unsigned char>(i * 31 / 5);
  const CUdeviceptr src = filled(host.size(), 0), dst = filled(back.size(), 0);
  CU_OK(cuMemcpyHtoD_v2(src, host.data(), host.size()));
  Table table;  // every second run of 256
  table.add(shape_of(256, {{512, 256, 128, 0}}), src, dst);
  CU_OK(launch(table, nullptr));
  CU_OK(cuMemcpyDtoH_v2(back.data(), dst, back.size()));
  for (size_t i = 0; i < back.size(); ++i) ASSERT_EQ(host[i / 256 * 512 + i % 256], back[i]) << i;
}

TEST_F(Shipped, ReadsAndWritesPinnedMemory) {
  void* pinned = nullptr;
  CU_OK(cuMemHostAlloc(&pinned, 4096, 0));
  std::memset(pinned, 7, 4096);
  const CUdeviceptr dst = filled(4096, 0);
  Table table;
  table.add(shape_of(4096, {}), reinterpret_cast<u64>(pinned), dst);
  CU_OK(launch(table, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(7, byte_at(dst + 4095));
}

TEST_F(Shipped, OneByteTooManyIsAFault) {
  const CUdeviceptr src = filled(4096, 1), dst = filled(4095, 0);
  Table table;
  table.add(shape_of(4096, {}), src, dst);
  CU_OK(launch(table, nullptr));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
  EXPECT_EQ(1u, books().violations);
}

}  // namespace
