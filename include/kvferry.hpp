// SPDX-License-Identifier: Apache-2.0
// kvferry for C++17: ownership and exceptions over kvferry.h, header-only, no logic, no ABI of its
// own. docs/abi.md holds the rules; a comment here says only what C++ adds, and a method without
// one is its C function.
//
// Every class owns one object, is movable and ends it in its destructor. Objects may outlive their
// agent; calls on them then throw KVF_ERR_SHUTDOWN. What fails throws Error; what is a state (poll,
// wait) is returned. Threads are those of the C function.
//
// To add an object without a class of its own, give its destroy function a name:
//   using Thing = Handle<kvf_thing, kvf_thing_destroy>;
// and make it with make(): auto thing = make<Thing>(kvf_thing_create, agent.c(), &config);
#pragma once

#include <kvferry.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvferry {

using Bytes = std::vector<std::uint8_t>;
using Nanoseconds = std::chrono::nanoseconds;

// Text of the calling thread's last failed call.
inline std::string last_error() {
  std::string text(kvf_last_error(nullptr, 0), '\0');
  kvf_last_error(text.data(), text.size() + 1);  // the NUL goes where std::string keeps its own
  return text;
}

// A failed call: what is lost (status) and why (what()).
class Error : public std::runtime_error {
 public:
  // Takes the text of the calling thread's last failed call.
  explicit Error(kvf_status status) : Error(status, last_error()) {}
  Error(kvf_status status, const std::string& text)
      : std::runtime_error(std::string(kvf_status_name(status)) + ": " + text), status_(status) {}

  kvf_status status() const noexcept { return status_; }

 private:
  kvf_status status_;
};

// Throws Error for an error and gives states (KVF_IN_PROGRESS, KVF_TIMED_OUT, ...) back.
inline kvf_status check(kvf_status status) {
  if (status < 0) throw Error(status);
  return status;
}

// Calls a _destroy function, whatever it returns.
template <auto Destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* object) const noexcept {
    (void)Destroy(object);
  }
};

// Owns one object of the C interface.
template <typename T, auto Destroy>
using Handle = std::unique_ptr<T, Destroyer<Destroy>>;

// Calls a function whose last parameter is the new object and owns what it made.
template <typename H, typename Create, typename... Args>
H make(Create create, Args&&... args) {
  typename H::pointer object = nullptr;
  check(create(std::forward<Args>(args)..., &object));
  return H(object);
}

namespace detail {

inline std::uint64_t ns(Nanoseconds t) noexcept {
  return t.count() < 0 ? 0 : static_cast<std::uint64_t>(t.count());
}

inline const char* text(const std::string& s) noexcept { return s.empty() ? nullptr : s.c_str(); }

// Calls `get(buf, cap, &needed)` for the size, then for the bytes.
template <class Container, class Get>
Container collect(Get get) {
  std::size_t needed = 0;
  check(get(nullptr, 0, &needed));
  Container bytes(needed, 0);
  if (needed != 0) {
    check(get(&bytes[0], needed, &needed));
  }
  return bytes;
}

// Calls `get(buf, cap, &needed)` for a NUL-terminated text.
template <class Get>
std::string collect_text(Get get) {
  auto text = collect<std::string>(get);
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  return text;
}

// The same for a text that may grow between two calls.
template <class Get>
std::string growing_text(Get get) {
  std::string text;
  std::size_t needed = 0;
  check(get(nullptr, 0, &needed));
  kvf_status status = KVF_ERR_OUT_OF_RANGE;
  while (status == KVF_ERR_OUT_OF_RANGE) {
    text.resize(needed + 1024);
    status = get(&text[0], text.size(), &needed);
  }
  check(status);
  text.resize(needed - 1);
  return text;
}

}  // namespace detail

// What every class here has: one handle, moved, never copied, destroyed at its end.
template <typename T, auto Destroy>
class Object {
 public:
  using Owner = Handle<T, Destroy>;

