// The objects of the double and the one table that owns them. Everything is reached through
// state(), which is never destroyed: streams' threads may run until the process is gone.
#pragma once

#include "control.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define KVF_DOUBLE_EXPORT __attribute__((visibility("default")))

namespace cuda_double {

struct Stream;
struct SharedAllocation;  // ipc.hpp
struct SharedEvent;       // ipc.hpp

struct Context {
  CUcontext handle = nullptr;
  CUdevice device = 0;
  bool primary = false;
  unsigned retains = 0;              // of a primary context
  std::atomic<bool> destroyed{false};
  std::atomic<CUresult> failed{0};   // sticky: see fail()
  std::set<CUdevice> peers;          // devices whose memory kernels may reach
  std::shared_ptr<Stream> legacy;    // the NULL stream
  std::map<std::thread::id, std::shared_ptr<Stream>> per_thread;
};

// One piece of memory that the driver knows: addresses as the caller sees them, and where the bytes
// really are.
struct Range {
  enum class Kind { Device, Imported, HostAllocated, HostRegistered };
  Kind kind = Kind::Device;
  CUdeviceptr base = 0;
  size_t bytes = 0;
  char* host = nullptr;  // the double's own mapping; for host memory the memory itself
  CUdevice device = 0;
  std::shared_ptr<Context> context;
  uint64_t id = 0;           // CU_POINTER_ATTRIBUTE_BUFFER_ID
  bool exportable = false;   // by cuIpcGetMemHandle
  bool read_only = false;
  std::atomic<bool> freed{false};
  // Of Device and Imported:
  int fd = -1;
  size_t mapped = 0;  // bytes of the data mapping and of the guard
  SharedAllocation* shared = nullptr;
  unsigned opened = 0;  // of Imported: openings not yet closed
  std::string origin;   // of Imported: whose and which

  bool on_device() const { return kind == Kind::Device || kind == Kind::Imported; }
  ~Range();
};

// The state of one cuEventRecord.
struct Record {
  std::atomic<bool> done{false};
  std::shared_ptr<Context> context;
};

struct Event {
  CUevent handle = nullptr;
  unsigned flags = 0;
  std::shared_ptr<Context> context;
  std::shared_ptr<Record> latest;  // none: never recorded
  SharedEvent* shared = nullptr;   // with CU_EVENT_INTERPROCESS
  int fd = -1;
  ~Event();
};

// Work of one stream, executed in order by its thread.
struct Work {
  enum class Kind { Transfer, HostFunction, Marker, Wait };  // the first two are delayed
  Kind kind = Kind::Marker;
  std::function<CUresult()> run;
  // Work of other streams that must have been executed before.
  std::vector<std::pair<std::shared_ptr<Stream>, uint64_t>> after;
};

struct Stream {
  CUstream handle = nullptr;
  std::shared_ptr<Context> context;
  bool blocking = true;  // synchronises with the legacy default stream
  bool special = false;  // a default stream
  // Guarded by state().progress:
  std::deque<Work> queue;
  uint64_t enqueued = 0, completed = 0;
  bool held = false, closing = false, running = false, waiting_for_value = false;
  std::atomic<bool> capturing{false};
};

struct Module {
  CUmodule handle = nullptr;
  std::shared_ptr<Context> context;
  std::set<std::string> entries;
};

struct Kernel {
  kvf_cuda_double_kernel run = nullptr;
  std::vector<size_t> sizes;
};

struct Function {
  std::string name;
  CUmodule module = nullptr;
  Kernel kernel;
};

struct State {
  // Guards every table below and the objects' plain fields. Never held while work is executed.
  std::mutex mutex;
  std::unordered_map<CUcontext, std::shared_ptr<Context>> contexts;
  std::map<CUdevice, std::shared_ptr<Context>> primaries;
  std::unordered_map<CUstream, std::shared_ptr<Stream>> streams;
  std::unordered_map<CUevent, std::shared_ptr<Event>> events;
  std::map<CUdeviceptr, std::shared_ptr<Range>> ranges;  // by base
  std::unordered_map<CUmodule, std::shared_ptr<Module>> modules;
  std::unordered_map<CUfunction, std::shared_ptr<Function>> functions;
  std::map<std::string, Kernel> kernels;
  std::vector<std::weak_ptr<Stream>> all_streams;  // the default ones and closing ones too
  uint64_t next_handle = 0x7d0000001000;           // never reused: a stale handle is found out
  uint64_t next_buffer = 1;
  std::vector<std::string> violations;

  // Guards the streams' queues; signalled whenever any work has been executed.
  std::mutex progress;
  std::condition_variable progressed;
  bool all_held = false;  // guarded by progress

  std::atomic<uint64_t> copies{0}, copied_bytes{0}, pageable_copies{0}, launches{0},
      host_functions{0}, unresolved_waits{0};
  std::atomic<bool> initialised{false};
  int pid = 0;           // that called cuInit
  int device_count = 1;  // KVF_CUDA_DOUBLE_DEVICES
  bool peers = true;     // KVF_CUDA_DOUBLE_PEERS=0: no peer access
  int version = 13000;
  // kvf_cuda_double_gpu_direct.
  std::atomic<int> rdma_supported{1}, rdma_ordering{200}, rdma_flush{1};

  template <class Handle>
  Handle fresh_handle() {  // with mutex held
    next_handle += 64;
    return reinterpret_cast<Handle>(next_handle);
  }
};

State& state();

// Notes a use that the driver calls undefined. Takes State::mutex.
void violation(const std::string& text);

// Fails a context for good: nothing but a new process helps (CUresult, CUDA_ERROR_ILLEGAL_ADDRESS and
// its like).
void fail(Context& context, CUresult error);

// ---- streams (stream.cpp) --------------------------------------------------------------------

// The stream of a handle: 0 and 1 are the current context's legacy default stream, 2 the calling
// thread's. Gives the sticky error of the stream's context.
CUresult find_stream(CUstream handle, const std::shared_ptr<Context>& current,
                     std::shared_ptr<Stream>& stream);
// Appends work, with what the default streams' rules make it wait for. Returns its number.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Work work);
// Blocks until work up to this number has been executed; gives the context's error.
CUresult wait_for(const std::shared_ptr<Stream>& stream, uint64_t number);
std::shared_ptr<Stream> new_stream(const std::shared_ptr<Context>& context, bool blocking,
                                   bool special);  // takes State::mutex
void close_stream(const std::shared_ptr<Stream>& stream);
// Blocks until all that is enqueued in the context has been executed.
CUresult synchronize(const std::shared_ptr<Context>& context);

// ---- memory (memory.cpp) ---------------------------------------------------------------------

// A place of a copy, found when the copy was asked for.
struct Place {
  std::shared_ptr<Range> range;  // none: pageable host memory
  char* host = nullptr;
};

// Where [address, address + bytes) is. CUDA_ERROR_INVALID_VALUE when it leaves its allocation.
CUresult find_place(CUdeviceptr address, size_t bytes, Place& place);
std::shared_ptr<Range> find_range(CUdeviceptr address);  // takes State::mutex
// CUDA_ERROR_ILLEGAL_ADDRESS, and a violation, when the memory was freed meanwhile.
CUresult still_there(const Place& place, const char* what);

// Guarded addresses: memory that the host faults on.
CUdeviceptr take_guard(size_t bytes);
void give_back_guard(CUdeviceptr base, size_t bytes);

// ---- delays and faults (fault.cpp) -----------------------------------------------------------

// The error that the next call of this function shall give, else 0; counts the call.
CUresult injected(const char* function);
// Sleeps the time that a piece of work is delayed.
void delay();

}  // namespace cuda_double
