// With the CUDA runtime, as an engine would.
#include "gpu.hpp"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "kernels.h"

namespace {

constexpr unsigned kThreads = 256;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

unsigned blocks_for(std::size_t count) { return static_cast<unsigned>((count + kThreads - 1) / kThreads); }

__global__ void produce_words(unsigned* words, unsigned count, unsigned seed) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) words[i] = slow_value(seed, i, 2000);
}

__global__ void scribble_words(unsigned* words, unsigned count) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) words[i] = 0xffffffffu;
}

__global__ void check_words(const unsigned* words, unsigned count, unsigned seed, unsigned* wrong) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count && words[i] != value(seed, i)) atomicAdd(wrong, 1u);
}

cudaStream_t raw(gpu::Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

namespace gpu {

bool init() {
  // Without a driver the runtime speaks of one that is too old.
  int driver = 0, count = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) {
    std::fprintf(stderr, "no CUDA driver\n");
    return false;
  }
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return true;
  std::fprintf(stderr, "no CUDA device: %s\n", cudaGetErrorString(error));
  return false;
}

void* alloc(std::size_t bytes) {
  void* memory = nullptr;
  must(cudaMalloc(&memory, bytes), "cudaMalloc");
  must(cudaMemset(memory, 0, bytes), "cudaMemset");
  must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return memory;
}

void free(void* memory) { must(cudaFree(memory), "cudaFree"); }

Stream create_stream() {
  cudaStream_t stream = nullptr;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

void destroy_stream(Stream stream) { must(cudaStreamDestroy(raw(stream)), "cudaStreamDestroy"); }

void synchronize(Stream stream) { must(cudaStreamSynchronize(raw(stream)), "cudaStreamSynchronize"); }

void produce(Stream stream, std::uint32_t* words, std::size_t count, std::uint32_t seed) {
  produce_words<<<blocks_for(count), kThreads, 0, raw(stream)>>>(words, static_cast<unsigned>(count), seed);
  must(cudaGetLastError(), "produce");
}

void scribble(Stream stream, std::uint32_t* words, std::size_t count) {
  scribble_words<<<blocks_for(count), kThreads, 0, raw(stream)>>>(words, static_cast<unsigned>(count));
  must(cudaGetLastError(), "scribble");
}

void check(Stream stream, const std::uint32_t* words, std::size_t count, std::uint32_t seed, std::uint32_t* wrong) {
  check_words<<<blocks_for(count), kThreads, 0, raw(stream)>>>(words, static_cast<unsigned>(count), seed, wrong);
  must(cudaGetLastError(), "check");
}

std::uint32_t read(Stream stream, const std::uint32_t* word) {
  std::uint32_t value = 0;
  must(cudaMemcpyAsync(&value, word, sizeof value, cudaMemcpyDeviceToHost, raw(stream)), "cudaMemcpyAsync");
  synchronize(stream);
  return value;
}

}  // namespace gpu
