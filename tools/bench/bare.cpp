// SPDX-License-Identifier: Apache-2.0
#include "bare.hpp"

#include <sys/mman.h>
#include <sys/uio.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Linux 5.14; older headers lack it.
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace kvferry::tools {

Team::Team(unsigned threads) {
  for (unsigned i = 1; i < threads; ++i) others_.emplace_back([this] { loop(); });
}

Team::~Team() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : others_) thread.join();
}

void Team::loop() {
  std::unique_lock lock(mutex_);
  for (std::uint64_t seen = 0;;) {
    wake_.wait(lock, [&] { return ending_ || round_ != seen; });
    if (ending_) return;
    seen = round_;
    const auto* part = part_;
    lock.unlock();
    (*part)();
    lock.lock();
    if (--running_ == 0) done_.notify_one();
  }
}

void Team::run(const std::function<void()>& part) {
  {
    const std::lock_guard lock(mutex_);
    part_ = &part;
    running_ = static_cast<unsigned>(others_.size());
    ++round_;
  }
  if (!others_.empty()) wake_.notify_all();
  part();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return running_ == 0; });
}

namespace {

// One block; of `next`, the block to come, at most the first lines are prefetched. Sizes are
// multiples of 256 and everything is aligned to 64 bytes, but for plain memcpy.
using CopyBlock = void (*)(std::byte* to, const std::byte* from, std::size_t bytes,
                           const std::byte* next);

struct Way {
  const char* name;
  CopyBlock copy;
};

void plain(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte*) {
  std::memcpy(to, from, bytes);
}

#if defined(__x86_64__)

constexpr std::size_t lead = 1024;         // prefetched ahead in the block itself
constexpr std::size_t next_lines = 16384;  // prefetched of the next block at most

void prefetch4(const std::byte* at) {
  _mm_prefetch(reinterpret_cast<const char*>(at), _MM_HINT_NTA);
  _mm_prefetch(reinterpret_cast<const char*>(at + 64), _MM_HINT_NTA);
  _mm_prefetch(reinterpret_cast<const char*>(at + 128), _MM_HINT_NTA);
  _mm_prefetch(reinterpret_cast<const char*>(at + 192), _MM_HINT_NTA);
}

void memcpy_prefetch(std::byte* to, const std::byte* from, std::size_t bytes,
                     const std::byte* next) {
  const std::size_t some = std::min<std::size_t>(bytes, 4096);
  for (std::size_t i = 0; next && i < some; i += 256) prefetch4(next + i);
  std::memcpy(to, from, bytes);
}

template <bool Prefetch>
[[gnu::target("avx512f")]] void stream512(std::byte* to, const std::byte* from, std::size_t bytes,
                                          const std::byte* next) {
  for (std::size_t i = 0; i < bytes; i += 256) {
    if constexpr (Prefetch) {
      if (next && i < next_lines) prefetch4(next + i);
      prefetch4(from + i + lead);
    }
    const __m512i a = _mm512_load_si512(from + i), b = _mm512_load_si512(from + i + 64),
                  c = _mm512_load_si512(from + i + 128), d = _mm512_load_si512(from + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 192), d);
  }
}

template <bool Prefetch>
[[gnu::target("avx2")]] void stream256(std::byte* to, const std::byte* from, std::size_t bytes,
                                       const std::byte* next) {
  for (std::size_t i = 0; i < bytes; i += 256) {
    if constexpr (Prefetch) {
      if (next && i < next_lines) prefetch4(next + i);
      prefetch4(from + i + lead);
    }
    for (std::size_t j = i; j < i + 256; j += 64) {
      const auto* at = reinterpret_cast<const __m256i*>(from + j);
      const __m256i a = _mm256_load_si256(at), b = _mm256_load_si256(at + 1);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j + 32), b);
    }
  }
}

#endif

std::vector<Way> copies(std::uint64_t block_size) {
  std::vector<Way> all{{"memcpy", plain}};
#if defined(__x86_64__)
  if (block_size % 256 != 0) return all;
  all.push_back({"memcpy_prefetch", memcpy_prefetch});
  if (__builtin_cpu_supports("avx512f")) {
    all.push_back({"stream_avx512", stream512<false>});
    all.push_back({"stream_avx512_prefetch", stream512<true>});
  } else if (__builtin_cpu_supports("avx2")) {
    all.push_back({"stream_avx2", stream256<false>});
    all.push_back({"stream_avx2_prefetch", stream256<true>});
  }
#else
  (void)block_size;
#endif
  return all;
}

void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

class Copies : public Bare {
 public:
  Copies(Team& team, const std::byte* memory, std::uint64_t block_size)
      : team_(team), block_size_(block_size), ways_(copies(block_size)), from_(memory) {}

  std::vector<std::string> ways() const override {
    std::vector<std::string> names;
    for (const Way& way : ways_) names.emplace_back(way.name);
    return names;
  }

  void move(std::size_t way, const Slots& from, const Slots& to, std::byte* base) override {
    const CopyBlock copy = ways_[way].copy;
    const std::size_t piece = block_size_ % piece_bytes == 0 ? piece_bytes : block_size_;
    const std::size_t per_block = block_size_ / piece;
    // About 1 MiB a turn, so that a thread that is held up does not hold up the others.
    const std::size_t turn = std::max<std::size_t>(1, (1 << 20) / piece);
    const std::size_t pieces = from.size() * per_block;
    std::atomic<std::size_t> next{0};
    const auto place = [&](const Slots& slots, std::size_t i) {
      return static_cast<std::size_t>(slots[i / per_block]) * block_size_ + i % per_block * piece;
    };
    team_.run([&] {
      for (std::size_t i; (i = next.fetch_add(turn)) < pieces;) {
        for (const std::size_t end = std::min(i + turn, pieces); i < end; ++i) {
          copy(base + place(to, i), from_ + place(from, i), piece,
               i + 1 < end ? from_ + place(from, i + 1) : nullptr);
        }
      }
      fence();
    });
  }

