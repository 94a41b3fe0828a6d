// device/wgmma.cuh on a CPU: each thread sums the products of its own accumulators in plain loops,
// when it waits for them.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "device/memory.cuh"
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

inline float e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  if ((code & 127) == 127) return __uint_as_float(0x7fc00000u);
  const float magnitude = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : 8 + mantissa),
                                     max(exponent, 1) - 10);
  return code & 128 ? -magnitude : magnitude;
}

// ---- products -----------------------------------------------------------------------------------

// All that takes time; the rest is compiled for short compilation.
#pragma GCC push_options
#pragma GCC optimize("O3")

// 32 elements of K of one row of a tile: every `stride`-th of `row`.
inline void decode_row(double* row, int stride, uint64_t descriptor, int number) {
  static const std::vector<double> values = [] {
    std::vector<double> every;
    for (int code = 0; code < 256; ++code) every.push_back(e4m3_value(static_cast<uint8_t>(code)));
    return every;
  }();
  if (descriptor >> 62 != 1) std::abort();
  const auto begin = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto eight_rows = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const auto at = static_cast<uint32_t>(number);
  const uint32_t linear = begin + at / 8 * eight_rows + at % 8 * 128;
  const double* of_code = values.data();
  for (uint32_t unit = linear; unit < linear + kWgmmaDepth; unit += 16) {
    const unsigned char* from = emulated_shared + (unit ^ (unit >> 7 & 7u) << 4);
    for (int k = 0; k < 16; ++k, row += stride) *row = of_code[from[k]];
  }
}

// A sum is exact, and then rounded once.
struct LateProduct {
  static constexpr int kMostColumns = 64;  // of a thread

  float* d;
  int count;
  uint64_t a, b;
  bool adds;

  void compute() const {
    const int thread = static_cast<int>(threadIdx.x) % kWarpgroupThreads;
    const int columns = count / 2;
    double b_values[kWgmmaDepth][kMostColumns];
    for (int c = 0; c < columns; ++c)
      decode_row(&b_values[0][c], kMostColumns, b, c / 2 * 8 + thread % 4 * 2 + c % 2);
    for (int h = 0; h < 2; ++h) {
      double a_values[kWgmmaDepth];
      decode_row(a_values, 1, a, thread / 32 * 16 + thread / 4 % 8 + 8 * h);
      double sums[kMostColumns];
      for (int c = 0; c < columns; ++c) sums[c] = adds ? d[c / 2 * 4 + 2 * h + c % 2] : 0.0;
      for (int k = 0; k < kWgmmaDepth; ++k)
        for (int c = 0; c < columns; ++c) sums[c] += a_values[k] * b_values[k][c];
      for (int c = 0; c < columns; ++c) d[c / 2 * 4 + 2 * h + c % 2] = static_cast<float>(sums[c]);
    }
  }
};

#pragma GCC pop_options

// In the order of the threads' own waits.
struct LateProducts {
  std::vector<LateProduct> open;
  std::deque<std::vector<LateProduct>> groups;

  static LateProducts& own() {
    static thread_local std::map<unsigned, LateProducts> of_threads;
    return of_threads[emulation::thread().x];
  }
};

inline void wgmma_begin() {}
inline void wgmma_commit() {
  LateProducts& own = LateProducts::own();
  own.groups.push_back(std::exchange(own.open, {}));
}
template <int kYoungest>
void wgmma_await() {
  LateProducts& own = LateProducts::own();
  for (; own.groups.size() > kYoungest; own.groups.pop_front())
    for (const LateProduct& product : own.groups.front()) product.compute();
  __syncwarp();  // a warp's products are done together
}
template <int kCount>
void wgmma_e4m3(float (&d)[kCount], uint64_t a, uint64_t b, bool adds) {
  LateProducts::own().open.push_back({d, kCount, a, b, adds});
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
