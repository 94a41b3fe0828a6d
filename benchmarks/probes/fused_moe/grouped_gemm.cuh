// d = a b^T by experts: a [rows, K] e4m3 with scales for 128 columns of K, b [experts, columns, K]
// e4m3 with scales for blocks of 128 x 128, d [rows, columns] bf16. Persistent clusters; one warp
// copies, two warpgroups multiply and store.
#pragma once

#include "accumulate.cuh"
#include "device/numbers.cuh"

namespace fanfold::probe {

// What one CTA did.
struct Span {
  uint64_t begin_ns, end_ns;
  int64_t cycles;
  Stalls stalls;
};

struct GemmArgs {
  Operands operands;
  TensorMap d;            // {columns, rows}, box {64, 64}
  const float* b_scales;  // [experts][columns / 128][K / 128]
  int columns;
  Span* spans;  // [CTAs]
};

inline constexpr size_t kMostShared = 227 * 1024;

using StoreSlot = uint8_t[kWgmmaRows * kStoreColumns * 2];

// All chunks of 64 columns of a warpgroup's tile where they fit, else two in turn.
template <class P>
inline constexpr int kChunks = P::kColumns / kStoreColumns;

template <class P>
inline constexpr int kStoreSlots =
    sizeof(Ring<typename P::T>) + kMathWarpgroups * kChunks<P> * sizeof(StoreSlot) <= kMostShared
        ? kChunks<P>
        : 2;

template <class P>
struct GemmShared {
  Ring<typename P::T> ring;
  alignas(1024) StoreSlot store[kMathWarpgroups][kStoreSlots<P>];
};

inline constexpr int kGemmThreads = (kMathWarpgroups + 1) * kWarpgroupThreads;

struct MyTile {
  int row, column, valid, expert;
  __device__ MyTile(const Work& work, int cta)
      : row(work.row[cta]), column(work.column[cta]), valid(work.valid[cta]), expert(work.expert) {}
};

// Stores a warpgroup's tile through its slots.
template <class P>
__device__ __forceinline__ void store_tile(const float (&d)[P::kSums],
                                           StoreSlot (&slots)[kStoreSlots<P>], const TensorMap* map,
                                           int row, int column, int warpgroup) {
  constexpr bool kAllAtOnce = kStoreSlots<P> == kChunks<P>;
  static_assert(kAllAtOnce || kChunks<P> % 2 == 0);
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int lane = thread % 32;
  const int matrix = lane / 8;
  const int slot_row = thread / 32 * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int c = 0; c < kChunks<P>; ++c) {
    uint8_t* slot = slots[c % kStoreSlots<P>];
    if (c == 0 || !kAllAtOnce) {
      if (thread == 0) bulk_await_read<kAllAtOnce ? 0 : 1>();  // the slot's last store
      named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
    }
#pragma unroll
    for (int j = 0; j < kStoreColumns / 16; ++j) {
      const float* v = &d[(c * kStoreColumns / 8 + 2 * j) * 4];
      const uint32_t words[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                 pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
      const int unit = (2 * j + matrix / 2) ^ (slot_row % 8);
      store_matrices(slot + slot_row * 128 + unit * 16, words);
    }
    if (kAllAtOnce && c < kChunks<P> - 1) continue;
    fence_shared_before_bulk();
    named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
    if (thread != 0) continue;
    for (int stored = kAllAtOnce ? 0 : c; stored <= c; ++stored)
      store_box(map, column + stored * kStoreColumns, row, slots[stored % kStoreSlots<P>]);
    bulk_commit();
  }
}

template <class P>
__device__ void multiply_tiles(GemmShared<P>& shared, const GemmArgs& args, int warpgroup) {
  using T = typename P::T;
  const Operands& operands = args.operands;
  const int cta = T::kCluster == 1 ? 0 : static_cast<int>(cta_of_cluster());
  const int step = gridDim.x / T::kCluster;
  const uint64_t begin_ns = global_nanoseconds();
  const int64_t begin = clock64();
  WarpgroupSum<P> sum(shared.ring, warpgroup);
  const int first = blockIdx.x / T::kCluster;
  if (first < operands.works) {
    WeightScales<P> weights;
    MyTile next(operands.plan[first], cta);
    weights.begin(args.b_scales, next.expert, next.column + sum.part.column, args.columns,
                  operands.blocks_k);
    for (int w = first; w < operands.works; w += step) {
      const MyTile tile = next;
      next = MyTile(operands.plan[min(w + step, operands.works - 1)], cta);
      const bool computes = tile.valid > sum.part.row;
      float d[P::kSums];
      sum.run(d, weights, operands.blocks_k, computes);
      weights.begin(args.b_scales, next.expert, next.column + sum.part.column, args.columns,
                    operands.blocks_k);
      if (computes)
        counted<P::kProfile>(sum.stalls.store, [&] {
          store_tile<P>(d, shared.store[warpgroup], &args.d, tile.row + sum.part.row,
                        tile.column + sum.part.column, warpgroup);
        });
    }
  }
  if (threadIdx.x % kWarpgroupThreads == 0) {
    bulk_await_written<0>();
    if (warpgroup == 0)
      args.spans[blockIdx.x] = {begin_ns, global_nanoseconds(), clock64() - begin, sum.stalls};
  }
}

template <class P>
__global__ void __launch_bounds__(kGemmThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GemmArgs args) {
  using T = typename P::T;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<GemmShared<P>*>(memory);
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (threadIdx.x == 0) {
    if (shared_address(memory) % 1024 != 0) __trap();
    init_ring(shared.ring);
  }
  if constexpr (T::kCluster == 1) {
    __syncthreads();
  } else {
    cluster_barrier();
  }
  if (warpgroup == kMathWarpgroups) {
    lower_registers<40>();
    if (threadIdx.x % kWarpgroupThreads == 0) produce(shared.ring, args.operands);
  } else {
    raise_registers<232>();
    multiply_tiles<P>(shared, args, warpgroup);
  }
  if constexpr (T::kCluster > 1) cluster_barrier();
}

}  // namespace fanfold::probe
