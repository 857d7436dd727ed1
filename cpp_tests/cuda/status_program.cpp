// What the library says about the CUDA driver, and how it refuses device memory without one.
#include <kvferry.hpp>

#include <cstdio>

int main() {
  char text[1024] = "";
  const kvf_status status = kvf_cuda_info(text, sizeof text, nullptr);
  std::printf("%s: %s\n", kvf_status_name(status),
              status == KVF_OK ? text : kvferry::last_error().c_str());
  kvferry::Agent agent;
  kvf_pool_desc desc = KVF_POOL_DESC_INIT;
  desc.memory_kind = KVF_MEMORY_DEVICE;
  desc.base = text;
  desc.bytes = sizeof text;
  kvf_pool* pool = nullptr;
  const kvf_status refused = kvf_pool_register(agent.c(), &desc, &pool);
  std::printf("register %s\n", kvf_status_name(refused));
  return refused == (status == KVF_OK ? KVF_ERR_INVALID_ARGUMENT : status) ? 0 : 1;
}
