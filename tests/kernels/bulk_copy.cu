// Copies chunks through a ring of two slots in shared memory and turns every bit on the way, so
// that a slot is written by bulk copies and by threads in turn. kChunkBytes and kThreads are
// constants of the kernel.
#include "constants.h"
#include "device/bulk.cuh"

using namespace fanfold;

struct Args {
  const unsigned char* from;  // [chunks][kChunkBytes]
  unsigned char* to;
  ArrivalReport* report;
  int64_t limit_ns;
  int32_t chunks;
  uint32_t missing;  // bytes that every chunk is expected to have and that never come
};

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
namespace {

constexpr int kSlots = 2;

struct Shared {
  alignas(16) unsigned char slots[kSlots][kChunkBytes];
  ArrivalBarrier arrived[kSlots];
  int32_t lost;
};

class Copier {
 public:
  __device__ Copier(const Args& args, Shared& shared) : args_(args), shared_(shared) {}

  __device__ void run() {
    if (threadIdx.x == 0) {
      for (ArrivalBarrier& barrier : shared_.arrived) init_barrier(&barrier, 1);
      fence_barrier_init();
      shared_.lost = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) load(0);
    for (int turn = 0; chunk(turn) < args_.chunks; ++turn) {
      // The other slot: its last store must have been read.
      if (threadIdx.x == 0) {
        bulk_await_read<0>();
        load(turn + 1);
      }
      if (!take(turn)) return;
    }
    if (threadIdx.x == 0) bulk_await_written<0>();
  }

 private:
  __device__ int chunk(int turn) const {
    return static_cast<int>(blockIdx.x + static_cast<unsigned>(turn) * gridDim.x);
  }

  __device__ void load(int turn) {
    if (chunk(turn) >= args_.chunks) return;
    ArrivalBarrier* barrier = &shared_.arrived[turn % kSlots];
    if (args_.missing != 0) expect(barrier, args_.missing);
    arrive_expecting(barrier, kChunkBytes);
    bulk_load(shared_.slots[turn % kSlots], args_.from + int64_t{chunk(turn)} * kChunkBytes,
              kChunkBytes, barrier);
  }

  __device__ bool take(int turn) {
    const auto parity = static_cast<uint32_t>(turn / kSlots % 2);
    ArrivalDeadline deadline(args_.limit_ns, args_.report, 1u + static_cast<uint32_t>(turn),
                             parity);
    if (!await_phase(&shared_.arrived[turn % kSlots], parity, deadline)) shared_.lost = 1;
    __syncthreads();
    if (shared_.lost != 0) return false;
    unsigned char* slot = shared_.slots[turn % kSlots];
    for (int i = static_cast<int>(threadIdx.x); i < kChunkBytes; i += kThreads)
      slot[i] = static_cast<unsigned char>(~slot[i]);
    fence_shared_before_bulk();
    __syncthreads();
    if (threadIdx.x == 0) {
      bulk_store(args_.to + int64_t{chunk(turn)} * kChunkBytes, slot, kChunkBytes);
      bulk_commit();
    }
    return true;
  }

  const Args& args_;
  Shared& shared_;
};

}  // namespace
#endif

extern "C" __global__ void __launch_bounds__(kThreads)
    bulk_copy(const __grid_constant__ Args args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ Shared shared;
  Copier(args, shared).run();
#endif
}
