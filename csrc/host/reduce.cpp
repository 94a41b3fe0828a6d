#include "host/reduce.h"

#include <algorithm>
#include <array>

#include "host/numeric.h"
#include "host/vectorized.h"

namespace fanfold {
namespace {

// The sums of this many columns stay in the first-level cache while the rows pass by.
constexpr int64_t kColumns = 512;
// Rows added in one pass over the sums: fewer loads and stores of them, in the same order.
constexpr size_t kRows = 4;

FANFOLD_VECTORIZED
void add_four(const ReduceTerm* terms, int64_t begin, int64_t count, float* sum) {
  const uint16_t* a = terms[0].row + begin;
  const uint16_t* b = terms[1].row + begin;
  const uint16_t* c = terms[2].row + begin;
  const uint16_t* d = terms[3].row + begin;
  const float wa = terms[0].weight, wb = terms[1].weight, wc = terms[2].weight,
              wd = terms[3].weight;
  for (int64_t i = 0; i < count; ++i) {
    float value = sum[i] + wa * bf16_to_float(a[i]);
    value += wb * bf16_to_float(b[i]);
    value += wc * bf16_to_float(c[i]);
    sum[i] = value + wd * bf16_to_float(d[i]);
  }
}

void add_all(std::span<const ReduceTerm> terms, int64_t begin, int64_t count, float* sum) {
  size_t done = 0;
  for (; done + kRows <= terms.size(); done += kRows) add_four(&terms[done], begin, count, sum);
  for (const ReduceTerm& term : terms.subspan(done)) {
    add_weighted_bf16(term.row + begin, term.weight, count, sum);
  }
}

}  // namespace

void reduce_bf16(std::span<const ReduceTerm> terms, std::span<const uint16_t* const> bias,
                 int64_t columns, uint16_t* out) {
  std::array<float, kColumns> sum;
  for (int64_t begin = 0; begin < columns; begin += kColumns) {
    const int64_t count = std::min(kColumns, columns - begin);
    if (bias.empty()) {
      std::fill_n(sum.data(), count, 0.0f);
    } else {
      widen_bf16(bias[0] + begin, count, sum.data());
      for (const uint16_t* row : bias.subspan(1)) add_bf16(row + begin, count, sum.data());
    }
    add_all(terms, begin, count, sum.data());
    round_to_bf16(sum.data(), count, out + begin);
  }
}

}  // namespace fanfold
