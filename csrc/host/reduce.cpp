#include "host/reduce.h"

#include <algorithm>
#include <array>
#include <utility>

#include "host/numeric.h"
#include "host/vectorized.h"

namespace fanfold {
namespace {

// The sums of this many columns stay in the first-level cache while the rows are added.
constexpr int64_t kColumns = 512;
// The start of sums without a bias: reading zeros costs less than writing them first.
constexpr std::array<float, kColumns> kZeros{};
// Up to four rows are added in one pass over the sums, in order: fewer loads and stores of them.
constexpr size_t kRows = 4;
// Columns of a row in a cache line: the step of the prefetches.
constexpr int64_t kLine = 64 / sizeof(uint16_t);

using Terms = std::span<const ReduceTerm>;

Terms rows_from(Terms terms, size_t first) {
  return first < terms.size() ? terms.subspan(first, std::min(kRows, terms.size() - first))
                              : Terms{};
}

// sum = from + the `kCount` rows of `terms`, at columns [begin, begin + count). Meanwhile
// prefetches the same columns of the rows of `next`, so that their latency overlaps with the
// arithmetic.
template <size_t kCount>
inline __attribute__((always_inline)) void add_rows(Terms terms, Terms next, int64_t begin,
                                                    int64_t count, const float* from, float* sum) {
  std::array<const uint16_t*, kCount> rows;
  std::array<float, kCount> weights;
  for (size_t row = 0; row < kCount; ++row) {
    rows[row] = terms[row].row + begin;
    weights[row] = terms[row].weight;
  }
  const auto add = [&](int64_t i) __attribute__((always_inline)) {
    float total = from[i];
    for (size_t row = 0; row < kCount; ++row) total += weights[row] * bf16_to_float(rows[row][i]);
    sum[i] = total;
  };
  int64_t line = 0;
  for (; line + kLine <= count; line += kLine) {
    for (const ReduceTerm& term : next) __builtin_prefetch(term.row + begin + line);
    for (int64_t i = line; i < line + kLine; ++i) add(i);
  }
  for (int64_t i = line; i < count; ++i) add(i);
}

FANFOLD_VECTORIZED
void add_up_to_four(Terms terms, Terms next, int64_t begin, int64_t count, const float* from,
                    float* sum) {
  switch (terms.size()) {
    case 1:
      return add_rows<1>(terms, next, begin, count, from, sum);
    case 2:
      return add_rows<2>(terms, next, begin, count, from, sum);
    case 3:
      return add_rows<3>(terms, next, begin, count, from, sum);
    default:
      return add_rows<4>(terms, next, begin, count, from, sum);
  }
}

}  // namespace

void reduce_bf16(std::span<const ReduceTerm> terms, std::span<const uint16_t* const> bias,
                 int64_t columns, uint16_t* out, std::span<const ReduceTerm> next) {
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
      add_up_to_four(rows_from(terms, done), rows_from(next, done), begin, count,
                     std::exchange(from, sum.data()), sum.data());
    }
    round_to_bf16(from, count, out + begin);
  }
}

}  // namespace fanfold
