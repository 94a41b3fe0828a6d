// Sums of bf16 rows, in the order and with the rounding that every backend must reproduce.
#pragma once

#include <cstdint>
#include <span>

namespace fanfold {

struct ReduceTerm {
  const uint16_t* row;
  float weight;
};

// out = bf16(start + weight_0 * row_0 + weight_1 * row_1 + ...), column by column, in fp32. Rounds
// every product, then adds it, in order. `start` is 0, or the sum of the bias rows in order.
//
// Prefetches the rows of `next`, the terms of the following call, which may lie anywhere.
void reduce_bf16(std::span<const ReduceTerm> terms, std::span<const uint16_t* const> bias,
                 int64_t columns, uint16_t* out, std::span<const ReduceTerm> next = {});

}  // namespace fanfold
