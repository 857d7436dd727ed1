// SPDX-License-Identifier: Apache-2.0
#include "channel.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <thread>

extern char** environ;

namespace kvferry::tools {

namespace {

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

int Fd::release() noexcept { return std::exchange(fd_, -1); }

void Channel::send(const Json& message, int fd) {
  const std::vector<std::uint8_t> body = Json::to_cbor(message);
  const std::uint64_t length = body.size();
  std::vector<std::uint8_t> bytes(sizeof length);
  std::memcpy(bytes.data(), &length, sizeof length);
  bytes.insert(bytes.end(), body.begin(), body.end());
  for (std::size_t done = 0; done < bytes.size();) {
    iovec part{bytes.data() + done, bytes.size() - done};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
    if (fd >= 0 && done == 0) {  // travels with the first byte
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof fd);
      std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    const ssize_t n = sendmsg(fd_.get(), &header, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) fail("the other process of this tool has gone");
    if (n > 0) done += static_cast<std::size_t>(n);
  }
}

bool Channel::receive(Json& message, Fd* fd) {
  std::uint64_t length = 0;
  std::vector<std::uint8_t> bytes(sizeof length);
  for (std::size_t done = 0; done < bytes.size();) {
    iovec part{bytes.data() + done, bytes.size() - done};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t n = recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("reading from the other process of this tool");
    if (n == 0) return false;
    if (const cmsghdr* c = CMSG_FIRSTHDR(&header); c && c->cmsg_type == SCM_RIGHTS) {
      int got = -1;
      std::memcpy(&got, CMSG_DATA(c), sizeof got);
      Fd owned(got);
      if (fd) *fd = std::move(owned);
    }
    done += static_cast<std::size_t>(n);
    if (length == 0 && done == sizeof length) {  // the head is complete: now the body
      std::memcpy(&length, bytes.data(), sizeof length);
      bytes.assign(length, 0);
      done = 0;
    }
  }
  message = Json::from_cbor(bytes);
  return true;
}

Child::Child() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) fail("socketpair");
  channel_ = Channel{Fd(ends[0])};
  const Fd theirs(ends[1]);
  constexpr int at = 3;  // whatever is there is close-on-exec or inherited by accident
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, theirs.get(), at);
  std::string program = "/proc/self/exe", option = "--child-fd", number = std::to_string(at);
  char* argv[] = {program.data(), option.data(), number.data(), nullptr};
  const int rc = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, argv, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (rc != 0) {
    errno = rc;
    fail("starting the second process");
  }
}

Child::~Child() {
  channel_.close();  // the child ends when it sees this
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (waitpid(pid_, nullptr, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) kill(pid_, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

Json Child::call(const Json& request, Fd* fd) {
  channel_.send(request);
  Json reply;
  if (!channel_.receive(reply, fd)) throw std::runtime_error("the second process has ended");
  if (reply.contains("error")) {
    throw std::runtime_error("in the second process: " + reply["error"].get<std::string>());
  }
  return reply;
}

}  // namespace kvferry::tools
