// The high-throughput mode in the memory of GPUs: where peers write, how single words are encoded,
// and the arguments of the kernels. The protocol: docs/high_throughput.md.
//
//   arrivals       [parity][source rank]               u64    every call
//   counts         [parity][source rank][expert, rank] u64    a plan: of all experts, then ranks
//   ready          [source rank][word of the ring]     u64    a batch of rows has arrived
//   acks           [reader rank][word of the ring]     u64    the reader has read a batch
//   ring           [source rank][slot][token]          rows   what the sources send
//   results        [row]                               rows   of dispatches in place
//
// Rows travel in batches of kBatchTokens successive tokens of one source, in a dispatch the last in
// shorter ones. Batch b of a stream uses slot b % slots of its ring, and its token i place i there,
// whether or not the others go to the same rank: so nobody needs to know where their rows lie.
#pragma once

#include "layout/protocol.h"
#include "layout/remote_hosts.h"
#include "layout/types.h"

namespace fanfold {

inline constexpr int32_t kBatchTokens = 8;
inline constexpr int32_t kShortBatchTokens = 2;
inline constexpr int32_t kMostShortTokens = 1024;  // that a dispatch sends in short batches
static_assert(kBatchTokens % kShortBatchTokens == 0);
// Words for the slots of one ring. In a dispatch each slot has one, and expert-major in
// place one more for each of its rows. A combine cuts its rows into slices of columns, each of
// which comes and goes for itself, and has its own.
inline constexpr int32_t kRingWords = 2048;
inline constexpr int32_t kMostSlices = 16;
inline constexpr int32_t kMostDispatchSlots = kRingWords;
inline constexpr int32_t kMostDestinationSlots = kRingWords / (1 + kBatchTokens);
inline constexpr int32_t kMostHighThroughputCtas = 64;

// What a rank says when it begins a call, which also says that it has left the one before: its
// memory is free for this one.
struct ArrivalWord {
  uint32_t epoch;      // the call's number, 24 bits
  uint32_t signature;  // 16 bits of what ranks must agree about
  uint32_t tokens;     // 23 bits
  bool refused;

  static constexpr uint32_t kEpochMask = 0xffffffu;
  static constexpr int32_t kMostTokens = (1 << 23) - 1;

  FANFOLD_HD constexpr uint64_t encode() const {
    return (uint64_t{epoch & kEpochMask} << 40) | (uint64_t{signature & 0xffffu} << 24) |
           (uint64_t{refused} << 23) | tokens;
  }
  FANFOLD_HD static constexpr ArrivalWord decode(uint64_t word) {
    return {static_cast<uint32_t>(word >> 40), static_cast<uint32_t>(word >> 24) & 0xffffu,
            static_cast<uint32_t>(word) & 0x7fffffu, ((word >> 23) & 1u) != 0};
  }
};

// How a dispatch cuts the tokens of a source: `whole` batches, then short ones for `short_tokens`
// and what is left over. Senders are done with a whole one at quite different times; who is done
// early takes more of the short ones.
struct DispatchBatches {
  int32_t tokens;
  int32_t whole;

  FANFOLD_HD constexpr DispatchBatches(int32_t all, int32_t short_tokens)
      : tokens(all), whole(all > short_tokens ? (all - short_tokens) / kBatchTokens : 0) {}

  FANFOLD_HD constexpr int32_t count() const {
    return whole + (tokens - whole * kBatchTokens + kShortBatchTokens - 1) / kShortBatchTokens;
  }
  FANFOLD_HD constexpr int32_t first_token(int32_t batch) const {
    return batch < whole ? batch * kBatchTokens
                         : whole * kBatchTokens + (batch - whole) * kShortBatchTokens;
  }
  FANFOLD_HD constexpr int32_t size(int32_t batch) const {
    return batch < whole ? kBatchTokens : kShortBatchTokens;
  }
};

// A batch that has arrived: which of its tokens brought a row, and how many rows this source has
// sent to this rank before. In a combine both are known, and 0.
struct BatchWord {
  uint32_t use;     // see `use_of`
  uint32_t before;  // 24 bits
  uint32_t tokens;  // a bit for each

  FANFOLD_HD constexpr uint64_t encode() const {
    return (uint64_t{use} << 32) | (uint64_t{before} << 8) | tokens;
  }
  FANFOLD_HD static constexpr BatchWord decode(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word >> 8) & 0xffffffu,
            static_cast<uint32_t>(word) & 0xffu};
  }
  // Tells this use of a slot from all earlier ones that a word may still stand for: the turn of the
  // ring in its call, counted from 1, and the low bits of the call's number. Words are wiped to 0,
  // which no use is, one in every call, before their call's low bits come again.
  FANFOLD_HD static constexpr uint32_t use_of(uint32_t epoch, uint32_t turn) {
    return (epoch << kTurnBits) | (turn + 1);
  }
  static constexpr int kTurnBits = 14;
};
inline constexpr int32_t kMostTurns = (1 << BatchWord::kTurnBits) - 1;
static_assert(BatchWord::use_of(1u << 18, 0) != 0);
// Words of `ready` that each call wipes.
FANFOLD_HD constexpr int32_t wiped_words(int32_t ranks) {
  return static_cast<int32_t>(
      ceil_div(int64_t{ranks} * kRingWords, 1 << (32 - BatchWord::kTurnBits)));
}
static_assert(wiped_words(kFewRanks) == 1);
static_assert(BatchWord::use_of(7, kMostTurns - 1) < BatchWord::use_of(8, 0));

