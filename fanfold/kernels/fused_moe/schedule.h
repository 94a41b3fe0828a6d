// Which tiles the fused kernel computes, in which order: plain code for host and device.
//
// A ticket names the tiles of one cluster of two CTAs. Tickets are taken in order: all tiles of the
// first GEMM, expert after expert, then all of the second, by groups of columns, so that tokens are
// summed over their experts while later groups are computed. A tile depends on tiles with smaller
// tickets only, so no order of clusters can block.
//
// The CTAs of a cluster take two blocks of rows and share columns of the weights; a last single
// block of an expert is taken by both, with two blocks of columns that share its rows.
#pragma once

#include "layout/fused_moe.h"

namespace fanfold::fused_moe {

// Blocks of rows of all experts before one, and how many of those experts have an odd number.
struct BlocksBefore {
  uint32_t word;

  static constexpr int kBlockBits = 18;
  FANFOLD_HD static constexpr BlocksBefore of(int blocks, int singles) {
    return {static_cast<uint32_t>(blocks) | static_cast<uint32_t>(singles) << kBlockBits};
  }
  FANFOLD_HD constexpr int blocks() const {
    return static_cast<int>(word & ((1u << kBlockBits) - 1));
  }
  FANFOLD_HD constexpr int singles() const { return static_cast<int>(word >> kBlockBits); }
  // Tickets of those experts for so many blocks of columns.
  FANFOLD_HD constexpr int tickets(int column_blocks) const {
    return (blocks() * column_blocks + (column_blocks % 2 != 0 ? singles() : 0)) / 2;
  }
};
inline constexpr int kMostBlocks = (1 << BlocksBefore::kBlockBits) - 1;
inline constexpr int kMostExperts = (1 << (32 - BlocksBefore::kBlockBits)) - 1;

FANFOLD_HD constexpr int blocks_of(int rows) {
  return (rows + kFusedMoeBlockRows - 1) / kFusedMoeBlockRows;
}

struct Schedule {
  const uint32_t* before;  // [experts + 1], BlocksBefore
  const int32_t* rows;     // [experts]
  int experts;
  int first_column_blocks, second_column_blocks;  // of 256 columns in each GEMM
  int group_blocks;                               // of the second; the last group may have fewer

  FANFOLD_HD constexpr int groups() const {
    return (second_column_blocks + group_blocks - 1) / group_blocks;
  }
  // Phase 0 is the first GEMM, phase 1 + g group g of the second.
  FANFOLD_HD constexpr int phases() const { return 1 + groups(); }
  FANFOLD_HD constexpr int first_column(int phase) const {
    return phase == 0 ? 0 : (phase - 1) * group_blocks;
  }
  FANFOLD_HD constexpr int column_blocks(int phase) const {
    if (phase == 0) return first_column_blocks;
    const int left = second_column_blocks - first_column(phase);
    return left < group_blocks ? left : group_blocks;
  }
  FANFOLD_HD constexpr int tickets(int phase) const {
    return BlocksBefore{before[experts]}.tickets(column_blocks(phase));
  }
};

// The tile of one CTA.
struct Task {
  int gemm;  // 0 or 1
  int expert;
  int row;    // of the padded rows of all experts
  int valid;  // rows that belong to the expert, from `row` on, up to 128; 0: no tickets are left
  int column_block;
  bool shares_weights;  // with the other CTA; else they share the rows
  bool computes;        // false: there is no such block of columns, but the other CTA has one
};

// A task and its number as one word, so that one thread can look a ticket up for all roles of a
// CTA.
struct PackedTask {
  uint64_t word;

  FANFOLD_HD static constexpr PackedTask of(const Task& task, uint32_t number) {
    return {uint64_t{(number + 1) & 0xff} << 56 |
            static_cast<uint64_t>(task.row / kFusedMoeBlockRows) << 38 |
            static_cast<uint64_t>(task.expert) << 24 | static_cast<uint64_t>(task.valid) << 16 |
            static_cast<uint64_t>(task.column_block) << 3 | uint64_t{task.computes} << 2 |
            uint64_t{task.shares_weights} << 1 | static_cast<uint64_t>(task.gemm)};
  }
  FANFOLD_HD constexpr bool has_number(uint32_t number) const {
    return word >> 56 == ((number + 1) & 0xff);
  }
  FANFOLD_HD constexpr Task task() const {
    return {field(0, 1),     field(24, 14), field(38, 18) * kFusedMoeBlockRows,
            field(16, 8),    field(3, 13),  field(1, 1) != 0,
            field(2, 1) != 0};
  }

 private:
  FANFOLD_HD constexpr int field(int first, int bits) const {
    return static_cast<int>(word >> first & ((1u << bits) - 1));
  }
};
inline constexpr int kMostColumnBlocks = (1 << 13) - 1;

// Where the last ticket was found; tickets grow.
struct Cursor {
  int phase = -1;
  int begin = 0, end = 0;  // tickets of the phase
  int expert = 0;
};

// What both CTAs of a cluster have to know of their ticket.
struct TicketPlace {
  int gemm, expert;
  int first_block;            // of the expert's rows
  int rows;                   // of the expert; 0: no tickets are left
  int columns, first_column;  // blocks of them in the phase
  int pairs;                  // of blocks of rows
  int local;                  // the ticket's number among those of the expert in the phase
};

FANFOLD_HD constexpr TicketPlace place_of(const Schedule& schedule, int ticket, Cursor& at) {
  while (ticket >= at.end) {
    if (at.phase + 1 == schedule.phases()) return {};
    const int phase = at.phase + 1;
    at = {phase, at.end, at.end + schedule.tickets(phase), 0};
  }
  const int in_phase = ticket - at.begin;
  const int columns = schedule.column_blocks(at.phase);
  while (BlocksBefore{schedule.before[at.expert + 1]}.tickets(columns) <= in_phase) ++at.expert;
  const BlocksBefore before{schedule.before[at.expert]};
  const int rows = schedule.rows[at.expert];
  return {at.phase == 0 ? 0 : 1,
          at.expert,
          before.blocks(),
          rows,
          columns,
          schedule.first_column(at.phase),
          blocks_of(rows) / 2,
          in_phase - before.tickets(columns)};
}

FANFOLD_HD constexpr Task task_at(const TicketPlace& place, int cta) {
  if (place.rows == 0) return {};
  const int paired = place.pairs * place.columns;
  Task task{place.gemm, place.expert, 0, 0, 0, place.local < paired, true};
  int block = 2 * place.pairs;
  if (task.shares_weights) {
    task.column_block = place.local / place.pairs;
    block = 2 * (place.local - task.column_block * place.pairs) + cta;
  } else {
    task.column_block = 2 * (place.local - paired) + cta;
    task.computes = task.column_block < place.columns;
  }
  task.column_block += place.first_column;
  task.row = (place.first_block + block) * kFusedMoeBlockRows;
  const int left = place.rows - block * kFusedMoeBlockRows;
  task.valid = left < kFusedMoeBlockRows ? left : kFusedMoeBlockRows;
  return task;
}

}  // namespace fanfold::fused_moe
