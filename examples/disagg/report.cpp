#include "report.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

namespace disagg {

namespace {

__attribute__((format(printf, 1, 2))) std::string format(const char* pattern, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(text, sizeof text, pattern, arguments);
  va_end(arguments);
  return text;
}

std::string duration(double seconds) {
  if (seconds < 1e-3) return format("%.0f us", seconds * 1e6);
  if (seconds < 1.0) return format("%.2f ms", seconds * 1e3);
  return format("%.2f s", seconds);
}

std::string grouped(std::uint64_t n) {
  std::string digits = std::to_string(n);
  for (std::size_t at = digits.size(); at > 3;) digits.insert(at -= 3, " ");
  return digits;
}

std::string shown(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\n' ? std::string("\\n") : std::string(1, c);
  return out;
}

std::string row(const std::string& name, const std::string& value) {
  return format("  %-22s %s\n", name.c_str(), value.c_str());
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += std::string("\\") + c;
    else if (static_cast<unsigned char>(c) < 0x20)
      out += format("\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
    else
      out += c;
  }
  return out + "\"";
}

std::string list(const std::vector<Token>& tokens) {
  std::string out = "[";
  for (const Token t : tokens) out += (out.size() > 1 ? ", " : "") + std::to_string(t);
  return out + "]";
}

}  // namespace

bool Report::passed() const {
  return !expected.empty() && !runs.empty() &&
         std::all_of(runs.begin(), runs.end(), [](const Run& r) { return r.as_it_should(); });
}

std::string as_table(const Report& r) {
  std::string out = "\n  A prompt is computed in one process and continued in another\n\n";
  out += row("engine", r.engine);
  out += row("prefill", r.context_shape + ", pid " + r.context_pids + ", computed the prompt in " + duration(r.prefill_seconds));
  out += row("decode", r.generation_shape + ", pid " + r.generation_pids + ", " + duration(r.token_seconds) + " a token");
  out += "\n";
  out += row("prompt tokens", grouped(r.prompt_tokens));
  out += row("blocks", grouped(r.blocks));
  out += row("bytes", grouped(r.bytes) + format("  (%.1f MiB)", static_cast<double>(r.bytes) / (1 << 20)));
  // One line per source rank: kvferry separates them by "; ".
  std::string name = "transport";
  for (std::size_t at = 0; at < r.why.size(); name.clear()) {
    const std::size_t end = std::min(r.why.find("; ", at), r.why.size());
    out += row(name, r.why.substr(at, end - at));
    at = end + 2;
  }
  if (r.why.empty()) out += row(name, r.transport);
  out += row("publish", duration(r.publish_seconds));
  out += row("transfer", duration(r.transfer_seconds) + format("  (%.2f GB/s)", r.gigabytes_per_second()));
  out += row("taken by the engine", duration(r.resume_seconds));
  out += row("first decoded token", duration(r.first_token_seconds) + " after the publication began");
  out += row("publication", r.publication_ended);
  if (!r.text.empty()) out += row("continues with", "\"" + shown(r.text) + "\"");
  out += "\n";
  out += format("  %-28s %-26s %-22s %s\n", "run", "tokens as in one process", "wanted", "");
  for (const Run& run : r.runs) {
    const std::string found = run.equal ? format("all %zu equal", run.tokens.size())
                                        : format("differ from token %zu on", run.first_difference + 1);
    out += format("  %-28s %-26s %-22s %s\n", run.name.c_str(), found.c_str(),
                  run.must_be_equal ? "equal" : "different", run.as_it_should() ? "ok" : "WRONG");
    if (!run.accepted) out += format("  %-28s %s\n", "", "(the engine itself noticed that these bytes are no cache)");
  }
  return out + (r.passed() ? "\n  PASSED\n\n" : "\n  FAILED\n\n");
}

std::string as_json(const Report& r) {
  std::string out = "{\n";
  const auto field = [&](const char* name, const std::string& value) {
    out += format("  \"%s\": ", name) + value + ",\n";
  };
  field("engine", quoted(r.engine));
  field("context", quoted(r.context_shape));
  field("generation", quoted(r.generation_shape));
  field("prompt_tokens", std::to_string(r.prompt_tokens));
  field("blocks", std::to_string(r.blocks));
  field("bytes", std::to_string(r.bytes));
  field("transport", quoted(r.transport));
  field("transport_reason", quoted(r.why));
  field("prefill_seconds", format("%.9f", r.prefill_seconds));
  field("publish_seconds", format("%.9f", r.publish_seconds));
  field("transfer_seconds", format("%.9f", r.transfer_seconds));
  field("gbps", format("%.3f", r.gigabytes_per_second()));
  field("resume_seconds", format("%.9f", r.resume_seconds));
  field("first_token_seconds", format("%.9f", r.first_token_seconds));
  field("seconds_per_token", format("%.9f", r.token_seconds));
  field("publication", quoted(r.publication_ended));
  field("text", quoted(r.text));
  field("expected_tokens", list(r.expected));
  std::string runs;
  for (const Run& run : r.runs)
    runs += format("%s\n    {\"name\": %s, \"wanted_equal\": %s, \"equal\": %s, \"ok\": %s, \"bytes_moved\": %llu, ",
                   runs.empty() ? "" : ",", quoted(run.name).c_str(), run.must_be_equal ? "true" : "false",
                   run.equal ? "true" : "false", run.as_it_should() ? "true" : "false",
                   static_cast<unsigned long long>(run.bytes_moved)) +
            "\"tokens\": " + list(run.tokens) + "}";
  field("runs", "[" + runs + "\n  ]");
  return out + format("  \"passed\": %s\n}\n", r.passed() ? "true" : "false");
}

}  // namespace disagg
