// A whole FP8 MoE layer: rows of tokens to their experts on all ranks, both GEMMs with SwiGLU and
// quantisation between them, the sum of each token's results. One launch of persistent clusters of
// two CTAs, which must all run at the same time.
//
//   warps 0 to 7   copy the first rows, multiply and store tiles, at the end sum tokens
//   warp 8         copies weights to the stages; in the first CTA it takes the tickets
//   warp 9         copies rows to the stages, once they are there
//   warps 10, 11   copy tokens to the rows of their experts, then sum tokens whose columns are
//                  there; meanwhile they publish what the warpgroups 0 and 1 have stored
//
// Constants: fused_moe/call.cuh.
#include "fused_moe/copy_rows.cuh"
#include "fused_moe/late_rank.cuh"
#include "fused_moe/load.cuh"
#include "fused_moe/multiply.cuh"
#include "fused_moe/publish.cuh"
#include "fused_moe/route.cuh"
#include "fused_moe/sum_slots.cuh"

namespace fanfold::fused_moe {

// Warps 10 and 11.
__device__ inline void spare_warp(const Call& call, int which) {
  Publisher publisher(call, call.tail.mailboxes[which]);
  const bool serves = threadIdx.x % kWarpLanes == 0;
  const auto between = [&] {
    if (serves) publisher.serve();
    __syncwarp();
  };
  copy_rows<4>(call, kFirstCopies, 1 << 30, which, kMathWarpgroups, between);
  if (call.schedule().groups() > 1) sum_tokens<1, 4>(call, 2000, 1000, between);
  if (serves) publisher.serve_to_the_end();
}

// By one thread of the CTA.
__device__ inline void finish(const Call& call) {
  const FusedMoeArgs& args = call.args;
  if (call.tail.expired != 0) {
    int late = static_cast<int>(call.tail.expired) - 1;
    // A rank that waits for results may wait for one that waits for rows.
    if constexpr (kRanks > 1)
      if (call.tail.aborted == 0) late = late_rank(call, late);
    report(call, ReportKind::kTimeout, late, blockIdx.x, 0);
  }
  args.state->calls[blockIdx.x] = call.number + 1;
}

__global__ void __launch_bounds__(kThreads, 1) layer(const __grid_constant__ FusedMoeArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  const Call call(args, shared.tail);
  const int warp = threadIdx.x / kWarpLanes;
  const int warpgroup = threadIdx.x / kWarpgroupThreads;
  call.mark_begin();
  route(*reinterpret_cast<RouteCounts*>(memory), call);
  if (threadIdx.x == 0) init_ring(shared.ring, 2);
  fence_shared_before_bulk();
  cluster_barrier();
  call.mark(&FusedMoeSpan::routed);
  if (warpgroup == kMathWarpgroups) {
    lower_registers<40>();
    if (warp == kMathWarps) {
      if (threadIdx.x % kWarpLanes == 0) WeightLoader(shared.ring, call).run();
    } else if (warp == kMathWarps + 1) {
      if (threadIdx.x % kWarpLanes == 0) RowLoader(shared.ring, call).run();
    } else {
      spare_warp(call, warp - kMathWarps - 2);
    }
  } else {
    raise_registers<232>();
    copy_rows<14>(call, 0, kFirstCopies, warp, kMathWarps);
    multiply_tasks(shared, call, warpgroup);
    call.mark(&FusedMoeSpan::second_end);
    sum_tokens<2, 8>(call, 0, 0);
  }
  if (blockIdx.x == 0 && args.statistics)
    for (int e = threadIdx.x; e < kLocalExperts; e += kThreads)
      args.statistics[e] += call.rows()[e];
  cluster_barrier();
  call.mark_end();
  if (threadIdx.x == 0) finish(call);
}

}  // namespace fanfold::fused_moe
