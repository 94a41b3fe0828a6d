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
__device__ __forceinline__ void enqueue(float (&d)[kCount], uint32_t a, uint32_t b, bool adds) {
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

template <class Waits>
class PartSum {
 public:
  __device__ PartSum(Stages<Waits>& stages, int warpgroup)
      : row(kSplitsRows ? warpgroup * kWgmmaRows : 0),
        column(kSplitsRows ? 0 : warpgroup * kPartColumns), stages_(stages) {}

  // Of all blocks of the depth. `early` is called once, by all threads, while the first blocks'
  // products run.
  template <class Early = Nothing>
  __device__ __forceinline__ void run(float (&d)[kSums], const ColumnScales& columns,
                                      int depth_blocks, const Early& early = {}) {
    find_addresses();
    if constexpr (kTwoLevels != 0) {
      add_blocks(d, columns, depth_blocks, early);
    } else {
      scale_in_place(d, columns, depth_blocks, early);
    }
  }

  const int row, column;  // of the part in its tile

 private:
  // For each sum anew, so that they take no registers while one is stored.
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
  }

  __device__ void read_scales(Scales& scale, const ColumnScales& columns, int k) const {
    float column_scale[kScaleGroups];
    columns.read(column_scale, k);
    const uint32_t from = row_scales_ + stages_.stage() * kBytesScales;
    const float rows[2] = {load_shared_float(from), load_shared_float(from + 8 * sizeof(float))};
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      scale[0][g] = rows[0] * column_scale[g];
      scale[1][g] = rows[1] * column_scale[g];
    }
  }

  template <class Early>
  __device__ __forceinline__ void scale_in_place(float (&d)[kSums], const ColumnScales& columns,
                                                 int depth_blocks, const Early& early) {
    Scales before;
    for_blocks(depth_blocks, early, [&](int k) { multiply_block(d, before, columns, k); });
    await_products(d);
    stages_.release(previous_);
    multiply(d, before);
  }

  // All that needs no products comes before the wait for those of the block before: what a
  // warpgroup does between two blocks' products is what bounds it.
  __device__ __forceinline__ void multiply_block(float (&d)[kSums], Scales& before,
                                                 const ColumnScales& columns, int k) {
    stages_.await();
    Scales scale;
    read_scales(scale, columns, k);
#pragma unroll
    for (int i = 0; i < 2 * kScaleGroups; ++i)
      scale[i % 2][i / 2] = fmaxf(scale[i % 2][i / 2], kLeastScale);
    uint32_t a = a_ + stages_.stage() * (kBytesA / 16);
    uint32_t b = b_ + stages_.stage() * (kBytesB / 16);
    if (k > 0) {
      Scales factor;
#pragma unroll
      for (int i = 0; i < 2 * kScaleGroups; ++i)
        factor[i % 2][i / 2] = before[i % 2][i / 2] * reciprocal(scale[i % 2][i / 2]);
      // They are computed before the wait.
      register_settle(a);
      register_settle(b);
#pragma unroll
      for (int i = 0; i < 2 * kScaleGroups; ++i) register_settle(factor[i % 2][i / 2]);
      await_products(d);
      stages_.release(previous_);
      multiply(d, factor);
    }
    enqueue(d, a, b, k > 0);
    previous_ = stages_.stage();
    stages_.advance();
#pragma unroll
    for (int i = 0; i < 2 * kScaleGroups; ++i) before[i % 2][i / 2] = scale[i % 2][i / 2];
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
  uint32_t row_scales_ = 0;  // address of the first stage's, of this thread's first row
  uint32_t a_ = 0, b_ = 0;   // low words of the first stage's descriptors
  int previous_ = 0;
};

}  // namespace fanfold::gemm
