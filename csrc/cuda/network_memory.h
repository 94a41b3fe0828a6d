// A GPU's memory as a network needs it that reads and writes it without the CPU.
#pragma once

#include <cstdint>
#include <string_view>

namespace fanfold::cuda {

// Why kernels of the GPU could not read there what NICs write; empty if they can. Throws
// Unavailable and DriverFailure.
std::string_view why_no_network_memory(int32_t device);

// A descriptor (dmabuf) of whole pages of a GPU's memory, which the caller closes; -1 if the driver
// makes none of them.
int make_dmabuf(uintptr_t address, int64_t bytes);

}  // namespace fanfold::cuda
