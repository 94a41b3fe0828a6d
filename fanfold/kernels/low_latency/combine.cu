// Low-latency combine: weigh and sum on the expert side, return one row for each (token, rank), add
// the ranks at the token's source. Every CTA sends, then adds. No CTA waits for another of its own
// rank, so the grid needs no barrier.
#include "low_latency/combine_receive.cuh"
#include "low_latency/combine_send.cuh"

using namespace fanfold;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    low_latency_combine(const __grid_constant__ CombineArgs args) {
  __shared__ alignas(16) CombineShared shared;
  run_call<CallKind::kCombine>(args.call, [&](const Prologue& seen) {
    CombineReceive receive(args, seen);
    if (args.call.phases & kSend) CombineSend(args, shared, seen).run();
    if (args.call.phases & kReceive) receive.run();
  });
}
