// Sums of bf16 rows, in the order and with the rounding that every backend must reproduce.
#pragma once

#include <cstdint>
#include <span>

namespace fanfold {

struct ReduceTerm {
  const uint16_t* row;
  float weight;
};

// out = bf16(start + weight_0 * row_0 + weight_1 * row_1 + ...), column by column, in fp32: every
// product is rounded, then added, in order. `start` is 0, or the bias rows added in order.
//
// `next` are the terms of the call that follows: their rows, which lie anywhere, are fetched from
// memory meanwhile.
void reduce_bf16(std::span<const ReduceTerm> terms, std::span<const uint16_t* const> bias,
                 int64_t columns, uint16_t* out, std::span<const ReduceTerm> next = {});

}  // namespace fanfold
