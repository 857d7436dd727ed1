// What this engine needs of a GPU: memory, streams, and three kernels. gpu_cuda.cu has it with the
// CUDA runtime; gpu_double.cpp, for machines without a GPU, with a test double of the driver.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpu {

// A CUstream, which is the same pointer as a cudaStream_t.
using Stream = void*;

// False, with the reason on standard error, when there is no device to work on.
bool init();

void* alloc(std::size_t bytes);
void free(void* memory);
Stream create_stream();
void destroy_stream(Stream stream);
void synchronize(Stream stream);

// Kernels; each only enqueues. `words` is device memory.
// words[i] = value(seed, i), by a kernel that takes its time.
void produce(Stream stream, std::uint32_t* words, std::size_t count, std::uint32_t seed);
// words[i] = 0xffffffff: what an earlier request leaves behind.
void scribble(Stream stream, std::uint32_t* words, std::size_t count);
// *wrong += how many words are not value(seed, i).
void check(Stream stream, const std::uint32_t* words, std::size_t count, std::uint32_t seed, std::uint32_t* wrong);

// One word to the host, after everything in the stream.
std::uint32_t read(Stream stream, const std::uint32_t* word);

}  // namespace gpu