// Where a row goes among the expert-major rows of all ranks. All ones: nowhere. The more ranks, the
// fewer bits are left for the row.
struct PlaceWord {
  uint32_t rank;
  uint32_t row;

  static constexpr int kRowBits = 26;  // of up to 64 ranks
  static constexpr uint32_t kNowhere = 0xffffffffu;

  FANFOLD_HD static constexpr int row_bits(int32_t ranks) {
    int bits = kRowBits;
    while ((ranks - 1) >> (32 - bits) != 0) --bits;
    return bits;
  }
  FANFOLD_HD constexpr uint32_t encode(int32_t ranks) const {
    return (rank << row_bits(ranks)) | row;
  }
  FANFOLD_HD static constexpr PlaceWord decode(uint32_t word, int32_t ranks) {
    return {word >> row_bits(ranks), word & ((1u << row_bits(ranks)) - 1)};
  }
};
static_assert(PlaceWord::row_bits(64) == PlaceWord::kRowBits && PlaceWord::row_bits(65) == 25);
static_assert(PlaceWord::row_bits(kMostRanks) == 22);

// Of a dispatch in place, expert-major: the row of the reader's results to which a row of a batch
// has been sent.
struct DestinationWord {
  uint32_t use;  // as in BatchWord
  uint32_t row;
  bool copies;  // the token has other rows there

  static constexpr uint32_t kNowhere = (1u << PlaceWord::kRowBits) - 1;

  FANFOLD_HD constexpr uint64_t encode() const {
    return (uint64_t{use} << 32) | (uint64_t{copies} << 31) | row;
  }
  FANFOLD_HD static constexpr DestinationWord decode(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint32_t>(word) & kNowhere,
            ((word >> 31) & 1u) != 0};
  }
};
inline constexpr int32_t kDestinationsAt = kMostDestinationSlots;  // behind the words of the slots

struct HighThroughputOffsets {
  int64_t arrivals, counts, ready, acks, ring, results;
};

// How a region of symmetric memory is divided. Slots and the stride of rows are the kernel's own
// matter, as a ring is empty whenever a call begins.
struct HighThroughputDeviceLayout {
  int32_t ranks;
  int64_t ring_bytes;  // of each ring

  FANFOLD_HD constexpr HighThroughputOffsets offsets() const {
    HighThroughputOffsets at{};
    at.arrivals = 0;
    at.counts = align_up(int64_t{2} * ranks * 8, kAreaAlignment);
    at.ready =
        at.counts + align_up(int64_t{2} * ranks * (kMostCounted + ranks) * 8, kAreaAlignment);
    const int64_t words = align_up(int64_t{ranks} * kRingWords * 8, kAreaAlignment);
    at.acks = at.ready + words;
    at.ring = at.acks + words;
    at.results = at.ring + ranks * ring_bytes;
    return at;
  }
  static constexpr int64_t kMostCounted = 2048;  // experts
};

// Memory of one rank that only its own kernels use.
struct HighThroughputState {
  uint32_t epoch;  // of the last call that has ended
  uint32_t sent;   // tickets drawn
  uint32_t received;
  uint32_t kept;      // batches of its own
  uint32_t finished;  // warps; in the upper half those that found the call failed
  uint32_t gathered;  // CTAs of a plan that have counted
  uint32_t failed;    // 1: no call can be trusted any more
  uint32_t reserved;
  uint64_t peers[kMostRanks];  // PeerTable::all
  const RemoteHosts* hosts;    // of kernels with kAcrossHosts: HighThroughputDeviceLayout there
};

enum class HighThroughputPhase : uint32_t { kPlan = 0, kDispatch = 1, kCombine = 2 };

// Stands in the first word of a routing's source_prefix when a plan, or the first dispatch by it,
// has moved nothing.
inline constexpr int32_t kAbortedRouting = -1;

// Arguments of all kernels.
struct HighThroughputArgs {
  PeerTable peers;
  HighThroughputOffsets at;
  HighThroughputState* state;
  Report* reports;
  int64_t timeout_ns;
  int32_t rank;
  int32_t tokens;   // of this rank
  int32_t slots;    // of each ring
  int32_t senders;  // CTAs that begin as senders
  uint32_t signature;
  int32_t refused;
};

