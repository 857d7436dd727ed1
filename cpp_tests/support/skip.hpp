// A test that cannot run here says so twice: to GoogleTest, and in the list that scripts/test
// prints last.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace kvferry_test {

// Adds a line to the file named by KVFERRY_SKIP_FILE.
inline void note_skip(const std::string& reason) {
  const char* path = std::getenv("KVFERRY_SKIP_FILE");
  if (path == nullptr) return;
  if (std::FILE* file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", reason.c_str());
    std::fclose(file);
  }
}

}  // namespace kvferry_test

// KVF_SKIP("no CUDA device");
#define KVF_SKIP(reason)                                                               \
  do {                                                                                 \
    const auto* test_ = ::testing::UnitTest::GetInstance()->current_test_info();       \
    ::kvferry_test::note_skip(std::string(test_->test_suite_name()) + "." +            \
                              test_->name() + ": " + (reason));                        \
    GTEST_SKIP() << (reason);                                                          \
  } while (false)
