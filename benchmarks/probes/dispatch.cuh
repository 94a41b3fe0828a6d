// A low-latency dispatch over peer memory: quantise, push one row per (token, rank), fan out.
// No CTA waits for another of its own rank, so the grid needs no barrier.
#pragma once

#include "dispatch_receive.cuh"
#include "dispatch_send.cuh"

namespace fanfold::probe {

template <class G, class P>
__device__ void stamp(const DispatchArgs<G>& args, uint64_t Trace::* moment) {
  if (P::kTrace && threadIdx.x == 0) args.trace[blockIdx.x].*moment = global_nanoseconds();
}

template <class G, class P>
__global__ void __launch_bounds__(DispatchShape<G, P>::kThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArgs<G> args) {
  __shared__ alignas(128) typename DispatchShape<G, P>::Shared shared;
  allow_next_kernel();
  wait_for_previous_kernel();
  stamp<G, P>(args, &Trace::start);
  CtaEpochs& epochs = args.epochs[blockIdx.x];
  const CtaEpochs now = epochs;
  const bool sends = args.phases & kSend;
  const bool receives = args.phases & kReceive;
  if (sends) DispatchSend<G, P>(args, shared, now.send).run();
  stamp<G, P>(args, &Trace::sent);
  if (receives && static_cast<int>(blockIdx.x) >= P::kSenders) {
    DispatchReceive<G, P>(args, shared, now.receive).run();
  } else {
    __syncthreads();
  }
  // Every thread has passed a barrier since it read the epochs.
  if (threadIdx.x == 0) epochs.send = now.send + (sends ? 1 : 0);
  if (threadIdx.x == 0) epochs.receive = now.receive + (receives ? 1 : 0);
  if (P::kPush == Push::kBulk && threadIdx.x == 0) bulk_wait_source_read();
  if (P::kTrace) __syncthreads();
  stamp<G, P>(args, &Trace::end);
}

}  // namespace fanfold::probe
