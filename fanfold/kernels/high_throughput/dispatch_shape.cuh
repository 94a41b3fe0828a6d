// What the two roles of dispatch share: how a row lies in its slot, and the descriptors of the rows
// in a warp's ring.
//
// A slot holds the row, its scales, a word for each of its top-k entries (expert-major the place
// there, token-major the expert) and their weights, and is sent whole: rows that fill whole lines
// of 128 bytes cross the link fastest (docs/decisions/high-throughput-kernels.md). In place the row
// goes straight to its place on each rank, expert-major to the first of them, and only what is
// beside it through the ring (docs/decisions/dispatch-in-place.md).
//
// Rows that are pushed lie in the reader's ring of their source. Rows that are pulled lie in the
// source's memory, once for all readers, each of which loads them from there. On one host
// they have the room of all rings, as nothing is in those then
// (docs/high_throughput.md#push-and-pull).
//
// Constants: kRowBytes, kScaleWords, kExpertMajor, kInPlace, kPulls, kNewRouting (the plan is new:
// what is known of the rows is kept for later calls), kWeighted, kRingRowBytes (of what goes
// through the ring), kShortTokens (that go in short batches).
#pragma once

#include "high_throughput/row_ring.cuh"

namespace fanfold {

inline constexpr bool kHasTopKWords = kExpertMajor != 0 || kNewRouting != 0;
inline constexpr int kScalesAt = kRowBytes;
inline constexpr int kTopKWordsAt = kScalesAt + kScaleWords * 4;
inline constexpr int kWeightsAt = kTopKWordsAt + (kHasTopKWords ? kTopK * 4 : 0);
inline constexpr int kUsedBytes = kWeightsAt + (kWeighted != 0 ? kTopK * 4 : 0);
inline constexpr int kExtraWords = (kUsedBytes - kRowBytes) / 4;
static_assert(kRowBytes % kRowAlignment == 0);
inline constexpr int kSentAt = kInPlace != 0 ? kRowBytes : 0;
// Through the ring. In place there may be nothing, and slots are of one line all the same.
inline constexpr int kSentBytes = align_up(kUsedBytes - kSentAt, kAreaAlignment);
static_assert(kRingRowBytes == (kSentBytes > 0 ? kSentBytes : kAreaAlignment));
// In place. Expert-major, the sender sends each row's destination, as a row may have several;
// token-major, the reader has nothing to do with rows that have arrived.
inline constexpr bool kSendsDestinations = kInPlace != 0 && kExpertMajor != 0;
inline constexpr bool kStaysInPlace = kInPlace != 0 && kExpertMajor == 0;
static_assert(kSlotBytes == align_up(kSentAt + kRingRowBytes, kAreaAlignment));
static_assert(kWeighted == 0 || kHasTopKWords);
static_assert(kAcrossHosts == 0 || (kInPlace == 0 && kWarps > 1));
static_assert(kPulls == 0 || kInPlace == 0);
static_assert(0 <= kShortTokens && kShortTokens <= kMostShortTokens);

// Word k of those that travel beside a row in a slot.
__device__ __forceinline__ uint32_t topk_word(const unsigned char* bytes, int k) {
  return reinterpret_cast<const uint32_t*>(bytes + kTopKWordsAt)[k];
}

// All lanes: what lane 0 has copied for readers, and knows to be written, comes before what each
// lane signals next.
__device__ __forceinline__ void publish_copies() {
  fence_global_and_bulk();
  __syncwarp();
}

// A row that has arrived.
struct ReceivedRow {
  int32_t source;
  int32_t token;
  int32_t row;   // token-major
  int32_t lies;  // the row of the results where it is already; -1: none
};

// Describes a row in the ring for when it is there, and sent.
struct SendDescriptor {
  uint32_t to;   // a bit for each rank, this one, too; of many ranks the token
  int32_t at;    // row of the peers' rings
  int32_t slot;  // of those rings, if this is the last row of its batch; else -1
  uint32_t use;  // of that slot
  // Of the batch, for each rank, with its last row; where rows stay in place with each. Of many
  // ranks the batch's number, by which each rank's word is found in the plan.
  uint64_t words[kHasFewRanks ? kRanks : 1];
};
struct ReceiveDescriptor {
  ReceivedRow row;
  int32_t slot;   // to be given back, if this is the last row of its batch; else -1
  uint32_t turn;  // of that slot
};
union Descriptor {
  SendDescriptor sent;
  ReceiveDescriptor received;
};

struct DispatchShared {
  RowRingShared rings[kWarps];
  Descriptor descriptors[kWarps][kSlots];
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
  Descriptor* descriptors;

