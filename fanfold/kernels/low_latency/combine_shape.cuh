// What the two halves of combine share. Constants of the kernel: kLate (routing comes with
// combine), kLogFmt (rows travel as LogFMT-10 where they can), kAwaitsSignals (it is a send half,
// on few SMs, of which each output is read once its signal says that it is there), kBiased (sums
// begin with biases, of this rank alone).
#pragma once

#include "device/numbers.cuh"
#include "low_latency/headers.cuh"

namespace fanfold {

inline constexpr int kUnits = kHidden * 2 / kUnitBytes;
inline constexpr int kSegments = (kUnits + kSegmentUnits - 1) / kSegmentUnits;
inline constexpr int kColumnsOfUnit = kUnitBytes / 2;

using CombineCall = Call<CallKind::kCombine>;
using CombineDeadline = Deadline<CombineCall>;

template <>
struct RowsOf<CallKind::kCombine> {
  static constexpr int kBytes = kUnits * kUnitBytes;
  static constexpr HostWord kWord = kLate ? HostWord::kCombineRows : HostWord::kCombine;
};

__device__ __forceinline__ bool has_unit(int part, int lane) {
  return kUnits % kSegmentUnits == 0 || part * kSegmentUnits + lane < kUnits;
}

// Whether the dispatch whose rows come back was aborted. A rank that refuses may not know which it
// was.
__device__ __forceinline__ bool of_aborted_dispatch(const CombineArgs& args) {
  if constexpr (kLate) {
    return args.aborted != nullptr && *args.aborted == kAbortedLate;
  } else {
    if (args.table == nullptr) return false;
    const TableLayout table{kRanks, kTopK, args.call.max_tokens};
    return *reinterpret_cast<const int32_t*>(args.table + table.tokens_offset()) == kAborted;
  }
}

static_assert(kLate || !kAwaitsSignals);

// Rows that a CTA looks up, then sends, together.
inline constexpr int kPassRows = kAwaitsSignals ? kWarps : 8;

// One output that goes into a sum.
struct Term {
  const uint4* row;
  float weight;
};

struct alignas(16) CombineShared {
  int32_t fan[kPassRows];
  Term terms[kPassRows][kTopK];
  int32_t tokens[kRanks];                        // of each source
  TokenSet tokens_of[kLate ? kExperts : 1];      // late routing
  uint32_t stage[kLogFmt ? kWarps : 1][2 * 40];  // coded columns of a warp's two blocks
};
static_assert(sizeof(CombineShared) <= 48 * 1024);

}  // namespace fanfold
