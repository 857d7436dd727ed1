// SPDX-License-Identifier: Apache-2.0
// A tool's second process: the same program once more, and what the two say to each other.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace kvferry::tools {

using Json = nlohmann::json;

// A descriptor, closed at its end.
class Fd {
 public:
  explicit Fd(int fd = -1) noexcept : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const noexcept { return fd_; }
  int release() noexcept;

 private:
  int fd_;
};

// One end of a socket pair. Everything blocks; everything that fails throws std::runtime_error.
class Channel {
 public:
  explicit Channel(Fd fd) noexcept : fd_(std::move(fd)) {}

  void send(const Json& message, int fd = -1);
  // The next message; a descriptor that came along goes to `fd`. False: the other end is closed.
  bool receive(Json& message, Fd* fd = nullptr);
  void close() { fd_ = Fd(); }

 private:
  Fd fd_;
};

// Runs this program again as `program --child-fd N`; ends it with the object.
class Child {
 public:
  Child();
  ~Child();
  Child(Child&&) = delete;

  pid_t pid() const noexcept { return pid_; }
  // Sends a request and gives the answer; what failed in the child is thrown here.
  Json call(const Json& request, Fd* fd = nullptr);

 private:
  Channel channel_{Fd()};
  pid_t pid_ = -1;
};

// The child's side: answers requests until the parent goes.
template <class Handler>
int answer(int fd, Handler handler) {
  Channel channel{Fd(fd)};
  Json request;
  while (channel.receive(request)) {
    Json reply;
    int with = -1;
    try {
      reply = handler(request, with);
    } catch (const std::exception& e) {
      reply = {{"error", e.what()}};
    }
    channel.send(reply, with);
  }
  return 0;
}

}  // namespace kvferry::tools
