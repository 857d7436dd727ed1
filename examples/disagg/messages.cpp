#include "messages.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>

#include <poll.h>
#include <time.h>
#include <unistd.h>

namespace disagg {

namespace {

constexpr std::uint64_t kLongest = 64 * 1024 * 1024;

struct Head {
  std::uint32_t kind;
  std::uint32_t size;
};

}  // namespace

Message& Message::number(std::uint64_t value) {
  body_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}
Message& Message::real(double value) {
  body_.append(reinterpret_cast<const char*>(&value), sizeof value);
  return *this;
}
Message& Message::bytes(const std::string& value) {
  number(value.size());
  body_.append(value);
  return *this;
}
Message& Message::list(const std::vector<std::string>& values) {
  number(values.size());
  for (const std::string& v : values) bytes(v);
  return *this;
}
Message& Message::tokens(const std::vector<Token>& values) {
  return bytes(std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Token)));
}

void Message::take(void* to, std::size_t size) {
  if (size > body_.size() - at_) throw std::runtime_error("a message is shorter than its fields");
  std::memcpy(to, body_.data() + at_, size);
  at_ += size;
}
std::uint64_t Message::number() {
  std::uint64_t value;
  take(&value, sizeof value);
  return value;
}
double Message::real() {
  double value;
  take(&value, sizeof value);
  return value;
}
std::string Message::bytes() {
  const std::uint64_t size = number();
  if (size > body_.size() - at_) throw std::runtime_error("a message is shorter than its fields");
  std::string value(size, '\0');
  take(value.data(), size);
  return value;
}
std::vector<std::string> Message::list() {
  std::vector<std::string> values;
  for (std::uint64_t n = number(); n > 0; --n) values.push_back(bytes());
  return values;
}
std::vector<Token> Message::tokens() {
  const std::string raw = bytes();
  std::vector<Token> values(raw.size() / sizeof(Token));
  std::memcpy(values.data(), raw.data(), values.size() * sizeof(Token));
  return values;
}

Channel::~Channel() {
  close(in_);
  close(out_);
}

void Channel::send(const Message& message) {
  const Head head{static_cast<std::uint32_t>(message.kind_), static_cast<std::uint32_t>(message.body_.size())};
  std::string all(reinterpret_cast<const char*>(&head), sizeof head);
  all += message.body_;
  for (std::size_t done = 0; done < all.size();) {
    const ssize_t n = write(out_, all.data() + done, all.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::runtime_error("cannot write to " + peer_ + ": " + std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
}

bool Channel::read_all(void* to, std::size_t size, std::chrono::steady_clock::time_point deadline) {
  for (std::size_t done = 0; done < size;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd p{in_, POLLIN, 0};
    const int ready = poll(&p, 1, static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1 << 30)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) throw std::runtime_error(peer_ + " does not answer");
    const ssize_t n = read(in_, static_cast<char*>(to) + done, size - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::runtime_error("cannot read from " + peer_ + ": " + std::strerror(errno));
    if (n == 0 && done == 0) return false;
    if (n == 0) throw std::runtime_error(peer_ + " ended in the middle of a message");
    done += static_cast<std::size_t>(n);
  }
  return true;
}

bool Channel::receive(Message* message, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Head head;
  if (!read_all(&head, sizeof head, deadline)) return false;
  if (head.size > kLongest) throw std::runtime_error(peer_ + " sent a message of " + std::to_string(head.size) + " bytes");
  *message = Message(static_cast<Kind>(head.kind));
  message->body_.resize(head.size);
  if (head.size > 0 && !read_all(message->body_.data(), head.size, deadline))
    throw std::runtime_error(peer_ + " ended in the middle of a message");
  return true;
}

Message Channel::expect(Kind kind, std::chrono::milliseconds timeout) {
  Message message;
  if (!receive(&message, timeout)) throw std::runtime_error(peer_ + " has ended");
  if (message.kind() == Kind::failed) throw std::runtime_error(peer_ + ": " + message.bytes());
  if (message.kind() != kind)
    throw std::runtime_error(peer_ + " sent message " + std::to_string(static_cast<int>(message.kind())) +
                             " instead of " + std::to_string(static_cast<int>(kind)));
  return message;
}

void ignore_broken_pipes() { std::signal(SIGPIPE, SIG_IGN); }

double now_seconds() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

}  // namespace disagg
