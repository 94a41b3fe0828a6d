// The receiving role of dispatch: batches of all ranks, each row to its places among the results.
// Those of this rank itself come from where they are, whenever nothing of a peer has arrived.
#pragma once

#include "high_throughput/dispatch_place.cuh"

namespace fanfold {

// The batches that one counter hands out; the next one has been asked for.
class BatchTickets {
 public:
  __device__ BatchTickets(const Call& call, uint32_t* counter)
      : call_(call), counter_(counter), ticket_(of_lane_0(draw(call, counter))),
        drawn_(draw(call, counter)) {}

  __device__ int current() const { return static_cast<int>(ticket_); }
  __device__ void advance() {
    ticket_ = of_lane_0(drawn_);
    drawn_ = draw(call_, counter_);
  }

 private:
  const Call& call_;
  uint32_t* counter_;
  uint32_t ticket_, drawn_;  // in lane 0 the one after
};

class Receiver {
  static constexpr int kPeers = kRanks - 1;

 public:
  __device__ explicit Receiver(const DispatchWarp& warp)
      : w_(warp), call_(warp.call), arriving_(call_, &call_.args.state->received),
        own_(call_, &call_.args.state->kept) {
    for (int source = 0; source < kRanks; ++source)
      if (call_.is_peer(source)) most_batches_ = max(most_batches_, w_.batches(source).count());
  }

  __device__ Next next(int slot, bool may_wait) {
    while (now_.tokens == 0) {
      holds_ = holds_ || draw_arriving();
      if (holds_ && has_arrived(false)) {
        begin_arrived();
      } else if (own_.current() < w_.batches(call_.args.rank).count()) {
        begin_own();
      } else if (!holds_) {
        return Next::kNone;
      } else if (!may_wait) {
        return Next::kNotYet;
      } else if (has_arrived(true)) {
        begin_arrived();
      } else {
        return Next::kNone;
      }
    }
    const int place = __ffs(static_cast<int>(now_.tokens)) - 1;
    now_.tokens &= now_.tokens - 1;
    const bool is_own = now_.source == call_.args.rank;
    ReceivedRow row{now_.source, first_token_ + place, now_.row++, -1};
    if (is_own) {
      w_.load_own(slot, row.token);
    } else if constexpr (!kStaysInPlace) {
      const auto destination = DestinationWord::decode(__shfl_sync(kFullWarp, destination_, place));
      load_arrived(slot, now_.slot * kBatchTokens + place, destination);
      if (kSendsDestinations && destination.row != DestinationWord::kNowhere)
        row.lies = static_cast<int>(destination.row);
    }
    if (call_.lane == 0)
      w_.descriptors[slot].received = {row, now_.tokens == 0 && !is_own ? now_.slot : -1,
                                       now_.turn};
    __syncwarp();
    return Next::kRow;
  }

  __device__ void pass(int slot) const {
    const ReceiveDescriptor descriptor = w_.descriptors[slot].received;
    // Words beside own rows came by ordinary copies.
    if constexpr (kExtraWords > 0) {
      fence_shared_before_bulk();
      __syncwarp();
    }
    // All rows of the batch have been read; what is stored next depends on it, so it comes after.
    if (descriptor.slot >= 0) give_back(descriptor.row.source, descriptor.slot, descriptor.turn);
    Placer(w_).place(w_.ring.slots[slot], descriptor.row);
    __syncwarp();
  }

  __device__ void passed(int) const {}

 private:
  struct Batch {
    int source, batch, slot;
    uint32_t turn;
    // Of one that is begun:
    uint32_t tokens;  // that are not asked for yet
    int row;          // of the first of them
  };

  // A peer's row, with all that travels beside it; in place the row itself only for its copies.
  __device__ void load_arrived(int slot, int at, const DestinationWord& destination) const {
    ArrivalBarrier* full = &w_.ring.full[slot];
    if (call_.lane != 0) return arrive(full);
    if (kPulls != 0 && !call_.is_elsewhere(now_.source)) {
      arrive_expecting(full, kSentBytes);
      return w_.read_from(now_.source, at, slot);
    }
    unsigned char* to = w_.ring.slots[slot];
    const bool copies = kSendsDestinations && destination.copies;
    arrive_expecting(full, kRingRowBytes + (copies ? kRowBytes : 0));
    const auto own = [this](int64_t offset) { return call_.own_at<unsigned char>(offset); };
    const auto sent = [this](int64_t offset) {
      return call_.rows_at<unsigned char>(now_.source, offset);
    };
    bulk_load(to + kSentAt, sent(w_.ring_row(now_.source, at)), kRingRowBytes, full);
    if (copies) bulk_load(to, own(w_.result_row(destination.row)), kRowBytes, full);
  }

