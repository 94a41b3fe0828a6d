// d = a b^T, rows of a by groups: e4m3 with float32 scales, bf16 results. Persistent clusters of
// two CTAs; one thread copies operands, two warpgroups multiply and store.
//
// Constants: kColumns, kDepth and kMostDepth (the same), kGroups, kMasked, kTileRows (128, or 64
// where groups have few rows), kSharedBytes.
#include "constants.h"
#include "gemm/store.cuh"
#include "gemm/sum.cuh"
#include "grouped_gemm/tiles.cuh"

namespace fanfold::grouped_gemm {

using namespace gemm;

struct SharedMemory {
  Ring ring;
  alignas(1024) StoreSlot store[kMathWarpgroups][kSlots];
};
static_assert(sizeof(SharedMemory) == kSharedBytes);

// By one warp, of which one lane copies.
__device__ inline void load_tiles(Ring& ring, const GroupedGemmArgs& args) {
  Tiles tiles(args);
  Position at;
  Tile tile;
  const bool copies = threadIdx.x % kWarpLanes == 0;
  while (tiles.next(tile)) {
    for (int k = 0; k < kDepthBlocks && copies; ++k, at.advance()) {
      EndlessWaits{}(&ring.empty[at.stage], at.parity ^ 1);
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

// Of the part of a tile that begins `column` columns from its first.
__device__ __forceinline__ void load_scales(ColumnScales& scales, const GroupedGemmArgs& args,
                                            const Tile& tile, int column) {
  const float* from[kScaleGroups];
#pragma unroll
  for (int g = 0; g < kScaleGroups; ++g) {
    const int block = min((tile.column + column) / kScaleColumns + g, kScaleBlocks - 1);
    from[g] = args.b_scales + (int64_t{tile.group} * kScaleBlocks + block) * kDepthBlocks;
  }
  scales.load(from, kDepthBlocks);
}

__device__ __forceinline__ void multiply_tiles(SharedMemory& shared, const GroupedGemmArgs& args,
                                               int warpgroup) {
  Tiles tiles(args);
  Stages<EndlessWaits> stages(shared.ring, {});
  PartSum sum(stages, warpgroup);
  ColumnScales scales;
  Tile next;
  bool there = tiles.next(next);
  if (there) load_scales(scales, args, next, sum.column);
  while (there) {
    const Tile tile = next;
    there = tiles.next(next);
    const bool computes = tile.valid > sum.row;
    float d[kSums];
    if (computes) {
      sum.run(d, scales, kDepthBlocks);
    } else {
      stages.skip(kDepthBlocks);
    }
    if (there) load_scales(scales, args, next, sum.column);
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
  if (threadIdx.x == 0) init_ring(shared.ring, 1);
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
