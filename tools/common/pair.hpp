// SPDX-License-Identifier: Apache-2.0
// A source and a destination agent whose memory is cut into equal blocks, in one process or two.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <kvferry.hpp>
#include <optional>
#include <string>
#include <vector>

#include "channel.hpp"

namespace kvferry::tools {

// What both sides are made from.
struct Setup {
  std::string memory = "pool";      // "pool": made by kvferry, "own": mmap() of this tool
  std::string transports = "shm";   // as in kvf_agent_config
  std::uint64_t block_size = 4096;  // bytes, a multiple of 64
  std::uint64_t pool_bytes = 0;     // of the source, filled with a pattern
  std::uint64_t room_bytes = 0;     // of the destination
  std::uint32_t workers = 1;
  std::uint64_t spin_us = 0;
  std::string listen, advertise;  // of this process
  NLOHMANN_DEFINE_TYPE_INTRUSIVE(Setup, memory, transports, block_size, pool_bytes, room_bytes,
                                 workers, spin_us)
};

// Memory of this tool, every page present.
class Anonymous {
 public:
  Anonymous() = default;
  explicit Anonymous(std::uint64_t bytes);
  Anonymous(Anonymous&& other) noexcept;
  Anonymous& operator=(Anonymous&& other) noexcept;
  ~Anonymous();
  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
};

// One agent with one pool of blocks.
class Side {
 public:
  Side(const Setup& setup, std::uint64_t bytes, const char* name);

  kvferry::Agent& agent() noexcept { return agent_; }
  const kvferry::Engine& engine() const noexcept { return engine_; }
  // How long describing and announcing the memory took.
  std::chrono::nanoseconds layout_time() const noexcept { return layout_time_; }
  std::byte* data() const noexcept { return data_; }
  Bytes metadata() const { return engine_.metadata(); }
  // The file behind a pool made by kvferry, found among this process's descriptors. Not owned.
  int pool_fd() const;

 private:
  Anonymous own_;
  kvferry::Agent agent_;
  Pool pool_;
  Engine engine_;
  std::chrono::nanoseconds layout_time_{0};
  std::byte* data_ = nullptr;
};

// The source, filled with the pattern.
class Source {
 public:
  explicit Source(const Setup& setup);

  Side& side() noexcept { return side_; }
  // Offers blocks; the ticket. The publication is kept until settle().
  Bytes publish(const std::vector<std::int32_t>& slots);
  // Waits until every publication has ended, and tells how the worst of them did.
  kvf_status settle(std::chrono::nanoseconds timeout);

 private:
  Side side_;
  std::uint64_t next_ = 1;
  std::vector<Publication> publications_;
};

// The destination.
class Destination {
 public:
  Destination(const Setup& setup, const Bytes& source_metadata);

  Side& side() noexcept { return side_; }
  const Peer& peer() const noexcept { return peer_; }
  // How long it took until the peer was ready: connected, its memory mapped and populated.
  std::chrono::nanoseconds peer_time() const noexcept { return peer_time_; }
  // Pulls the blocks of a ticket into slots 0, 1, ..., or into those given.
  Transfer pull(const Bytes& ticket, std::size_t blocks);
  Transfer pull(const Bytes& ticket, const std::vector<std::int32_t>& to);
  // Overwrites the first blocks, or those given, so that nothing old can pass for new.
  void clear(std::size_t blocks);
  void clear(const std::vector<std::int32_t>& to);
  // Compares blocks 0, 1, ..., or `to`, with the source's blocks `from`, every byte; throws on the
  // first that differs.
  void compare(const std::vector<std::int32_t>& from) const;
  void compare(const std::vector<std::int32_t>& from, const std::vector<std::int32_t>& to) const;

 private:
  std::uint64_t block_size_;
  Side side_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Peer peer_;
  std::chrono::nanoseconds peer_time_{0};
  std::vector<std::int32_t> slots_;
};

// A source in a second process.
class RemoteSource {
 public:
  RemoteSource(Child& child, const Setup& setup);
  ~RemoteSource();

  const Bytes& metadata() const noexcept { return metadata_; }
  pid_t pid() const noexcept { return child_.pid(); }
  std::uint64_t address() const noexcept { return address_; }
  const Fd& pool_fd() const noexcept { return pool_fd_; }
  Bytes publish(const std::vector<std::int32_t>& slots);
  std::vector<Bytes> publish_each(const std::vector<std::int32_t>& slots);
  // Throws unless every publication was read to its end.
  void settle();
  // A request for the program's own hook, see serve_source().
  Json call(const Json& request) { return child_.call(request); }

 private:
  Child& child_;
  Bytes metadata_;
  std::uint64_t address_ = 0;
  Fd pool_fd_;
};

// Answers requests of the second process that are none of a RemoteSource; called with no source
// when that ends.
using SourceHook = std::function<Json(Source* source, const Json& request)>;

// The second process's main loop.
int serve_source(int fd, const SourceHook& hook = nullptr);

// The 8 bytes of the pattern at a multiple of 8.
constexpr std::uint64_t pattern(std::uint64_t offset) noexcept {
  return offset / 8 * 0x9E3779B97F4A7C15ull + 1;
}

}  // namespace kvferry::tools
