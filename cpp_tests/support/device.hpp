// Device memory for tests, from whatever driver kvferry uses: the one that KVFERRY_CUDA_LIBRARY
// names (the double), or the machine's.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda_double/control.h"

namespace kvferry_test {

// Whether the suites run on device memory this time.
inline bool on_device() {
  const char* kind = std::getenv("KVF_TEST_MEMORY");
  return kind != nullptr && std::string(kind) == "device";
}

// The driver, with device 0's primary context for every thread that asks.
class Cuda {
 public:
  static Cuda& get() {
    static Cuda cuda;
    return cuda;
  }

  // A function of the driver, or of the double's control.h; null where it is missing.
  template <typename Function>
  Function* find(const char* name) const {
    return reinterpret_cast<Function*>(dlsym(library_, name));
  }
  bool is_double() const { return find<void()>("kvf_cuda_double_read_books") != nullptr; }

  // Makes the context the calling thread's.
  void enter() const { check(set_current(context_), "cuCtxSetCurrent"); }
  CUcontext context() const { return context_; }

  static void check(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) {
      throw std::runtime_error(std::string(call) + ": " + std::to_string(result));
    }
  }

  decltype(&cuMemAlloc_v2) alloc;
  decltype(&cuMemFree_v2) free;
  decltype(&cuMemcpyHtoD_v2) upload;
  decltype(&cuMemcpyDtoH_v2) download;
  decltype(&cuMemsetD8_v2) set;
  decltype(&cuStreamCreate) stream_create;
  decltype(&cuStreamDestroy_v2) stream_destroy;
  decltype(&cuStreamSynchronize) stream_synchronize;
  decltype(&cuStreamQuery) stream_query;
  decltype(&cuMemsetD8Async) set_async;
  decltype(&cuCtxSetCurrent) set_current;

 private:
  Cuda() {
    const char* path = std::getenv("KVFERRY_CUDA_LIBRARY");
    library_ = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) throw std::runtime_error(dlerror());
    load(alloc, "cuMemAlloc_v2");
    load(free, "cuMemFree_v2");
    load(upload, "cuMemcpyHtoD_v2");
    load(download, "cuMemcpyDtoH_v2");
    load(set, "cuMemsetD8_v2");
    load(stream_create, "cuStreamCreate");
    load(stream_destroy, "cuStreamDestroy_v2");
    load(stream_synchronize, "cuStreamSynchronize");
    load(stream_query, "cuStreamQuery");
    load(set_async, "cuMemsetD8Async");
    load(set_current, "cuCtxSetCurrent");
    check(find<CUresult(unsigned)>("cuInit")(0), "cuInit");
    check(find<CUresult(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context_, 0),
          "cuDevicePrimaryCtxRetain");
  }

  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    if (function == nullptr) throw std::runtime_error(std::string("no ") + name);
  }

  void* library_ = nullptr;
  CUcontext context_ = nullptr;
};

// The double's books; throws on a real driver.
inline kvf_cuda_double_books books() {
  const auto read = Cuda::get().find<decltype(kvf_cuda_double_read_books)>("kvf_cuda_double_read_books");
  if (read == nullptr) throw std::runtime_error("only the double keeps books");
  kvf_cuda_double_books now;
  read(&now);
  return now;
}

// One allocation, zeroed. Reads and writes wait for nothing but themselves.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes) : bytes_(bytes) {
    auto& cuda = Cuda::get();
    cuda.enter();
    Cuda::check(cuda.alloc(&base_, bytes), "cuMemAlloc");
    Cuda::check(cuda.set(base_, 0, bytes), "cuMemsetD8");
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    Cuda::get().enter();
    (void)Cuda::get().free(base_);
  }

  CUdeviceptr base() const { return base_; }
  void* pointer() const { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(base_)); }
  std::size_t bytes() const { return bytes_; }

  void write(std::size_t offset, const void* data, std::size_t bytes) {
    if (bytes == 0) return;
    Cuda::get().enter();
    Cuda::check(Cuda::get().upload(base_ + offset, data, bytes), "cuMemcpyHtoD");
  }
  void read(std::size_t offset, void* data, std::size_t bytes) const {
    if (bytes == 0) return;
    Cuda::get().enter();
    Cuda::check(Cuda::get().download(data, base_ + offset, bytes), "cuMemcpyDtoH");
  }

 private:
  std::size_t bytes_;
  CUdeviceptr base_ = 0;
};

// Device memory of a test that thinks in pointers: it works on a copy of the host.
class Mirror {
 public:
  explicit Mirror(std::size_t bytes) : device_(bytes), host_(bytes) {}
  void* device() const { return device_.pointer(); }
  std::uint8_t* host() { return host_.data(); }
  // What the host has written.
  void up() { device_.write(0, host_.data(), host_.size()); }
  // What has arrived.
  void down(std::size_t offset, std::size_t bytes) {
    device_.read(offset, host_.data() + offset, bytes);
  }
  void down() { down(0, host_.size()); }

 private:
  DeviceMemory device_;
  std::vector<std::uint8_t> host_;
};

}  // namespace kvferry_test
