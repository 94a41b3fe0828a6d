// The fused MoE kernel's schedule and memory: tickets name every tile exactly once and in order,
// tasks survive their encoding, the parts of the memory do not overlap, and there is room for the
// rows of every routing.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "check.hpp"
#include "cuda/fused_moe.h"
#include "fused_moe/schedule.h"
#include "layout/types.h"
#include "ranks.hpp"

using namespace fanfold;
using namespace fanfold::fused_moe;

namespace {

constexpr int BLOCK = 128;
constexpr int CTAS = 2;  // of a cluster

// The rows of each expert, and the tables that the kernel makes of them.
struct Routing {
  std::vector<int32_t> rows;
  int first_columns, second_columns;
  int group_blocks;
  std::vector<uint32_t> before{0};

  Routing(std::vector<int32_t> rows_of_experts, int first, int second, int group)
      : rows(std::move(rows_of_experts)), first_columns(first), second_columns(second),
        group_blocks(group) {
    int singles = 0;
    for (const int32_t count : rows) {
      singles += (count + BLOCK - 1) / BLOCK % 2;
      before.push_back(BlocksBefore::of(blocks_before(before.size()), singles).word);
    }
  }

  Schedule schedule() const {
    return {before.data(), rows.data(),    static_cast<int>(rows.size()),
            first_columns, second_columns, group_blocks};
  }

  // Blocks of rows of the experts before one.
  int blocks_before(size_t expert) const {
    int blocks = 0;
    for (size_t e = 0; e < expert; ++e) blocks += (rows[e] + BLOCK - 1) / BLOCK;
    return blocks;
  }

  // Columns of each phase; the first is the first GEMM.
  std::vector<int> phases() const {
    std::vector<int> columns{first_columns};
    for (int done = 0; done < second_columns; done += group_blocks) {
      columns.push_back(std::min(group_blocks, second_columns - done));
    }
    return columns;
  }

  // Two blocks of rows share a ticket, and a last single block's columns do.
  int tickets(int columns) const {
    int sum = 0;
    for (const int32_t count : rows) {
      const int blocks = (count + BLOCK - 1) / BLOCK;
      sum += blocks / 2 * columns + blocks % 2 * ((columns + 1) / 2);
    }
    return sum;
  }

  int tickets() const {
    int sum = 0;
    for (const int columns : phases()) sum += tickets(columns);
    return sum;
  }
};

int32_t drawn_rows(Random& random, int kind) {
  constexpr int32_t NAMED[] = {0, 1, 127, 128, 129, 255, 256, 257, 384, 385};
  if (kind == 0) return 0;
  if (kind == 1) return random.one_in(10) ? random.between(1, 2000) : 0;
  if (kind == 2) return random.between(0, 700);
  return NAMED[random.between(0, static_cast<int32_t>(std::size(NAMED)) - 1)];
}

Routing drawn_routing(Random& random) {
  const int kind = random.between(0, 9);
  const int experts = random.between(1, random.one_in(4) ? 130 : 20);
  std::vector<int32_t> rows(static_cast<size_t>(experts));
  for (int32_t& each : rows) each = drawn_rows(random, kind);
  const int second = random.between(1, 30);
  const int group = random.one_in(2) ? second : random.between(1, second);
  return {std::move(rows), random.between(1, 30), second, group};
}

std::vector<Routing> many_routings() {
  std::vector<Routing> all;
  for (const int32_t rows : {0, 1, 127, 128, 129, 256, 257, 5000}) {
    for (const int columns : {1, 2, 3, 8}) {
      all.emplace_back(std::vector<int32_t>{rows}, columns, columns, columns);
    }
    all.emplace_back(std::vector<int32_t>(130, rows), 3, 5, 2);
  }
  Random random(1);
  for (int count = 0; count < 150; ++count) all.push_back(drawn_routing(random));
  return all;
}

Task task_at_ticket(const Schedule& schedule, int ticket, int cta, Cursor& at) {
  return task_at(place_of(schedule, ticket, at), cta);
}

Task fresh_task(const Routing& routing, int ticket, int cta) {
  Cursor cursor;
  return task_at_ticket(routing.schedule(), ticket, cta, cursor);
}

auto fields(const Task& task) {
  return std::tuple(task.gemm, task.expert, task.row, task.valid, task.column_block,
                    task.shares_weights, task.computes);
}

// Checks a task by its own expert's rows, and returns its tile's number among those of its GEMM.
size_t checked_tile(const Routing& routing, const Task& task) {
  CHECK(task.gemm == 0 || task.gemm == 1);
  CHECK(task.expert >= 0 && std::cmp_less(task.expert, routing.rows.size()));
  const int block = task.row / BLOCK - routing.blocks_before(static_cast<size_t>(task.expert));
  const int left = routing.rows[static_cast<size_t>(task.expert)] - block * BLOCK;
  CHECK(task.row % BLOCK == 0 && block >= 0 && left > 0);
  CHECK_EQ(task.valid, std::min(left, BLOCK));
  const int columns = task.gemm == 0 ? routing.first_columns : routing.second_columns;
  CHECK(task.column_block >= 0 && task.column_block < columns);
  return static_cast<size_t>(task.row / BLOCK) * static_cast<size_t>(columns) +
         static_cast<size_t>(task.column_block);
}

// What both CTAs of a ticket have in common.
void check_pair(const Task& first, const Task& second) {
  CHECK_EQ(first.gemm, second.gemm);
  CHECK_EQ(first.expert, second.expert);
  CHECK_EQ(first.shares_weights, second.shares_weights);
  CHECK(first.computes);
  if (first.shares_weights) {
    CHECK(second.computes);
    CHECK_EQ(second.column_block, first.column_block);
    CHECK_EQ(second.row, first.row + BLOCK);
  } else {
    CHECK_EQ(second.row, first.row);
    CHECK_EQ(second.valid, first.valid);
    CHECK_EQ(second.column_block, first.column_block + 1);
  }
}

}  // namespace

