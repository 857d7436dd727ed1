// The driver refuses calls, and contexts end: each operation comes to an end that says so, memory is
// safe or in quarantine, and nothing of kvferry is left.
#include "gpu.hpp"

#include <memory>

namespace {

using namespace kvferry_test;

const Ints kFrom{3, 9}, kTo{5, 6};

// Every function of the driver that kvferry calls after loading it.
const std::vector<std::string> kFunctions = {
    "cuCtxPushCurrent",    "cuCtxPopCurrent",      "cuCtxGetCurrent",
    "cuCtxGetDevice",      "cuDeviceGet",          "cuDeviceGetAttribute",
    "cuDeviceGetUuid",     "cuPointerGetAttribute", "cuMemGetAddressRange",
    "cuIpcGetMemHandle",   "cuStreamCreate",       "cuStreamDestroy",
    "cuStreamQuery",       "cuStreamWaitEvent",    "cuStreamGetCtx",
    "cuStreamIsCapturing", "cuStreamWaitValue32",  "cuEventCreate",
    "cuEventDestroy",      "cuEventRecord",        "cuEventQuery",
    "cuLaunchHostFunc",    "cuMemcpyAsync",        "cuMemHostAlloc",
    "cuMemFreeHost",       "cuMemHostRegister",    "cuMemHostGetDevicePointer",
    "cuModuleLoadData", "cuModuleUnload",
    "cuModuleGetFunction", "cuLaunchKernel",
    "cuMemHostUnregister"};  // last: that address cannot be pinned again

// What a refusal of these leaves open cannot be closed by anybody.
bool closes(const std::string& function) {
  for (const char* name : {"cuCtxPushCurrent", "cuCtxPopCurrent", "cuStreamDestroy", "cuEventDestroy", "cuEventRecord",
                           "cuMemFreeHost", "cuMemHostUnregister", "cuModuleUnload"}) {
    if (function == name) return true;
  }
  return false;
}

std::uint64_t open_things(const kvf_cuda_double_books& b) {
  return b.streams + b.events + b.pinned_allocations + b.pinned_registrations + b.modules +
         b.ipc_mappings;
}

std::string text(const kvf_cuda_double_books& b) {
  std::string all;
  for (auto n : {b.streams, b.events, b.pinned_allocations, b.pinned_registrations, b.modules}) {
    all += std::to_string(n) + " ";
  }
  return all;
}

// One transfer with everything: device pools, a pinned pool, a stream at each end, a stream that
// waits, many runs. Whatever is refused is told, with the driver's name and number for it.
class Scenario {
 public:
  Scenario(std::string transports, Stream& stream)
      : transports_(std::move(transports)), stream_(stream) {}
  bool refused = false;       // something was
  bool quarantined = false;   // the destination's slots were never safe

  void run() {
    const auto depth = OF_DOUBLE(kvf_cuda_double_stack_depth);
    const std::size_t before = depth();
    try {
      transfer();
    } catch (const kvferry::Error& e) {
      told(e.what());
    }
    while (depth() > before) {  // cuCtxPopCurrent was refused
      CUcontext popped = nullptr;
      (void)OF_DOUBLE(cuCtxPopCurrent_v2)(&popped);
    }
    Cuda::get().enter();
    stream_.synchronize();
  }

 private:
  void told(const std::string& text) {
    refused = true;
    // An unpinning that was refused leaves an address that may come again.
    if (text.find("are pinned already") != std::string::npos) return;
    EXPECT_NE(text.find("(999)"), std::string::npos) << text;
  }
  kvferry::AgentConfig config(const char* name) const {
    auto config = kvferry_test::config(name);
    config.transports = transports_;
    return config;
  }
  void transfer() {
    Gpu gpu(config("source"), config("sink"));
    // Our own work is over before the memory is freed.
    struct Finish {
      Stream& stream;
      ~Finish() { (void)Cuda::get().stream_synchronize(stream.raw()); }
    } finish{stream_};
    kvf_host_pool_config pinned = KVF_HOST_POOL_CONFIG_INIT;
    pinned.bytes = 4096;
    pinned.flags = KVF_POOL_PINNED;
    kvf_pool* made = nullptr;
    if (kvf_host_pool_create(gpu.sink.agent.c(), &pinned, &made) != KVF_OK) {
      told(kvferry::last_error());
    }
    const std::unique_ptr<kvf_pool, kvf_status (*)(kvf_pool*)> pool(made, &kvf_pool_destroy);
    const Ints from{1, 3, 5, 7, 9, 11}, to{2, 4, 6, 8, 10, 12};
    stream_.set(Gpu::block(gpu.source, 3), 0x33, Cache::block);
    auto publication = gpu.publish_behind(stream_, 1, from, 24);
    auto transfer = gpu.pull_behind(stream_.c(), publication.ticket(), to);
    if (kvf_transfer_stream_wait(transfer.c(), stream_.c()) != KVF_OK) told(kvferry::last_error());
    const auto status = transfer.wait(kLong);
    if (status == KVF_OK) {
      EXPECT_EQ(gpu.sink.block(0, 4), bytes_of(0x33, Cache::block));
      EXPECT_EQ(gpu.sink.block(1, 12), gpu.source.block(1, 11));
    } else {  // the cause is either side's
      told(transfer.error_text() +
           (publication.wait(kLong) == KVF_OK ? std::string() : kvferry::last_error()));
    }
    linger();
    quarantined = transfer.query().memory_safe == 0;
    EXPECT_EQ(gpu.sink.agent.quarantine().empty(), !quarantined);
    EXPECT_NE(publication.wait(kLong), KVF_TIMED_OUT) << "the source hears of it";
  }

