// What is open and what was done; written to the file named by KVF_CUDA_DOUBLE_BOOKS at exit.
#include "call.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace cuda_double;

extern "C" {

KVF_DOUBLE_EXPORT void kvf_cuda_double_read_books(kvf_cuda_double_books* books) {
  kvf_cuda_double_books now{};
  State& all = state();
  {
    std::lock_guard<std::mutex> lock(all.mutex);
    for (const auto& [handle, context] : all.contexts) {
      if (context->primary) {
        now.primary_retains += context->retains;
      } else {
        ++now.contexts;
      }
    }
    now.streams = all.streams.size();
    now.events = all.events.size();
    now.modules = all.modules.size();
    for (const auto& [base, range] : all.ranges) {
      switch (range->kind) {
        case Range::Kind::Device:
          ++now.allocations;
          now.allocated_bytes += range->bytes;
          break;
        case Range::Kind::Imported: now.ipc_mappings += range->opened; break;
        case Range::Kind::HostAllocated: ++now.pinned_allocations; break;
        case Range::Kind::HostRegistered: ++now.pinned_registrations; break;
      }
    }
    now.violations = all.violations.size();
    std::lock_guard<std::mutex> queues(all.progress);
    for (const auto& weak : all.all_streams) {
      if (const auto stream = weak.lock()) now.pending_work += stream->enqueued - stream->completed;
    }
  }
  now.copies = all.copies;
  now.copied_bytes = all.copied_bytes;
  now.pageable_copies = all.pageable_copies;
  now.launches = all.launches;
  now.host_functions = all.host_functions;
  now.unresolved_waits = all.unresolved_waits;
  *books = now;
}

KVF_DOUBLE_EXPORT size_t kvf_cuda_double_violations(char* text, size_t cap) {
  std::string joined;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (const auto& line : state().violations) joined += line + "\n";
  }
  if (text != nullptr && cap != 0) {
    const size_t bytes = std::min(cap - 1, joined.size());
    std::memcpy(text, joined.data(), bytes);
    text[bytes] = 0;
  }
  return joined.size();
}

}  // extern "C"

namespace {

// One line per process, so that a test with several can look at all of them.
struct AtExit {
  AtExit() {
    if (std::getenv("KVF_CUDA_DOUBLE_BOOKS") != nullptr) std::atexit(&write);
  }
  static void write() {
    const char* path = std::getenv("KVF_CUDA_DOUBLE_BOOKS");
    std::FILE* file = path != nullptr ? std::fopen(path, "a") : nullptr;
    if (file == nullptr) return;
    kvf_cuda_double_books now;
    kvf_cuda_double_read_books(&now);
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    std::fprintf(file,
                 "pid %d contexts %llu primary_retains %llu streams %llu events %llu allocations %llu "
                 "ipc_mappings %llu pinned_allocations %llu pinned_registrations %llu modules %llu "
                 "unresolved_waits %llu violations %llu copies %llu launches %llu\n",
                 getpid(), number(now.contexts), number(now.primary_retains), number(now.streams),
                 number(now.events), number(now.allocations), number(now.ipc_mappings),
                 number(now.pinned_allocations), number(now.pinned_registrations), number(now.modules),
                 number(now.unresolved_waits), number(now.violations), number(now.copies),
                 number(now.launches));
    std::fclose(file);
  }
} at_exit;

}  // namespace
