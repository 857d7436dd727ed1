// kvferry's own kernel, built for the host from the header that the PTX is made of.
#include "call.hpp"

#include <copy_patterns.h>

#include <cstring>

namespace {

// Device memory as one thread of a kernel sees it; after the first fault it sees nothing more.
class ThreadMemory {
 public:
  template <class T>
  T load(CUdeviceptr address) {
    T value{};
    if (const void* at = find(address, sizeof(T), alignof(T))) std::memcpy(&value, at, sizeof(T));
    return value;
  }
  template <class T>
  void store(CUdeviceptr address, const T& value) {
    if (void* at = find(address, sizeof(T), alignof(T))) std::memcpy(at, &value, sizeof(T));
  }

 private:
  // A range that was looked up before.
  struct Known {
    CUdeviceptr base = 0;
    size_t bytes = 0;
    char* host = nullptr;
  };

  void* find(CUdeviceptr address, size_t bytes, size_t alignment) {
    if (failed_) return nullptr;
    for (const Known& range : known_) {
      if (address - range.base < range.bytes && bytes <= range.bytes - (address - range.base) &&
          address % alignment == 0) {
        return range.host + (address - range.base);
      }
    }
    // A word that is not aligned is a fault on a device too.
    Known& fresh = known_[next_++ % 4];
    void* at = kvf_cuda_double_access(address % alignment == 0 ? address : 0, bytes, &fresh.base, &fresh.bytes);
    failed_ = at == nullptr;
    fresh.host = failed_ ? nullptr : static_cast<char*>(at) - (address - fresh.base);
    if (failed_) fresh.bytes = 0;
    return at;
  }

  Known known_[4];
  unsigned next_ = 0;
  bool failed_ = false;
};

template <class T>
T argument(void* param) {
  T value;
  std::memcpy(&value, param, sizeof value);
  return value;
}

void copy_patterns(const kvf_cuda_double_thread* at, void* const* params) {
  ThreadMemory memory;
  kvf_kernel::copy_patterns(memory, argument<kvf_kernel::u64>(params[0]), argument<kvf_kernel::u64>(params[1]),
                            argument<kvf_kernel::u32>(params[2]), at->block_index[0], at->grid[0], at->index[0], at->block[0]);
}

struct Offer {
  Offer() {
    const size_t sizes[] = {8, 8, 4};
    kvf_cuda_double_register_kernel("kvf_copy_patterns", copy_patterns, sizes, 3);
  }
} offer;

}  // namespace
