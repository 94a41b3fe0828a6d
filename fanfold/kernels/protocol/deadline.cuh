// The end of every wait. A loop that looks at memory until it changes asks its Deadline after every
// look.
#pragma once

#include "protocol/call.cuh"

namespace fanfold {

// The deadline of one wait. `Call` says how waits end before it, and what is done when it passes:
//
//   bool failed(), is_masked(peer)  end every wait, or every wait for that peer
//   bool looks_around(), finds_other_call()
//                                   with `kLooksAround`: whether this warp looks for peers in other
//                                   calls, and whether it has found one, which it has then reported
//   bool kAsksNetwork, is_lost(peer)
//                                   if there is the first, and it is true: whether the network has
//                                   lost the peer, for which a wait ends as if its time were over
//   void time_out(peer, seen)       masks the peer or fails the call, and reports that
//   bool kTakesArrivals, take_arrivals(peer)
//                                   if there is the first, and it is true: whether words of the
//                                   peer must be brought to their places, and that
//   args.timeout_ns                 the time of a wait, from its 256th look on
//
// `kLooksAround` is for waits for what every peer sends at the start of a call: a peer in another
// call never sends it. What a peer sends later in the same call arrives, or is late.
template <class Call, bool kLooksAround = false>
class Deadline {
 public:
  __device__ explicit Deadline(const Call& call) : call_(call) {}

  // Asked after every look that did not see what is awaited from `peer`; `seen` is what it saw, for
  // the report. True if the wait is over: the peer's part is lost.
  __device__ bool expired(int peer, uint32_t seen = Call::kNothingSeen) {
    if constexpr (kTakesArrivals) call_.take_arrivals(peer);
    if ((++looks_ & (kLooks - 1)) != 0) return false;
    if (call_.failed() || call_.is_masked(peer)) return true;
    if constexpr (kLooksAround) {
      if ((looks_ & (kLongLooks - 1)) == 0 && call_.looks_around() && call_.finds_other_call())
        return true;
    }
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (begin_ == 0) begin_ = now;
    if (now - begin_ < call_.args.timeout_ns && !ends_early(peer)) return false;
    call_.time_out(peer, seen);
    begin_ = 0;  // if that masks the peer, the wait for others has all its time
    return true;
  }

 private:
  static constexpr uint32_t kLooks = 1u << 8;
  static constexpr uint32_t kLongLooks = 1u << 12;  // take milliseconds
  static constexpr uint32_t kRareLooks = 1u << 16;  // and these fifty
  static constexpr uint32_t kWasLost = 1u << 31;    // beside the looks

  static constexpr bool kAsksNetwork = requires { requires Call::kAsksNetwork; };
  static constexpr bool kTakesArrivals = requires { requires Call::kTakesArrivals; };

  __device__ __forceinline__ bool ends_early(int peer) {
    if constexpr (kAsksNetwork) return stays_lost(peer);
    return false;
  }
  // At two questions in a row: by the second one this warp has seen what came from the peer before.
  __device__ bool stays_lost(int peer) {
    if ((looks_ & (kRareLooks - 1)) != 0) return false;
    const bool was_lost = (looks_ & kWasLost) != 0;
    looks_ &= ~kWasLost;
    if (!call_.is_lost(peer)) return false;
    looks_ |= kWasLost;
    return was_lost;
  }

  const Call& call_;
  uint32_t looks_ = 0;
  int64_t begin_ = 0;
};

}  // namespace fanfold