  Object() noexcept = default;
  explicit Object(Owner handle) noexcept : handle_(std::move(handle)) {}
  // The C handle, for everything that is not wrapped; still owned by this object.
  T* c() const noexcept { return handle_.get(); }
  explicit operator bool() const noexcept { return handle_ != nullptr; }
  // Ends it now; what the C function says.
  kvf_status destroy() noexcept { return Destroy(handle_.release()); }

 private:
  Owner handle_;
};

// A view of slot numbers: anything contiguous of int32_t. They must stay until the call that begins
// the operation has returned, also behind published() and wanted(), which keep the pointer.
struct Slots {
  const std::int32_t* data = nullptr;
  std::size_t size = 0;

  Slots() noexcept = default;
  Slots(const std::int32_t* first, std::size_t count) noexcept : data(first), size(count) {}
  template <class C, class = std::enable_if_t<std::is_convertible_v<
                           decltype(std::data(std::declval<const C&>())), const std::int32_t*>>>
  Slots(const C& slots) noexcept : data(std::data(slots)), size(std::size(slots)) {}
};

inline kvf_key key(std::uint64_t request, std::uint32_t attempt = 0) noexcept {
  return {request, attempt, 0};
}

// Blocks that a source offers.
inline kvf_published_group published(std::uint32_t group, Slots slots, std::uint64_t token_begin,
                                     std::uint64_t token_end) noexcept {
  return {group, 0, slots.data, slots.size, 0, token_begin, token_end};
}

// Blocks that a destination wants.
inline kvf_import_group wanted(std::uint32_t group, Slots slots, std::uint64_t skip_token = 0,
                               std::uint64_t token_end = KVF_TOKEN_END_ALL) noexcept {
  return {group, 0, slots.data, slots.size, 0, skip_token, token_end};
}

// kvf_pool.
class Pool : public Object<kvf_pool, kvf_pool_destroy> {
 public:
  using Object::Object;

  // First byte of the pool.
  std::byte* data() const {
    void* base = nullptr;
    check(kvf_pool_memory(c(), &base, nullptr));
    return static_cast<std::byte*>(base);
  }
  std::uint64_t size() const {
    void* base = nullptr;
    std::uint64_t bytes = 0;
    check(kvf_pool_memory(c(), &base, &bytes));
    return bytes;
  }
  std::uint32_t id() const {
    std::uint32_t id = 0;
    check(kvf_pool_id(c(), &id));
    return id;
  }
  // A tensor that starts here, for View::tensors.
  kvf_tensor_desc at(std::uint64_t offset) const noexcept { return {c(), offset}; }
  void unregister_begin(Nanoseconds deadline) {
    check(kvf_pool_unregister_begin(c(), detail::ns(deadline)));
  }
  kvf_pool_info query() const {
    kvf_pool_info info = KVF_POOL_INFO_INIT;
    check(kvf_pool_query(c(), &info));
    return info;
  }
};

// kvf_section_desc.
struct Section {
  std::string name;
  std::uint32_t total = 0;
};

// kvf_view_desc.
struct View {
  std::uint32_t role = KVF_ROLE_OPAQUE;
  std::uint32_t element_bits = 16;
  std::uint32_t heads = 1;
  std::uint64_t bytes_per_head = 0;
  std::uint32_t slots = 0;
  std::uint32_t shards = 1, shard = 0;
  std::uint32_t replicas = 1, replica = 0;
  std::vector<Section> sections;
  std::vector<kvf_tensor_desc> tensors;
  std::uint64_t slot_stride = 0, layer_stride = 0, token_stride = 0, head_stride = 0;
};

// kvf_group_desc.
struct Group {
  std::uint32_t kind = KVF_GROUP_PAGED;
  std::uint32_t tokens_per_block = 0;
  std::uint32_t window = 0;
  std::uint32_t ordinal_offset = 0, ordinal_stride = 1;
  std::vector<std::uint32_t> layers;
  std::vector<View> views;
};

