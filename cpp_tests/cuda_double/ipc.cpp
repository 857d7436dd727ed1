// Memory and events of other processes (section "Memory Management", the cuIpc functions).
//
// A handle names the exporter's pid and the descriptor of a memfd, which the importer opens through
// /proc: no server, nothing left behind. The descriptor's first page proves that it is still meant.
#include "ipc.hpp"

#include "call.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <cstring>

using namespace cuda_double;

namespace cuda_double {

uint64_t process_nonce() {
  static const uint64_t nonce = [] {
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) random = static_cast<uint64_t>(getpid());
    return random | 1;
  }();
  return nonce;
}

int make_shared(size_t bytes, void** header) {
  const int fd = memfd_create("cuda-double", MFD_CLOEXEC);
  if (fd < 0) return -1;
  if (ftruncate(fd, static_cast<off_t>(kHeader + bytes)) != 0) {
    close(fd);
    return -1;
  }
  *header = mmap(nullptr, kHeader, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (*header == MAP_FAILED) {
    close(fd);
    return -1;
  }
  return fd;
}

bool imported_elsewhere(const SharedAllocation& shared) {
  for (const auto& importer : shared.importers) {
    const int32_t pid = importer;
    if (pid != 0 && kill(pid, 0) == 0) return true;
  }
  return false;
}

namespace {

int open_descriptor(const Handle& handle) {
  const std::string path =
      "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

void leave(SharedAllocation& shared) {
  for (auto& importer : shared.importers) {
    int32_t mine = static_cast<int32_t>(getpid());
    if (importer.compare_exchange_strong(mine, 0)) return;
  }
}

bool enter(SharedAllocation& shared) {
  for (auto& importer : shared.importers) {
    int32_t pid = importer;
    if (pid != 0 && kill(pid, 0) != 0) importer.compare_exchange_strong(pid, 0);  // it died
    pid = 0;
    if (importer.compare_exchange_strong(pid, static_cast<int32_t>(getpid()))) return true;
  }
  return false;
}

CUresult map_import(const Handle& handle, const std::shared_ptr<Context>& context, bool peers,
                    std::shared_ptr<Range>& range) {
  const int fd = open_descriptor(handle);
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;  // the exporter is gone, or has freed it
  void* header = mmap(nullptr, kHeader, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (header == MAP_FAILED) {
    close(fd);
    return CUDA_ERROR_MAP_FAILED;
  }
  auto* shared = static_cast<SharedAllocation*>(header);
  CUresult result = CUDA_SUCCESS;
  if (shared->magic != kAllocationMagic || shared->nonce != handle.nonce || shared->id != handle.id) {
    result = CUDA_ERROR_INVALID_VALUE;
  } else if (shared->device != context->device && (!peers || !state().peers)) {
    // Another device's memory needs peer access, which this flag asks for (cuIpcOpenMemHandle).
    result = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  if (result == CUDA_SUCCESS) {
    const size_t mapped = (shared->bytes + 4095) / 4096 * 4096;
    void* data = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, kHeader);
    const CUdeviceptr base = data == MAP_FAILED ? 0 : take_guard(mapped);
    if (base != 0 && enter(*shared)) {
      range = std::make_shared<Range>();
      range->kind = Range::Kind::Imported;
      range->base = base;
      range->bytes = shared->bytes;
      range->host = static_cast<char*>(data);
      range->device = shared->device;
      range->context = context;
      range->fd = fd;
      range->mapped = mapped;
      range->shared = shared;
      return CUDA_SUCCESS;
    }
    if (base != 0) give_back_guard(base, mapped);
    if (data != MAP_FAILED) munmap(data, mapped);
    result = CUDA_ERROR_MAP_FAILED;
  }
  munmap(header, kHeader);
  close(fd);
  return result;
}

}  // namespace
}  // namespace cuda_double

extern "C" {

// For memory of cuMemAlloc, by its first address. Memory that later gets the same address has another
// handle (cuIpcGetMemHandle).
KVF_DOUBLE_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  KVF_CALL(Context);
  const auto range = find_range(pointer);
  if (handle == nullptr || !range || range->base != pointer || range->kind != Range::Kind::Device ||
      !range->exportable) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Handle made{kAllocationMagic, process_nonce(), range->id, static_cast<int32_t>(getpid()), range->fd};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &made, sizeof made);
  return CUDA_SUCCESS;
}

// Opened again it is counted and gives the same address; which one is not promised
// (cuIpcOpenMemHandle). The exporter itself cannot open its handle: that is for other processes, and
// drivers answer 201. What happens to a mapping when the exporter exits is not documented; the double
// keeps the memory until the last process has let go of it, as drivers do.
KVF_DOUBLE_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle raw,
                                                 unsigned int flags) {
  KVF_CALL(Context);
  if (pointer == nullptr || (flags & ~1u) != 0) return CUDA_ERROR_INVALID_VALUE;
  Handle handle;
  std::memcpy(&handle, &raw, sizeof handle);
  if (handle.magic != kAllocationMagic) return CUDA_ERROR_INVALID_VALUE;
  if (handle.nonce == process_nonce()) return CUDA_ERROR_INVALID_CONTEXT;
  const std::string origin = std::to_string(handle.nonce) + "/" + std::to_string(handle.id);
  static std::mutex* const opening = new std::mutex;
  std::lock_guard<std::mutex> one(*opening);
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    for (auto& [base, range] : state().ranges) {
      if (range->origin != origin) continue;
      // One context per device may open the handles of another process (cuIpcOpenMemHandle).
      if (range->context != call.context) return CUDA_ERROR_INVALID_VALUE;
      ++range->opened;
      *pointer = base;
      return CUDA_SUCCESS;
    }
  }
  std::shared_ptr<Range> range;
  const CUresult mapped = map_import(handle, call.context, (flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) != 0, range);
  if (mapped != CUDA_SUCCESS) return mapped;
  range->origin = origin;
  range->opened = 1;
  std::lock_guard<std::mutex> lock(state().mutex);
  if (range->device != call.context->device) call.context->peers.insert(range->device);
  range->id = state().next_buffer++;
  *pointer = range->base;
  state().ranges[range->base] = std::move(range);
  return CUDA_SUCCESS;
}

