// SPDX-License-Identifier: Apache-2.0
#include "stream.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "measure.hpp"

namespace kvferry::tools {

namespace {

constexpr std::size_t max_ranges = 1024;
constexpr std::size_t batch_bytes = 1 << 20;
constexpr int patience_ms = 60'000;  // then the other end is given up

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// Ranges of memory, neighbours joined.
class Ranges {
 public:
  void clear() { list_.clear(); }
  void push(const std::byte* at, std::size_t bytes) {
    auto* base = const_cast<std::byte*>(at);
    if (!list_.empty() && static_cast<std::byte*>(list_.back().iov_base) + list_.back().iov_len == base) {
      list_.back().iov_len += bytes;
    } else {
      list_.push_back({base, bytes});
    }
  }
  std::vector<iovec>& list() { return list_; }

 private:
  std::vector<iovec> list_;
};

// A connected socket and how its thread waits. False: the other end has closed it.
class Socket {
 public:
  // Without spinning, plain blocking calls: no call that finds nothing, no poll.
  Socket(int fd, std::uint64_t spin_us)
      : fd_(fd), flags_(spin_us > 0 ? MSG_DONTWAIT : 0), spin_s_(static_cast<double>(spin_us) * 1e-6) {
    const timeval patience{patience_ms / 1000, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  }

  bool send(std::vector<iovec>& ranges) const { return move(ranges, true); }
  bool receive(std::vector<iovec>& ranges) const { return move(ranges, false); }
  bool receive(void* to, std::size_t bytes) const {
    std::vector<iovec> one{{to, bytes}};
    return receive(one);
  }

 private:
  bool move(std::vector<iovec>& ranges, bool sending) const {
    iovec* at = ranges.data();
    iovec* const end = at + ranges.size();
    while (at != end) {
      msghdr message{};
      message.msg_iov = at;
      message.msg_iovlen = std::min<std::size_t>(static_cast<std::size_t>(end - at), max_ranges);
      const ssize_t n = sending ? sendmsg(fd_, &message, MSG_NOSIGNAL | flags_)
                                : recvmsg(fd_, &message, flags_);
      if (n == 0) return false;
      if (n < 0) {
        if (errno == EINTR) continue;
        if (errno == ECONNRESET || errno == EPIPE) return false;
        if (errno != EAGAIN || flags_ == 0) fail("bare stream");
        wait(sending);
        continue;
      }
      auto left = static_cast<std::size_t>(n);
      while (at != end && left >= at->iov_len) left -= at++->iov_len;
      if (left > 0) {
        at->iov_base = static_cast<std::byte*>(at->iov_base) + left;
        at->iov_len -= left;
      }
    }
    return true;
  }

  void wait(bool sending) const {
    const double until = now() + spin_s_;
    pollfd wanted{fd_, static_cast<short>(sending ? POLLOUT : POLLIN), 0};
    for (;;) {
      const bool spinning = now() < until;
      const int n = poll(&wanted, 1, spinning ? 0 : patience_ms);
      if (n > 0 || (n < 0 && errno == EINTR)) return;
      if (n < 0) fail("poll");
      if (!spinning) throw std::runtime_error("a bare stream stands still");
    }
  }

  int fd_, flags_;
  double spin_s_;
};

union Address {
  sockaddr any;
  sockaddr_in tcp;
  sockaddr_un unix_;
};

// A Unix socket has a name in the abstract namespace that ends with the place.
socklen_t address_of(bool tcp, std::uint64_t place, Address& address) {
  std::memset(&address, 0, sizeof address);
  if (tcp) {
    address.tcp.sin_family = AF_INET;
    address.tcp.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.tcp.sin_port = htons(static_cast<std::uint16_t>(place));
    return sizeof address.tcp;
  }
  address.unix_.sun_family = AF_UNIX;
  const std::string name = "kvferry-bench-" + std::to_string(place);
  std::memcpy(address.unix_.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

class StreamReads final : public Bare {
 public:
  StreamReads(Team& team, const std::string& family, std::uint64_t place,
              std::uint64_t block_size, std::uint64_t spin_us)
      : team_(team), name_(family + "_stream"), block_size_(block_size), spin_us_(spin_us) {
    const bool tcp = family == "tcp";
    for (unsigned i = 0; i < team.size(); ++i) {
      Fd fd(socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      Address address;
      const socklen_t length = address_of(tcp, place, address);
      if (fd.get() < 0 || connect(fd.get(), &address.any, length) != 0) fail("connecting");
      const int on = 1;
      if (tcp) setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      connections_.push_back(std::move(fd));
    }
  }

  std::vector<std::string> ways() const override { return {name_}; }

  void move(std::size_t, const Slots& from, const Slots& to, std::byte* base) override {
    std::atomic<std::size_t> next{0};
    const std::size_t parts = std::min(connections_.size(), from.size());
    std::atomic<bool> failed{false};
    team_.run([&] {
      for (std::size_t part; (part = next.fetch_add(1)) < parts;) {
        const std::size_t begin = from.size() * part / parts;
        const std::size_t end = from.size() * (part + 1) / parts;
        if (!read(connections_[part].get(), from, to, begin, end, base)) failed = true;
      }
    });
    if (failed) throw std::runtime_error("the source has closed a bare stream");
  }

 private:
  bool read(int fd, const Slots& from, const Slots& to, std::size_t begin, std::size_t end,
            std::byte* base) {
    const Socket socket(fd, spin_us_);
    const std::uint64_t count = end - begin;
    std::vector<iovec> request{
        {const_cast<std::uint64_t*>(&count), sizeof count},
        {const_cast<std::int32_t*>(from.data() + begin), count * sizeof(std::int32_t)}};
    Ranges ranges;
    for (std::size_t i = begin; i < end; ++i) {
      ranges.push(base + static_cast<std::uint64_t>(to[i]) * block_size_, block_size_);
    }
    return socket.send(request) && socket.receive(ranges.list());
  }

  Team& team_;
  std::string name_;
  std::uint64_t block_size_, spin_us_;
  std::vector<Fd> connections_;
};

}  // namespace

StreamServer::StreamServer(const std::string& family, const std::byte* memory,
                           std::uint64_t memory_bytes, std::uint64_t block_size,
                           std::uint64_t spin_us)
    : memory_(memory),
      memory_bytes_(memory_bytes),
      block_size_(block_size),
      spin_us_(spin_us),
      tcp_(family == "tcp"),
      listener_(socket(tcp_ ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  static std::atomic<std::uint64_t> number{0};
  place_ = tcp_ ? 0 : static_cast<std::uint64_t>(getpid()) << 16 | ++number;
  Address address;
  socklen_t length = address_of(tcp_, place_, address);
  if (listener_.get() < 0 || bind(listener_.get(), &address.any, length) != 0 ||
      listen(listener_.get(), 64) != 0) {
    fail("listening");
  }
  length = sizeof address;
  if (getsockname(listener_.get(), &address.any, &length) != 0) fail("getsockname");
  if (tcp_) place_ = ntohs(address.tcp.sin_port);
  acceptor_ = std::thread([this] { accept_all(); });
}

StreamServer::~StreamServer() {
  shutdown(listener_.get(), SHUT_RDWR);  // wakes the acceptor
  acceptor_.join();
  for (const Fd& fd : connections_) shutdown(fd.get(), SHUT_RDWR);
  for (std::thread& thread : threads_) thread.join();
}

void StreamServer::accept_all() {
  for (;;) {
    Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (fd.get() < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return;
    }
    const int on = 1;
    if (tcp_) setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connections_.push_back(std::move(fd));
    threads_.emplace_back([this, at = connections_.back().get()] {
      try {
        serve(at);
      } catch (const std::exception&) {
        shutdown(at, SHUT_RDWR);  // the reader sees it and says so
      }
    });
  }
}

void StreamServer::serve(int fd) const {
  const Socket socket(fd, spin_us_);
  // Between two batches the reader may take as long as it likes.
  const auto next_comes = [&] {
    pollfd wanted{fd, POLLIN, 0};
    if (spin_us_ > 0) {
      const double until = now() + static_cast<double>(spin_us_) * 1e-6;
      while (now() < until) {
        if (poll(&wanted, 1, 0) != 0) return;
      }
    }
    poll(&wanted, 1, -1);
  };
  std::vector<std::int32_t> slots;
  Ranges ranges;
  for (;;) {
    next_comes();
    std::uint64_t count = 0;
    if (!socket.receive(&count, sizeof count)) return;
    if (count > memory_bytes_ / block_size_) throw std::runtime_error("more blocks than there are");
    slots.resize(count);
    if (!socket.receive(slots.data(), count * sizeof(std::int32_t))) return;
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      const auto offset = static_cast<std::uint64_t>(slots[i]) * block_size_;
      if (slots[i] < 0 || offset + block_size_ > memory_bytes_) {
        throw std::runtime_error("a block that is not there");
      }
      ranges.push(memory_ + offset, block_size_);
      bytes += block_size_;
      if (bytes >= batch_bytes || i + 1 == count) {
        if (!socket.send(ranges.list())) return;
        ranges.clear();
        bytes = 0;
      }
    }
  }
}

std::unique_ptr<Bare> stream_reads(Team& team, const std::string& family, std::uint64_t place,
                                   std::uint64_t block_size, std::uint64_t spin_us) {
  return std::make_unique<StreamReads>(team, family, place, block_size, spin_us);
}

}  // namespace kvferry::tools