// Position of a rank in its engine.
struct Coordinates {
  std::uint32_t global_rank = 0;
  std::uint32_t tp_rank = 0, tp_size = 1;
  std::uint32_t pp_rank = 0, pp_size = 1;
  std::uint32_t cp_rank = 0, cp_size = 1;
  std::uint32_t dp_rank = 0, dp_size = 1;
};

// kvf_layout.
class Layout : public Object<kvf_layout, kvf_layout_destroy> {
 public:
  using Object::Object;

  // kvf_layout_create().
  explicit Layout(const std::vector<Group>& groups, const Coordinates& at = {}) {
    std::vector<std::vector<kvf_view_desc>> views(groups.size());
    std::vector<std::vector<kvf_section_desc>> sections;
    std::vector<kvf_group_desc> group_descs;
    for (const Group& group : groups) {
      auto& descs = views[group_descs.size()];
      for (const View& v : group.views) {
        sections.emplace_back();
        for (const Section& section : v.sections) {
          sections.back().push_back({section.name.c_str(), section.total, 0});
        }
        kvf_view_desc desc = KVF_VIEW_DESC_INIT;
        desc.role = v.role;
        desc.element_bits = v.element_bits;
        desc.heads = v.heads;
        desc.slots = v.slots;
        desc.bytes_per_head = v.bytes_per_head;
        desc.shards = v.shards;
        desc.shard = v.shard;
        desc.replicas = v.replicas;
        desc.replica = v.replica;
        desc.sections = sections.back().data();  // stays when `sections` grows: it moves
        desc.num_sections = v.sections.size();
        desc.tensors = v.tensors.data();
        desc.num_tensors = v.tensors.size();
        desc.slot_stride = v.slot_stride;
        desc.layer_stride = v.layer_stride;
        desc.token_stride = v.token_stride;
        desc.head_stride = v.head_stride;
        descs.push_back(desc);
      }
      kvf_group_desc desc = KVF_GROUP_DESC_INIT;
      desc.kind = group.kind;
      desc.tokens_per_block = group.tokens_per_block;
      desc.window = group.window;
      desc.ordinal_offset = group.ordinal_offset;
      desc.ordinal_stride = group.ordinal_stride;
      desc.layers = group.layers.data();
      desc.num_layers = group.layers.size();
      desc.views = descs.data();
      desc.num_views = descs.size();
      group_descs.push_back(desc);
    }
    kvf_layout_desc desc = KVF_LAYOUT_DESC_INIT;
    desc.global_rank = at.global_rank;
    desc.tp_rank = at.tp_rank;
    desc.tp_size = at.tp_size;
    desc.pp_rank = at.pp_rank;
    desc.pp_size = at.pp_size;
    desc.cp_rank = at.cp_rank;
    desc.cp_size = at.cp_size;
    desc.dp_rank = at.dp_rank;
    desc.dp_size = at.dp_size;
    desc.groups = group_descs.data();
    desc.num_groups = group_descs.size();
    *this = Layout(make<Owner>(kvf_layout_create, &desc));
  }
};

// kvf_engine.
class Engine : public Object<kvf_engine, kvf_engine_destroy> {
 public:
  using Object::Object;

  // kvf_engine_metadata().
  Bytes metadata() const {
    return detail::collect<Bytes>([this](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_engine_metadata(c(), buf, cap, needed);
    });
  }
};

// All-gather over an engine's ranks: fill `all` with every rank's `bytes` bytes, in order of rank.
using Exchange = std::function<void(const void* mine, void* all, std::size_t bytes)>;

// kvf_peer.
class Peer : public Object<kvf_peer, kvf_peer_destroy> {
 public:
  using Object::Object;

  kvf_peer_info query() const {
    kvf_peer_info info = KVF_PEER_INFO_INIT;
    check(kvf_peer_query(c(), &info));
    return info;
  }
  // The chosen data path and why, or what is wrong.
  std::string text() const {
    return detail::collect_text([this](char* buf, std::size_t cap, std::size_t* needed) {
      return kvf_peer_text(c(), buf, cap, needed);
    });
  }
  // KVF_OK, KVF_TIMED_OUT, or why it cannot be used.
  kvf_status wait(Nanoseconds timeout) const noexcept {
    return kvf_peer_wait(c(), detail::ns(timeout));
  }
  void remove() { check(kvf_peer_remove(c())); }
};

