// Low-latency dispatch and combine between the processes of a host.
//
// The executable specification of the protocol (docs/low_latency.md): every other backend is tested
// against it. One object serves any number of calls of any geometry that fits its memory. Calls are
// numbered by epochs, dispatch and combine apart; the n-th call of every rank belongs together.
//
//   dispatch_send     writes each token once to every rank that holds one of its experts
//   dispatch_receive  waits for the rows and copies each to its local experts' packed slots
//   combine_send      sums, for each token, the weighted outputs of the local experts, in fp32 and
//                     top-k order, rounds once and writes one row back to the token's rank
//   combine_receive   waits for the rows and adds them in fp32 and rank order
//
// Between send and receive the caller may do other work; two calls of a kind may be in flight.
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
#include "memory/symmetric.h"

namespace fanfold {

enum class RowEncoding : int32_t { kBf16, kFp8, kFp8PowerOfTwo };
enum class ScaleFormat : int32_t { kFloat32, kUe8m0 };

struct LowLatencyTokens {
  Array<const uint16_t> x;          // [tokens, hidden] bf16, contiguous
  Array<const int64_t> topk_idx;    // [tokens, top_k], -1 for none
  Array<const float> topk_weights;  // [tokens, top_k]
  bool weighted;                    // whether topk_weights are given, on all ranks or on none
  int32_t tokens;
  RowEncoding encoding;
};

// Where dispatch_receive leaves what arrived. E = local experts, C = expert_capacity, R = ranks,
// M = max_tokens, K = top_k. What is null is not wanted.
struct LowLatencyReceived {
  Array<std::byte> rows;    // [E, C, hidden] bf16 or e4m3
  Array<std::byte> scales;  // [E, blocks, C] float32, or [E, ceil(blocks / 4), C] int32 of UE8M0
  Array<int32_t> counts;    // [E] rows of each expert
  Array<int32_t> source_tokens;  // [E, C] the row's token index at its source
  Array<int64_t> ranges;         // [E, R] rows from each source: count | first row << 32
  Array<float> row_weights;      // [E, C] the row's weight: what its token gives this expert
  Array<int32_t> source_counts;  // [R] tokens of each source
  Array<int16_t> experts;        // [R, M, K] the routing of all sources
  Array<float> weights;          // [R, M, K]
  Array<int32_t> expert_totals;  // [E], added to
  Array<int64_t> wait_ns;        // [R] nanoseconds waited for each source, added to
  RowEncoding encoding;
  ScaleFormat scale_format;
};

// The expert side of combine. The routing of the sources is what dispatch_receive left, or, if
// `late_tokens` is given, what every source pushes now.
struct LowLatencyOutputs {
  Array<const uint16_t> y;  // [E, C, hidden] bf16 with the strides below, in elements
  int64_t expert_stride;
  int64_t row_stride;
  Array<const int64_t> ranges;         // as dispatch_receive left them
  Array<const int32_t> source_counts;  // null with late routing
  Array<const int16_t> experts;
  Array<const float> weights;  // null: unweighted
  const LowLatencyTokens* late_tokens;
  bool logfmt;
};

struct LowLatencyResult {
  Array<uint16_t> out;            // [tokens, hidden] bf16
  Array<const int64_t> topk_idx;  // [tokens, top_k] of this rank's own tokens
  int32_t tokens;
  Array<int64_t> wait_ns;  // [R], added to; may be null
};

class LowLatency {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive it. `epoch` is what
  // all signals in there have reached: 0 in fresh memory.
  LowLatency(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  // Each send returns the epoch that its receive must name. Indices are trusted: the caller has
  // checked them against the geometry. A geometry may change only while no call is in flight; the
  // first call of another one waits for all ranks to begin it too.
  //
  // Ranks that mean different calls throw BadArgument, with both values, and others than the one
  // that refused a call PeerRefused: from the send if the geometry is new, else from the receive.
  uint32_t dispatch_send(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens);
  void dispatch_receive(uint32_t epoch, const LowLatencyReceived& received);
  uint32_t combine_send(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs);
  void combine_receive(uint32_t epoch, const LowLatencyResult& result);

  // Takes part in a call whose input this rank has found bad: the call is void on every rank, each
  // of which throws PeerRefused with `reason`, and all stay in step.
  void refuse_dispatch(const std::string& reason) { dispatch_.refuse(reason); }
  void refuse_combine(const std::string& reason) { combine_.refuse(reason); }

  // Returns when every peer has read everything, so that another geometry may use the memory.
  void quiesce();
  // The same, having given up the calls in flight.
  void reset();

 private:
  // A row's way from its slot to the rows of a local expert.
  struct Placement {
    int32_t token;
    int32_t local;
    int64_t row;
  };
  // The outputs that make up what goes back for one token: some of `terms_`.
  struct Sum {
    int32_t token;
    size_t first_term;
  };
  // A routing table of one source, [max_tokens, top_k].
  struct Table {
    const int16_t* experts;
    const float* weights;  // null: unweighted
  };

  // What brings the routing weights that a call uses. With dispatch and with combine they come to
  // the same memory, so a change waits like a change of geometry.
  enum class Weights : int32_t { kNone, kWithDispatch, kWithCombine };

  uint32_t begin(LowLatencySequence& sequence, const LowLatencyGeometry& geometry,
                 RowEncoding encoding, Weights weights);
  void check_fits(const LowLatencyGeometry& geometry) const;
  void make_way(bool moves);
  void adopt(const LowLatencyGeometry& geometry);

  std::byte* area(int32_t rank, int64_t offset) const {
    return memory_.base(rank) + offset_ + offset;
  }
  int16_t* experts(int32_t rank, int64_t table, int64_t slot) const {
    return reinterpret_cast<int16_t*>(area(rank, table)) + slot * layout_.geometry.top_k;
  }
  float* weights(int32_t rank, int64_t slot) const {
    auto* table = reinterpret_cast<float*>(area(rank, layout_.weights_offset()));
    return table + slot * layout_.geometry.top_k;
  }

  void push_rows(const LowLatencyTokens& tokens, uint32_t epoch);
  void push_routing(const LowLatencyTokens& tokens, uint32_t epoch, int64_t experts_table) const;
  void unpack(int32_t source, int32_t tokens, uint32_t epoch, const LowLatencyReceived& received);
  void place(int32_t tokens, const Table& table, const LowLatencyReceived& received);
  void unpack_scales(const std::byte* slot, const Placement& to,
                     const LowLatencyReceived& received) const;
  Table table_of(int32_t source, uint32_t epoch, const LowLatencyOutputs& outputs) const;
  void gather(int32_t source, int32_t tokens, const Table& table, const LowLatencyOutputs& outputs);
  std::span<const ReduceTerm> terms_of(size_t sum) const;
  void write_result(int32_t source, size_t sum, uint32_t epoch, bool logfmt);
  void add_results(const int64_t* ids, int64_t token, uint32_t epoch, uint16_t* out);
  const std::byte* result_row(int32_t peer, int64_t token, uint32_t epoch) const {
    const int64_t slot = layout_.slot(parity_of(epoch), peer, token);
    return area(memory_.rank(), layout_.results_offset() + slot * layout_.row_stride());
  }
  uint8_t result_encoding(int32_t peer, int64_t token, uint32_t epoch) const {
    const int64_t slot = layout_.slot(parity_of(epoch), peer, token);
    return static_cast<uint8_t>(*area(memory_.rank(), layout_.encodings_offset() + slot));
  }

  SymmetricMemory& memory_;
  int64_t offset_;
  int64_t bytes_;
  LowLatencyLayout layout_{};
  bool laid_out_ = false;
  Weights weights_ = Weights::kNone;  // what has brought any since the memory was laid out
  LowLatencySequence dispatch_;
  LowLatencySequence combine_;
  LocalChoices choices_{0, 0};
  // Scratch of the call at hand.
  std::vector<std::byte> slot_;
  std::vector<float> sum_;
  std::vector<Placement> placements_;
  std::vector<ReduceTerm> terms_;
  std::vector<Sum> sums_;
  std::vector<uint8_t> contributes_;
  std::vector<int64_t> cursors_;
};

}  // namespace fanfold
