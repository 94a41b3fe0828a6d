// Operands to the stages: one thread takes the tickets and copies weights, another copies rows,
// once they are there.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// Takes the cluster's tickets and tells both CTAs their tasks; by one thread of the first CTA.
class Tickets {
 public:
  __device__ explicit Tickets(const Call& call) : call_(call) {}

  __device__ void take() { next_ = static_cast<int>(atomicAdd(call_.ticket(), 1u)); }
  __device__ void publish() {
    const TicketPlace place = place_of(call_.schedule(), next_, cursor_);
    for (int cta = 0; cta < kCluster; ++cta)
      exchange_relaxed_at_cta(&call_.tail.tasks[number_ % kTasks], cta,
                              PackedTask::of(task_at(place, cta), number_).word);
    ++number_;
  }

 private:
  const Call& call_;
  Cursor cursor_;
  int next_ = 0;
  uint32_t number_ = 0;
};

// Blocks of the depth before a tile's end: the next ticket is published so early that all roles
// know their tile before this one is done, else as late as possible, which makes the shares of the
// clusters fair.
inline constexpr int kTakenAhead = 8;
inline constexpr int kPublishedAhead = 6;

// By one thread; the first CTA's takes the tickets.
__device__ inline void load_weights(Ring& ring, const Call& call) {
  const Waits waits{call};
  const int cta = static_cast<int>(cta_of_cluster());
  Tickets tickets(call);
  if (cta == 0) {
    tickets.take();
    tickets.publish();
  }
  Position at;
  Task task = await_task(call, 0);
  for (uint32_t n = 1; task.valid > 0; ++n) {
    const TensorMap* map = task.gemm == 0 ? &call.args.l1 : &call.args.l2;
    // Gate columns stand in the lower half of a tile, the same columns of up in the upper.
    constexpr int kHalfColumns = kTileColumns / 2;
    const int low = task.column_block * (task.gemm == 0 ? kHalfColumns : kTileColumns);
    const int high = low + (task.gemm == 0 ? kIntermediate : kHalfColumns);
    constexpr int kHalfBytes = kBytesB / 2;
    const int blocks = depth_blocks(task.gemm);
    for (int k = 0; k < blocks; ++k, at.advance()) {
      if (cta == 0) {
        if (k == max(blocks - kTakenAhead, 0)) tickets.take();
        if (k == max(blocks - kPublishedAhead, 0)) tickets.publish();
      }
      if (!waits(&ring.empty[at.stage], at.parity ^ 1)) return;
      ArrivalBarrier* full = &ring.full[at.stage];
      uint8_t* b = ring.b[at.stage];
      arrive_expecting(full, kBytesB);
      const int x = k * kBlockDepth;
      if (task.shares_weights) {
        load_box_multicast(b + cta * kHalfBytes, map, {x, cta == 0 ? low : high, task.expert}, full,
                           0b11);
      } else {
        load_box(b, map, {x, low, task.expert}, full);
        load_box(b + kHalfBytes, map, {x, high, task.expert}, full);
      }
    }
    task = await_task(call, n);
  }
}

// Of a tile's half: what its rows wait for.
struct RowsAwaited {
  const uint32_t* counter;
  uint32_t wanted;  // 0: nothing

  __device__ RowsAwaited(const Call& call, const Task& task, int half) {
    const int at = task.row / kFusedMoeHalfRows + half;
    const int valid = max(0, min(task.valid - half * kFusedMoeHalfRows, kFusedMoeHalfRows));
    counter = task.gemm == 0 ? call.arrived(at) : call.activated(at);
    wanted = valid == 0 ? 0 : task.gemm == 0 ? valid : kFirstColumnBlocks;
  }
  __device__ bool are_there() const { return wanted == 0 || has_counted(counter, wanted); }
};

// By one thread. It looks for the next tile's rows while this one is copied, and waits only if they
// were not there: a wait before could be for this tile.
__device__ inline void load_rows(Ring& ring, const Call& call) {
  const Waits waits{call};
  const FusedMoeArgs& args = call.args;
  const int cta = static_cast<int>(cta_of_cluster());
  Position at;
  Task task = await_task(call, 0);
  uint32_t there = 0;  // bits of halves
  for (uint32_t n = 1; task.valid > 0; ++n) {
    for (int h = 0; h < 2; ++h) {
      const RowsAwaited rows(call, task, h);
      if (!(there >> h & 1) && rows.wanted && !await_count(call, rows.counter, rows.wanted)) return;
    }
    there = 0;
    fence_global_and_bulk();
    // Two boxes of rows; with at most 64 valid rows only the lower half of the tile is copied.
    const bool low = task.valid <= kFusedMoeHalfRows;
    const int box_rows = low ? kFusedMoeHalfRows / 2 : kFusedMoeHalfRows;
    const TensorMap* map = low ? &args.a_low[task.gemm] : &args.a[task.gemm];
    const int blocks = depth_blocks(task.gemm);
    const int looks_at = max(blocks - 3, 0);
    Task next{};
    for (int k = 0; k < blocks; ++k, at.advance()) {
      if (k == looks_at) {
        next = await_task(call, n);
      } else if (k > looks_at) {
        const int h = k - looks_at - 1;
        there |= uint32_t{RowsAwaited(call, next, h).are_there()} << h;
      }
      if (!waits(&ring.empty[at.stage], at.parity ^ 1)) return;
      ArrivalBarrier* full = &ring.full[at.stage];
      uint8_t* a = ring.a[at.stage];
      arrive_expecting(full, 2 * box_rows * kBlockDepth + kBytesScales);
      const int x = k * kBlockDepth;
      if (task.shares_weights) {
        load_box(a, map, {x, task.row, 0}, full);
        load_box(a + box_rows * kBlockDepth, map, {x, task.row + box_rows, 0}, full);
      } else {
        load_box_multicast(a + cta * box_rows * kBlockDepth, map, {x, task.row + cta * box_rows, 0},
                           full, 0b11);
      }
      load_box(ring.scales[at.stage], &args.scales[task.gemm], {task.row, k, 0}, full);
    }
    task = next;
  }
}

}  // namespace fanfold::fused_moe
