// Bulk copies between shared and global memory (TMA without tensor maps), the barriers that count
// their bytes, and the fences between them and ordinary loads and stores. Compute capability 9.0
// and later; below it there is only `kHasBulkCopies` to say so.
//
// Addresses and sizes are multiples of 16 bytes; global memory may be a peer's. A copy is enqueued
// by one thread, and its waits by group are that thread's own.
//
//   global -> shared   one thread: arrive_expecting(barrier, bytes), bulk_load(...)
//                      every reader: await_phase(barrier, parity, deadline)
//   shared -> global   the writers: fence_shared_before_bulk(), then a barrier of theirs
//                      one thread: bulk_store(...), bulk_commit(), and before the shared memory is
//                      written again bulk_await_read<0>()
#pragma once

#include "device/memory.cuh"
#include "device/warp.cuh"
#include "layout/types.h"

namespace fanfold {

// What a wait for a barrier reports when its time is over; memory that the host can read.
struct alignas(16) ArrivalReport {
  uint32_t what;  // as the wait was told, not 0; 0: nothing to report
  uint32_t cta;
  uint32_t parity;
  uint32_t waited_us;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasBulkCopies = false;
#else
inline constexpr bool kHasBulkCopies = true;

// ---- fences -------------------------------------------------------------------------------------

// What this thread has stored to shared memory comes before bulk copies that read it, once the
// thread that enqueues them has met this one at a barrier.
__device__ __forceinline__ void fence_shared_before_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// What this thread has seen of global memory by ordinary loads comes before its bulk copies, and
// its bulk copies that are written come before what it stores next.
__device__ __forceinline__ void fence_global_and_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- barriers that count arrivals and bytes -----------------------------------------------------

// In shared memory. A phase is over when all arrivals and all expected bytes have come; the next
// begins by itself. Phases are told apart by their parity: the first has 0.
struct alignas(8) ArrivalBarrier {
  uint64_t word;
};

// By one thread, once; others may use the barrier after fence_barrier_init() and a barrier of the
// CTA.
__device__ __forceinline__ void init_barrier(ArrivalBarrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_shared_before_bulk();
}

// Releases what this thread did before to those who see the phase over.
__device__ __forceinline__ void arrive(ArrivalBarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// The phase is not over before `bytes` more have come.
__device__ __forceinline__ void expect(ArrivalBarrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ void arrive_expecting(ArrivalBarrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// Whether the phase of this parity is over, with acquire. It sleeps for a short while, of the
// hardware's choice, if it is not.
__device__ __forceinline__ bool phase_is_over(ArrivalBarrier* barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n .reg .pred over;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      " selp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

// The same without sleep, for who looks at several.
__device__ __forceinline__ bool phase_is_over_now(ArrivalBarrier* barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n .reg .pred over;\n"
      " mbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      " selp.u32 %0, 1, 0, over;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

// Waits until the phase is over. `deadline.expired()` is asked after every fruitless look; when
// it says so, it has reported what was awaited, and this returns false.
template <class Deadline>
__device__ __forceinline__ bool await_phase(ArrivalBarrier* barrier, uint32_t parity,
                                            Deadline&& deadline) {
  while (!phase_is_over(barrier, parity))
    if (deadline.expired()) return false;
  return true;
}

// The deadline of a wait that has nothing else to look at: a time.
class ArrivalDeadline {
 public:
  __device__ ArrivalDeadline(int64_t limit_ns, ArrivalReport* report, uint32_t what,
                             uint32_t parity)
      : limit_ns_(limit_ns), report_(report), what_(what), parity_(parity) {}

  __device__ bool expired() {
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < limit_ns_) return false;
    *report_ = {what_, blockIdx.x, parity_, static_cast<uint32_t>((now - begin_) / 1000)};
    return true;
  }

 private:
  const int64_t limit_ns_;
  ArrivalReport* report_;
  const uint32_t what_;
  const uint32_t parity_;
  int64_t begin_ = 0;
};

// ---- copies -------------------------------------------------------------------------------------

// Its bytes count for the barrier's phase, which must expect them.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          ArrivalBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Words that are no multiple of 16 bytes, each of them copied for itself.
__device__ __forceinline__ void copy_word_async(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global)
               : "memory");
}

// One arrival, when all words have come that this thread has asked for.
__device__ __forceinline__ void arrive_when_copied(ArrivalBarrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

// The stores that this thread has enqueued since the last time are a group.
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the `Youngest` groups of this thread have been read from shared memory, which may be
// written again.
template <int Youngest>
__device__ __forceinline__ void bulk_await_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Youngest) : "memory");
}

// All but the `Youngest` groups of this thread are written where they go.
template <int Youngest>
__device__ __forceinline__ void bulk_await_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Youngest) : "memory");
}
#endif

}  // namespace fanfold
