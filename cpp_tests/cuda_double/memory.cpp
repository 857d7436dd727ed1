// Device memory and pinned host memory: where they lie, and what is known about an address.
#include "call.hpp"
#include "ipc.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

using namespace cuda_double;

namespace cuda_double {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGarbage = size_t{16} << 20;  // fresh memory up to this size is filled

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Addresses of freed memory, newest last: the driver hands them out again too, so a mapping that is
// remembered by address alone is found out.
std::multimap<size_t, CUdeviceptr>& spare_guards() {
  static auto* const all = new std::multimap<size_t, CUdeviceptr>;
  return *all;
}

// Every guard there ever was, by base.
std::map<CUdeviceptr, size_t>& all_guards() {
  static auto* const all = new std::map<CUdeviceptr, size_t>;
  return *all;
}

std::mutex& guards() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

}  // namespace

// The host faults on these addresses. Nothing is ever mapped there.
CUdeviceptr take_guard(size_t bytes) {
  std::lock_guard<std::mutex> lock(guards());
  const auto found = spare_guards().upper_bound(bytes);
  if (found != spare_guards().begin() && std::prev(found)->first == bytes) {
    const CUdeviceptr base = std::prev(found)->second;
    spare_guards().erase(std::prev(found));
    return base;
  }
  void* guard = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (guard == MAP_FAILED) return 0;
  all_guards()[reinterpret_cast<CUdeviceptr>(guard)] = bytes;
  return reinterpret_cast<CUdeviceptr>(guard);
}

// Whether an address was ever one of device memory: then it is none of the host's.
static bool guarded(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(guards());
  const auto after = all_guards().upper_bound(address);
  return after != all_guards().begin() && address - std::prev(after)->first < std::prev(after)->second;
}

void give_back_guard(CUdeviceptr base, size_t bytes) {
  std::lock_guard<std::mutex> lock(guards());
  spare_guards().emplace(bytes, base);
}

Range::~Range() {
  if (on_device()) {
    munmap(host, mapped);
    munmap(shared, kHeader);
    if (fd >= 0) close(fd);
  } else if (kind == Kind::HostAllocated) {
    munmap(host, whole_pages(bytes));
  }
}

std::shared_ptr<Range> find_range(CUdeviceptr address) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto after = state().ranges.upper_bound(address);
  if (after == state().ranges.begin()) return nullptr;
  const auto& range = std::prev(after)->second;
  return address - range->base < range->bytes ? range : nullptr;
}

// CUDA_ERROR_INVALID_VALUE for a copy that leaves its allocation or begins in freed memory. An
// address that the driver does not know is the host's own: with unified addressing the kind of memory
// follows from the pointer (section "Unified Addressing").
CUresult find_place(CUdeviceptr address, size_t bytes, Place& place) {
  place.range = find_range(address);
  if (!place.range) {
    if (guarded(address)) return CUDA_ERROR_INVALID_VALUE;
    place.host = reinterpret_cast<char*>(address);
    return CUDA_SUCCESS;
  }
  const size_t offset = address - place.range->base;
  if (bytes > place.range->bytes - offset) return CUDA_ERROR_INVALID_VALUE;
  place.host = place.range->host + offset;
  return CUDA_SUCCESS;
}

