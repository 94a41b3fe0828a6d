// Acknowledgements: a rank sends every peer which calls it has received whole. The peer then writes
// into the half of the memory that those calls have used.
#pragma once

#include "protocol/call.cuh"
#include "protocol/peer.cuh"

namespace fanfold {

// What this rank has received before this kernel, by the counters of this CTA: those of others may
// count this very kernel already.
template <class Args>
__device__ __forceinline__ Acknowledgement received_calls(const Args& args) {
  const auto& epochs = args.state->epochs;
  return {epochs[0][blockIdx.x].receive - kFirstEpoch, epochs[1][blockIdx.x].receive - kFirstEpoch};
}

// What a peer has acknowledged. An acquire, as the puts that follow must not overtake the peer's
// last look at that memory; a branch between a relaxed load and a store orders nothing in PTX. A
// bench compiles the relaxed load (kAcquireAcks = 0) to know what the acquire costs.
__device__ __forceinline__ Acknowledgement load_ack(const uint64_t* place) {
  return Acknowledgement::decode(kAcquireAcks != 0 ? load_acquire_system(place)
                                                   : load_relaxed_system(place));
}

// Whether a peer with this acknowledgement has received every call of the kind before `epoch` but
// the last one.
__device__ __forceinline__ bool frees_half(const Acknowledgement& ack, CallKind kind,
                                           uint32_t epoch) {
  return static_cast<int32_t>(ack.of(kind) + kFirstEpoch + 1u - epoch) >= 0;
}

}  // namespace fanfold
