// What a process holds, and whether it grows.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace soak {

struct Resources {
  std::uint64_t rss_kib = 0;
  std::uint64_t fds = 0, maps = 0;

  static Resources of(pid_t pid) {
    const std::string proc = "/proc/" + std::to_string(pid);
    Resources r;
    std::ifstream status(proc + "/status");
    for (std::string word; status >> word;) {
      if (word == "VmRSS:") status >> r.rss_kib;
    }
    if (DIR* dir = opendir((proc + "/fd").c_str())) {
      while (readdir(dir) != nullptr) ++r.fds;
      closedir(dir);
    }
    std::ifstream maps(proc + "/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:kvferry") != std::string::npos) ++r.maps;
    }
    return r;
  }
};

// Growth of the fitted line from the first to the last value, in percent of the mean.
inline double slope_percent(const std::vector<double>& values) {
  const double n = static_cast<double>(values.size());
  if (n < 2) return 0;
  double sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double x = static_cast<double>(i);
    sx += x;
    sy += values[i];
    sxx += x * x;
    sxy += x * values[i];
  }
  const double slope = (n * sxy - sx * sy) / (n * sxx - sx * sx);
  return sy == 0 ? slope * (n - 1) * 100 : slope * (n - 1) / (sy / n) * 100;
}

}  // namespace soak
