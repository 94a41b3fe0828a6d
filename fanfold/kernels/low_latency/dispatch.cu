// Low-latency dispatch: quantise, push one row to each rank of a token, fan out to local experts.
// The grid needs no barrier, but all of it must be on the GPU at once: receivers wait for words
// that other CTAs write, here and on the peers.
#include "low_latency/dispatch_receive.cuh"
#include "low_latency/dispatch_send.cuh"

namespace fanfold::low_latency {

__global__ void __launch_bounds__(kThreads, 1) dispatch(const __grid_constant__ DispatchArgs args) {
  __shared__ DispatchShared shared;
  const auto is_aborted = [] { return false; };
  const int ack_cta = args.call.senders - 1;  // a CTA that only sends
  run_call<CallKind::kDispatch>(args.call, ack_cta, is_aborted, [&](const Prologue& seen) {
    if (args.call.phases & kSend) DispatchSend(args, shared, seen).run();
    if (args.call.phases & kReceive) DispatchReceive(args, shared, seen).run();
  });
}

}  // namespace fanfold::low_latency
