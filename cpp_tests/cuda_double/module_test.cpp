// Modules and launches.
#include "fixture.hpp"

namespace {

const char kPtx[] = ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry add_one(\n.param .u64 p)\n{ ret; }\n"
                    ".visible .entry unknown(){ ret; }\n";

// data[i] += 1 for i < count, with a grid-stride loop.
void add_one(const kvf_cuda_double_thread* thread, void* const* params) {
  const auto data = *static_cast<const CUdeviceptr*>(params[0]);
  const auto count = *static_cast<const uint32_t*>(params[1]);
  const uint32_t step = thread->grid[0] * thread->block[0];
  for (uint32_t i = thread->block_index[0] * thread->block[0] + thread->index[0]; i < count; i += step) {
    auto* byte = static_cast<unsigned char*>(kvf_cuda_double_access(data + i, 1, nullptr, nullptr));
    if (byte == nullptr) return;
    ++*byte;
  }
}

class Modules : public Double {
 protected:
  void SetUp() override {
    Double::SetUp();
    const size_t sizes[] = {sizeof(CUdeviceptr), sizeof(uint32_t)};
    ASSERT_EQ(0, kvf_cuda_double_register_kernel("add_one", add_one, sizes, 2));
    CU_OK(cuModuleLoadData(&module, kPtx));
    CU_OK(cuModuleGetFunction(&function, module, "add_one"));
  }
  CUresult launch(CUdeviceptr data, uint32_t count, CUstream stream) {
    void* params[] = {&data, &count};
    return cuLaunchKernel(function, 3, 1, 1, 32, 1, 1, 0, stream, params, nullptr);
  }
  CUmodule module = nullptr;
  CUfunction function = nullptr;
};

TEST_F(Modules, LaunchesRunOverGridAndBlock) {
  const CUdeviceptr a = filled(1000, 1);
  CU_OK(launch(a, 1000, nullptr));
  CU_OK(cuCtxSynchronize());
  std::vector<unsigned char> host(1000);
  CU_OK(cuMemcpyDtoH_v2(host.data(), a, host.size()));
  EXPECT_EQ(std::vector<unsigned char>(1000, 2), host);
  EXPECT_EQ(1u, books().launches);
}

TEST_F(Modules, LaunchesAreAsynchronousAndOrdered) {
  const CUdeviceptr a = filled(10, 1);
  const CUstream stream = held_stream();
  CU_OK(launch(a, 10, stream));
  CU_OK(launch(a, 10, stream));
  linger();
  EXPECT_EQ(1, byte_at(a));
  CU_OK(kvf_cuda_double_release(stream));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(3, byte_at(a));
}

TEST_F(Modules, AKernelBehindTheEndFailsTheContext) {
  const CUdeviceptr a = filled(10, 1);
  CU_OK(launch(a, 11, nullptr));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
  EXPECT_NE(std::string::npos, violations().find("cannot reach")) << violations();
}

TEST_F(Modules, AKernelCannotReachPageableMemory) {
  unsigned char host[10] = {};
  CU_OK(launch(reinterpret_cast<CUdeviceptr>(host), 10, nullptr));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
}

TEST_F(Modules, AKernelReachesPinnedMemory) {
  unsigned char host[10] = {};
  CU_OK(cuMemHostRegister_v2(host, sizeof host, 0));
  CU_OK(launch(reinterpret_cast<CUdeviceptr>(host), 10, nullptr));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(1, host[9]);
  CU_OK(cuMemHostUnregister(host));
}

TEST_F(Modules, NamesAndHandlesAreChecked) {
  CUfunction none = nullptr;
  EXPECT_EQ(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&none, module, "nothing"));
  EXPECT_EQ(0u, books().violations);
  EXPECT_EQ(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&none, module, "unknown"));
  EXPECT_EQ(1u, books().violations) << "the PTX has it, the double does not";
  CUmodule other = nullptr;
  EXPECT_EQ(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&other, "nonsense"));
  EXPECT_EQ(CUDA_ERROR_UNSUPPORTED_PTX_VERSION, cuModuleLoadData(&other, ".version 99.0\n.entry a()"));
  const CUdeviceptr a = filled(10, 1);
  void* params[] = {nullptr, nullptr};
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 0, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(function, 1, 1, 1, 1025, 1, 1, 0, nullptr, params, nullptr));
  CUcontext second = nullptr;
  CU_OK(cuCtxCreate_v2(&second, 0, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_HANDLE, launch(a, 10, nullptr)) << "a function is of its context";
  CU_OK(cuCtxDestroy_v2(second));
  CU_OK(cuModuleUnload(module));
  EXPECT_EQ(0u, books().modules);
  EXPECT_EQ(CUDA_ERROR_INVALID_HANDLE, launch(a, 10, nullptr));
}

// Two devices: KVF_CUDA_DOUBLE_DEVICES is read before the first call.
class Peers : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { setenv("KVF_CUDA_DOUBLE_DEVICES", "2", 1); }
};

TEST_F(Peers, PeerAccessIsAskedFor) {
  CU_OK(cuInit(0));
  int count = 0, can = 0;
  CU_OK(cuDeviceGetCount(&count));
  ASSERT_EQ(2, count);
  CU_OK(cuDeviceCanAccessPeer(&can, 0, 1));
  EXPECT_EQ(1, can);
  CUcontext one = nullptr, two = nullptr;
  CU_OK(cuCtxCreate_v2(&two, 0, 1));
  CUdeviceptr there = 0;
  CU_OK(cuMemAlloc_v2(&there, 10));
  CU_OK(cuMemsetD8_v2(there, 1, 10));
  CU_OK(cuCtxCreate_v2(&one, 0, 0));
  CUdeviceptr here = 0;
  CU_OK(cuMemAlloc_v2(&here, 10));
  CU_OK(cuMemcpyPeerAsync(here, one, there, two, 10, nullptr));  // needs no peer access
  CU_OK(cuCtxSynchronize());
  CU_OK(cuCtxEnablePeerAccess(two, 0));
  EXPECT_EQ(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(two, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuCtxEnablePeerAccess(one, 0));
  const size_t sizes[] = {sizeof(CUdeviceptr), sizeof(uint32_t)};
  kvf_cuda_double_register_kernel("add_one", add_one, sizes, 2);
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  CU_OK(cuModuleLoadData(&module, kPtx));
  CU_OK(cuModuleGetFunction(&function, module, "add_one"));
  uint32_t n = 10;
  void* params[] = {&there, &n};
  CU_OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
  CU_OK(cuCtxSynchronize());
  CU_OK(cuCtxDisablePeerAccess(two));
  CU_OK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, nullptr, params, nullptr));
  EXPECT_EQ(CUDA_ERROR_ILLEGAL_ADDRESS, cuCtxSynchronize());
}

}  // namespace
