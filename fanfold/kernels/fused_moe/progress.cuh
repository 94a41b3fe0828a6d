// How the warpgroups that multiply go from tile to tile.
#pragma once

#include "fused_moe/publish.cuh"
#include "gemm/sum.cuh"

namespace fanfold::fused_moe {

// Counts the tiles of a half block of rows.
__device__ __forceinline__ uint32_t* stored_counter(const Call& call, const Task& task, int half) {
  if (task.gemm == 0) return call.activated(half);
  return call.returned(half, task.column_block / call.group_blocks(call.args.rank));
}

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

// Warps with a barrier of their own.
struct Team {
  int barrier, threads;

  __device__ static Team warpgroup(int number) { return {1 + number, kWarpgroupThreads}; }
  __device__ static Team both_warpgroups() {
    return {1 + kMathWarpgroups, kMathWarpgroups * kWarpgroupThreads};
  }
  __device__ void wait() const { named_barrier_wait(barrier, threads); }
};

// By a team, for which the answer is one even where a wait has lasted too long.
__device__ __forceinline__ Task await_task_together(const Call& call, uint32_t n,
                                                    const Team& team) {
  PackedTask packed{};
  if (threadIdx.x % kWarpLanes == 0) packed = await_packed_task(call, n);
  packed.word = __shfl_sync(kFullWarp, packed.word, 0);
  const Task task = packed.task();
  return named_barrier_all(team.barrier, team.threads, task.valid > 0) ? task : Task{};
}

__device__ __forceinline__ float row_weight(const Call& call, int row) {
  return __uint_as_float(
      load_relaxed_gpu(own_memory<uint32_t>(call.args, call.args.at.row_weights) + row));
}

// What a warpgroup keeps from tile to tile.
struct Progress {
  const Call& call;
  const int warpgroup;
  const Team team;  // that computes a tile together
  Stages<Waits> stages;
  ColumnScales scales;
  Unpublished stored;
  Task task, next;
  uint32_t taken = 0;

  __device__ Progress(SharedMemory& shared, const Call& c, int w, const Team& t)
      : call(c), warpgroup(w), team(t), stages(shared.ring, Waits{c}),
        stored(c, c.tail.mailboxes[w]) {
    take();
    task = next;
  }

  __device__ __forceinline__ bool first_thread() const {
    return threadIdx.x % kWarpgroupThreads == 0;
  }
  // The task behind this one; its scales are loaded while this one's tile is stored.
  __device__ __forceinline__ void take() {
    next = await_task_together(call, taken++, team);
    if (next.valid > 0) load_scales(scales, call, next);
  }
  // While the first products of a tile run.
  __device__ __forceinline__ void publish_last() {
    stored.publish();  // by one thread: products need whole warps
    __syncwarp();
  }
  // `stores`: this warpgroup has stored a half of the block, that of its own number.
  __device__ __forceinline__ void end_tile(bool stores) {
    if (stores && first_thread())
      stored.store(stored_counter(call, task, task.row / kFusedMoeHalfRows + warpgroup));
    if (task.gemm == 0) call.mark(&FusedMoeSpan::first_end);
    // The next tile may wait for this one, unless both are of the same GEMM.
    if (next.valid == 0 || next.gemm != task.gemm) stored.publish();
    __syncwarp();
    task = next;
  }
  // A tile of which this team computes nothing.
  __device__ __forceinline__ void skip() {
    publish_last();
    stages.skip(depth_blocks(task.gemm));
    take();
    end_tile(false);
  }
  __device__ __forceinline__ void end() {
    if (first_thread()) stored.end();
    __syncwarp();
  }
};

}  // namespace fanfold::fused_moe
