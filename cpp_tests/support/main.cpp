#include <gtest/gtest.h>

#include "watchdog.hpp"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  kvferry_test::start_watchdog();
  return RUN_ALL_TESTS();
}
