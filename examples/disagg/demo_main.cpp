// disagg_demo: the orchestrator. It starts a prefill and a decode engine in processes of their own,
// passes tokens and tickets between them, and compares what they generate with a run in one process.
// Two negative controls, on every run, show that the comparison would notice a wrong cache.
#include "launcher.hpp"
#include "report.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include <getopt.h>

using namespace disagg;

namespace {

constexpr char kUsage[] =
    R"(usage: disagg_demo [options]
  --engine tiny|llama.cpp        which engine (default tiny)
  --model FILE                   llama.cpp: the GGUF file
  --tokens N                     tokens to generate and compare (default 32)
  --prompt TEXT                  instead of the built-in prompt of about 950 tokens
  --json                         print JSON instead of a table
tiny engine only:
  --hybrid                       sliding-window and recurrent-state layers between the others
  --context-tp N, --generation-tp N          tensor-parallel ranks, 1, 2, 4 or 8 (default 1)
  --context-pp N|A,B.., --generation-pp ...  pipeline stages, or the layers (of 8) of each stage
  --context-order NAME, --generation-order NAME   trtllm (default), vllm or megatron
  --context-tokens-per-block N, --generation-tokens-per-block N   (default 16)
)";

struct Options {
  EngineOptions context, generation;
  std::uint64_t tokens = 32;
  std::string prompt;
  bool json = false;
};

std::vector<std::uint32_t> stages(const std::string& text) {
  std::vector<std::uint32_t> layers = parse_numbers(text);
  if (layers.size() > 1) return layers;
  const std::uint32_t n = layers[0];
  if (n <= 1) return {};
  constexpr std::uint32_t kLayers = 8;
  layers.assign(n, kLayers / n);
  for (std::uint32_t i = 0; i < kLayers % n; ++i) ++layers[i];
  return layers;
}

Options parse(int argc, char** argv) {
  enum { kTp = 1000, kPp, kOrder, kBlock };
  constexpr int kGeneration = 100;
  std::vector<option> known = {{"engine", required_argument, nullptr, 'e'}, {"model", required_argument, nullptr, 'm'},
                               {"tokens", required_argument, nullptr, 'n'}, {"prompt", required_argument, nullptr, 'p'},
                               {"json", no_argument, nullptr, 'j'},         {"hybrid", no_argument, nullptr, 'h'},
                               {"help", no_argument, nullptr, '?'}};
  const char* context[] = {"context-tp", "context-pp", "context-order", "context-tokens-per-block"};
  const char* generation[] = {"generation-tp", "generation-pp", "generation-order", "generation-tokens-per-block"};
  for (int i = 0; i < 4; ++i) {
    known.push_back({context[i], required_argument, nullptr, kTp + i});
    known.push_back({generation[i], required_argument, nullptr, kTp + i + kGeneration});
  }
  known.push_back({});
  Options o;
  for (int c; (c = getopt_long(argc, argv, "", known.data(), nullptr)) != -1;) {
    EngineOptions& side = c >= kTp + kGeneration ? o.generation : o.context;
    switch (c >= kTp + kGeneration ? c - kGeneration : c) {
      case 'e': o.context.name = o.generation.name = optarg; break;
      case 'm': o.context.model = o.generation.model = optarg; break;
      case 'n': o.tokens = std::max(parse_numbers(optarg)[0], 1u); break;
      case 'p': o.prompt = optarg; break;
      case 'j': o.json = true; break;
      case 'h': o.context.hybrid = o.generation.hybrid = true; break;
      case kTp: side.tp_size = parse_numbers(optarg)[0]; break;
      case kPp: side.stage_layers = stages(optarg); break;
      case kOrder: side.order = parse_order(optarg); break;
      case kBlock: side.tokens_per_block = parse_numbers(optarg)[0]; break;
      default: std::fputs(kUsage, stderr); std::exit(2);
    }
  }
  return o;
}

std::string shape(const EngineOptions& o) {
  std::string text = "TP " + std::to_string(o.tp_size) + " x PP " + std::to_string(std::max<std::size_t>(1, o.stage_layers.size()));
  if (o.stage_layers.size() > 1) {
    text += " (layers";
    for (const std::uint32_t n : o.stage_layers) text += " " + std::to_string(n);
    text += ")";
  }
  return text;
}

// The whole engine in this process, with ordinary memory and without kvferry.
std::vector<Token> run_in_one_process(const Options& options, const std::vector<Token>& prompt, Engine& engine) {
  Token token = engine.prefill(1, prompt);
  std::vector<Token> tokens;
  for (std::uint64_t i = 0; i < options.tokens; ++i) tokens.push_back(token = engine.decode(1, token));
  return tokens;
}

