// Compares arithmetic on rows with tests/core/reference.hpp, bit for bit if the contract is
// bitwise.
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "check.hpp"
#include "host/numeric.h"
#include "host/reduce.h"
#include "layout/row.h"
#include "ranks.hpp"
#include "reference.hpp"

using namespace fanfold;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }

float any_float(Random& random) {
  return std::bit_cast<float>(static_cast<uint32_t>(random.next()));
}

// Finite bf16 numbers of all magnitudes whose square fits in a float.
std::vector<uint16_t> random_row(Random& random, size_t columns) {
  std::vector<uint16_t> row(columns);
  for (uint16_t& bits : row) {
    const auto exponent = static_cast<uint32_t>(random.between(100, 140));
    bits = static_cast<uint16_t>((random.next() & 0x807f) | exponent << 7);
    if (random.one_in(16)) bits &= 0x8000;
  }
  return row;
}

// Encodes a row as LogFMT and decodes it.
std::vector<float> through_logfmt(const std::vector<float>& values) {
  const auto hidden = static_cast<int64_t>(values.size());
  constexpr std::byte kCanary{0x5a};
  std::vector<std::byte> row(static_cast<size_t>(logfmt_row_bytes(hidden)) + 1, kCanary);
  CHECK(encode_logfmt_row(values.data(), hidden, row.data()));
  CHECK(row.back() == kCanary);
  std::vector<float> decoded(values.size(), 0.0f);
  add_logfmt_row(row.data(), hidden, decoded.data());
  return decoded;
}

bool refuses_logfmt(std::vector<float> values) {
  std::vector<std::byte> row(static_cast<size_t>(slot_bytes(256)));
  return !encode_logfmt_row(values.data(), static_cast<int64_t>(values.size()), row.data());
}

// Half a step of the code in the exponent, and what rounding the logarithm itself costs. The ends
// of the range are rounded outwards to bf16, which is 2^-7 of a number below 256 at most.
double logfmt_tolerance(double octaves, double largest_log) {
  const double step = (octaves + 2 * largest_log / 128.0) / 510.0;
  return std::exp2(step / 2 + largest_log * 0x1p-21) - 1.0;
}

}  // namespace

TEST(bf16_rounds_to_nearest_even) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const auto value = std::bit_cast<float>(high << 16 | low);
      CHECK_EQ(float_to_bf16(value), reference::bf16_of(value));
    }
  }
  Random random(2);
  for (int i = 0; i < 1000000 / kRoundsShare; ++i) {
    const float value = any_float(random);
    CHECK_EQ(float_to_bf16(value), reference::bf16_of(value));
  }
}

TEST(bf16_special_values) {
  CHECK_EQ(float_to_bf16(0.0f), 0x0000);
  CHECK_EQ(float_to_bf16(-0.0f), 0x8000);
  CHECK_EQ(float_to_bf16(kInf), 0x7f80);
  CHECK_EQ(float_to_bf16(-kInf), 0xff80);
  CHECK_EQ(float_to_bf16(FLT_MAX), 0x7f80);
  CHECK_EQ(float_to_bf16(kNan), 0x7fc0);
  CHECK_EQ(float_to_bf16(-kNan), 0x7fc0);
  // A NaN whose upper half alone would read as infinity, and one that rounding up would turn to 0.
  CHECK_EQ(float_to_bf16(std::bit_cast<float>(0x7f800001u)), 0x7fc0);
  CHECK_EQ(float_to_bf16(std::bit_cast<float>(0xffffffffu)), 0x7fc0);
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    CHECK_EQ(bits_of(bf16_to_float(code)), bits << 16);
    if (!std::isnan(bf16_to_float(code))) CHECK_EQ(float_to_bf16(bf16_to_float(code)), code);
  }
}

TEST(every_e4m3_code_round_trips) {
  for (int code = 0; code < 256; ++code) {
    const auto value = static_cast<float>(reference::e4m3_value(static_cast<uint8_t>(code)));
    if (std::isnan(value)) continue;
    CHECK_EQ(float_to_e4m3(value), code);
  }
  CHECK_EQ(float_to_e4m3(kNan), 0x7f);
  CHECK_EQ(float_to_e4m3(-kNan), 0x7f);
}

