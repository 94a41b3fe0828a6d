// Where everything of the low-latency mode lies in a rank's symmetric memory.
//
//   signals, signatures: fixed for a number of ranks, so they stay when the geometry changes
//   rows            [parity][source rank][source token]  slots    dispatch, by the source
//   experts         [parity][source rank][token][top_k]  int16    dispatch, by the source
//   late experts    [parity][source rank][token][top_k]  int16    combine, by the source
//   weights         [parity][source rank][token][top_k]  float32  either, by the source
//   results         [parity][expert rank][token]         slots    combine, by the expert side
//   encodings       [parity][expert rank][token]         uint8    combine, by the expert side
//
// A row's slot is its own token index: nothing is allocated, so nothing can race.
// "Late" routing is what a caller brings only with combine, as the DeepEP face does.
#pragma once

#include "layout/row.h"
#include "layout/signal.h"
#include "layout/types.h"

namespace fanfold {

struct LowLatencyGeometry {
  int32_t ranks;
  int32_t experts;
  int32_t top_k;
  int32_t hidden;
  int32_t max_tokens;

  FANFOLD_HD constexpr int32_t experts_per_rank() const { return experts / ranks; }
  // Rows that one local expert can receive: every token of every rank, each at most once.
  FANFOLD_HD constexpr int64_t expert_capacity() const { return int64_t{ranks} * max_tokens; }
  FANFOLD_HD constexpr bool operator==(const LowLatencyGeometry& other) const {
    return ranks == other.ranks && experts == other.experts && top_k == other.top_k &&
           hidden == other.hidden && max_tokens == other.max_tokens;
  }
};

// A call's signature: every rank publishes it before it sends anything, and all must be equal.
struct LowLatencySignature {
  int32_t experts;
  int32_t top_k;
  int32_t hidden;
  int32_t max_tokens;
  int32_t encoding;  // of dispatched rows; of a combine on GPUs 1 for LogFMT, else 0
  int32_t weights;   // 0: the call uses none; 1: those that came with dispatch; 2: with combine
  int32_t reserved[2];
};
static_assert(sizeof(LowLatencySignature) == 32);

// What one rank waits for: `kParities` words from every peer for what belongs to a call, one word
// from every peer for what only grows, and behind them the signatures of the calls. All lie in the
// memory of the rank that waits.
struct LowLatencySignals {
  int32_t ranks;

  enum Kind : int32_t {
    kDispatchSignature = 0,  // the signature of the call is there
    kDispatched = 2,         // value: tokens of the source
    kCombineSignature = 4,
    kLateRouting = 6,   // value: tokens of the source
    kCombined = 8,      // value: rows written
    kDispatchAck = 10,  // epoch: the last dispatch whose rows the peer has read
    kCombineAck = 11,   // epoch: the last combine whose rows the peer has read
    kKinds = 12,
  };

  FANFOLD_HD constexpr int64_t offset(Kind kind, int32_t parity, int32_t peer) const {
    return ((int64_t{kind} + parity) * ranks + peer) * 8;
  }
  // `kind` says whether dispatch or combine.
  FANFOLD_HD constexpr int64_t signature_offset(Kind kind, int32_t parity, int32_t peer) const {
    const int32_t call = kind == kDispatchSignature ? 0 : kParities;
    const int64_t words = int64_t{kKinds} * ranks * 8;
    return words + (int64_t{call + parity} * ranks + peer) * int64_t{sizeof(LowLatencySignature)};
  }
  FANFOLD_HD constexpr int64_t bytes() const {
    return align_up(signature_offset(kCombineSignature, kParities - 1, ranks), kAreaAlignment);
  }
};

struct LowLatencyLayout {
  LowLatencyGeometry geometry;

  FANFOLD_HD constexpr int64_t slots() const {
    return int64_t{kParities} * geometry.ranks * geometry.max_tokens;
  }
  // Index of (parity, rank, token) among rows and results.
  FANFOLD_HD constexpr int64_t slot(int32_t parity, int32_t rank, int64_t token) const {
    return (int64_t{parity} * geometry.ranks + rank) * geometry.max_tokens + token;
  }
  // In the other areas each rank's table begins on a row's boundary, so that a rank can put its own
  // without touching another's. Index of a rank's table, the number of tables, and their bytes.
  FANFOLD_HD constexpr int64_t table(int32_t parity, int32_t rank) const {
    return int64_t{parity} * geometry.ranks + rank;
  }
  FANFOLD_HD constexpr int64_t tables() const { return int64_t{kParities} * geometry.ranks; }
  FANFOLD_HD constexpr int64_t experts_bytes() const {
    return align_up(int64_t{geometry.max_tokens} * geometry.top_k * 2, kRowAlignment);
  }
  FANFOLD_HD constexpr int64_t weights_bytes() const {
    return align_up(int64_t{geometry.max_tokens} * geometry.top_k * 4, kRowAlignment);
  }
  FANFOLD_HD constexpr int64_t encodings_bytes() const {
    return align_up(geometry.max_tokens, kRowAlignment);
  }
  FANFOLD_HD constexpr int64_t row_stride() const { return slot_bytes(geometry.hidden); }

  FANFOLD_HD constexpr int64_t rows_offset() const {
    return LowLatencySignals{geometry.ranks}.bytes();
  }
  FANFOLD_HD constexpr int64_t experts_offset() const {
    return rows_offset() + align_up(slots() * row_stride(), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t late_experts_offset() const {
    return experts_offset() + align_up(tables() * experts_bytes(), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t weights_offset() const {
    return late_experts_offset() + align_up(tables() * experts_bytes(), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t results_offset() const {
    return weights_offset() + align_up(tables() * weights_bytes(), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t encodings_offset() const {
    return results_offset() + align_up(slots() * row_stride(), kAreaAlignment);
  }
  FANFOLD_HD constexpr int64_t bytes() const {
    return encodings_offset() + align_up(tables() * encodings_bytes(), kAreaAlignment);
  }
};

static_assert(LowLatencyLayout{{4, 64, 8, 1024, 128}}.rows_offset() % kAreaAlignment == 0);
static_assert(LowLatencyLayout{{3, 9, 22, 136, 7}}.results_offset() % kAreaAlignment == 0);

}  // namespace fanfold
