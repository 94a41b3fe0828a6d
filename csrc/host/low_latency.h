// Low-latency dispatch and combine between the processes of a host.
//
// The executable specification of the protocol (docs/low_latency.md): the tests compare every other
// backend with it. One object serves any number of calls of any geometry that fits its memory.
// Epochs number the dispatches and, separately, the combines; the n-th calls of all ranks belong
// together.
//
//   dispatch_send     writes each token once to every rank that holds one of its experts
//   dispatch_receive  waits for the rows and copies each to its local experts' packed rows
//   combine_send      sums, for each token, the weighted outputs of the local experts, in fp32 and
//                     top-k order, rounds once and writes one row back to the token's rank
//   combine_receive   waits for the rows and adds them in fp32 and rank order
//
// Between send and receive the caller may do other work. Two dispatches and two combines may be in
// flight.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/array.h"
#include "host/low_latency_sequence.h"
#include "host/reduce.h"
#include "host/routes.h"
#include "layout/low_latency.h"
#include "layout/row.h"
#include "memory/symmetric.h"

namespace fanfold {

enum class RowEncoding : int32_t { kBf16, kFp8, kFp8PowerOfTwo, kNvfp4 };
enum class ScaleFormat : int32_t { kFloat32, kUe8m0 };

// Bytes of a row's values, and of the row on its way, with its scales.
constexpr int64_t value_bytes(RowEncoding encoding, int64_t hidden) {
  if (encoding == RowEncoding::kBf16) return bf16_row_bytes(hidden);
  return encoding == RowEncoding::kNvfp4 ? nvfp4_value_bytes(hidden) : hidden;
}
constexpr int64_t row_bytes(RowEncoding encoding, int64_t hidden) {
  if (encoding == RowEncoding::kBf16) return bf16_row_bytes(hidden);
  return encoding == RowEncoding::kNvfp4 ? nvfp4_row_bytes(hidden) : fp8_row_bytes(hidden);
}

struct LowLatencyTokens {
  Array<const uint16_t> x;          // [tokens, hidden] bf16, contiguous
  Array<const int64_t> topk_idx;    // [tokens, top_k], -1 for no expert
  Array<const float> topk_weights;  // [tokens, top_k]
  Array<const float> global_scale;  // one, with nvfp4 rows
  bool weighted;                    // whether topk_weights are given; the same on all ranks
  int32_t tokens;
  RowEncoding encoding;
};

// The output of dispatch_receive, which skips arrays that are null. E = local experts, C =
// expert_capacity, R = ranks, M = max_tokens, K = top_k.
struct LowLatencyReceived {
  Array<std::byte> rows;    // [E, C, hidden] bf16 or e4m3, or [E, C, hidden / 2] e2m1 pairs
  Array<std::byte> scales;  // [E, blocks, C] float32, or [E, ceil(blocks / 4), C] int32 of UE8M0,
                            // or of nvfp4 rows e4m3 in Nvfp4ScaleLayout for each expert
  Array<int32_t> counts;    // [E] rows of each expert
  Array<int32_t> source_tokens;  // [E, C] the row's token index at its source
  Array<int64_t> ranges;         // [E, R] rows from each source: count | first row << 32
  Array<float> row_weights;      // [E, C] the weight of the row's token for this expert
  Array<int32_t> source_counts;  // [R] tokens of each source
  Array<int16_t> experts;        // [R, M, K] the routing of all sources
  Array<float> weights;          // [R, M, K]
  Array<int32_t> expert_totals;  // [E] the call adds its counts
  Array<int64_t> wait_ns;        // [R] the call adds the nanoseconds that it waits for each source
  RowEncoding encoding;
  ScaleFormat scale_format;
};

// By which another thread says which outputs it has written, while combine_send runs: rows from
// `b * block_rows` on, `block_rows` of them, of an expert are all there once the signal
// `expert * blocks + b` has reached `ready_at`. Whoever stores a signal releases.
struct LowLatencyReady {
  Array<const int32_t> signals;  // [E, blocks]; null: all outputs are there
  int32_t block_rows;
  int32_t blocks;
  int32_t ready_at;
};

// The input of combine_send, on the expert side. The routing of the sources is the output of
// dispatch_receive or, if `late_tokens` is given, the one that every source pushes in this call.
struct LowLatencyOutputs {
  Array<const uint16_t> y;  // [E, C, hidden] bf16 with the strides below, in elements
  int64_t expert_stride;
  int64_t row_stride;
  Array<const int64_t> ranges;         // as dispatch_receive wrote them
  Array<const int32_t> source_counts;  // null if late_tokens is given
  Array<const int16_t> experts;
  Array<const float> weights;  // null: unweighted
  const LowLatencyTokens* late_tokens;
  bool logfmt;
  // NOLINTNEXTLINE(readability-redundant-member-init): designated initialisers may leave it out
  LowLatencyReady ready{};
};

struct LowLatencyResult {
  Array<uint16_t> out;            // [tokens, hidden] bf16
  Array<const int64_t> topk_idx;  // [tokens, top_k] of this rank's tokens
  int32_t tokens;
  Array<int64_t> wait_ns;  // [R] as in LowLatencyReceived; may be null
};

class LowLatency {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive this object. All
  // signals in these bytes must have reached `epoch`: 0 in fresh memory.
  LowLatency(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  // Each send returns the epoch to pass to its receive. The caller must have checked the indices
  // against the geometry. The geometry may change only while no call is in flight; the first call
  // with a new geometry waits until all ranks have begun it.
  //
  // If the signatures of the ranks differ, the call throws BadArgument with both values. If a peer
  // has refused the call, it throws PeerRefused. The send throws if the geometry is new, else the
  // receive throws.
  uint32_t dispatch_send(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens);
  void dispatch_receive(uint32_t epoch, const LowLatencyReceived& received);
  uint32_t combine_send(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs);
  void combine_receive(uint32_t epoch, const LowLatencyResult& result);

  // Take part in a call whose input this rank has found bad. They abort the call on every rank: the
  // others throw PeerRefused with `reason`, and all ranks stay in step.
  void refuse_dispatch(const std::string& reason) { dispatch_.refuse(reason); }
  void refuse_combine(const std::string& reason) { combine_.refuse(reason); }

  // Waits until every peer has read all rows of this rank, so that the geometry may change.
  void quiesce();
  // Gives up the calls in flight, then waits like `quiesce`.
  void reset();

 private:
  // The destination of a received token: row `row` of local expert `local`.
  struct Placement {
    int32_t token;
    int32_t local;
    int64_t row;
  };
  // The outputs that are summed for one token: `terms_` from `first_term` to the next sum's.
  struct Sum {
    int32_t token;
    size_t first_term;
  };
  // A routing table of one source, [max_tokens, top_k].
  struct Table {
    const int16_t* experts;
    const float* weights;  // null: unweighted
  };

  // The call that sends the routing weights. Dispatch and combine write them to the same memory, so
  // a change waits like a change of geometry.
  enum class Weights : int32_t { kNone, kWithDispatch, kWithCombine };

  uint32_t begin(LowLatencySequence& sequence, const LowLatencyGeometry& geometry,
                 RowEncoding encoding, Weights weights);
  void check_fits(const LowLatencyGeometry& geometry) const;
  void await_idle(bool new_layout);
  void adopt(const LowLatencyGeometry& geometry);

  const std::byte* own(int64_t offset) const { return memory_.own() + offset_ + offset; }
  // Where the routing of token 0 of `source` lies in each rank's memory: its experts in `table`,
  // and its weights.
  int64_t experts_offset(int64_t table, int32_t source, uint32_t epoch) const {
    return offset_ + table + layout_.table(parity_of(epoch), source) * layout_.experts_bytes();
  }
  int64_t weights_offset(int32_t source, uint32_t epoch) const {
    return offset_ + layout_.weights_offset() +
           layout_.table(parity_of(epoch), source) * layout_.weights_bytes();
  }
  // Where `rank` says how it has encoded the result of `token`.
  int64_t encoding_offset(int32_t rank, int64_t token, uint32_t epoch) const {
    return layout_.encodings_offset() +
           layout_.table(parity_of(epoch), rank) * layout_.encodings_bytes() + token;
  }
  Table own_table(int64_t table, int32_t source, uint32_t epoch, bool weighted) const;

  void push_rows(const LowLatencyTokens& tokens, uint32_t epoch);
  const std::byte* encode(const LowLatencyTokens& tokens, int64_t token);
  void push_routing(const LowLatencyTokens& tokens, uint32_t epoch, int64_t experts_table) const;
  void unpack(int32_t source, int32_t tokens, uint32_t epoch, const LowLatencyReceived& received);
  void place(int32_t tokens, const Table& table, const LowLatencyReceived& received);
  void unpack_scales(const std::byte* slot, const Placement& to,
                     const LowLatencyReceived& received) const;
  void unpack_nvfp4_scales(const std::byte* slot, const Placement& to,
                           const LowLatencyReceived& received) const;
  Table table_of(int32_t source, uint32_t epoch, const LowLatencyOutputs& outputs) const;
  void gather(int32_t source, int32_t tokens, const Table& table, const LowLatencyOutputs& outputs);
  std::span<const ReduceTerm> terms_of(size_t sum) const;
  // Waits until the outputs that make up sum `sum` are there.
  void await_outputs(size_t sum, const LowLatencyReady& ready) const;
  int64_t write_result(int32_t source, size_t sum, uint32_t epoch, bool logfmt, RowRun& run);
  void add_results(const int64_t* ids, int64_t token, uint32_t epoch, uint16_t* out);
  const std::byte* result_row(int32_t peer, int64_t token, uint32_t epoch) const {
    const int64_t slot = layout_.slot(parity_of(epoch), peer, token);
    return own(layout_.results_offset() + slot * layout_.row_stride());
  }
  uint8_t result_encoding(int32_t peer, int64_t token, uint32_t epoch) const {
    return static_cast<uint8_t>(*own(encoding_offset(peer, token, epoch)));
  }

  SymmetricMemory& memory_;
  int64_t offset_;
  int64_t bytes_;
  LowLatencyLayout layout_{};
  bool laid_out_ = false;
  Weights weights_ = Weights::kNone;  // the last value other than kNone in this geometry
  LowLatencySequence dispatch_;
  LowLatencySequence combine_;
  LocalTopK local_topk_{0, 0};
  // Scratch memory of the current call.
  std::vector<std::byte> slot_;
  std::vector<float> sum_;
  std::vector<Placement> placements_;
  std::vector<ReduceTerm> terms_;
  std::vector<int64_t> signal_of_term_;  // where the combine waits for signals
  std::vector<Sum> sums_;
  std::vector<uint8_t> contributes_;
  std::vector<int64_t> cursors_;
};

}  // namespace fanfold