// Every pair of neighbours with their midpoint and its neighbours, in both signs.
TEST(e4m3_rounds_ties_to_even) {
  for (int code = 0; code < 0x7e; ++code) {
    const double low = reference::e4m3_value(static_cast<uint8_t>(code));
    const double high = reference::e4m3_value(static_cast<uint8_t>(code + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    CHECK_EQ(float_to_e4m3(std::nextafter(middle, 0.0f)), code);
    CHECK_EQ(float_to_e4m3(middle), code % 2 == 0 ? code : code + 1);
    CHECK_EQ(float_to_e4m3(std::nextafter(middle, 1e9f)), code + 1);
    CHECK_EQ(float_to_e4m3(-middle), 0x80 | (code % 2 == 0 ? code : code + 1));
  }
}

TEST(e4m3_saturates) {
  for (const float value : {448.0f, 448.5f, 464.0f, 465.0f, 480.0f, 1e9f, FLT_MAX, kInf}) {
    CHECK_EQ(float_to_e4m3(value), 0x7e);
    CHECK_EQ(float_to_e4m3(-value), 0xfe);
  }
}

TEST(e4m3_is_the_nearest_code) {
  // From far below the smallest subnormal to far above the largest code, 64 floats per octave and
  // the two beside each.
  for (uint32_t bits = 0x37000000u; bits < 0x45000000u; bits += 1u << 17) {
    for (const uint32_t near : {bits - 1, bits, bits + 1}) {
      const auto value = std::bit_cast<float>(near);
      CHECK_EQ(float_to_e4m3(value), reference::e4m3_of(value));
      CHECK_EQ(float_to_e4m3(-value), reference::e4m3_of(-value));
    }
  }
  Random random(3);
  for (int i = 0; i < 100000 / kRoundsShare; ++i) {
    const float value = any_float(random);
    CHECK_EQ(float_to_e4m3(value), reference::e4m3_of(value));
  }
  for (const float tiny : {0.0f, FLT_TRUE_MIN, FLT_MIN, 0x1p-12f, 0x1p-10f}) {
    CHECK_EQ(float_to_e4m3(tiny), reference::e4m3_of(tiny));
  }
}

TEST(e2m1_is_the_nearest_code) {
  for (uint8_t code = 0; code < 16; ++code) {
    const auto value = static_cast<float>(reference::e2m1_value(code));
    if (code != 8) CHECK_EQ(float_to_e2m1(value), code);
  }
  CHECK_EQ(float_to_e2m1(-0.0f), 8);
  CHECK_EQ(float_to_e2m1(kNan), 7);
  CHECK_EQ(float_to_e2m1(-kNan), 7);
  // The ties, and the floats beside them.
  for (const float tie : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 6.0f, kInf, FLT_MIN}) {
    for (const float value : {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, kInf)}) {
      CHECK_EQ(float_to_e2m1(value), reference::e2m1_of(value));
      CHECK_EQ(float_to_e2m1(-value), reference::e2m1_of(-value));
    }
  }
  Random random(5);
  for (int i = 0; i < 100000 / kRoundsShare; ++i) {
    const float value = any_float(random);
    CHECK_EQ(float_to_e2m1(value), reference::e2m1_of(value));
  }
}

TEST(nvfp4_rows_follow_the_formula) {
  Random random(6);
  for (const size_t hidden : {16u, 96u, 7168u}) {
    for (const float global : {1.0f, 537.6f, 1e-6f, 1e6f}) {
      const std::vector<uint16_t> x = random_row(random, hidden);
      std::vector<uint8_t> values(hidden / 2 + 1, 0xa5);
      std::vector<uint8_t> scales(hidden / 16 + 1, 0xa5);
      quantize_nvfp4_row(x.data(), static_cast<int64_t>(hidden), global, values.data(),
                         scales.data());
      for (size_t block = 0; block < hidden / 16; ++block) {
        float amax = 0.0f;
        for (size_t i = 0; i < 16; ++i) {
          amax = std::fmax(amax, std::fabs(bf16_to_float(x[block * 16 + i])));
        }
        const float wide =
            reference::times(global, reference::times(amax, reference::over(1.0f, 6.0f)));
        const uint8_t code = reference::e4m3_of(wide);
        CHECK_EQ(scales[block], code);
        const auto scale = static_cast<float>(reference::e4m3_value(code));
        const float factor =
            scale == 0.0f
                ? 0.0f
                : reference::over(1.0f, reference::times(scale, reference::over(1.0f, global)));
        for (size_t i = 0; i < 16; ++i) {
          const size_t column = block * 16 + i;
          const uint8_t pair = values[column / 2];
          CHECK_EQ(column % 2 == 0 ? pair & 15 : pair >> 4,
                   reference::e2m1_of(reference::times(bf16_to_float(x[column]), factor)));
        }
      }
      CHECK_EQ(values.back(), 0xa5);
      CHECK_EQ(scales.back(), 0xa5);
    }
  }
}

