// Modules and launches (sections "Module Management", "Execution Control").
#include "call.hpp"

#include <cstdlib>
#include <cstring>
#include <regex>

using namespace cuda_double;

namespace cuda_double {
namespace {

// The kernel that runs on this thread.
struct Running {
  const Context* context = nullptr;
  bool failed = false;
  std::string why;
};
thread_local Running* running = nullptr;

struct Dim3 {
  uint32_t x, y, z;
};

// The threads of a grid, one after the other: no kernel here waits for another thread.
CUresult run_grid(const Kernel& kernel, Dim3 grid, Dim3 block, const std::vector<std::string>& values,
                  Running& state) {
  std::vector<void*> params;
  for (const auto& value : values) params.push_back(const_cast<char*>(value.data()));
  kvf_cuda_double_thread at{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, {}, {}};
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  running = &state;
  // Blocks must not depend on an order (guide, "Thread Hierarchy"): the last first, so that no kernel
  // relies on the usual one.
  for (uint64_t b = blocks; b-- > 0 && !state.failed;) {
    at.block_index[0] = static_cast<uint32_t>(b % grid.x);
    at.block_index[1] = static_cast<uint32_t>(b / grid.x % grid.y);
    at.block_index[2] = static_cast<uint32_t>(b / grid.x / grid.y);
    for (uint64_t t = 0; t < threads && !state.failed; ++t) {
      at.index[0] = static_cast<uint32_t>(t % block.x);
      at.index[1] = static_cast<uint32_t>(t / block.x % block.y);
      at.index[2] = static_cast<uint32_t>(t / block.x / block.y);
      kernel.run(&at, params.data());
    }
  }
  running = nullptr;
  if (!state.failed) return CUDA_SUCCESS;
  violation("a kernel touched " + state.why);
  return CUDA_ERROR_ILLEGAL_ADDRESS;
}

// The ".entry NAME" of a PTX text.
std::set<std::string> entries_of(const char* ptx) {
  std::set<std::string> names;
  const std::regex entry(R"(\.entry\s+([A-Za-z_$][A-Za-z0-9_$]*))");
  for (std::cregex_iterator it(ptx, ptx + std::strlen(ptx), entry), end; it != end; ++it) names.insert((*it)[1]);
  return names;
}

// ".version M.N" must be one that this driver knows: CUDA 11.2 reads up to 7.2, 12.0 up to 8.0, 13.0
// up to 9.0 (PTX ISA, "Release Notes").
int newest_ptx(int driver) {
  return driver >= 13000 ? 90 : driver >= 12000 ? 80 + driver % 1000 / 10 : 70 + driver % 1000 / 10;
}

}  // namespace
}  // namespace cuda_double

