// Ranks that are in different calls and would wait for each other for ever: each publishes which
// kernel it is in (Progress), and a wait that lasts long compares.
#pragma once

#include "protocol/masks.cuh"
#include "protocol/peer.cuh"

namespace fanfold {

template <class Args>
__device__ __forceinline__ Progress progress_of(const Args& args, int rank) {
  return {Peer(args, rank).look_up(args.at.progress)};
}

// Publishes which kernel this rank is in, before it waits for anybody.
template <CallKind Kind, class Args>
__device__ __forceinline__ void publish_progress(const Args& args, bool needs_headers) {
  if (threadIdx.x % kWarpLanes != 0) return;
  Progress own = Progress::of(Kind, args.phases, needs_headers);
  for (int k = 0; k < 2; ++k) {
    const CtaEpochs before = args.state->epochs[k][blockIdx.x];
    const bool begins = k == static_cast<int>(Kind) && (args.phases & kSend) != 0;
    own = own.with_counts(k, before.send - kFirstEpoch + (begins ? 1u : 0u),
                          before.receive - kFirstEpoch);
  }
  Peer(args, args.rank).put(args.at.progress, own.word);
}

template <class Args>
__device__ __forceinline__ void report_other_call(const Args& args, Progress own, int peer,
                                                  Progress theirs) {
  const auto kind = static_cast<CallKind>(own.kind());
  const CtaEpochs& ours = args.state->epochs[own.kind()][blockIdx.x];
  const uint32_t epoch = own.does(kReceive) ? ours.receive : ours.send;
  // Their count is near this rank's own, which is whole.
  const int which = theirs.kind();
  const uint32_t near = args.state->epochs[which][blockIdx.x].send - kFirstEpoch;
  const int32_t number = static_cast<int32_t>(near) + Progress::shortfall(near, theirs.call());
  store_report(&args.reports->kinds[static_cast<int>(ReportKind::kOtherCall)],
               {reported_call(static_cast<uint32_t>(kind), peer), epoch, 1 + which, number});
  store_relaxed_gpu(&args.state->failed, call_id(kind, epoch));
}

template <class Args>
__device__ __forceinline__ bool find_own_other_call(const Args& args) {
#pragma unroll 1
  for (int peer = 0; peer < kRanks; ++peer) {
    const Progress own = progress_of(args, args.rank);
    const Progress theirs = progress_of(args, peer);
    if (peer == args.rank || !own.needs(theirs) || !theirs.needs(own) || is_masked(args, peer))
      continue;
    report_other_call(args, own, peer, theirs);
    return true;
  }
  return false;
}

// Whether this kernel can never end, because a live peer is in another call that cannot end either
// (Progress::needs): reports the calls of both and fails this one. Called where a wait has lasted
// long, as it reads from the memory of peers; apart, so that no wait carries it in its registers.
// A kernel that a word says needs another has not ended when that other's word is read, so two
// words that need each other are of one moment. Words are loaded anew for each pair, as the callers
// leave few registers.
//
// Of many ranks a peer is compared with this rank only, as all pairs would take seconds: a rank
// that waits for two others which are in different calls reports that one is late.
template <class Args>
__device__ __noinline__ bool find_other_call(const Args& args) {
  if constexpr (kRanks > kFewRanks) return find_own_other_call(args);
#pragma unroll 1
  for (int pair = 0; pair < kRanks * kRanks; ++pair) {
    const int peer = pair / kRanks;
    const Progress own = progress_of(args, args.rank);
    const Progress theirs = progress_of(args, peer);
    if (peer == args.rank || !own.needs(theirs) || is_masked(args, peer)) {
      pair += kRanks - 1 - pair % kRanks;
      continue;
    }
    const Progress other = progress_of(args, pair % kRanks);
    if (pair % kRanks == peer || !theirs.needs(other) || !other.needs(theirs)) continue;
    report_other_call(args, own, peer, theirs);
    return true;
  }
  return false;
}

}  // namespace fanfold