// ---- tickets ------------------------------------------------------------------------------------

TEST(fused_moe_schedule_has_each_tile_once) {
  for (const Routing& routing : many_routings()) {
    const auto blocks = static_cast<size_t>(routing.blocks_before(routing.rows.size()));
    std::vector<int> found[2] = {
        std::vector<int>(blocks * static_cast<size_t>(routing.first_columns)),
        std::vector<int>(blocks * static_cast<size_t>(routing.second_columns))};
    for (int ticket = 0; ticket < routing.tickets(); ++ticket) {
      for (int cta = 0; cta < CTAS; ++cta) {
        const Task task = fresh_task(routing, ticket, cta);
        if (task.computes) ++found[task.gemm][checked_tile(routing, task)];
      }
    }
    for (const std::vector<int>& tiles : found) {
      CHECK_EQ(std::count(tiles.begin(), tiles.end(), 1), tiles.size());
    }
  }
}

TEST(fused_moe_schedule_ends_with_its_last_ticket) {
  for (const Routing& routing : many_routings()) {
    const Schedule schedule = routing.schedule();
    const std::vector<int> phases = routing.phases();
    CHECK_EQ(schedule.phases(), phases.size());
    for (size_t phase = 0; phase < phases.size(); ++phase) {
      const auto number = static_cast<int>(phase);
      CHECK_EQ(schedule.column_blocks(number), phases[phase]);
      CHECK_EQ(schedule.tickets(number), routing.tickets(phases[phase]));
    }
    for (int cta = 0; cta < CTAS; ++cta) {
      const int end = routing.tickets();
      if (end > 0) CHECK(fresh_task(routing, end - 1, cta).valid > 0);
      for (const int beyond : {0, 1, 2, 1000}) {
        CHECK(fields(fresh_task(routing, end + beyond, cta)) == fields(Task{}));
      }
      Cursor cursor;  // clusters look for several tickets after the end
      for (int ticket = end; ticket < end + 10; ++ticket) {
        CHECK_EQ(task_at_ticket(schedule, ticket, cta, cursor).valid, 0);
      }
    }
  }
}

TEST(fused_moe_schedule_gives_both_ctas_one_expert) {
  for (const Routing& routing : many_routings()) {
    for (int ticket = 0; ticket < routing.tickets(); ++ticket) {
      check_pair(fresh_task(routing, ticket, 0), fresh_task(routing, ticket, 1));
    }
  }
}

// A tile waits for tiles with smaller tickets only, so no order of clusters can block; tokens are
// summed over groups of columns that are complete.
TEST(fused_moe_schedule_takes_gemms_groups_and_experts_in_order) {
  for (const Routing& routing : many_routings()) {
    auto last = std::tuple(0, 0, 0);
    for (int ticket = 0; ticket < routing.tickets(); ++ticket) {
      const Task task = fresh_task(routing, ticket, 0);
      const int group = task.gemm == 0 ? 0 : task.column_block / routing.group_blocks;
      const auto place = std::tuple(task.gemm, group, task.expert);
      CHECK(last <= place);
      last = place;
      const Task other = fresh_task(routing, ticket, 1);
      if (other.computes && task.gemm == 1) {
        CHECK_EQ(other.column_block / routing.group_blocks, group);
      }
    }
  }
}