TEST(nvfp4_of_zeros_and_of_no_numbers) {
  std::vector<uint16_t> x(32, 0);
  x[1] = 0x8000;
  std::vector<uint8_t> values(16);
  std::vector<uint8_t> scales(2);
  const auto quantize = [&](float global) {
    quantize_nvfp4_row(x.data(), 32, global, values.data(), scales.data());
  };
  quantize(3.0f);
  CHECK_EQ(values[0], 0x80);
  CHECK_EQ(values[1], 0);
  CHECK_EQ(scales[0], 0);
  x[2] = float_to_bf16(kInf);
  x[18] = float_to_bf16(kNan);
  x[19] = float_to_bf16(-6.0f);
  quantize(1.0f);
  CHECK_EQ(scales[0], 0x7e);
  CHECK_EQ(values[1], 0x07);
  CHECK_EQ(scales[1], float_to_e4m3(1.0f));
  CHECK_EQ(values[9], 0xf7);
  for (const float global : {0.0f, -1.0f, kNan}) {
    quantize(global);
    CHECK_EQ(scales[0], 0x7f);
    CHECK_EQ(scales[1], 0x7f);
  }
}

TEST(fp8_rows_follow_the_formula) {
  Random random(4);
  for (const size_t hidden : {16u, 112u, 128u, 144u, 1024u, 7168u}) {
    for (const bool power_of_two : {false, true}) {
      const std::vector<uint16_t> x = random_row(random, hidden);
      const reference::Fp8Row expected = reference::quantize(x.data(), hidden, power_of_two);
      const auto blocks = static_cast<size_t>(blocks_of(static_cast<int64_t>(hidden)));
      std::vector<uint8_t> values(hidden + 1, 0xa5);
      std::vector<float> scales(blocks + 1, -1.0f);
      const auto rounding = power_of_two ? ScaleRounding::kPowerOfTwo : ScaleRounding::kNone;
      quantize_fp8_row(x.data(), static_cast<int64_t>(hidden), rounding, values.data(),
                       scales.data());
      for (size_t i = 0; i < hidden; ++i) CHECK_EQ(values[i], expected.values[i]);
      for (size_t i = 0; i < blocks; ++i) CHECK_EQ(scales[i], expected.scales[i]);
      CHECK_EQ(values.back(), 0xa5);
      CHECK_EQ(scales.back(), -1.0f);
    }
  }
}

TEST(fp8_of_zeros_and_of_tiny_values_uses_the_smallest_amax) {
  std::vector<uint16_t> x(32, 0);
  x[5] = float_to_bf16(1e-5f);
  std::vector<uint8_t> values(32);
  float scale = 0;
  quantize_fp8_row(x.data(), 32, ScaleRounding::kNone, values.data(), &scale);
  CHECK_EQ(scale, 1e-4f / 448.0f);
  CHECK_EQ(values[0], 0);
  CHECK_EQ(values[5], reference::e4m3_of(bf16_to_float(x[5]) * (448.0f / 1e-4f)));
}

TEST(power_of_two_scales_are_the_next_power) {
  for (int exponent = -12; exponent <= 100; ++exponent) {
    // 448 = 1.75 * 2^8, so an amax of 1.75 * 2^n has exactly a power of two for its scale.
    for (const auto& [fraction, raise] : {std::pair(1.75f, 0), {1.7578125f, 1}, {1.0f, 0}}) {
      const float amax = std::ldexp(fraction, exponent);
      const uint16_t x = float_to_bf16(amax);
      CHECK_EQ(bf16_to_float(x), amax);
      uint8_t value = 0;
      float scale = 0;
      quantize_fp8_row(&x, 1, ScaleRounding::kPowerOfTwo, &value, &scale);
      CHECK_EQ(scale, std::ldexp(1.0f, exponent - 8 + raise));
      CHECK_EQ(std::ldexp(1.0f, ue8m0_of(scale) - 127), scale);
      CHECK_EQ(value, reference::e4m3_of(amax / scale));
    }
  }
}

TEST(weighted_sums_round_twice) {
  Random random(5);
  for (const size_t columns : {1u, 7u, 8u, 16u, 31u, 136u, 1024u}) {
    std::vector<float> sum(columns, 0.0f);
    std::vector<float> expected(columns, 0.0f);
    for (int term = 0; term < 20; ++term) {
      const std::vector<uint16_t> row = random_row(random, columns);
      const float weight = random.real(-1.0f, 1.0f);
      add_weighted_bf16(row.data(), weight, static_cast<int64_t>(columns), sum.data());
      for (size_t i = 0; i < columns; ++i) {
        const float product = reference::times(weight, reference::bf16_value(row[i]));
        expected[i] = reference::plus(expected[i], product);
      }
    }
    for (size_t i = 0; i < columns; ++i) CHECK_EQ(bits_of(sum[i]), bits_of(expected[i]));
  }
}

