// What the parts of combine share. Constants: kRowBytes, kSlotBytes (of a row in a ring),
// kExpertMajor, kWeighted (the outputs), kTopKWeights (a number for each top-k entry travels beside
// a row), kBiased (sums begin with biases), kSlices (of columns, in a row), kSliceUnits (of each
// but the last), kPieces (in the ring of a warp), kPartTokens (of a fold where sending ends),
// kShortTokens (of the dispatch), kSharedBytes (that the launch brings). All warps but the last are
// workers.
#pragma once

#include "device/bulk.cuh"
#include "high_throughput/call.cuh"

namespace fanfold {

inline constexpr int kUnitBytes = 16;
inline constexpr int kUnits = kRowBytes / kUnitBytes;
inline constexpr int kSliceBytes = kSliceUnits * kUnitBytes;
inline constexpr int kLaneUnits = (kSliceUnits + kWarpLanes - 1) / kWarpLanes;
inline constexpr int kWorkers = kWarps - 1;
inline constexpr int kTopKWordsBytes = align_up(kTopK * 4, kUnitBytes);
static_assert(kRowBytes % kUnitBytes == 0 && kPieces >= 2);
static_assert((kSlices - 1) * kSliceUnits < kUnits && kUnits <= kSlices * kSliceUnits);
static_assert(kSlices <= kMostSlices && kWorkers >= 1 && kWorkers <= kWarpLanes);
static_assert(kSlotBytes ==
              align_up(kRowBytes + (kTopKWeights != 0 ? kTopK * 4 : 0), kAreaAlignment));
static_assert(kWeighted == 0 || kExpertMajor != 0);

// With one rank and without biases, the sum over a token's experts is its result: nothing goes
// through a ring, and nothing is folded.
inline constexpr bool kSumsAreResults = kExpertMajor != 0 && kRanks == 1 && kBiased == 0;
// A rank's own token-major rows are folded where they lie.
inline constexpr int kSources = kExpertMajor != 0 ? kRanks : kRanks - 1;
inline constexpr int kParts = kBatchTokens / kPartTokens;
static_assert(kBatchTokens % kPartTokens == 0);
// Rows in a sum: a token's experts here, or the biases and the ranks that have some.
inline constexpr int kMostBiases = 2;
inline constexpr int kFoldRanks = kHasFewRanks || kRanks < kTopK ? kRanks : kTopK;
inline constexpr int kFoldTerms = kFoldRanks + (kBiased != 0 ? kMostBiases : 0);
inline constexpr int kMostTerms = kExpertMajor != 0 && kTopK > kFoldTerms ? kTopK : kFoldTerms;
inline constexpr int kMostEntries = kBatchTokens * kMostTerms;

// One slice of the rows of a batch, or of some of them.
struct Job {
  enum class Kind : int32_t { kNone, kSend, kFold };

  Kind kind;
  int32_t source;  // whose tokens they are
  int32_t batch;
  int32_t begin, end;  // places in the batch
  int32_t slice;
  int32_t slot;       // of the ring
  uint32_t turn;      // of the slot
  bool is_signalled;  // whether others may wait for it
};

// One row on its way into a sum. Those of a sum follow each other.
struct alignas(8) Entry {
  enum class Kind : uint32_t {
    kRow,   // of the outputs, or folded: of this rank's ring
    kOwn,   // folded: of the outputs
    kBias,  // folded: of that bias
    kZeros  // of a sum of nothing, or for what was dropped
  };

  uint32_t word;  // row | place of the token in its batch | whether it is its sum's last | kind
  float weight;

  Entry() = default;
  __device__ Entry(Kind kind, uint32_t row, int place, bool last, float w)
      : word(row | (static_cast<uint32_t>(place) << kPlaceAt) | (uint32_t{last} << kLastAt) |
             (static_cast<uint32_t>(kind) << kKindAt)),
        weight(w) {}

  __device__ void make_last() { word |= 1u << kLastAt; }

  __device__ Kind kind() const { return static_cast<Kind>(word >> kKindAt); }
  __device__ bool is_last() const { return (word >> kLastAt & 1u) != 0; }
  __device__ int place() const { return static_cast<int>(word >> kPlaceAt) & (kBatchTokens - 1); }
  __device__ int64_t row() const { return word & ((1u << kPlaceAt) - 1); }

