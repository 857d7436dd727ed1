// Through the driver's interface on kvferry's test double of it, which runs host builds of the
// kernels. KVFERRY_CUDA_LIBRARY names the double, for this program and for kvferry.
#include "gpu.hpp"

#include <control.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "kernels.h"

namespace {

void* library = nullptr;

template <class Function>
Function* find(const char* name) {
  auto* function = reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) {
    std::fprintf(stderr, "the driver has no %s: is it the test double?\n", name);
    std::exit(1);
  }
  return function;
}

// The driver's function of this name.
#define DRIVER(name) (*find<decltype(name)>(#name))

void must(CUresult error, const char* what) {
  if (error == CUDA_SUCCESS) return;
  std::fprintf(stderr, "%s: CUDA error %d\n", what, error);
  std::exit(1);
}

constexpr char kPtx[] =
    ".version 8.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry produce() { ret; }\n.visible .entry scribble() { ret; }\n"
    ".visible .entry check() { ret; }\n";
CUfunction kernels[3];

unsigned index_of(const kvf_cuda_double_thread& at) { return at.block_index[0] * at.block[0] + at.index[0]; }

template <class T>
T argument(void* param) {
  return *static_cast<T*>(param);
}

// The word that this thread works on; null when it has none.
unsigned* word(const kvf_cuda_double_thread& at, void* const* params) {
  static const auto access = find<decltype(kvf_cuda_double_access)>("kvf_cuda_double_access");
  const unsigned i = index_of(at);
  if (i >= argument<std::uint32_t>(params[1])) return nullptr;
  return static_cast<unsigned*>(access(argument<CUdeviceptr>(params[0]) + i * 4ull, 4, nullptr, nullptr));
}

void produce_word(const kvf_cuda_double_thread* at, void* const* params) {
  if (unsigned* w = word(*at, params)) *w = slow_value(argument<std::uint32_t>(params[2]), index_of(*at), 1);
}

void scribble_word(const kvf_cuda_double_thread* at, void* const* params) {
  if (unsigned* w = word(*at, params)) *w = 0xffffffffu;
}

void check_word(const kvf_cuda_double_thread* at, void* const* params) {
  static const auto access = find<decltype(kvf_cuda_double_access)>("kvf_cuda_double_access");
  const unsigned* w = word(*at, params);
  if (w == nullptr || *w == value(argument<std::uint32_t>(params[2]), index_of(*at))) return;
  if (void* wrong = access(argument<CUdeviceptr>(params[3]), 4, nullptr, nullptr)) ++*static_cast<unsigned*>(wrong);
}

CUdeviceptr address(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }
CUstream raw(gpu::Stream stream) { return static_cast<CUstream>(stream); }

void launch(int kernel, gpu::Stream stream, const std::uint32_t* words, std::size_t count, std::uint32_t seed,
            std::uint32_t* wrong) {
  CUdeviceptr first = address(words), counter = address(wrong);
  auto n = static_cast<std::uint32_t>(count);
  void* params[] = {&first, &n, &seed, &counter};
  must(DRIVER(cuLaunchKernel)(kernels[kernel], (n + 255) / 256, 1, 1, 256, 1, 1, 0, raw(stream), params, nullptr),
       "cuLaunchKernel");
}

}  // namespace

namespace gpu {

bool init() {
  const char* path = std::getenv("KVFERRY_CUDA_LIBRARY");
  library = path != nullptr ? dlopen(path, RTLD_NOW) : nullptr;
  if (library == nullptr) {
    std::fprintf(stderr, "KVFERRY_CUDA_LIBRARY names no test double of the driver\n");
    return false;
  }
  CUcontext context = nullptr;
  must(DRIVER(cuInit)(0), "cuInit");
  must(DRIVER(cuDevicePrimaryCtxRetain)(&context, 0), "cuDevicePrimaryCtxRetain");
  must(DRIVER(cuCtxSetCurrent)(context), "cuCtxSetCurrent");
  const std::size_t sizes[] = {8, 4, 4, 8};
  const auto offer = find<decltype(kvf_cuda_double_register_kernel)>("kvf_cuda_double_register_kernel");
  offer("produce", produce_word, sizes, 4);
  offer("scribble", scribble_word, sizes, 4);
  offer("check", check_word, sizes, 4);
  CUmodule module = nullptr;
  must(DRIVER(cuModuleLoadData)(&module, kPtx), "cuModuleLoadData");
  const char* names[] = {"produce", "scribble", "check"};
  for (int i = 0; i < 3; ++i) must(DRIVER(cuModuleGetFunction)(&kernels[i], module, names[i]), names[i]);
  return true;
}

void* alloc(std::size_t bytes) {
  CUdeviceptr memory = 0;
  must(DRIVER(cuMemAlloc_v2)(&memory, bytes), "cuMemAlloc");
  must(DRIVER(cuMemsetD8_v2)(memory, 0, bytes), "cuMemsetD8");
  return reinterpret_cast<void*>(memory);
}

void free(void* memory) { must(DRIVER(cuMemFree_v2)(address(memory)), "cuMemFree"); }

Stream create_stream() {
  CUstream stream = nullptr;
  must(DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  return stream;
}

void destroy_stream(Stream stream) { must(DRIVER(cuStreamDestroy_v2)(raw(stream)), "cuStreamDestroy"); }

void synchronize(Stream stream) { must(DRIVER(cuStreamSynchronize)(raw(stream)), "cuStreamSynchronize"); }

void produce(Stream stream, std::uint32_t* words, std::size_t count, std::uint32_t seed) {
  launch(0, stream, words, count, seed, nullptr);
}

void scribble(Stream stream, std::uint32_t* words, std::size_t count) {
  launch(1, stream, words, count, 0, nullptr);
}

void check(Stream stream, const std::uint32_t* words, std::size_t count, std::uint32_t seed, std::uint32_t* wrong) {
  launch(2, stream, words, count, seed, wrong);
}

std::uint32_t read(Stream stream, const std::uint32_t* word) {
  std::uint32_t value = 0;
  must(DRIVER(cuMemcpyDtoHAsync_v2)(&value, address(word), sizeof value, raw(stream)), "cuMemcpyDtoHAsync");
  synchronize(stream);
  return value;
}

}  // namespace gpu
