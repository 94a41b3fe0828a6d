// The few last rows of an expert, as columns of products whose rows are the weights that its block
// before is multiplied with: they cost no more weights. Both warpgroups have their sums, each of 64
// columns of either half of the tile.
#pragma once

#include "fused_moe/activation.cuh"
#include "fused_moe/progress.cuh"
#include "fused_moe/swapped_rows.cuh"
#include "gemm/store.cuh"

namespace fanfold::fused_moe {

inline constexpr int kTailPartBytes = kTailRows * 64 * 2;

__device__ __forceinline__ void begin(TailSums<0>&) {}
template <int kTokens>
__device__ __forceinline__ void begin(TailSums<kTokens>& tail) {
#pragma unroll
  for (int g = 0; g < kScaleGroups; ++g) registers_begin(tail.d[g]);
}

// SwiGLU of a tail times the weights of its tokens, quantised. `weight` is of the token that has
// this thread's number.
template <int kTokens>
__device__ __forceinline__ void store_tail_activations(TailSums<kTokens>& tail, uint8_t* slot, uint8_t* behind,
                                                       const Call& call, const Task& task,
                                                       float weight) {
  const ActivationScratch scratch{reinterpret_cast<float(*)[kMathWarps]>(behind),
                                  reinterpret_cast<TokenFactors*>(behind + kTailPartBytes)};
  float (&v)[kTokens / 2] = tail.d[0];
#pragma unroll
  for (int i = 0; i < kTokens / 2; ++i) v[i] = swiglu(v[i], tail.d[1][i], call.args.clamp);
  if (threadIdx.x == 0) bulk_await_read<0>();  // the slot's last store
  Team::both_warpgroups().wait();
  find_factors<kTokens>(v, scratch, call, task.column_block, task.row + kTileRows, weight);
  fence_global_and_bulk();
  Team::both_warpgroups().wait();
  store_quantised<kTokens>(
      v, [&](int) { return slot; }, scratch);
  fence_shared_before_bulk();
  Team::both_warpgroups().wait();
  if (threadIdx.x == 0) {
    store_box(&call.args.a[1][smallest_box(task.valid - kTileRows)],
              {task.column_block * 128, task.row + kTileRows, 0}, slot);
    bulk_commit();
  }
}

// Results of a tail.
template <int kTokens>
__device__ __forceinline__ void store_tail(const TailSums<kTokens>& tail, uint8_t* slot,
                                           const Call& call, const Task& task) {
  const int thread = settled_thread();
  const int lane = thread % kWarpLanes;
  const int warp = thread / kWarpLanes;
  const int warpgroup = thread / kWarpgroupThreads;
  if (thread == 0) bulk_await_read<0>();  // the slot's last store
  Team::both_warpgroups().wait();
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int j = 0; j < kTokens / 8; j += 2) {
      const float* v = &tail.d[half][4 * j];
      const uint32_t words[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                 pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
      const int token = 8 * j + lane / 16 * 8 + lane % 8;
      const int byte = warp % 4 * 32 + lane / 8 % 2 * 16;
      store_matrices_transposed(
          slot + (half * kMathWarpgroups + warpgroup) * kTailPartBytes + swizzled_at(token, byte),
          words);
    }
  fence_shared_before_bulk();
  Team::both_warpgroups().wait();
  if (thread != 0) return;
  const TensorMap* map = &call.args.results[smallest_box(task.valid - kTileRows)];
  for (int part = 0; part < kHalves * kMathWarpgroups; ++part)
    store_box(map, {task.column_block * kTileColumns + part * 64, task.row + kTileRows, 0},
              slot + part * kTailPartBytes);
  bulk_commit();
  bulk_await_read<0>();  // the slots are the tile's next
}

}  // namespace fanfold::fused_moe
