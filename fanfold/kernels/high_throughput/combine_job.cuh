// The jobs of a combine, and what a team has to know of one before it can add: gathered in steps,
// as each needs what the one before has loaded, while the job before is done.
#pragma once

#include "high_throughput/combine_shape.cuh"

namespace fanfold {

// The batches of all sources in turn, the next rank's first, and with each the fold of the own
// batch kLag before it.
__device__ __forceinline__ Job job_of(uint32_t ticket, const Call& call,
                                      const CombineShared& shared) {
  const int group = static_cast<int>(ticket / kJobs), place = static_cast<int>(ticket % kJobs);
  const bool folds = place == kSources;
  Job job{};
  job.source = folds ? call.args.rank : (call.args.rank + 1 + place) % kRanks;
  job.batch = folds ? group - kLag : group;
  if (job.batch < 0 || job.batch >= shared.batches(job.source)) return job;
  job.kind = folds ? Job::Kind::kFold : Job::Kind::kSend;
  job.slot = job.batch % call.args.slots;
  job.turn = static_cast<uint32_t>(job.batch / call.args.slots);
  return job;
}

// One warp's part of it: every kTeamWarps-th row of the batch. What it knows lies in shared memory,
// as adding needs the registers.
class Preparation {
 public:
  __device__ Preparation(const HighThroughputCombineArgs& args, CombineShared& shared,
                         const Call& call, int member)
      : args_(args), shared_(shared), call_(call), member_(member) {}

  // Begins with the job of a ticket, for the team's table `which`.
  __device__ void begin(uint32_t ticket, int which) {
    which_ = which;
    step_ = 0;
    if (call_.lane == 0) job() = job_of(ticket, call_, shared_);
    __syncwarp();
  }

  // Does the next step, if there is one.
  __device__ void step() {
    switch (step_++) {
      case 0:
        return load_batch();
      case 1:
        return load_rows();
      case 2:
        return load_weights();
      case 3:
        return write();
      default:
        return;
    }
  }
  __device__ void complete() {
    while (step_ < 4) step();
  }

 private:
  static constexpr int kRows = kBatchTokens / kTeamWarps;  // of a warp

  __device__ Job& job() const { return shared_.jobs[call_.warp][which_]; }
  __device__ SumTable& table() const { return shared_.tables[call_.warp / kTeamWarps][which_]; }

  __device__ int place(int i) const { return member_ + i * kTeamWarps; }
  __device__ bool sends(int i) const {
    return job().kind == Job::Kind::kSend && (job().rows.tokens >> place(i) & 1u) != 0;
  }
  __device__ int token(int i) const { return job().batch * kBatchTokens + place(i); }
  __device__ bool folds(int i) const {
    return job().kind == Job::Kind::kFold && token(i) < call_.args.tokens;
  }
  // How many rows of the batch come before it.
  __device__ int earlier(int i) const {
    return __popc(job().rows.tokens & ((1u << place(i)) - 1u));
  }
  // Which of the rows that came here.
  __device__ int row(int i) const {
    return shared_.prefix[job().source] + static_cast<int>(job().rows.before) + earlier(i);
  }

  __device__ void load_batch() const {
    if (job().kind != Job::Kind::kSend) return;
    if (call_.lane == 0)
      job().rows =
          BatchWord::decode(args_.batches[job().source * args_.batch_stride + job().batch]);
    __syncwarp();
  }

  // Whether the rank's rows are folded where they lie.
  __device__ bool is_own(int rank) const { return kExpertMajor == 0 && rank == call_.args.rank; }
  __device__ int own_row(int i) const { return shared_.prefix[call_.args.rank] + rows_[i]; }
  __device__ bool is_kept(int i) const { return row(i) < args_.kept; }

  // Send, expert-major: lane k has the row of the k-th choice. Fold: lane r whether rank r has one.
  __device__ void load_rows() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      rows_[i] = -1;
      if (kExpertMajor != 0 && sends(i) && is_kept(i) && call_.lane < kTopK)
        rows_[i] = args_.rows_of[int64_t{row(i)} * kTopK + call_.lane];
      if (folds(i) && call_.lane < kRanks) {
        rows_[i] = args_.rows[int64_t{token(i)} * kRanks + call_.lane];
        if (is_own(call_.lane) && own_row(i) >= args_.kept) rows_[i] = -1;
      }
    }
  }

  __device__ void load_weights() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      weights_[i] = 1.0f;
      if (kWeighted != 0 && sends(i) && rows_[i] >= 0) weights_[i] = args_.row_weights[rows_[i]];
    }
  }

  __device__ void write() const {
    if (member_ == 0 && call_.lane == 0) table().sums = sums();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (sends(i)) write_send(i);
      if (folds(i)) write_fold(i);
    }
    __syncwarp();
  }

  __device__ int sums() const {
    if (job().kind == Job::Kind::kSend) return __popc(job().rows.tokens);
    if (job().kind == Job::Kind::kNone) return 0;
    return min(kBatchTokens, call_.args.tokens - job().batch * kBatchTokens);
  }

  __device__ void write_send(int i) const {
    const int at = earlier(i);
    const int owner = job().source;
    unsigned char* to =
        shared_.ring_row(call_, owner, writer_at(call_.args, owner), job().slot, place(i));
    int terms = is_kept(i) ? 1 : 0;
    if constexpr (kExpertMajor != 0) {
      // In the order of the choices, each row once.
      bool first = rows_[i] >= 0;
      for (int k = 0; k < kTopK; ++k) {
        const int other = __shfl_sync(kFullWarp, rows_[i], k);
        first = first && (k >= call_.lane || other != rows_[i]);
      }
      const uint32_t chosen = __ballot_sync(kFullWarp, first);
      terms = __popc(chosen);
      if (first) table().term[at][__popc(chosen & lanes_below())] = {output(rows_[i]), weights_[i]};
    } else if (terms != 0 && call_.lane == 0) {
      table().term[at][0] = {output(row(i)), 1.0f};
    }
    if (call_.lane != 0) return;
    table().sum[at] = {to, token(i), terms};
    if (terms == 0) table().term[at][0] = {nullptr, 1.0f};  // zeros times a number
  }

  __device__ void write_fold(int i) const {
    const bool comes = rows_[i] >= 0;
    const uint32_t ranks = __ballot_sync(kFullWarp, comes);
    if (comes) {
      const unsigned char* from =
          is_own(call_.lane)
              ? output(own_row(i))
              : shared_.ring_row(call_, call_.args.rank, call_.lane, job().slot, place(i));
      table().term[place(i)][__popc(ranks & lanes_below())] = {from, 1.0f};
    }
    if (call_.lane == 0)
      table().sum[place(i)] = {args_.out + int64_t{token(i)} * kRowBytes, token(i), __popc(ranks)};
  }

  __device__ const unsigned char* output(int row) const {
    return args_.y + int64_t{row} * kRowBytes;
  }

  const HighThroughputCombineArgs& args_;
  CombineShared& shared_;
  const Call& call_;
  const int member_;
  int which_ = 0, step_ = 4;
  int rows_[kRows];
  float weights_[kRows];
};

}  // namespace fanfold
