// SPDX-License-Identifier: Apache-2.0
// Scenario registration: does the last of many regions cost more than the first?
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "bench.hpp"
#include "measure.hpp"

namespace kvferry::tools {

namespace {

constexpr std::uint64_t page = 4096;

// As many separate mappings as regions: a page of memory each, and a page that is not there
// between two of them.
class Regions {
 public:
  explicit Regions(std::uint32_t count) : bytes_(2 * page * count) {
    at_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    for (std::uint32_t i = 0; i < count; ++i) {
      if (mprotect(operator[](i), page, PROT_READ | PROT_WRITE) != 0) {
        throw std::system_error(errno, std::generic_category(),
                                "a separate mapping for each region (see vm.max_map_count)");
      }
    }
  }
  ~Regions() { munmap(at_, bytes_); }
  Regions(Regions&&) = delete;
  std::byte* operator[](std::uint32_t i) const { return static_cast<std::byte*>(at_) + 2 * page * i; }

 private:
  void* at_;
  std::uint64_t bytes_;
};

}  // namespace

// Agents and regions are made three times; of each, a hundred at either end are compared.
void run_registration(const Options& options, Child&) {
  constexpr std::size_t some = 100;
  std::vector<double> first, last, whole, undone;
  wait_for_quiet(options.quiet_s);
  for (int round = 0; round < 3; ++round) {
    const Regions regions(options.regions);
    kvferry::Agent agent;
    std::vector<Pool> pools;
    pools.reserve(options.regions);
    pools.push_back(agent.register_memory(regions[0], page));  // pays for what is made only once
    std::vector<double> times;
    const double begin = now();
    for (std::uint32_t i = 1; i < options.regions; ++i) {
      const double before = now();
      pools.push_back(agent.register_memory(regions[i], page));
      times.push_back(now() - before);
    }
    whole.push_back(now() - begin);
    first.push_back(percentile({times.begin(), times.begin() + some}, 0.5));
    last.push_back(percentile({times.end() - some, times.end()}, 0.5));
    const double end = now();
    pools.clear();
    undone.push_back(now() - end);
  }
  const double early = percentile(first, 0.5), late = percentile(last, 0.5);
  report(options, {{"case", "registration"},
                   {"regions", options.regions},
                   {"first_us", early * 1e6},
                   {"last_us", late * 1e6},
                   {"last_over_first", late / early},
                   {"all_ms", percentile(whole, 0.5) * 1e3},
                   {"unregister_all_ms", percentile(undone, 0.5) * 1e3}});
}

}  // namespace kvferry::tools
