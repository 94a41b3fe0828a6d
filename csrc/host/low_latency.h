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
#include <string>
#include <vector>

#include "host/reduce.h"
#include "layout/low_latency.h"
#include "memory/symmetric.h"

namespace fanfold {

enum class RowEncoding : int32_t { kBf16, kFp8, kFp8PowerOfTwo };
enum class ScaleFormat : int32_t { kFloat32, kUe8m0 };

struct LowLatencyTokens {
  const uint16_t* x;          // [tokens, hidden] bf16, contiguous
  const int64_t* topk_idx;    // [tokens, top_k], -1 for none
  const float* topk_weights;  // [tokens, top_k], or null if they come only with combine
  int32_t tokens;
  RowEncoding encoding;
};

// Where dispatch_receive leaves what arrived. E = local experts, C = expert_capacity, R = ranks,
// M = max_tokens, K = top_k. What is null is not wanted.
struct LowLatencyReceived {
  std::byte* rows;         // [E, C, hidden] bf16 or e4m3
  std::byte* scales;       // [E, blocks, C] float32, or [E, ceil(blocks / 4), C] int32 of UE8M0
  int32_t* counts;         // [E] rows of each expert
  int32_t* source_tokens;  // [E, C] the row's token index at its source
  int64_t* ranges;         // [E, R] rows from each source: count | first row << 32
  float* row_weights;      // [E, C] the row's weight: what its token gives this expert
  int32_t* source_counts;  // [R] tokens of each source
  int16_t* experts;        // [R, M, K] the routing of all sources
  float* weights;          // [R, M, K]
  int32_t* expert_totals;  // [E], added to
  int64_t* wait_ns;        // [R] nanoseconds waited for each source, added to
  RowEncoding encoding;
  ScaleFormat scale_format;
};

// The expert side of combine. The routing of the sources is what dispatch_receive left, or, if
// `late_tokens` is given, what every source pushes now.
struct LowLatencyOutputs {
  const uint16_t* y;  // [E, C, hidden] bf16 with the strides below, in elements
  int64_t expert_stride;
  int64_t row_stride;
  const int64_t* ranges;         // as dispatch_receive left them
  const int32_t* source_counts;  // null with late routing
  const int16_t* experts;
  const float* weights;  // null: unweighted
  const LowLatencyTokens* late_tokens;
  bool logfmt;
};

struct LowLatencyResult {
  uint16_t* out;            // [tokens, hidden] bf16
  const int64_t* topk_idx;  // [tokens, top_k] of this rank's own tokens
  int32_t tokens;
  int64_t* wait_ns;  // [R], added to; may be null
};

class LowLatency {
 public:
  // Uses `bytes` at `offset` of the modes' part of `memory`, which must outlive it. `epoch` is what
  // all signals in there have reached: 0 in fresh memory.
  LowLatency(SymmetricMemory& memory, int64_t offset, int64_t bytes, uint32_t epoch = 0);

  // Each send returns the epoch that its receive must name. Indices are trusted: the caller has
  // checked them against the geometry. A geometry may change only while no call is in flight.
  uint32_t dispatch_send(const LowLatencyGeometry& geometry, const LowLatencyTokens& tokens);
  void dispatch_receive(uint32_t epoch, const LowLatencyReceived& received);
  uint32_t combine_send(const LowLatencyGeometry& geometry, const LowLatencyOutputs& outputs);
  void combine_receive(uint32_t epoch, const LowLatencyResult& result);

  // Takes part in a call whose input this rank has found bad: the call is void on every rank, each
  // of which throws PeerRefused with `reason`, and all stay in step. `geometry` is the call's: the
  // others write in it, so this rank must know when it changes. Without one it is the last call's.
  void refuse_dispatch(const std::string& reason, const LowLatencyGeometry* geometry = nullptr);
  void refuse_combine(const std::string& reason, const LowLatencyGeometry* geometry = nullptr);

  // Returns when every peer has read everything, so that another geometry may use the memory.
  void quiesce();

 private:
  // The calls of one kind: their number, which are in flight, and which refusal they met.
  struct Sequence {
    Phase phase;
    LowLatencySignals::Kind arrival;
    LowLatencySignals::Kind taken;
    uint32_t epoch = 0;
    bool in_flight[kParities] = {false, false};
    int32_t refused_by[kParities] = {-1, -1};
  };

  uint32_t begin(Sequence& sequence);
  void finish(Sequence& sequence, uint32_t epoch);
  void refuse(Sequence& sequence, const std::string& reason, const LowLatencyGeometry* geometry);
  void adopt(const LowLatencyGeometry& geometry);
  void require_in_flight(const Sequence& sequence, uint32_t epoch) const;

  int64_t signal(LowLatencySignals::Kind kind, uint32_t epoch, int32_t peer) const {
    return offset_ + signals_.offset(kind, parity_of(epoch), peer);
  }
  int64_t taken(LowLatencySignals::Kind kind, int32_t peer) const {
    return offset_ + signals_.offset(kind, 0, peer);
  }
  std::byte* area(int32_t rank, int64_t offset) const {
    return memory_.base(rank) + offset_ + offset;
  }

  int32_t await(Sequence& sequence, LowLatencySignals::Kind kind, uint32_t epoch, int32_t peer,
                int64_t* wait_ns);
  void push_rows(const LowLatencyTokens& tokens, uint32_t epoch);
  void push_routing(const LowLatencyTokens& tokens, uint32_t epoch, int64_t experts_offset);
  void unpack(int32_t source, int32_t tokens, uint32_t epoch, const LowLatencyReceived& received);
  void unpack_row(const std::byte* slot, int64_t expert, int64_t row,
                  const LowLatencyReceived& received) const;
  int32_t reduce_rows(int32_t source, int32_t tokens, uint32_t epoch,
                      const LowLatencyOutputs& outputs);
  void write_result(int32_t source, int64_t token, uint32_t epoch, bool logfmt);
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
  LowLatencySignals signals_;
  LowLatencyLayout layout_{};
  Sequence dispatch_;
  Sequence combine_;
  // Scratch of the call at hand.
  std::vector<std::byte> slot_;
  std::vector<float> sum_;
  std::vector<ReduceTerm> terms_;
  std::vector<uint8_t> contributes_;
  std::vector<int64_t> cursors_;
};

}  // namespace fanfold
