// Sizes and memory layouts, shared by host and device.
#pragma once

#include <cuda_runtime.h>
#include <cstdint>

namespace fanfold::probe {

constexpr int kRanks = 4;
constexpr int kCtas = 132;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

template <int Hidden, int TopK, int Experts>
struct Geometry {
  static constexpr int kHidden = Hidden;
  static constexpr int kTopK = TopK;
  static constexpr int kExperts = Experts;
  static constexpr int kTokens = 128;  // at most, per rank
  static constexpr int kLocalExperts = Experts / kRanks;
  static constexpr int kSlots = kRanks * kTokens;  // rows of one local expert's packed output
  static constexpr int kBlocks = Hidden / 128;     // one scale each

  // A unit is 16 bytes. A warp handles a segment: 32 units, and in dispatch one more unit with the
  // segment's four scales. Row strides are whole 128-byte lines.
  static constexpr int kDispatchSegments = Hidden / 512;
  static constexpr int kDispatchUnits = Hidden / 16;
  static constexpr int kDispatchRow = kDispatchUnits + kDispatchSegments;
  static constexpr int kDispatchStride = round_up(kDispatchRow, 8);
  static constexpr int kCombineSegments = Hidden / 256;
  static constexpr int kCombineUnits = Hidden / 8;

  static_assert(Hidden % 512 == 0, "the probes take whole segments only");
  static_assert(TopK <= 32 && Experts % kRanks == 0);
};

// What peers write during dispatch. Two halves, used alternately.
template <class G>
struct DispatchBuffer {
  uint4 rows[2][kRanks][G::kTokens][G::kDispatchStride];
  uint64_t headers[2][kRanks][G::kTokens][G::kTopK];
  uint32_t counts[2][kRanks][G::kLocalExperts];
  uint32_t flags[2][kRanks][G::kTokens][G::kDispatchSegments];
};

// What peers write during combine.
template <class G>
struct CombineBuffer {
  uint4 rows[2][kRanks][G::kTokens][G::kCombineUnits];
  uint32_t present[2][kRanks];
  uint32_t flags[2][kRanks][G::kTokens][G::kCombineSegments];
};

// One (token, expert) choice as the token's source tells it to a rank: which of the rank's experts,
// how many earlier rows this source sends to that expert, and the routing weight. The tag says in
// which use of the slot it was written; every entry is written in every use, so four bits suffice.
struct HeaderEntry {
  static constexpr uint32_t kElsewhere = 0xFFF;

  __host__ __device__ static uint64_t encode(uint32_t tag, uint32_t expert, uint32_t place,
                                             uint32_t weight_bits) {
    return (static_cast<uint64_t>(weight_bits) << 32) | (place << 16) | (expert << 4) | tag;
  }
  __host__ __device__ static uint32_t tag(uint64_t e) { return static_cast<uint32_t>(e) & 0xF; }
  __host__ __device__ static uint32_t expert(uint64_t e) {
    return (static_cast<uint32_t>(e) >> 4) & 0xFFF;
  }
  __host__ __device__ static uint32_t place(uint64_t e) { return static_cast<uint32_t>(e) >> 16; }
  __host__ __device__ static uint32_t weight_bits(uint64_t e) {
    return static_cast<uint32_t>(e >> 32);
  }
};

// How many rows one source sends to one expert, with an 8-bit tag as above.
struct CountWord {
  __host__ __device__ static uint32_t encode(uint32_t tag, uint32_t count) {
    return (count << 8) | tag;
  }
  __host__ __device__ static uint32_t tag(uint32_t w) { return w & 0xFF; }
  __host__ __device__ static uint32_t count(uint32_t w) { return w >> 8; }
};

// A call's number gives the half of the buffers it uses and the tag of what it writes there.
struct Epoch {
  uint32_t value;
  static constexpr uint32_t kFirst = 2;
  __host__ __device__ uint32_t half() const { return value & 1; }
  __host__ __device__ uint32_t header_tag() const { return (value >> 1) & 0xF; }
  __host__ __device__ uint32_t count_tag() const { return (value >> 1) & 0xFF; }
};

struct HandleEntry {
  int32_t slot;  // row of the packed output
  float weight;
};

// What combine must know of the dispatch before it.
template <class G>
struct Handle {
  int32_t entries_of[kRanks][G::kTokens];  // local experts of a (source, token)
  HandleEntry entries[kRanks][G::kTokens][G::kTopK];
  uint32_t ranks_of[G::kTokens];  // of this rank's own tokens: bit r says that rank r returns a row
};

// Where a rank's messages to each peer go. In a mirror of two GPUs each believes to be rank 0 of
// four and the other GPU stands for ranks 1 to 3: what one sends to rank p arrives as if from rank
// -p, so that each sends and receives what a rank of four does.
struct Route {
  int rank;
  int gpu_of[kRanks];
  int source_at[kRanks];  // the source that the peer takes this rank for

  static Route of_four(int gpu) {
    Route route{gpu, {}, {}};
    for (int p = 0; p < kRanks; ++p) {
      route.gpu_of[p] = p;
      route.source_at[p] = gpu;
    }
    return route;
  }
  static Route mirror(int gpu) {
    Route route{0, {}, {}};
    for (int p = 0; p < kRanks; ++p) {
      route.gpu_of[p] = p == 0 ? gpu : 1 - gpu;
      route.source_at[p] = (kRanks - p) % kRanks;
    }
    return route;
  }
  static Route of(int gpu, int gpus) { return gpus == kRanks ? of_four(gpu) : mirror(gpu); }
};

enum Phase : uint32_t { kSend = 1, kReceive = 2, kWhole = 3 };

// Nanoseconds of the moments that a CTA and its received segments pass; written by traced variants
// only.
struct TaskTrace {
  uint64_t arrived, done;
};
struct Trace {
  static constexpr int kTasks = 128;
  uint64_t start, sent, resolved, end;
  TaskTrace tasks[kTasks];
};

// Private to one CTA, so that no CTA ever waits for another of the same rank.
struct CtaEpochs {
  uint32_t send, receive, pad[6];
};

template <class G>
struct DispatchArgs {
  const uint4* x;             // [tokens][hidden] bf16
  const int64_t* topk_idx;    // [tokens][topk], -1 is no choice
  const float* topk_weights;  // [tokens][topk]
  int num_tokens;
  int rank;
  uint32_t phases;
  DispatchBuffer<G>* peers[kRanks];
  int source_at[kRanks];
  CtaEpochs* epochs;       // [kCtas]
  uint4* packed;           // [local experts][slots][hidden] e4m3
  float* packed_scales;    // [local experts][blocks][slots]
  int32_t* packed_counts;  // [local experts]
  Handle<G>* handle;
  uint32_t* error;
  Trace* trace;  // [kCtas]
};

template <class G>
struct CombineArgs {
  const uint4* y;  // [local experts][slots][hidden] bf16
  uint4* out;      // [tokens][hidden] bf16
  int num_tokens;
  int rank;
  uint32_t phases;
  CombineBuffer<G>* peers[kRanks];
  int source_at[kRanks];
  CtaEpochs* epochs;
  const Handle<G>* handle;
  uint32_t* error;
  Trace* trace;
};

}  // namespace fanfold::probe
