// The ring of stages between the warp that copies operand tiles to shared memory and those that use
// them. A stage holds 128 columns of K: rows of a with their scales, rows of b.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "device/bulk.cuh"
#include "device/cluster.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "tiles.hpp"

namespace fanfold::probe {

inline constexpr int kBlockK = 128;
inline constexpr int kMathWarpgroups = 2;
inline constexpr int kMathWarps = 4 * kMathWarpgroups;
inline constexpr int kStoreColumns = 64;  // of bf16: 128 bytes, what a swizzle covers

struct Nothing {
  __device__ void operator()() const {}
};

// A block of b has kBlockN rows: columns of the result.
template <int kBlockM_, int kBlockN_, int kStages_, int kCluster_>
struct Tile {
  using Tail = Nothing;  // what else stands behind the ring's barriers
  static constexpr int kProducers = 1;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kStages = kStages_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kBytesA = kBlockM * kBlockK;
  static constexpr int kBytesB = kBlockN * kBlockK;
  static constexpr int kScaleBytes = kBlockM * 4;
  static constexpr int kStageBytes = kBytesA + kBytesB + kScaleBytes;
};

template <class T>
struct Ring {
  alignas(1024) uint8_t a[T::kStages][T::kBytesA];
  alignas(1024) uint8_t b[T::kStages][T::kBytesB];
  alignas(128) float scales[T::kStages][T::kBlockM];
  ArrivalBarrier full[T::kStages];
  ArrivalBarrier empty[T::kStages];
  typename T::Tail tail;
};

struct Operands {
  TensorMap a;            // {K, rows, 1}, box {128, kBlockM / 2}
  TensorMap b;            // {K, columns, experts}, box {128, kBlockN / 2}
  const float* a_scales;  // [K / 128][rows]
  int64_t rows;
  int blocks_k;
  int packed_columns;  // not 0: b is {128, blocks of (expert, column block, k block), 1}
  const Work* plan;
  int works;
  bool skips_loads;  // wrong, to place time
};

// Not 0 once a wait has lasted two seconds; every later one gives up at once. (A trap instead takes
// the accumulators' registers: ptxas then keeps all roles below 168 and spills.)
static __device__ uint32_t expired_waits;

struct Impatience {
  uint64_t begin = 0;
  __device__ bool expired() {
    const uint64_t now = global_nanoseconds();
    if (begin == 0) begin = now;
    if (now - begin < (expired_waits ? 1'000u : 2'000'000'000u)) return false;
    expired_waits = 1;
    return true;
  }
};

inline void check_waits(const char* what) {
  uint32_t expired = 0;
  if (cudaMemcpyFromSymbol(&expired, expired_waits, 4) == cudaSuccess && expired == 0) return;
  std::fprintf(stderr, "%s: a wait lasted two seconds, or the kernel failed\n", what);
  std::exit(1);
}

// Where a role is in the ring.
template <class T>
struct Position {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance() {
    if (++stage < T::kStages) return;
    stage = 0;
    parity ^= 1;
  }
};

// By one thread of the CTA; a barrier of the cluster must follow.
template <class T>
__device__ void init_ring(Ring<T>& ring) {
  for (int i = 0; i < T::kStages; ++i) {
    init_barrier(&ring.full[i], T::kProducers);
    init_barrier(&ring.empty[i], kMathWarps * T::kCluster);
  }
  fence_barrier_init();
}

// A warp needs the stage no longer. With a cluster both CTAs write to both, so both must know.
template <class T>
__device__ __forceinline__ void release_stage(Ring<T>& ring, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (T::kCluster == 1) {
    if (lane == 0) arrive(&ring.empty[stage]);
  } else {
    if (lane < T::kCluster) arrive_relaxed_at_cta(&ring.empty[stage], lane);
  }
}

// Two boxes of half a block each: both by this CTA, or one by each CTA of the cluster for both.
template <int kHalfRows>
__device__ __forceinline__ void load_block(uint8_t* shared, const TensorMap* map, Box at,
                                           ArrivalBarrier* full, int half_for_all) {
  constexpr int kHalfBytes = kHalfRows * kBlockK;
  if (half_for_all < 0) {
    load_box(shared, map, at, full);
    load_box(shared + kHalfBytes, map, {at.x, at.y + kHalfRows, at.z}, full);
  } else {
    load_box_multicast(shared + half_for_all * kHalfBytes, map,
                       {at.x, at.y + half_for_all * kHalfRows, at.z}, full, 0b11);
  }
}

// One thread: copies the stages of all tiles of this CTA.
template <class T>
__device__ void produce(Ring<T>& ring, const Operands& operands) {
  const int cta = T::kCluster == 1 ? 0 : static_cast<int>(cta_of_cluster());
  Position<T> at;
  for (int w = blockIdx.x / T::kCluster; w < operands.works; w += gridDim.x / T::kCluster) {
    const Work* work = &operands.plan[w];
    const int row = work->row[cta];
    const int column = work->column[cta];
    const int expert = work->expert;
    const int half_a = work->shared == Shared::a ? cta : -1;
    const int half_b = work->shared == Shared::b ? cta : -1;
    const float* scales = operands.a_scales + row;
    for (int k = 0; k < operands.blocks_k; ++k, at.advance(), scales += operands.rows) {
      await_phase(&ring.empty[at.stage], at.parity ^ 1, Impatience{});
      ArrivalBarrier* full = &ring.full[at.stage];
      if (operands.skips_loads) {
        arrive(full);
        continue;
      }
      arrive_expecting(full, T::kStageBytes);
      Box b{k * kBlockK, column, expert};
      if (operands.packed_columns) {
        const int block = expert * (operands.packed_columns / T::kBlockN) + column / T::kBlockN;
        b = {0, (block * operands.blocks_k + k) * T::kBlockN, 0};
      }
      load_block<T::kBlockN / 2>(ring.b[at.stage], &operands.b, b, full, half_b);
      load_block<T::kBlockM / 2>(ring.a[at.stage], &operands.a, {k * kBlockK, row, 0}, full,
                                 half_a);
      bulk_load(ring.scales[at.stage], scales, T::kScaleBytes, full);
    }
  }
}

}  // namespace fanfold::probe
