// The low-latency mode in the memory of GPUs: where peers write, how single words are encoded, and
// the arguments of the kernels. The protocol: docs/low_latency.md.
//
//   acks           [source rank]                         u64      any call
//   progress                                             u64      this rank, for all to read
//   calls          [kind][parity][source rank]           u64      both calls, by their sender
//   counts         [parity][source rank][local expert]   u32      dispatch, by the source; where
//                                                                 rows are token-major one more,
//                                                                 of the rows
//   headers        [parity][source rank][token][top_k]   u64      dispatch, by the source
//   late headers   [parity][source rank][token][top_k]   u64      combine, by the source
//   rows           [parity][source rank][source token]   slots    dispatch, by the source
//   results        [parity][expert rank][token]          slots    combine, by the expert side
//
// Each word of the slots and headers is kept `kSentinel`, a value that no sent word has, so a word
// that differs has arrived. The rank that reads it writes the sentinel again.
#pragma once

#include "layout/low_latency.h"
#include "layout/protocol.h"

namespace fanfold {

inline constexpr uint32_t kSentinel = 0xffffffffu;
// The tables of counts are in static shared memory, of which a kernel has 48 KB.
inline constexpr int32_t kMostDeviceExperts = 2048;
inline constexpr int32_t kMostDeviceTokens = (1 << 24) - 1;  // a call word carries so many
inline constexpr int32_t kMostCtas = 512;
// One row's words of a warp: 32 lanes with 16 bytes each.
inline constexpr int32_t kUnitBytes = 16;
inline constexpr int32_t kSegmentUnits = 32;

// Which row a CTA works on.
struct SourceToken {
  int32_t source;
  int32_t token;
};

// The `turn`-th row of the CTA `cta` of `ctas`. Neighbours take the sources of one token, so that
// few tokens are spread over many CTAs; and a CTA takes another source at every turn, so that none
// has only rows of a rank that is slow. `ctas` need not be a multiple of `ranks`: where a token's
// sources fall to several turns, all are counted to the first. Few ranks have no more sources of a
// token than there are CTAs (least_receivers), so that there are two such turns at most.
FANFOLD_HD constexpr SourceToken pair_of(int32_t cta, int32_t turn, int32_t ctas, int32_t ranks) {
  const int32_t q = cta + turn * ctas;
  const int32_t place = q % ranks;
  const int32_t first = ranks <= kFewRanks ? turn - (cta < place ? 1 : 0) : (q - place) / ctas;
  return {(place + first) % ranks, q / ranks};
}

// CTAs of a grid that must receive.
FANFOLD_HD constexpr int32_t least_receivers(int32_t ranks) {
  return ranks <= kFewRanks ? ranks : 1;
}

enum class RowKind : uint32_t { kBf16, kFp8, kNvfp4 };

// What a rank sends each peer about its call: how many tokens it has, whether it refused the call,
// and the call's signature, by which ranks that make different calls notice.
struct CallWord {
  uint32_t tokens;
  bool refused;
  RowKind rows;        // how they are laid out, so that a rank that refused can take them away
  uint32_t signature;  // 16 bits: see `signature_of`
  uint32_t epoch;      // the low 16 bits

