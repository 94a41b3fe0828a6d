// Every CTA of a cluster of two copies half a box for both, and stores the whole where it belongs.
#include "constants.h"
#include "device/cluster.cuh"
#include "device/tensor_copy.cuh"

using namespace fanfold;

struct Args {
  TensorMap from;  // {128, rows, 1} bytes, box {128, 32, 1}
  TensorMap to;    // {128, rows of each CTA} bytes, box {128, 64}
  ArrivalReport* report;
  int64_t limit_ns;
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace {

constexpr int kHalfRows = 32;
constexpr int kRowBytes = 128;

struct Shared {
  alignas(1024) unsigned char box[2][kHalfRows * kRowBytes];
  ArrivalBarrier full;
  ArrivalBarrier left;  // both CTAs have stored
};

}  // namespace

extern "C" __global__ void __cluster_dims__(2) __launch_bounds__(128, 1)
    boxes(const __grid_constant__ Args args) {
  __shared__ Shared shared;
  const int cta = static_cast<int>(cta_of_cluster());
  if (threadIdx.x == 0) {
    prefetch_map(&args.from);
    init_barrier(&shared.full, 1);
    init_barrier(&shared.left, 2);
    fence_barrier_init();
  }
  cluster_barrier();
  if (threadIdx.x == 0) {
    arrive_expecting(&shared.full, sizeof shared.box);
    load_box_multicast(shared.box[cta], &args.from, {0, cta * kHalfRows, 0}, &shared.full, 0b11);
    if (await_phase(&shared.full, 0, ArrivalDeadline(args.limit_ns, args.report, 1, 0))) {
      store_box(&args.to, 0, cta * 2 * kHalfRows, shared.box);
      bulk_commit();
      bulk_await_written<0>();
    }
    for (int other = 0; other < 2; ++other) arrive_relaxed_at_cta(&shared.left, other);
    await_phase(&shared.left, 0, ArrivalDeadline(args.limit_ns, args.report, 2, 0));
  }
  cluster_barrier();
}
#else
extern "C" __global__ void boxes(const __grid_constant__ Args args) {}
#endif