TEST(fused_moe_schedule_cursor_finds_growing_tickets) {
  Random random(2);
  for (const Routing& routing : many_routings()) {
    for (const int largest_step : {1, 3, 132, 5000}) {
      Cursor cursors[CTAS];
      for (int ticket = random.between(0, largest_step); ticket < routing.tickets() + 300;
           ticket += random.between(1, largest_step)) {
        for (int cta = 0; cta < CTAS; ++cta) {
          const Task found = task_at_ticket(routing.schedule(), ticket, cta, cursors[cta]);
          CHECK(fields(found) == fields(fresh_task(routing, ticket, cta)));
        }
      }
    }
  }
}

TEST(fused_moe_schedule_counts_blocks_up_to_its_limits) {
  const auto most = BlocksBefore::of(kMostBlocks, kMostExperts);
  CHECK_EQ(most.blocks(), kMostBlocks);
  CHECK_EQ(most.singles(), kMostExperts);
  // The most columns of a kernel's tiles of the first GEMM: intermediate = 16384.
  CHECK_EQ(most.tickets(128), int64_t{kMostBlocks} * 128 / 2);
  CHECK_EQ(most.tickets(127), (int64_t{kMostBlocks} * 127 + kMostExperts) / 2);
  CHECK_EQ(blocks_of(0), 0);
  CHECK_EQ(blocks_of(1), 1);
  CHECK_EQ(blocks_of(128), 1);
  CHECK_EQ(blocks_of(129), 2);
}

// ---- packed tasks -------------------------------------------------------------------------------

TEST(fused_moe_packed_tasks_keep_every_field) {
  Random random(3);
  for (const int gemm : {0, 1}) {
    for (const int expert : {0, 1, kMostExperts - 1, kMostExperts}) {
      for (const int block : {0, 1, kMostBlocks}) {
        for (const int valid : {0, 1, 127, 128}) {
          for (const int column : {0, 1, kMostColumnBlocks}) {
            for (const int flags : {0, 1, 2, 3}) {
              const Task task{gemm,   expert,           block * BLOCK,   valid,
                              column, (flags & 1) != 0, (flags & 2) != 0};
              const auto number = static_cast<uint32_t>(random.next());
              const PackedTask packed = PackedTask::of(task, number);
              CHECK(fields(packed.task()) == fields(task));
              CHECK(packed.has_number(number));
            }
          }
        }
      }
    }
  }
}

TEST(fused_moe_packed_tasks_tell_256_numbers_apart) {
  const Task full{1, kMostExperts, kMostBlocks * BLOCK, 128, kMostColumnBlocks, true, true};
  for (const Task& task : {Task{}, full}) {
    for (const uint32_t number : {0U, 1U, 127U, 254U, 255U, 256U, 0x12345678U, ~0U}) {
      const PackedTask packed = PackedTask::of(task, number);
      for (uint32_t other = 0; other < 256; ++other) {
        CHECK_EQ(packed.has_number(number + other), other == 0);
      }
      CHECK(packed.has_number(number + 256));
    }
  }
  // Shared memory that is cleared holds none of the first tasks.
  for (uint32_t number = 0; number < 255; ++number) CHECK(!PackedTask{0}.has_number(number));
}

// ---- memory -------------------------------------------------------------------------------------