namespace {

// Bias rows and weighted rows, and the sum of one column of them in the order of the contract.
struct Sum {
  Sum(Random& random, size_t columns, size_t rows, size_t bias_rows) : weights(rows, 1.0f) {
    for (size_t i = 0; i < rows; ++i) all.push_back(random_row(random, columns));
    for (size_t i = 0; i < bias_rows; ++i) bias.push_back(random_row(random, columns));
    if (rows < 3) return;
    for (size_t i = 0; i + 2 < rows; ++i) weights[i] = random.real(-1.0f, 1.0f);
    // Each of the last two rows cancels the sum so far, so that the rounding errors remain. They
    // differ for any other order.
    for (size_t i = rows - 2; i < rows; ++i) {
      for (size_t column = 0; column < columns; ++column) {
        all[i][column] = reference::bf16_of(-of(column, i));
      }
    }
  }

  float of(size_t column, size_t rows) const {
    float sum = bias.empty() ? 0.0f : reference::bf16_value(bias[0][column]);
    for (size_t i = 1; i < bias.size(); ++i) {
      sum = reference::plus(sum, reference::bf16_value(bias[i][column]));
    }
    for (size_t i = 0; i < rows; ++i) {
      const float value = reference::bf16_value(all[i][column]);
      sum = reference::plus(sum, reference::times(weights[i], value));
    }
    return sum;
  }

  std::vector<float> weights;
  std::vector<std::vector<uint16_t>> all;
  std::vector<std::vector<uint16_t>> bias;
};

}  // namespace

TEST(reduced_rows_are_added_in_order) {
  Random random(8);
  for (const size_t columns : {1u, 8u, 511u, 512u, 513u, 1400u}) {
    for (size_t rows = 0; rows <= 9; ++rows) {
      const Sum sum(random, columns, rows, rows % 3);
      std::vector<ReduceTerm> terms(rows);
      for (size_t i = 0; i < rows; ++i) terms[i] = {sum.all[i].data(), sum.weights[i]};
      std::vector<const uint16_t*> bias(sum.bias.size());
      for (size_t i = 0; i < bias.size(); ++i) bias[i] = sum.bias[i].data();
      std::vector<uint16_t> out(columns + 1, 0x1234);
      reduce_bf16(terms, bias, static_cast<int64_t>(columns), out.data());
      for (size_t column = 0; column < columns; ++column) {
        CHECK_EQ(out[column], reference::bf16_of(sum.of(column, rows)));
      }
      CHECK_EQ(out[columns], 0x1234);
    }
  }
}

// The product is 1 + 2^-7 + 2^-23 + 2^-30. Rounding drops the last term; a fused multiply-add would
// keep it.
TEST(products_are_not_fused_into_sums) {
  const uint16_t row = float_to_bf16(1.0f + 0x1p-7f);
  const float weight = 1.0f + 0x1p-23f;
  float sum = -1.0f;
  add_weighted_bf16(&row, weight, 1, &sum);
  CHECK_EQ(sum, reference::plus(-1.0f, reference::times(weight, 1.0f + 0x1p-7f)));
  CHECK(sum != std::fma(weight, 1.0f + 0x1p-7f, -1.0f));
}

TEST(plain_sums_and_conversions_of_rows) {
  Random random(6);
  for (const size_t columns : {1u, 9u, 24u, 1000u}) {
    const auto count = static_cast<int64_t>(columns);
    const std::vector<uint16_t> first = random_row(random, columns);
    const std::vector<uint16_t> second = random_row(random, columns);
    std::vector<float> sum(columns, kNan);
    widen_bf16(first.data(), count, sum.data());
    add_bf16(second.data(), count, sum.data());
    std::vector<uint16_t> rounded(columns);
    round_to_bf16(sum.data(), count, rounded.data());
    for (size_t i = 0; i < columns; ++i) {
      const float expected =
          reference::plus(reference::bf16_value(first[i]), reference::bf16_value(second[i]));
      CHECK_EQ(bits_of(sum[i]), bits_of(expected));
      CHECK_EQ(rounded[i], reference::bf16_of(expected));
    }
  }
}

