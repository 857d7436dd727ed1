// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <kvferry.hpp>
#include <sstream>

namespace kvferry::tools {

namespace {

// Linux 5.1; older headers lack it.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Json limit(__rlimit_resource_t which) {
  rlimit limits{};
  if (getrlimit(which, &limits) != 0 || limits.rlim_cur == RLIM_INFINITY) return nullptr;
  return limits.rlim_cur;
}

// The value after `name` in a file of "name value ..." lines.
std::string field(const char* path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key, value;
    if (words >> key >> value && key == name) return value;
  }
  return "";
}

Json meminfo(const char* name) {
  std::istringstream value(field("/proc/meminfo", name));
  std::uint64_t kib = 0;
  return value >> kib ? Json(kib * 1024) : Json(nullptr);
}

// A control group's number; null for "max" and where there is none.
Json cgroup(const char* file) {
  std::string path;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (line.rfind("0::", 0) == 0) path = line.substr(3);
  }
  for (const std::string& place : {"/sys/fs/cgroup" + path, std::string("/sys/fs/cgroup")}) {
    std::istringstream value(first_line(place + "/" + file));
    std::uint64_t number = 0;
    if (value >> number) return number;
  }
  return nullptr;
}

Json huge_pages() {
  Json all = Json::array();
  std::error_code none;
  const std::filesystem::directory_iterator sizes("/sys/kernel/mm/hugepages", none), end;
  for (auto size = sizes; !none && size != end; ++size) {
    const std::string name = size->path().filename();  // hugepages-2048kB
    std::uint64_t kib = 0, total = 0, free = 0;
    std::istringstream(name.substr(name.find('-') + 1)) >> kib;
    std::istringstream(first_line(size->path() / "nr_hugepages")) >> total;
    std::istringstream(first_line(size->path() / "free_hugepages")) >> free;
    all.push_back({{"page_size", kib * 1024}, {"total", total}, {"free", free}});
  }
  return all;
}

// "ok", or what the system refuses.
std::string sealed_memfd() {
  const Fd fd(memfd_create("kvferry-info", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) return std::string("memfd_create: ") + std::strerror(errno);
  const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
  if (ftruncate(fd.get(), 4096) != 0 || fcntl(fd.get(), F_ADD_SEALS, seals) != 0) {
    return std::string("sealing it (needs Linux 5.1): ") + std::strerror(errno);
  }
  return "ok";
}

// Whether the call exists and is let through; whether another process may be read, the self-test
// and "own" under the transport shm tell.
std::string process_vm_readv_call() {
  char from = 1, to = 0;
  const iovec local{&to, 1}, remote{&from, 1};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1) return "ok";
  return std::strerror(errno);
}

// The CUDA driver, or why there is none.
std::string cuda() {
  char text[1024] = "";
  return kvf_cuda_info(text, sizeof text, nullptr) == KVF_OK ? text : kvferry::last_error();
}

Json ptrace_scope() {
  std::istringstream value(first_line("/proc/sys/kernel/yama/ptrace_scope"));
  int scope = 0;
  return value >> scope ? Json(scope) : Json(nullptr);  // null: no yama, not restricted
}

bool may_ptrace() {
  std::istringstream value(field("/proc/self/status", "CapEff:"));
  std::uint64_t effective = 0;
  constexpr int cap_sys_ptrace = 19;
  return value >> std::hex >> effective && (effective >> cap_sys_ptrace & 1) != 0;
}

}  // namespace

Json machine() {
  utsname name{};
  uname(&name);
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  sched_getaffinity(0, sizeof allowed, &allowed);
  return {
      {"kernel", std::string(name.release)},
      {"architecture", std::string(name.machine)},
      {"cpus_online", sysconf(_SC_NPROCESSORS_ONLN)},
      {"cpus_allowed", CPU_COUNT(&allowed)},
      {"page_size", sysconf(_SC_PAGESIZE)},
      {"mem_total", meminfo("MemTotal:")},
      {"mem_available", meminfo("MemAvailable:")},
      {"cgroup_memory_max", cgroup("memory.max")},
      {"cgroup_memory_current", cgroup("memory.current")},
      {"memlock_limit", limit(RLIMIT_MEMLOCK)},
      {"open_files_limit", limit(RLIMIT_NOFILE)},
      {"file_size_limit", limit(RLIMIT_FSIZE)},
      {"sealed_memfd", sealed_memfd()},
      {"shmem_huge_pages", first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled")},
      {"transparent_huge_pages", first_line("/sys/kernel/mm/transparent_hugepage/enabled")},
      {"reserved_huge_pages", huge_pages()},
      {"process_vm_readv", process_vm_readv_call()},
      {"yama_ptrace_scope", ptrace_scope()},
      {"cap_sys_ptrace", may_ptrace()},
      {"cuda", cuda()},
  };
}

}  // namespace kvferry::tools
