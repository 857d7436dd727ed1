// The other process of the suites: opens what it is told about, and answers on standard output.
// Commands, one a line: mem HEX, event HEX, copy VALUE-WHEN, read, write N, close, exit.
#include "control.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <string>

namespace {

template <class Handle>
Handle from_hex(const std::string& text) {
  Handle handle{};
  auto* bytes = reinterpret_cast<unsigned char*>(&handle);
  for (size_t i = 0; i < sizeof handle && 2 * i + 1 < text.size(); ++i) {
    bytes[i] = static_cast<unsigned char>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  }
  return handle;
}

void answer(long value) {
  std::printf("%ld\n", value);
  std::fflush(stdout);
}

long byte_at(CUdeviceptr pointer) {
  unsigned char byte = 0;
  const CUresult result = cuMemcpyDtoH_v2(&byte, pointer, 1);
  return result == CUDA_SUCCESS ? byte : -result;
}

}  // namespace

int main() {
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  if (cuInit(0) != 0 || cuDevicePrimaryCtxRetain(&context, 0) != 0 || cuCtxSetCurrent(context) != 0 ||
      cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != 0) {
    return 1;
  }
  CUdeviceptr memory = 0, copy = 0;
  CUevent event = nullptr;
  std::string command, argument;
  while (std::cin >> command) {
    if (command == "mem") {
      std::cin >> argument;
      answer(cuIpcOpenMemHandle_v2(&memory, from_hex<CUipcMemHandle>(argument), 1));
    } else if (command == "event") {
      std::cin >> argument;
      answer(cuIpcOpenEventHandle(&event, from_hex<CUipcEventHandle>(argument)));
    } else if (command == "read") {
      answer(byte_at(memory));
    } else if (command == "write") {
      std::cin >> argument;
      answer(cuMemsetD8_v2(memory, static_cast<unsigned char>(std::stoi(argument)), 1));
    } else if (command == "copy_after_event") {  // begins; "copied" ends it
      cuMemAlloc_v2(&copy, 1);
      CUresult result = cuStreamWaitEvent(stream, event, 0);
      if (result == 0) result = cuMemcpyDtoDAsync_v2(copy, memory, 1, stream);
      answer(result);
    } else if (command == "copied") {
      const CUresult result = cuStreamSynchronize(stream);
      answer(result == 0 ? byte_at(copy) : -result);
    } else if (command == "record") {
      CUresult result = cuMemsetD8Async(memory, 77, 1, stream);
      if (result == 0) result = cuEventRecord(event, stream);
      answer(result);
    } else if (command == "close") {
      answer(cuIpcCloseMemHandle(memory));
    } else if (command == "mappings") {
      kvf_cuda_double_books books;
      kvf_cuda_double_read_books(&books);
      answer(static_cast<long>(books.ipc_mappings));
    } else if (command == "export") {
      CUipcMemHandle handle;
      cuMemAlloc_v2(&memory, 4096);
      cuMemsetD8_v2(memory, 33, 4096);
      cuIpcGetMemHandle(&handle, memory);
      for (const char byte : handle.reserved) std::printf("%02x", static_cast<unsigned char>(byte));
      std::printf("\n");
      std::fflush(stdout);
    } else {
      break;
    }
  }
  return 0;
}
