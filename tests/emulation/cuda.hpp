// What a kernel's source needs of CUDA, on a CPU: the words of the language and the built-in
// functions. Included before anything else when a kernel is compiled by the host's compiler, for which
// <algorithm>, <atomic> and <cmath> would cost more time than most kernels.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "ctas.hpp"

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

#define threadIdx (emulation::thread())
#define blockIdx (emulation::block())
#define gridDim (emulation::grid())

template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}

// ---- what the lanes of a warp do together; all of them always do --------------------------------

inline uint32_t __ballot_sync(uint32_t, bool bit) { return emulation::ballot(bit); }
inline int __any_sync(uint32_t mask, bool bit) { return __ballot_sync(mask, bit) != 0; }
inline int __all_sync(uint32_t mask, bool bit) { return __ballot_sync(mask, bit) == 0xffffffffu; }
inline void __syncwarp() { emulation::together(0); }
inline uint32_t __match_any_sync(uint32_t, int value) {
  return emulation::matching(static_cast<uint32_t>(value));
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  const uint64_t* words = emulation::together(value);
  uint64_t bits = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) bits |= words[lane];
  return static_cast<uint32_t>(bits);
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  const uint64_t* words = emulation::together(value);
  uint64_t least = words[0];
  for (int lane = 1; lane < emulation::kLanes; ++lane) least = min(least, words[lane]);
  return static_cast<uint32_t>(least);
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint64_t* words = emulation::together(value);
  uint64_t most = words[0];
  for (int lane = 1; lane < emulation::kLanes; ++lane) most = max(most, words[lane]);
  return static_cast<uint32_t>(most);
}
template <class T>
T __shfl_sync(uint32_t, T value, int lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  word = emulation::together(word)[lane % emulation::kLanes];
  std::memcpy(&value, &word, sizeof(T));
  return value;
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int other) {
  return __shfl_sync(mask, value, emulation::lane() ^ other);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, int distance) {
  const int own = emulation::lane();
  return __shfl_sync(mask, value, own < distance ? own : own - distance);
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __syncthreads() { emulation::barrier(); }
inline void __nanosleep(uint32_t) { emulation::yield(); }

// ---- arithmetic -----------------------------------------------------------------------------------

inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<uint32_t>(bits)); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float value) { return __builtin_expf(value); }
inline float fabsf(float value) { return __builtin_fabsf(value); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float exp2f(float value) { return __builtin_exp2f(value); }
inline float log2f(float value) { return __builtin_log2f(value); }
inline float rintf(float value) { return __builtin_rintf(value); }
inline bool isnan(float value) { return __builtin_isnan(value); }
namespace fanfold {
// A signalling NaN gives way to a number, too; C's function returns NaN.
inline float fmaxf(float a, float b) { return isnan(a) || a < b ? b : a; }
}  // namespace fanfold

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
inline uint32_t atomicOr(uint32_t* word, uint32_t bits) {
  return __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
}
inline uint32_t atomicAdd(uint32_t* word, uint32_t value) {
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
inline int atomicAdd(int* word, int value) {
  return __atomic_fetch_add(word, value, __ATOMIC_RELAXED);
}