Report run(const Options& options) {
  Report report;
  report.context_shape = shape(options.context);
  report.generation_shape = shape(options.generation);

  EngineProcesses context("disagg_prefill", "prefill", options.context);
  EngineProcesses generation("disagg_decode", "decode", options.generation);
  context.introduce();
  generation.introduce();
  report.engine = context.description();
  report.context_pids = context.pids();
  report.generation_pids = generation.pids();
  generation.send_all(Message(Kind::connect).bytes(context.engine_metadata()));
  for (Message& connected : generation.expect_all(Kind::connected)) {
    report.transport = connected.bytes();
    report.why = connected.bytes();
  }

  // The orchestrator has the tokenizer, and the engine for the comparison.
  EngineOptions alone;
  alone.name = options.context.name;
  alone.model = options.context.model;
  alone.hybrid = options.context.hybrid;
  const auto engine = make_engine(alone);
  const std::vector<Token> prompt = engine->tokenize(options.prompt.empty() ? engine->default_prompt() : options.prompt);
  report.prompt_tokens = prompt.size();

  const struct {
    const char* name;
    Spoil spoil;
  } plan[] = {{"handed over", Spoil::nothing},
              {"control: one byte changed", Spoil::flip_a_byte},
              {"control: transfer left out", Spoil::leave_transfer_out}};
  SequenceShape shape;
  Token first = 0;
  for (std::uint32_t attempt = 0; attempt < 3; ++attempt) {
    const Spoil spoil = plan[attempt].spoil;
    const Key key{1, attempt};
    std::vector<std::string> tickets;
    double published_at = std::numeric_limits<double>::infinity();  // of the first rank
    if (spoil != Spoil::leave_transfer_out) {
      context.send_all(Message(attempt == 0 ? Kind::prefill : Kind::republish)
                           .number(key.request)
                           .number(key.attempt)
                           .tokens(prompt));
      for (Message& published : context.expect_all(Kind::published)) {
        tickets.push_back(published.bytes());
        shape.tokens = published.number();
        shape.image_bytes = published.number();
        first = static_cast<Token>(published.number());
        const std::uint64_t blocks = published.number();
        const double prefill = published.real();
        published_at = std::min(published_at, published.real());
        if (attempt > 0) continue;
        report.blocks += blocks;
        report.prefill_seconds = std::max(report.prefill_seconds, prefill);
        report.publish_seconds = std::max(report.publish_seconds, published.real());
      }
    }
    generation.send_all(Message(Kind::decode)
                            .number(key.request)
                            .number(key.attempt)
                            .list(tickets)
                            .number(shape.tokens)
                            .number(shape.image_bytes)
                            .number(static_cast<std::uint64_t>(first))
                            .number(options.tokens)
                            .number(static_cast<std::uint64_t>(spoil)));
    Run result;
    result.name = plan[attempt].name;
    result.must_be_equal = spoil == Spoil::nothing;
    for (Message& decoded : generation.expect_all(Kind::decoded)) {
      result.tokens = decoded.tokens();
      result.accepted = result.accepted && decoded.number() != 0;
      decoded.number();  // what the slots hold: with partial last blocks, more than was moved
      const std::uint64_t moved = decoded.number();
      result.bytes_moved += moved;
      const double transfer = decoded.real();
      const std::string transport = decoded.bytes();
      const double resume = decoded.real(), first_at = decoded.real(), each = decoded.real();
      if (attempt > 0) continue;
      report.bytes += moved;
      report.transfer_seconds = std::max(report.transfer_seconds, transfer);
      if (!transport.empty()) report.transport = transport;
      report.resume_seconds = std::max(report.resume_seconds, resume);
      report.first_token_seconds = std::max(report.first_token_seconds, first_at - published_at);
      report.token_seconds = std::max(report.token_seconds, each);
    }
    if (spoil != Spoil::leave_transfer_out) {
      context.send_all(Message(Kind::finish).number(spoil == Spoil::flip_a_byte));
      for (Message& finished : context.expect_all(Kind::finished)) report.publication_ended = finished.bytes();
    }
    report.runs.push_back(std::move(result));
  }

  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> pools;
  for (const std::uint64_t bytes : engine->cache().pools) pools.push_back(memory.emplace_back(bytes).data());
  engine->bind(pools);
  report.expected = run_in_one_process(options, prompt, *engine);
  report.text = engine->text(report.expected);
  for (Run& r : report.runs) {
    const auto at = std::mismatch(r.tokens.begin(), r.tokens.end(), report.expected.begin(), report.expected.end());
    r.first_difference = static_cast<std::size_t>(at.first - r.tokens.begin());
    r.equal = r.tokens == report.expected;
  }
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  ignore_broken_pipes();
  try {
    const Options options = parse(argc, argv);
    const Report report = run(options);
    std::fputs((options.json ? as_json(report) : as_table(report)).c_str(), stdout);
    return report.passed() ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "disagg_demo: %s\n", e.what());
    return 1;
  }
}
