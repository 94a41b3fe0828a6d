// Outputs that another kernel writes while combine runs: which are there, and the end of the wait
// for those that never come.
#pragma once

#include "low_latency/combine_shape.cuh"

namespace fanfold {

// The signal of one row's block.
struct ReadySignal {
  int local;
  int block;
  const uint32_t* place;

  __device__ static ReadySignal of(const ReadySignals& ready, int local, int64_t row) {
    const int block = static_cast<int>(row) / ready.block_rows;
    return {local, block, ready.signals + int64_t{local} * ready.blocks + block};
  }

  // An acquire: what this CTA reads behind its next barrier is what was written before the signal.
  __device__ bool is_ready(const ReadySignals& ready) const {
    return static_cast<int32_t>(load_acquire_gpu(place)) >= ready.ready_at;
  }

  // Fails the call. The host reads the bound when it has seen the other report.
  __device__ void time_out(const CombineCall& call, const ReadySignals& ready) const {
    call.fail();
    const uint32_t about = reported_call(static_cast<uint32_t>(CallKind::kCombine), local);
    const auto value = static_cast<int32_t>(load_relaxed_gpu(place));
    store_report(&call.args.reports->signal_bound, {about, call.epoch, ready.ready_at, 0});
    store_report(&call.args.reports->signal, {about, call.epoch, block, value});
  }
};

// What follows a sweep over rows of which some are not there yet.
enum class SweepEnd : int32_t { kNext, kLast, kNone };

// One thread's: bounds the time in which no row becomes ready.
class SweepClock {
 public:
  __device__ explicit SweepClock(const CombineCall& call) : call_(call) {}

  // What follows a sweep that has left rows.
  __device__ SweepEnd end_of(bool sent, bool was_last) {
    if (was_last || call_.failed()) return SweepEnd::kNone;
    const auto now = static_cast<int64_t>(global_nanoseconds());
    if (sent || begin_ == 0) begin_ = now;
    return now - begin_ < call_.args.timeout_ns ? SweepEnd::kNext : SweepEnd::kLast;
  }

 private:
  const CombineCall& call_;
  int64_t begin_ = 0;
};

}  // namespace fanfold
