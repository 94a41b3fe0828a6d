// Peers that are late: a call goes on without them, or fails.
#pragma once

#include "protocol/call.cuh"

namespace fanfold {

template <class Args>
__device__ __forceinline__ bool is_masked(const Args& args, int peer) {
  return load_relaxed_gpu(reinterpret_cast<const uint32_t*>(&args.state->masked[peer])) != 0;
}

// In place of what a peer has acknowledged, in waits for anything else.
inline constexpr uint32_t kNoAck = ~0u;

// Masks a peer that is late, or fails the call. Apart, so that no wait carries it in its registers.
template <CallKind Kind, class Args>
__device__ __noinline__ void time_out(const Args& args, int peer, uint32_t epoch,
                                      uint32_t acknowledged) {
  if (args.mask_late != 0) {
    store_relaxed_gpu(reinterpret_cast<uint32_t*>(&args.state->masked[peer]), 1u);
    store_relaxed_system(&args.reports->late[peer], call_id(Kind, epoch));
    return;
  }
  store_relaxed_gpu(&args.state->failed, call_id(Kind, epoch));
  const bool of_ack = acknowledged != kNoAck;
  store_report(&args.reports->kinds[static_cast<int>(ReportKind::kTimeout)],
               {reported_call(static_cast<uint32_t>(Kind), peer), epoch,
                of_ack ? static_cast<int32_t>(acknowledged) : 0, of_ack ? 1 : 0});
}

}  // namespace fanfold
