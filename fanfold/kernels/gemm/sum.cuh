// Sums over the depth of a warpgroup's part of a tile: products of e4m3 on the tensor cores, times
// a scale for each row and 128 columns of the depth and one for each 128 x 128 block of b.
//
// Two forms. In two levels, a block's products are added to FP32 sums. In place, the accumulators
// are multiplied by the quotient of two blocks' scales before the next block's products are added
// to them: up to 8% faster where the tensor cores bound a GEMM. But these cut each product to about
// 14 bits below their sum so far, so sums of many terms of one sign come out too small, with a
// depth of 7168 by up to 7%; of random signs both are within 5e-6
// (docs/decisions/fused-moe-experiments.md).
//
// Sums where a has few rows are in gemm/swapped_sum.cuh.
//
// Constants: kMostDepth, of any sum; kTwoLevels.
#pragma once

#include "device/numbers.cuh"
#include "gemm/stages.cuh"

namespace fanfold::gemm {

// The scales of b for a warp's columns. A lane holds those of every 32nd block of the depth, so the
// loop over the depth loads nothing from global memory.
class ColumnScales {
 public:
  // `from`: where those of each group of columns begin, along the depth.
  __device__ void load(const float* const (&from)[kScaleGroups], int depth_blocks) {
    const int lane = threadIdx.x % kWarpLanes;
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g)
#pragma unroll
      for (int i = 0; i < kHeld; ++i)
        held_[i][g] = __ldg(from[g] + min(lane + kWarpLanes * i, depth_blocks - 1));
  }
  // Of a block of the depth; by whole warps.
  __device__ void read(float (&scale)[kScaleGroups], int block) const {
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      float held = held_[0][g];
#pragma unroll
      for (int i = 1; i < kHeld; ++i) held = block < kWarpLanes * i ? held : held_[i][g];
      scale[g] = __shfl_sync(kFullWarp, held, block);  // of lane block % 32
    }
  }

 private:
  static constexpr int kHeld = (kMostDepth / kBlockDepth + kWarpLanes - 1) / kWarpLanes;
  float held_[kHeld][kScaleGroups];
};

// In place, of a row's scale times a column's: zero has no reciprocal, and with scales up to 2^36
// no sum overflows when it is divided by this one.
inline constexpr float kLeastScale = 0x1p-60f;

// Of a block of the depth, for a thread's two rows and its groups of columns.
using Scales = float[2][kScaleGroups];

inline constexpr int kGroupSums = kSums / kScaleGroups;  // of a thread, of 128 columns

__device__ __forceinline__ constexpr int scale_group(int element) {  // of the accumulators
  return element / 4 * 8 / kScaleColumns;
}

struct Nothing {
  __device__ void operator()() const {}
};

// ---- what all sums share ------------------------------------------------------------------------

// All blocks of the depth, and `early` behind the second. It may have loops that wait, so it is no
// part of the loop over the depth.
template <class Early, class Block>
__device__ __forceinline__ void for_blocks(int depth_blocks, const Early& early,
                                           const Block& block) {
  constexpr int kEarlyBlock = 2;
  int k = 0;
  for (int end = min(kEarlyBlock, depth_blocks); k < depth_blocks; end = depth_blocks) {
    for (; k < end; ++k) block(k);
    if (end <= kEarlyBlock) early();
  }
}

// The products of a stage, enqueued; `a` and `b` are the low words of the descriptors.
template <int kCount>
__device__ __forceinline__ void enqueue(float (&d)[kCount], uint32_t a, uint32_t b, bool adds, bool there = false) {
  const uint64_t high = swizzled_descriptor(nullptr) >> 32 << 32;
  registers_settle(d);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < kBlockDepth / kWgmmaDepth; ++i) {
    const uint32_t step = i * static_cast<uint32_t>(kDescriptorStep);
    wgmma_e4m3(d, high | (a + step), high | (b + step), adds || i > 0);
  }
  wgmma_commit();
}

template <int kCount>
__device__ __forceinline__ void await_products(float (&d)[kCount]) {
  wgmma_await<0>();
  registers_settle(d);
}

// ---- sums of a warpgroup's rows of a ------------------------------------------------------------

// Further rows of a as columns of products whose rows are 64 of each half of b.
template <int kTokens>
struct TailSums {
  float d[kScaleGroups][kTokens / 2];
};
template <>
struct TailSums<0> {};

template <int kTokens>
using TailScales = float[kScaleGroups][kTokens > 0 ? kTokens / 4 : 1];

template <class Waits>
class PartSum {
 public:
  __device__ PartSum(Stages<Waits>& stages, int warpgroup)
      : row(kSplitsRows ? warpgroup * kWgmmaRows : 0),
        column(kSplitsRows ? 0 : warpgroup * kPartColumns), stages_(stages) {
  }

