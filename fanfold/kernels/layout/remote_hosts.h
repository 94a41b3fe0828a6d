// What a kernel knows of ranks on other hosts, which it reaches through proxies.
#pragma once

#include "layout/protocol.h"
#include "layout/ring.h"

namespace fanfold {

// In the memory of a rank's GPU, where ranks are on several hosts.
struct RemoteHosts {
  uint32_t elsewhere[kMostRanks / 32];  // bit r % 32 of word r / 32: rank r is on another host
  unsigned char* received;              // memory of the CPU that the network writes
  int64_t origin;                       // of that memory among the offsets of commands
  const RingView* rings;                // of kWarpLanes slots at least
  int32_t ring_count;                   // the ring of peer p is rings[p % ring_count]
};

}  // namespace fanfold
