// Two warpgroups multiply: tiles of the first GEMM become quantised activations, those of the
// second results of rows. A spare warp of the CTA tells the others what is stored.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

inline constexpr float kSmallestActivation = 1e-6f;  // of the largest of 128

// ---- stored tiles -------------------------------------------------------------------------------

// By one thread of a warpgroup.
__device__ inline void post(const Call& call, Mailbox& box, uint32_t word) {
  const uint32_t posted = box.posted;
  Patience patience(call);
  while (posted - load_acquire_cta(&box.taken) >= Mailbox::kSlots)
    if (patience.expired()) return;
  box.words[posted % Mailbox::kSlots] = word;
  store_release_cta(&box.posted, posted + 1);
}

// By one thread of a spare warp: what was posted, for all of the GPU.
__device__ inline void serve(const Call& call, Mailbox& box) {
  const uint32_t posted = load_acquire_cta(&box.posted);
#pragma unroll 1
  for (uint32_t taken = box.taken; taken != posted; ++taken) {
    const uint32_t word = box.words[taken % Mailbox::kSlots];
    store_release_cta(&box.taken, taken + 1);
    if (word == Mailbox::kLast) {
      box.ended = 1;
    } else {
      // What is returned is read by all ranks.
      const bool is_returned = word >= call.at().returned();
      if (kRanks > 1 && is_returned) {
        add_release_system(call.counters + word, 1);
      } else {
        add_release_gpu(call.counters + word, 1);
      }
    }
  }
}

__device__ inline void serve_to_the_end(const Call& call, Mailbox& box) {
  Patience patience(call);
  for (serve(call, box); !box.ended; serve(call, box)) {
    if (patience.expired()) return;
    __nanosleep(100);
  }
}

// The last tile that one thread has stored, until others may read it.
struct Unpublished {
  uint32_t* counter = nullptr;
  __device__ void publish(const Call& call, Mailbox& box) {
    if (!counter) return;
    bulk_await_written<0>();
    fence_global_and_bulk();
    post(call, box, static_cast<uint32_t>(counter - call.counters));
    counter = nullptr;
  }
};

// Counts the tiles of a half block of rows.
__device__ __forceinline__ uint32_t* stored_counter(const Call& call, const Task& task, int half) {
  if (task.gemm == 0) return call.activated(half);
  return call.returned(half, task.column_block / call.tail.group_blocks);
}

// ---- activations --------------------------------------------------------------------------------

// Of a warpgroup's tile: the first of a thread's two rows; the other is 8 further.
__device__ __forceinline__ int row_of_thread() {
  const int thread = threadIdx.x % kWarpgroupThreads;
  return thread / kWarpLanes * 16 + thread % kWarpLanes / 4;
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// fanfold.FusedMoE says what a clamp does; a NaN stays one.
__device__ __forceinline__ float swiglu(float gate, float up, float clamp) {
  if constexpr (kClamps != 0) {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
  }
  return silu(gate) * up;
}

// SwiGLU of a warpgroup's tile times the weights of its rows, quantised; `row` is its first.
__device__ __forceinline__ void store_activations(float (&d)[kSums], StoreSlot& slot,
                                                  const Call& call, const Task& task, int row,
                                                  const float (&weight)[2]) {
  const FusedMoeArgs& args = call.args;
  const int thread = threadIdx.x % kWarpgroupThreads;
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  const int slot_row = row_of_thread();
  float largest[2] = {kSmallestActivation, kSmallestActivation};
#pragma unroll
  for (int i = 0; i < kSums / 2; ++i) {
    const int h = i / 2 % 2;
    d[i] = swiglu(d[i], d[kSums / 2 + i], args.clamp) * weight[h];
    largest[h] = fmaxf(largest[h], fabsf(d[i]));
  }
  float factor[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 1));
    largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], 2));
    factor[h] = __fdividef(kE4m3Max, largest[h]);
    if (thread % 4 == 0)
      args.a_scales[1][task.column_block * args.row_count + row + slot_row + 8 * h] =
          largest[h] * (1.0f / kE4m3Max);
  }
  if (thread == 0) bulk_await_read<0>();  // the slot's last store
  named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
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
  named_barrier_wait(1 + warpgroup, kWarpgroupThreads);
  if (thread == 0) {
    store_box(&args.activations, {task.column_block * 128, row, 0}, slot);
    bulk_commit();
  }
}

