// Low-latency dispatch: quantise, push one row to each rank of a token, fan out to local experts.
// No CTA waits for another of its own rank, so the grid needs no barrier.
#include "low_latency/dispatch_receive.cuh"
#include "low_latency/dispatch_send.cuh"

using namespace fanfold;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    low_latency_dispatch(const __grid_constant__ DispatchArgs args) {
  __shared__ alignas(16) DispatchShared shared;
  run_call<CallKind::kDispatch>(args.call, [&](const Prologue& seen) {
    if (args.call.phases & kSend) DispatchSend(args, shared, seen).run();
    if (args.call.phases & kReceive) DispatchReceive(args, shared, seen).run();
  });
}
