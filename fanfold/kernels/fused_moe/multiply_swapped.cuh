// Tiles with a and b swapped (gemm/swapped_sum.cuh): the warpgroups share a tile's columns, so the
// rows may be few. Both end a tile together.
#pragma once

#include "fused_moe/activation.cuh"
#include "fused_moe/progress.cuh"
#include "gemm/store.cuh"
#include "gemm/swapped_sum.cuh"

namespace fanfold::fused_moe {

inline constexpr int kTokenStep = 32;  // of the columns of products, for which there are loops

using StoreSlots = StoreSlot[kMathWarpgroups][kSlots];

// Where the rows of a block stand in the slots: 64 rows of 128 bytes, units of 16 bytes swizzled.
__device__ __forceinline__ uint32_t swizzled_at(int token, int byte) {
  const int row = token % kWgmmaRows;
  return row * 128 + ((byte / 16 ^ row % 8) * 16 + byte % 16);
}

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

// What makes a token's activations e4m3.
struct TokenFactors {
  float weight, factor;
};

// In slots that hold no results meanwhile.
struct ActivationScratch {
  float (&largest)[kFusedMoeBlockRows][kMathWarps];
  TokenFactors (&factors)[kFusedMoeBlockRows];

  __device__ explicit ActivationScratch(StoreSlots& slots)
      : largest(*reinterpret_cast<float (*)[kFusedMoeBlockRows][kMathWarps]>(slots[0][1])),
        factors(*reinterpret_cast<TokenFactors (*)[kFusedMoeBlockRows]>(slots[1][1])) {
    static_assert(sizeof largest <= sizeof(StoreSlot) && sizeof factors <= sizeof(StoreSlot));
  }
};

// For each token the largest of all columns makes its scale, which is stored. `weight` is of the
// token that has this thread's number; `v` are activations without the tokens' weights.
template <int kTokens>
__device__ __forceinline__ void find_factors(const float (&v)[kTokens / 2],
                                             const ActivationScratch& scratch, const Call& call,
                                             const Task& task, float weight) {
  const FusedMoeArgs& args = call.args;
  const int thread = settled_thread();
  const int lane = thread % kWarpLanes;
  const int warp = thread / kWarpLanes;
#pragma unroll
  for (int i = 0; i < kTokens / 4; ++i) {
    const int at = i / 2 * 4 + i % 2;
    float most = fmaxf(fabsf(v[at]), fabsf(v[at + 2]));
#pragma unroll
    for (int lanes = 4; lanes < kWarpLanes; lanes *= 2)
      most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, lanes));
    if (lane < 4) scratch.largest[i / 2 * 8 + 2 * lane + i % 2][warp] = most;
  }
  Team::both_warpgroups().wait();
  if (thread >= kTokens) return;
  float most = 0;
#pragma unroll
  for (int i = 0; i < kMathWarps; ++i) most = fmaxf(most, scratch.largest[thread][i]);
  most = fmaxf(kSmallestActivation, fabsf(most * weight));
  scratch.factors[thread] = {weight, __fdividef(kE4m3Max, most)};
  args.activation_scales[task.column_block * args.row_count + task.row + thread] =
      most * (1.0f / kE4m3Max);
}

// To the first slot of each half of the block. Of two lanes with neighbouring columns, one stores
// the bytes of each of two tokens.
template <int kTokens>
__device__ __forceinline__ void store_quantised(const float (&v)[kTokens / 2], StoreSlots& slots,
                                                const ActivationScratch& scratch) {
  const int thread = settled_thread();
  const int lane = thread % kWarpLanes;
  const bool odd = lane / 4 % 2 != 0;
  const int column = thread / kWarpLanes * 16 + lane / 4 - odd;
#pragma unroll
  for (int j = 0; j < kTokens / 8; ++j) {
    const int token = 8 * j + 2 * (lane % 4);
    const TokenFactors of[2] = {scratch.factors[token], scratch.factors[token + 1]};
    const float* from = &v[4 * j];
    const uint32_t quad =
        pack_e4m3(from[0] * of[0].weight * of[0].factor, from[2] * of[0].weight * of[0].factor,
                  from[1] * of[1].weight * of[1].factor, from[3] * of[1].weight * of[1].factor);
    const uint32_t own = odd ? quad >> 16 : quad & 0xffff;
    const uint32_t sent = odd ? quad & 0xffff : quad >> 16;
    const uint32_t got = __shfl_xor_sync(kFullWarp, sent, 4);
    const uint32_t low = odd ? got : own;
    const uint32_t high = odd ? own : got;
    const int at = token + odd;
    const uint32_t slot = shared_address(slots[8 * j / kWgmmaRows][0]);
    store_shared_pair(slot + swizzled_at(at, column),
                      static_cast<uint16_t>((low & 0xff) | (high & 0xff) << 8));
    store_shared_pair(slot + swizzled_at(at, column + 8),
                      static_cast<uint16_t>(low >> 8 | (high & 0xff00)));
  }
}

// SwiGLU of a tile times the weights of its tokens, quantised.
template <int kTokens>
__device__ __forceinline__ void store_swapped_activations(SwappedSums<kTokens>& d,
                                                          StoreSlots& slots, const Call& call,
                                                          const Task& task, float weight) {
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const ActivationScratch scratch(slots);
  float (&v)[kTokens / 2] = d[0];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) v[i] = swiglu(v[i], d[1][i], call.args.clamp);
  if (threadIdx.x % kWarpgroupThreads == 0) bulk_await_read<0>();  // the slots' last stores
  Team::both_warpgroups().wait();
  find_factors<kTokens>(v, scratch, call, task, weight);
  fence_global_and_bulk();
  Team::both_warpgroups().wait();
  store_quantised<kTokens>(v, slots, scratch);
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
