// SPDX-License-Identifier: Apache-2.0
// Clocks, quiet moments, percentiles, and what a process costs.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace kvferry::tools {

// Monotonic seconds.
double now();

// Waits until the whole machine was at least 90 % idle over 40 ms, at most `seconds`; false: it
// never was.
bool wait_for_quiet(double seconds);

// The value below which `part` of the values lie (0.5: the median). Values must not be empty.
double percentile(std::vector<double> values, double part);

// What all threads of a process have used so far.
struct Usage {
  double cpu_ms = 0;
  std::uint64_t wakeups = 0;  // voluntary context switches: each was slept and woken once
};
Usage usage(pid_t process);

}  // namespace kvferry::tools
