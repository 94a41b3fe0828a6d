// Results of a warpgroup's part of a tile, from its registers to global memory.
#pragma once

#include "device/numbers.cuh"
#include "gemm/stages.cuh"

namespace fanfold::gemm {

inline constexpr int kStoreColumns = 64;  // of bf16: 128 bytes, what a swizzle covers
inline constexpr int kChunks = kPartColumns / kStoreColumns;
inline constexpr int kSlots = 2;

using StoreSlot = uint8_t[kWgmmaRows * kStoreColumns * 2];

// A warpgroup's part of a tile, through its slots in turn.
__device__ __forceinline__ void store_part(const float (&d)[kSums], StoreSlot (&slots)[kSlots],
                                           const TensorMap* map, Box at, int warpgroup) {
  const int thread = settled_thread() % kWarpgroupThreads;
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

}  // namespace fanfold::gemm
