// A test that hangs, for the watchdog's own test.
#include <gtest/gtest.h>
#include <unistd.h>

extern "C" __attribute__((noinline)) void hangs_for_ever() {
  for (;;) pause();
}

TEST(Victim, Hangs) { hangs_for_ever(); }
