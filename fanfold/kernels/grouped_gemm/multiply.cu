// d = a b^T, rows of a by groups: e4m3 with float32 scales, bf16 results. Persistent clusters of
// two CTAs; one thread copies operands, two warpgroups multiply and store.
//
// Constants: kColumns, kDepth, kGroups, kMasked, kTileRows (128, or 64 where groups have few rows),
// kSharedBytes.
#include "constants.h"
#include "device/numbers.cuh"
#include "grouped_gemm/sum.cuh"
#include "grouped_gemm/tiles.cuh"

namespace fanfold::grouped_gemm {

inline constexpr int kStoreColumns = 64;  // of bf16: 128 bytes, what a swizzle covers
inline constexpr int kChunks = kPartColumns / kStoreColumns;
inline constexpr int kSlots = 2;

using StoreSlot = uint8_t[kWgmmaRows * kStoreColumns * 2];

struct SharedMemory {
  Ring ring;
  alignas(1024) StoreSlot store[kMathWarpgroups][kSlots];
};
static_assert(sizeof(SharedMemory) == kSharedBytes);

// ---- operands -----------------------------------------------------------------------------------

// Two boxes of half a block each: both by this CTA, or one by each CTA of the cluster for both.
template <int kHalfRows>
__device__ __forceinline__ void load_block(uint8_t* shared, const TensorMap* map, Box at,
                                           ArrivalBarrier* full, bool for_both) {
  constexpr int kHalfBytes = kHalfRows * kBlockDepth;
  if (for_both) {
    const auto half = static_cast<int>(cta_of_cluster());
    load_box_multicast(shared + half * kHalfBytes, map, {at.x, at.y + half * kHalfRows, at.z}, full,
                       0b11);
  } else {
    load_box(shared, map, at, full);
    load_box(shared + kHalfBytes, map, {at.x, at.y + kHalfRows, at.z}, full);
  }
}

// By one warp, of which one lane copies.
__device__ inline void load_tiles(Ring& ring, const GroupedGemmArgs& args) {
  Tiles tiles(args);
  Position at;
  Tile tile;
  const bool copies = threadIdx.x % kWarpLanes == 0;
  while (tiles.next(tile)) {
    for (int k = 0; k < kDepthBlocks && copies; ++k, at.advance()) {
      await_phase(&ring.empty[at.stage], at.parity ^ 1, Patience{});
      ArrivalBarrier* full = &ring.full[at.stage];
      arrive_expecting(full, kBytesA + kBytesB + kBytesScales);
      const int x = k * kBlockDepth;
      load_block<kTileColumns / 2>(ring.b[at.stage], &args.b, {x, tile.column, tile.group}, full,
                                   tile.shared == Shared::b);
      load_block<kTileRows / 2>(ring.a[at.stage], &args.a, {x, tile.row, tile.slice}, full,
                                tile.shared == Shared::a);
      load_box(ring.scales[at.stage], &args.a_scales, {tile.row, k, tile.slice}, full);
    }
    __syncwarp();
  }
}

// ---- results ------------------------------------------------------------------------------------

// A warpgroup's part of a tile, through its slots in turn.
__device__ __forceinline__ void store_part(const float (&d)[kSums], StoreSlot (&slots)[kSlots],
                                           const TensorMap* map, Box at, int warpgroup) {
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int lane = thread % kWarpLanes;
  const int matrix = lane / 8;
  const int slot_row = thread / kWarpLanes * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    uint8_t* slot = slots[c % kSlots];
    if (thread == 0) bulk_await_read<kSlots - 1>();  // the slot's last store
    named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
#pragma unroll
    for (int j = 0; j < kStoreColumns / 16; ++j) {
      const float* v = &d[(c * kStoreColumns / 8 + 2 * j) * 4];
      const uint32_t words[4] = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                 pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7])};
      const int unit = (2 * j + matrix / 2) ^ (slot_row % 8);
      store_matrices(slot + slot_row * 128 + unit * 16, words);
    }
    fence_shared_before_bulk();
    named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
    if (thread == 0) {
      store_box(map, {at.x + c * kStoreColumns, at.y, at.z}, slot);
      bulk_commit();
    }
  }
}

__device__ __forceinline__ void multiply_tiles(SharedMemory& shared, const GroupedGemmArgs& args,
                                               int warpgroup) {
  Tiles tiles(args);
  PartSum sum(shared.ring, warpgroup);
  ColumnScales scales;
  Tile next;
  bool there = tiles.next(next);
  if (there) scales.load(args.b_scales, next.group, next.column + sum.column);
  while (there) {
    const Tile tile = next;
    there = tiles.next(next);
    const bool computes = tile.valid > sum.row;
    float d[kSums];
    sum.run(d, scales, computes);
    if (there) scales.load(args.b_scales, next.group, next.column + sum.column);
    if (computes)
      store_part(d, shared.store[warpgroup], &args.d,
                 {tile.column + sum.column, tile.row + sum.row, tile.slice}, warpgroup);
  }
  if (threadIdx.x % kWarpgroupThreads == 0) bulk_await_written<0>();
}

__global__ void __launch_bounds__(kThreads, 1)
    multiply(const __grid_constant__ GroupedGemmArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  if (threadIdx.x == 0) init_ring(shared.ring);
  cluster_barrier();
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  if (warpgroup == kMathWarpgroups) {
    lower_registers<40>();
    if (threadIdx.x / kWarpLanes == kMathWarps) load_tiles(shared.ring, args);
  } else {
    raise_registers<232>();
    multiply_tiles(shared, args, warpgroup);
  }
  cluster_barrier();
}

}  // namespace fanfold::grouped_gemm