// Unmaps at the last close; the exporter and other importers are not touched (cuIpcCloseMemHandle).
KVF_DOUBLE_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  KVF_CALL(FailedContext);
  std::shared_ptr<Range> range;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().ranges.find(pointer);
    if (found == state().ranges.end() || found->second->kind != Range::Kind::Imported) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    range = found->second;
    if (--range->opened != 0) return call.context->failed;
    range->freed = true;
    state().ranges.erase(found);
  }
  leave(*range->shared);
  give_back_guard(range->base, range->mapped);
  return call.context->failed;
}

// Only of events made with CU_EVENT_INTERPROCESS (cuIpcGetEventHandle).
KVF_DOUBLE_EXPORT CUresult cuIpcGetEventHandle(CUipcEventHandle* handle, CUevent event) {
  KVF_CALL(Context);
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().events.find(event);
  if (found == state().events.end()) return CUDA_ERROR_INVALID_HANDLE;
  if (handle == nullptr || found->second->shared == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Handle made{kEventMagic, found->second->shared->nonce, 0, static_cast<int32_t>(getpid()), found->second->fd};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &made, sizeof made);
  return CUDA_SUCCESS;
}

// Works like an event of this process, without timing, and is destroyed like one
// (cuIpcOpenEventHandle).
KVF_DOUBLE_EXPORT CUresult cuIpcOpenEventHandle(CUevent* out, CUipcEventHandle raw) {
  KVF_CALL(Context);
  Handle handle;
  std::memcpy(&handle, &raw, sizeof handle);
  if (out == nullptr || handle.magic != kEventMagic) return CUDA_ERROR_INVALID_VALUE;
  if (handle.nonce == process_nonce()) return CUDA_ERROR_INVALID_CONTEXT;
  const int fd = open_descriptor(handle);
  if (fd < 0) return CUDA_ERROR_MAP_FAILED;
  void* header = mmap(nullptr, kHeader, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (header == MAP_FAILED) {
    close(fd);
    return CUDA_ERROR_MAP_FAILED;
  }
  auto event = std::make_shared<Event>();  // lets go of both
  event->fd = fd;
  event->shared = static_cast<SharedEvent*>(header);
  if (event->shared->magic != kEventMagic || event->shared->nonce != handle.nonce) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  event->flags = CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  event->context = call.context;
  std::lock_guard<std::mutex> lock(state().mutex);
  event->handle = *out = state().fresh_handle<CUevent>();
  state().events[event->handle] = event;
  return CUDA_SUCCESS;
}

}  // extern "C"
