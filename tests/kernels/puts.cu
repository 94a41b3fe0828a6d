// Each rank puts bytes into every rank's window, its own included, with a signal, and waits until
// all have put theirs, or a time is over.
#include "nccl/device.cuh"

#include "constants.h"
#include "device/memory.cuh"
#include "device/warp.cuh"
#include "layout/types.h"

namespace fanfold {

struct PutsArgs {
  const ncclDevComm* comm;
  ncclWindow_t window;
  uint64_t from;     // offset of a block for each rank
  uint64_t to;       // offset of the blocks that come, by rank
  uint64_t bytes;    // of a block
  uint64_t awaited;  // value of the signal once all blocks of this round have come
  uint64_t timeout_ns;
  uint64_t* seen;  // value of the signal at the end
};

__global__ void __launch_bounds__(kThreads) put_and_wait(const PutsArgs args) {
  constexpr ncclGinSignal_t kArrived = 0;
  const ncclGin gin(*args.comm, 0);
  const ncclTeam world = ncclTeamWorld(*args.comm);
  for (int peer = static_cast<int>(threadIdx.x); peer < world.nRanks; peer += kThreads) {
    gin.put(world, peer, args.window, args.to + static_cast<uint64_t>(world.rank) * args.bytes,
            args.window, args.from + static_cast<uint64_t>(peer) * args.bytes, args.bytes,
            ncclGin_SignalAdd{kArrived, 1});
  }
  gin.flush(ncclCoopCta{});
  if (threadIdx.x != 0) return;
  const uint64_t begin = global_nanoseconds();
  uint64_t seen = gin.readSignal(kArrived);
  while (seen < args.awaited && global_nanoseconds() - begin < args.timeout_ns)
    seen = gin.readSignal(kArrived);
  *args.seen = seen;
}

}  // namespace fanfold
