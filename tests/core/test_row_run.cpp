// Rows near each other travel as one message.
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "check.hpp"
#include "memory/peer.h"

using namespace fanfold;

namespace {

struct RecordingLink final : Link {
  std::vector<std::pair<int64_t, int64_t>> puts;

  void put(int64_t offset, int64_t bytes) override { puts.emplace_back(offset, bytes); }
  void store(int64_t, uint64_t) override {}
  void fence() override {}
};

using Puts = std::vector<std::pair<int64_t, int64_t>>;

// What is put for rows of `bytes` bytes at `offsets`.
Puts puts_of(const std::vector<int64_t>& offsets, int64_t bytes) {
  std::array<std::byte, 16> memory{};  // no row is read
  RecordingLink link;
  const Peer peer(memory.data(), nullptr, &link);
  RowRun run(peer);
  for (const int64_t offset : offsets) run.put(offset, bytes);
  run.finish();
  run.finish();  // nothing is left
  return link.puts;
}

}  // namespace

TEST(row_run_puts_neighbours_together) {
  CHECK_EQ(puts_of({}, 128).size(), 0U);
  CHECK(puts_of({256}, 128) == (Puts{{256, 128}}));
  CHECK(puts_of({0, 128, 256}, 128) == (Puts{{0, 384}}));
}

TEST(row_run_puts_what_lies_between_near_rows) {
  CHECK(puts_of({0, 128 + 4096}, 128) == (Puts{{0, 256 + 4096}}));
  CHECK(puts_of({0, 128 + 4096 + 16}, 128) == (Puts{{0, 128}, {128 + 4096 + 16, 128}}));
}

TEST(row_run_lets_much_set_out) {
  const int64_t half = int64_t{32} << 10;
  CHECK(puts_of({0, half, 2 * half}, half) == (Puts{{0, 2 * half}, {2 * half, half}}));
}

TEST(row_run_loses_no_row_that_lies_before_the_last_one) {
  CHECK(puts_of({512, 0}, 128) == (Puts{{512, 128}, {0, 128}}));
}
