// Injected failures and delays.
#include "state.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace cuda_double {
namespace {

struct Rule {
  std::string function;
  uint64_t from = 1;  // counted from when the rule was made
  bool on = false;    // all later calls too
  CUresult error = 0;
  uint64_t seen = 0;
};

struct Faults {
  std::mutex mutex;
  std::vector<Rule> rules;
  std::map<std::string, uint64_t> calls;
  std::mt19937 random;
  uint32_t min_us = 0, max_us = 200;

  Faults();
};

// "NAME[:N[+]]=CODE"
bool parse(const std::string& text, Rule& rule) {
  const auto equals = text.find('=');
  if (equals == std::string::npos || equals + 1 == text.size()) return false;
  std::string name = text.substr(0, equals);
  char* end = nullptr;
  rule.error = static_cast<CUresult>(std::strtol(text.c_str() + equals + 1, &end, 10));
  if (*end != 0 || rule.error == 0) return false;
  const auto colon = name.find(':');
  rule.on = colon == std::string::npos;
  if (colon != std::string::npos) {
    rule.from = std::strtoull(name.c_str() + colon + 1, &end, 10);
    if (*end == '+') rule.on = true, ++end;
    if (*end != 0 || rule.from == 0) return false;
    name.resize(colon);
  }
  rule.function = name;
  return !name.empty();
}

bool parse_all(const char* spec, std::vector<Rule>& rules) {
  std::string text = spec == nullptr ? "" : spec;
  for (size_t at = 0; at < text.size();) {
    const auto comma = std::min(text.find(',', at), text.size());
    Rule rule;
    if (!parse(text.substr(at, comma - at), rule)) return false;
    rules.push_back(rule);
    at = comma + 1;
  }
  return true;
}

Faults::Faults() {
  const char* spec = std::getenv("KVF_CUDA_DOUBLE_FAIL");
  if (!parse_all(spec, rules)) {
    std::fprintf(stderr, "CUDA double: cannot read KVF_CUDA_DOUBLE_FAIL=%s\n", spec);
    std::abort();
  }
  if (const char* range = std::getenv("KVF_CUDA_DOUBLE_DELAY_US")) {
    if (std::sscanf(range, "%u-%u", &min_us, &max_us) != 2 || min_us > max_us) {
      std::fprintf(stderr, "CUDA double: KVF_CUDA_DOUBLE_DELAY_US=%s is not MIN-MAX\n", range);
      std::abort();
    }
  }
  const char* seed = std::getenv("KVF_CUDA_DOUBLE_SEED");
  random.seed(seed == nullptr ? 1u : static_cast<unsigned>(std::strtoul(seed, nullptr, 10)));
}

Faults& faults() {
  static Faults* const all = new Faults;
  return *all;
}

// Tests write cuMemAlloc for cuMemAlloc_v2.
std::string plain_name(const char* function) {
  std::string name = function;
  if (name.size() > 3 && name.compare(name.size() - 3, 3, "_v2") == 0) name.resize(name.size() - 3);
  return name;
}

}  // namespace

CUresult injected(const char* function) {
  const std::string name = plain_name(function);
  Faults& all = faults();
  std::lock_guard<std::mutex> lock(all.mutex);
  ++all.calls[name];
  for (Rule& rule : all.rules) {
    if (rule.function != name) continue;
    ++rule.seen;
    if (rule.seen == rule.from || (rule.on && rule.seen > rule.from)) return rule.error;
  }
  return CUDA_SUCCESS;
}

void delay() {
  uint32_t us = 0;
  {
    Faults& all = faults();
    std::lock_guard<std::mutex> lock(all.mutex);
    us = all.min_us + all.random() % (all.max_us - all.min_us + 1);
  }
  if (us != 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

KVF_DOUBLE_EXPORT int kvf_cuda_double_fail(const char* spec) {
  std::vector<Rule> rules;
  if (!parse_all(spec, rules)) return -1;
  std::lock_guard<std::mutex> lock(faults().mutex);
  if (rules.empty()) {
    faults().rules.clear();
  } else {
    faults().rules.insert(faults().rules.end(), rules.begin(), rules.end());
  }
  return 0;
}

KVF_DOUBLE_EXPORT uint64_t kvf_cuda_double_calls(const char* function) {
  std::lock_guard<std::mutex> lock(faults().mutex);
  const auto found = faults().calls.find(plain_name(function));
  return found == faults().calls.end() ? 0 : found->second;
}

KVF_DOUBLE_EXPORT void kvf_cuda_double_delay(uint32_t min_us, uint32_t max_us) {
  std::lock_guard<std::mutex> lock(faults().mutex);
  faults().min_us = min_us;
  faults().max_us = max_us < min_us ? min_us : max_us;
}

}  // extern "C"