 private:
  // Blocks that are a multiple of this are cut, so that several threads can serve one.
  static constexpr std::size_t piece_bytes = 4 << 20;

  Team& team_;
  std::uint64_t block_size_;
  std::vector<Way> ways_;

 protected:
  const std::byte* from_;
};

class MappedCopies final : public Copies {
 public:
  MappedCopies(Team& team, const Fd& pool, std::uint64_t pool_bytes, std::uint64_t block_size)
      : Copies(team, nullptr, block_size), bytes_(pool_bytes) {
    void* at = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, pool.get(), 0);
    if (at == MAP_FAILED) {
      throw std::system_error(errno, std::generic_category(), "mapping the source's pool");
    }
    from_ = static_cast<const std::byte*>(at);
    (void)madvise(at, bytes_, MADV_HUGEPAGE);  // as kvferry: a wish that kernels may refuse
    (void)madvise(at, bytes_, MADV_POPULATE_READ);
  }
  ~MappedCopies() override { munmap(const_cast<std::byte*>(from_), bytes_); }

 private:
  std::uint64_t bytes_;
};

class ProcessReads final : public Bare {
 public:
  ProcessReads(Team& team, pid_t process, std::uint64_t address, std::uint64_t block_size)
      : team_(team), process_(process), address_(address), block_size_(block_size) {}

  // In the second way destinations that lie side by side are one range.
  std::vector<std::string> ways() const override {
    return {"process_vm_readv", "process_vm_readv_joined"};
  }

  void move(std::size_t way, const Slots& from, const Slots& to, std::byte* base) override {
    const std::size_t parts = from.size() == 1 ? team_.size() : 1;  // of one block
    const std::size_t piece = block_size_ / parts;
    const std::size_t pieces = from.size() * parts;
    const std::size_t turn =
        std::min<std::size_t>(max_ranges, (pieces + team_.size() - 1) / team_.size());
    std::atomic<std::size_t> next{0};
    std::atomic<int> failed{0};
    team_.run([&] {
      std::vector<iovec> local, remote;
      for (std::size_t i; (i = next.fetch_add(turn)) < pieces;) {
        local.clear();
        remote.clear();
        const auto place = [&](const Slots& slots) {
          return static_cast<std::uint64_t>(slots[i / parts]) * block_size_ + i % parts * piece;
        };
        for (const std::size_t end = std::min(i + turn, pieces); i < end; ++i) {
          const std::size_t bytes = i % parts + 1 == parts ? block_size_ - (parts - 1) * piece
                                                           : piece;
          remote.push_back({reinterpret_cast<void*>(address_ + place(from)), bytes});
          std::byte* const at = base + place(to);
          if (way == 1 && !local.empty() &&
              static_cast<std::byte*>(local.back().iov_base) + local.back().iov_len == at) {
            local.back().iov_len += bytes;
          } else {
            local.push_back({at, bytes});
          }
        }
        read(local, remote, failed);
      }
    });
    if (failed != 0) {
      throw std::system_error(failed, std::generic_category(), "process_vm_readv of the source");
    }
  }

 private:
  static constexpr std::size_t max_ranges = 1024;

  void read(std::vector<iovec>& local, std::vector<iovec>& remote, std::atomic<int>& failed) {
    iovec *to = local.data(), *from = remote.data();
    const iovec *to_end = to + local.size(), *from_end = from + remote.size();
    while (from != from_end) {
      const ssize_t n = process_vm_readv(process_, to, static_cast<unsigned long>(to_end - to),
                                         from, static_cast<unsigned long>(from_end - from), 0);
      if (n <= 0) {
        failed = n < 0 ? errno : EFAULT;
        return;
      }
      skip(to, to_end, static_cast<std::size_t>(n));  // the kernel reads at most 2 GiB at once
      skip(from, from_end, static_cast<std::size_t>(n));
    }
  }

  static void skip(iovec*& range, const iovec* end, std::size_t bytes) {
    while (range != end && bytes >= range->iov_len) bytes -= range++->iov_len;
    if (range != end) {
      range->iov_base = static_cast<std::byte*>(range->iov_base) + bytes;
      range->iov_len -= bytes;
    }
  }

  Team& team_;
  pid_t process_;
  std::uint64_t address_;
  std::uint64_t block_size_;
};

}  // namespace

std::unique_ptr<Bare> mapped_copies(Team& team, const Fd& pool, std::uint64_t pool_bytes,
                                    std::uint64_t block_size) {
  return std::make_unique<MappedCopies>(team, pool, pool_bytes, block_size);
}

std::unique_ptr<Bare> local_copies(Team& team, const std::byte* memory, std::uint64_t block_size) {
  return std::make_unique<Copies>(team, memory, block_size);
}

std::unique_ptr<Bare> process_reads(Team& team, pid_t process, std::uint64_t address,
                                    std::uint64_t block_size) {
  return std::make_unique<ProcessReads>(team, process, address, block_size);
}

}  // namespace kvferry::tools
