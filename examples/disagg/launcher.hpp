// Starts the rank processes of one engine and keeps the pipes to them.
#pragma once

#include "messages.hpp"
#include "rank.hpp"

#include <memory>
#include <string>
#include <vector>

#include <sys/types.h>

namespace disagg {

class EngineProcesses {
 public:
  // Starts `program` (in the folder of this program) once per rank. `name` is for messages.
  EngineProcesses(const std::string& program, const std::string& name, const EngineOptions& options);
  // Closes the pipes, which asks the ranks to end, and waits; a rank that does not end is killed.
  ~EngineProcesses();
  EngineProcesses(const EngineProcesses&) = delete;
  EngineProcesses& operator=(const EngineProcesses&) = delete;

  std::size_t size() const { return ranks_.size(); }
  Channel& rank(std::size_t i) { return *ranks_[i]; }
  void send_all(const Message& message);
  std::vector<Message> expect_all(Kind kind);

  // Exchanges the ranks' metadata; fills the two below.
  void introduce();
  const std::string& engine_metadata() const { return engine_metadata_; }
  const std::string& description() const { return description_; }
  std::string pids() const;

 private:
  std::vector<std::unique_ptr<Channel>> ranks_;
  std::vector<pid_t> pids_;
  std::string engine_metadata_, description_;
};

}  // namespace disagg
