// Sums over K of a warpgroup's tile: products of e4m3 on the tensor cores, a scale for each row and
// 128 columns of K, and one for each 128 columns of b and of K.
#pragma once

#include "stages.cuh"

namespace fanfold::probe {

enum class Sum {
  in_place,   // the accumulators are multiplied by the quotient of two blocks' scales
  two_level,  // a block of K has accumulators of its own, added to FP32 sums
  halves,     // the same, half of the columns at a time
  unscaled,   // no scales at all: wrong, to place time
};

// How two warpgroups take turns at the tensor cores.
//   issued       the next may enqueue when this one's products of a block are enqueued
//   half_done    when half of them are done
//   nearly_done  when all but the last quarter are done
enum class Turns { none, issued, half_done, nearly_done };

template <class T_, Sum kSum_, Turns kTurns_ = Turns::none, bool kProfile_ = false>
struct Policy {
  using T = T_;
  static constexpr Sum kSum = kSum_;
  static constexpr Turns kTurns = kTurns_;
  static constexpr bool kProfile = kProfile_;
  static constexpr bool kSplitsRows = T::kBlockM == 128;                      // else columns
  static constexpr int kColumns = kSplitsRows ? T::kBlockN : T::kBlockN / 2;  // of a warpgroup
  static constexpr int kScaleColumns = kColumns % 128 == 0 ? 128 : 64;
  static constexpr int kScaleGroups = kColumns / kScaleColumns;
  static constexpr int kSums = kColumns / 2;  // registers of a thread
  static constexpr int kPart = kSum == Sum::halves ? kSums / 2 : kSums;
  static_assert(T::kBlockM == 128 || T::kBlockM == 64);
};

struct Stalls {
  int64_t full = 0, turn = 0, enqueue = 0, tensor = 0, store = 0;  // cycles of one thread
};

template <bool kCounts, class F>
__device__ __forceinline__ void counted(int64_t& sum, const F& wait) {
  const int64_t begin = kCounts ? clock64() : 0;
  wait();
  if constexpr (kCounts) sum += clock64() - begin;
}

// Where a warpgroup's part of a tile is.
struct Part {
  int warpgroup;
  int row, column;  // in the CTA's tile
};

template <class P>
__device__ Part part_of_warpgroup(int warpgroup) {
  return {warpgroup, P::kSplitsRows ? warpgroup * kWgmmaRows : 0,
          P::kSplitsRows ? 0 : warpgroup * P::kColumns};
}

// The scales of b for a warp's columns. A lane holds those of two blocks of K, so the loop over K
// loads nothing from global memory.
template <class P>
class WeightScales {
 public:
  static constexpr int kMostBlocks = 2 * 32;

  // `scales` is [experts][columns / 128][blocks_k]
  __device__ void begin(const float* scales, int expert, int column, int columns, int blocks_k) {
    const int blocks_n = static_cast<int>(ceil_div(columns, 128));
    const float* from[P::kScaleGroups];
#pragma unroll
    for (int g = 0; g < P::kScaleGroups; ++g) {
      const int block = min((column + g * P::kScaleColumns) / 128, blocks_n - 1);
      from[g] = scales + (static_cast<int64_t>(expert) * blocks_n + block) * blocks_k;
    }
    begin(from, blocks_k);
  }
  // `from`: where each group's scales along K begin
  __device__ void begin(const float* const (&from)[P::kScaleGroups], int blocks_k) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < P::kScaleGroups; ++g)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        held_[half][g] = __ldg(from[g] + min(lane + 32 * half, blocks_k - 1));
  }
  // Of block `k` of K; by whole warps.
  __device__ void read(float (&scale)[P::kScaleGroups], int k) const {
#pragma unroll
    for (int g = 0; g < P::kScaleGroups; ++g)
      scale[g] = __shfl_sync(~0u, k < 32 ? held_[0][g] : held_[1][g], k);
  }

 private:
  float held_[2][P::kScaleGroups];
};

// Without the care for subnormal numbers that a division takes.
__device__ __forceinline__ float reciprocal(float v) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(v));
  return v;
}

// Scales of a block of K for a thread's two rows and its groups of columns.
template <class P>
using Scales = float[2][P::kScaleGroups];

template <class P>
__device__ __forceinline__ int scale_group(int element) {  // of an element of the accumulators
  return element / 4 * 8 / P::kScaleColumns;
}

template <class P>
class WarpgroupSum {
 public:
  using T = typename P::T;

