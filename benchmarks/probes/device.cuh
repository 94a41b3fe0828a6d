// The PTX that the probes use, named once. Memory order and scope are part of each name.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>

namespace fanfold::probe {

constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

// ---- loads and stores -------------------------------------------------------------------------

__device__ __forceinline__ uint4 load_relaxed_system(const uint4* address) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ __forceinline__ uint64_t load_relaxed_system(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// Read-only input that nobody writes during the kernel.
__device__ __forceinline__ uint4 load_constant(const uint4* address) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
}

// Read once; what other threads wrote before a signal that was awaited is seen.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_weak(uint4* address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_relaxed_system(uint4* address, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void store_relaxed_system(uint64_t* address, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

__device__ __forceinline__ void store_relaxed_system(uint32_t* address, uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void store_release_system(uint32_t* address, uint32_t v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void add_release_system(uint32_t* address, uint32_t v) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t add_acq_rel_gpu(uint32_t* address, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(v)
               : "memory");
  return old;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// ---- bulk copies from shared memory to global memory (local or a peer's) ------------------------

__device__ __forceinline__ void fence_shared_before_bulk() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  const auto source = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// The shared memory of all committed copies may be overwritten.
__device__ __forceinline__ void bulk_wait_source_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// All committed copies are written where they go.
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// All but the youngest `Groups` committed groups have left shared memory.
template <int Groups>
__device__ __forceinline__ void bulk_wait_source_read_but() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Groups) : "memory");
}

// All but the youngest `Groups` committed groups are written where they go.
template <int Groups>
__device__ __forceinline__ void bulk_wait_written_but() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Groups) : "memory");
}

// ---- bulk copies from global memory (local or a peer's) to shared memory ------------------------

// Counts the bytes of bulk loads; each use of a slot of a ring is one phase.
struct ArrivalBarrier {
  uint64_t word;
};

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void init(ArrivalBarrier* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;\n fence.proxy.async.shared::cta;" ::
                   : "memory");
}

__device__ __forceinline__ void arrive(ArrivalBarrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void arrive_expecting(ArrivalBarrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool phase_is_over(ArrivalBarrier* barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n .reg .pred p;\n"
      " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return over != 0;
}

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          ArrivalBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// What this thread has seen by ordinary loads (an acquired flag, say) comes before its bulk copies,
// and its bulk copies that are written come before what it stores next.
__device__ __forceinline__ void fence_global_and_bulk() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- barriers of some warps, dependent launches, clocks -----------------------------------------

__device__ __forceinline__ void barrier_of(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void allow_next_kernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void wait_for_previous_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void pause(uint32_t nanoseconds) {
  asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint32_t lanes_below() {
  uint32_t mask;
  asm("mov.u32 %0, %lanemask_lt;" : "=r"(mask));
  return mask;
}

// ---- number formats -----------------------------------------------------------------------------

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) {
  return __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t quad;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}"
      : "=r"(quad)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return quad;
}

// ---- rows that are their own flag ---------------------------------------------------------------
// A word of all ones is a negative NaN in fp32, twice one in bf16 and four times one in e4m3.
// The conversions above give the positive NaN only, so no row they made holds such a word: a word
// that is not all ones has arrived. Every word is judged by itself; nothing is assumed of how the
// words of a row, or of one 16-byte store, become visible.

constexpr uint32_t kAbsent = 0xFFFFFFFFu;

__device__ __forceinline__ bool arrived(uint4 v) {
  return v.x != kAbsent && v.y != kAbsent && v.z != kAbsent && v.w != kAbsent;
}

__device__ __forceinline__ uint4 absent() { return {kAbsent, kAbsent, kAbsent, kAbsent}; }

// ---- bounded waiting ----------------------------------------------------------------------------
// A thread asks after every fruitless poll. The first to run out raises the error; whoever sees it
// raised leaves too, so that one late peer costs one bound and not one per wait.

class Patience {
 public:
  __device__ explicit Patience(uint32_t* error) : error_(error) {}

  __device__ bool exhausted() {
    if ((++polls_ & kLookEvery) != 0) return false;
    if (polls_ > kMaxPolls) store_relaxed_system(error_, 1u);
    return load_relaxed_system(error_) != 0;
  }

 private:
  static constexpr uint32_t kLookEvery = (1u << 12) - 1;
  static constexpr uint32_t kMaxPolls = 1u << 21;
  uint32_t* error_;
  uint32_t polls_ = 0;
};

}  // namespace fanfold::probe
