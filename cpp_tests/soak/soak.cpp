// Handoffs without end: random prefix hits, pulls and pushes, cancels and releases in mid-copy,
// offers that expire, sources that die and come back, request ids used again and again. This
// program, not the library, checks every byte of every handoff.
//
//   soak [--handoffs N] [--seed S] [--json]
//
// Exit status 0: no wrong byte, nothing hung, nothing leaked, and enough of everything happened.
#include <poll.h>

#include <cstdio>
#include <cstdlib>

#include "driver.hpp"
#include "source.hpp"

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "source") return soak::source_main(argv[2]);
  std::uint64_t handoffs = 10000, seed = 1;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--handoffs" && i + 1 < argc) {
      handoffs = std::stoull(argv[++i]);
    } else if (word == "--seed" && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else if (word == "--json") {
      json = true;
    } else {
      std::fprintf(stderr, "soak [--handoffs N] [--seed S] [--json]\n");
      return 2;
    }
  }
  try {
    const soak::Report report = soak::run(handoffs, seed);
    std::puts((json ? report.json() : report.text()).c_str());
    return report.good() ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "soak: %s\n", e.what());
    return 1;
  }
}
