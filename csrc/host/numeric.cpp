#include "host/numeric.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "host/vectorized.h"
#include "layout/row.h"

namespace fanfold {
namespace {

constexpr float kE4m3Max = 448.0f;
constexpr float kE2m1Max = 6.0f;
constexpr float kSmallestAmax = 1e-4f;
constexpr uint32_t kSignBit = 0x80000000u;

// Half the codes of a sign-magnitude 10-bit field, without the one for zero.
constexpr float kLogFmtSteps = 510.0f;
constexpr float kLogFmtOctaves = 32.0f;
// For values of this size and more, the range's upper end could round up to 2^128.
constexpr float kLogFmtLimit = 0x1p127f;

inline uint16_t round_one_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & ~kSignBit) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline uint8_t round_one_to_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits & kSignBit) >> 24;
  const float magnitude = std::min(std::bit_cast<float>(bits & ~kSignBit), kE4m3Max);
  // Below 2^-6 the format has a fixed step of 2^-9: adding 2^14 leaves that step as the unit of the
  // float's last place, so the addition itself rounds to nearest even.
  constexpr float kStepAligner = 16384.0f;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(magnitude + kStepAligner) - std::bit_cast<uint32_t>(kStepAligner);
  // Otherwise round the 23-bit fraction to 3 bits and move the exponent bias from 127 to 7.
  const auto word = std::bit_cast<uint32_t>(magnitude);
  const uint32_t normal = (word + 0x7ffffu + ((word >> 20) & 1u) - (120u << 23)) >> 20;
  const uint32_t code = magnitude < 0x1p-6f ? subnormal : normal;
  const bool nan = (bits & ~kSignBit) > 0x7f800000u;
  return static_cast<uint8_t>(nan ? 0x7fu : sign | code);
}

float e4m3_to_float(uint8_t code) {
  if ((code & 0x7fu) == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
  const uint32_t magnitude = code & 0x7fu;
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : std::bit_cast<float>((magnitude << 20) + (120u << 23));
  return (code & 0x80u) != 0 ? -value : value;
}

inline uint8_t round_one_to_e2m1(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits & kSignBit) >> 28;
  const float magnitude = std::min(std::bit_cast<float>(bits & ~kSignBit), kE2m1Max);
  // As in round_one_to_e4m3: below 1 the step is 2^-1, the unit of the last place of 2^22.
  constexpr float kStepAligner = 0x1p22f;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(magnitude + kStepAligner) - std::bit_cast<uint32_t>(kStepAligner);
  // Otherwise round the 23-bit fraction to 1 bit and move the exponent bias from 127 to 1.
  const auto word = std::bit_cast<uint32_t>(magnitude);
  const uint32_t normal = (word + 0x1fffffu + ((word >> 22) & 1u) - (126u << 23)) >> 22;
  const uint32_t code = magnitude < 1.0f ? subnormal : normal;
  const bool nan = (bits & ~kSignBit) > 0x7f800000u;
  return static_cast<uint8_t>(nan ? 0x7u : sign | code);
}

// 2^ceil(log2(value)) for a positive normal value, exactly.
float next_power_of_two(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x7fffffu) & 0xff800000u);
}

FANFOLD_VECTORIZED
float largest_magnitude(const uint16_t* x, int64_t columns, float least) {
  float amax = least;
  for (int64_t i = 0; i < columns; ++i) amax = std::max(amax, std::fabs(bf16_to_float(x[i])));
  return amax;
}

FANFOLD_VECTORIZED
void scale_to_e4m3(const uint16_t* x, float factor, int64_t columns, uint8_t* values) {
  for (int64_t i = 0; i < columns; ++i) values[i] = round_one_to_e4m3(bf16_to_float(x[i]) * factor);
}

