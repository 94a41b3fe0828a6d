// The tensor cores of Hopper by warpgroup (sm_90a): operands in shared memory, e4m3, accumulators
// in registers, FP32.
//
// The accumulators of a 64 x N tile: thread t of the warpgroup holds rows 16 (t / 32) + t / 4 % 8,
// the row, and the row + 8; of every 8 columns it holds columns 2 (t % 4) and the next. Element
// 4 j + 2 h + c of the array is column 8 j + 2 (t % 4) + c of the row + 8 h.
//
//   registers_settle(d)         the accumulators are written by ordinary instructions before it
//   wgmma_begin()
//   wgmma_e4m3(d, a, b, adds)   any number, of any accumulators
//   wgmma_commit()
//   wgmma_await<0>()
//   registers_settle(d)         the accumulators are read by ordinary instructions after it
#pragma once

#include "device/memory.cuh"
#include "layout/types.h"

namespace fanfold {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWgmmaRows = 64;
inline constexpr int kWgmmaDepth = 32;  // elements of e4m3, and bytes

// ---- registers ----------------------------------------------------------------------------------

// The registers of each thread of the warpgroup, a multiple of 8. Needs __launch_bounds__ with a
// minimum of CTAs.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The compiler moves no instruction with these registers across it.
template <int kCount>
__device__ __forceinline__ void registers_settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Likewise one value, which the compiler also does not compute again behind it.
__device__ __forceinline__ void register_settle(float& v) { asm volatile("" : "+f"(v)); }
__device__ __forceinline__ void register_settle(uint32_t& v) { asm volatile("" : "+r"(v)); }

// Values that ptxas takes for new ones: it serialises products whose registers held others.
template <int kCount>
__device__ __forceinline__ void registers_begin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(d[i]));
}

// ---- barriers of some of a CTA's warps ----------------------------------------------------------

// Barrier `id`, 1 to 15, of `threads` threads, whole warps: those that wait and those that do not.
__device__ __forceinline__ void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same as a wait; whether `v` is true for all of those threads.
__device__ __forceinline__ bool named_barrier_all(int id, int threads, bool v) {
  uint32_t all;
  asm volatile(
      "{\n .reg .pred own, all;\n setp.ne.u32 own, %3, 0;\n"
      " barrier.cta.red.and.pred all, %1, %2, own;\n selp.u32 %0, 1, 0, all;\n}"
      : "=r"(all)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(v))
      : "memory");
  return all != 0;
}

// ---- operands -----------------------------------------------------------------------------------

// A tile in shared memory with rows of 128 bytes along K, swizzled by 128 bytes as a tensor copy
// writes it; begins on 1024 bytes. The next 32 elements of K are at `+ kDescriptorStep`.
inline constexpr uint64_t kDescriptorStep = kWgmmaDepth / 16;

__device__ __forceinline__ uint64_t swizzled_descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightRows | kUnused | (shared_address(tile) & 0x3ffff) >> 4;
}

// ---- products -----------------------------------------------------------------------------------

// Accumulators written before are seen by the products after it.
__device__ __forceinline__ void wgmma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// The products since the last time are a group.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the `kYoungest` groups are done.
template <int kYoungest>
__device__ __forceinline__ void wgmma_await() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kYoungest) : "memory");
}

// The names of eight accumulators among the operands of a product, and the accumulators.
#define FANFOLD_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FANFOLD_D8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FANFOLD_D16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FANFOLD_D24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FANFOLD_D32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FANFOLD_D40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FANFOLD_D48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FANFOLD_D56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FANFOLD_D64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FANFOLD_D72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FANFOLD_D80 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FANFOLD_D88 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FANFOLD_D96 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FANFOLD_D104 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FANFOLD_D112 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FANFOLD_D120 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FANFOLD_EIGHT(i)                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

// d = a b^T, plus d if `adds`: 64 rows of a, as many rows of b as d has columns (twice its
// registers), 32 elements of K.
#define FANFOLD_WGMMA(count, columns, names, a_name, b_name, adds_name, ...)              \
  __device__ __forceinline__ void wgmma_e4m3(float (&d)[count], uint64_t a, uint64_t b,   \
                                             bool adds) {                                 \
    asm volatile("{\n .reg .pred adds;\n setp.ne.b32 adds, " adds_name                    \
                 ", 0;\n"                                                                 \
                 " wgmma.mma_async.sync.aligned.m64n" columns "k32.f32.e4m3.e4m3 {" names \
                 "}, " a_name ", " b_name ", adds, 1, 1;\n}"                              \
                 : __VA_ARGS__                                                            \
                 : "l"(a), "l"(b), "r"(static_cast<int>(adds)));                          \
  }
