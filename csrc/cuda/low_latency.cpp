#include "cuda/low_latency.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/error.h"

namespace fanfold::cuda {
namespace {

void check_at_most(const char* name, int64_t value, int64_t most, const char* why) {
  if (value <= most) return;
  throw BadArgument(name, std::to_string(value),
                    "at most " + std::to_string(most) + " for low latency on GPUs (" + why + ")");
}

}  // namespace

void check_device_geometry(const LowLatencyGeometry& geometry) {
  check_at_most("ranks", geometry.ranks, kMostRanks, "the lanes of a warp hold their sets");
  check_at_most("num_experts", geometry.experts, kMostDeviceExperts,
                "their counts are in shared memory");
  const HeaderLayout header{geometry.experts_per_rank()};
  check_at_most("max_tokens", geometry.max_tokens,
                std::min<int64_t>(header.most_tokens(), kMostDeviceTokens),
                "a row's place and its expert share a word");
  const int64_t rows = geometry.experts_per_rank() * geometry.expert_capacity();
  check_at_most("rows of all local experts", rows, INT32_MAX, "their numbers have 32 bits");
}

LowLatency::LowLatency(const LowLatencyPlace& place, const LowLatencyGeometry& geometry, bool late,
                       const LowLatencyGrid& grid, bool token_major)
    : place_(place), geometry_(geometry), grid_(grid),
      offsets_(LowLatencyDeviceLayout{geometry, late, token_major}.offsets()) {
  check_device_geometry(geometry);
  check_at_most("ctas", grid.ctas, kMostCtas, "each counts its calls");
  const int32_t most = grid.ctas - least_receivers(geometry.ranks);
  if (grid.senders < 1 || grid.senders > most) {
    throw BadArgument("senders", std::to_string(grid.senders),
                      "from 1 to " + std::to_string(most) + ", the CTAs less those that receive");
  }
}

CallArgs LowLatency::call_arguments(int32_t encoding, int32_t weights) const {
  const LowLatencySignature signature{geometry_.experts,
                                      geometry_.top_k,
                                      geometry_.hidden,
                                      geometry_.max_tokens,
                                      encoding,
                                      weights,
                                      {}};
  CallArgs call{};
  call.peers = peer_table(place_.peers.data(), geometry_.ranks,
                          place_.state + offsetof(LowLatencyState, peers));
  call.at = offsets_;
  call.state = reinterpret_cast<LowLatencyState*>(place_.state);
  call.reports = reinterpret_cast<LowLatencyReports*>(place_.reports);
  call.timeout_ns = place_.timeout_ns;
  call.rank = place_.rank;
  call.max_tokens = geometry_.max_tokens;
  call.phases = kWhole;
  call.signature = CallWord::signature_of(signature);
  call.mask_late = place_.mask_late ? 1 : 0;
  call.senders = grid_.senders;
  return call;
}

DispatchArgs LowLatency::dispatch_arguments(int32_t encoding, int32_t weights) const {
  DispatchArgs args{};
  args.call = call_arguments(encoding, weights);
  return args;
}

CombineArgs LowLatency::combine_arguments(bool logfmt, int32_t weights) const {
  CombineArgs args{};
  args.call = call_arguments(logfmt ? 1 : 0, weights);
  return args;
}

}  // namespace fanfold::cuda
