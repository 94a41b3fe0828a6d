// What kernels of all modes report to the host in the same words.
#pragma once

#include "layout/types.h"

namespace fanfold {

// A top-k entry that is no expert: its place in its token's row << 24 | its value in 24 bits, where
// the ends of their range stand for whatever is beyond.
FANFOLD_HD constexpr int32_t bad_entry(int32_t place, int64_t value) {
  constexpr int64_t kLeast = -0x800000, kMost = 0x7fffff;
  const int64_t clipped = value < kLeast ? kLeast : value > kMost ? kMost : value;
  const auto word =
      static_cast<uint32_t>(place) << 24 | (static_cast<uint32_t>(clipped) & 0xffffffu);
  return static_cast<int32_t>(word);
}

enum class ReportKind : uint32_t {
  // Low latency: first is the calls that the peer has acknowledged, if second says that this was
  // awaited. High throughput: first is what stands where the peer was to write.
  kTimeout = 0,
  kIndex = 1,  // first: the token; second: `bad_entry`
  kRefused = 2,
  kDisagreement = 3,
  kOtherCall = 4,  // low latency: 1 + the kind of the peer's call, and its number
  kCapacity = 4    // high throughput: the row, and the capacity
};
inline constexpr int32_t kReportKinds = 5;  // of either mode

// What a kernel has found wrong, for the host to raise. One place of each kind, in host memory.
struct alignas(16) Report {
  uint32_t call;  // 1 + which call, | peer << 8; 0: nothing to report
  uint32_t epoch;
  int32_t first;  // what these two say depends on the kind
  int32_t second;
};

// `Report::call`: `which` is the kind of call, or the phase.
FANFOLD_HD constexpr uint32_t reported_call(uint32_t which, int32_t peer) {
  return (1u + which) | (static_cast<uint32_t>(peer) << 8);
}

}  // namespace fanfold
