// The smallest program that uses kvferry.
#include <kvferry.hpp>

#include <cstdio>

int main() {
  std::printf("kvferry %s, compiled against %s\n", kvf_version_string(), KVF_VERSION_STRING);
  // Before 1.0 a program runs with the minor release that it was compiled against.
  return kvf_version() >> 16 == KVF_VERSION >> 16 ? 0 : 1;
}
