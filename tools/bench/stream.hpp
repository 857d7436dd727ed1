// SPDX-License-Identifier: Apache-2.0
// The limit of the transports through a socket: the same blocks through the barest stream there is.
// One message names all blocks of a batch, the answer is their bytes, sent about 1 MiB at a time
// and received straight into the scattered destinations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include "bare.hpp"

namespace kvferry::tools {

// The source's end: a thread for each connection, all ended with the object.
class StreamServer {
 public:
  // Sends blocks of `block_size` bytes out of `memory`. `family` is "tcp" or "unix". A thread looks
  // at its socket for `spin_us` before it sleeps.
  StreamServer(const std::string& family, const std::byte* memory, std::uint64_t memory_bytes,
               std::uint64_t block_size, std::uint64_t spin_us);
  ~StreamServer();
  StreamServer(StreamServer&&) = delete;
  // Where to connect: a port of the loopback interface, or the number in the socket's name.
  std::uint64_t place() const noexcept { return place_; }

 private:
  void accept_all();
  void serve(int fd) const;

  const std::byte* memory_;
  std::uint64_t memory_bytes_, block_size_, spin_us_;
  bool tcp_;
  std::uint64_t place_ = 0;
  Fd listener_;
  std::thread acceptor_;
  std::list<std::thread> threads_;  // touched by the acceptor, then by the destructor
  std::list<Fd> connections_;
};

// The destination's end: one connection for each thread of the team.
std::unique_ptr<Bare> stream_reads(Team& team, const std::string& family, std::uint64_t place,
                                   std::uint64_t block_size, std::uint64_t spin_us);

}  // namespace kvferry::tools
