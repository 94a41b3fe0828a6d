// The host side of the high-throughput kernels: the arguments of their calls, and their bounds.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/kernel.h"
#include "layout/high_throughput_device.h"

namespace fanfold::cuda {

// Where one rank's calls find their memory, and how they wait.
struct HighThroughputPlace {
  int32_t rank;
  int32_t ranks;
  std::array<uintptr_t, kMostRanks> peers;  // every rank's symmetric memory
  uintptr_t state;                          // HighThroughputState, in device memory, zero at first
  uintptr_t reports;                        // Report[kReportKinds], in pinned host memory
  int64_t timeout_ns;
  int32_t max_tokens;  // of any rank, the same on all
  int64_t ring_bytes;  // of each of the rings, of which there is one for each rank
};

// What ranks must agree about in one call, besides what the place says. Slots follow from it.
struct HighThroughputShape {
  HighThroughputPhase phase;
  int32_t experts;
  int32_t top_k;
  int32_t row_bytes;     // 0 in a plan
  int32_t scale_words;   // dispatch
  int32_t slot_bytes;    // of a row in a ring; 0 in a plan
  int32_t expert_major;  // 1 or 0
  int32_t in_place;      // likewise
  int32_t slices;        // of a row in a combine; 1 elsewhere
  int32_t variant;       // whatever else tells two calls apart, such as new routing, weights
  int32_t alignment;     // of a plan
};

// CTAs of a launch.
struct HighThroughputGrid {
  int32_t ctas;
  int32_t senders;  // that begin as senders in a dispatch
};

// The calls over one part of a symmetric memory.
class HighThroughput {
 public:
  // Throws BadArgument for what the kernels' words cannot hold.
  explicit HighThroughput(const HighThroughputPlace& place);

  // Of each ring, as many as a call of this shape uses.
  int32_t slots(const HighThroughputShape& shape) const;

  // Arguments with all but a call's tensors filled in. Throws BadArgument for a shape, or a grid,
  // that the kernels cannot serve.
  PlanArgs plan_arguments(const HighThroughputShape& shape, const HighThroughputGrid& grid) const;
  HighThroughputDispatchArgs dispatch_arguments(const HighThroughputShape& shape,
                                                const HighThroughputGrid& grid) const;
  HighThroughputCombineArgs combine_arguments(const HighThroughputShape& shape,
                                              const HighThroughputGrid& grid) const;

 private:
  HighThroughputArgs call_arguments(const HighThroughputShape& shape,
                                    const HighThroughputGrid& grid) const;
  void check_shape(const HighThroughputShape& shape) const;
  void check_grid(const HighThroughputGrid& grid) const;
  uint32_t signature_of(const HighThroughputShape& shape) const;

  HighThroughputPlace place_;
  HighThroughputOffsets offsets_;
};

// Slots of a ring, batches of rows each.
inline constexpr int32_t kLeastRingSlots = 4;

// How a region is divided among the rings of `ranks`.
HighThroughputOffsets high_throughput_offsets(int32_t ranks, int64_t ring_bytes);

}  // namespace fanfold::cuda