// kvf_publication.
class Publication : public Object<kvf_publication, kvf_publication_destroy> {
 public:
  using Object::Object;

  // The bytes that travel with the request.
  Bytes ticket() const {
    return detail::collect<Bytes>([this](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_publication_ticket(c(), buf, cap, needed);
    });
  }
  kvf_publication_info query() const {
    kvf_publication_info info = KVF_PUBLICATION_INFO_INIT;
    check(kvf_publication_query(c(), &info));
    return info;
  }
  // KVF_OK: every reader has finished; KVF_TIMED_OUT; otherwise why it ended.
  kvf_status wait(Nanoseconds timeout) const noexcept {
    return kvf_publication_wait(c(), detail::ns(timeout));
  }
  void release() { check(kvf_publication_release(c())); }
};

// kvf_transfer_info with its parts.
struct TransferInfo : kvf_transfer_info {
  std::vector<kvf_part_info> parts;
};

// kvf_transfer. Destroying a running one cancels and detaches it.
class Transfer : public Object<kvf_transfer, kvf_transfer_destroy> {
 public:
  using Object::Object;

  // KVF_IN_PROGRESS, KVF_OK, or the error it ended with.
  kvf_status poll() const noexcept { return kvf_transfer_poll(c()); }
  // As poll(), or KVF_TIMED_OUT.
  kvf_status wait(Nanoseconds timeout) const noexcept {
    return kvf_transfer_wait(c(), detail::ns(timeout));
  }
  // Waits for success; anything else throws, a time-out too.
  void finish(Nanoseconds timeout) const {
    if (check(wait(timeout)) != KVF_OK) {
      throw Error(KVF_TIMED_OUT, "the transfer has not ended in time and goes on");
    }
  }
  void cancel() { check(kvf_transfer_cancel(c())); }
  TransferInfo query() const {
    TransferInfo info{KVF_TRANSFER_INFO_INIT, {}};
    check(kvf_transfer_query(c(), &info, nullptr, sizeof(kvf_part_info), 0));
    info.parts.resize(info.num_parts);
    check(kvf_transfer_query(c(), &info, info.parts.data(), sizeof(kvf_part_info),
                             info.parts.size()));
    return info;
  }
  std::string error_text() const {
    return detail::collect_text([this](char* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transfer_error_text(c(), buf, cap, needed);
    });
  }
  // The bytes that the publisher attached.
  Bytes aux() const {
    return detail::collect<Bytes>([this](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transfer_aux(c(), buf, cap, needed);
    });
  }
  // The bytes that a sender needs to push into this receive.
  Bytes offer() const {
    return detail::collect<Bytes>([this](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_transfer_offer(c(), buf, cap, needed);
    });
  }
  // kvf_transfer_stream_wait().
  void stream_wait(void* stream) { check(kvf_transfer_stream_wait(c(), stream)); }
};

// kvf_agent_config. Zero and empty are the defaults.
struct AgentConfig {
  std::string name, listen, transports, fingerprint;
  std::uint32_t workers = 0;
  std::vector<std::uint32_t> affinity;
  Nanoseconds connect{0}, peer_silence{0}, heartbeat{0}, claim{0}, lease{0}, transfer{0};
  std::uint32_t max_publications = 0;
  Nanoseconds spin{0};
  // Pre-shared key, 16 bytes or more; empty = none.
  std::string auth_key;
  std::string advertise;
  bool allow_unauthenticated = false;
  std::uint32_t data_connections = 0;
  // Receives lines up to `log_level`, on kvferry's threads; must not throw or call kvferry.
  std::function<void(std::uint32_t level, const char* text)> log;
  std::uint32_t log_level = KVF_LOG_OFF;
  // Longest wait of the destructor.
  Nanoseconds shutdown = std::chrono::seconds(5);
};

