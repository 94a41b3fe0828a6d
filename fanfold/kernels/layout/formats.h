// Arguments of the kernel that quantises rows (fanfold/formats.py says what the results are).
#pragma once

#include "layout/types.h"

namespace fanfold {

struct QuantizeArgs {
  const unsigned char* x;  // [tokens][hidden] bf16, on a boundary of 16 bytes
  unsigned char* values;   // [tokens][hidden] e4m3, likewise
  uint32_t* scales;        // [tokens][blocks] float32, or [tokens][blocks / 4, rounded up] UE8M0
  int64_t tokens;
};

}  // namespace fanfold
