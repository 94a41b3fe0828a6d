// Rows of tokens that are columns of products, from registers to shared memory.
#pragma once

#include "fused_moe/activation.cuh"
#include "fused_moe/progress.cuh"
#include "gemm/store.cuh"
#include "gemm/swapped_sum.cuh"

namespace fanfold::fused_moe {

// Where the rows of a block stand in the slots: 64 rows of 128 bytes, units of 16 bytes swizzled.
__device__ __forceinline__ uint32_t swizzled_at(int token, int byte) {
  const int row = token % kWgmmaRows;
  return row * 128 + ((byte / 16 ^ row % 8) * 16 + byte % 16);
}

// What makes a token's activations e4m3.
struct TokenFactors {
  float weight, factor;
};

// In memory of slots that hold no results meanwhile.
struct ActivationScratch {
  float (*largest)[kMathWarps];  // of a token, by warps
  TokenFactors* factors;         // of tokens
};

// For each token the largest of all columns makes its scale, which is stored. `weight` is of the
// token that has this thread's number; `v` are activations without the tokens' weights.
template <int kTokens>
__device__ __forceinline__ void find_factors(const float (&v)[kTokens / 2],
                                             const ActivationScratch& scratch, const Call& call,
                                             int column_block, int row, float weight) {
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
  args.activation_scales[column_block * args.row_count + row + thread] =
      most * (1.0f / kE4m3Max);
}

// To shared memory, `slot_of` says which for each half of a block. Of two lanes with neighbouring
// columns, one stores the bytes of each of two tokens.
template <int kTokens, class SlotOf>
__device__ __forceinline__ void store_quantised(const float (&v)[kTokens / 2],
                                                const SlotOf& slot_of,
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
    const uint32_t slot = shared_address(slot_of(8 * j / kWgmmaRows));
    store_shared_pair(slot + swizzled_at(at, column),
                      static_cast<uint16_t>((low & 0xff) | (high & 0xff) << 8));
    store_shared_pair(slot + swizzled_at(at, column + 8),
                      static_cast<uint16_t>(low >> 8 | (high & 0xff00)));
  }
}

}  // namespace fanfold::fused_moe