FANFOLD_VECTORIZED
void scale_to_e2m1(const uint16_t* x, float factor, uint8_t* values) {
  uint8_t codes[kNvfp4BlockColumns];
  for (int i = 0; i < kNvfp4BlockColumns; ++i) {
    codes[i] = round_one_to_e2m1(bf16_to_float(x[i]) * factor);
  }
  for (int i = 0; i < kNvfp4BlockColumns / 2; ++i) {
    values[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  }
}

struct LogRange {
  uint16_t low;  // bfloat16
  uint16_t high;

  float low_value() const { return bf16_to_float(low); }
  float step() const { return (bf16_to_float(high) - bf16_to_float(low)) / kLogFmtSteps; }
};

// The largest bfloat16 not above `value`, and the smallest one not below.
uint16_t bf16_floor(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t truncated = bits >> 16;
  const bool away = (bits & kSignBit) != 0 && (bits & 0xffffu) != 0;
  return static_cast<uint16_t>(away ? truncated + 1 : truncated);
}

uint16_t bf16_ceil(float value) { return static_cast<uint16_t>(bf16_floor(-value) ^ 0x8000u); }

LogRange log_range(const float* values, int64_t columns) {
  float smallest = std::numeric_limits<float>::infinity();
  float largest = 0.0f;
  for (int64_t i = 0; i < columns; ++i) {
    const float magnitude = std::fabs(values[i]);
    if (magnitude == 0.0f) continue;
    smallest = std::min(smallest, magnitude);
    largest = std::max(largest, magnitude);
  }
  if (largest == 0.0f) return LogRange{0, 0};
  const float high = std::log2(largest);
  return LogRange{bf16_floor(std::max(std::log2(smallest), high - kLogFmtOctaves)),
                  bf16_ceil(high)};
}

uint32_t logfmt_code(float value, const LogRange& range) {
  const uint32_t sign = std::signbit(value) ? 0x200u : 0u;
  if (value == 0.0f) return sign;
  const float step = range.step();
  if (step == 0.0f) return sign | 1u;
  const float position = (std::log2(std::fabs(value)) - range.low_value()) / step;
  const float code = std::clamp(std::nearbyint(position), 0.0f, kLogFmtSteps);
  return sign | (1u + static_cast<uint32_t>(code));
}

// Write and read fields of `kLogFmtBits` bits, least significant first.
struct BitWriter {
  uint8_t* out;
  uint32_t bits = 0;
  int held = 0;

  void put(uint32_t field) {
    bits |= field << held;
    for (held += kLogFmtBits; held >= 8; held -= 8, bits >>= 8) {
      *out++ = static_cast<uint8_t>(bits);
    }
  }
  void flush() {
    if (held > 0) *out++ = static_cast<uint8_t>(bits);
  }
};

struct BitReader {
  const uint8_t* in;
  uint32_t bits = 0;
  int held = 0;

  uint32_t read() {
    for (; held < kLogFmtBits; held += 8) bits |= static_cast<uint32_t>(*in++) << held;
    const uint32_t field = bits & ((1u << kLogFmtBits) - 1u);
    bits >>= kLogFmtBits;
    held -= kLogFmtBits;
    return field;
  }
};

}  // namespace

uint16_t float_to_bf16(float value) { return round_one_to_bf16(value); }

uint8_t float_to_e4m3(float value) { return round_one_to_e4m3(value); }

void quantize_fp8_row(const uint16_t* x, int64_t hidden, ScaleRounding rounding, uint8_t* values,
                      float* scales) {
  for (int64_t begin = 0; begin < hidden; begin += kBlockColumns) {
    const int64_t columns = std::min<int64_t>(kBlockColumns, hidden - begin);
    const float amax = largest_magnitude(x + begin, columns, kSmallestAmax);
    float scale = amax / kE4m3Max;
    float factor = kE4m3Max / amax;
    if (rounding == ScaleRounding::kPowerOfTwo) {
      scale = next_power_of_two(scale);
      factor = 1.0f / scale;
    }
    scales[begin / kBlockColumns] = scale;
    scale_to_e4m3(x + begin, factor, columns, values + begin);
  }
}

