// A child process that answers line by line.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

extern char** environ;

namespace process_test {

class Child {
 public:
  explicit Child(const std::vector<std::string>& command) {
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, in[0], 0);
    posix_spawn_file_actions_adddup2(&actions, out[1], 1);
    std::vector<char*> argv;
    for (const auto& word : command) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    const int rc = posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(in[0]);
    close(out[1]);
    to_ = in[1];
    from_ = out[0];
    if (rc != 0) throw std::runtime_error("cannot start " + command[0]);
  }
  Child(const Child&) = delete;
  ~Child() {
    kill(SIGKILL);
    reap();
    close_input();
    close(from_);
  }
  // The end of its input; a program that lives on it ends by itself.
  void close_input() {
    if (to_ >= 0) close(to_);
    to_ = -1;
  }

  pid_t pid() const { return pid_; }

  void send(const std::string& line) {
    const std::string text = line + "\n";
    std::size_t sent = 0;
    while (sent < text.size()) {
      const ssize_t n = write(to_, text.data() + sent, text.size() - sent);
      if (n < 0) throw std::runtime_error("the child is gone");
      sent += static_cast<std::size_t>(n);
    }
  }
  // The next line, "" at the end of the child's output or after 30 s.
  std::string line() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (;;) {
      const auto end = buffer_.find('\n');
      if (end != std::string::npos) {
        std::string text = buffer_.substr(0, end);
        buffer_.erase(0, end + 1);
        return text;
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd p{from_, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&p, 1, static_cast<int>(left.count())) <= 0) return "";
      char some[65536];
      const ssize_t n = read(from_, some, sizeof some);
      if (n <= 0) return "";
      buffer_.append(some, static_cast<std::size_t>(n));
    }
  }
  std::string ask(const std::string& command) {
    send(command);
    return line();
  }
  void kill(int signal) {
    if (pid_ > 0) ::kill(pid_, signal);
  }
  // Waits until it was stopped or has ended; what it is then.
  enum class State { running, stopped, ended };
  State halted(std::chrono::milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    for (;;) {
      int status = 0;
      if (pid_ <= 0) return State::ended;
      if (waitpid(pid_, &status, WUNTRACED | WNOHANG) == pid_) {
        if (WIFSTOPPED(status)) return State::stopped;
        pid_ = -1;
        return State::ended;
      }
      if (std::chrono::steady_clock::now() > deadline) return State::running;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
  // Waits for its end.
  void reap() {
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  std::string buffer_;
};

}  // namespace process_test
