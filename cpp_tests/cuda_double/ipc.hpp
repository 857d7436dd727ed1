// What lies in the memfds that processes share, and in the 64 bytes of a handle.
#pragma once

#include "state.hpp"

namespace cuda_double {

constexpr size_t kHeader = 4096;  // the first page of every memfd
constexpr size_t kImporters = 64;

// First page of an allocation's memfd.
struct SharedAllocation {
  uint64_t magic;
  uint64_t id;    // of the allocation in its process
  uint64_t nonce; // of the process
  uint64_t bytes;
  int32_t device;
  std::atomic<int32_t> importers[kImporters];  // pids that have it open
};

// First page of an interprocess event's memfd: the numbers of its recordings.
struct SharedEvent {
  uint64_t magic;
  uint64_t nonce;
  std::atomic<uint64_t> recorded;
  // The number of the last finished recording of each residue.
  std::atomic<uint64_t> done[256];
};

constexpr uint64_t kAllocationMagic = 0x4b56464d454d3031;
constexpr uint64_t kEventMagic = 0x4b56464556543031;

// What CUipcMemHandle and CUipcEventHandle hold.
struct Handle {
  uint64_t magic;
  uint64_t nonce;
  uint64_t id;
  int32_t pid;
  int32_t fd;
};
static_assert(sizeof(Handle) <= sizeof(CUipcMemHandle));

uint64_t process_nonce();

// A sealed-size memfd with its header page mapped; -1 when there is no memory.
int make_shared(size_t bytes, void** header);

// Whether the recording with this number has finished.
inline bool finished(const SharedEvent& event, uint64_t number) {
  return number == 0 || event.done[number % 256] >= number;
}

// Whether another live process has this allocation open.
bool imported_elsewhere(const SharedAllocation& shared);

}  // namespace cuda_double