// What Agent::publish() offers: kvf_publish_desc.
struct Offer {
  kvf_key key = KVF_KEY_INIT;
  std::vector<kvf_published_group> groups;
  std::vector<kvf_published_state> states;
  void* stream = nullptr;
  Nanoseconds claim{0}, lease{0};
  Bytes aux;
  std::uint64_t prefix_tag = 0, user_data = 0;
};

// What Agent::import_begin() fetches: kvf_import_desc.
struct Import {
  std::vector<kvf_import_group> groups;
  std::vector<kvf_import_state> states;
  std::vector<kvf_slot_ref> owned_only;
  void* stream = nullptr;
  Nanoseconds deadline{0};
  std::int32_t priority = 0;
  std::uint64_t prefix_tag = 0, user_data = 0;
};

// What Agent::receive_begin() opens for a sender: kvf_receive_desc.
struct Receive {
  kvf_key key = KVF_KEY_INIT;
  std::vector<kvf_import_group> groups;
  std::vector<kvf_import_state> states;
  std::vector<kvf_slot_ref> owned_only;
  void* stream = nullptr;
  Nanoseconds deadline{0};
  std::int32_t priority = 0;
  std::uint64_t prefix_tag = 0, user_data = 0;
};

// What Agent::push_begin() sends: kvf_push_desc.
struct Push {
  std::vector<kvf_published_group> groups;
  std::vector<kvf_published_state> states;
  void* stream = nullptr;
  Nanoseconds deadline{0};
  Bytes aux;
  std::int32_t priority = 0;
  std::uint64_t prefix_tag = 0, user_data = 0;
};

namespace detail {
// These point into their arguments.
inline kvf_publish_desc publish_desc(const Offer& offer) {
  kvf_publish_desc desc = KVF_PUBLISH_DESC_INIT;
  desc.key = offer.key;
  desc.groups = offer.groups.data();
  desc.num_groups = offer.groups.size();
  desc.states = offer.states.data();
  desc.num_states = offer.states.size();
  desc.stream = offer.stream;
  desc.claim_ns = ns(offer.claim);
  desc.lease_ns = ns(offer.lease);
  desc.aux = offer.aux.data();
  desc.aux_bytes = offer.aux.size();
  desc.prefix_tag = offer.prefix_tag;
  desc.user_data = offer.user_data;
  return desc;
}

// What every descriptor of a destination has, from an Import or a Receive.
template <class Desc, class Wanted>
void want(Desc& desc, const Wanted& what) {
  desc.groups = what.groups.data();
  desc.num_groups = what.groups.size();
  desc.states = what.states.data();
  desc.num_states = what.states.size();
  desc.owned_only = what.owned_only.data();
  desc.num_owned_only = what.owned_only.size();
  desc.stream = what.stream;
  desc.deadline_ns = ns(what.deadline);
  desc.priority = what.priority;
  desc.prefix_tag = what.prefix_tag;
  desc.user_data = what.user_data;
}

inline kvf_push_desc push_desc(const Peer& peer, const Bytes& offer, const Push& what) {
  kvf_push_desc desc = KVF_PUSH_DESC_INIT;
  desc.peer = peer.c();
  desc.offer = offer.data();
  desc.offer_bytes = offer.size();
  desc.groups = what.groups.data();
  desc.num_groups = what.groups.size();
  desc.states = what.states.data();
  desc.num_states = what.states.size();
  desc.stream = what.stream;
  desc.deadline_ns = detail::ns(what.deadline);
  desc.aux = what.aux.data();
  desc.aux_bytes = what.aux.size();
  desc.priority = what.priority;
  desc.prefix_tag = what.prefix_tag;
  desc.user_data = what.user_data;
  return desc;
}
}  // namespace detail

// kvf_agent.
class Agent {
 public:
  Agent() : Agent(AgentConfig{}) {}