struct PlanArgs {
  HighThroughputArgs call;
  const int64_t* topk_idx;  // [tokens][top_k], -1 is no expert
  int32_t* counted;         // scratch: [CTAs][experts + ranks]
  int32_t alignment;        // of every expert's rows
  // What the source keeps, to send by.
  int32_t* rows;  // [tokens][ranks]: how many of its rows went to that rank before; -1: none does
  uint32_t* places;  // [tokens][top_k] PlaceWord
  int32_t* choices;  // [tokens][top_k]: topk_idx with -1 for what is no expert; or null
  // What comes, known to each rank alone.
  int64_t capacity;            // rows of the results, if those are expert-major
  int32_t* tokens_per_expert;  // [local experts], of rows that fit
  int64_t* offsets;            // [local experts + 2], no more than the capacity but the last: the
                               // end of all rows, fit or not
  int32_t* source_prefix;      // [ranks]: rows of ranks 0 to r
  int32_t* first_rows;         // [ranks]: of this rank's rows at that rank the first, token-major
  int32_t* totals;             // [2] pinned or on the GPU: rows that come, expert rows; or null
};

// Where the tokens of one rank go, which it finds out by itself.
struct DispatchLayoutArgs {
  const int64_t* topk_idx;  // [tokens][top_k]; what is no expert counts as -1
  int64_t tokens;
  int32_t* tokens_per_rank;         // [ranks]
  int32_t* tokens_per_expert;       // [experts]: as often as tokens name it
  unsigned char* is_token_in_rank;  // [tokens][ranks], 1 or 0
};

struct HighThroughputDispatchArgs {
  HighThroughputArgs call;
  const unsigned char* x;                         // [tokens][row bytes]
  const uint32_t* scales;                         // [tokens][scale words], by strides; or null
  int64_t scale_token_stride, scale_word_stride;  // in words
  const int32_t* rows;                            // of the plan
  const int32_t* first_rows;                      // likewise
  const uint32_t* topk_words;  // [tokens][top_k]: the plan's places, expert-major; else its experts
  const float* weights;        // [tokens][top_k], or null
  int32_t* source_prefix;      // marked as aborted with a new routing, if the call is
  const int64_t* offsets;      // of the plan, as the following
  const int32_t* tokens_per_expert;
  int64_t capacity;        // rows of the results
  int64_t result_rows;     // in place: rows that fit the ranks' memory, no fewer than any capacity
  int32_t marks_absent;    // there may be more room than rows: what is kept of the others says so
  int32_t zeroes_padding;  // expert-major; else padding rows hold anything, and are marked as such
  // Results; each row token-major or expert-major.
  unsigned char* out;         // [capacity][row bytes]
  uint32_t* out_scales;       // [capacity][scale words]
  float* row_weights;         // [capacity]; expert-major, or null
  int32_t* row_source_rank;   // [capacity]
  int32_t* row_source_token;  // [capacity]
  // Copies of the plan's for the caller, who may write there; or null. Kernels read the plan's.
  int64_t* offsets_copy;            // [local experts + 1]
  int32_t* tokens_per_expert_copy;  // [local experts]
  // Kept for later calls, by token-major row.
  int32_t* rows_of;       // [rows][top_k]; expert-major, or null
  int64_t* topk_idx;      // [rows][top_k]; token-major, with a new routing
  float* topk_weights;    // [rows][top_k]; likewise, if there are weights
  int32_t* source_token;  // [rows]; with a new routing
  uint64_t* batches;      // [ranks][batch stride] BatchWord; with a new routing
  int64_t batch_stride;
};

struct HighThroughputCombineArgs {
  HighThroughputArgs call;
  // Batches between sending and folding, and, no more, where sending ends. Twice the first less the
  // second is no more than the slots; ranks need not have the same.
  int32_t lag, last_lag;
  int32_t biases;  // 1 or 2, in a kernel that adds some
  // Of the dispatch, about the rows that came here.
  const uint64_t* batches;  // [ranks][batch stride] BatchWord
  int64_t batch_stride;
  int64_t kept;                  // rows that the dispatch had room for; those behind are nothing
  const int32_t* source_prefix;  // [ranks]
  const int32_t* rows_of;        // [rows][top_k]; expert-major
  const unsigned char* y;        // [rows][row bytes]: the outputs
  const float* row_weights;      // [expert-major rows], or null
  const float* topk_weights;     // expert-major [rows], token-major [rows][top_k]; or null
  // Of the plan, about this rank's own tokens, and their results.
  const int32_t* rows;           // [tokens][ranks]
  const unsigned char* bias[2];  // [tokens][row bytes], as many as there are
  unsigned char* out;            // [tokens][row bytes]
  float* out_weights;            // [tokens][top_k], or null
};

}  // namespace fanfold
