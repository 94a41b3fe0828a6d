// What the kernels of a rank need to reach ranks on other hosts by NCCL's GIN (layout/gin.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout/low_latency_hosts.h"

namespace fanfold::cuda {

// Of one rank's window.
struct GinWindow {
  int32_t rank;
  std::vector<int32_t> hosts;  // of each rank
  uintptr_t communicator;      // addresses in the GPU's memory
  uintptr_t window;
  uintptr_t memory;
  int64_t received;  // as GinHosts has them
  int64_t sent;
  int32_t slots;
  std::vector<int64_t> words;
  std::vector<int64_t> rows;
};

// What begins in the GPU's memory at the address `at` with LowLatencyHosts, before the first call:
// that, then GinHosts. Throws BadArgument if the sizes do not fit each other.
std::vector<std::byte> hosts_block(const GinWindow& window, uintptr_t at);

}  // namespace fanfold::cuda
