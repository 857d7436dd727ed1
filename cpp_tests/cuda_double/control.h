/* What the double offers besides the driver API: faults, delays, books. A test finds these symbols
 * in the loaded driver; where they are missing, the driver is a real one. All calls are thread-safe
 * and need no context. */
#pragma once

#include "driver_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is open in this process, and what was ever done. Handles that their owner destroyed are not
 * counted, also when the driver call answered with the context's own failure. */
typedef struct kvf_cuda_double_books {
  uint64_t contexts;          /* made by cuCtxCreate and not destroyed */
  uint64_t primary_retains;   /* cuDevicePrimaryCtxRetain without its release */
  uint64_t streams;           /* without the default streams */
  uint64_t events;            /* opened ones of other processes too */
  uint64_t allocations;       /* cuMemAlloc, cuMemAllocAsync */
  uint64_t allocated_bytes;
  uint64_t ipc_mappings;      /* cuIpcOpenMemHandle without its close, each opening counted */
  uint64_t pinned_allocations; /* cuMemHostAlloc, cuMemAllocHost */
  uint64_t pinned_registrations;
  uint64_t modules;
  uint64_t pending_work;      /* enqueued and not yet executed, all streams */
  /* Since the process began. */
  uint64_t copies;
  uint64_t copied_bytes;
  uint64_t pageable_copies;   /* asynchronous copies that touched memory that is not pinned */
  uint64_t launches;
  uint64_t host_functions;
  uint64_t unresolved_waits;  /* streams destroyed with a cuStreamWaitValue32 still waiting */
  uint64_t violations;        /* uses that the driver calls undefined: kvf_cuda_double_violations */
} kvf_cuda_double_books;

void kvf_cuda_double_read_books(kvf_cuda_double_books* books);

/* One line per violation; NUL-terminated, cut at cap. Returns the length of the whole text. */
size_t kvf_cuda_double_violations(char* text, size_t cap);

/* Calls of one function so far, by its name without _v2 and _ptsz. */
uint64_t kvf_cuda_double_calls(const char* function);

/* Makes calls fail: "cuMemcpyAsync:3=700" the third call from now, "cuMemAlloc:2+=2" the second and
 * all later ones, "cuInit=100" all; several separated by commas. "work:1=700" lets the next executed
 * copy, memset or launch fail, which fails its context for good, as a kernel's fault does. NULL or ""
 * clears. The environment variable KVF_CUDA_DOUBLE_FAIL is the same at load time. Returns 0, or -1
 * for a text that it does not understand (nothing is changed then). */
int kvf_cuda_double_fail(const char* spec);

/* From now on every call in this context gives this error. */
int kvf_cuda_double_fail_context(CUcontext context, CUresult error);

/* Each copy, memset, launch and host function waits a random time in [min_us, max_us] before it is
 * executed. At load: KVF_CUDA_DOUBLE_DELAY_US="MIN-MAX" (0-200 when unset), KVF_CUDA_DOUBLE_SEED. */
void kvf_cuda_double_delay(uint32_t min_us, uint32_t max_us);

/* A held stream executes nothing until it is released. Both also take the default streams of the
 * current context. Returns a CUresult. */
CUresult kvf_cuda_double_hold(CUstream stream);
CUresult kvf_cuda_double_release(CUstream stream);

/* The same for all streams of the process, those of others too: 1 holds, 0 releases. */
void kvf_cuda_double_hold_all(int held);

/* From now on (0: no longer) cuStreamIsCapturing says that this stream is being captured into a graph,
 * and waiting for it fails, as in a capture. No graph is made of the work. Returns a CUresult. */
CUresult kvf_cuda_double_capture(CUstream stream, int capturing);

/* What devices say about a card that reaches their memory by itself:
 * CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, _WRITES_ORDERING (0 none, 100 the owner, 200 all devices) and
 * _FLUSH_WRITES_OPTIONS (1: cuFlushGPUDirectRDMAWrites works). At load 1, 200, 1. */
void kvf_cuda_double_gpu_direct(int supported, int ordering, int flush);

/* Reads or writes device memory at once, behind the driver's back. Returns a CUresult. */
CUresult kvf_cuda_double_peek(void* to, CUdeviceptr from, size_t bytes);
CUresult kvf_cuda_double_poke(CUdeviceptr to, const void* from, size_t bytes);

/* Contexts on the calling thread's stack. */
size_t kvf_cuda_double_stack_depth(void);

/* ---- kernels ------------------------------------------------------------------------------- */

/* Where one thread of a launch is. */
typedef struct kvf_cuda_double_thread {
  uint32_t grid[3], block[3];        /* gridDim, blockDim */
  uint32_t block_index[3], index[3]; /* blockIdx, threadIdx */
} kvf_cuda_double_thread;

/* The host build of a kernel, called once for each thread of a launch, on the stream's thread.
 * params[i] points to the i-th argument. It reaches memory through kvf_cuda_double_access only. */
typedef void (*kvf_cuda_double_kernel)(const kvf_cuda_double_thread* thread, void* const* params);

/* Offers a kernel under the name that the module's PTX exports. sizes: bytes of each argument. */
int kvf_cuda_double_register_kernel(const char* name, kvf_cuda_double_kernel kernel,
                                    const size_t* sizes, size_t count);

/* Inside a kernel: where [address, address + bytes) really lies, NULL when the kernel may not touch
 * it; the launch then fails as an illegal address would. first_valid and valid_bytes, when not NULL,
 * receive the whole range that may be reached with the same offset. */
void* kvf_cuda_double_access(CUdeviceptr address, size_t bytes, CUdeviceptr* first_valid,
                             size_t* valid_bytes);

#ifdef __cplusplus
}
#endif
