// A proxy over a transport that does what a test tells it to.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/command.h"
#include "proxy/proxy.h"
#include "transport/transport.h"

namespace fanfold {

inline constexpr int64_t kScriptedBytes = 64 * 1024;

// A transport that reports the events that a test wants.
class Scripted : public transport::Transport {
 public:
  std::string_view name() const override { return "scripted"; }
  transport::Limits limits() const override {
    return {.write_bytes = 1 << 20, .writes = 64, .rails = 1};
  }
  transport::Address address() const override { return {}; }
  transport::Code connect(int32_t, const transport::Address&) override {
    return transport::Code::kOk;
  }
  transport::LocalMemory register_memory(std::byte*, int64_t bytes) override {
    bytes_ = bytes;
    return {fails_registration ? -1 : 0};
  }
  std::string why_no_gpu_memory() const override { return {}; }
  transport::LocalMemory register_gpu_memory(const transport::GpuMemory& gpu) override {
    gpu_memories.push_back(gpu);
    const bool registers = gpu.dmabuf >= 0 ? knows_dmabuf : knows_pages;
    if (!registers) words = "no such memory";
    return {registers ? kGpuMemory : -1};
  }
  transport::RemoteMemory remote(transport::LocalMemory) const override {
    return {.base = 0, .key = 0, .bytes = bytes_};
  }
  transport::Code write(const transport::Write& write) override {
    writes.push_back(write);
    return written;
  }
  bool probe(int32_t peer) override {
    probes.push_back(peer);
    return tells_who_has_ended;
  }
  int32_t poll(std::span<transport::Event> events) override {
    if (throws) throw std::logic_error("out of order");
    int32_t count = 0;
    while (!next.empty() && std::cmp_less(count, events.size())) {
      events[static_cast<size_t>(count++)] = next.back();
      next.pop_back();
    }
    return count;
  }
  const std::string& error() const override { return words; }

  static constexpr int32_t kGpuMemory = 7;
  std::vector<transport::GpuMemory> gpu_memories;
  bool knows_dmabuf = true;
  bool knows_pages = true;  // of a GPU's memory, by their address

  std::vector<transport::Event> next;
  std::vector<transport::Write> writes;
  std::vector<int32_t> probes;
  bool tells_who_has_ended = false;  // without a write
  transport::Code written = transport::Code::kOk;
  bool throws = false;
  bool fails_registration = false;
  std::string words;

 private:
  int64_t bytes_ = 0;
};

// Rank 1 of 5 over a scripted transport.
struct ScriptedRank {
  // With `rows`, a RowsMemory is registered.
  explicit ScriptedRank(std::chrono::nanoseconds timeout = std::chrono::milliseconds(10),
                        const std::function<void(Scripted&)>& prepare = nullptr,
                        const proxy::RowsMemory& rows = {})
      : memory(static_cast<size_t>(kScriptedBytes)), counters(5 * kCounters + 1, 77) {
    auto made = std::make_unique<Scripted>();
    transport = made.get();
    if (prepare) prepare(*made);
    proxy::ProxyOptions options;
    options.ranks = 5;
    options.threads = 1;
    options.part_bytes = 256;
    options.message_bytes = 1024;
    options.rank = 1;
    options.credit.messages = 64;
    options.kernel_ring_slots = 8;
    options.timeout = timeout;
    std::vector<std::unique_ptr<transport::Transport>> transports;
    transports.push_back(std::move(made));
    proxy = std::make_unique<proxy::Proxy>(
        options,
        proxy::ProxyMemory{.data = memory.data(),
                           .bytes = kScriptedBytes,
                           .counters = {counters.data(), 5 * kCounters}},
        std::move(transports));
    if (rows.bytes > 0) proxy->register_rows(rows);
    proxy->connect(std::vector<proxy::ProxyAddress>(5, proxy->address()));
  }

  void arrive(uint32_t immediate, int32_t peer = -1) {
    transport->next.insert(transport->next.begin(), {.kind = transport::EventKind::kArrival,
                                                     .rail = 0,
                                                     .peer = peer,
                                                     .immediate = immediate,
                                                     .context = 0});
  }
  bool step(std::chrono::nanoseconds passed = std::chrono::microseconds(1)) {
    return proxy->thread(0).step(proxy::ProxyThread::Time(now += passed));
  }

  std::vector<std::byte> memory;
  std::vector<uint64_t> counters;
  Scripted* transport = nullptr;
  std::unique_ptr<proxy::Proxy> proxy;
  std::chrono::nanoseconds now{};
};

}  // namespace fanfold
