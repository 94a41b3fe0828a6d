// Ground of the layout headers: fixed-width integers, the host-and-device marker, rounding.
//
// Everything under layout/ is compiled by the host compiler and by NVRTC, so it may use nothing
// that either of them lacks: no standard headers under NVRTC, no exceptions, no containers.
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cstdint>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define FANFOLD_HD __host__ __device__
#else
#define FANFOLD_HD
#endif

namespace fanfold {

// Rows and areas start on 16-byte boundaries, the width of the widest load and of a bulk copy.
inline constexpr int64_t kRowAlignment = 16;
// Areas that different ranks write start on separate lines, so that they never share one.
inline constexpr int64_t kAreaAlignment = 128;

FANFOLD_HD constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

FANFOLD_HD constexpr int64_t align_up(int64_t value, int64_t alignment) {
  return ceil_div(value, alignment) * alignment;
}

}  // namespace fanfold
