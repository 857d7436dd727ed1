// SPDX-License-Identifier: Apache-2.0
// kvferry-info: what this library can do on this machine, and plans on paper.
#include <CLI/CLI.hpp>
#include <cstdlib>
#include <iostream>
#include <kvferry.hpp>

#include "file.hpp"
#include "machine.hpp"
#include "pair.hpp"
#include "paths.hpp"
#include "peer.hpp"

namespace {

using kvferry::tools::Json;

// "name: value" lines; what has no value is left out.
void print(const Json& object) {
  for (const auto& [name, value] : object.items()) {
    if (value.is_null()) continue;
    std::cout << "  " << name << ": "
              << (value.is_string() ? value.get<std::string>() : value.dump()) << "\n";
  }
}

void print(const Json& info, bool tested) {
  std::cout << "kvferry " << info["version"].get<std::string>() << ", ABI " << info["abi_version"]
            << "\ntransports\n";
  for (const Json& path : info["transports"]) {
    std::cout << "  " << path["name"].get<std::string>() << ": "
              << (path["available"] ? "available: " : "not available: ")
              << path["reason"].get<std::string>() << "\n";
  }
  std::cout << "machine\n";
  print(info["machine"]);
  if (!tested) return;
  std::cout << "self-test\n";
  for (const Json& test : info["self_test"]) {
    std::cout << "  " << test["memory"].get<std::string>() << ": "
              << (test["passed"] ? "passed" : "FAILED");
    if (test["passed"]) {
      std::cout << ", " << test["bytes"] << " bytes in " << test["microseconds"] << " us";
    }
    std::cout << ": " << test["text"].get<std::string>() << "\n";
  }
}

// The exit code: 0 only for a plan in which nothing is wrong and nothing is missing.
int plan(const std::vector<std::string>& files, std::uint32_t policy, bool json) {
  const std::string source = kvferry::tools::read_file(files[0]);
  const std::string destination = kvferry::tools::read_file(files[1]);
  const std::string text = kvferry::explain(source, destination, policy);
  const Json explained = Json::parse(text);
  std::cout << (json ? text
                     : kvferry::explain(source, destination, policy, KVF_EXPLAIN_TABLE))
            << "\n";
  if (explained["errors"].empty() && explained["uncovered"].empty()) return 0;
  if (!json) {
    std::cerr << "kvferry-info: something is wrong with the plan from source " << files[0]
              << " to destination " << files[1] << "\n";
  }
  return 1;
}

// The exit code: 0 if there is a way.
int peer(const kvferry::tools::Place& place, const std::string& file, bool json) {
  const Json found = kvferry::tools::peer(place, file);
  const bool reached = !found["selected"].is_null();
  if (json) {
    std::cout << found.dump(2) << "\n";
    return reached ? 0 : 1;
  }
  std::cout << (reached ? "selected " + found["selected"].get<std::string>() : "no transport to the agent of " + file)
            << ": "
            << found["text"].get<std::string>() << "\neach on its own\n";
  for (const Json& path : found["transports"]) {
    std::cout << "  " << path["name"].get<std::string>() << ": "
              << (path["available"] ? "available: " : "not available: ")
              << path["reason"].get<std::string>() << "\n";
  }
  return reached ? 0 : 1;
}

int info(bool self_test, bool json) {
  kvferry::tools::Child child;
  Json all{{"version", kvf_version_string()},
           {"abi_version", kvf_abi_version()},
           {"header_version", KVF_VERSION_STRING},
           {"transports", kvferry::tools::transports(child)},
           {"machine", kvferry::tools::machine()}};
  bool passed = true;
  if (self_test) {
    all["self_test"] = kvferry::tools::self_test(child);
    for (const Json& test : all["self_test"]) passed = passed && test["passed"];
  }
  if (json) {
    std::cout << all.dump(2) << "\n";
  } else {
    print(all, self_test);
  }
  return passed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  setenv("UCX_LOG_FILE", "stderr", 0);  // standard output is for results
  CLI::App app{"What kvferry can do on this machine; what would move between two engines."};
  bool json = false, self_test = false;
  std::vector<std::string> files;
  std::string policy = "spread";
  int child_fd = -1;
  app.add_flag("--json", json, "Print JSON");
  app.add_flag("--self-test", self_test,
               "Move a pattern between two processes, from a pool of kvferry and from the "
               "engine's own memory, and compare every byte");
  auto* plans = app.add_option("--plan", files,
                               "Explain what moves from the engine of the first layout file to "
                               "that of the second (docs/layouts.md); fails if anything is wrong")
                    ->expected(2)
                    ->type_name("SRC.json DST.json")
                    ->check(CLI::ExistingFile)
                    ->excludes("--self-test");
  app.add_option("--policy", policy, "Which of several replicas sends")
      ->check(CLI::IsMember({"spread", "lowest"}))
      ->capture_default_str()
      ->needs(plans);
  std::string serve_file, peer_file, key_file;
  kvferry::tools::Place place;
  auto* serve = app.add_option("--serve", serve_file,
                               "Stand as the other side of --peer: write this agent's metadata to "
                               "FILE and wait for SIGINT")
                    ->type_name("FILE")
                    ->excludes("--plan")
                    ->excludes("--self-test");
  app.add_option("--peer", peer_file,
                 "Connect to the agent of --serve, whose FILE was copied here: which transport is "
                 "selected, and what stands against each other one")
      ->type_name("FILE")
      ->check(CLI::ExistingFile)
      ->excludes("--plan")
      ->excludes("--self-test")
      ->excludes(serve);
  app.add_option("--listen", place.listen, "host:port that this side listens on (127.0.0.1:0)");
  app.add_option("--advertise", place.advertise, "host:port that the other side is told");
  app.add_option("--key-file", key_file, "File with the pre-shared key of both sides")
      ->check(CLI::ExistingFile);
  app.add_flag_callback(
      "--version",
      [] {
        std::cout << "kvferry-info " << kvf_version_string() << "\n";
        throw CLI::Success();
      },
      "Print the version");
  app.add_option("--child-fd", child_fd)->group("");  // the second process
  CLI11_PARSE(app, argc, argv);
  try {
    if (!key_file.empty()) setenv("KVFERRY_AUTH_KEY_FILE", key_file.c_str(), 1);
    if (!serve_file.empty()) {
      kvferry::tools::serve(place, serve_file);
      return 0;
    }
    if (!peer_file.empty()) return peer(place, peer_file, json);
    if (child_fd >= 0) return kvferry::tools::serve_source(child_fd);
    if (!files.empty()) {
      return plan(files, policy == "lowest" ? KVF_POLICY_LOWEST : KVF_POLICY_SPREAD, json);
    }
    return info(self_test, json);
  } catch (const std::exception& e) {
    std::cerr << "kvferry-info: " << e.what() << "\n";
    return 2;
  }
}