  // kvf_agent_create().
  explicit Agent(const AgentConfig& config)
      : log_(config.log ? std::make_unique<Log>(config.log) : nullptr),
        shutdown_(config.shutdown) {
    kvf_agent_config c = KVF_AGENT_CONFIG_INIT;
    c.workers = config.workers;
    c.name = detail::text(config.name);
    c.listen = detail::text(config.listen);
    c.affinity = config.affinity.data();
    c.num_affinity = config.affinity.size();
    c.transports = detail::text(config.transports);
    c.fingerprint = detail::text(config.fingerprint);
    c.connect_ns = detail::ns(config.connect);
    c.peer_silence_ns = detail::ns(config.peer_silence);
    c.heartbeat_ns = detail::ns(config.heartbeat);
    c.claim_ns = detail::ns(config.claim);
    c.lease_ns = detail::ns(config.lease);
    c.transfer_ns = detail::ns(config.transfer);
    c.max_publications = config.max_publications;
    c.spin_ns = detail::ns(config.spin);
    c.auth_key = reinterpret_cast<const std::uint8_t*>(config.auth_key.data());
    c.auth_key_bytes = config.auth_key.size();
    c.advertise = detail::text(config.advertise);
    c.allow_unauthenticated = config.allow_unauthenticated ? 1 : 0;
    c.data_connections = config.data_connections;
    c.log_level = config.log_level;
    if (log_) {
      c.log = &Agent::on_log;
      c.log_arg = log_.get();
    }
    check(kvf_agent_create(&c, &agent_));
  }

  Agent(Agent&& other) noexcept
      : log_(std::move(other.log_)),
        shutdown_(other.shutdown_),
        agent_(std::exchange(other.agent_, nullptr)) {}
  Agent& operator=(Agent&& other) noexcept {
    std::swap(log_, other.log_);
    std::swap(shutdown_, other.shutdown_);
    std::swap(agent_, other.agent_);
    return *this;
  }
  ~Agent() { (void)!destroy(shutdown_); }

  kvf_agent* c() const noexcept { return agent_; }

  // kvf_agent_destroy(): ends the agent now.
  kvf_status destroy(Nanoseconds timeout) noexcept {
    return kvf_agent_destroy(std::exchange(agent_, nullptr), detail::ns(timeout));
  }
  void drain(Nanoseconds timeout) { check(kvf_agent_drain(agent_, detail::ns(timeout))); }

  // For poll() and epoll; readable while there is an event to take.
  int event_fd() const {
    int fd = -1;
    check(kvf_agent_event_fd(agent_, &fd));
    return fd;
  }
  // All events that are there.
  std::vector<kvf_event> take_events() {
    constexpr std::size_t at_once = 64;
    std::vector<kvf_event> events;
    std::size_t n = at_once;
    while (n == at_once) {
      const std::size_t before = events.size();
      events.resize(before + at_once);
      check(kvf_agent_take_events(agent_, &events[before], sizeof(kvf_event), at_once, &n));
      events.resize(before + n);
    }
    return events;
  }
  // This rank's metadata, for an engine whose ranks find together outside of kvferry.
  Bytes metadata() const {
    return detail::collect<Bytes>([this](void* buf, std::size_t cap, std::size_t* needed) {
      return kvf_agent_metadata(agent_, buf, cap, needed);
    });
  }
  // Prometheus' text format.
  std::string metrics_text() const {
    return detail::growing_text([this](char* buf, std::size_t cap, std::size_t* needed) {
      return kvf_metrics_text(agent_, buf, cap, needed);
    });
  }
  std::vector<kvf_quarantined_slot> quarantine() const {
    std::vector<kvf_quarantined_slot> slots;
    std::size_t n = 0;
    do {  // it may grow between two calls
      slots.resize(n);
      check(kvf_agent_quarantine(agent_, slots.data(), sizeof(kvf_quarantined_slot), slots.size(),
                                 &n));
    } while (n > slots.size());
    slots.resize(n);
    return slots;
  }