CUresult still_there(const Place& place, const char* what) {
  if (!place.range || !place.range->freed) return CUDA_SUCCESS;
  violation(std::string(what) + " reached memory that was freed, closed or unregistered before");
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

namespace {

CUresult allocate(const std::shared_ptr<Context>& context, CUdeviceptr* pointer, size_t bytes,
                  bool exportable) {
  // 0 bytes are an error (cuMemAlloc).
  if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  auto range = std::make_shared<Range>();
  range->mapped = whole_pages(bytes);
  void* header = nullptr;
  range->fd = make_shared(range->mapped, &header);
  if (range->fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  range->shared = static_cast<SharedAllocation*>(header);
  void* data = mmap(nullptr, range->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, range->fd, kHeader);
  range->base = data == MAP_FAILED ? 0 : take_guard(range->mapped);
  if (range->base == 0) {
    if (data != MAP_FAILED) munmap(data, range->mapped);
    munmap(header, kHeader);
    close(range->fd);
    range->kind = Range::Kind::HostRegistered;  // nothing left to undo
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  range->host = static_cast<char*>(data);
  range->bytes = bytes;
  range->device = context->device;
  range->context = context;
  range->exportable = exportable;
  // Fresh memory is not cleared (cuMemAlloc).
  if (bytes <= kGarbage) std::memset(range->host, 0xa5, range->mapped);
  std::lock_guard<std::mutex> lock(state().mutex);
  range->id = state().next_buffer++;
  auto* shared = range->shared;
  shared->magic = kAllocationMagic;
  shared->nonce = process_nonce();
  shared->id = range->id;
  shared->bytes = bytes;
  shared->device = range->device;
  *pointer = range->base;
  state().ranges[range->base] = std::move(range);
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr pointer) {
  std::shared_ptr<Range> range;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto found = state().ranges.find(pointer);
    if (found == state().ranges.end() || found->second->kind != Range::Kind::Device) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    range = found->second;
    state().ranges.erase(found);
    range->freed = true;
  }
  // Freeing what another process has open is undefined (cuIpcOpenMemHandle). Here it leaves the
  // importer with garbage.
  if (imported_elsewhere(*range->shared)) {
    violation("cuMemFree of memory that another process has open");
    std::memset(range->host, 0xdb, range->mapped);
  }
  give_back_guard(range->base, range->mapped);
  return CUDA_SUCCESS;
}

// Adds pinned memory to the table; false when it overlaps pinned memory.
bool pin(std::shared_ptr<Range> range) {
  std::lock_guard<std::mutex> lock(state().mutex);
  auto next = state().ranges.lower_bound(range->base);
  if (next != state().ranges.end() && next->first < range->base + range->bytes) return false;
  if (next != state().ranges.begin()) {
    const auto& before = std::prev(next)->second;
    if (before->base + before->bytes > range->base) return false;
  }
  range->id = state().next_buffer++;
  state().ranges[range->base] = std::move(range);
  return true;
}

CUresult unpin(void* pointer, Range::Kind kind, CUresult missing) {
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto found = state().ranges.find(reinterpret_cast<CUdeviceptr>(pointer));
  if (found == state().ranges.end() || found->second->kind != kind) return missing;
  found->second->freed = true;
  state().ranges.erase(found);
  return CUDA_SUCCESS;
}

CUresult allocate_host(const std::shared_ptr<Context>& context, void** pointer, size_t bytes) {
  if (pointer == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  void* memory = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto range = std::make_shared<Range>();
  range->kind = Range::Kind::HostAllocated;
  range->base = reinterpret_cast<CUdeviceptr>(memory);
  range->host = static_cast<char*>(memory);
  range->bytes = bytes;
  range->device = context->device;
  range->context = context;
  if (!pin(range)) return CUDA_ERROR_UNKNOWN;  // cannot be: the kernel gave fresh addresses
  *pointer = memory;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace cuda_double

extern "C" {

KVF_DOUBLE_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  KVF_CALL(Context);
  return allocate(call.context, pointer, bytes, true);
}

// In a context that has failed the memory still counts as freed: the caller can do no more.
KVF_DOUBLE_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
  KVF_CALL(FailedContext);
  if (pointer == 0) return CUDA_SUCCESS;
  const CUresult freed = release(pointer);
  return freed != CUDA_SUCCESS ? freed : call.context->failed.load();
}

// Memory of a stream-ordered pool cannot be exported by cuIpcGetMemHandle (section "Stream Ordered
// Memory Allocator"). The double allocates and frees at once.
KVF_DOUBLE_EXPORT CUresult cuMemAllocAsync(CUdeviceptr* pointer, size_t bytes, CUstream handle) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  return found != CUDA_SUCCESS ? found : allocate(stream->context, pointer, bytes, false);
}

KVF_DOUBLE_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  const auto range = find_range(pointer);
  if (!range || range->base != pointer || range->kind != Range::Kind::Device) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  enqueue(stream, {Work::Kind::Marker, [pointer] { return release(pointer); }, {}});
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  KVF_CALL(Context);
  if (free_bytes == nullptr || total == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *total = size_t{16} << 30;
  *free_bytes = size_t{8} << 30;
  return CUDA_SUCCESS;
}

// The allocation around an address, CUDA_ERROR_NOT_FOUND outside of all (cuMemGetAddressRange).
KVF_DOUBLE_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes,
                                                   CUdeviceptr pointer) {
  KVF_CALL(Context);
  const auto range = find_range(pointer);
  if (!range) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = range->base;
  if (bytes != nullptr) *bytes = range->bytes;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned int flags) {
  KVF_CALL(Context);
  if ((flags & ~7u) != 0) return CUDA_ERROR_INVALID_VALUE;
  return allocate_host(call.context, pointer, bytes);
}

KVF_DOUBLE_EXPORT CUresult cuMemAllocHost_v2(void** pointer, size_t bytes) {
  KVF_CALL(Context);
  return allocate_host(call.context, pointer, bytes);
}

KVF_DOUBLE_EXPORT CUresult cuMemFreeHost(void* pointer) {
  KVF_CALL(FailedContext);
  const CUresult freed = unpin(pointer, Range::Kind::HostAllocated, CUDA_ERROR_INVALID_VALUE);
  return freed != CUDA_SUCCESS ? freed : call.context->failed.load();
}

// Memory is pinned once: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (cuMemHostRegister). Memory that
// is not mapped cannot be pinned.
KVF_DOUBLE_EXPORT CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned int flags) {
  KVF_CALL(Context);
  if (pointer == nullptr || bytes == 0 || (flags & ~15u) != 0) return CUDA_ERROR_INVALID_VALUE;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const uintptr_t first = address / kPage * kPage;
  const uintptr_t end = whole_pages(address + bytes);
  std::vector<unsigned char> resident((end - first) / kPage);
  if (mincore(reinterpret_cast<void*>(first), end - first, resident.data()) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto range = std::make_shared<Range>();
  range->kind = Range::Kind::HostRegistered;
  range->base = address;
  range->host = static_cast<char*>(pointer);
  range->bytes = bytes;
  range->device = call.context->device;
  range->context = call.context;
  range->read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
  return pin(range) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

// By the address that was registered (cuMemHostUnregister).
KVF_DOUBLE_EXPORT CUresult cuMemHostUnregister(void* pointer) {
  KVF_CALL(FailedContext);
  const CUresult freed = unpin(pointer, Range::Kind::HostRegistered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  return freed != CUDA_SUCCESS ? freed : call.context->failed.load();
}

// With CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM both are the same address
// (cuMemHostGetDevicePointer); "flags must be 0".
KVF_DOUBLE_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device, void* host,
                                                        unsigned int flags) {
  KVF_CALL(Context);
  const auto range = find_range(reinterpret_cast<CUdeviceptr>(host));
  if (device == nullptr || flags != 0 || !range || range->on_device()) return CUDA_ERROR_INVALID_VALUE;
  *device = reinterpret_cast<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult kvf_cuda_double_peek(void* to, CUdeviceptr from, size_t bytes) {
  Place place;
  const CUresult found = find_place(from, bytes, place);
  if (found == CUDA_SUCCESS) std::memcpy(to, place.host, bytes);
  return found;
}

KVF_DOUBLE_EXPORT CUresult kvf_cuda_double_poke(CUdeviceptr to, const void* from, size_t bytes) {
  Place place;
  const CUresult found = find_place(to, bytes, place);
  if (found == CUDA_SUCCESS) std::memcpy(place.host, from, bytes);
  return found;
}

}  // extern "C"