  // Folded: of the ring that the network writes.
  static constexpr uint32_t kReceived = 1u << (PlaceWord::kRowBits - 1);
  static constexpr int kPlaceAt = PlaceWord::kRowBits, kLastAt = kPlaceAt + 3,
                       kKindAt = kLastAt + 1;
};
static_assert(kBatchTokens == 8);

// Across hosts: the tokens of the batch that was sent, of which there are rows.
template <bool kAcross>
class SentTokens {
 public:
  __device__ void keep(uint32_t tokens) { tokens_ = tokens; }
  __device__ uint32_t kept() const { return tokens_; }

 private:
  uint32_t tokens_;
};
template <>
class SentTokens<false> {
 public:
  __device__ void keep(uint32_t) {}
  __device__ uint32_t kept() const { return 0; }
};

struct DoneJob : Job, SentTokens<kAcrossHosts != 0> {};

struct WorkerShared {
  alignas(128) uint4 pieces[kPieces][kLaneUnits * kWarpLanes];
  // Of this job and of the next; those behind them are read, too, ahead.
  Entry entries[2][kMostEntries + kPieces];
  DoneJob done;                      // to be signalled
  ArrivalBarrier posted, signalled;  // it is posted; the signal warp has it. A phase for each job
};

struct CombineShared {
  WorkerShared workers[kWorkers];
  Participants participants;
  int32_t prefix[kRanks];
  ArrivalBarrier ended;  // the workers: no more is posted

  __device__ int batches(int source) const {
    return (participants.tokens[source] + kBatchTokens - 1) / kBatchTokens;
  }
  __device__ int most_batches() const {
    int most = 0;
    for (int source = 0; source < kRanks; ++source) most = max(most, batches(source));
    return most;
  }
};

static_assert(sizeof(CombineShared) <= kSharedBytes);

// What lies between the slots of a ring and the next ring.
template <bool kAcross>
class GapsOfRings {
 public:
  __device__ explicit GapsOfRings(const Call& call)
      : rows_(static_cast<uint32_t>(call.args.slots) * kBatchTokens),
        bytes_(call.ring_bytes() - int64_t{rows_} * kSlotBytes) {}

  // The bytes of all gaps before a row of the rings.
  __device__ int64_t before(int64_t row) const {
    return static_cast<uint32_t>(row) / rows_ * bytes_;
  }

 private:
  uint32_t rows_;  // of a ring
  int64_t bytes_;
};
template <>
class GapsOfRings<false> {
 public:
  __device__ explicit GapsOfRings(const Call&) {}
  __device__ int64_t before(int64_t) const { return 0; }
};
using RingGaps = GapsOfRings<kAcrossHosts != 0>;

// The row of `writer` among all rings in the memory of a rank.
__device__ __forceinline__ int64_t ring_row(const Call& call, int writer, int slot, int place) {
  return (int64_t{writer} * call.args.slots + slot) * kBatchTokens + place;
}
// The offset of a row of the rings.
__device__ __forceinline__ int64_t ring_offset(const Call& call, int64_t row) {
  return call.args.at.ring + row * kSlotBytes + RingGaps(call).before(row);
}

// Where slices and the numbers of the top-k entries lie in a slot of a ring, as offsets from its
// begin. Of a rank elsewhere a slice of all rows lies together, and so do all numbers: a command
// then names several rows.
class SlotPlaces {
 public:
  __device__ explicit SlotPlaces(bool is_elsewhere) : together_(is_elsewhere) {}

  __device__ int64_t slice(int slice) const {
    return int64_t{slice} * (together() ? kBatchTokens * kSliceBytes : kSliceBytes);
  }
  // From the slice of one row to that of the next.
  __device__ int stride(int slice) const {
    return together() ? min(kSliceBytes, kRowBytes - slice * kSliceBytes) : kSlotBytes;
  }
  __device__ int64_t topk_words(int place) const {
    if (together()) return kBatchTokens * kRowBytes + place * kTopKWordsBytes;
    return int64_t{place} * kSlotBytes + kRowBytes;
  }

 private:
  __device__ bool together() const { return kAcrossHosts != 0 && together_; }

  bool together_;
};
static_assert(kTopKWeights == 0 || kRowBytes + kTopKWordsBytes <= kSlotBytes);

// The words that tell of a slice.
__device__ __forceinline__ int word_of(const Job& job) { return job.slot * kSlices + job.slice; }

// Whether a rank's rows come through a ring.
__device__ __forceinline__ bool uses_ring(const Call& call, int rank) {
  if constexpr (kSumsAreResults) return false;
  return kExpertMajor != 0 ? rank < kRanks : call.is_peer(rank);
}

}  // namespace fanfold