  // kvf_host_pool_create(). `page_size` 0 = the system's.
  Pool host_pool(std::uint64_t bytes, std::uint32_t numa_node = KVF_NUMA_ANY,
                 std::uint64_t page_size = 0, std::uint64_t user_data = 0) {
    kvf_host_pool_config config = KVF_HOST_POOL_CONFIG_INIT;
    config.bytes = bytes;
    config.numa_node = numa_node;
    config.page_size = page_size;
    config.user_data = user_data;
    return Pool(make<Pool::Owner>(kvf_host_pool_create, agent_, &config));
  }
  // kvf_pool_register() with KVF_MEMORY_DEVICE: cudaMalloc's memory.
  Pool register_device_memory(void* base, std::uint64_t bytes, std::uint32_t device = 0,
                              std::uint64_t user_data = 0) {
    kvf_pool_desc desc = KVF_POOL_DESC_INIT;
    desc.memory_kind = KVF_MEMORY_DEVICE;
    desc.base = base;
    desc.bytes = bytes;
    desc.device = device;
    desc.user_data = user_data;
    return Pool(make<Pool::Owner>(kvf_pool_register, agent_, &desc));
  }
  // kvf_pool_register(): the caller's own memory.
  Pool register_memory(void* base, std::uint64_t bytes, std::uint64_t user_data = 0) {
    kvf_pool_desc desc = KVF_POOL_DESC_INIT;
    desc.base = base;
    desc.bytes = bytes;
    desc.user_data = user_data;
    return Pool(make<Pool::Owner>(kvf_pool_register, agent_, &desc));
  }
  void set_layout(const Layout& layout) { check(kvf_agent_set_layout(agent_, layout.c())); }
  void set_layout(const std::vector<Group>& groups, const Coordinates& at = {}) {
    set_layout(Layout(groups, at));
  }

  // kvf_engine_create() for an engine of one rank.
  Engine engine() { return engine(KVF_ENGINE_DESC_INIT); }
  // kvf_engine_create() with an all-gather; what it throws comes out of here.
  Engine engine(std::uint32_t world, std::uint32_t rank, Exchange exchange) {
    struct Call {
      Exchange exchange;
      std::exception_ptr thrown;
    } call{std::move(exchange), nullptr};
    kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
    desc.world = world;
    desc.rank = rank;
    desc.exchange_arg = &call;
    desc.exchange = [](void* arg, const void* mine, void* all,
                       std::size_t bytes) noexcept -> std::int32_t {
      auto& self = *static_cast<Call*>(arg);
      try {
        self.exchange(mine, all, bytes);
        return 0;
      } catch (...) {
        self.thrown = std::current_exception();
        return 1;
      }
    };
    try {
      return engine(desc);
    } catch (const Error&) {
      if (call.thrown) std::rethrow_exception(call.thrown);
      throw;
    }
  }
  // kvf_engine_create() with every rank's metadata(), in order of rank.
  Engine engine(std::uint32_t rank, const std::vector<Bytes>& ranks) {
    std::vector<kvf_bytes> all;
    for (const Bytes& metadata : ranks) {
      all.push_back({metadata.data(), metadata.size()});
    }
    kvf_engine_desc desc = KVF_ENGINE_DESC_INIT;
    desc.world = static_cast<std::uint32_t>(all.size());
    desc.rank = rank;
    desc.ranks = all.data();
    desc.num_ranks = all.size();
    return engine(desc);
  }

  // kvf_peer_add().
  Peer add_peer(const Bytes& engine_metadata, std::uint64_t user_data = 0) {
    return Peer(make<Peer::Owner>(kvf_peer_add, agent_, engine_metadata.data(),
                                  engine_metadata.size(), user_data));
  }

