// What ranks on other hosts have sent, for the warps that wait for it.
#pragma once

#include "high_throughput/call.cuh"

namespace fanfold {

// A warp that looks at the words of ranks elsewhere in the CPU's memory, where looks of many warps
// would come one after the other, and hands them on to where ranks of this host put theirs. Batches
// have `kWords` words each, one for each slice.
template <int kWords>
class Relay {
 public:
  __device__ explicit Relay(const Call& call) : call_(call) {}

  // Returns when all has been handed on that warps of this rank wait for: of each source `batches`,
  // and the acknowledgements that free a slot for a later one of `sent`. Or when the call has
  // failed, by a wait of theirs or this one.
  template <class Batches, class Sent>
  __device__ void run(const Batches& batches, const Sent& sent) {
    int late = look(batches, sent);
    while (late != kNobody) {
      Deadline deadline(call_);  // anew whenever something has come
      do {
        came_ = false;
        if constexpr (Call::kTakesArrivals) take_from_all();
        late = look(batches, sent);
      } while (late != kNobody && !came_ && !__any_sync(kFullWarp, deadline.expired(late)));
      if (!came_) return;
    }
  }

 private:
  static constexpr int kNobody = -1;

  // Each lane brings the words of some ranks to their places.
  __device__ void take_from_all() const {
    for (int source = call_.lane; source < kRanks; source += kWarpLanes)
      call_.take_arrivals(source);
    __syncwarp();
  }
  // Hands on what has come. A rank of which more is due, or kNobody.
  template <class Batches, class Sent>
  __device__ int look(const Batches& batches, const Sent& sent) {
    int late = kNobody;
    for (int source = 0; source < kRanks; ++source) {
      if (!call_.is_elsewhere(source)) continue;
      const int came = batches(source) * kWords;
      const int freed = max(sent(source) - call_.args.slots, 0) * kWords;
      const bool more = hand_on(source, came, batches_, [&](int i) { return batch(source, i); });
      const bool acked = hand_on(source, freed, acks_, [&](int i) { return ack(source, i); });
      if (more || acked) late = source;
    }
    return late;
  }

  // Of the first `all` words of one kind from `source` those that are due: whether there are more.
  template <class One>
  __device__ bool hand_on(int source, int all, int (&done)[kRankRounds], const One& one) {
    const int before = __shfl_sync(kFullWarp, done[source / kWarpLanes], source % kWarpLanes);
    if (before >= all) return false;
    const int i = before + call_.lane;
    const bool comes = i < all && one(i);
    const uint32_t missing = ~__ballot_sync(kFullWarp, comes);
    const int now = before + (missing == 0 ? kWarpLanes : __ffs(static_cast<int>(missing)) - 1);
    if (call_.lane == source % kWarpLanes) done[source / kWarpLanes] = now;
    came_ = came_ || now > before;
    return now < all;
  }

  // Whether word i of the batches from `source` has come: handed on, or so long ago that the slot
  // has been used again.
  __device__ bool batch(int source, int i) const {
    const int64_t place = call_.ready(source, word_of(i));
    const uint64_t word = load_acquire_system(call_.received_at<const uint64_t>(place));
    const uint32_t use = BatchWord::decode(word).use;
    const uint32_t wanted = BatchWord::use_of(call_.epoch, turn_of(i));
    if (use == wanted) store_release_system(call_.own_at<uint64_t>(place), word);
    return use >> BatchWord::kTurnBits == wanted >> BatchWord::kTurnBits && use >= wanted;
  }

  __device__ bool ack(int source, int i) const {
    const int64_t place = call_.ack(source, word_of(i));
    const uint64_t word = load_acquire_system(call_.received_at<const uint64_t>(place));
    const CountedWord acked = CountedWord::decode(word);
    const bool frees = acked.epoch == call_.epoch && acked.count > turn_of(i);
    if (frees) store_release_system(call_.own_at<uint64_t>(place), word);
    return frees;
  }

  __device__ int word_of(int i) const {
    return i / kWords % call_.args.slots * kWords + i % kWords;
  }
  __device__ uint32_t turn_of(int i) const {
    return static_cast<uint32_t>(i / kWords / call_.args.slots);
  }

  const Call& call_;
  bool came_ = false;
  // Words handed on, of rank r in lane r % 32 at r / 32.
  int batches_[kRankRounds]{}, acks_[kRankRounds]{};
};

}  // namespace fanfold
