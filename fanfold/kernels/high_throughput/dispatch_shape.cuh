// What the two roles of dispatch share: how a row lies in its slot, and what a warp notes of the
// rows in its ring.
//
// A slot holds the row, its scales, a word for each of its choices (expert-major the place there,
// token-major the expert) and their weights, and is sent whole: rows that fill whole lines of 128
// bytes cross the link fastest (docs/decisions/high-throughput-kernels.md). In place the row goes
// straight to its place on each rank, expert-major to the first of them, and only what is beside it
// through the ring (docs/decisions/dispatch-in-place.md).
//
// Constants: kRowBytes, kScaleWords, kExpertMajor, kInPlace, kNewRouting (the plan is new: what is
// told of the rows is kept for later calls), kWeighted, kRingRowBytes (of what goes through the
// ring), kShortTokens (that go in short batches).
#pragma once

#include "high_throughput/row_ring.cuh"

namespace fanfold {

inline constexpr bool kHasLanes = kExpertMajor != 0 || kNewRouting != 0;
inline constexpr int kScalesAt = kRowBytes;
inline constexpr int kLanesAt = kScalesAt + kScaleWords * 4;
inline constexpr int kWeightsAt = kLanesAt + (kHasLanes ? kTopK * 4 : 0);
inline constexpr int kUsedBytes = kWeightsAt + (kWeighted != 0 ? kTopK * 4 : 0);
inline constexpr int kExtraWords = (kUsedBytes - kRowBytes) / 4;
static_assert(kRowBytes % kRowAlignment == 0);
inline constexpr int kSentAt = kInPlace != 0 ? kRowBytes : 0;
// Through the ring. In place there may be nothing, and slots are of one line all the same.
inline constexpr int kSentBytes = align_up(kUsedBytes - kSentAt, kAreaAlignment);
static_assert(kRingRowBytes == (kSentBytes > 0 ? kSentBytes : kAreaAlignment));
// In place. Expert-major, where rows have landed is told, as each may have several places;
// token-major, the reader has nothing to do with rows that have come.
inline constexpr bool kTellsLandings = kInPlace != 0 && kExpertMajor != 0;
inline constexpr bool kStaysInPlace = kInPlace != 0 && kExpertMajor == 0;
static_assert(kSlotBytes == align_up(kSentAt + kRingRowBytes, kAreaAlignment));
static_assert(kWeighted == 0 || kHasLanes);
static_assert(0 <= kShortTokens && kShortTokens <= kMostShortTokens);

// Word k of those that travel beside a row in a slot.
__device__ __forceinline__ uint32_t lane_word(const unsigned char* bytes, int k) {
  return reinterpret_cast<const uint32_t*>(bytes + kLanesAt)[k];
}

// A row that has come.
struct Arrival {
  int32_t source;
  int32_t token;
  int32_t row;   // token-major
  int32_t lies;  // the row of the results where it is already; -1: none
};

// What is noted of a row in the ring for when it is there, and sent.
struct SenderNote {
  uint32_t to;   // a bit for each rank, this one, too
  int32_t at;    // row of the peers' rings
  int32_t slot;  // of those rings, if this is the last row of its batch; else -1
  uint32_t use;  // of that slot
  // Of the batch, for each rank, with its last row; where rows stay in place with each.
  uint64_t words[kRanks];
};
struct ReceiverNote {
  Arrival row;
  int32_t slot;   // to be given back, if this is the last row of its batch; else -1
  uint32_t turn;  // of that slot
};
union Note {
  SenderNote sent;
  ReceiverNote received;
};

struct DispatchShared {
  RowRingShared rings[kWarps];
  Note notes[kWarps][kSlots];
  Participants participants;
  int32_t prefix[kRanks];  // rows of earlier sources
  int32_t offsets[kLocalExperts + 2];
};

// Both roles of a warp.
struct DispatchWarp {
  const HighThroughputDispatchArgs& args;
  const DispatchShared& cta;
  const Call& call;
  RowRingShared& ring;
  Note* notes;

  __device__ DispatchBatches batches(int source) const {
    return {cta.participants.tokens[source], kShortTokens};
  }

  // Row `at` of what `source` sends to `owner`.
  __device__ unsigned char* ring_row(int owner, int source, int at) const {
    const int64_t row = int64_t{source} * args.call.slots * kBatchTokens + at;
    return call.at<unsigned char>(owner, args.call.at.ring) + row * kRingRowBytes;
  }

  // Row `row` of the results of a dispatch in place.
  __device__ unsigned char* result_row(int owner, uint32_t row) const {
    return call.at<unsigned char>(owner, args.call.at.results) + int64_t{row} * kRowBytes;
  }
  // The word that says where row `at` of those in the ring has landed.
  __device__ uint64_t* landing(int owner, int source, int at) const {
    return call.ready(owner, source, kLandingsAt + at);
  }

  __device__ void keep_batch(int source, int batch, const BatchWord& word) const {
    if (kNewRouting != 0) args.batches[source * args.batch_stride + batch] = word.encode();
  }

  // Asks for a row of this rank's own, with all that travels beside it.
  __device__ void load_own(int slot, int token) const {
    ArrivalBarrier* full = &ring.full[slot];
    unsigned char* to = ring.slots[slot];
    if (call.lane == 0) {
      expect(full, kRowBytes);
      bulk_load(to, args.x + int64_t{token} * kRowBytes, kRowBytes, full);
    }
    for (int word = call.lane; word < kExtraWords; word += kWarpLanes)
      copy_word_async(to + kRowBytes + word * 4, extra(token, word));
    arrive_when_copied(full);
  }

 private:
  __device__ const void* extra(int token, int word) const {
    if (word < kScaleWords)
      return args.scales + token * args.scale_token_stride + word * args.scale_word_stride;
    word -= kScaleWords;
    if (kHasLanes && word < kTopK) return args.lanes + int64_t{token} * kTopK + word;
    return args.weights + int64_t{token} * kTopK + word - kTopK;
  }
};

}  // namespace fanfold
