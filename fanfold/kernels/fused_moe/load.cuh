// Operands to the stages: one thread takes the tickets and copies weights, another copies rows,
// once they are there.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// Takes the cluster's tickets and tells both CTAs their tasks; by one thread of the first CTA. What
// it keeps is in shared memory: the thread, which copies weights, has no registers for it.
class Tickets {
 public:
  __device__ explicit Tickets(const Call& call) : call_(call) {}

  __device__ void begin() {
    call_.tail.tickets = {};
    take();
    publish();
  }
  __device__ void take() {
    call_.tail.tickets.ticket = static_cast<int>(atomicAdd(call_.ticket(), 1u));
  }
  __device__ void publish() {
    TicketState& state = call_.tail.tickets;
    const uint32_t number = state.published++;
    const TicketPlace place = place_of(call_.schedule(), state.ticket, state.cursor);
    for (int cta = 0; cta < kCluster; ++cta)
      exchange_relaxed_at_cta(&call_.tail.tasks[number % kTasks], cta,
                              PackedTask::of(task_at(place, cta), number).word);
  }

 private:
  const Call& call_;
};

// Blocks of the depth before a tile's end: the next ticket is published so early that all roles
// know their tile before this one is done, else as late as possible, which makes the shares of the
// clusters fair.
inline constexpr int kTakenAhead = 8;
inline constexpr int kPublishedAhead = 6;

// The thread that copies weights; the first CTA's takes the tickets, too.
class WeightLoader {
 public:
  __device__ WeightLoader(Ring& ring, const Call& call)
      : ring_(ring), call_(call), waits_{call}, tickets_(call) {}

  __device__ void run() {
    if (cta_of_cluster() == 0) tickets_.begin();
    Task task = await_task(call_, 0);
    for (uint32_t n = 1; task.valid > 0; ++n) {
      if (!(task.shares_weights ? load_tile<true>(task) : load_tile<false>(task))) return;
      task = await_task(call_, n);
    }
  }

 private:
  // Two loops, as in RowLoader, each in parts between which tickets are taken: within a loop ptxas
  // would spill what its copies need.
  template <bool kSharesWeights>
  __device__ __forceinline__ bool load_tile(const Task& task) {
    // Gate columns stand in the lower half of a tile, the same columns of up in the upper.
    constexpr int kHalfColumns = kTileColumns / 2;
    constexpr int kHalfBytes = kBytesB / 2;
    const auto cta = static_cast<int>(cta_of_cluster());
    const TensorMap* map = task.gemm == 0 ? &call_.args.l1 : &call_.args.l2;
    const int low = task.column_block * (task.gemm == 0 ? kHalfColumns : kTileColumns);
    const int high = low + (task.gemm == 0 ? kIntermediate : kHalfColumns);
    const int blocks = depth_blocks(task.gemm);
    int k = 0;
    const auto load_until = [&](int end) {
      for (; k < end; ++k, at_.advance()) {
        if (!waits_(&ring_.empty[at_.stage], at_.parity ^ 1)) return false;
        ArrivalBarrier* full = &ring_.full[at_.stage];
        uint8_t* b = ring_.b[at_.stage];
        arrive_expecting(full, kBytesB);
        const int x = k * kBlockDepth;
        if constexpr (kSharesWeights) {
          load_box_multicast(b + cta * kHalfBytes, map, {x, cta == 0 ? low : high, task.expert},
                             full, 0b11);
        } else {
          load_box(b, map, {x, low, task.expert}, full);
          load_box(b + kHalfBytes, map, {x, high, task.expert}, full);
        }
      }
      return true;
    };
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      if (!load_until(blocks - (part == 0 ? kTakenAhead : part == 1 ? kPublishedAhead : 0)))
        return false;
      if (cta != 0) continue;
      if (part == 0) tickets_.take();
      if (part == 1) tickets_.publish();
    }
    return true;
  }

  Ring& ring_;
  const Call& call_;
  const Waits waits_;
  Tickets tickets_;
  Position at_;
};

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

// The thread that copies rows. It looks for the next tile's rows while this one is copied, and
// waits only if they were not there: a wait before could be for this tile.
class RowLoader {
 public:
  __device__ RowLoader(Ring& ring, const Call& call) : ring_(ring), call_(call), waits_{call} {}

  __device__ void run() {
    for (Task task = await_task(call_, 0); task.valid > 0; task = await_task(call_, number_++)) {
      for (int h = 0; h < 2; ++h) {
        const RowsAwaited rows(call_, task, h);
        if ((there_ >> h & 1) || rows.wanted == 0) continue;
        if (!await_count(call_, rows.counter, rows.wanted)) return;
      }
      there_ = 0;
      fence_global_and_bulk();
      if (!(task.shares_weights ? load_tile<true>(task) : load_tile<false>(task))) return;
    }
  }

 private:
  // Two boxes of rows, as small as the valid rows allow. Two loops, as in one the compiler makes a
  // thread go through the copies of both cases; each in parts, as in WeightLoader.
  template <bool kSharesWeights>
  __device__ __forceinline__ bool load_tile(const Task& task) {
    const int box = smallest_box((task.valid + 1) / 2);
    const int box_rows = fused_moe_box_rows(box);
    const FusedMoeArgs& args = call_.args;
    const TensorMap* map = &args.a[task.gemm][box];
    const TensorMap* scales = &args.scales[task.gemm];
    const auto cta = static_cast<int>(cta_of_cluster());
    const int blocks = depth_blocks(task.gemm);
    int k = 0;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      for (; k < blocks - 2 + part; ++k, at_.advance()) {
        if (!waits_(&ring_.empty[at_.stage], at_.parity ^ 1)) return false;
        ArrivalBarrier* full = &ring_.full[at_.stage];
        uint8_t* a = ring_.a[at_.stage];
        arrive_expecting(full, 2 * box_rows * kBlockDepth + kBytesScales);
        const int x = k * kBlockDepth;
        if constexpr (kSharesWeights) {
          load_box(a, map, {x, task.row, 0}, full);
          load_box(a + box_rows * kBlockDepth, map, {x, task.row + box_rows, 0}, full);
        } else {
          load_box_multicast(a + cta * box_rows * kBlockDepth, map,
                             {x, task.row + cta * box_rows, 0}, full, 0b11);
        }
        load_box(ring_.scales[at_.stage], scales, {task.row, k, 0}, full);
      }
      if (part < 2) look_ahead(part);
    }
    return true;
  }

  // Before the last two blocks of a tile: whether the rows of a half of the next tile are there.
  __device__ __forceinline__ void look_ahead(int half) {
    const RowsAwaited rows(call_, await_task(call_, number_), half);
    there_ |= uint32_t{rows.are_there()} << half;
  }

  Ring& ring_;
  const Call& call_;
  const Waits waits_;
  Position at_;
  uint32_t number_ = 1;  // of the next task
  uint32_t there_ = 0;   // bits of halves
};

}  // namespace fanfold::fused_moe
