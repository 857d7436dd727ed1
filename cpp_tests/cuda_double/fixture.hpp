// What the suites of the double share: an initialised driver, a current context, checks.
#pragma once

#include "control.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#define CU_OK(call) ASSERT_EQ(CUDA_SUCCESS, (call))

class Double : public ::testing::Test {
 protected:
  void SetUp() override {
    CU_OK(cuInit(0));
    CU_OK(cuDevicePrimaryCtxRetain(&context, 0));
    CU_OK(cuCtxSetCurrent(context));
  }
  void TearDown() override {
    kvf_cuda_double_fail(nullptr);
    cuCtxSetCurrent(nullptr);
    cuDevicePrimaryCtxRelease_v2(0);
  }

  static kvf_cuda_double_books books() {
    kvf_cuda_double_books now;
    kvf_cuda_double_read_books(&now);
    return now;
  }
  static std::string violations() {
    std::string text(kvf_cuda_double_violations(nullptr, 0) + 1, '\0');
    kvf_cuda_double_violations(&text[0], text.size());
    text.pop_back();
    return text;
  }
  // Device memory with one value in every byte.
  static CUdeviceptr filled(size_t bytes, unsigned char value) {
    CUdeviceptr pointer = 0;
    EXPECT_EQ(CUDA_SUCCESS, cuMemAlloc_v2(&pointer, bytes));
    EXPECT_EQ(CUDA_SUCCESS, cuMemsetD8_v2(pointer, value, bytes));
    return pointer;
  }
  static int byte_at(CUdeviceptr pointer) {
    unsigned char byte = 0;
    EXPECT_EQ(CUDA_SUCCESS, kvf_cuda_double_peek(&byte, pointer, 1));
    return byte;
  }
  // A non-blocking stream that executes nothing until it is released.
  static CUstream held_stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream stream = nullptr;
    EXPECT_EQ(CUDA_SUCCESS, cuStreamCreate(&stream, flags));
    EXPECT_EQ(CUDA_SUCCESS, kvf_cuda_double_hold(stream));
    return stream;
  }
  // Long enough for work that must not be executed to show itself.
  static void linger() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }

  CUcontext context = nullptr;
};
