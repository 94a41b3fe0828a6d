// Tiles with a and b swapped (gemm/swapped_sum.cuh): the warpgroups share a tile's columns, so the
// rows may be few. Both end a tile together.
#pragma once

#include "fused_moe/swapped_rows.cuh"
#include "gemm/store.cuh"

namespace fanfold::fused_moe {

inline constexpr int kTokenStep = 32;  // of the columns of products, for which there are loops

using StoreSlots = StoreSlot[kMathWarpgroups][kSlots];

// The half of a block that a warpgroup's slots hold; its first thread stores it.
struct StoredHalf {
  int row, valid;  // its first row, and the tile's valid rows from there on

  __device__ StoredHalf(const Task& task, int warpgroup)
      : row(task.row + warpgroup * kFusedMoeHalfRows),
        valid(task.valid - warpgroup * kFusedMoeHalfRows) {}
  __device__ bool is_stored_here() const {
    return threadIdx.x % kWarpgroupThreads == 0 && valid > 0;
  }
};

// SwiGLU of a tile times the weights of its tokens, quantised.
template <int kTokens>
__device__ __forceinline__ void store_swapped_activations(SwappedSums<kTokens>& d,
                                                          StoreSlots& slots, const Call& call,
                                                          const Task& task, float weight) {
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  // The second slots hold no results of a first GEMM.
  const ActivationScratch scratch{reinterpret_cast<float(*)[kMathWarps]>(slots[0][1]),
                                  reinterpret_cast<TokenFactors*>(slots[1][1])};
  float (&v)[kTokens / 2] = d[0];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) v[i] = swiglu(v[i], d[1][i], call.args.clamp);
  if (threadIdx.x % kWarpgroupThreads == 0) bulk_await_read<0>();  // the slots' last stores
  Team::both_warpgroups().wait();
  find_factors<kTokens>(v, scratch, call, task.column_block, task.row, weight);
  fence_global_and_bulk();
  Team::both_warpgroups().wait();
  store_quantised<kTokens>(
      v, [&](int half) { return slots[half][0]; }, scratch);
  fence_shared_before_bulk();
  Team::both_warpgroups().wait();
  const StoredHalf stored(task, warpgroup);
  if (stored.is_stored_here()) {
    store_box(&call.args.a[1][smallest_box(stored.valid)], {task.column_block * 128, stored.row, 0},
              slots[warpgroup][0]);
    bulk_commit();
  }
}

// Results of a tile.
template <int kTokens>
__device__ __forceinline__ void store_swapped(const SwappedSums<kTokens>& d, StoreSlots& slots,
                                              const Call& call, const Task& task) {
  const int thread = settled_thread();
  const int lane = thread % kWarpLanes;
  const int warp = thread / kWarpLanes;
  const int warpgroup = thread / kWarpgroupThreads;
  const int column = task.column_block * kTileColumns;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    if (thread % kWarpgroupThreads == 0) bulk_await_read<0>();  // the slots' last stores
    Team::both_warpgroups().wait();
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 2) {
      const float* v = &d[half][4 * j];
      const uint32_t words[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                 pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
      const int token = 8 * j + lane / 16 * 8 + lane % 8;
      const int byte = warp % 4 * 32 + lane / 8 % 2 * 16;
      store_matrices_transposed(slots[8 * j / kWgmmaRows][warpgroup] + swizzled_at(token, byte),
                                words);
    }
    fence_shared_before_bulk();
    Team::both_warpgroups().wait();
    const StoredHalf stored(task, warpgroup);
    if (!stored.is_stored_here()) continue;
    for (int part = 0; part < kMathWarpgroups; ++part)
      store_box(&call.args.results[smallest_box(stored.valid)],
                {column + half * kScaleColumns + part * kStoreColumns, stored.row, 0},
                slots[warpgroup][part]);
    bulk_commit();
  }
}

// A tile whose rows are columns of the products: the warpgroups share its columns.
template <int kTokens>
__device__ __forceinline__ void multiply_swapped(Progress& at, SwappedSum<Waits>& sum,
                                                 StoreSlots& slots) {
  const Call& call = at.call;
  const Task& task = at.task;
  if constexpr (kTokens < kFusedMoeBlockRows) {
    if (task.valid > kTokens) return multiply_swapped<kTokens + kTokenStep>(at, sum, slots);
  }
  const auto thread = static_cast<int>(threadIdx.x);
  float weight = 0;
  SwappedSums<kTokens> d;
  sum.template run<kTokens>(d, at.scales, depth_blocks(task.gemm), [&] {
    at.publish_last();
    if (task.gemm == 0 && thread < kTokens) weight = row_weight(call, task.row + thread);
  });
  at.take();
  if (task.gemm == 0) {
    store_swapped_activations<kTokens>(d, slots, call, task, weight);
  } else {
    store_swapped<kTokens>(d, slots, call, task);
  }
  at.end_tile(task.valid > at.warpgroup * kFusedMoeHalfRows);
}

// Until no tickets are left.
__device__ __forceinline__ void multiply_swapped(SharedMemory& shared, const Call& call,
                                                 int warpgroup) {
  Progress at(shared, call, warpgroup, Team::both_warpgroups());
  SwappedSum sum(at.stages, warpgroup);
  while (at.task.valid > 0) {
    if (at.task.computes) {
      multiply_swapped<kTokenStep>(at, sum, shared.store);
    } else {
      at.skip();
    }
  }
  at.end();
}

}  // namespace fanfold::fused_moe
