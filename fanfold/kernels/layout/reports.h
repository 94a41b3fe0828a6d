// What kernels of all modes report to the host in the same words.
#pragma once

#include "layout/types.h"

namespace fanfold {

// A choice that is no expert's: its place in its token's row << 24 | its value in 24 bits, where
// the ends of their range stand for whatever is beyond.
FANFOLD_HD constexpr int32_t bad_choice(int32_t place, int64_t value) {
  constexpr int64_t kLeast = -0x800000, kMost = 0x7fffff;
  const int64_t clipped = value < kLeast ? kLeast : value > kMost ? kMost : value;
  const auto word =
      static_cast<uint32_t>(place) << 24 | (static_cast<uint32_t>(clipped) & 0xffffffu);
  return static_cast<int32_t>(word);
}

}  // namespace fanfold
