// Tiles of which each warpgroup multiplies 64 rows.
#pragma once

#include "fused_moe/activation.cuh"
#include "fused_moe/progress.cuh"
#include "gemm/store.cuh"

namespace fanfold::fused_moe {

// Of a warpgroup's tile: the first of a thread's two rows; the other is 8 further.
__device__ __forceinline__ int row_of_thread() {
  const int thread = settled_thread() % kWarpgroupThreads;
  return thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
}

// SwiGLU of so many elements begins at once: ptxas would begin that of all, for which there are no
// registers.
inline constexpr int kElementsAtOnce = 8;

// SwiGLU of a warpgroup's tile times the weights of its rows, quantised; `row` is its first. `next`
// is called once fewer registers are in use, and before a wait.
template <class Next>
__device__ __forceinline__ void store_activations(float (&d)[kSums], StoreSlot& slot,
                                                  const Call& call, const Task& task, int row,
                                                  const float (&weight)[2], const Next& next) {
  const FusedMoeArgs& args = call.args;
  const int thread = settled_thread() % kWarpgroupThreads;
  const Team team = Team::warpgroup(settled_thread() / kWarpgroupThreads);
  const int slot_row = row_of_thread();
  float largest[2] = {kSmallestActivation, kSmallestActivation};
  float minus_log2e = -kLog2E;
#pragma unroll
  for (int i = 0; i < kSums / 2; ++i) {
    const int h = i / 2 % 2;
    if (i > 0 && i % kElementsAtOnce == 0) {
      float so_far = largest[0];
      register_settle(so_far);
      // Never, since `refused` is zero here; but ptxas does not know.
      minus_log2e = so_far < __uint_as_float(args.refused) ? 0 : -kLog2E;
    }
    d[i] = swiglu(d[i], d[kSums / 2 + i], args.clamp, minus_log2e) * weight[h];
    largest[h] = fmaxf(largest[h], fabsf(d[i]));
  }
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 2));
    factor[h] = __fdividef(kE4m3Max, largest[h]);
    if (thread % 4 == 0)
      args.activation_scales[task.column_block * args.row_count + row + slot_row + 8 * h] =
          largest[h] * (1.0f / kE4m3Max);
  }
  next();
  if (thread == 0) bulk_await_read<0>();  // the slot's last store
  team.wait();
  // Units of 16 bytes are swizzled: exclusive or with the row's place among eight.
  const uint32_t at = shared_address(slot) + slot_row * 128 + slot_row % 8 * 16 + 2 * (thread % 4);
#pragma unroll
  for (int j = 0; j < kSums / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* v = &d[4 * j + 2 * h];
      const uint32_t pair = pack_e4m3(v[0] * factor[h], v[1] * factor[h], 0, 0);
      store_shared_pair((at ^ j / 2 * 16) + j % 2 * 8 + h * 8 * 128, static_cast<uint16_t>(pair));
    }
  fence_shared_before_bulk();
  fence_global_and_bulk();
  team.wait();
  if (thread == 0) {
    store_box(&args.a[1][smallest_box(task.row + task.valid - row)],
              {task.column_block * 128, row, 0}, slot);
    bulk_commit();
  }
}

// A tile whose rows are rows of the products: 64 for each warpgroup.
__device__ __forceinline__ void multiply_rows(Progress& at, PartSum<Waits>& sum,
                                              StoreSlot (&slots)[kSlots]) {
  const Call& call = at.call;
  const Task& task = at.task;
  const bool computes = task.computes && task.valid > sum.row;
  const int row = task.row + sum.row;
  float weight[2] = {};
  float d[kSums];
  registers_begin(d);
  if (computes) {
    sum.run(d, at.scales, depth_blocks(task.gemm), [&] {
      at.publish_last();
      if (task.gemm == 1) return;
      weight[0] = row_weight(call, row + row_of_thread());
      weight[1] = row_weight(call, row + row_of_thread() + 8);
    });
  } else {
    at.publish_last();
    at.stages.skip(depth_blocks(task.gemm));
    at.take();
  }
  if (computes) {
    if (task.gemm == 0) {
      store_activations(d, slots[0], call, task, row, weight, [&] { at.take(); });
    } else {
      at.take();
      store_part(d, slots, &call.args.results[smallest_box(task.valid - sum.row)],
                 {task.column_block * kTileColumns, row, 0}, at.warpgroup);
    }
  }
  at.end_tile(computes);
}

// Until no tickets are left.
__device__ __forceinline__ void multiply_rows(SharedMemory& shared, const Call& call,
                                              int warpgroup) {
  Progress at(shared, call, warpgroup, Team::warpgroup(warpgroup));
  PartSum sum(at.stages, warpgroup);
  while (at.task.valid > 0) multiply_rows(at, sum, shared.store[warpgroup]);
  at.end();
}

}  // namespace fanfold::fused_moe