  __device__ DispatchBatches batches(int source) const {
    return {cta.participants.tokens[source], kShortTokens};
  }

  // ---- places in the memory of a rank, as offsets -----------------------------------------------

  // Row `at` of what `source` sends.
  __device__ int64_t ring_row(int source, int at) const {
    if constexpr (kAcrossHosts != 0)
      return args.call.at.ring + source * call.ring_bytes() + int64_t{at} * kRingRowBytes;
    const int64_t row = int64_t{source} * args.call.slots * kBatchTokens + at;
    return args.call.at.ring + row * kRingRowBytes;
  }
  // Row `row` of the results of a dispatch in place.
  __device__ int64_t result_row(uint32_t row) const {
    return args.call.at.results + int64_t{row} * kRowBytes;
  }
  // The word that says where row `at` of those in the ring has been stored in place.
  __device__ int64_t destination(int source, int at) const {
    return call.ready(source, kDestinationsAt + at);
  }

  // One lane: enqueues what `rank` gets of the row in a slot of shared memory. `row` is its place
  // among the token-major results there.
  __device__ void put_to(int rank, int slot, const SendDescriptor& row_sent, int row) const {
    if constexpr (kStaysInPlace) {
      if (row < args.result_rows)
        call.peer(rank).put_row(result_row(row), ring.slots[slot], kRowBytes);
    }
    if constexpr (kSendsDestinations) put_first(rank, slot, row_sent);
    if constexpr (kSentBytes > 0) {
      const int64_t to = ring_row(call.rank_at(rank), row_sent.at);
      call.rows_peer(rank).put_row(to, ring.slots[slot] + kSentAt, kSentBytes);
    }
  }

  // Row `at` of those that a source keeps for its readers, in its own memory.
  __device__ int64_t kept_row(int at) const {
    return args.call.at.ring + int64_t{at} * kRingRowBytes;
  }
  // One lane: enqueues the copy of the row in a slot of shared memory that readers load.
  __device__ void keep_for_readers(int slot, int at) const {
    call.peer(args.call.rank).put_row(kept_row(at), ring.slots[slot], kSentBytes);
  }
  // One lane: asks for row `at` of those that `source` keeps.
  __device__ void read_from(int source, int at, int slot) const {
    call.peer(source).read_row(ring.slots[slot], kept_row(at), kSentBytes, &ring.full[slot]);
  }

  // The rows of a batch in the send areas of ranks elsewhere, and its word: for each lane's `rank`
  // if that is one. By whole warps.
  __device__ void push_batch(bool pushes, int rank, int slot, uint64_t word) const {
    const int to = pushes ? rank : 0;
    const int reader = call.rank_at(to);
    push_rows(call, pushes, to, ring_row(reader, slot * kBatchTokens), kRingRowBytes,
              BatchWord::decode(word).tokens, call.ready(reader, slot), word);
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
  // Expert-major: sends the row to the first of its places on `rank`, and writes which it is.
  __device__ void put_first(int rank, int slot, const SendDescriptor& row_sent) const {
    const unsigned char* bytes = ring.slots[slot];
    DestinationWord destination{row_sent.use, DestinationWord::kNowhere, false};
    for (int k = 0; k < kTopK; ++k) {
      const uint32_t word = topk_word(bytes, k);
      const PlaceWord place = PlaceWord::decode(word, kRanks);
      const bool there = word != PlaceWord::kNowhere && static_cast<int>(place.rank) == rank;
      if (!there || place.row >= args.result_rows) continue;
      if (destination.row == DestinationWord::kNowhere) destination.row = place.row;
      destination.copies = destination.copies || place.row != destination.row;
    }
    if (destination.row != DestinationWord::kNowhere)
      call.peer(rank).put_row(result_row(destination.row), bytes, kRowBytes);
    // Published with the batch.
    call.peer(rank).put(this->destination(call.rank_at(rank), row_sent.at), destination.encode());
  }

  __device__ const void* extra(int token, int word) const {
    if (word < kScaleWords)
      return args.scales + token * args.scale_token_stride + word * args.scale_word_stride;
    word -= kScaleWords;
    if (kHasTopKWords && word < kTopK) return args.topk_words + int64_t{token} * kTopK + word;
    return args.weights + int64_t{token} * kTopK + word - kTopK;
  }
};

}  // namespace fanfold
