// The entry points that programs built with a per-thread default stream call: there NULL means the
// calling thread's stream (section "Stream synchronization behavior").
#include "call.hpp"

namespace {

CUstream per_thread(CUstream stream) { return stream == nullptr ? CU_STREAM_PER_THREAD : stream; }

}  // namespace

// With -fvisibility=hidden and no header that names them.
#define KVF_PTSZ(name, parameters, call)                  \
  KVF_DOUBLE_EXPORT CUresult name parameters;             \
  KVF_DOUBLE_EXPORT CUresult name parameters { return call; }

extern "C" {

KVF_PTSZ(cuStreamSynchronize_ptsz, (CUstream stream), cuStreamSynchronize(per_thread(stream)))
KVF_PTSZ(cuStreamQuery_ptsz, (CUstream stream), cuStreamQuery(per_thread(stream)))
KVF_PTSZ(cuStreamGetCtx_ptsz, (CUstream stream, CUcontext* context),
         cuStreamGetCtx(per_thread(stream), context))
KVF_PTSZ(cuStreamIsCapturing_ptsz, (CUstream stream, int* status),
         cuStreamIsCapturing(per_thread(stream), status))
KVF_PTSZ(cuStreamWaitEvent_ptsz, (CUstream stream, CUevent event, unsigned flags),
         cuStreamWaitEvent(per_thread(stream), event, flags))
KVF_PTSZ(cuStreamWaitValue32_v2_ptsz,
         (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags),
         cuStreamWaitValue32_v2(per_thread(stream), address, value, flags))
KVF_PTSZ(cuStreamWriteValue32_v2_ptsz,
         (CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags),
         cuStreamWriteValue32_v2(per_thread(stream), address, value, flags))
KVF_PTSZ(cuLaunchHostFunc_ptsz, (CUstream stream, CUhostFn function, void* data),
         cuLaunchHostFunc(per_thread(stream), function, data))
KVF_PTSZ(cuEventRecord_ptsz, (CUevent event, CUstream stream),
         cuEventRecord(event, per_thread(stream)))
KVF_PTSZ(cuMemcpyAsync_ptsz, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
         cuMemcpyAsync(dst, src, bytes, per_thread(stream)))
KVF_PTSZ(cuMemcpyHtoDAsync_v2_ptsz,
         (CUdeviceptr dst, const void* src, size_t bytes, CUstream stream),
         cuMemcpyHtoDAsync_v2(dst, src, bytes, per_thread(stream)))
KVF_PTSZ(cuMemcpyDtoHAsync_v2_ptsz, (void* dst, CUdeviceptr src, size_t bytes, CUstream stream),
         cuMemcpyDtoHAsync_v2(dst, src, bytes, per_thread(stream)))
KVF_PTSZ(cuMemcpyDtoDAsync_v2_ptsz,
         (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
         cuMemcpyDtoDAsync_v2(dst, src, bytes, per_thread(stream)))
KVF_PTSZ(cuMemsetD8Async_ptsz,
         (CUdeviceptr dst, unsigned char value, size_t bytes, CUstream stream),
         cuMemsetD8Async(dst, value, bytes, per_thread(stream)))
KVF_PTSZ(cuLaunchKernel_ptsz,
         (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
          unsigned bz, unsigned shared, CUstream stream, void** params, void** extra),
         cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, per_thread(stream), params, extra))

}  // extern "C"