  std::string transports_;
  Stream& stream_;
};

class Refusals : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Transports, Refusals, testing::Values("inproc", "tcp"));

TEST_P(Refusals, EveryCallOfTheDriverMayFailOnce) {
  OF_DOUBLE(kvf_cuda_double_delay)(0, 100);
  const auto calls = OF_DOUBLE(kvf_cuda_double_calls);
  Stream stream;
  Scenario(GetParam(), stream).run();  // for the kernel's module, and what else is made once
  for (const std::string& function : kFunctions) {
    const auto first = calls(function.c_str());
    Scenario(GetParam(), stream).run();
    const auto number = calls(function.c_str()) - first;
    int hit = 0;
    for (std::uint64_t n = 1; n <= number; n += n < 4 ? 1 : n / 2) {
      SCOPED_TRACE(function + ", call " + std::to_string(n) + " of " + std::to_string(number));
      const auto before = books();
      OF_DOUBLE(kvf_cuda_double_fail)((function + ":" + std::to_string(n) + "=999").c_str());
      bool quarantined = false;
      {
        Scenario scenario(GetParam(), stream);
        scenario.run();
        hit += scenario.refused ? 1 : 0;
        quarantined = scenario.quarantined;
      }
      OF_DOUBLE(kvf_cuda_double_fail)("");
      // Nobody knows whether a copy is over once the driver does not say.
      if (quarantined) {
        EXPECT_TRUE(function == "cuStreamQuery" || function == "cuCtxPushCurrent" ||
                    function == "cuLaunchHostFunc");
        continue;
      }
      const auto after = books();
      EXPECT_LE(open_things(after), open_things(before) + (closes(function) ? 1 : 0))
          << "streams, events, pinned allocations and registrations, modules: " << text(after)
          << "before: " << text(before);
      EXPECT_EQ(after.violations, before.violations);
      if (function == "cuMemHostUnregister") break;
    }
    std::printf("%s: %d of %d calls\n", function.c_str(), hit, static_cast<int>(number));
  }
}

// A context of the engine's own, which it destroys too early.
struct OwnContext {
  OwnContext() {
    Cuda::check(OF_DOUBLE(cuCtxCreate_v2)(&context, 0, 0), "cuCtxCreate");
    Cuda::check(Cuda::get().alloc(&memory, 2 * Cache::bytes), "cuMemAlloc");
  }
  ~OwnContext() { destroy(); }
  void destroy() {
    if (context != nullptr) (void)OF_DOUBLE(cuCtxDestroy_v2)(context);
    context = nullptr;
  }
  // What its other users see from now on; the double's cuCtxDestroy waits for all work.
  void lose() const {
    OF_DOUBLE(kvf_cuda_double_fail_context)(context, CUDA_ERROR_CONTEXT_IS_DESTROYED);
  }
  void* at(std::size_t offset) const {
    return reinterpret_cast<void*>(static_cast<std::uintptr_t>(memory + offset));
  }
  CUcontext context = nullptr;
  CUdeviceptr memory = 0;
};

struct OwnPair {
  OwnPair() : source(config("source")), sink(config("sink")) {
    from = source.register_device_memory(own.at(0), Cache::bytes);
    source.set_layout(Cache::groups(from));
    to = sink.register_device_memory(own.at(Cache::bytes), Cache::bytes);
    sink.set_layout(Cache::groups(to));
    engines[0] = source.engine();
    engines[1] = sink.engine();
    peer = sink.add_peer(engines[0].metadata());
    kvferry::check(peer.wait(kLong));
  }
  ~OwnPair() {
    EXPECT_EQ(sink.destroy(kLong), KVF_OK);
    EXPECT_EQ(source.destroy(kLong), KVF_OK);
  }
  OwnContext own;
  kvferry::Agent source, sink;
  kvferry::Pool from, to;
  kvferry::Engine engines[2];
  kvferry::Peer peer;
};