  __device__ WarpgroupSum(Ring<T>& ring, int warpgroup)
      : part(part_of_warpgroup<P>(warpgroup)), ring_(ring) {
    const int thread = threadIdx.x % kWarpgroupThreads;
    const int row = part.row + thread / 32 * 16 + thread % 32 / 4;
    row_scales_ = shared_address(&ring.scales[0][row]);
    const uint64_t a = swizzled_descriptor(&ring.a[0][part.row * kBlockK]);
    const uint64_t b = swizzled_descriptor(&ring.b[0][part.column * kBlockK]);
    descriptors_ = {static_cast<uint32_t>(a), static_cast<uint32_t>(b)};
    // So that ptxas does not compute them again in each block of K.
    asm volatile("" : "+r"(row_scales_), "+r"(descriptors_.a), "+r"(descriptors_.b));
    if constexpr (P::kTurns != Turns::none)
      if (warpgroup == 1) named_barrier_arrive(kTurnBarrier, kMathWarps * 32);
  }

  // The sums over all blocks of K. `computes` is false where all rows are padding. `early` is
  // called once, behind the first blocks of K (skipped or in place).
  template <class Early = Nothing>
  __device__ __forceinline__ void run(float (&d)[P::kSums], WeightScales<P>& weights, int blocks_k,
                                      bool computes, const Early& early = {}) {
    if (!computes) {
      skip(blocks_k, early);
    } else if constexpr (P::kSum == Sum::in_place) {
      in_place(d, weights, blocks_k, early);
    } else if constexpr (P::kSum == Sum::unscaled) {
      unscaled(d, blocks_k);
    } else {
      two_level(d, weights, blocks_k);
    }
  }

  const Part part;
  Stalls stalls;

 private:
  static constexpr int kTurnBarrier = 4;  // and the next

  // Mostly there is nothing to wait for, and then the loop of the wait is not entered.
  __device__ void await_stage() {
    counted<P::kProfile>(stalls.full, [&] {
      ArrivalBarrier* full = &ring_.full[at_.stage];
      if (!phase_is_over(full, at_.parity)) await_phase(full, at_.parity, Impatience{});
    });
  }

  __device__ void await_turn() {
    if constexpr (P::kTurns != Turns::none)
      counted<P::kProfile>(
          stalls.turn, [&] { named_barrier_wait(kTurnBarrier + part.warpgroup, kMathWarps * 32); });
  }
  __device__ void pass_turn() {
    if constexpr (P::kTurns != Turns::none)
      named_barrier_arrive(kTurnBarrier + 1 - part.warpgroup, kMathWarps * 32);
  }

  static constexpr int kEarlyBlock = 2;

  template <class Early>
  __device__ void skip(int blocks_k, const Early& early) {
    for (int k = 0; k < blocks_k; ++k, at_.advance()) {
      await_stage();
      if (k == kEarlyBlock) early();
#pragma unroll
      for (int h = 0; h < P::kSums / P::kPart; ++h) {
        await_turn();
        pass_turn();
      }
      release_stage(ring_, at_.stage);
    }
  }

  __device__ void read_scales(Scales<P>& scale, const WeightScales<P>& weights, int k) {
    float column[P::kScaleGroups];
    weights.read(column, k);
    const uint32_t row = row_scales_ + at_.stage * T::kScaleBytes;
    const float rows[2] = {load_shared(row), load_shared(row + 8 * sizeof(float))};
#pragma unroll
    for (int g = 0; g < P::kScaleGroups; ++g) {
      scale[0][g] = rows[0] * column[g];
      scale[1][g] = rows[1] * column[g];
    }
  }

  static __device__ float load_shared(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
  }

  // The low words of the descriptors of a stage's operands; `first_column` of the warpgroup's.
  struct Descriptors {
    uint32_t a, b;
  };
  __device__ __forceinline__ Descriptors descriptors(int first_column) const {
    return {descriptors_.a + at_.stage * (T::kBytesA / 16),
            descriptors_.b + at_.stage * (T::kBytesB / 16) + first_column * (kBlockK / 16)};
  }

