// SPDX-License-Identifier: Apache-2.0
#include "device.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <kvferry.hpp>
#include <stdexcept>

namespace kvferry::tools {

namespace {

void must(int result, const char* call) {
  if (result != 0) throw std::runtime_error(std::string(call) + ": CUDA error " + std::to_string(result));
}

constexpr unsigned non_blocking = 1;

}  // namespace

template <class Function>
void Driver::find(Function& function, const char* name) {
  function = reinterpret_cast<Function>(dlsym(library_, name));
  if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
}

Driver::Driver() {
  char text[1024] = {};
  check(kvf_cuda_info(text, sizeof text, nullptr));
  text_ = text;
  const char* named = std::getenv("KVFERRY_CUDA_LIBRARY");
  library_ = dlopen(named != nullptr && *named != 0 ? named : "libcuda.so.1", RTLD_NOW);
  if (library_ == nullptr) throw std::runtime_error(dlerror());
  double_ = dlsym(library_, "kvf_cuda_double_read_books") != nullptr;
  find(init_, "cuInit");
  find(retain_, "cuDevicePrimaryCtxRetain");
  find(set_current_, "cuCtxSetCurrent");
  find(alloc_, "cuMemAlloc_v2");
  find(free_, "cuMemFree_v2");
  find(upload_, "cuMemcpyHtoD_v2");
  find(download_, "cuMemcpyDtoH_v2");
  find(copy_, "cuMemcpyDtoDAsync_v2");
  find(stream_create_, "cuStreamCreate");
  find(stream_synchronize_, "cuStreamSynchronize");
  must(init_(0), "cuInit");
  void* context = nullptr;
  must(retain_(&context, 0), "cuDevicePrimaryCtxRetain");  // until the process ends
  must(set_current_(context), "cuCtxSetCurrent");
  must(stream_create_(&stream_, non_blocking), "cuStreamCreate");
}

std::uint64_t Driver::alloc(std::uint64_t bytes) const {
  Address memory = 0;
  must(alloc_(&memory, bytes), "cuMemAlloc");
  return memory;
}

void Driver::free(std::uint64_t memory) const noexcept { (void)free_(memory); }

void Driver::upload(std::uint64_t to, const void* from, std::uint64_t bytes) const {
  must(upload_(to, from, bytes), "cuMemcpyHtoD");
}

void Driver::download(void* to, std::uint64_t from, std::uint64_t bytes) const {
  must(download_(to, from, bytes), "cuMemcpyDtoH");
}

void Driver::copy(std::uint64_t to, std::uint64_t from, std::uint64_t bytes) const {
  must(copy_(to, from, bytes, stream_), "cuMemcpyDtoDAsync");
  must(stream_synchronize_(stream_), "cuStreamSynchronize");
}

std::vector<std::byte> DeviceMemory::read() const {
  std::vector<std::byte> bytes(bytes_);
  driver_.download(bytes.data(), base_, bytes_);
  return bytes;
}

}  // namespace kvferry::tools
