// What a kernel knows of ranks on other hosts, which it reaches through proxies or by NCCL's GIN.
#pragma once

#include "layout/gin.h"
#include "layout/protocol.h"
#include "layout/ring.h"

namespace fanfold {

// In the memory of a rank's GPU, where ranks are on several hosts.
struct RemoteHosts {
  uint32_t elsewhere[kMostRanks / 32];  // bit r % 32 of word r / 32: rank r is on another host
  unsigned char* received;              // memory that the network writes; of proxies, of the CPU
  int64_t origin;                       // of that memory among the offsets of commands
  // The same of rows, which may lie in memory of the GPU.
  unsigned char* received_rows;
  int64_t rows_origin;
  const RingView* rings;  // of kWarpLanes slots at least
  int32_t ring_count;     // the ring of peer p is rings[p % ring_count]
  // From where the network sends rows to each rank elsewhere.
  unsigned char* sent_rows[kMostRanks];
  GinHosts* gin;  // instead of rings
};

}  // namespace fanfold