  FANFOLD_HD constexpr uint64_t encode() const {
    return (uint64_t{epoch & 0xffffu} << 48) | (uint64_t{signature & 0xffffu} << 32) |
           (static_cast<uint64_t>(rows) << 25) | (uint64_t{refused} << 24) | tokens;
  }
  FANFOLD_HD static constexpr CallWord decode(uint64_t word) {
    return {static_cast<uint32_t>(word) & 0xffffffu, ((word >> 24) & 1u) != 0,
            static_cast<RowKind>((word >> 25) & 3u), static_cast<uint32_t>(word >> 32) & 0xffffu,
            static_cast<uint32_t>(word >> 48)};
  }
  // Sixteen bits of everything that ranks must agree about.
  FANFOLD_HD static constexpr uint32_t signature_of(const LowLatencySignature& call) {
    uint32_t hash = 2166136261u;
    for (const int32_t value :
         {call.experts, call.top_k, call.hidden, call.max_tokens, call.encoding, call.weights}) {
      hash = (hash ^ static_cast<uint32_t>(value)) * 16777619u;
    }
    return (hash >> 16) ^ (hash & 0xffffu);
  }
};

static_assert(CallWord::decode(CallWord{0xabcdef, true, RowKind::kBf16, 0x1234, 0x10005}.encode())
                  .epoch == 5);
static_assert(CallWord::decode(CallWord{0xabcdef, true, RowKind::kNvfp4, 0x1234, 5}.encode())
                  .tokens == 0xabcdef);
static_assert(CallWord::decode(CallWord{0xabcdef, true, RowKind::kNvfp4, 0x1234, 5}.encode())
                  .rows == RowKind::kNvfp4);

// Rows that one source sends to one expert. Every word is written in every call, so that the tag
// only has to tell this use of the word from the one before.
struct CountWord {
  uint32_t count;
  uint32_t tag;

  FANFOLD_HD static constexpr uint32_t tag_of(uint32_t epoch) { return (epoch >> 1) & 0xffu; }
  FANFOLD_HD constexpr uint32_t encode() const { return (count << 8) | tag; }
  FANFOLD_HD static constexpr CountWord decode(uint32_t word) { return {word >> 8, word & 0xffu}; }
};

// One top-k entry of one token, as its source sends it to a rank: which of the rank's experts, how
// many earlier rows this source sends to that expert, and the routing weight.
struct HeaderLayout {
  int32_t experts_per_rank;

  // As many bits as hold every local expert and one value more.
  FANFOLD_HD constexpr int32_t expert_bits() const {
    int32_t bits = 1;
    while ((1 << bits) <= experts_per_rank) ++bits;
    return bits;
  }
  FANFOLD_HD constexpr uint32_t elsewhere() const { return (1u << expert_bits()) - 1u; }
  // The highest bit stays zero, so that no header is the sentinel.
  FANFOLD_HD constexpr int64_t most_tokens() const { return int64_t{1} << (31 - expert_bits()); }

  FANFOLD_HD constexpr uint64_t encode(uint32_t local, uint32_t place, uint32_t weight) const {
    return (uint64_t{weight} << 32) | (place << expert_bits()) | local;
  }
  FANFOLD_HD constexpr uint32_t local(uint64_t header) const {
    return static_cast<uint32_t>(header) & elsewhere();
  }
  FANFOLD_HD constexpr uint32_t place(uint64_t header) const {
    return static_cast<uint32_t>(header) >> expert_bits();
  }
  FANFOLD_HD static constexpr uint32_t weight(uint64_t header) {
    return static_cast<uint32_t>(header >> 32);
  }
};

static_assert(HeaderLayout{64}.elsewhere() > 63 && HeaderLayout{63}.elsewhere() > 62);
static_assert(HeaderLayout{64}.place(HeaderLayout{64}.encode(63, 4711, 0xffffffff)) == 4711);

struct LowLatencyDeviceOffsets {
  int64_t acks, progress, calls, counts, headers, late_headers, rows, results, end;
  int64_t row_stride;
};

struct LowLatencyDeviceLayout {
  LowLatencyGeometry geometry;
  bool late;                 // whether routing comes with combine
  bool token_major = false;  // whether dispatch brings each token to a rank once

