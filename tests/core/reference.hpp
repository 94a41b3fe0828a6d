// Reference arithmetic, slow and independent of the code under test: it searches for the nearest
// neighbours, and its intermediates are volatile so that the compiler cannot fuse operations.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace fanfold::reference {

inline float bf16_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// The nearer of the two bf16 neighbours; if both are equally near, the even one. The neighbour
// above the largest finite value counts as 2^128 and becomes infinity.
inline uint16_t bf16_of(float value) {
  if (std::isnan(value)) return 0x7fc0;
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | 0x7f80);
  const auto below =
      static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(magnitude)) >> 16);
  const auto above = static_cast<uint16_t>(below + 1);
  const double high = above == 0x7f80 ? 0x1p128 : static_cast<double>(bf16_value(above));
  const double down = magnitude - static_cast<double>(bf16_value(below));
  const double up = high - magnitude;
  const bool take_above = up < down || (up == down && below % 2 == 1);
  return static_cast<uint16_t>(sign | (take_above ? above : below));
}

// By the definition of e4m3fn: sign, 4 exponent bits of bias 7, 3 fraction bits, no infinities.
inline double e4m3_value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int fraction = code & 7;
  if (exponent == 15 && fraction == 7) return std::nan("");
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

// The nearest of all finite codes of the same sign; of two equally near the even one.
inline uint8_t e4m3_of(float value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(static_cast<double>(value));
  int best = 0;
  double best_distance = magnitude;
  for (int code = 1; code < 0x7f; ++code) {
    const double distance = std::fabs(magnitude - e4m3_value(static_cast<uint8_t>(code)));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
      best = code;
      best_distance = distance;
    }
  }
  // All finite codes are equally, infinitely far from infinity.
  if (std::isinf(value)) best = 0x7e;
  return static_cast<uint8_t>(sign | best);
}

// By the definition of e2m1: sign, 2 exponent bits of bias 1, 1 fraction bit, no NaN.
inline double e2m1_value(uint8_t code) {
  const double magnitudes[] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  return (code & 8) != 0 ? -magnitudes[code & 7] : magnitudes[code & 7];
}

inline uint8_t e2m1_of(float value) {
  if (std::isnan(value)) return 7;
  const double magnitude = std::fmin(std::fabs(static_cast<double>(value)), 6.0);
  int best = 0;
  for (int code = 1; code < 8; ++code) {
    const double distance = std::fabs(magnitude - e2m1_value(static_cast<uint8_t>(code)));
    const double best_distance = std::fabs(magnitude - e2m1_value(static_cast<uint8_t>(best)));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(std::signbit(value) ? 8 | best : best);
}

inline float times(float a, float b) {
  const volatile float product = a * b;
  return product;
}

inline float plus(float a, float b) {
  const volatile float sum = a + b;
  return sum;
}

inline float over(float a, float b) {
  const volatile float quotient = a / b;
  return quotient;
}

struct Fp8Row {
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

// amax = max(|x|, 1e-4) of each 128 columns; scale = amax / 448, values = e4m3(x * (448 / amax)).
// With a power of two: scale = 2^ceil(log2(amax / 448)), values = e4m3(x * (1 / scale)).
inline Fp8Row quantize(const uint16_t* x, size_t hidden, bool power_of_two) {
  Fp8Row row;
  for (size_t begin = 0; begin < hidden; begin += 128) {
    const size_t end = begin + 128 < hidden ? begin + 128 : hidden;
    float amax = 1e-4f;
    for (size_t i = begin; i < end; ++i) amax = std::fmax(amax, std::fabs(bf16_value(x[i])));
    float scale = over(amax, 448.0f);
    float factor = over(448.0f, amax);
    if (power_of_two) {
      int exponent = 0;
      const float fraction = std::frexp(scale, &exponent);  // scale = fraction * 2^exponent
      scale = std::ldexp(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
      factor = over(1.0f, scale);
    }
    row.scales.push_back(scale);
    for (size_t i = begin; i < end; ++i) {
      row.values.push_back(e4m3_of(times(bf16_value(x[i]), factor)));
    }
  }
  return row;
}

}  // namespace fanfold::reference
