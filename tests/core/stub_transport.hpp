// A transport that takes every write, and reports nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace fanfold {

class StubTransport : public transport::Transport {
 public:
  std::string_view name() const override { return "stub"; }
  transport::Limits limits() const override {
    return {.write_bytes = 1 << 20, .writes = 16, .rails = 1};
  }
  transport::Address address() const override { return {}; }
  transport::Code connect(int32_t, const transport::Address&) override {
    return transport::Code::kOk;
  }
  transport::LocalMemory register_memory(std::byte*, int64_t) override { return {0}; }
  transport::RemoteMemory remote(transport::LocalMemory) const override { return {}; }
  transport::Code write(const transport::Write& write) override {
    writes.push_back(write);
    return transport::Code::kOk;
  }
  int32_t poll(std::span<transport::Event>) override { return 0; }
  const std::string& error() const override { return error_; }

  std::vector<transport::Write> writes;

 protected:
  std::string error_;
};

}  // namespace fanfold