  FANFOLD_HD constexpr int64_t row_stride() const {
    return align_up(bf16_row_bytes(geometry.hidden), kAreaAlignment);
  }
  FANFOLD_HD constexpr LowLatencyDeviceOffsets offsets() const {
    const int64_t sources = int64_t{kParities} * geometry.ranks;
    const int64_t slots = sources * geometry.max_tokens;
    const int64_t headers_bytes = align_up(slots * geometry.top_k * 8, kAreaAlignment);
    LowLatencyDeviceOffsets at{};
    at.row_stride = row_stride();
    at.acks = 0;
    at.progress = align_up(int64_t{geometry.ranks} * 8, kAreaAlignment);
    at.calls = at.progress + kAreaAlignment;
    at.counts = at.calls + align_up(2 * sources * 8, kAreaAlignment);
    const int64_t counts = geometry.experts_per_rank() + (token_major ? 1 : 0);
    at.headers = at.counts + align_up(sources * counts * 4, kAreaAlignment);
    at.late_headers = at.headers + headers_bytes;
    at.rows = at.late_headers + (late ? headers_bytes : 0);
    at.results = at.rows + slots * at.row_stride;
    at.end = at.results + slots * at.row_stride;
    return at;
  }
  FANFOLD_HD constexpr int64_t bytes() const { return offsets().end; }
};

static_assert(LowLatencyDeviceLayout{{4, 512, 22, 1000, 7}, true}.offsets().rows % 128 == 0);

// Stands in the table's tokens of source 0 after a dispatch that a rank has refused. Every rank
// that received it sees it, and combines nothing.
inline constexpr int32_t kAborted = -1;
// The same where the weights come with combine: in a word that no caller gets, and in the ranges'
// first entry for a handle that has come without that word. No caller writes it there by filling or
// by chance: a rank that combines nothing while others combine keeps them waiting.
inline constexpr int64_t kAbortedLate = -0x5cc5'9a6b'37d4'e1b3;

// What combine must know of the dispatch before it, where the weights came with dispatch. It lies
// in a tensor of the caller's: entries, entries of each (source, token), tokens of each source,
// ranks of each own token.
struct TableEntry {
  int32_t row;  // of all rows of all local experts
  float weight;
};

struct TableLayout {
  int32_t ranks;
  int32_t top_k;
  int32_t max_tokens;

  FANFOLD_HD constexpr int64_t pairs() const { return int64_t{ranks} * max_tokens; }
  FANFOLD_HD constexpr int64_t fans_offset() const { return pairs() * top_k * 8; }
  FANFOLD_HD constexpr int64_t tokens_offset() const { return fans_offset() + pairs() * 4; }
  FANFOLD_HD constexpr int64_t ranks_offset() const { return tokens_offset() + int64_t{ranks} * 4; }
  // The ranks of a token: a bit for each, or of many ranks a word for each top-k entry.
  FANFOLD_HD constexpr int32_t rank_words() const { return ranks <= kFewRanks ? 1 : top_k; }
  FANFOLD_HD constexpr int64_t bytes() const {
    return ranks_offset() + int64_t{max_tokens} * rank_words() * 4;
  }
};

struct LowLatencyReports {
  Report kinds[kReportKinds];
  uint32_t late[kMostRanks];  // `call_id` of the call that masked the rank, which was late
  // A signal of ReadySignals that has not come: the peer is its expert, first its block, second its
  // value. Then the value that it was to reach (first).
  Report signal;
  Report signal_bound;
};

struct LowLatencyHosts;

// Memory of one rank that only its own kernels use.
struct LowLatencyState {
  CtaEpochs epochs[2][kMostCtas];  // by kind of call
  int32_t masked[kMostRanks];
  uint64_t peers[kMostRanks];  // PeerTable::all
  LowLatencyHosts* hosts;      // of kernels with kAcrossHosts
  uint32_t reserved;
  uint32_t failed;  // the call after which none can be trusted any more (`call_id`); 0: none
};

// Arguments of both kernels.
struct CallArgs {
  PeerTable peers;
  LowLatencyDeviceOffsets at;
  LowLatencyState* state;
  LowLatencyReports* reports;
  int64_t timeout_ns;
  int32_t rank;
  int32_t tokens;  // of this rank
  int32_t max_tokens;
  uint32_t phases;
  uint32_t signature;
  int32_t refused;    // this rank takes part without tokens, and keeps nothing of what comes
  int32_t mask_late;  // go on without a peer that is late
  int32_t senders;    // CTAs that push rows only; dispatch
};

// The numbers that a dispatch of token-major rows leaves, and where they stand.
struct TokenCounts {
  int32_t ranks;
  int32_t experts;  // local ones