  // Of all blocks of the depth. `early` is called once, by all threads, while the first blocks'
  // products run.
  template <int kTokens = 0, class Early = Nothing>
  __device__ __forceinline__ void run(float (&d)[kSums], TailSums<kTokens>& tail,
                                      const ColumnScales& columns, int depth_blocks,
                                      const Early& early = {}) {
    find_addresses();
    if constexpr (kTwoLevels != 0) {
      add_blocks(d, columns, depth_blocks, early);
    } else {
      scale_in_place<kTokens>(d, tail, columns, depth_blocks, early);
    }
  }

  const int row, column;  // of the part in its tile

 private:
  // For each tile anew, so that they take no registers while one is stored.
  __device__ __forceinline__ void find_addresses() {
    const int thread = settled_thread() % kWarpgroupThreads;
    const int own = row + thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
    Ring& ring = stages_.ring();
    row_scales_ = shared_address(&ring.scales[0][own]);
    a_ = static_cast<uint32_t>(swizzled_descriptor(&ring.a[0][row * kBlockDepth]));
    b_ = static_cast<uint32_t>(swizzled_descriptor(&ring.b[0][column * kBlockDepth]));
    // So that ptxas does not compute them again for each block.
    register_settle(row_scales_);
    register_settle(a_);
    register_settle(b_);
    if constexpr (kTailRows > 0) {
      tail_scales_ = shared_address(&ring.scales[0][kTileRows + 2 * (settled_thread() % 4)]);
      tail_ = static_cast<uint32_t>(swizzled_descriptor(ring.tail.of(0)));
      register_settle(tail_scales_);
      register_settle(tail_);
    }
  }

  __device__ void read_scales(Scales& scale, const ColumnScales& columns, int k) const {
    float column_scale[kScaleGroups];
    read_scales(scale, column_scale, columns, k);
  }
  __device__ void read_scales(Scales& scale, float (&column_scale)[kScaleGroups],
                              const ColumnScales& columns, int k) const {
    columns.read(column_scale, k);
    const uint32_t from = row_scales_ + stages_.stage() * kBytesScales;
    const float rows[2] = {load_shared_float(from), load_shared_float(from + 8 * sizeof(float))};
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      scale[0][g] = rows[0] * column_scale[g];
      scale[1][g] = rows[1] * column_scale[g];
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void read_tail_scales(TailScales<kTokens>& scale,
                                                   const ColumnScales& columns, int k,
                                                   int stage) const {
    float column_scale[kScaleGroups];
    columns.read(column_scale, k);
    const uint32_t from = tail_scales_ + stage * kBytesScales;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      float two[2];
      load_shared_floats(two, from + j * 8 * sizeof(float));
#pragma unroll
      for (int g = 0; g < kScaleGroups; ++g)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          scale[g][2 * j + c] = fmaxf(two[c] * column_scale[g], kLeastScale);
    }
  }

  template <int kTokens, class Early>
  __device__ __forceinline__ void scale_in_place(float (&d)[kSums], TailSums<kTokens>& tail,
                                                 const ColumnScales& columns, int depth_blocks,
                                                 const Early& early) {
    Scales before;
    for_blocks(depth_blocks, early,
               [&](int k) { multiply_block<kTokens>(d, tail, before, columns, k); });
    await_products(d);
    settle(tail);
    if constexpr (kTokens > 0) {
      if (has_tail) {
        TailScales<kTokens> tail_before;
        read_tail_scales<kTokens>(tail_before, columns, depth_blocks - 1, previous_);
        multiply_tail<kTokens>(tail, tail_before);
      }
    }
    stages_.release(previous_);
    multiply(d, before);
  }

