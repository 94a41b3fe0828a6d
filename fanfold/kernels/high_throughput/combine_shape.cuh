// What the parts of combine share. Constants: kRowBytes, kSlotBytes (of a row in a ring),
// kExpertMajor, kWeighted (the outputs), kLanes (numbers of the choices travel beside the rows),
// kTeamWarps (1, 2, 4 or 8), kLag (batches between sending and folding).
#pragma once

#include "constants.h"

namespace fanfold {
// Rows in a sum: a token's experts here, or the ranks that have some.
inline constexpr int kMostTerms = kExpertMajor != 0 && kTopK > kRanks ? kTopK : kRanks;
}  // namespace fanfold

#include "high_throughput/row_sum.cuh"

namespace fanfold {

inline constexpr int kTeams = kWarps / kTeamWarps;
inline constexpr int kLanesAt = kRowBytes;
static_assert(kWarps % kTeamWarps == 0 && kTeams <= 16 && kBatchTokens % kTeamWarps == 0);
static_assert(kSlotBytes == align_up(kRowBytes + (kLanes != 0 ? kTopK * 4 : 0), kAreaAlignment));
static_assert(kWeighted == 0 || kExpertMajor != 0);

// A rank's own token-major rows are folded where they lie.
inline constexpr int kSources = kExpertMajor != 0 ? kRanks : kRanks - 1;
inline constexpr int kJobs = kSources + 1;

struct Job {
  enum class Kind : int32_t { kNone, kSend, kFold };

  Kind kind;
  int32_t source;  // whose tokens they are
  int32_t batch;
  int32_t slot;    // of the ring
  uint32_t turn;   // of the slot
  BatchWord rows;  // of a send
};

struct CombineShared {
  SumTable tables[kTeams][2];
  Job jobs[kWarps][2];  // each warp's own copy
  uint32_t tickets[kTeams][2];
  Participants participants;
  int32_t prefix[kRanks];

  __device__ int batches(int source) const {
    return (participants.tokens[source] + kBatchTokens - 1) / kBatchTokens;
  }
  __device__ unsigned char* ring_row(const Call& call, int owner, int writer, int slot,
                                     int place) const {
    const int64_t row = (int64_t{writer} * call.args.slots + slot) * kBatchTokens + place;
    return call.at<unsigned char>(owner, call.args.at.ring) + row * kSlotBytes;
  }
};

}  // namespace fanfold
