// What NVRTC compiles: copy_patterns.h for the device, with plain loads and stores.
#include "copy_patterns.h"

namespace {

struct DeviceMemory {
  template <class T>
  __device__ __forceinline__ T load(kvf_kernel::u64 address) const {
    return *reinterpret_cast<const T*>(address);
  }
  template <class T>
  __device__ __forceinline__ void store(kvf_kernel::u64 address, T value) const {
    *reinterpret_cast<T*>(address) = value;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    kvf_copy_patterns(unsigned long long shapes, unsigned long long pieces, unsigned int piece_count) {
  DeviceMemory memory;
  kvf_kernel::copy_patterns(memory, shapes, pieces, piece_count, blockIdx.x, gridDim.x, threadIdx.x,
                            blockDim.x);
}