extern "C" {

// Takes a cubin, a fatbin or PTX text (cuModuleLoadData). The double reads PTX only, and of it the
// version and the names of its entries.
KVF_DOUBLE_EXPORT CUresult cuModuleLoadData(CUmodule* handle, const void* image) {
  KVF_CALL(Context);
  if (handle == nullptr || image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  const auto* text = static_cast<const char*>(image);
  const char* version = std::strstr(text, ".version ");
  if (version == nullptr) return CUDA_ERROR_INVALID_IMAGE;
  char* end = nullptr;
  const long major = std::strtol(version + 9, &end, 10);
  const long minor = *end == '.' ? std::strtol(end + 1, nullptr, 10) : -1;
  if (major <= 0 || minor < 0) return CUDA_ERROR_INVALID_PTX;
  if (major * 10 + minor > newest_ptx(state().version)) return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
  auto module = std::make_shared<Module>();
  module->context = call.context;
  module->entries = entries_of(text);
  if (module->entries.empty()) return CUDA_ERROR_INVALID_PTX;
  std::lock_guard<std::mutex> lock(state().mutex);
  module->handle = *handle = state().fresh_handle<CUmodule>();
  state().modules[module->handle] = module;
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuModuleUnload(CUmodule handle) {
  KVF_CALL(FailedContext);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (state().modules.erase(handle) == 0) return CUDA_ERROR_INVALID_HANDLE;
  for (auto it = state().functions.begin(); it != state().functions.end();) {
    it = it->second->module == handle ? state().functions.erase(it) : std::next(it);
  }
  return call.context->failed;
}

// CUDA_ERROR_NOT_FOUND for an unknown name (cuModuleGetFunction); here also for one that the PTX has,
// but no host build.
KVF_DOUBLE_EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule handle,
                                               const char* name) {
  KVF_CALL(Context);
  if (function == nullptr || name == nullptr) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> lock(state().mutex);
  const auto module = state().modules.find(handle);
  if (module == state().modules.end()) return CUDA_ERROR_INVALID_HANDLE;
  const auto kernel = state().kernels.find(name);
  if (module->second->entries.count(name) == 0) return CUDA_ERROR_NOT_FOUND;
  if (kernel == state().kernels.end()) {
    state().violations.push_back(std::string("no host build of the kernel ") + name);
    return CUDA_ERROR_NOT_FOUND;
  }
  auto made = std::make_shared<Function>();
  made->name = name;
  made->module = handle;
  made->kernel = kernel->second;
  *function = state().fresh_handle<CUfunction>();
  state().functions[*function] = std::move(made);
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT CUresult cuFuncSetAttribute(CUfunction function, int, int) {
  KVF_CALL(Context);
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().functions.count(function) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

// The arguments are read during this call, their sizes are the kernel's own (cuLaunchKernel). The
// stream must be one of the current context (guide, "Stream and Event Behavior").
KVF_DOUBLE_EXPORT CUresult cuLaunchKernel(CUfunction handle, unsigned int grid_x, unsigned int grid_y,
                                          unsigned int grid_z, unsigned int block_x,
                                          unsigned int block_y, unsigned int block_z, unsigned int,
                                          CUstream stream_handle, void** params, void** extra) {
  KVF_CALL(Context);
  std::shared_ptr<Stream> stream;
  const CUresult found = find_stream(stream_handle, call.context, stream);
  if (found != CUDA_SUCCESS) return found;
  if (stream->context != call.context) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Function> function;
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    const auto known = state().functions.find(handle);
    if (known == state().functions.end()) return CUDA_ERROR_INVALID_HANDLE;
    function = known->second;
    // A function is of the context that its module was loaded in.
    const auto module = state().modules.find(function->module);
    if (module == state().modules.end() || module->second->context != call.context) {
      return CUDA_ERROR_INVALID_HANDLE;
    }
  }
  const uint64_t threads = uint64_t{block_x} * block_y * block_z;
  // Limits of compute capability 3.0 and later (guide, "Compute Capabilities").
  if (threads == 0 || threads > 1024 || uint64_t{grid_x} * grid_y * grid_z == 0 ||
      grid_x > 0x7fffffffu || grid_y > 65535 || grid_z > 65535 || extra != nullptr ||
      (params == nullptr && !function->kernel.sizes.empty())) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  std::vector<std::string> values;
  for (size_t i = 0; i < function->kernel.sizes.size(); ++i) {
    values.emplace_back(static_cast<const char*>(params[i]), function->kernel.sizes[i]);
  }
  const Dim3 grid{grid_x, grid_y, grid_z}, block{block_x, block_y, block_z};
  enqueue(stream, {Work::Kind::Transfer,
                   [function, grid, block, values, context = stream->context] {
                     Running state_of_it;
                     state_of_it.context = context.get();
                     ++state().launches;
                     return run_grid(function->kernel, grid, block, values, state_of_it);
                   },
                   {}});
  return CUDA_SUCCESS;
}

KVF_DOUBLE_EXPORT int kvf_cuda_double_register_kernel(const char* name, kvf_cuda_double_kernel kernel,
                                                      const size_t* sizes, size_t count) {
  if (name == nullptr || kernel == nullptr || (sizes == nullptr && count != 0)) return -1;
  std::lock_guard<std::mutex> lock(state().mutex);
  state().kernels[name] = {kernel, {sizes, sizes + count}};
  return 0;
}

// Kernels reach device memory of their device, of peers that were enabled, and pinned host memory;
// anything else is CUDA_ERROR_ILLEGAL_ADDRESS (sections "Unified Addressing", "Peer Context Memory
// Access").
KVF_DOUBLE_EXPORT void* kvf_cuda_double_access(CUdeviceptr address, size_t bytes,
                                               CUdeviceptr* first_valid, size_t* valid_bytes) {
  if (running == nullptr) std::abort();  // not inside a kernel
  const auto range = find_range(address);
  const char* why = nullptr;
  if (!range) {
    why = "memory that the device cannot reach, at ";
  } else if (bytes > range->bytes - (address - range->base)) {
    why = "memory behind the end of an allocation, at ";
  } else if (range->on_device() && range->device != running->context->device) {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (running->context->peers.count(range->device) == 0) why = "a peer's memory without peer access, at ";
  }
  if (why != nullptr) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", address);
    running->failed = true;
    running->why = std::string(why) + text;
    return nullptr;
  }
  if (first_valid != nullptr) *first_valid = range->base;
  if (valid_bytes != nullptr) *valid_bytes = range->bytes;
  return range->host + (address - range->base);
}

}  // extern "C"