// ---- tiles --------------------------------------------------------------------------------------

__device__ __forceinline__ void load_scales(ColumnScales& scales, const Call& call,
                                            const Task& task) {
  const int depth = depth_blocks(task.gemm);
  const int blocks = task.gemm == 0 ? 2 * kIntermediate / kScaleColumns : kHidden / kScaleColumns;
  const int low = task.gemm == 0 ? task.column_block : 2 * task.column_block;
  const int high = task.gemm == 0 ? low + kIntermediate / kScaleColumns : low + 1;
  const float* from = (task.gemm == 0 ? call.args.l1_scales : call.args.l2_scales) +
                      int64_t{task.expert} * blocks * depth;
  scales.load({from + min(low, blocks - 1) * depth, from + min(high, blocks - 1) * depth}, depth);
}

// By a warpgroup, for which the answer is one even where a wait has lasted too long.
__device__ __forceinline__ Task await_task_together(const Call& call, uint32_t n, int warpgroup) {
  const Task task = await_task(call, n);
  return named_barrier_all(1 + warpgroup, kWarpgroupThreads, task.valid > 0) ? task : Task{};
}

__device__ __forceinline__ float row_weight(const Call& call, int row) {
  return __uint_as_float(
      load_relaxed_gpu(own_memory<uint32_t>(call.args, call.args.at.row_weights) + row));
}

// Two warpgroups. Ends when no tickets are left.
__device__ __forceinline__ void multiply_tasks(SharedMemory& shared, const Call& call,
                                               int warpgroup) {
  Mailbox& box = call.tail.mailboxes[warpgroup];
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  PartSum<Waits> sum(shared.ring, warpgroup, Waits{call});
  ColumnScales scales;
  Unpublished stored;
  Task task = await_task_together(call, 0, warpgroup);
  if (task.valid > 0) load_scales(scales, call, task);
  for (uint32_t n = 1; task.valid > 0; ++n) {
    const bool computes = task.computes && task.valid > sum.row;
    const int row = task.row + sum.row;
    float weight[2] = {};
    float d[kSums];
    registers_begin(d);
    sum.run(d, scales, depth_blocks(task.gemm), computes, [&] {
      stored.publish(call, box);  // by one thread: products need whole warps
      __syncwarp();
      if (task.gemm == 1) return;
      weight[0] = row_weight(call, row + row_of_thread());
      weight[1] = row_weight(call, row + row_of_thread() + 8);
    });
    const Task next = await_task_together(call, n, warpgroup);
    if (next.valid > 0) load_scales(scales, call, next);
    if (computes) {
      if (task.gemm == 0) {
        store_activations(d, shared.store[warpgroup][0], call, task, row, weight);
      } else {
        store_part(d, shared.store[warpgroup], &call.args.results,
                   {task.column_block * kTileColumns, row, 0}, warpgroup);
      }
      if (first_thread) stored.counter = stored_counter(call, task, row / kFusedMoeHalfRows);
    }
    if (task.gemm == 0) call.mark(&FusedMoeSpan::first_end);
    // The next tile may wait for this one, unless both are of the same GEMM.
    if (next.valid == 0 || next.gemm != task.gemm) stored.publish(call, box);
    __syncwarp();
    task = next;
  }
  if (first_thread) post(call, box, Mailbox::kLast);
  __syncwarp();
}

}  // namespace fanfold::fused_moe
