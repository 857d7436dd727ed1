// A test's second process: answers lines of standard input, one line each.
#pragma once

#include <exception>
#include <iostream>
#include <string>

namespace kvferry_test {

// Serves with what `make` gives, by its run(line). The exit code.
template <class Make>
int serve_lines(Make make) {
  try {
    auto program = make();
    std::cout << "ready" << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      std::string answer;
      try {
        answer = program.run(line);
      } catch (const std::exception& e) {
        answer = std::string("error ") + e.what();
      }
      std::cout << answer << std::endl;
    }
    return 0;
  } catch (const std::exception& e) {
    std::cout << "error " << e.what() << std::endl;
    return 1;
  }
}

}  // namespace kvferry_test
