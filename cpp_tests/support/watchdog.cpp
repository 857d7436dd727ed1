#include "watchdog.hpp"

#include <dirent.h>
#include <execinfo.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

extern char** environ;

namespace kvferry_test {
namespace {

std::atomic<int> stacks_printed{0};

void print_own_stack(int) {
  void* frames[64];
  backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
  stacks_printed.fetch_add(1);
}

// With gdb: names, lines and Rust frames. False when there is none or it may not attach.
bool stacks_by_gdb() {
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  const std::string pid = std::to_string(getpid());
  const char* argv[] = {"gdb", "-p",  pid.c_str(), "-batch", "-nx",
                        "-ex", "thread apply all bt", nullptr};
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&files, STDERR_FILENO, STDOUT_FILENO);
  pid_t gdb = 0;
  const int error =
      posix_spawnp(&gdb, "gdb", &files, nullptr, const_cast<char* const*>(argv), environ);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) return false;
  for (int tenths = 0; tenths < 300; ++tenths) {
    int status = 0;
    if (waitpid(gdb, &status, WNOHANG) == gdb) return WIFEXITED(status) && WEXITSTATUS(status) == 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  kill(gdb, SIGKILL);
  waitpid(gdb, nullptr, 0);
  return false;
}

// Without gdb: each thread prints its own frames when it gets a signal. One that blocks all
// signals, as kvferry's own do, is named and stays silent.
void stacks_by_signal() {
  signal(SIGUSR2, print_own_stack);
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return;
  const pid_t own = static_cast<pid_t>(syscall(SYS_gettid));
  while (const dirent* entry = readdir(tasks)) {
    const pid_t tid = static_cast<pid_t>(std::atoi(entry->d_name));
    if (tid == 0 || tid == own) continue;
    std::fprintf(stderr, "thread %d:\n", tid);
    const int before = stacks_printed.load();
    syscall(SYS_tgkill, getpid(), tid, SIGUSR2);
    for (int i = 0; i < 50 && stacks_printed.load() == before; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  closedir(tasks);
}

}  // namespace

void start_watchdog() {
  const char* given = std::getenv("KVFERRY_TEST_WATCHDOG_S");
  const int seconds = given != nullptr ? std::atoi(given) : 300;
  if (seconds <= 0) return;
  void* warm[1];
  backtrace(warm, 1);  // loads libgcc now, not inside a signal handler
  std::thread([seconds] {
    std::this_thread::sleep_for(std::chrono::seconds(seconds));
    std::fprintf(stderr, "watchdog: still running after %d s, all stacks:\n", seconds);
    std::fflush(nullptr);
    if (!stacks_by_gdb()) stacks_by_signal();
    std::abort();
  }).detach();
}

}  // namespace kvferry_test
