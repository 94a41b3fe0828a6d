#include "host/local_sums.h"

#include <algorithm>
#include <cstring>

#include "host/routes.h"

namespace fanfold {

LocalSums::Columns LocalSums::columns_of(int32_t piece) const {
  const int64_t wide = layout_.record.piece_bytes / 2;
  const int64_t begin = piece * wide;
  return Columns{begin, std::min(wide, outputs_.hidden - begin)};
}

void LocalSums::write(int64_t n, int32_t piece, uint16_t* row) {
  if (!has_columns()) return;
  const Columns columns = columns_of(piece);
  const uint16_t* y = outputs_.y + columns.begin;
  if (!outputs_.expert_major) {
    std::memcpy(row, y + n * outputs_.hidden, static_cast<size_t>(columns.count) * sizeof *row);
    return;
  }
  gather(n, y, terms_);
  // The row that is probably written next. If rows have several pieces, the next piece of this row
  // comes next instead.
  next_terms_.clear();
  if (layout_.pieces == 1 && n + 1 < plan_.received) gather(n + 1, y, next_terms_);
  reduce_bf16(terms_, {}, columns.count, row, next_terms_);
}

// Collects the outputs, in `y`, whose sum is row n.
void LocalSums::gather(int64_t n, const uint16_t* y, std::vector<ReduceTerm>& terms) const {
  const int32_t* rows = plan_.rows_of + n * plan_.top_k;
  terms.clear();
  for (int32_t k = 0; k < plan_.top_k; ++k) {
    if (rows[k] < 0 || repeated(rows, k)) continue;
    const float weight = outputs_.row_weights == nullptr ? 1.0f : outputs_.row_weights[rows[k]];
    terms.push_back(ReduceTerm{y + int64_t{rows[k]} * outputs_.hidden, weight});
  }
}

float LocalSums::topk_weight(int64_t n, int32_t k) const {
  const int64_t place = n * plan_.top_k + k;
  if (!outputs_.expert_major) return outputs_.topk_weights[place];
  const int32_t row = plan_.rows_of[place];
  return row < 0 ? 0.0f : outputs_.topk_weights[row];
}

}  // namespace fanfold
