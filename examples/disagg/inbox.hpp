// Messages for a scheduler, read by a thread of their own: the scheduler never waits for the pipe.
#pragma once

#include "messages.hpp"
#include "rank.hpp"

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace disagg {

class Inbox {
 public:
  // `came` is called after each message, on the reading thread.
  Inbox(Channel& channel, std::function<void()> came)
      : fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), thread_([this, &channel, came = std::move(came)] {
          Message message;
          bool more = true;
          while (more) {
            try {
              more = channel.receive(&message, kPatience);
            } catch (const std::exception&) {
              more = false;  // as good as the end: the scheduler stops
            }
            {
              const std::lock_guard lock(mutex_);
              if (more) messages_.push_back(message);
              closed_ = !more;
            }
            const std::uint64_t one = 1;
            (void)!write(fd_, &one, sizeof one);
            came();
          }
        }) {
    if (fd_ < 0) throw std::runtime_error("eventfd");
  }
  ~Inbox() {
    thread_.join();
    close(fd_);
  }
  Inbox(const Inbox&) = delete;

  // Readable while there is a message or the end.
  int descriptor() const { return fd_; }
  // Takes what has come; false when the orchestrator has closed the pipe and all is taken.
  bool take(std::deque<Message>& out) {
    const std::lock_guard lock(mutex_);
    std::uint64_t count = 0;
    (void)!read(fd_, &count, sizeof count);
    out.swap(messages_);
    messages_.clear();
    return !closed_ || !out.empty();
  }
  void wait() const {
    pollfd p{fd_, POLLIN, 0};
    (void)poll(&p, 1, -1);
  }

 private:
  int fd_;
  std::mutex mutex_;
  std::deque<Message> messages_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace disagg
