// The host side of the low-latency kernels: the arguments of a geometry's calls, and their launch.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/kernel.h"
#include "layout/low_latency_device.h"

namespace fanfold::cuda {

// Where one rank's calls find their memory, and how they wait.
struct LowLatencyPlace {
  int32_t rank;
  std::array<uintptr_t, kMostRanks> peers;  // every rank's symmetric memory
  uintptr_t state;                          // LowLatencyState, in device memory
  uintptr_t reports;                        // LowLatencyReports, in pinned host memory
  int64_t timeout_ns;
  bool mask_late;
};

// The grid of a geometry's kernels. Every launch of a kind has the same one, as each CTA counts its
// own calls.
struct LowLatencyGrid {
  int32_t ctas;
  int32_t senders;  // that push rows in a dispatch
};

// The calls of one geometry.
class LowLatency {
 public:
  LowLatency(const LowLatencyPlace& place, const LowLatencyGeometry& geometry, bool late,
             const LowLatencyGrid& grid);

  // Arguments with all but the call's own filled in.
  // `encoding` and `weights` are those of LowLatencySignature.
  DispatchArgs dispatch_arguments(int32_t encoding, int32_t weights) const;
  CombineArgs combine_arguments(bool logfmt, int32_t weights) const;

 private:
  CallArgs call_arguments(int32_t encoding, int32_t weights) const;

  LowLatencyPlace place_;
  LowLatencyGeometry geometry_;
  LowLatencyGrid grid_;
  LowLatencyDeviceOffsets offsets_;
};

// Throws BadArgument, naming the bound, where the kernels cannot serve the geometry.
void check_device_geometry(const LowLatencyGeometry& geometry);

}  // namespace fanfold::cuda
