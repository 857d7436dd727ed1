// What a process has open, from its /proc.
#pragma once

#include <dirent.h>

#include <fstream>
#include <string>

namespace kvferry_test {

// Calls use(name) for each entry of a folder.
template <typename Use>
void each_entry(const std::string& folder, Use use) {
  DIR* dir = opendir(folder.c_str());
  if (dir == nullptr) return;
  while (const dirent* entry = readdir(dir)) {
    if (entry->d_name[0] != '.') use(std::string(entry->d_name));
  }
  closedir(dir);
}

// proc: "/proc/self" or "/proc/PID".
inline std::size_t open_files(const std::string& proc) {
  std::size_t n = 0;
  each_entry(proc + "/fd", [&](const std::string&) { ++n; });
  return n;
}

// Without those of the CUDA double, which end some time after their streams.
inline std::size_t threads(const std::string& proc) {
  std::size_t n = 0;
  each_entry(proc + "/task", [&](const std::string& thread) {
    std::ifstream in(proc + "/task/" + thread + "/comm");
    std::string name;
    if (std::getline(in, name) && name != "cuda-double") ++n;
  });
  return n;
}

}  // namespace kvferry_test
