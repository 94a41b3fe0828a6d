// Every thread pushes commands into one ring. kThreads and kWay are constants of the kernel. kWay
// is how: 0, a thread takes its ticket first; 1, not before there is room; 2, a warp takes the
// tickets of its lanes together; 3, likewise, but only odd lanes of the first warps have commands.
#include "constants.h"
#include "protocol/ring.cuh"

namespace fanfold {

struct PushCommandsArgs {
  RingView ring;
  int64_t timeout_ns;
  uint32_t* ends;     // [threads of all CTAs], how each thread has ended
  uint32_t commands;  // of each thread
};

enum PushCommandsEnd : uint32_t { kPushedAll = 1, kStayedFull = 2, kDoesNotFit = 3 };

namespace {

__device__ __forceinline__ bool push_or_expire(const PushCommandsArgs& args,
                                               const Command& command) {
  DeviceMemory memory;
  RingDeadline deadline(args.timeout_ns);
  if constexpr (kWay == 0) {
    uint64_t ticket = 0;
    return ring_push(args.ring, memory, command, deadline, ticket);
  } else if constexpr (kWay >= 2) {
    const bool has_command = kWay == 2 || (threadIdx.x < kWarpLanes && threadIdx.x % 2 == 1);
    const bool done = ring_push_together(args.ring, has_command, command, deadline);
    return __all_sync(kFullWarp, done);
  } else {
    while (ring_try_push(args.ring, memory, command).outcome != RingOutcome::kPushed) {
      if (deadline.expired()) return false;
    }
    return true;
  }
}

__device__ __forceinline__ PushCommandsEnd push_all(const PushCommandsArgs& args, uint32_t thread) {
  for (uint32_t i = 0; i < args.commands; ++i) {
    const CommandFields fields = {.kind = CommandKind::kWrite,
                                  .peer = thread,
                                  .counter = i % 16,
                                  .bytes = i,
                                  .amount = 0,
                                  .source = kCommandUnit * i,
                                  .target = kCommandUnit * thread};
    Command command{};
    if (Command::make(fields, command) != CommandField::kFits) return kDoesNotFit;
    if (!push_or_expire(args, command)) return kStayedFull;
  }
  return kPushedAll;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    push_commands(const __grid_constant__ PushCommandsArgs args) {
  const auto thread = static_cast<uint32_t>(blockIdx.x * kThreads + threadIdx.x);
  args.ends[thread] = push_all(args, thread);
}

}  // namespace fanfold
