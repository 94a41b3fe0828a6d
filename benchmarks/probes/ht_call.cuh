// What the high-throughput probes share: sizes, signals between ranks, and the frame of a call whose
// warps are independent of each other.
#pragma once

#include "device.cuh"
#include "layout.cuh"

namespace fanfold::probe::ht {

constexpr int kTokens = 4096;
constexpr int kChoices = 8;
constexpr int kBatch = 8;  // tokens that one warp takes at a time, and that share a flag
constexpr int kBatches = kTokens / kBatch;
constexpr int kMaxPieces = 7;  // of a row, that move and are announced by themselves

// What peers write in a rank's memory, apart from rows.
struct Signals {
  uint32_t arrived[kRanks][kBatches * kMaxPieces];  // the call in which it last became complete
  uint32_t ready[kRanks];  // the call for which the peer's memory may be written
};

// Private to a rank.
struct Progress {
  uint32_t calls;  // completed
  uint32_t sent, received, finished;
};

// Who sends first: all warps of some CTAs, or every second warp of each. Who has nothing left to
// send receives.
struct Roles {
  int sending_ctas;  // 0: every second warp

  __device__ bool sends() const {
    return sending_ctas ? static_cast<int>(blockIdx.x) < sending_ctas : threadIdx.x / 32 % 2 == 0;
  }
};

// False if it took too long, here or elsewhere.
__device__ inline bool wait_for(ArrivalBarrier* barrier, uint32_t parity, uint32_t* error) {
  Patience patience(error);
  while (!phase_is_over(barrier, parity))
    if (patience.exhausted()) return false;
  return true;
}

class CallWarp {
 protected:
  __device__ CallWarp(Signals* const* signals, Progress* progress, int rank, uint32_t* error)
      : lane(threadIdx.x % 32), call(progress->calls + 1), signals_(signals), progress_(progress),
        rank_(rank), error_(error) {}

  // This rank's memory may be written in the given call.
  __device__ void announce_ready(uint32_t for_call) {
    if (lane < kRanks && lane != rank_)
      store_release_system(&signals_[lane]->ready[rank_], for_call);
    __syncwarp();
  }

  __device__ void await_ready() {
    if (lane < kRanks && lane != rank_) await(&signals_[rank_]->ready[lane]);
    __syncwarp();
  }

  __device__ void await_batch(int source, int batch) {
    await(&signals_[rank_]->arrived[source][batch]);
  }

  __device__ void publish_batch(int to, int batch) {
    store_release_system(&signals_[to]->arrived[rank_][batch], call);
  }

  // The next ticket, in lane 0; it is asked for a batch before it is needed.
  __device__ int draw(uint32_t* tickets) {
    return lane == 0 ? static_cast<int>(atomicAdd(tickets, 1u)) : 0;
  }

  // True in the last of the grid's warps that call this; it has made everything as the next call
  // needs it.
  __device__ bool finish(uint32_t warps) {
    __syncwarp();
    uint32_t before = 0;
    if (lane == 0) before = add_acq_rel_gpu(&progress_->finished, 1);
    if (__shfl_sync(kFullWarp, before, 0) + 1 != warps) return false;
    if (lane == 0) *progress_ = {call, 0, 0, 0};
    return true;
  }

  __device__ bool await_full(ArrivalBarrier* barrier, uint32_t parity) {
    return wait_for(barrier, parity, error_);
  }

  const int lane;
  const uint32_t call;

 private:
  __device__ void await(const uint32_t* signal) {
    Patience patience(error_);
    while (static_cast<int32_t>(load_acquire_system(signal) - call) < 0 && !patience.exhausted())
      continue;
  }

  Signals* const* signals_;
  Progress* progress_;
  const int rank_;
  uint32_t* error_;
};

}  // namespace fanfold::probe::ht
