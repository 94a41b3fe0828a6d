// Sums over the depth of a warpgroup's part of a tile: products of e4m3 on the tensor cores, times
// a scale for each row and 128 columns of the depth and one for each 128 x 128 block of b.
//
// Two forms. In place, the accumulators are multiplied by the quotient of two blocks' scales before
// the next block's products are added to them: fewer instructions, an error of about 5e-6. In two
// levels, a block's products are added to FP32 sums: for tiles that wait for memory anyway, 1.4e-6.
#pragma once

#include "device/numbers.cuh"
#include "grouped_gemm/stages.cuh"

namespace fanfold::grouped_gemm {

// The scales of b for a warp's columns. A lane holds those of two blocks of the depth, so the loop
// over the depth loads nothing from global memory.
class ColumnScales {
 public:
  // Of a part of a tile that begins at `column`.
  __device__ void load(const float* scales, int group, int column) {
    const int lane = threadIdx.x % kWarpLanes;
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      const int block = min(column / kScaleColumns + g, kScaleBlocks - 1);
      const float* from = scales + (int64_t{group} * kScaleBlocks + block) * kDepthBlocks;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        held_[half][g] = __ldg(from + min(lane + kWarpLanes * half, kDepthBlocks - 1));
    }
  }
  // Of a block of the depth; by whole warps.
  __device__ void read(float (&scale)[kScaleGroups], int block) const {
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g)
      scale[g] = __shfl_sync(kFullWarp, block < kWarpLanes ? held_[0][g] : held_[1][g], block);
  }

 private:
  float held_[2][kScaleGroups];
};

// Of a block of the depth, for a thread's two rows and its groups of columns.
using Scales = float[2][kScaleGroups];

__device__ __forceinline__ constexpr int scale_group(int element) {  // of the accumulators
  return element / 4 * 8 / kScaleColumns;
}

class PartSum {
 public:
  __device__ PartSum(Ring& ring, int warpgroup)
      : row(kSplitsRows ? warpgroup * kWgmmaRows : 0),
        column(kSplitsRows ? 0 : warpgroup * kPartColumns), ring_(ring) {
    const int thread = threadIdx.x % kWarpgroupThreads;
    const int own = row + thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
    row_scales_ = shared_address(&ring.scales[0][own]);
    a_ = static_cast<uint32_t>(swizzled_descriptor(&ring.a[0][row * kBlockDepth]));
    b_ = static_cast<uint32_t>(swizzled_descriptor(&ring.b[0][column * kBlockDepth]));
    // So that ptxas does not compute them again for each block.
    register_settle(row_scales_);
    register_settle(a_);
    register_settle(b_);
  }

  // Of all blocks of the depth. `computes` is false where all rows are padding.
  __device__ __forceinline__ void run(float (&d)[kSums], const ColumnScales& columns,
                                      bool computes) {
    if (!computes) {
      for (int k = 0; k < kDepthBlocks; ++k, at_.advance()) {
        await_stage();
        release_stage(ring_, at_.stage);
      }
    } else if constexpr (kTwoLevels) {
      add_blocks(d, columns);
    } else {
      scale_in_place(d, columns);
    }
  }

  const int row, column;  // of the part in its tile

 private:
  // Mostly there is nothing to wait for, and then the loop of the wait is not entered.
  __device__ void await_stage() {
    ArrivalBarrier* full = &ring_.full[at_.stage];
    if (!phase_is_over(full, at_.parity)) await_phase(full, at_.parity, Patience{});
  }

  __device__ void read_scales(Scales& scale, const ColumnScales& columns, int k) const {
    float column_scale[kScaleGroups];
    columns.read(column_scale, k);
    const uint32_t from = row_scales_ + at_.stage * kBytesScales;
    const float rows[2] = {load_shared_float(from), load_shared_float(from + 8 * sizeof(float))};
#pragma unroll
    for (int g = 0; g < kScaleGroups; ++g) {
      scale[0][g] = rows[0] * column_scale[g];
      scale[1][g] = rows[1] * column_scale[g];
    }
  }

  // The products of this stage, enqueued; `a` and `b` are the low words of the descriptors.
  __device__ __forceinline__ void enqueue(float (&d)[kSums], uint32_t a, uint32_t b, bool adds) {
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

  __device__ __forceinline__ static void await_products(float (&d)[kSums]) {
    wgmma_await<0>();
    registers_settle(d);
  }

  __device__ __forceinline__ void scale_in_place(float (&d)[kSums], const ColumnScales& columns) {
    Scales before;
    for (int k = 0; k < kDepthBlocks; ++k) multiply_block(d, before, columns, k);
    await_products(d);
    release_stage(ring_, previous_);
    multiply(d, before);
  }

  // All that needs no products comes before the wait for those of the block before: what a
  // warpgroup does between two blocks' products is what bounds it.
  __device__ __forceinline__ void multiply_block(float (&d)[kSums], Scales& before,
                                                 const ColumnScales& columns, int k) {
    await_stage();
    Scales scale;
    read_scales(scale, columns, k);
    uint32_t a = a_ + at_.stage * (kBytesA / 16);
    uint32_t b = b_ + at_.stage * (kBytesB / 16);
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
      release_stage(ring_, previous_);
      multiply(d, factor);
    }
    enqueue(d, a, b, k > 0);
    previous_ = at_.stage;
    at_.advance();
#pragma unroll
    for (int i = 0; i < 2 * kScaleGroups; ++i) before[i % 2][i / 2] = scale[i % 2][i / 2];
  }

  __device__ __forceinline__ static void multiply(float (&d)[kSums], const Scales& factor) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] *= factor[i / 2 % 2][scale_group(i)];
  }

  __device__ __forceinline__ void add_blocks(float (&d)[kSums], const ColumnScales& columns) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) d[i] = 0;
    for (int k = 0; k < kDepthBlocks; ++k, at_.advance()) {
      await_stage();
      Scales scale;
      read_scales(scale, columns, k);
      float product[kSums];
      enqueue(product, a_ + at_.stage * (kBytesA / 16), b_ + at_.stage * (kBytesB / 16), false);
      await_products(product);
      release_stage(ring_, at_.stage);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        d[i] = fmaf(scale[i / 2 % 2][scale_group(i)], product[i], d[i]);
    }
  }

  Ring& ring_;
  Position at_;
  uint32_t row_scales_;  // address of the first stage's, of this thread's first row
  uint32_t a_, b_;       // low words of the first stage's descriptors
  int previous_ = 0;
};

}  // namespace fanfold::grouped_gemm
