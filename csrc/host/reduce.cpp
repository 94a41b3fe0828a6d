#include "host/reduce.h"

#include <algorithm>
#include <array>
#include <utility>

#include "host/numeric.h"
#include "host/vectorized.h"

namespace fanfold {
namespace {

// The sums of this many columns stay in the first-level cache while the rows pass by.
constexpr int64_t kColumns = 512;
// Where sums without a bias begin: reading zeros costs less than writing them first.
constexpr std::array<float, kColumns> kZeros{};
// Up to four rows are added in one pass over the sums, in order: fewer loads and stores of them.
constexpr size_t kRows = 4;

// sum = from + the rows of `terms`, at columns [begin, begin + count).
FANFOLD_VECTORIZED
void add_up_to_four(std::span<const ReduceTerm> terms, int64_t begin, int64_t count,
                    const float* from, float* sum) {
  const auto term = [&](size_t i) -> const ReduceTerm& {
    return terms[std::min(i, terms.size() - 1)];
  };
  const uint16_t* a = term(0).row + begin;
  const uint16_t* b = term(1).row + begin;
  const uint16_t* c = term(2).row + begin;
  const uint16_t* d = term(3).row + begin;
  const float wa = term(0).weight;
  const float wb = term(1).weight;
  const float wc = term(2).weight;
  const float wd = term(3).weight;
  switch (terms.size()) {
    case 1:
      for (int64_t i = 0; i < count; ++i) sum[i] = from[i] + wa * bf16_to_float(a[i]);
      return;
    case 2:
      for (int64_t i = 0; i < count; ++i) {
        sum[i] = from[i] + wa * bf16_to_float(a[i]) + wb * bf16_to_float(b[i]);
      }
      return;
    case 3:
      for (int64_t i = 0; i < count; ++i) {
        sum[i] = from[i] + wa * bf16_to_float(a[i]) + wb * bf16_to_float(b[i]) +
                 wc * bf16_to_float(c[i]);
      }
      return;
    default:
      for (int64_t i = 0; i < count; ++i) {
        sum[i] = from[i] + wa * bf16_to_float(a[i]) + wb * bf16_to_float(b[i]) +
                 wc * bf16_to_float(c[i]) + wd * bf16_to_float(d[i]);
      }
  }
}

}  // namespace

void reduce_bf16(std::span<const ReduceTerm> terms, std::span<const uint16_t* const> bias,
                 int64_t columns, uint16_t* out) {
  std::array<float, kColumns> sum;
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t count = std::min(kColumns, columns - begin);
    const float* from = kZeros.data();
    if (!bias.empty()) {
      widen_bf16(bias[0] + begin, count, sum.data());
      for (const uint16_t* row : bias.subspan(1)) add_bf16(row + begin, count, sum.data());
      from = sum.data();
    }
    for (size_t done = 0; done < terms.size(); done += kRows) {
      const auto some = terms.subspan(done, std::min(kRows, terms.size() - done));
      add_up_to_four(some, begin, count, std::exchange(from, sum.data()), sum.data());
    }
    round_to_bf16(from, count, out + begin);
  }
}

}  // namespace fanfold
