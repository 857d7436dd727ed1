#include "rank.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include <getopt.h>
#include <sys/socket.h>
#include <unistd.h>

namespace disagg {

namespace {

const char* order_name(CacheOrder order) {
  switch (order) {
    case CacheOrder::block_major: return "trtllm";
    case CacheOrder::layer_major: return "vllm";
    case CacheOrder::role_major: return "megatron";
  }
  return "";
}

void send_all(int socket, const void* from, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = send(socket, static_cast<const char*>(from) + done, size - done, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::runtime_error("another rank of this engine has gone");
    done += static_cast<std::size_t>(n);
  }
}

void receive_all(int socket, void* to, std::size_t size) {
  for (std::size_t done = 0; done < size;) {
    const ssize_t n = recv(socket, static_cast<char*>(to) + done, size - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw std::runtime_error("another rank of this engine has gone");
    done += static_cast<std::size_t>(n);
  }
}

}  // namespace

CacheOrder parse_order(const std::string& name) {
  for (const CacheOrder order : {CacheOrder::block_major, CacheOrder::layer_major, CacheOrder::role_major})
    if (name == order_name(order)) return order;
  throw std::runtime_error("no cache order '" + name + "' (there are: trtllm, vllm, megatron)");
}

std::vector<std::uint32_t> parse_numbers(const std::string& text) {
  std::vector<std::uint32_t> numbers;
  for (const char* at = text.c_str(); *at;) {
    char* end = nullptr;
    const unsigned long n = std::strtoul(at, &end, 10);
    if (end == at || (*end && *end != ',') || n > 1u << 20) throw std::runtime_error("not a list of numbers: " + text);
    numbers.push_back(static_cast<std::uint32_t>(n));
    at = *end ? end + 1 : end;
  }
  if (numbers.empty()) throw std::runtime_error("not a list of numbers: " + text);
  return numbers;
}

void SocketRanks::share(double* whole, std::size_t size, std::size_t begin, std::size_t end) {
  const std::uint64_t range[2] = {begin, end};
  if (!centre_) {
    send_all(sockets_[0], range, sizeof range);
    send_all(sockets_[0], whole + begin, (end - begin) * sizeof(double));
    receive_all(sockets_[0], whole, size * sizeof(double));
    return;
  }
  for (const int socket : sockets_) {
    std::uint64_t theirs[2];
    receive_all(socket, theirs, sizeof theirs);
    if (theirs[0] > theirs[1] || theirs[1] > size) throw std::runtime_error("a rank computes something else");
    receive_all(socket, whole + theirs[0], (theirs[1] - theirs[0]) * sizeof(double));
  }
  for (const int socket : sockets_) send_all(socket, whole, size * sizeof(double));
}

RankOptions parse_rank(int argc, char** argv) {
  const option known[] = {{"engine", required_argument, nullptr, 'e'},
                          {"model", required_argument, nullptr, 'm'},
                          {"hybrid", no_argument, nullptr, 'h'},
                          {"tokens-per-block", required_argument, nullptr, 'b'},
                          {"order", required_argument, nullptr, 'o'},
                          {"tp", required_argument, nullptr, 't'},
                          {"tp-rank", required_argument, nullptr, 'T'},
                          {"stages", required_argument, nullptr, 'p'},
                          {"pp-rank", required_argument, nullptr, 'P'},
                          {"sockets", required_argument, nullptr, 's'},
                          {}};
  RankOptions o;
  for (int c; (c = getopt_long(argc, argv, "", known, nullptr)) != -1;) switch (c) {
      case 'e': o.engine.name = optarg; break;
      case 'm': o.engine.model = optarg; break;
      case 'h': o.engine.hybrid = true; break;
      case 'b': o.engine.tokens_per_block = parse_numbers(optarg)[0]; break;
      case 'o': o.engine.order = parse_order(optarg); break;
      case 't': o.engine.tp_size = parse_numbers(optarg)[0]; break;
      case 'T': o.engine.tp_rank = parse_numbers(optarg)[0]; break;
      case 'p': o.engine.stage_layers = parse_numbers(optarg); break;
      case 'P': o.engine.pp_rank = parse_numbers(optarg)[0]; break;
      case 's':
        for (const std::uint32_t fd : parse_numbers(optarg)) o.sockets.push_back(static_cast<int>(fd));
        break;
      default: std::exit(2);
    }
  return o;
}

std::vector<std::string> rank_arguments(const RankOptions& o) {
  const EngineOptions& e = o.engine;
  std::vector<std::string> a = {"--engine", e.name, "--tokens-per-block", std::to_string(e.tokens_per_block),
                                "--order", order_name(e.order), "--tp", std::to_string(e.tp_size),
                                "--tp-rank", std::to_string(e.tp_rank), "--pp-rank", std::to_string(e.pp_rank)};
  if (!e.model.empty()) a.insert(a.end(), {"--model", e.model});
  if (e.hybrid) a.push_back("--hybrid");
  const auto list = [&](const char* name, const auto& values) {
    std::string text;
    for (const auto v : values) text += (text.empty() ? "" : ",") + std::to_string(v);
    if (!text.empty()) a.insert(a.end(), {name, text});
  };
  list("--stages", e.stage_layers);
  list("--sockets", o.sockets);
  return a;
}

int run_rank(int argc, char** argv, const std::function<void(const RankOptions&, Channel&)>& serve) {
  ignore_broken_pipes();
  // What a library prints must not end up between the messages.
  const int out = dup(STDOUT_FILENO);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  Channel channel(STDIN_FILENO, out, "the orchestrator");
  try {
    serve(parse_rank(argc, argv), channel);
    return 0;
  } catch (const std::exception& e) {
    try {
      channel.send(Message(Kind::failed).bytes(e.what()));
    } catch (const std::exception&) {
      // The orchestrator has gone: it knows of a failure already, or nobody asks any more.
    }
    return 1;
  }
}

void introduce(Channel& channel, const Engine& engine, Handoff& handoff) {
  channel.send(Message(Kind::hello).bytes(handoff.metadata()).bytes(engine.description()).number(
      static_cast<std::uint64_t>(getpid())));
  handoff.join(channel.expect(Kind::join, kPatience).list());
  channel.send(Message(Kind::joined).bytes(handoff.engine_metadata()));
}

std::uint64_t fill(const Cache& cache, const std::vector<std::byte*>& pools, const SequenceSlots& slots,
                   std::byte value) {
  std::uint64_t bytes = 0;
  for (const GroupSlots& s : slots) {
    const Group& group = cache.groups[s.group];
    const std::uint64_t tokens = group.paged ? group.tokens_per_block : 1;
    for (const View& v : group.views)
      for (std::size_t l = 0; l < group.layers.size(); ++l)
        for (const std::uint32_t slot : s.slots)
          for (std::uint64_t t = 0; t < tokens; ++t)
            for (std::uint32_t h = 0; h < v.heads; ++h) {
              const bool per_layer = v.tensors.size() > 1;
              const Tensor& tensor = v.tensors[per_layer ? l : 0];
              std::memset(pools[tensor.pool] + tensor.offset + slot * v.slot_stride +
                              (per_layer ? 0 : l * v.layer_stride) + t * v.token_stride + h * v.head_stride,
                          static_cast<int>(value), v.bytes_per_head);
              bytes += v.bytes_per_head;
            }
  }
  return bytes;
}

}  // namespace disagg
