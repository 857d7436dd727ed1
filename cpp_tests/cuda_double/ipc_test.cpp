// Memory and events between processes.
#include "fixture.hpp"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

// The other process: a command in, a line back.
class Peer {
 public:
  Peer() {
    int in[2], out[2];
    if (pipe(in) != 0 || pipe(out) != 0) throw std::runtime_error("pipe failed");
    pid_ = fork();
    if (pid_ == 0) {
      dup2(in[0], 0);
      dup2(out[1], 1);
      for (int fd : {in[0], in[1], out[0], out[1]}) close(fd);
      execl(DOUBLE_PEER, DOUBLE_PEER, nullptr);
      _exit(127);
    }
    close(in[0]);
    close(out[1]);
    to_ = fdopen(in[1], "w");
    from_ = fdopen(out[0], "r");
  }
  ~Peer() {
    die();
    fclose(to_);
    fclose(from_);
  }
  std::string ask(const std::string& command) {
    fprintf(to_, "%s\n", command.c_str());
    fflush(to_);
    char line[256] = {};
    if (fgets(line, sizeof line, from_) == nullptr) return "nothing";
    line[strcspn(line, "\n")] = 0;
    return line;
  }
  void die() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  FILE* to_ = nullptr;
  FILE* from_ = nullptr;
};

template <class Handle>
std::string hex(const Handle& handle) {
  std::string text;
  for (const char byte : handle.reserved) {
    char two[3];
    snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(byte));
    text += two;
  }
  return text;
}

CUipcMemHandle from_hex(const std::string& text) {
  CUipcMemHandle handle{};
  for (size_t i = 0; i < sizeof handle && 2 * i + 1 < text.size(); ++i) {
    handle.reserved[i] = static_cast<char>(std::stoul(text.substr(2 * i, 2), nullptr, 16));
  }
  return handle;
}

using Ipc = Double;

TEST_F(Ipc, BothProcessesSeeTheSameMemory) {
  const CUdeviceptr a = filled(10000, 11);
  CUipcMemHandle handle;
  CU_OK(cuIpcGetMemHandle(&handle, a));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&handle, a + 1));
  Peer peer;
  EXPECT_EQ("0", peer.ask("mem " + hex(handle)));
  EXPECT_EQ("11", peer.ask("read"));
  EXPECT_EQ("0", peer.ask("write 12"));
  EXPECT_EQ(12, byte_at(a));
  // Opened twice is counted twice and mapped once.
  EXPECT_EQ("0", peer.ask("mem " + hex(handle)));
  EXPECT_EQ("2", peer.ask("mappings"));
  EXPECT_EQ("0", peer.ask("close"));
  EXPECT_EQ("12", peer.ask("read"));
  EXPECT_EQ("0", peer.ask("close"));
  EXPECT_EQ("0", peer.ask("mappings"));
  EXPECT_EQ("1", peer.ask("close")) << "CUDA_ERROR_INVALID_VALUE";
  CU_OK(cuMemFree_v2(a));
  EXPECT_EQ(0u, books().violations);
}

TEST_F(Ipc, TheExporterCannotOpenItsOwnHandle) {
  const CUdeviceptr a = filled(100, 1);
  CUipcMemHandle handle;
  CU_OK(cuIpcGetMemHandle(&handle, a));
  CUdeviceptr b = 0;
  EXPECT_EQ(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle_v2(&b, handle, 1));
}

TEST_F(Ipc, AStaleHandleIsRefused) {
  const CUdeviceptr a = filled(4096, 1);
  CUipcMemHandle old, fresh;
  CU_OK(cuIpcGetMemHandle(&old, a));
  CU_OK(cuMemFree_v2(a));
  const CUdeviceptr b = filled(4096, 2);
  ASSERT_EQ(a, b);
  CU_OK(cuIpcGetMemHandle(&fresh, b));
  EXPECT_NE(0, memcmp(&old, &fresh, sizeof old));
  Peer peer;
  EXPECT_EQ("1", peer.ask("mem " + hex(old)));
  EXPECT_EQ("0", peer.ask("mem " + hex(fresh)));
  EXPECT_EQ("2", peer.ask("read"));
}

TEST_F(Ipc, FreeingWhatAnotherHasOpenIsAViolation) {
  const CUdeviceptr a = filled(4096, 1);
  CUipcMemHandle handle;
  CU_OK(cuIpcGetMemHandle(&handle, a));
  Peer peer;
  EXPECT_EQ("0", peer.ask("mem " + hex(handle)));
  CU_OK(cuMemFree_v2(a));
  EXPECT_EQ(1u, books().violations);
  EXPECT_NE("1", peer.ask("read")) << "the importer is left with garbage";
}

TEST_F(Ipc, AnImporterThatDiedHoldsNothing) {
  const CUdeviceptr a = filled(4096, 1);
  CUipcMemHandle handle;
  CU_OK(cuIpcGetMemHandle(&handle, a));
  {
    Peer peer;
    EXPECT_EQ("0", peer.ask("mem " + hex(handle)));
  }
  CU_OK(cuMemFree_v2(a));
  EXPECT_EQ(0u, books().violations);
}

TEST_F(Ipc, AMappingOutlivesItsExporter) {
  Peer peer;
  const CUipcMemHandle handle = from_hex(peer.ask("export"));
  CUdeviceptr a = 0, b = 0;
  CU_OK(cuIpcOpenMemHandle_v2(&a, handle, 1));
  unsigned type = 0;
  CU_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, a));
  EXPECT_EQ(unsigned{CU_MEMORYTYPE_DEVICE}, type);
  EXPECT_EQ(1u, books().ipc_mappings);
  peer.die();
  EXPECT_EQ(33, byte_at(a));
  CU_OK(cuIpcCloseMemHandle(a));
  EXPECT_EQ(0u, books().ipc_mappings);
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&b, handle, 1)) << "the exporter is gone";
}

TEST_F(Ipc, AMappingBelongsToOneContext) {
  Peer peer;
  const CUipcMemHandle handle = from_hex(peer.ask("export"));
  CUdeviceptr a = 0, b = 0;
  CU_OK(cuIpcOpenMemHandle_v2(&a, handle, 1));
  CUcontext other = nullptr;
  CU_OK(cuCtxCreate_v2(&other, 0, 0));
  EXPECT_EQ(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle_v2(&b, handle, 1));
  CU_OK(cuCtxDestroy_v2(other));
  CU_OK(cuIpcCloseMemHandle(a));
}

TEST_F(Ipc, EventsOrderBetweenProcesses) {
  const CUdeviceptr a = filled(4096, 1);
  const CUstream stream = held_stream();
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
  CUipcMemHandle memory;
  CUipcEventHandle ready;
  CU_OK(cuIpcGetMemHandle(&memory, a));
  CU_OK(cuIpcGetEventHandle(&ready, event));
  CU_OK(cuMemsetD8Async(a, 5, 4096, stream));
  CU_OK(cuEventRecord(event, stream));
  EXPECT_EQ(CUDA_ERROR_NOT_READY, cuEventQuery(event));
  Peer peer;
  EXPECT_EQ("0", peer.ask("mem " + hex(memory)));
  EXPECT_EQ("0", peer.ask("event " + hex(ready)));
  EXPECT_EQ("0", peer.ask("copy_after_event"));
  linger();
  CU_OK(kvf_cuda_double_release(stream));
  EXPECT_EQ("5", peer.ask("copied"));
  // And the other way.
  EXPECT_EQ("0", peer.ask("record"));
  CU_OK(cuEventSynchronize(event));
  EXPECT_EQ(77, byte_at(a));
}

}  // namespace
