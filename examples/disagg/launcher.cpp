#include "launcher.hpp"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace disagg {

namespace {

// A descriptor that a started program does not inherit.
class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  ~Fd() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

std::pair<Fd, Fd> make_pipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) fail("pipe", errno);
  return {Fd(fds[0]), Fd(fds[1])};
}

std::pair<Fd, Fd> make_socket_pair() {
  int fds[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) fail("socketpair", errno);
  return {Fd(fds[0]), Fd(fds[1])};
}

std::string own_folder() {
  std::string path(4096, '\0');
  const ssize_t n = readlink("/proc/self/exe", path.data(), path.size());
  if (n <= 0) fail("readlink /proc/self/exe", errno);
  path.resize(static_cast<std::size_t>(n));
  return path.substr(0, path.rfind('/') + 1);
}

// Starts a program with these descriptors as its standard input and output, and `inherited` under
// the numbers kFirstSocket, kFirstSocket + 1, ...
constexpr int kFirstSocket = 100;
pid_t start(const std::string& path, const std::vector<std::string>& arguments, int in, int out,
            const std::vector<int>& inherited) {
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in, 0);
  posix_spawn_file_actions_adddup2(&actions, out, 1);
  for (std::size_t i = 0; i < inherited.size(); ++i)
    posix_spawn_file_actions_adddup2(&actions, inherited[i], kFirstSocket + static_cast<int>(i));
  pid_t pid = 0;
  const int error = posix_spawn(&pid, path.c_str(), &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) fail("cannot start " + path, error);
  return pid;
}

}  // namespace

EngineProcesses::EngineProcesses(const std::string& program, const std::string& name, const EngineOptions& options) {
  const std::size_t stages = options.stage_layers.empty() ? 1 : options.stage_layers.size();
  const std::size_t world = stages * options.tp_size;
  std::vector<Fd> centre, others;
  for (std::size_t r = 1; r < world; ++r) {
    auto [a, b] = make_socket_pair();
    centre.push_back(std::move(a));
    others.push_back(std::move(b));
  }
  for (std::size_t r = 0; r < world; ++r) {
    RankOptions rank{options, {}};
    rank.engine.tp_rank = static_cast<std::uint32_t>(r % options.tp_size);
    rank.engine.pp_rank = static_cast<std::uint32_t>(r / options.tp_size);
    std::vector<int> inherited;
    if (r == 0)
      for (const Fd& fd : centre) inherited.push_back(fd.get());
    else
      inherited.push_back(others[r - 1].get());
    for (std::size_t i = 0; i < inherited.size(); ++i) rank.sockets.push_back(kFirstSocket + static_cast<int>(i));
    auto to = make_pipe();
    auto from = make_pipe();
    pids_.push_back(start(own_folder() + program, rank_arguments(rank), to.first.get(), from.second.get(), inherited));
    ranks_.push_back(std::make_unique<Channel>(from.first.release(), to.second.release(),
                                               world > 1 ? name + " rank " + std::to_string(r) : name));
  }
}

EngineProcesses::~EngineProcesses() {
  ranks_.clear();
  for (const pid_t pid : pids_) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (waitpid(pid, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
}

void EngineProcesses::send_all(const Message& message) {
  for (auto& r : ranks_) r->send(message);
}

std::vector<Message> EngineProcesses::expect_all(Kind kind) {
  std::vector<Message> answers;
  for (auto& r : ranks_) answers.push_back(r->expect(kind, kPatience));
  return answers;
}

void EngineProcesses::introduce() {
  std::vector<std::string> metadata;
  for (Message& hello : expect_all(Kind::hello)) {
    metadata.push_back(hello.bytes());
    description_ = hello.bytes();
  }
  send_all(Message(Kind::join).list(metadata));
  for (Message& joined : expect_all(Kind::joined)) engine_metadata_ = joined.bytes();
}

std::string EngineProcesses::pids() const {
  std::string text;
  for (const pid_t pid : pids_) text += (text.empty() ? "" : ", ") + std::to_string(pid);
  return text;
}

}  // namespace disagg