  // kvf_publish().
  Publication publish(const Offer& offer) {
    const kvf_publish_desc desc = detail::publish_desc(offer);
    return Publication(make<Publication::Owner>(kvf_publish, agent_, &desc));
  }
  // kvf_publish() of one group's tokens [0, token_end).
  Publication publish(kvf_key request, std::uint32_t group, Slots slots,
                      std::uint64_t token_end) {
    Offer offer;
    offer.key = request;
    offer.groups = {published(group, slots, 0, token_end)};
    return publish(offer);
  }

  // kvf_import_begin().
  Transfer import_begin(const Peer& peer, const Bytes& ticket, const Import& what) {
    kvf_import_desc desc = KVF_IMPORT_DESC_INIT;
    desc.peer = peer.c();
    desc.ticket = ticket.data();
    desc.ticket_bytes = ticket.size();
    detail::want(desc, what);
    return Transfer(make<Transfer::Owner>(kvf_import_begin, agent_, &desc));
  }
  // kvf_pull_begin(): one group.
  Transfer pull_begin(const Peer& peer, const Bytes& ticket, std::uint32_t group, Slots slots,
                      std::uint64_t skip_token = 0, std::uint64_t token_end = KVF_TOKEN_END_ALL,
                      Nanoseconds deadline = Nanoseconds(0)) {
    kvf_pull_desc desc = KVF_PULL_DESC_INIT;
    desc.peer = peer.c();
    desc.ticket = ticket.data();
    desc.ticket_bytes = ticket.size();
    desc.group = group;
    desc.slots = slots.data;
    desc.num_slots = slots.size;
    desc.skip_token = skip_token;
    desc.token_end = token_end;
    desc.deadline_ns = detail::ns(deadline);
    return Transfer(make<Transfer::Owner>(kvf_pull_begin, agent_, &desc));
  }

  // kvf_receive_begin(). Transfer::offer() has the bytes for the sender; with a `sender` only that
  // engine may push, and the receive fails when it is lost.
  Transfer receive_begin(const Receive& what, const Peer* sender = nullptr) {
    kvf_receive_desc desc = KVF_RECEIVE_DESC_INIT;
    desc.key = what.key;
    detail::want(desc, what);
    if (sender != nullptr) desc.peer = sender->c();
    return Transfer(make<Transfer::Owner>(kvf_receive_begin, agent_, &desc));
  }
  // kvf_push_begin().
  Transfer push_begin(const Peer& peer, const Bytes& offer, const Push& what) {
    const kvf_push_desc desc = detail::push_desc(peer, offer, what);
    return Transfer(make<Transfer::Owner>(kvf_push_begin, agent_, &desc));
  }

  // kvf_ticket_hold().
  void hold(const Peer& peer, const Bytes& ticket) {
    check(kvf_ticket_hold(agent_, peer.c(), ticket.data(), ticket.size()));
  }
  // kvf_ticket_decline().
  void decline(const Peer& peer, const Bytes& ticket, kvf_status cause) {
    check(kvf_ticket_decline(agent_, peer.c(), ticket.data(), ticket.size(), cause));
  }

 private:
  using Log = std::function<void(std::uint32_t, const char*)>;

  static void on_log(void* arg, std::uint32_t level, const char* text) noexcept {
    (*static_cast<Log*>(arg))(level, text);
  }
  Engine engine(const kvf_engine_desc& desc) {
    return Engine(make<Engine::Owner>(kvf_engine_create, agent_, &desc));
  }

  std::unique_ptr<Log> log_;
  Nanoseconds shutdown_;
  kvf_agent* agent_ = nullptr;
};

// kvf_plan_explain(): what would move between two engines, from their layout files.
inline std::string explain(const std::string& source, const std::string& destination,
                           std::uint32_t policy = KVF_POLICY_SPREAD,
                           std::uint32_t format = KVF_EXPLAIN_JSON) {
  const kvf_bytes from{source.data(), source.size()};
  const kvf_bytes to{destination.data(), destination.size()};
  return detail::collect_text([&](char* buf, std::size_t cap, std::size_t* needed) {
    return kvf_plan_explain(&from, &to, policy, format, buf, cap, needed);
  });
}

}  // namespace kvferry
