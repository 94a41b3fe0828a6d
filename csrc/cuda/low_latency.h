// The host side of the low-latency kernels: fills in and checks the arguments of their calls.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/kernel.h"
#include "layout/low_latency_device.h"

namespace fanfold::cuda {

// The memory of one rank's calls, and the bound of their waits.
struct LowLatencyPlace {
  int32_t rank;
  std::array<uintptr_t, kMostRanks> peers;  // every rank's symmetric memory
  uintptr_t state;                          // LowLatencyState, in device memory
  uintptr_t reports;                        // LowLatencyReports, in pinned host memory
  int64_t timeout_ns;
  bool mask_late;
};

// The grid of a geometry's kernels. It must be the same for every launch of a kind, because each
// CTA counts its own calls; a kernel with kAwaitsSignals counts for all and takes any grid.
struct LowLatencyGrid {
  int32_t ctas;
  int32_t senders;  // CTAs that push rows in a dispatch
};

// Makes the arguments of the calls of one geometry.
class LowLatency {
 public:
  // `late` and `token_major` are the fields of LowLatencyDeviceLayout.
  LowLatency(const LowLatencyPlace& place, const LowLatencyGeometry& geometry, bool late,
             const LowLatencyGrid& grid, bool token_major = false);

  // Return arguments that are complete except for the call's tensors. `encoding` and `weights` are
  // the fields of LowLatencySignature.
  DispatchArgs dispatch_arguments(int32_t encoding, int32_t weights) const;
  CombineArgs combine_arguments(bool logfmt, int32_t weights) const;

 private:
  CallArgs call_arguments(int32_t encoding, int32_t weights) const;

  LowLatencyPlace place_;
  LowLatencyGeometry geometry_;
  LowLatencyGrid grid_;
  LowLatencyDeviceOffsets offsets_;
};

// Throws BadArgument, with the bound, if the kernels do not support the geometry.
void check_device_geometry(const LowLatencyGeometry& geometry);

}  // namespace fanfold::cuda