  // One stage's products, enqueued.
  __device__ __forceinline__ void enqueue(float (&d)[P::kPart], const Descriptors& of, bool adds) {
    const uint64_t high = swizzled_descriptor(nullptr) >> 32 << 32;
    registers_settle(d);
    const int64_t begin = P::kProfile ? clock64() : 0;
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < kBlockK / kWgmmaDepth; ++i) {
      if (P::kTurns == Turns::half_done && i == 2) wgmma_commit();
      if (P::kTurns == Turns::nearly_done && i == 3) wgmma_commit();
      const uint32_t step = i * static_cast<uint32_t>(kDescriptorStep);
      wgmma_e4m3(d, high | (of.a + step), high | (of.b + step), adds || i > 0);
    }
    wgmma_commit();
    if constexpr (P::kProfile) stalls.enqueue += clock64() - begin;
  }

  __device__ __forceinline__ void pass_turn_of_products() {
    if constexpr (P::kTurns == Turns::half_done || P::kTurns == Turns::nearly_done)
      wgmma_await<1>();
    pass_turn();
  }

  // Of all groups but the `kYoungest`.
  template <int kYoungest>
  __device__ __forceinline__ void await_products(float (&d)[P::kPart]) {
    counted<P::kProfile>(stalls.tensor, [] { wgmma_await<kYoungest>(); });
    registers_settle(d);
  }

  template <class Early>
  __device__ __forceinline__ void in_place(float (&d)[P::kSums], const WeightScales<P>& weights,
                                           int blocks_k, const Early& early) {
    Scales<P> before;
    int k = 0;
    // `early` has loops that wait, so it stands outside of the loop over K; products run meanwhile.
    for (int end = kEarlyBlock; k < blocks_k; end = blocks_k) {
      for (; k < end; ++k) multiply_block(d, before, weights, k);
      if (end == kEarlyBlock) early();
    }
    await_products<0>(d);
    release_stage(ring_, previous_);
    multiply(d, before);
  }

  // All that needs no products comes before the wait for those of the block before: what a
  // warpgroup does between two blocks' products is what bounds it.
  __device__ __forceinline__ void multiply_block(float (&d)[P::kSums], Scales<P>& before,
                                                 const WeightScales<P>& weights, int k) {
    await_stage();
    Scales<P> scale, factor;
    read_scales(scale, weights, k);
    Descriptors operands = descriptors(0);
    if (k > 0) {
      divide(factor, before, scale);
      settle(factor, operands);
      await_products<0>(d);
      release_stage(ring_, previous_);
      multiply(d, factor);
    }
    await_turn();
    enqueue(d, operands, k > 0);
    pass_turn_of_products();
    previous_ = at_.stage;
    at_.advance();
    copy(before, scale);
  }

  __device__ __forceinline__ void unscaled(float (&d)[P::kSums], int blocks_k) {
    for (int k = 0; k < blocks_k; ++k) {
      await_stage();
      await_turn();
      enqueue(d, descriptors(0), k > 0);
      pass_turn_of_products();
      if (k > 0) {
        wgmma_await<1>();
        release_stage(ring_, previous_);
      }
      previous_ = at_.stage;
      at_.advance();
    }
    await_products<0>(d);
    release_stage(ring_, previous_);
  }

  static __device__ void divide(Scales<P>& factor, const Scales<P>& a, const Scales<P>& b) {
#pragma unroll
    for (int i = 0; i < 2 * P::kScaleGroups; ++i)
      factor[i % 2][i / 2] = a[i % 2][i / 2] * reciprocal(b[i % 2][i / 2]);
  }
  // They are computed before this.
  static __device__ void settle(Scales<P>& factor, Descriptors& operands) {
    asm volatile("" : "+r"(operands.a), "+r"(operands.b));
#pragma unroll
    for (int i = 0; i < 2 * P::kScaleGroups; ++i) asm volatile("" : "+f"(factor[i % 2][i / 2]));
  }
  static __device__ void copy(Scales<P>& to, const Scales<P>& from) {
#pragma unroll
    for (int i = 0; i < 2 * P::kScaleGroups; ++i) to[i % 2][i / 2] = from[i % 2][i / 2];
  }

  static __device__ __forceinline__ void multiply(float (&d)[P::kSums], const Scales<P>& factor) {
#pragma unroll
    for (int i = 0; i < P::kSums; ++i) d[i] *= factor[i / 2 % 2][scale_group<P>(i)];
  }

  __device__ __forceinline__ void two_level(float (&d)[P::kSums], WeightScales<P>& weights,
                                            int blocks_k) {
    constexpr int kParts = P::kSums / P::kPart;
#pragma unroll
    for (float& each : d) each = 0;
    for (int k = 0; k < blocks_k; ++k, at_.advance()) {
      await_stage();
      Scales<P> scale;
      read_scales(scale, weights, k);
#pragma unroll
      for (int h = 0; h < kParts; ++h) {
        float product[P::kPart];
        await_turn();
        enqueue(product, descriptors(h * P::kPart * 2), false);
        pass_turn_of_products();
        await_products<0>(product);
        if (h == kParts - 1) release_stage(ring_, at_.stage);
#pragma unroll
        for (int i = 0; i < P::kPart; ++i)
          d[h * P::kPart + i] += scale[i / 2 % 2][scale_group<P>(h * P::kPart + i)] * product[i];
      }
    }
  }

  Ring<T>& ring_;
  Position<T> at_;
  // Of the first stage; scales as an address in shared memory.
  uint32_t row_scales_;
  Descriptors descriptors_;
  int previous_ = 0;
};

}  // namespace fanfold::probe
