// The sending role of dispatch to more ranks than a warp has lanes: what belongs to a rank is
// looked up in the plan, in global memory, for some ranks at a time.
#pragma once

#include "high_throughput/dispatch_shape.cuh"

namespace fanfold {

class ManyRanksSender {
 public:
  __device__ explicit ManyRanksSender(const DispatchWarp& warp) : w_(warp), call_(warp.call) {}

  __device__ Next next(int slot, bool may_wait) {
    while (remaining_ == 0) {
      if (!holds_batch_ && !draw_batch()) return Next::kNone;
      if (!slot_is_free(may_wait)) return may_wait ? Next::kNone : Next::kNotYet;
      holds_batch_ = false;
      remaining_ = tokens_;
      if (remaining_ == 0) publish(batch_);
    }
    const int place = __ffs(static_cast<int>(remaining_)) - 1;
    remaining_ &= remaining_ - 1;
    const int token = w_.batches(call_.args.rank).first_token(batch_) + place;
    const int at = ring_slot(batch_);
    w_.load_own(slot, token);
    if (call_.lane == 0)
      w_.descriptors[slot].sent = {static_cast<uint32_t>(token),
                                   at * kBatchTokens + place,
                                   remaining_ == 0 ? at : -1,
                                   BatchWord::use_of(call_.epoch, turn(batch_)),
                                   {static_cast<uint64_t>(batch_)}};
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
    const auto token = static_cast<int>(descriptor.to);
    bool is_read = false;
    for (int rank = call_.lane; rank < kRanks; rank += kWarpLanes) {
      const int row = row_of(token, rank);
      if (row < 0) continue;
      if (kPulls != 0 && !call_.is_elsewhere(rank)) {
        is_read = true;
        continue;
      }
      const int first = kStaysInPlace ? w_.args.first_rows[rank] : 0;
      w_.put_to(rank, slot, descriptor, first + row);
    }
    if constexpr (kPulls != 0) {
      if (__any_sync(kFullWarp, is_read) != 0 && call_.lane == 0)
        w_.keep_for_readers(slot, descriptor.at);
    }
    __syncwarp();
  }

  __device__ void passed(int slot) const {
    const SendDescriptor& descriptor = w_.descriptors[slot].sent;
    if (descriptor.slot >= 0) publish(static_cast<int>(descriptor.words[0]));
    __syncwarp();
  }

 private:
  __device__ int ring_slot(int batch) const { return batch % call_.args.slots; }
  __device__ uint32_t turn(int batch) const {
    return static_cast<uint32_t>(batch / call_.args.slots);
  }

  // How many rows went to a peer before this token's; -1 if the token does not go there.
  __device__ int row_of(int token, int rank) const {
    return call_.is_peer(rank) ? w_.args.rows[int64_t{token} * kRanks + rank] : -1;
  }

  // The word of a batch for one rank.
  __device__ BatchWord word_of(int batch, int rank) const {
    const DispatchBatches batches = w_.batches(call_.args.rank);
    const int first = batches.first_token(batch);
    const int size = min(batches.size(batch), call_.args.tokens - first);
    BatchWord word{BatchWord::use_of(call_.epoch, turn(batch)), 0, 0};
    for (int place = size - 1; place >= 0; --place) {
      const int row = row_of(first + place, rank);
      if (row < 0) continue;
      word.tokens |= 1u << place;
      word.before = static_cast<uint32_t>(row);
    }
    return word;
  }

  // Goes on to the next batch; false if there are no more.
  __device__ bool draw_batch() {
    batch_ = static_cast<int>(of_lane_0(draw(call_, &call_.args.state->sent)));
    if (batch_ >= w_.batches(call_.args.rank).count()) return false;
    uint32_t tokens = 0;
    for (int rank = call_.lane; rank < kRanks; rank += kWarpLanes)
      tokens |= word_of(batch_, rank).tokens;
    tokens_ = __reduce_or_sync(kFullWarp, tokens);
    holds_batch_ = true;
    return true;
  }

  // Whether every peer has read what the slot held before; with `waits` it is free, or the call has
  // failed.
  __device__ bool slot_is_free(bool waits) const {
    const uint32_t turn = this->turn(batch_);
    if (turn == 0) return true;
    bool all_free = true;
    for (int rank = call_.lane; rank < kRanks; rank += kWarpLanes) {
      if (!call_.is_peer(rank)) continue;
      const auto* word = call_.own_at<const uint64_t>(call_.ack(rank, ring_slot(batch_)));
      Deadline deadline(call_);
      bool free = false;
      CountedWord ack{};
      do {
        ack = CountedWord::decode(load_acquire_system(word));
        free = ack.epoch == call_.epoch && ack.count >= turn;
      } while (waits && !free && !deadline.expired(rank, ack.epoch));
      all_free = all_free && free;
    }
    fence_global_and_bulk();
    return __all_sync(kFullWarp, all_free) != 0;
  }

  // The batch has arrived at every peer.
  __device__ void publish(int batch) const {
    // A row that never came into the ring fails the call, and was sent all the same.
    if constexpr (kPulls != 0) publish_copies();
    if (!call_.failed()) {
      fence_global_and_bulk();
      for (int rank = call_.lane; rank < kRanks; rank += kWarpLanes)
        if (call_.is_peer(rank) && !call_.is_elsewhere(rank))
          call_.peer(rank).signal(call_.ready(call_.rank_at(rank), ring_slot(batch)),
                                  word_of(batch, rank).encode());
    }
    __syncwarp();
    if constexpr (kAcrossHosts != 0) {
      const bool sends = __any_sync(kFullWarp, call_.failed()) == 0;
      for (int round = 0; round < kRankRounds; ++round) {
        const int rank = round * kWarpLanes + call_.lane;
        const bool pushes = sends && call_.is_elsewhere(rank);
        w_.push_batch(pushes, rank, ring_slot(batch),
                      pushes ? word_of(batch, rank).encode() : uint64_t{0});
      }
    }
  }

  const DispatchWarp& w_;
  const Call& call_;
  bool holds_batch_ = false;  // one that is not begun
  int batch_ = 0;
  uint32_t tokens_ = 0;     // of the batch, that any peer wants
  uint32_t remaining_ = 0;  // of those the ones that are not asked for yet
};

}  // namespace fanfold