  // Goes on to the next batch of a peer; false if there are no more. Neighbours take the batches of
  // different sources, the next rank's first.
  __device__ bool draw_arriving() {
    if constexpr (kPeers == 0) return false;
    do {
      const int ticket = arriving_.current();
      if (ticket >= most_batches_ * kPeers) return false;
      held_.batch = ticket / kPeers;
      held_.source = (call_.args.rank + 1 + ticket % kPeers) % kRanks;
      arriving_.advance();
    } while (held_.batch >= w_.batches(held_.source).count());
    held_.slot = held_.batch % call_.args.slots;
    held_.turn = static_cast<uint32_t>(held_.batch / call_.args.slots);
    return true;
  }

  // Whether the held batch has arrived, which `word_` and `destination_` then describe; with
  // `waits` it has, or the call has failed.
  __device__ bool has_arrived(bool waits) {
    const uint32_t use = BatchWord::use_of(call_.epoch, held_.turn);
    uint64_t word = 0;
    if (call_.lane == 0) {
      const auto* ready = call_.own_at<const uint64_t>(call_.ready(held_.source, held_.slot));
      Deadline deadline(call_);
      uint32_t seen = 0;
      do {
        word = load_acquire_system(ready);
        seen = BatchWord::decode(word).use;
      } while (seen != use && waits &&
               !deadline.expired(held_.source, seen >> BatchWord::kTurnBits));
      fence_global_and_bulk();
    }
    const auto low = of_lane_0(static_cast<uint32_t>(word));
    const auto high = of_lane_0(static_cast<uint32_t>(word >> 32));
    word_ = BatchWord::decode((uint64_t{high} << 32) | low);
    if (word_.use != use) return false;
    __syncwarp();  // lane 0 has seen the batch arrive
    if constexpr (kSendsDestinations) {
      const int at = held_.slot * kBatchTokens + call_.lane;
      const bool comes = call_.lane < kBatchTokens && (word_.tokens >> call_.lane & 1u) != 0;
      const auto* destination = call_.own_at<const uint64_t>(w_.destination(held_.source, at));
      destination_ = comes ? static_cast<uint32_t>(load_relaxed_system(destination)) : 0u;
    }
    return true;
  }

  __device__ void begin_arrived() {
    holds_ = false;
    now_ = held_;
    begin(word_);
    if constexpr (kStaysInPlace) {
      const int at = now_.slot * kBatchTokens;
      Placer(w_).place_beside(call_.own_at<unsigned char>(w_.ring_row(now_.source, at)),
                              {now_.source, first_token_, now_.row, -1}, now_.tokens);
      // All lanes have what they asked for, as they have stored it: the slot may be written again.
      __syncwarp();
      now_.tokens = 0;
    }
    if (now_.tokens == 0) give_back(now_.source, now_.slot, now_.turn);
  }

  __device__ void begin_own() {
    now_ = {};
    now_.source = call_.args.rank;
    now_.batch = own_.current();
    own_.advance();
    const DispatchBatches batches = w_.batches(now_.source);
    const int token = batches.first_token(now_.batch) + call_.lane;
    const bool exists = call_.lane < batches.size(now_.batch) && token < call_.args.tokens;
    const int row = exists ? w_.args.rows[int64_t{token} * kRanks + call_.args.rank] : -1;
    const uint32_t tokens = __ballot_sync(kFullWarp, row >= 0);
    const int before = __shfl_sync(kFullWarp, row, tokens != 0 ? __ffs(tokens) - 1 : 0);
    const uint32_t use = BatchWord::use_of(call_.epoch, now_.batch / call_.args.slots);
    begin({use, tokens != 0 ? static_cast<uint32_t>(before) : 0u, tokens});
  }

  __device__ void begin(const BatchWord& word) {
    now_.tokens = word.tokens;
    first_token_ = w_.batches(now_.source).first_token(now_.batch);
    now_.row = w_.cta.prefix[now_.source] + static_cast<int>(word.before);
    if (call_.lane == 0) w_.keep_batch(now_.source, now_.batch, word);
  }

  __device__ void give_back(int source, int slot, uint32_t turn) const {
    if (call_.is_elsewhere(source)) {
      call_.push_word(call_.lane == 0, source, call_.ack(call_.rank_at(source), slot),
                      CountedWord{call_.epoch, turn + 1}.encode());
      return;
    }
    if (call_.lane != 0) return;
    call_.peer(source).put(call_.ack(call_.rank_at(source), slot),
                           CountedWord{call_.epoch, turn + 1}.encode());
  }

  const DispatchWarp& w_;
  const Call& call_;
  BatchTickets arriving_, own_;
  int most_batches_ = 0;
  bool holds_ = false;
  Batch held_{};  // of a peer, not begun
  BatchWord word_{};
  Batch now_{};               // whose rows are asked for
  int first_token_ = 0;       // of that
  uint32_t destination_ = 0;  // lane t: low half of the DestinationWord of token t
};

}  // namespace fanfold
