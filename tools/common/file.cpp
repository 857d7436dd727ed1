// SPDX-License-Identifier: Apache-2.0
#include "file.hpp"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>

namespace kvferry::tools {

namespace {

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

[[noreturn]] void fail(const std::string& what, const std::string& path, const std::string& why) {
  throw std::runtime_error("cannot " + what + " " + path + ": " + why);
}

}  // namespace

std::string read_file(const std::string& path) {
  const File file(std::fopen(path.c_str(), "rb"), std::fclose);
  if (file == nullptr) fail("read", path, std::strerror(errno));
  std::string text;
  char part[64 << 10];
  while (const std::size_t n = std::fread(part, 1, sizeof part, file.get())) text.append(part, n);
  if (std::ferror(file.get()) != 0) fail("read", path, std::strerror(errno));
  if (text.empty()) fail("read", path, "it is empty");
  return text;
}

void write_file(const std::string& path, const std::vector<std::uint8_t>& bytes) {
  File file(std::fopen(path.c_str(), "wb"), std::fclose);
  if (file == nullptr) fail("write", path, std::strerror(errno));
  const bool written = std::fwrite(bytes.data(), 1, bytes.size(), file.get()) == bytes.size();
  if (!written || std::fclose(file.release()) != 0) fail("write", path, std::strerror(errno));
}

}  // namespace kvferry::tools