TEST(logfmt_keeps_values_within_half_a_step) {
  Random random(7);
  for (const int octaves : {1, 4, 12, 30}) {
    for (const int top : {-100, -20, 0, 1, 60, 126}) {
      if (top - octaves < -125) continue;
      std::vector<float> values(300);
      for (float& value : values) {
        const float log = random.real(static_cast<float>(top - octaves), static_cast<float>(top));
        value = std::exp2(log) * (random.one_in(2) ? -1.0f : 1.0f);
      }
      const std::vector<float> decoded = through_logfmt(values);
      const double tolerance = logfmt_tolerance(octaves, std::max(std::abs(top), octaves));
      for (size_t i = 0; i < values.size(); ++i) {
        const double error = std::fabs(static_cast<double>(decoded[i]) - values[i]);
        CHECK(error <= tolerance * std::fabs(static_cast<double>(values[i])));
      }
    }
  }
}

TEST(logfmt_error_is_about_one_percent_over_a_usual_range) {
  CHECK(logfmt_tolerance(12, 12) < 0.01);
  CHECK(logfmt_tolerance(32, 32) < 0.025);
}

TEST(logfmt_keeps_zeros_and_signs) {
  std::vector<float> values(256, 0.0f);
  CHECK_EQ(through_logfmt(values), values);
  for (size_t i = 128; i < 256; i += 3) values[i] = i % 2 == 0 ? 3.0f : -0.25f;
  const std::vector<float> decoded = through_logfmt(values);
  for (size_t i = 0; i < values.size(); ++i) {
    CHECK_EQ(decoded[i] == 0.0f, values[i] == 0.0f);
    CHECK_EQ(decoded[i] < 0.0f, values[i] < 0.0f);
  }
}

TEST(logfmt_of_equal_magnitudes) {
  // A power of two is its own logarithm and stays exact; others lie between two bf16 logarithms.
  for (const float magnitude : {1.0f, 0x1p-100f, 0x1p60f}) {
    const std::vector<float> values{magnitude, -magnitude, magnitude, 0.0f};
    CHECK_EQ(through_logfmt(values), values);
  }
  for (const float magnitude : {3.0f, 1e-30f, 1e30f}) {
    const std::vector<float> values(130, -magnitude);
    for (const float value : through_logfmt(values)) {
      CHECK(std::fabs(value + magnitude) <= magnitude * logfmt_tolerance(0, 128));
    }
  }
}

TEST(logfmt_raises_what_is_below_its_range) {
  // The range ends 32 octaves below the largest value. Smaller values get its lowest code.
  const std::vector<float> decoded = through_logfmt({1.0f, 0x1p-40f, -0x1p-100f, FLT_TRUE_MIN});
  CHECK_EQ(decoded[0], 1.0f);
  CHECK_EQ(decoded[1], 0x1p-32f);
  CHECK_EQ(decoded[2], -0x1p-32f);
  CHECK_EQ(decoded[3], 0x1p-32f);
}

TEST(logfmt_of_subnormals) {
  const std::vector<float> values{FLT_TRUE_MIN, -FLT_TRUE_MIN, FLT_TRUE_MIN};
  CHECK_EQ(through_logfmt(values), values);
}

TEST(logfmt_stays_finite_or_refuses) {
  // The logarithm of the largest floats rounds up to 128, whose power is infinite.
  for (const float huge : {0x1p126f, 0x1.8p126f, 0x1p127f, 0x1.8p127f, 0x1.fp127f, FLT_MAX}) {
    for (const float low : {huge, 1.0f, huge / 1e9f}) {
      if (refuses_logfmt({huge, low, -huge})) continue;
      for (const float value : through_logfmt({huge, low, -huge})) CHECK(std::isfinite(value));
    }
  }
  CHECK(!refuses_logfmt({0x1p126f, 1.0f}));
}

TEST(logfmt_refuses_what_is_not_finite) {
  for (const float bad : {kInf, -kInf, kNan}) {
    std::vector<float> values(200, 1.0f);
    for (const size_t place : {size_t{0}, size_t{127}, size_t{199}}) {
      values[place] = bad;
      CHECK(refuses_logfmt(values));
      values[place] = 1.0f;
    }
    CHECK(!refuses_logfmt(values));
  }
}

TEST(logfmt_adds_to_what_is_there) {
  const std::vector<float> values{2.0f, -4.0f, 0.0f};
  std::vector<std::byte> row(static_cast<size_t>(logfmt_row_bytes(3)));
  CHECK(encode_logfmt_row(values.data(), 3, row.data()));
  std::vector<float> sum{1.0f, 1.0f, 1.0f};
  add_logfmt_row(row.data(), 3, sum.data());
  CHECK_EQ(sum, (std::vector<float>{3.0f, -3.0f, 1.0f}));
}
