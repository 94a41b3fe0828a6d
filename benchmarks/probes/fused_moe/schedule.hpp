// Which tiles the fused kernel computes, in which order: plain code for host and device.
//
// A ticket names the tiles of one cluster of two CTAs. Tickets are taken in order: all tiles of the
// first GEMM, expert after expert, then all of the second, by groups of columns, so that tokens are
// summed over their experts while later groups are computed. A tile depends on tiles with smaller
// tickets only, so no order of clusters can block.
#pragma once

#include "layout/types.h"

namespace fanfold::probe {

inline constexpr int kBlockRows = 128;  // of a tile
inline constexpr int kHalfRows = 64;    // of a warpgroup

// The blocks of rows of one expert. A pair is two CTAs' work that shares columns of the weights; a
// single block is taken by both CTAs with two blocks of columns.
struct RowBlocks {
  int pairs, singles;
  FANFOLD_HD int blocks() const { return 2 * pairs + singles; }
};

// A last block with at most 64 rows takes half the time of a full one, so it makes no pair with
// one unless `pairs_halves`.
FANFOLD_HD inline RowBlocks row_blocks(int rows, bool pairs_halves) {
  const int blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int full = (rows + kHalfRows - 1) / kBlockRows;
  const int pairs = (pairs_halves ? blocks : full) / 2;
  return {pairs, blocks - 2 * pairs};
}

struct Schedule {
  const uint16_t* first_block;  // [experts + 1], of all blocks of rows
  const int32_t* rows;          // [experts]
  int experts;
  int first_column_blocks, second_column_blocks;  // of 256 columns in each GEMM; even
  int second_groups;                              // of columns; each has an even number of blocks
  bool pairs_halves;

  FANFOLD_HD int column_blocks(int gemm) const {
    return gemm == 0 ? first_column_blocks : second_column_blocks;
  }
  FANFOLD_HD int tickets(int gemm) const {
    return first_block[experts] * (column_blocks(gemm) / 2);
  }
  FANFOLD_HD int tickets() const { return tickets(0) + tickets(1); }
};

// The tile of one CTA.
struct Task {
  int gemm;  // 0 or 1
  int expert;
  int row;    // of the padded rows of all experts
  int valid;  // rows that belong to the expert, from `row` on; at most 128
  int column_block;
  bool shares_weights;  // with the other CTA; else they share the rows
};

// A task and its number as one word, so that one thread can look a ticket up for all roles of a CTA.
// Zero valid rows: no tickets are left.
FANFOLD_HD inline uint64_t packed_task(const Task& task, uint32_t number) {
  return uint64_t{(number + 1) & 0xffffff} << 40 |
         static_cast<uint64_t>(task.row / kBlockRows) << 27 |
         static_cast<uint64_t>(task.expert) << 19 | static_cast<uint64_t>(task.valid) << 11 |
         static_cast<uint64_t>(task.column_block) << 3 | uint64_t{task.shares_weights} << 1 |
         static_cast<uint64_t>(task.gemm);
}

FANFOLD_HD inline bool has_number(uint64_t word, uint32_t number) {
  return word >> 40 == ((number + 1) & 0xffffff);
}

FANFOLD_HD inline Task unpacked_task(uint64_t word) {
  const auto field = [&](int first, int bits) {
    return static_cast<int>(word >> first & ((1u << bits) - 1));
  };
  return {field(0, 1),  field(19, 8), field(27, 13) * kBlockRows,
          field(11, 8), field(3, 8),  field(1, 1) != 0};
}

// Where the last ticket was found; tickets grow.
struct Cursor {
  int phase = 0;  // 0, or 1 and the group of the second GEMM
  int expert = 0;
};

FANFOLD_HD inline Task task_of(const Schedule& schedule, int ticket, int cta, Cursor& at) {
  const int gemm = ticket >= schedule.tickets(0) ? 1 : 0;
  int column_blocks = schedule.column_blocks(gemm);
  int group = 0;
  if (gemm == 1) {
    ticket -= schedule.tickets(0);
    column_blocks /= schedule.second_groups;
    const int group_tickets = schedule.first_block[schedule.experts] * (column_blocks / 2);
    group = ticket / group_tickets;
    ticket -= group * group_tickets;
  }
  if (gemm + group != at.phase) at = {gemm + group, 0};
  const int unit = ticket / (column_blocks / 2);
  while (schedule.first_block[at.expert + 1] <= unit) ++at.expert;
  const int first_block = schedule.first_block[at.expert];
  const int rows = schedule.rows[at.expert];
  const RowBlocks blocks = row_blocks(rows, schedule.pairs_halves);
  int local = ticket - first_block * (column_blocks / 2);
  Task task{gemm, at.expert, 0, 0, 0, local < blocks.pairs * column_blocks};
  int block;
  if (task.shares_weights) {
    task.column_block = local / blocks.pairs;
    block = 2 * (local - task.column_block * blocks.pairs) + cta;
  } else {
    local -= blocks.pairs * column_blocks;
    const int columns = local / blocks.singles;
    task.column_block = 2 * columns + cta;
    block = 2 * blocks.pairs + local - columns * blocks.singles;
  }
  task.column_block += group * column_blocks;
  task.row = (first_block + block) * kBlockRows;
  const int left = rows - block * kBlockRows;
  task.valid = left < kBlockRows ? left : kBlockRows;
  return task;
}

}  // namespace fanfold::probe
