// What the last CTA of a call's send half does for ranks on other hosts. All CTAs have stored rows,
// headers and counts in the send areas; it pushes a command for each run of them, and the word that
// says what is there.
#pragma once

#include "low_latency/headers.cuh"

namespace fanfold {

// Whether this CTA is the last of the grid to come here. All threads of every CTA come, once they
// have stored what they send. What the last CTA pushes then comes after everything that the others
// have stored: each hands its stores on by a fence for the whole system, as a proxy and a network
// read them and no threads of this GPU.
__device__ __forceinline__ bool is_last_cta(uint32_t* finished) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    fence_system();
    is_last = add_release_gpu(finished, 1) + 1 == gridDim.x;
    fence_system();
    if (is_last) store_relaxed_gpu(finished, 0);
  }
  __syncthreads();
  return is_last;
}

// A warp's commands for one peer. Once one has found no room in time, the others are not pushed:
// the peer never gets the word, and is late here.
template <CallKind Kind>
class HostSender {
 public:
  __device__ HostSender(const Call<Kind>& call, int peer) : call_(call), peer_(peer) {}

  // The tables in front of the rows: counts of a dispatch, and headers if the kernel sends any.
  __device__ void push_tables() {
    const LowLatencyHostsLayout layout = call_.host_layout();
    const int64_t bytes = layout.counts_bytes(Kind) + layout.header_bytes(call_.args.tokens);
    const int64_t begin = layout.block(Kind, call_.half(), writer().rank);
    push(call_.lane == 0 && bytes > 0, words_command(hosts(), peer_, begin, bytes));
  }

  // The rows of those of the first `tokens` tokens of which `has_row(token)` is true: a command for
  // each run of neighbours among 32. Each lane asks about a token.
  template <class HasRow>
  __device__ void push_rows(int tokens, const HasRow& has_row) {
    for (int first = 0; first < tokens; first += kWarpLanes) {
      const int token = first + call_.lane;
      const uint32_t sent = __ballot_sync(kFullWarp, token < tokens && has_row(token));
      const bool begins = ((sent & ~(sent << 1)) >> call_.lane & 1u) != 0;
      const uint32_t behind = ~(sent >> call_.lane);  // 0 only of lane 0, if all have a row
      const int rows = behind == 0 ? kWarpLanes : __ffs(static_cast<int>(behind)) - 1;
      push(begins, rows_command(hosts(), peer_, call_.row(writer(), token),
                                int64_t{rows} * RowsOf<Kind>::kBytes));
    }
  }

  __device__ void push_word(int64_t place, const CallWord& word) {
    push(call_.lane == 0, store_command(hosts(), peer_, place, word.encode()));
  }

  __device__ Writer writer() const { return call_.writer_to(peer_); }

 private:
  __device__ const RemoteHosts& hosts() const { return call_.remote_hosts(); }
  __device__ void push(bool has_command, const WireCommand& command) {
    if (!given_up_) given_up_ = !push_commands(call_, has_command, peer_, command);
  }

  const Call<Kind>& call_;
  const int peer_;
  bool given_up_ = false;
};

// Calls `push(peer, sender)` for every live rank on another host: a warp each at a time. Nothing
// goes to a peer whose acknowledgement has not come in time, as it may still read what lies there.
// A call that has failed otherwise still pushes, so that the peers learn what it was.
template <CallKind Kind, class Push>
__device__ __forceinline__ void push_to_each_host_rank(const Call<Kind>& call, const Push& push) {
  const RankSet live = call.live_ranks();
  for (int peer = call.warp; peer < kRanks; peer += kWarps) {
    const bool is_live = live.has(peer);
    if (!is_live || !call.is_elsewhere(peer)) continue;
    if (__any_sync(kFullWarp, call.is_masked(peer) || !call.has_free_half(peer)) != 0) continue;
    HostSender<Kind> sender(call, peer);
    push(peer, sender);
  }
}

}  // namespace fanfold
