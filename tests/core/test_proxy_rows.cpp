// Memory for rows alone, apart from what else a proxy reads and writes.
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "layout/command.h"
#include "proxy/proxy.h"
#include "proxy_world.hpp"
#include "scripted_transport.hpp"

using namespace fanfold;
using namespace std::chrono_literals;

namespace {

constexpr int64_t kBytes = 64 * 1024;

proxy::ProxyOptions two_ranks() {
  proxy::ProxyOptions options;
  options.ranks = 2;
  options.threads = 1;
  return options;
}

}  // namespace

TEST(proxy_refuses_writes_outside_of_the_memory_for_rows) {
  const int64_t rows = kBytes / 2;
  ProxyWorld world(two_ranks(), quiet_network(), kBytes, rows);
  CommandFields write{.kind = CommandKind::kWrite,
                      .peer = 1,
                      .bytes = 96,
                      .source = kRowsApart + rows - 96,
                      .target = kRowsApart + rows - 96};
  world.proxy(0).push(write);
  for (int64_t CommandFields::* field : {&CommandFields::source, &CommandFields::target}) {
    CommandFields bad = write;
    bad.*field += 16;
    CHECK_THROWS(world.proxy(0).push(bad), BadArgument);
  }
  // Words stay where the CPU finds them.
  const CommandFields store{
      .kind = CommandKind::kStore, .peer = 1, .target = kRowsApart, .word = 7};
  CHECK_THROWS(world.proxy(0).push(store), BadArgument);
}

// A rank that could not register memory for rows has none, and then nobody uses it.
TEST(proxy_has_rows_apart_if_all_ranks_have) {
  for (const int32_t with_rows : {0, 1, 2}) {
    ProxyWorld world(two_ranks(), quiet_network(), kBytes, kBytes, with_rows);
    CHECK_EQ(world.has_rows(), with_rows == 2);
    CHECK_EQ(world.proxy(0).holds_rows(), with_rows > 0);
    CHECK_EQ(world.proxy(1).has_rows_apart(), with_rows == 2);
    CHECK(!world.proxy(0).why_no_gpu_memory().empty());
  }
}

// A descriptor comes first, if there is one; then rows go from and to the memory.
TEST(proxy_registers_memory_of_a_gpu) {
  for (const bool knows_dmabuf : {true, false}) {
    std::vector<std::byte> gpu(4096);
    const proxy::RowsMemory rows{
        .data = gpu.data(), .bytes = 4096, .sources = {0, 0, 512, 0, 0}, .device = 3, .dmabuf = 9};
    ScriptedRank rank(
        10ms, [&](Scripted& transport) { transport.knows_dmabuf = knows_dmabuf; }, rows);
    const auto& asked = rank.transport->gpu_memories;
    CHECK_EQ(asked.size(), knows_dmabuf ? 1u : 2u);
    CHECK_EQ(asked.front().dmabuf, 9);
    CHECK_EQ(asked.back().dmabuf, knows_dmabuf ? 9 : -1);
    for (const transport::GpuMemory& each : asked) {
      CHECK(each.data == gpu.data() && each.bytes == 4096 && each.device == 3);
    }
    CHECK(rank.proxy->has_rows_apart());
    rank.proxy->push({.kind = CommandKind::kWrite,
                      .peer = 2,
                      .bytes = 64,
                      .source = kRowsApart + 32,
                      .target = kRowsApart + 48});
    rank.step();
    CHECK_EQ(rank.transport->writes.size(), 1u);
    const transport::Write& write = rank.transport->writes.front();
    CHECK_EQ(write.source.index, Scripted::kGpuMemory);
    CHECK_EQ(write.source_offset, 512 + 32);
    CHECK_EQ(write.target_offset, 48);
    CHECK(rank.proxy->failure() == nullptr);
  }
}

// Without it the proxy goes on.
TEST(proxy_may_fail_to_register_memory_of_a_gpu) {
  ScriptedRank rank(
      1s, [](Scripted& transport) { transport.knows_dmabuf = transport.knows_pages = false; });
  std::vector<std::byte> gpu(256);
  const proxy::RowsMemory rows{.data = gpu.data(), .bytes = 256, .device = 0, .dmabuf = 9};
  CHECK_THROWS(rank.proxy->register_rows(rows), Unavailable);
  CHECK(!rank.proxy->holds_rows());
  rank.step();
  CHECK(rank.proxy->failure() == nullptr);
}