  static __device__ __forceinline__ void settle(TailSums<0>&) {}
  template <int kTokens>
  static __device__ __forceinline__ void settle(TailSums<kTokens>& tail) {
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) registers_settle(tail.d[g]);
  }
  template <int kTokens>
  static __device__ __forceinline__ void multiply_tail(TailSums<kTokens>& tail,
                                                       const TailScales<kTokens>& factor) {
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g)
#pragma unroll
      for (int i = 0; i < kTokens / 2; ++i) tail.d[g][i] *= factor[g][i / 4 * 2 + i % 2];
  }

  // All that needs no products comes before the wait for those of the block before: what a
  // warpgroup does between two blocks' products is what bounds it.
  template <int kTokens>
  __device__ __forceinline__ void multiply_block(float (&d)[kSums], TailSums<kTokens>& tail,
                                                 Scales& before, const ColumnScales& columns,
                                                 int k) {
    stages_.await();
    Scales scale;
    float column_scale[kScaleGroups];
    read_scales(scale, column_scale, columns, k);
#pragma unroll
    for (int i = 0; i < 2 * kScaleGroups; ++i)
      scale[i % 2][i / 2] = fmaxf(scale[i % 2][i / 2], kLeastScale);
    const bool there = kTokens > 0 && __any_sync(kFullWarp, has_tail);
    uint32_t a = a_ + stages_.stage() * (kBytesA / 16);
    uint32_t b = b_ + stages_.stage() * (kBytesB / 16);
    if (k > 0) {
      Scales factor;
      TailScales<kTokens> tail_factor;
#pragma unroll
      for (int i = 0; i < 2 * kScaleGroups; ++i)
        factor[i % 2][i / 2] = before[i % 2][i / 2] * reciprocal(scale[i % 2][i / 2]);
      // They are computed before the wait.
      register_settle(a);
      register_settle(b);
#pragma unroll
      for (int i = 0; i < 2 * kScaleGroups; ++i) register_settle(factor[i % 2][i / 2]);
      if constexpr (kTokens > 0) {
        if (there) {
          TailScales<kTokens> tail_before;
          read_tail_scales<kTokens>(tail_before, columns, k - 1, previous_);
          read_tail_scales<kTokens>(tail_factor, columns, k, stages_.stage());
#pragma unroll
          for (int g = 0; g < kScaleGroups; ++g)
#pragma unroll
            for (int i = 0; i < kTokens / 4; ++i) {
              tail_factor[g][i] = tail_before[g][i] * reciprocal(tail_factor[g][i]);
              register_settle(tail_factor[g][i]);
            }
        }
      }
      await_products(d);
      settle(tail);
      stages_.release(previous_);
      multiply(d, factor);
      if constexpr (kTokens > 0) { if (there) multiply_tail<kTokens>(tail, tail_factor); }
    }
    enqueue_all<kTokens>(d, tail, a, b, k > 0, there);
    previous_ = stages_.stage();
    stages_.advance();
#pragma unroll
    for (int i = 0; i < 2 * kScaleGroups; ++i) before[i % 2][i / 2] = scale[i % 2][i / 2];
  }

  template <int kTokens>
  __device__ __forceinline__ void enqueue_all(float (&d)[kSums], TailSums<kTokens>& tail,
                                              uint32_t a, uint32_t b, bool adds, bool there = false) {
    if constexpr (kTokens == 0) {
      enqueue(d, a, b, adds);
    } else {
      const uint64_t high = swizzled_descriptor(nullptr) >> 32 << 32;
      registers_settle(d);
      settle(tail);
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < kBlockDepth / kWgmmaDepth; ++i) {
        const uint32_t step = i * static_cast<uint32_t>(kDescriptorStep);
        wgmma_e4m3(d, high | (a + step), high | (b + step), adds || i > 0);
      }
      wgmma_commit();
      if (there) {
      const uint32_t weights = b + row * (kBlockDepth / 16);
      const uint32_t tokens = tail_ + stages_.stage() * (kBytesTail / 16);
#pragma unroll
      for (int g = 0; g < kScaleGroups; ++g)
#pragma unroll
        for (int i = 0; i < kBlockDepth / kWgmmaDepth; ++i) {
          const uint32_t step = i * static_cast<uint32_t>(kDescriptorStep);
          wgmma_e4m3(tail.d[g], high | (weights + g * (kScaleColumns * kBlockDepth / 16) + step),
                     high | (tokens + step), adds || i > 0);
        }
      wgmma_commit();
      }
    }
  }

  __device__ __forceinline__ static void multiply(float (&d)[kSums], const Scales& factor) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] *= factor[i / 2 % 2][scale_group(i)];
  }

  template <class Early>
  __device__ __forceinline__ void add_blocks(float (&d)[kSums], const ColumnScales& columns,
                                             int depth_blocks, const Early& early) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] = 0;
    for_blocks(depth_blocks, early, [&](int k) { add_block(d, columns, k); });
  }

  // 128 columns at a time: registers for more products there are none.
  __device__ __forceinline__ void add_block(float (&d)[kSums], const ColumnScales& columns, int k) {
    stages_.await();
    Scales scale;
    read_scales(scale, columns, k);
    const uint32_t a = a_ + stages_.stage() * (kBytesA / 16);
    const uint32_t b = b_ + stages_.stage() * (kBytesB / 16);
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      float product[kGroupSums];
      enqueue(product, a, b + g * (kScaleColumns * kBlockDepth / 16), false);
      await_products(product);
      if (g == kScaleGroups - 1) stages_.release(stages_.stage());
#pragma unroll
      for (int i = 0; i < kGroupSums; ++i)
        d[g * kGroupSums + i] = fmaf(scale[i / 2 % 2][g], product[i], d[g * kGroupSums + i]);
    }
    stages_.advance();
  }

  Stages<Waits>& stages_;
  uint32_t row_scales_;  // address of the first stage's, of this thread's first row
  uint32_t tail_scales_, tail_;
public: bool has_tail = false;
  uint32_t a_, b_;       // low words of the first stage's descriptors
  int previous_ = 0;
};

}  // namespace fanfold::gemm
