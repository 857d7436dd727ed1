// Injected failures, variants of the library, the books.
#include "fixture.hpp"

#include <dlfcn.h>

namespace {

using Faults = Double;

TEST_F(Faults, TheNthCallFails) {
  CUevent event = nullptr;
  CU_OK(kvf_cuda_double_fail("cuEventCreate:2=2"));
  CU_OK(cuEventCreate(&event, 0));
  EXPECT_EQ(CUDA_ERROR_OUT_OF_MEMORY, cuEventCreate(&event, 0));
  CU_OK(cuEventCreate(&event, 0));
  CU_OK(kvf_cuda_double_fail("cuMemAlloc:1+=2,cuEventQuery=999"));
  CUdeviceptr a = 0;
  EXPECT_EQ(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&a, 1));
  EXPECT_EQ(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&a, 1));
  EXPECT_EQ(CUDA_ERROR_UNKNOWN, cuEventQuery(event));
  CU_OK(kvf_cuda_double_fail(nullptr));
  CU_OK(cuMemAlloc_v2(&a, 1));
  EXPECT_EQ(-1, kvf_cuda_double_fail("cuMemAlloc:0=2"));
  EXPECT_EQ(-1, kvf_cuda_double_fail("cuMemAlloc"));
  EXPECT_EQ(-1, kvf_cuda_double_fail("cuMemAlloc=x"));
  EXPECT_EQ(3u, kvf_cuda_double_calls("cuEventCreate"));
  EXPECT_EQ(3u, kvf_cuda_double_calls("cuMemAlloc_v2"));
}

TEST_F(Faults, TextsOfErrors) {
  const char* text = nullptr;
  CU_OK(cuGetErrorName(700, &text));
  EXPECT_STREQ("CUDA_ERROR_ILLEGAL_ADDRESS", text);
  CU_OK(cuGetErrorString(100, &text));
  EXPECT_STREQ("no CUDA-capable device is detected", text);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuGetErrorName(123456, &text));
  EXPECT_EQ(nullptr, text);
}

template <class Function>
Function* function_of(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

TEST(Variants, StubLibrary) {
  void* library = dlopen(DOUBLE_DIR "/stub/libcuda.so", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(nullptr, library) << dlerror();
  EXPECT_EQ(CUDA_ERROR_STUB_LIBRARY, function_of<CUresult(unsigned)>(library, "cuInit")(0));
}

TEST(Variants, OldDriver) {
  void* library = dlopen(DOUBLE_DIR "/old/libcuda.so", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(nullptr, library) << dlerror();
  int version = 0;
  CU_OK(function_of<CUresult(int*)>(library, "cuDriverGetVersion")(&version));
  EXPECT_EQ(11020, version);
  EXPECT_EQ(nullptr, dlsym(library, "cuStreamWaitValue32_v2"));
  EXPECT_EQ(nullptr, dlsym(library, "cuGetProcAddress_v2"));
  EXPECT_NE(nullptr, dlsym(library, "cuMemcpyAsync"));
  CU_OK(function_of<CUresult(unsigned)>(library, "cuInit")(0));
}

TEST(Variants, BrokenDriver) {
  void* library = dlopen(DOUBLE_DIR "/broken/libcuda.so", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(nullptr, library) << dlerror();
  EXPECT_EQ(nullptr, dlsym(library, "cuMemcpyAsync"));
  EXPECT_NE(nullptr, dlsym(library, "cuMemcpyDtoDAsync_v2"));
}

TEST(Variants, EntryPointsByName) {
  void* function = nullptr;
  int status = -1;
  CU_OK(cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &status));
  EXPECT_EQ(reinterpret_cast<void*>(&cuMemAlloc_v2), function);
  EXPECT_EQ(0, status);
  CU_OK(cuGetProcAddress_v2("cuMemcpyAsync", &function, 12000, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
  EXPECT_NE(reinterpret_cast<void*>(&cuMemcpyAsync), function);
  EXPECT_EQ(CUDA_ERROR_NOT_FOUND, cuGetProcAddress_v2("cuNothing", &function, 12000, 0, &status));
  EXPECT_EQ(1, status);
}

}  // namespace
