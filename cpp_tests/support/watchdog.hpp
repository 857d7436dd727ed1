// Turns a hang into a failure that shows every thread's stack.
#pragma once

namespace kvferry_test {

// Starts a thread that prints all stacks and aborts the process after KVFERRY_TEST_WATCHDOG_S
// seconds (default 300, 0: never).
void start_watchdog();

}  // namespace kvferry_test
