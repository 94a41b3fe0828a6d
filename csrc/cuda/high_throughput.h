// The host side of the high-throughput kernels: fills in and checks the arguments of their calls.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/kernel.h"
#include "layout/high_throughput_device.h"

namespace fanfold::cuda {

// The memory of one rank's calls, and the bound of their waits.
struct HighThroughputPlace {
  int32_t rank;
  int32_t ranks;
  std::array<uintptr_t, kMostRanks> peers;  // every rank's symmetric memory
  uintptr_t state;                          // HighThroughputState, in device memory, zero at first
  uintptr_t reports;                        // Report[kReportKinds], in pinned host memory
  int64_t timeout_ns;
  int32_t max_tokens;  // of any rank; the same on all ranks
  int64_t ring_bytes;  // of each ring; there is one ring for each rank
};

// The values of a call, besides those of HighThroughputPlace, that must be the same on all ranks.
// The number of slots follows from them.
struct HighThroughputShape {
  HighThroughputPhase phase;
  int32_t experts;
  int32_t top_k;
  int32_t row_bytes = 0;     // 0 in a plan
  int32_t scale_words = 0;   // dispatch
  int32_t slot_bytes = 0;    // of a row in a ring; 0 in a plan
  int32_t expert_major = 0;  // 1 or 0
  int32_t in_place = 0;      // 1 or 0
  int32_t kept_rings = 0;  // whose room a source has for rows that readers load; 0: rows are pushed
  int32_t slices = 1;      // of a row in a combine
  int32_t variant = 0;     // further options of the call as a number, as new routing or weights
  int32_t alignment = 1;   // of a plan
};

// CTAs of a launch.
struct HighThroughputGrid {
  int32_t ctas;
  int32_t senders;  // CTAs that begin as senders in a dispatch
};

// Makes the arguments of the calls over one part of a symmetric memory.
class HighThroughput {
 public:
  // Throws BadArgument for values that do not fit the kernels' words.
  explicit HighThroughput(const HighThroughputPlace& place);

  // The number of slots of each ring that a call of this shape uses.
  int32_t slots(const HighThroughputShape& shape) const;

  // Return arguments that are complete except for the call's tensors. Throw BadArgument for a shape
  // or a grid that the kernels do not support.
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

// The fewest slots of a ring; each slot holds a batch of rows.
inline constexpr int32_t kLeastRingSlots = 4;

// The offsets of all areas of a region, for `ranks` rings of `ring_bytes` each.
HighThroughputOffsets high_throughput_offsets(int32_t ranks, int64_t ring_bytes);

}  // namespace fanfold::cuda