namespace {

struct Part {
  int64_t begin, bytes;
};

// The bytes that each part needs, computed independently of the layout's own arithmetic.
std::vector<Part> parts_of(const cuda::FusedMoeSizes& sizes) {
  const cuda::FusedMoeLayout at(sizes);
  const int64_t rows = sizes.rows(), hidden = sizes.hidden, intermediate = sizes.intermediate;
  const int64_t entries = int64_t{sizes.tokens} * sizes.top_k;
  // The two leading words, rows, tiles of L1, and tiles of L2 in each group.
  const int64_t counters = 4 * (4 + (2 + kFusedMoeMostGroups) * (rows / 64));
  return {{at.state, sizeof(FusedMoeState)},
          {at.shared.counters[0], counters},
          {at.shared.counters[1], counters},
          {at.shared.counted, int64_t{2} * sizes.ranks * sizes.experts * 8},
          {at.shared.row_calls, rows * 4},
          {at.shared.rows, rows * hidden},
          {at.shared.row_scales, hidden / 128 * rows * 4},
          {at.shared.row_weights, rows * 4},
          {at.shared.slots, rows * hidden * 2},
          {at.activations, rows * intermediate},
          {at.activation_scales, intermediate / 128 * rows * 4},
          {at.counts, int64_t{kFusedMoeMostCtas} * sizes.experts * 4},
          {at.places, entries * 8},
          {at.copies, entries * 12},
          {at.tables, int64_t{kFusedMoeMostCtas} * (2 * sizes.local_experts() + 1) * 4}};
}

std::vector<cuda::FusedMoeSizes> many_sizes() {
  std::vector<cuda::FusedMoeSizes> all;
  for (const int32_t ranks : {1, 3, 8, 32}) {
    for (const int32_t local_experts : {1, 7, 192}) {
      for (const int32_t top_k : {1, 8, 32}) {
        for (const int32_t hidden : {128, 2688, 16384}) {
          for (const int32_t tokens : {0, 1, 130, 8192}) {
            all.push_back({ranks, ranks * local_experts, top_k, hidden, 16512 - hidden, tokens});
          }
        }
      }
    }
  }
  return all;
}

// The most rows that so many entries take, with the padding of each expert, by trying all routings.
std::vector<int64_t> most_rows(int64_t entries, int experts) {
  std::vector<int64_t> most(static_cast<size_t>(entries + 1), 0);
  for (int64_t n = 0; n <= entries; ++n) most[static_cast<size_t>(n)] = (n + 127) / 128 * 128;
  for (int expert = 1; expert < experts; ++expert) {
    for (int64_t n = entries; n >= 0; --n) {
      int64_t best = 0;
      for (int64_t own = 0; own <= n; ++own) {
        const int64_t others = most[static_cast<size_t>(n - own)];
        best = std::max(best, (own + 127) / 128 * 128 + others);
      }
      most[static_cast<size_t>(n)] = best;
    }
  }
  return most;
}

}  // namespace

TEST(fused_moe_memory_has_parts_that_do_not_overlap) {
  for (const cuda::FusedMoeSizes& sizes : many_sizes()) {
    const cuda::FusedMoeLayout layout(sizes);
    std::vector<Part> parts = parts_of(sizes);
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
    });
    CHECK_EQ(parts.front().begin, 0);
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t next = i + 1 < parts.size() ? parts[i + 1].begin : layout.bytes;
      CHECK_EQ(parts[i].begin % 1024, 0);
      CHECK(parts[i].begin + parts[i].bytes <= next);
    }
  }
}

TEST(fused_moe_memory_begins_with_what_must_be_zero) {
  for (const cuda::FusedMoeSizes& sizes : many_sizes()) {
    const cuda::FusedMoeLayout layout(sizes);
    const std::vector<Part> parts = parts_of(sizes);
    for (size_t i = 0; i < parts.size(); ++i) {
      if (i < 5) {  // the state, both sets of counters, the counts of rows, the calls of rows
        CHECK(parts[i].begin + parts[i].bytes <= layout.zeroed);
      } else {
        CHECK(parts[i].begin >= layout.zeroed);
      }
    }
  }
}

TEST(fused_moe_memory_has_room_for_every_routing) {
  for (int32_t local_experts = 1; local_experts <= 6; ++local_experts) {
    const std::vector<int64_t> most = most_rows(600, local_experts);
    for (const int32_t ranks : {1, 2, 3}) {
      for (const int32_t top_k : {1, 2, 5}) {
        for (int32_t tokens = 0; ranks * top_k * tokens <= 600; ++tokens) {
          const cuda::FusedMoeSizes sizes{ranks, ranks * local_experts, top_k, 128, 128, tokens};
          const int64_t entries = int64_t{ranks} * top_k * tokens;
          const int64_t worst = most[static_cast<size_t>(entries)];
          CHECK(sizes.rows() >= std::max<int64_t>(worst, BLOCK));  // a map has a row at least
          CHECK(sizes.rows() <= worst + BLOCK);
          CHECK_EQ(sizes.rows() % BLOCK, 0);
        }
      }
    }
  }
}

TEST(fused_moe_memory_of_many_rows) {
  // Sizes in int32 would be negative.
  const cuda::FusedMoeSizes sizes{32, 6144, 32, 16384, 16384, 1 << 19};
  const int64_t entries = int64_t{32} * 32 << 19;
  CHECK(sizes.rows() >= entries && sizes.rows() < entries + (192 + 1) * int64_t{BLOCK});
  const cuda::FusedMoeLayout layout(sizes);
  CHECK(layout.bytes > sizes.rows() * 16384 * 4);
  CHECK(layout.bytes > std::numeric_limits<int32_t>::max());
}