  // Rows from the ranks up to `rank`.
  FANFOLD_HD constexpr int32_t rank_end(int32_t rank) const { return rank; }
  // Rows of an expert; and of the experts up to it, each rounded up to TokenRows::alignment.
  FANFOLD_HD constexpr int32_t expert_rows(int32_t expert) const { return ranks + expert; }
  FANFOLD_HD constexpr int32_t expert_end(int32_t expert) const { return ranks + experts + expert; }
  // Whether a rank has refused the dispatch.
  FANFOLD_HD constexpr int32_t aborted() const { return ranks + 2 * experts; }
};

// Of a dispatch whose rows are token-major: what it brings beside them, in the order of sources,
// then of their tokens. There is room for `capacity` rows, most_tokens of each rank.
struct TokenRows {
  int64_t* topk_idx;    // [capacity][top_k]: the token's local experts; -1 for those elsewhere
  float* topk_weights;  // [capacity][top_k], 0 for experts elsewhere; or null
  int32_t* sources;     // [capacity][2 + top_k]: source rank * most_tokens + token; row; -1 ...
  int32_t* counts;      // TokenCounts
  int32_t* cpu_counts;  // the same in pinned memory, for a CPU that waits; or null
  int64_t* own_topk;    // [tokens][top_k]: a copy of DispatchArgs::topk_idx
  int32_t most_tokens;
  int32_t alignment;
  int64_t scale_strides[2];  // of DispatchArgs::scales, in words: of a row, and of a block
};

struct DispatchArgs {
  CallArgs call;
  const unsigned char* x;      // [tokens][hidden] bf16, or fp8 that comes with scales
  const int64_t* topk_idx;     // [tokens][top_k], -1 is no expert
  const float* topk_weights;   // [tokens][top_k], or null
  const float* global_scale;   // of nvfp4 rows
  unsigned char* rows;         // [local experts][capacity][hidden]
  uint32_t* scales;            // [local experts][blocks][capacity], or packed, or Nvfp4ScaleLayout
  int32_t* counts;             // [local experts]
  int32_t* source_tokens;      // [local experts][capacity]
  int64_t* ranges;             // [local experts][ranks]: count | first row << 32
  int64_t* aborted;            // kAbortedLate if a rank has refused this dispatch, else 0; or null
  float* row_weights;          // [local experts][capacity], or null
  unsigned char* table;        // TableLayout, or null
  int32_t* expert_totals;      // [local experts], added to, or null
  int64_t* wait_ns;            // [ranks], added to, or null
  TokenRows token_rows;        // in kernels with kTokenMajor
  const uint32_t* x_scales;    // [tokens][blocks] float32, of rows that come with scales
  int64_t x_scale_strides[2];  // in words: of a token, and of a block
};

// By which a kernel beside combine says which outputs it has written: rows from `b * block_rows`
// on, `block_rows` of them, of an expert are all there once the signal `expert * blocks + b` has
// reached `ready_at`. Whoever adds to a signal releases at GPU scope.
struct ReadySignals {
  const uint32_t* signals;  // [local experts][blocks], compared as int32; null: all are there
  int32_t block_rows;
  int32_t blocks;
  int32_t ready_at;
};

struct CombineArgs {
  CallArgs call;
  const unsigned char* y;  // outputs, bf16
  int64_t expert_stride;   // in bytes
  int64_t row_stride;      // in bytes
  const int64_t* ranges;   // as dispatch left them; late routing
  const int64_t* aborted;  // whether the dispatch was aborted (kAbortedLate); or null; late routing
  const unsigned char* table;      // as dispatch left it; null with late routing
  int32_t weighted;                // whether the table's weights are used
  const int64_t* topk_idx;         // [tokens][top_k]; late routing
  const float* topk_weights;       // [tokens][top_k]; late routing
  unsigned char* out;              // [tokens][hidden] bf16; null: nothing is kept
  int64_t* wait_ns;                // [ranks], added to, or null
  ReadySignals ready;              // in kernels with kAwaitsSignals
  const unsigned char* biases[2];  // [tokens][hidden] bf16, or null; in kernels with kBiased
};

}  // namespace fanfold
