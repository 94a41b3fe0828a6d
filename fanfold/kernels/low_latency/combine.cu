// Low-latency combine: weigh and sum on the expert side, return one row for each (token, rank), add
// the ranks at the token's source. Every CTA sends, then adds. The grid needs no barrier, but all
// of it must be on the GPU at once, as in dispatch.
#include "low_latency/combine_receive.cuh"
#include "low_latency/combine_send.cuh"

namespace fanfold::low_latency {

__global__ void __launch_bounds__(kThreads, 1) combine(const __grid_constant__ CombineArgs args) {
  __shared__ CombineShared shared;
  const auto is_aborted = [&] { return of_aborted_dispatch(args); };
  // The last CTA has no header to send, as long as there are fewer tokens than CTAs.
  const int ack_cta = kLate ? static_cast<int>(gridDim.x) - 1 : args.call.senders - 1;
  run_call<CallKind::kCombine, kAwaitsSignals>(args.call, ack_cta, is_aborted,
                                               [&](const Prologue& seen) {
                                                 if constexpr (kAwaitsSignals) {
                                                   CombineSend(args, shared, seen).run_as_ready();
                                                 } else {
                                                   CombineReceive receive(args, seen);
                                                   if (args.call.phases & kSend)
                                                     CombineSend(args, shared, seen).run();
                                                   if (args.call.phases & kReceive) receive.run();
                                                 }
                                               });
}

}  // namespace fanfold::low_latency
