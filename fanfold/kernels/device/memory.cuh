// Loads and stores of memory. Memory order and scope are part of each name.
#pragma once

#include "layout/types.h"

namespace fanfold {

// ---- seen by other GPUs -------------------------------------------------------------------------

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

__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void add_release_system(uint32_t* address, uint32_t v) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
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

__device__ __forceinline__ void store_release_system(uint64_t* address, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

// Two words beside each other, on 16 bytes, in one store. A reader may see either word first.
__device__ __forceinline__ void store_pair_release_system(uint64_t* words, uint64_t first,
                                                          uint64_t second) {
  asm volatile("st.release.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(words), "l"(first), "l"(second)
               : "memory");
}

// Returns what stood there before.
__device__ __forceinline__ uint64_t fetch_add_relaxed_system(uint64_t* address, uint64_t v) {
  uint64_t before;
  asm volatile("atom.add.relaxed.sys.global.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(v)
               : "memory");
  return before;
}

// Stores `desired` if `expected` stands there, and returns whether it did. If not, sets `expected`
// to what stands there.
__device__ __forceinline__ bool compare_exchange_relaxed_system(uint64_t* address,
                                                                uint64_t& expected,
                                                                uint64_t desired) {
  uint64_t before;
  asm volatile("atom.cas.relaxed.sys.global.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(address), "l"(expected), "l"(desired)
               : "memory");
  const bool stored = before == expected;
  expected = before;
  return stored;
}

// What this thread has done and seen comes before what it stores next, for all GPUs and the host.
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- of this GPU --------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* address) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint64_t load_acquire_gpu(const uint64_t* address) {
  uint64_t v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(address) : "memory");
  return v;
}

__device__ __forceinline__ void store_release_gpu(uint64_t* address, uint64_t v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(v) : "memory");
}

// Returns what stood there before.
__device__ __forceinline__ uint32_t add_release_gpu(uint32_t* address, uint32_t v) {
  uint32_t before;
  asm volatile("atom.add.release.gpu.global.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(v)
               : "memory");
  return before;
}

// Returns what stood there before.
__device__ __forceinline__ uint64_t exchange_acquire_gpu(uint64_t* address, uint64_t v) {
  uint64_t before;
  asm volatile("atom.acquire.gpu.global.exch.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(v)
               : "memory");
  return before;
}

__device__ __forceinline__ void store_relaxed_gpu(uint32_t* address, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(v) : "memory");
}

// ---- of this CTA, in its shared memory ----------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ float load_shared_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void load_shared_floats(float (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(v[0]), "=f"(v[1])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_shared_pair(uint32_t address, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed_cta(const uint32_t* shared) {
  uint32_t v;
  asm volatile("ld.relaxed.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(shared)));
  return v;
}

// Returns what stood there before.
__device__ __forceinline__ uint32_t exchange_acquire_cta(uint32_t* shared, uint32_t v) {
  uint32_t before;
  asm volatile("atom.acquire.cta.shared::cta.exch.b32 %0, [%1], %2;"
               : "=r"(before)
               : "r"(shared_address(shared)), "r"(v)
               : "memory");
  return before;
}

// Stores `v` if 0 stands there, and returns whether it did.
__device__ __forceinline__ bool fill_release_cta(uint32_t* shared, uint32_t v) {
  uint32_t before;
  asm volatile("atom.release.cta.shared::cta.cas.b32 %0, [%1], 0, %2;"
               : "=r"(before)
               : "r"(shared_address(shared)), "r"(v)
               : "memory");
  return before == 0;
}

__device__ __forceinline__ void store_relaxed_cta(uint32_t* shared, uint32_t v) {
  asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(shared_address(shared)), "r"(v)
               : "memory");
}

// ---- copies to shared memory, which the thread that asked for them waits for -------------------

// 16 bytes, or zeros without a look at `global`.
__device__ __forceinline__ void copy_async_or_zeros(uint4* shared, const uint4* global,
                                                    bool copies) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(copies ? 16 : 0)
               : "memory");
}

// Those since the last time are a group.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// All but the `Youngest` groups of this thread are there.
template <int Youngest>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Youngest) : "memory");
}

// ---- for one thread -----------------------------------------------------------------------------

// Input that is read once. Not through the read-only path: a kernel launched early begins while the
// one that makes its input still runs.
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// What others have published, which the SM's own cache need not have. The compiler may bring
// several together.
__device__ __forceinline__ uint4 load_published(const uint4* address) { return __ldcg(address); }

__device__ __forceinline__ void store_weak(uint4* address, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace fanfold
