// Tiles that a warpgroup has stored: a spare warp of the CTA tells the others of them.
#pragma once

#include "fused_moe/call.cuh"

namespace fanfold::fused_moe {

// The spare warp's side of a mailbox; by one thread.
class Publisher {
 public:
  __device__ Publisher(const Call& call, Mailbox& box) : call_(call), box_(box) {}

  // What was posted, for all of the GPU.
  __device__ void serve() {
#pragma unroll 1
    while (!ended_) {
      const uint32_t word = exchange_acquire_cta(&box_.words[taken_ % Mailbox::kSlots], 0);
      if (word == 0) return;
      ++taken_;
      if (word == Mailbox::kLast) {
        ended_ = true;
      } else {
        publish(word - 1);
      }
    }
  }

  __device__ void serve_to_the_end() {
    Patience patience(call_);
    for (serve(); !ended_; serve()) {
      if (patience.expired()) return;
      __nanosleep(100);
    }
  }

 private:
  __device__ void publish(uint32_t counter) const {
    // What is returned is read by all ranks.
    if (kRanks > 1 && counter >= call_.at().returned()) {
      add_release_system(call_.counters + counter, 1);
    } else {
      add_release_gpu(call_.counters + counter, 1);
    }
  }

  const Call& call_;
  Mailbox& box_;
  uint32_t taken_ = 0;
  bool ended_ = false;
};

// The warpgroup's side, by its first thread: the last tile that it has stored, until others may
// read it.
class Unpublished {
 public:
  __device__ Unpublished(const Call& call, Mailbox& box) : call_(call), box_(box) {}

  __device__ void store(const uint32_t* counter) {
    word_ = 1 + static_cast<uint32_t>(counter - call_.counters);
  }
  __device__ void publish() {
    if (word_ == 0) return;
    bulk_await_written<0>();
    fence_global_and_bulk();
    post(word_);
    word_ = 0;
  }
  __device__ void end() { post(Mailbox::kLast); }

 private:
  __device__ void post(uint32_t word) {
    Patience patience(call_);
    while (!fill_release_cta(&box_.words[posted_ % Mailbox::kSlots], word))
      if (patience.expired()) return;
    ++posted_;
  }

  const Call& call_;
  Mailbox& box_;
  uint32_t word_ = 0;
  uint32_t posted_ = 0;
};

}  // namespace fanfold::fused_moe
