// By what emulated kernels reach the network of gin.hpp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulation {

struct GinPut {
  int peer;
  size_t to, from, bytes;
  int signal;  // -1: none
  uint64_t add;
  int counter;
};

// In the memory of a rank, which the kernels' libraries take for ncclDevComm.
struct GinDevice {
  int rank, ranks;
  void* network;
  void (*put)(void* network, int rank, const GinPut& put);
  uint64_t (*signal)(void* network, int rank, int signal);
  uint64_t (*counter)(void* network, int rank, int counter);
};

}  // namespace emulation
