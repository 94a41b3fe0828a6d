// Every thread pushes commands into one ring, in one of the two ways of protocol/ring.h. kThreads
// and kTries are constants of the kernel: with kTries a thread takes no ticket before there is
// room.
#include "constants.h"
#include "protocol/ring.cuh"

namespace fanfold {

struct RingPushArgs {
  RingView ring;
  int64_t timeout_ns;
  uint32_t* ends;     // [threads of all CTAs], how each thread has ended
  uint32_t commands;  // of each thread
};

enum RingPushEnd : uint32_t { kPushedAll = 1, kStayedFull = 2, kDoesNotFit = 3 };

namespace {

__device__ __forceinline__ bool push_or_expire(const RingPushArgs& args, const Command& command) {
  DeviceMemory memory;
  RingDeadline deadline(args.timeout_ns);
  if constexpr (kTries == 0) {
    uint64_t ticket = 0;
    return ring_push(args.ring, memory, command, deadline, ticket);
  } else {
    while (ring_try_push(args.ring, memory, command).outcome != RingOutcome::kPushed) {
      if (deadline.expired()) return false;
    }
    return true;
  }
}

__device__ __forceinline__ RingPushEnd push_all(const RingPushArgs& args, uint32_t thread) {
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
    push_commands(const __grid_constant__ RingPushArgs args) {
  const auto thread = static_cast<uint32_t>(blockIdx.x * kThreads + threadIdx.x);
  args.ends[thread] = push_all(args, thread);
}

}  // namespace fanfold
