// SPDX-License-Identifier: Apache-2.0
// The limits: the same bytes moved by the barest loop there is, with as many threads.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "channel.hpp"

namespace kvferry::tools {

// The calling thread and `threads - 1` sleeping ones.
class Team {
 public:
  explicit Team(unsigned threads);
  ~Team();
  unsigned size() const noexcept { return static_cast<unsigned>(others_.size()) + 1; }
  // Runs `part` once on every thread; returns when all have returned.
  void run(const std::function<void()>& part);

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void()>* part_ = nullptr;
  std::uint64_t round_ = 0;
  unsigned running_ = 0;
  bool ending_ = false;
  std::vector<std::thread> others_;
};

using Slots = std::vector<std::int32_t>;

// Moves blocks `from` of the source into blocks `to` of the memory at `base`, in one of several
// ways.
class Bare {
 public:
  virtual ~Bare() = default;
  virtual std::vector<std::string> ways() const = 0;
  virtual void move(std::size_t way, const Slots& from, const Slots& to, std::byte* base) = 0;
};

// Copies out of the source's own pool file, mapped and populated as kvferry maps it: memcpy, and
// what this processor has of streaming stores and prefetching.
std::unique_ptr<Bare> mapped_copies(Team& team, const Fd& pool, std::uint64_t pool_bytes,
                                    std::uint64_t block_size);

// The same out of memory of this process.
std::unique_ptr<Bare> local_copies(Team& team, const std::byte* memory, std::uint64_t block_size);

// process_vm_readv of the source's memory, at most 1024 ranges a call.
std::unique_ptr<Bare> process_reads(Team& team, pid_t process, std::uint64_t address,
                                    std::uint64_t block_size);

}  // namespace kvferry::tools