TEST(DestroyedContext, EndsTransfersThatBeginLater) {
  OwnPair pair;
  auto publication = pair.source.publish(kvferry::key(1), 0, kFrom, 8);
  pair.own.destroy();
  auto transfer = pair.sink.pull_begin(pair.peer, publication.ticket(), 0, kTo);
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_TRANSFER);
  EXPECT_NE(transfer.error_text().find("CUDA_ERROR_INVALID_CONTEXT (201)"), std::string::npos)
      << transfer.error_text();
  EXPECT_TRUE(safe_soon(transfer)) << "nothing was enqueued";
  EXPECT_NE(publication.wait(kLong), KVF_TIMED_OUT);
}

TEST(DestroyedContext, LeavesACopyInQuarantine) {
  OwnPair pair;
  auto publication = pair.source.publish(kvferry::key(1), 0, kFrom, 8);
  OF_DOUBLE(kvf_cuda_double_hold_all)(1);
  auto transfer = pair.sink.pull_begin(pair.peer, publication.ticket(), 0, kTo);
  ASSERT_TRUE(eventually([] { return books().pending_work > 0; }));
  linger();
  pair.own.lose();
  EXPECT_EQ(transfer.wait(kLong), KVF_ERR_TRANSFER);
  EXPECT_NE(transfer.error_text().find("CUDA_ERROR_CONTEXT_IS_DESTROYED (709)"), std::string::npos)
      << transfer.error_text();
  linger();
  EXPECT_EQ(transfer.query().memory_safe, 0u) << "nobody can prove that the copy is over";
  EXPECT_EQ(pair.sink.quarantine().size(), 2u);
  OF_DOUBLE(kvf_cuda_double_hold_all)(0);
}

TEST(DestroyedContext, EndsWhatWaitsForItsStreams) {
  OwnPair pair;
  Cuda::check(Cuda::get().set_current(pair.own.context), "cuCtxSetCurrent");
  CUstream stream = nullptr;
  Cuda::check(Cuda::get().stream_create(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  Cuda::check(OF_DOUBLE(kvf_cuda_double_hold)(stream), "hold");
  Cuda::check(Cuda::get().set_async(pair.own.memory, 0x33, 64, stream), "cuMemsetD8Async");
  kvferry::Offer offer;
  offer.key = kvferry::key(1);
  offer.groups = {kvferry::published(0, kFrom, 0, 8)};
  offer.stream = stream;
  auto publication = pair.source.publish(offer);
  auto transfer = pair.sink.pull_begin(pair.peer, publication.ticket(), 0, kTo);
  linger();
  EXPECT_EQ(transfer.poll(), KVF_IN_PROGRESS);
  pair.own.lose();
  EXPECT_REFUSED(publication.wait(kLong), KVF_ERR_TRANSFER, "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)");
  EXPECT_NE(transfer.wait(kLong), KVF_OK);
  EXPECT_TRUE(safe_soon(transfer)) << "no byte of it was ever copied";
  kvferry::Offer again = offer;
  again.key = kvferry::key(2);
  EXPECT_THROW((void)pair.source.publish(again), kvferry::Error);
  Cuda::check(OF_DOUBLE(kvf_cuda_double_release)(stream), "release");
}

// "May be freed now" is said when the device is done with the pool, on either side.
TEST(Unregister, WaitsForCopiesOnTheDevice) {
  for (const bool source : {true, false}) {
    SCOPED_TRACE(source ? "source" : "destination");
    Gpu gpu;
    auto publication = gpu.publish(1, kFrom, 8);
    OF_DOUBLE(kvf_cuda_double_hold_all)(1);
    auto transfer = gpu.sink.agent.pull_begin(gpu.peer, publication.ticket(), 0, kTo);
    ASSERT_TRUE(eventually([] { return books().pending_work > 0; }));
    auto& pool = (source ? gpu.source : gpu.sink).memory.pool();
    pool.unregister_begin(kLong);
    linger();
    kvf_pool_info info = KVF_POOL_INFO_INIT;
    kvferry::check(kvf_pool_query(pool.c(), &info));
    EXPECT_EQ(info.status, KVF_IN_PROGRESS) << "the device still uses it";
    OF_DOUBLE(kvf_cuda_double_hold_all)(0);
    EXPECT_NE(transfer.wait(kLong), KVF_TIMED_OUT);
    EXPECT_TRUE(safe_soon(transfer));
    EXPECT_TRUE(eventually([&] {
      return kvf_pool_query(pool.c(), &info) == KVF_OK && info.status == KVF_OK;
    }));
  }
  EXPECT_EQ(books().violations, 0u);
}

}  // namespace
