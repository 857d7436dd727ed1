// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvferry::tools {

// All bytes of a file that a user named. Throws std::runtime_error with the name and the reason: it is
// not there, a directory, not to be read, or empty.
std::string read_file(const std::string& path);

// Makes or replaces a file. Throws std::runtime_error with the name and the reason.
void write_file(const std::string& path, const std::vector<std::uint8_t>& bytes);

}  // namespace kvferry::tools
