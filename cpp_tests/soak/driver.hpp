// The soak's destination: starts handoffs of all kinds, a window of them at a time, and checks
// every byte when they have ended.
#pragma once

#include <cstdint>
#include <string>

namespace soak {

struct Report {
  std::uint64_t asked = 0;  // handoffs that were to be done
  std::uint64_t handoffs = 0, bytes = 0, wrong_bytes = 0, unexpected = 0, hung = 0;
  std::uint64_t leaked_fds = 0, leaked_maps = 0, quarantined = 0;
  double rss_slope_percent = 0, fds_slope_percent = 0, quarantine_slope_percent = 0, seconds = 0;
  std::uint64_t cancels = 0, expiries = 0, restarts = 0, pushes = 0, declined = 0, full_hits = 0;

  bool good() const;
  std::string json() const;
  std::string text() const;
};

// Does `handoffs` handoffs.
Report run(std::uint64_t handoffs, std::uint64_t seed);

}  // namespace soak
