// device/wgmma.cuh on a CPU: each thread sums the products of its own accumulators in plain loops,
// when it waits for them.
#pragma once

#include <cstring>

#include "device/memory.cuh"
#include "late.hpp"
#include "layout/types.h"

namespace fanfold {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWgmmaRows = 64;
inline constexpr int kWgmmaDepth = 32;

// ---- registers ----------------------------------------------------------------------------------

template <int kRegisters>
void raise_registers() {}
template <int kRegisters>
void lower_registers() {}

template <int kCount>
void registers_settle(float (&)[kCount]) {}
inline void register_settle(float&) {}
inline void register_settle(uint32_t&) {}

template <int kCount>
void registers_begin(float (&d)[kCount]) {
  for (float& v : d) v = __uint_as_float(0x7fc17fc1u);  // NaN
}

// ---- barriers of some of a CTA's warps ----------------------------------------------------------

inline void named_barrier_wait(int id, int threads) { emulation::named_barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) {
  emulation::named_barrier_arrive(id, threads);
}
inline bool named_barrier_all(int id, int threads, bool v) {
  return emulation::named_barrier(id, threads, v);
}

// ---- operands -----------------------------------------------------------------------------------

inline constexpr uint64_t kDescriptorStep = kWgmmaDepth / 16;

inline uint64_t swizzled_descriptor(const void* tile) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kEightRows = uint64_t{1024 / 16} << 32;
  constexpr uint64_t kUnused = uint64_t{1} << 16;
  return kSwizzle128 | kEightRows | kUnused | (shared_address(tile) & 0x3ffff) >> 4;
}

// ---- products -----------------------------------------------------------------------------------

inline void wgmma_begin() {}
inline void wgmma_commit() { emulation::commit_products(); }
template <int kYoungest>
void wgmma_await() {
  emulation::await_products(kYoungest, emulated_shared);
  __syncwarp();  // a warp's products are done together
}
template <int kCount>
void wgmma_e4m3(float (&d)[kCount], uint64_t a, uint64_t b, bool adds) {
  emulation::multiply_late({d, kCount, a, b, adds});
}

// ---- results ------------------------------------------------------------------------------------

inline void store_matrices(void* row, const uint32_t (&v)[4]) {
  const int lane = emulation::lane();
  const uint64_t* rows = emulation::together(reinterpret_cast<uintptr_t>(row));
  for (int matrix = 0; matrix < 4; ++matrix) {
    auto* to = reinterpret_cast<unsigned char*>(rows[8 * matrix + lane / 4]);
    std::memcpy(to + lane % 4 * 4, &v[matrix], 4);
  }
}

inline void store_matrices_transposed(void* column, const uint32_t (&v)[4]) {
  const int lane = emulation::lane();
  const uint64_t* columns = emulation::together(reinterpret_cast<uintptr_t>(column));
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int c = 0; c < 2; ++c) {
      auto* to = reinterpret_cast<unsigned char*>(columns[8 * matrix + lane % 4 * 2 + c]);
      const auto half = static_cast<uint16_t>(v[matrix] >> 16 * c);
      std::memcpy(to + lane / 4 * 2, &half, 2);
    }
}

}  // namespace fanfold
