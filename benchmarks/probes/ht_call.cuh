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

// ---- signals that another warp raises -----------------------------------------------------------
// A release on the link takes a round trip, for which its thread waits. A thread that moves rows
// hands its signals to another warp of the CTA instead. What it has seen written before it handed a
// signal over is seen by who acquires that signal: handing over is a release and an acquire too.

__device__ __forceinline__ void store_release_cta(uint32_t* shared, uint32_t v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(shared)), "r"(v)
               : "memory");
}

__device__ __forceinline__ uint32_t load_acquire_cta(const uint32_t* shared) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];"
               : "=r"(v)
               : "r"(shared_address(shared))
               : "memory");
  return v;
}

// In shared memory, from one thread to one other; zero at first.
struct SignalQueue {
  static constexpr uint32_t kPlaces = 8;
  uint32_t* signals[kPlaces];  // null: no more will come
  uint32_t handed, taken;      // so far
};

class SignalHander {
 public:
  __device__ SignalHander(SignalQueue& queue, uint32_t* error) : queue_(queue), error_(error) {}

  __device__ void hand(uint32_t* signal) {
    Patience patience(error_);
    while (handed_ - load_acquire_cta(&queue_.taken) == SignalQueue::kPlaces)
      if (patience.exhausted()) return;
    queue_.signals[handed_ % SignalQueue::kPlaces] = signal;
    store_release_cta(&queue_.handed, ++handed_);
  }

 private:
  SignalQueue& queue_;
  uint32_t* error_;
  uint32_t handed_ = 0;
};

// Raises what is handed over until every queue has ended; a lane for each.
template <int Queues>
__device__ inline void raise_signals(SignalQueue (&queues)[Queues], uint32_t call,
                                     uint32_t* error) {
  constexpr uint32_t kPollNanoseconds = 100;  // the other warps need the issue slots
  const int lane = threadIdx.x % 32;
  SignalQueue& queue = queues[lane % Queues];
  bool open = lane < Queues;
  uint32_t taken = 0;
  Patience patience(error);
  while (__any_sync(kFullWarp, open)) {
    uint32_t* signal = nullptr;
    if (open && load_acquire_cta(&queue.handed) != taken) {
      signal = queue.signals[taken % SignalQueue::kPlaces];
      store_release_cta(&queue.taken, ++taken);
      open = signal != nullptr;
    }
    // All lanes that have a signal wait for one round trip together.
    if (__any_sync(kFullWarp, signal != nullptr)) {
      if (signal) store_release_system(signal, call);
      patience = Patience(error);
    } else {
      pause(kPollNanoseconds);
      if (patience.exhausted()) open = false;
    }
  }
}

}  // namespace fanfold::probe::ht
