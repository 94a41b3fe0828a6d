// The receiving role of dispatch: batches of all peers, each row to its places among the results.
#pragma once

#include "high_throughput/dispatch_place.cuh"

namespace fanfold {

class Receiver {
  static constexpr int kPeers = kRanks > 1 ? kRanks - 1 : 1;

 public:
  __device__ explicit Receiver(const DispatchWarp& warp) : w_(warp), call_(warp.call) {
    for (int source = 0; source < kRanks; ++source)
      if (call_.is_peer(source)) most_batches_ = max(most_batches_, w_.batches(source));
    ticket_ = of_lane_0(draw(call_, &call_.args.state->received));
    drawn_ = draw(call_, &call_.args.state->received);
  }

  __device__ Next next(int slot, bool may_wait) {
    while (remaining_ == 0) {
      if (!holds_batch_ && !draw_batch()) return Next::kNone;
      if (!has_arrived(may_wait)) return may_wait ? Next::kNone : Next::kNotYet;
      begin_batch();
    }
    const int place = __ffs(static_cast<int>(remaining_)) - 1;
    remaining_ &= remaining_ - 1;
    load_arrived(slot, slot_ * kBatchTokens + place);
    if (call_.lane == 0) {
      const int earlier = __popc(word_.tokens & ((1u << place) - 1u));
      const int row = w_.cta.prefix[source_] + static_cast<int>(word_.before) + earlier;
      w_.notes[slot].received = {
          {source_, batch_ * kBatchTokens + place, row}, remaining_ == 0 ? slot_ : -1, turn_};
    }
    __syncwarp();
    return Next::kRow;
  }

  __device__ void pass(int slot) const {
    const ReceiverNote note = w_.notes[slot].received;
    // All rows of the batch have been read; what is stored next depends on it, so it comes after.
    if (note.slot >= 0) give_back(note.row.source, note.slot, note.turn);
    Placer(w_).place(w_.ring.slots[slot], note.row);
    __syncwarp();
  }

  __device__ void passed(int) const {}

 private:
  // ---- batches ----------------------------------------------------------------------------------

  // A peer's row, with all that travels beside it.
  __device__ void load_arrived(int slot, int at) const {
    ArrivalBarrier* full = &w_.ring.full[slot];
    if (call_.lane != 0) return arrive(full);
    arrive_expecting(full, kSlotBytes);
    bulk_load(w_.ring.slots[slot], w_.ring_row(call_.args.rank, source_, at), kSlotBytes, full);
  }

  // Goes on to the next batch; false if there are no more. Neighbours take the batches of different
  // sources, the next rank's first.
  __device__ bool draw_batch() {
    do {
      const auto ticket = static_cast<int>(ticket_);
      if (ticket >= most_batches_ * kPeers) return false;
      batch_ = ticket / kPeers;
      source_ = (call_.args.rank + 1 + ticket % kPeers) % kRanks;
      ticket_ = of_lane_0(drawn_);
      drawn_ = draw(call_, &call_.args.state->received);
    } while (batch_ >= w_.batches(source_));
    slot_ = batch_ % call_.args.slots;
    turn_ = static_cast<uint32_t>(batch_ / call_.args.slots);
    holds_batch_ = true;
    return true;
  }

  // Whether the batch has arrived, which `word_` then describes; with `waits` it has, or the call
  // has failed.
  __device__ bool has_arrived(bool waits) {
    const uint32_t use = BatchWord::use_of(call_.epoch, turn_);
    uint64_t word = 0;
    if (call_.lane == 0) {
      const uint64_t* ready = call_.ready(call_.args.rank, source_, slot_);
      Patience patience(call_);
      do {
        word = load_acquire_system(ready);
      } while (BatchWord::decode(word).use != use && waits &&
               !patience.exhausted(source_, BatchWord::decode(word).use >> BatchWord::kTurnBits));
      fence_global_and_bulk();
    }
    const auto low = of_lane_0(static_cast<uint32_t>(word));
    const auto high = of_lane_0(static_cast<uint32_t>(word >> 32));
    word_ = BatchWord::decode((uint64_t{high} << 32) | low);
    return word_.use == use;
  }

  __device__ void begin_batch() {
    holds_batch_ = false;
    remaining_ = word_.tokens;
    if (call_.lane == 0) w_.keep_batch(source_, batch_, word_);
    if (remaining_ == 0) give_back(source_, slot_, turn_);
  }

  __device__ void give_back(int source, int slot, uint32_t turn) const {
    if (call_.lane != 0) return;
    uint64_t* taken = call_.taken(source, writer_at(call_.args, source), slot);
    store_relaxed_system(taken, CountedWord{call_.epoch, turn + 1}.encode());
  }

  const DispatchWarp& w_;
  const Call& call_;
  uint32_t ticket_, drawn_;  // the next batch, and in lane 0 the one after
  int most_batches_ = 0;
  bool holds_batch_ = false;  // one that is not begun
  int source_ = 0, batch_ = 0, slot_ = 0;
  uint32_t turn_ = 0;
  BatchWord word_{};
  uint32_t remaining_ = 0;  // tokens of the batch that are not asked for yet
};

}  // namespace fanfold
