// Sums over the depth with a and b swapped: rows of b, the weights, are the 64 rows of a product of
// the tensor cores, and rows of a, the tokens, its columns. A product may have as few of these as
// there are tokens, where PartSum has 64 rows of tokens or none: for few tokens of each expert. The
// sums and their order are those of PartSum in two levels.
//
// A warpgroup has 64 of the 128 rows of each half of b. Its registers hold, for each half, 64 rows
// of b x the tokens as accumulators do: d[half][4 j + 2 h + c] is of row 16 warp + lane / 4 + 8 h
// and of token 8 j + 2 (lane % 4) + c.
#pragma once

#include "gemm/sum.cuh"

namespace fanfold::gemm {

inline constexpr int kHalves = kTileColumns / kScaleColumns;
static_assert(kHalves == kScaleGroups && kScaleColumns == kMathWarpgroups * kWgmmaRows);

template <int kTokens>
using SwappedSums = float[kHalves][kTokens / 2];

template <class Waits>
class SwappedSum {
 public:
  __device__ SwappedSum(Stages<Waits>& stages, int warpgroup) : stages_(stages) {
    Ring& ring = stages.ring();
    token_scales_ = shared_address(&ring.scales[0][2 * (threadIdx.x % 4)]);
    tokens_ = static_cast<uint32_t>(swizzled_descriptor(&ring.a[0][0]));
    weights_ = static_cast<uint32_t>(
        swizzled_descriptor(&ring.b[0][warpgroup * kWgmmaRows * kBlockDepth]));
    // So that ptxas does not compute them again for each block.
    register_settle(token_scales_);
    register_settle(tokens_);
    register_settle(weights_);
  }

  // Of all blocks of the depth; `early` as in PartSum.
  template <int kTokens, class Early>
  __device__ __forceinline__ void run(SwappedSums<kTokens>& d, const ColumnScales& columns,
                                      int depth_blocks, const Early& early) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) d[half][i] = 0;
    for_blocks(depth_blocks, early, [&](int k) { add_block<kTokens>(d, columns, k); });
  }

 private:
  template <int kTokens>
  __device__ __forceinline__ void add_block(SwappedSums<kTokens>& d, const ColumnScales& columns,
                                            int k) {
    stages_.await();
    const int stage = stages_.stage();
    float column_scale[kScaleGroups];
    columns.read(column_scale, k);
    const uint32_t weights = weights_ + stage * (kBytesB / 16);
    const uint32_t tokens = tokens_ + stage * (kBytesA / 16);
    constexpr uint32_t kHalfStep = kScaleColumns * kBlockDepth / 16;
    // The scales are read behind a wait: ptxas would put what waits for them between the products.
    if constexpr (kTokens <= kTokensOfBothHalves) {
      float low[kTokens / 2], high[kTokens / 2];
      enqueue(low, weights, tokens, false);
      enqueue(high, weights + kHalfStep, tokens, false);
      wgmma_await<1>();
      registers_settle(low);
      TokenScales<kTokens> scales;
      read_scales<kTokens>(scales);
      add<kTokens>(d[0], low, scales, column_scale[0]);
      await_products(high);
      stages_.release(stage);
      add<kTokens>(d[1], high, scales, column_scale[1]);
    } else {
      // There are no registers for more than one half's products.
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float product[kTokens / 2];
        enqueue(product, weights + half * kHalfStep, tokens, false);
        await_products(product);
        TokenScales<kTokens> scales;
        read_scales<kTokens>(scales);
        if (half == kHalves - 1) {
          __syncwarp();  // all lanes have read them
          stages_.release(stage);
        }
        add<kTokens>(d[half], product, scales, column_scale[half]);
      }
    }
    stages_.advance();
  }

  static constexpr int kTokensOfBothHalves = 80;

  template <int kTokens>
  using TokenScales = float[kTokens / 8][2];

  template <int kTokens>
  __device__ __forceinline__ void read_scales(TokenScales<kTokens>& scales) const {
    const uint32_t from = token_scales_ + stages_.stage() * kBytesScales;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
      load_shared_floats(scales[j], from + j * 8 * sizeof(float));
  }

  template <int kTokens>
  __device__ __forceinline__ static void add(float (&d)[kTokens / 2],
                                             const float (&product)[kTokens / 2],
                                             const TokenScales<kTokens>& scales, float column) {
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float scale = scales[j][c] * column;
#pragma unroll
        for (int i = 4 * j + c; i < 4 * j + 4; i += 2) d[i] = fmaf(scale, product[i], d[i]);
      }
  }

  Stages<Waits>& stages_;
  uint32_t token_scales_;      // address of the first stage's, of this thread's first token
  uint32_t tokens_, weights_;  // low words of the first stage's descriptors
};

}  // namespace fanfold::gemm
