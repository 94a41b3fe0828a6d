// Two warpgroups multiply: tiles of the first GEMM become quantised activations, those of the
// second results of rows. A spare warp of the CTA tells the others what is stored.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

inline constexpr float kSmallestActivation = 1e-6f;  // of the largest of 128

// ---- stored tiles -------------------------------------------------------------------------------

// The spare warp's side of a mailbox; by one thread.
class Publisher {
 public:
  __device__ Publisher(const Call& call, Mailbox& box) : call_(call), box_(box) {}

  // What was posted, for all of the GPU.
  __device__ void serve() {
#pragma unroll 1
    while (!ended_) {
      const uint32_t word = exchange_acquire_cta(&box_.words[taken_ % Mailbox::kSlots], 0);
      if (word == 0) return;
      ++taken_;
      if (word == Mailbox::kLast) {
        ended_ = true;
      } else {
        publish(word - 1);
      }
    }
  }

  __device__ void serve_to_the_end() {
    Patience patience(call_);
    for (serve(); !ended_; serve()) {
      if (patience.expired()) return;
      __nanosleep(100);
    }
  }

 private:
  __device__ void publish(uint32_t counter) const {
    // What is returned is read by all ranks.
    if (kRanks > 1 && counter >= call_.at().returned()) {
      add_release_system(call_.counters + counter, 1);
    } else {
      add_release_gpu(call_.counters + counter, 1);
    }
  }

  const Call& call_;
  Mailbox& box_;
  uint32_t taken_ = 0;
  bool ended_ = false;
};

// The warpgroup's side, by its first thread: the last tile that it has stored, until others may
// read it.
class Unpublished {
 public:
  __device__ Unpublished(const Call& call, Mailbox& box) : call_(call), box_(box) {}

  __device__ void store(const uint32_t* counter) {
    word_ = 1 + static_cast<uint32_t>(counter - call_.counters);
  }
  __device__ void publish() {
    if (word_ == 0) return;
    bulk_await_written<0>();
    fence_global_and_bulk();
    post(word_);
    word_ = 0;
  }
  __device__ void end() { post(Mailbox::kLast); }

 private:
  __device__ void post(uint32_t word) {
    Patience patience(call_);
    while (!fill_release_cta(&box_.words[posted_ % Mailbox::kSlots], word))
      if (patience.expired()) return;
    ++posted_;
  }

  const Call& call_;
  Mailbox& box_;
  uint32_t word_ = 0;
  uint32_t posted_ = 0;
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
      args.activation_scales[task.column_block * args.row_count + row + slot_row + 8 * h] =
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
  PackedTask packed{};
  if (threadIdx.x % kWarpLanes == 0) packed = await_packed_task(call, n);
  packed.word = __shfl_sync(kFullWarp, packed.word, 0);
  const Task task = packed.task();
  return named_barrier_all(1 + warpgroup, kWarpgroupThreads, task.valid > 0) ? task : Task{};
}

__device__ __forceinline__ float row_weight(const Call& call, int row) {
  return __uint_as_float(
      load_relaxed_gpu(own_memory<uint32_t>(call.args, call.args.at.row_weights) + row));
}

// Two warpgroups. Ends when no tickets are left.
__device__ __forceinline__ void multiply_tasks(SharedMemory& shared, const Call& call,
                                               int warpgroup) {
  const bool first_thread = threadIdx.x % kWarpgroupThreads == 0;
  PartSum<Waits> sum(shared.ring, warpgroup, Waits{call});
  ColumnScales scales;
  Unpublished stored(call, call.tail.mailboxes[warpgroup]);
  Task task = await_task_together(call, 0, warpgroup);
  if (task.valid > 0) load_scales(scales, call, task);
  for (uint32_t n = 1; task.valid > 0; ++n) {
    const bool computes = task.computes && task.valid > sum.row;
    const int row = task.row + sum.row;
    float weight[2] = {};
    float d[kSums];
    registers_begin(d);
    sum.run(d, scales, depth_blocks(task.gemm), computes, [&] {
      stored.publish();  // by one thread: products need whole warps
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
      if (first_thread) stored.store(stored_counter(call, task, row / kFusedMoeHalfRows));
    }
    if (task.gemm == 0) call.mark(&FusedMoeSpan::first_end);
    // The next tile may wait for this one, unless both are of the same GEMM.
    if (next.valid == 0 || next.gemm != task.gemm) stored.publish();
    __syncwarp();
    task = next;
  }
  if (first_thread) stored.end();
  __syncwarp();
}

}  // namespace fanfold::fused_moe