FANFOLD_WGMMA(16, "32", FANFOLD_D0 ", " FANFOLD_D8, "%16", "%17", "%18", FANFOLD_EIGHT(0),
              FANFOLD_EIGHT(8));
FANFOLD_WGMMA(32, "64", FANFOLD_D0 ", " FANFOLD_D8 ", " FANFOLD_D16 ", " FANFOLD_D24, "%32", "%33",
              "%34", FANFOLD_EIGHT(0), FANFOLD_EIGHT(8), FANFOLD_EIGHT(16), FANFOLD_EIGHT(24));
FANFOLD_WGMMA(48, "96",
              FANFOLD_D0 ", " FANFOLD_D8 ", " FANFOLD_D16 ", " FANFOLD_D24 ", " FANFOLD_D32
                         ", " FANFOLD_D40,
              "%48", "%49", "%50", FANFOLD_EIGHT(0), FANFOLD_EIGHT(8), FANFOLD_EIGHT(16),
              FANFOLD_EIGHT(24), FANFOLD_EIGHT(32), FANFOLD_EIGHT(40));
FANFOLD_WGMMA(64, "128",
              FANFOLD_D0 ", " FANFOLD_D8 ", " FANFOLD_D16 ", " FANFOLD_D24 ", " FANFOLD_D32
                         ", " FANFOLD_D40 ", " FANFOLD_D48 ", " FANFOLD_D56,
              "%64", "%65", "%66", FANFOLD_EIGHT(0), FANFOLD_EIGHT(8), FANFOLD_EIGHT(16),
              FANFOLD_EIGHT(24), FANFOLD_EIGHT(32), FANFOLD_EIGHT(40), FANFOLD_EIGHT(48),
              FANFOLD_EIGHT(56));
FANFOLD_WGMMA(96, "192",
              FANFOLD_D0 ", " FANFOLD_D8 ", " FANFOLD_D16 ", " FANFOLD_D24 ", " FANFOLD_D32
                         ", " FANFOLD_D40 ", " FANFOLD_D48 ", " FANFOLD_D56 ", " FANFOLD_D64
                         ", " FANFOLD_D72 ", " FANFOLD_D80 ", " FANFOLD_D88,
              "%96", "%97", "%98", FANFOLD_EIGHT(0), FANFOLD_EIGHT(8), FANFOLD_EIGHT(16),
              FANFOLD_EIGHT(24), FANFOLD_EIGHT(32), FANFOLD_EIGHT(40), FANFOLD_EIGHT(48),
              FANFOLD_EIGHT(56), FANFOLD_EIGHT(64), FANFOLD_EIGHT(72), FANFOLD_EIGHT(80),
              FANFOLD_EIGHT(88));
FANFOLD_WGMMA(128, "256",
              FANFOLD_D0 ", " FANFOLD_D8 ", " FANFOLD_D16 ", " FANFOLD_D24 ", " FANFOLD_D32
                         ", " FANFOLD_D40 ", " FANFOLD_D48 ", " FANFOLD_D56 ", " FANFOLD_D64
                         ", " FANFOLD_D72 ", " FANFOLD_D80 ", " FANFOLD_D88 ", " FANFOLD_D96
                         ", " FANFOLD_D104 ", " FANFOLD_D112 ", " FANFOLD_D120,
              "%128", "%129", "%130", FANFOLD_EIGHT(0), FANFOLD_EIGHT(8), FANFOLD_EIGHT(16),
              FANFOLD_EIGHT(24), FANFOLD_EIGHT(32), FANFOLD_EIGHT(40), FANFOLD_EIGHT(48),
              FANFOLD_EIGHT(56), FANFOLD_EIGHT(64), FANFOLD_EIGHT(72), FANFOLD_EIGHT(80),
              FANFOLD_EIGHT(88), FANFOLD_EIGHT(96), FANFOLD_EIGHT(104), FANFOLD_EIGHT(112),
              FANFOLD_EIGHT(120));
#undef FANFOLD_WGMMA
#undef FANFOLD_EIGHT
#undef FANFOLD_D0
#undef FANFOLD_D8
#undef FANFOLD_D16
#undef FANFOLD_D24
#undef FANFOLD_D32
#undef FANFOLD_D40
#undef FANFOLD_D48
#undef FANFOLD_D56
#undef FANFOLD_D64
#undef FANFOLD_D72
#undef FANFOLD_D80
#undef FANFOLD_D88
#undef FANFOLD_D96
#undef FANFOLD_D104
#undef FANFOLD_D112
#undef FANFOLD_D120

// ---- results ------------------------------------------------------------------------------------

// Four 8 x 8 matrices of 16-bit elements to shared memory: lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&v)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
      : "memory");
}

// The same of the matrices transposed: lane l names column l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrices_transposed(void* column, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                   shared_address(column)),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

}  // namespace fanfold