uint8_t ue8m0_of(float power_of_two) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(power_of_two) >> 23);
}

uint8_t float_to_e2m1(float value) { return round_one_to_e2m1(value); }

void quantize_nvfp4_row(const uint16_t* x, int64_t hidden, float global_scale, uint8_t* values,
                        uint8_t* scales) {
  const float global = global_scale > 0.0f ? global_scale : std::numeric_limits<float>::quiet_NaN();
  const float back = 1.0f / global;
  for (int64_t begin = 0; begin < hidden; begin += kNvfp4BlockColumns) {
    const float amax = largest_magnitude(x + begin, kNvfp4BlockColumns, 0.0f);
    const uint8_t code = round_one_to_e4m3(global * (amax * (1.0f / kE2m1Max)));
    const float scale = e4m3_to_float(code);
    scales[begin / kNvfp4BlockColumns] = code;
    scale_to_e2m1(x + begin, scale == 0.0f ? 0.0f : 1.0f / (scale * back), values + begin / 2);
  }
}

FANFOLD_VECTORIZED
void add_weighted_bf16(const uint16_t* row, float weight, int64_t columns, float* sum) {
  for (int64_t i = 0; i < columns; ++i) sum[i] += weight * bf16_to_float(row[i]);
}

FANFOLD_VECTORIZED
void add_bf16(const uint16_t* row, int64_t columns, float* sum) {
  for (int64_t i = 0; i < columns; ++i) sum[i] += bf16_to_float(row[i]);
}

FANFOLD_VECTORIZED
void widen_bf16(const uint16_t* row, int64_t columns, float* sum) {
  for (int64_t i = 0; i < columns; ++i) sum[i] = bf16_to_float(row[i]);
}

FANFOLD_VECTORIZED
void round_to_bf16(const float* sum, int64_t columns, uint16_t* row) {
  for (int64_t i = 0; i < columns; ++i) row[i] = round_one_to_bf16(sum[i]);
}

bool encode_logfmt_row(const float* values, int64_t hidden, std::byte* row) {
  const auto codable = [](float value) { return std::fabs(value) < kLogFmtLimit; };
  if (!std::all_of(values, values + hidden, codable)) return false;
  auto* ranges = reinterpret_cast<uint16_t*>(row);
  BitWriter writer{reinterpret_cast<uint8_t*>(row) + blocks_of(hidden) * 4};
  for (int64_t begin = 0; begin < hidden; begin += kBlockColumns) {
    const int64_t columns = std::min<int64_t>(kBlockColumns, hidden - begin);
    const LogRange range = log_range(values + begin, columns);
    *ranges++ = range.low;
    *ranges++ = range.high;
    for (int64_t i = 0; i < columns; ++i) writer.put(logfmt_code(values[begin + i], range));
  }
  writer.flush();
  return true;
}

void add_logfmt_row(const std::byte* row, int64_t hidden, float* sum) {
  const auto* ranges = reinterpret_cast<const uint16_t*>(row);
  BitReader reader{reinterpret_cast<const uint8_t*>(row) + blocks_of(hidden) * 4};
  for (int64_t begin = 0; begin < hidden; begin += kBlockColumns) {
    const int64_t columns = std::min<int64_t>(kBlockColumns, hidden - begin);
    const LogRange range{ranges[0], ranges[1]};
    ranges += 2;
    for (int64_t i = 0; i < columns; ++i) {
      const uint32_t code = reader.read();
      const uint32_t position = code & 0x1ffu;
      if (position == 0) continue;
      const float magnitude =
          std::exp2(range.low_value() + static_cast<float>(position - 1) * range.step());
      sum[begin + i] += (code & 0x200u) != 0 ? -magnitude : magnitude;
    }
  }
}

}  // namespace fanfold
