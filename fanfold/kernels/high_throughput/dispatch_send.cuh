// The sending role of dispatch: batches of this rank's tokens, each row once to every peer that
// wants it.
#pragma once

#include "high_throughput/dispatch_shape.cuh"

namespace fanfold {

class Sender {
 public:
  __device__ explicit Sender(const DispatchWarp& warp) : w_(warp), call_(warp.call) {
    if (kStaysInPlace && call_.lane < kRanks) first_row_ = w_.args.first_rows[call_.lane];
    ticket_ = of_lane_0(draw(call_, &call_.args.state->sent));
    fetch();
    drawn_ = draw(call_, &call_.args.state->sent);
  }

  __device__ Next next(int slot, bool may_wait) {
    while (remaining_ == 0) {
      if (!holds_batch_ && !draw_batch()) return Next::kNone;
      if (!slot_is_free(may_wait)) return may_wait ? Next::kNone : Next::kNotYet;
      holds_batch_ = false;
      remaining_ = __reduce_or_sync(kFullWarp, tokens_);
      if (remaining_ == 0) publish(slot_, word_);
    }
    const int place = __ffs(static_cast<int>(remaining_)) - 1;
    remaining_ &= remaining_ - 1;
    w_.load_own(slot, first_token_ + place);
    SendDescriptor& descriptor = w_.descriptors[slot].sent;
    const uint32_t to = __ballot_sync(kFullWarp, (tokens_ >> place & 1u) != 0);
    const bool last = remaining_ == 0;
    if (call_.lane == 0) {
      descriptor.to = to;
      descriptor.at = slot_ * kBatchTokens + place;
      descriptor.slot = last ? slot_ : -1;
      descriptor.use = BatchWord::use_of(call_.epoch, turn_);
    }
    if ((last || kStaysInPlace) && call_.lane < kRanks) descriptor.words[call_.lane] = word_;
    __syncwarp();
    return Next::kRow;
  }

  __device__ void pass(int slot) const {
    // Words came by ordinary copies.
    if constexpr (kExtraWords > 0) {
      fence_shared_before_bulk();
      __syncwarp();
    }
    const SendDescriptor& descriptor = w_.descriptors[slot].sent;
    const bool gets = call_.is_peer(call_.lane) && (descriptor.to >> call_.lane & 1u) != 0;
    if constexpr (kPulls != 0) {
      const bool is_read = __any_sync(kFullWarp, gets && !call_.is_elsewhere(call_.lane)) != 0;
      if (is_read && call_.lane == 0) w_.keep_for_readers(slot, descriptor.at);
    }
    if (gets && (kPulls == 0 || call_.is_elsewhere(call_.lane)))
      w_.put_to(call_.lane, slot, descriptor, kStaysInPlace ? row_in_place(descriptor) : 0);
  }

  __device__ void passed(int slot) const {
    const SendDescriptor& descriptor = w_.descriptors[slot].sent;
    if (descriptor.slot >= 0)
      publish(descriptor.slot, call_.lane < kRanks ? descriptor.words[call_.lane] : 0);
    __syncwarp();
  }

 private:
  // Token-major: the row's place on lane r's rank.
  __device__ int row_in_place(const SendDescriptor& descriptor) const {
    const BatchWord batch = BatchWord::decode(descriptor.words[call_.lane]);
    const uint32_t earlier = batch.tokens & ((1u << descriptor.at % kBatchTokens) - 1u);
    return first_row_ + static_cast<int>(batch.before) + __popc(earlier);
  }

  // The rows of lane r's rank, a peer, in the batch whose ticket is held; -1 where there is none.
  __device__ void fetch() {
    const auto batch = static_cast<int>(ticket_);
    const DispatchBatches batches = w_.batches(call_.args.rank);
    const int first = batches.first_token(batch);
    const int end = min(first + batches.size(batch), call_.args.tokens);
#pragma unroll
    for (int place = 0; place < kBatchTokens; ++place) {
      const int token = first + place;
      const bool exists = token < end && call_.is_peer(call_.lane);
      rows_[place] = exists ? w_.args.rows[int64_t{token} * kRanks + call_.lane] : -1;
    }
  }

  // Goes on to the next batch; false if there are no more.
  __device__ bool draw_batch() {
    const DispatchBatches batches = w_.batches(call_.args.rank);
    const auto batch = static_cast<int>(ticket_);
    if (batch >= batches.count()) return false;
    first_token_ = batches.first_token(batch);
    tokens_ = 0;
    uint32_t before = 0;
#pragma unroll
    for (int place = kBatchTokens - 1; place >= 0; --place) {
      if (rows_[place] < 0) continue;
      tokens_ |= 1u << place;
      before = static_cast<uint32_t>(rows_[place]);
    }
    slot_ = batch % call_.args.slots;
    turn_ = static_cast<uint32_t>(batch / call_.args.slots);
    const BatchWord word{BatchWord::use_of(call_.epoch, turn_), before, tokens_};
    word_ = word.encode();
    ticket_ = of_lane_0(drawn_);
    fetch();
    drawn_ = draw(call_, &call_.args.state->sent);
    holds_batch_ = true;
    return true;
  }

  // Whether every peer has read what the slot held before; with `waits` it is free, or the call has
  // failed.
  __device__ bool slot_is_free(bool waits) const {
    if (turn_ == 0) return true;
    bool free = true;
    if (call_.is_peer(call_.lane)) {
      const auto* word = call_.own_at<const uint64_t>(call_.ack(call_.lane, slot_));
      Deadline deadline(call_);
      CountedWord ack{};
      do {
        ack = CountedWord::decode(load_acquire_system(word));
        free = ack.epoch == call_.epoch && ack.count >= turn_;
      } while (waits && !free && !deadline.expired(call_.lane, ack.epoch));
      fence_global_and_bulk();
    }
    return __all_sync(kFullWarp, free) != 0;
  }

  // The batch has arrived at lane r's rank.
  __device__ void publish(int slot, uint64_t word) const {
    // A row that never came into the ring fails the call, and was sent all the same.
    const bool sends = call_.is_peer(call_.lane) && !call_.failed();
    if constexpr (kPulls != 0) publish_copies();
    if (sends) {
      fence_global_and_bulk();
      if (!call_.is_elsewhere(call_.lane))
        call_.peer(call_.lane).signal(call_.ready(call_.rank_at(call_.lane), slot), word);
    }
    __syncwarp();
    if constexpr (kAcrossHosts != 0)
      w_.push_batch(sends && call_.is_elsewhere(call_.lane), call_.lane, slot, word);
  }

  const DispatchWarp& w_;
  const Call& call_;
  int first_row_ = 0;        // of this rank at lane r's
  uint32_t ticket_, drawn_;  // of the next batch, and in lane 0 of the one after
  int32_t rows_[kBatchTokens];
  bool holds_batch_ = false;  // one that is not begun
  int first_token_ = 0, slot_ = 0;
  uint32_t turn_ = 0;
  uint32_t tokens_ = 0;     // of the batch, for lane r's rank
  uint64_t word_ = 0;       // likewise
  uint32_t remaining_ = 0;  // tokens of the batch that are not asked for yet
};

}  // namespace fanfold
