// SPDX-License-Identifier: Apache-2.0
#include "measure.hpp"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

namespace kvferry::tools {

namespace {

struct Cpu {
  std::uint64_t idle = 0, total = 0;
};

Cpu machine_cpu() {
  std::ifstream file("/proc/stat");
  std::string name;
  file >> name;
  Cpu cpu;
  std::uint64_t ticks = 0;
  for (int i = 0; i < 8 && file >> ticks; ++i) {
    cpu.total += ticks;
    if (i == 3 || i == 4) cpu.idle += ticks;  // idle, waiting for a disk
  }
  return cpu;
}

}  // namespace

double now() {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

bool wait_for_quiet(double seconds) {
  const double end = now() + seconds;
  while (now() < end) {
    const Cpu before = machine_cpu();
    std::this_thread::sleep_for(std::chrono::milliseconds(40));
    const Cpu after = machine_cpu();
    const auto total = static_cast<double>(after.total - before.total);
    if (total > 0 && static_cast<double>(after.idle - before.idle) >= 0.9 * total) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

double percentile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  const auto at = static_cast<std::size_t>(part * static_cast<double>(values.size()));
  return values[std::min(at, values.size() - 1)];
}

Usage usage(pid_t process) {
  Usage all;
  const std::string tasks = "/proc/" + std::to_string(process) + "/task";
  for (const auto& task : std::filesystem::directory_iterator(tasks)) {
    std::ifstream schedule(task.path() / "schedstat");
    double ns = 0;
    if (!(schedule >> ns)) {
      throw std::runtime_error(tasks + ": no schedstat: this kernel does not count CPU time in ns");
    }
    all.cpu_ms += ns / 1e6;
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      std::istringstream words(line);
      std::string name;
      std::uint64_t value = 0;
      if (words >> name && name == "voluntary_ctxt_switches:" && words >> value) {
        all.wakeups += value;
      }
    }
  }
  return all;
}

}  // namespace kvferry::tools
