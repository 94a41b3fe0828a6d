// The jobs of a combine, and the rows that each adds: gathered in steps, as each needs what the one
// before has loaded, while the job before is done.
#pragma once

#include "high_throughput/combine_shape.cuh"

namespace fanfold {

// What the warps of each rank do: the batches of all sources in turn, the next rank's first, and
// with each the fold of the own batch `lag` before it; of each all slices. With the last batches
// come two folds each, in parts, so that little is left when nothing is sent any more, and sends
// drawn by a warp that folds do not wait for long. All ranks' lists are equally long, and send the
// same batches at the same places.
//
// Where sums are results there are no folds, and the last `last_lag` batches are sent in parts, so
// that the warps end at much the same time.
class JobList {
 public:
  __device__ JobList(const HighThroughputCombineArgs& args, const CombineShared& shared,
                     const Call& call)
      : shared_(shared), call_(call) {
    most_ = shared.most_batches();
    lag_ = min(args.lag, most_);
    last_lag_ = min(args.last_lag, lag_);
    pairs_begin_ = most_ - (lag_ - last_lag_);
  }

  __device__ uint32_t tickets() const {
    if constexpr (kSumsAreResults)
      return static_cast<uint32_t>(most_ + last_lag_ * (kParts - 1)) * kSlices;
    return static_cast<uint32_t>(pairs_end() + last_lag_ * kParts) * kSlices;
  }

  __device__ Job job(uint32_t ticket) const {
    const int place = static_cast<int>(ticket / kSlices);
    if constexpr (kSumsAreResults) return sum(place, ticket);
    const int begin = pairs_begin_ * kJobs, end = pairs_end();
    if (place < begin) {
      const int group = place / kJobs, turn = place % kJobs;
      return turn < kSources ? send(turn, group, ticket) : fold(group - lag_, ticket);
    }
    int part = (most_ - last_lag_) * kParts;  // the first of those behind the last send
    if (place < end) {
      const int pair = (place - begin) / kPairJobs, turn = (place - begin) % kPairJobs;
      if (turn < kSources) return send(turn, pairs_begin_ + pair, ticket);
      part += 2 * kParts * (pairs_begin_ + pair - most_) + (turn - kSources);
    } else {
      part += place - end;
    }
    return fold_part(part, ticket);
  }

 private:
  static constexpr int kJobs = kSources + 1;               // of a group
  static constexpr int kPairJobs = kSources + 2 * kParts;  // of one with two folds

  __device__ int pairs_end() const {
    return pairs_begin_ * kJobs + (most_ - pairs_begin_) * kPairJobs;
  }
  __device__ int source_at(int turn) const { return (call_.args.rank + 1 + turn) % kRanks; }

  __device__ Job send(int turn, int batch, uint32_t ticket) const {
    return made(Job::Kind::kSend, source_at(turn), batch, ticket);
  }
  __device__ Job fold(int batch, uint32_t ticket) const {
    return made(Job::Kind::kFold, call_.args.rank, batch, ticket);
  }
  // Nobody waits for its slot any more, as two lags are no more than all slots.
  __device__ Job fold_part(int part, uint32_t ticket) const {
    Job job = fold(part >= 0 ? part / kParts : -1, ticket);
    job.begin = part % kParts * kPartTokens;
    job.end = job.begin + kPartTokens;
    job.is_signalled = false;
    return job;
  }

  // Where sums are results: the batch, or part of one, at a place of the list.
  __device__ Job sum(int place, uint32_t ticket) const {
    const int part = place - (most_ - last_lag_);
    if (part < 0) return send(0, place, ticket);
    Job job = send(0, most_ - last_lag_ + part / kParts, ticket);
    job.begin = part % kParts * kPartTokens;
    job.end = job.begin + kPartTokens;
    return job;
  }

  __device__ Job made(Job::Kind kind, int source, int batch, uint32_t ticket) const {
    Job job{};
    job.source = source;
    job.batch = batch;
    if (batch < 0 || batch >= shared_.batches(source)) return job;
    job.kind = kind;
    job.end = kBatchTokens;
    job.is_signalled = !kSumsAreResults;
    job.slice = static_cast<int>(ticket % kSlices);
    job.slot = batch % call_.args.slots;
    job.turn = static_cast<uint32_t>(batch / call_.args.slots);
    return job;
  }

  const CombineShared& shared_;
  const Call& call_;
  int most_, lag_, last_lag_;  // batches; no more lag than there are
  int pairs_begin_;            // the group from which on two folds come with each
};

// Lanes of each token in a pass over the terms of a batch's tokens. One pass or several take all.
__device__ constexpr int lanes_for(int terms) {
  int lanes = kWarpLanes / kBatchTokens;
  while (lanes < terms) lanes *= 2;
  return lanes;
}

// One warp's. Where rows are looked up, the lanes are the tokens of a batch by the terms of each.
class Preparation {
 public:
  static constexpr int kSteps = 4;

  __device__ Preparation(const HighThroughputCombineArgs& args, const CombineShared& shared,
                         WorkerShared& own, const Call& call)
      : args_(args), shared_(shared), own_(own), call_(call), jobs_(args, shared, call) {}

  __device__ uint32_t tickets() const { return jobs_.tickets(); }

  // Begins with the job of a ticket; its entries overwrite those of the last job but one.
  __device__ void begin(uint32_t ticket) {
    __syncwarp();  // all lanes have read those
    job_ = jobs_.job(ticket);
    which_ = 1 - which_;
    count_ = 0;
  }

  // Step i of kSteps; they come in their order.
  __device__ void step(int i) {
    switch (i) {
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
  // The steps from i on.
  __device__ void complete(int i) {
    for (; i < kSteps; ++i) step(i);
  }

  __device__ const Job& job() const { return job_; }
  __device__ const BatchWord& batch() const { return batch_; }
  __device__ const Entry* entries() const { return own_.entries[which_]; }
  __device__ int count() const { return count_; }

 private:
  static constexpr int kSendWidth = lanes_for(kExpertMajor != 0 ? kTopK : 1);
  static constexpr int kFoldWidth = lanes_for(kHasFewRanks ? kRanks : 1);
  static constexpr int kWidth = kSendWidth > kFoldWidth ? kSendWidth : kFoldWidth;
  static constexpr int kPasses = kBatchTokens * kWidth / kWarpLanes;
  static_assert(kWidth <= kWarpLanes);
  static constexpr int kNone = -1, kDropped = -2;  // instead of a row

  template <int kTerms>
  __device__ int place(int pass) const {
    return (pass * kWarpLanes + call_.lane) / kTerms;
  }
  template <int kTerms>
  __device__ int term() const {
    return call_.lane % kTerms;
  }
  template <int kTerms>
  static constexpr int kPassesOf = kBatchTokens * kTerms / kWarpLanes;

  __device__ bool is_sent(int place) const {
    return (batch_.tokens >> place & 1u) != 0 && (!kSumsAreResults || is_folded(place));
  }
  // Which of the rows that came here.
  __device__ int arrival(int place) const {
    const int earlier = __popc(batch_.tokens & ((1u << place) - 1u));
    return shared_.prefix[job_.source] + static_cast<int>(batch_.before) + earlier;
  }
  // Whether there is such a token in the job.
  __device__ bool is_folded(int place) const {
    const int token = job_.batch * kBatchTokens + place;
    return job_.begin <= place && place < job_.end && token < call_.args.tokens;
  }
  __device__ bool is_own(int rank) const { return kExpertMajor == 0 && rank == call_.args.rank; }

  __device__ void load_batch() {
    batch_ = BatchWord{};
    if (job_.kind != Job::Kind::kSend) return;
    const DispatchBatches dispatched(shared_.participants.tokens[job_.source], kShortTokens);
    const uint64_t* words = args_.batches + job_.source * args_.batch_stride;
    if (job_.batch < dispatched.whole) {
      batch_ = BatchWord::decode(words[job_.batch]);
      return;
    }
    // Came as several short ones.
    constexpr int kParts = kBatchTokens / kShortBatchTokens;
    const int first = dispatched.whole + (job_.batch - dispatched.whole) * kParts;
    for (int i = 0; i < kParts && first + i < dispatched.count(); ++i) {
      const BatchWord part = BatchWord::decode(words[first + i]);
      if (batch_.tokens == 0) batch_.before = part.before;
      batch_.tokens |= part.tokens << i * kShortBatchTokens;
    }
  }

  __device__ void load_rows() {
    if (job_.kind == Job::Kind::kSend) {
#pragma unroll
      for (int p = 0; p < kPassesOf<kSendWidth>; ++p) rows_[p] = sent_row(place<kSendWidth>(p));
    } else if (kHasFewRanks && job_.kind == Job::Kind::kFold) {
#pragma unroll
      for (int p = 0; p < kPassesOf<kFoldWidth>; ++p)
        rows_[p] = folded_row(place<kFoldWidth>(p), term<kFoldWidth>());
    }
  }
  __device__ int sent_row(int place) const {
    const int k = term<kSendWidth>();
    if (!is_sent(place) || k >= (kExpertMajor != 0 ? kTopK : 1)) return -1;
    const int row = arrival(place);
    if (row >= args_.kept) return -1;
    return kExpertMajor != 0 ? args_.rows_of[int64_t{row} * kTopK + k] : row;
  }
  // How many rows of this rank went to that one before; of its own, which row it is, or that there
  // was no room for it.
  __device__ int folded_row(int place, int rank) const {
    if (!is_folded(place) || rank >= kRanks) return -1;
    const int token = job_.batch * kBatchTokens + place;
    const int row = args_.rows[int64_t{token} * kRanks + rank];
    if (row < 0 || !is_own(rank)) return row;
    const int own = shared_.prefix[rank] + row;
    return own < args_.kept ? own : kDropped;
  }

  __device__ void load_weights() {
    if (kWeighted == 0 || job_.kind != Job::Kind::kSend) return;
#pragma unroll
    for (int p = 0; p < kPassesOf<kSendWidth>; ++p)
      weights_[p] = rows_[p] >= 0 ? args_.row_weights[rows_[p]] : 1.0f;
  }

  __device__ void write() {
    if (job_.kind == Job::Kind::kSend) {
#pragma unroll
      for (int p = 0; p < kPassesOf<kSendWidth>; ++p) write_sent(p);
    } else if (job_.kind == Job::Kind::kFold) {
      if constexpr (!kHasFewRanks) return write_folded_of_many();
#pragma unroll
      for (int p = 0; p < kPassesOf<kFoldWidth>; ++p) write_folded(p);
    }
    __syncwarp();
  }

  __device__ void write_sent(int p) {
    const int at = place<kSendWidth>(p);
    bool comes = rows_[p] >= 0;
    if constexpr (kExpertMajor != 0) {
      // Each row once, whichever entries name it; no two tokens have one.
      const uint32_t same = __match_any_sync(kFullWarp, rows_[p]);
      comes = comes && (same & lanes_below()) == 0;
    }
    // A token without experts has a result all the same.
    const bool exists = kSumsAreResults ? is_folded(at) : is_sent(at);
    append<kSendWidth, false>(at, exists, comes, Entry::Kind::kRow, static_cast<uint32_t>(rows_[p]),
                              kWeighted != 0 ? weights_[p] : 1.0f);
  }

  __device__ void write_folded(int p) {
    const int at = place<kFoldWidth>(p), rank = term<kFoldWidth>();
    const Folded folded = folded_from(at, rank, rows_[p]);
    append<kFoldWidth, kBiased != 0>(at, is_folded(at), rows_[p] != kNone, folded.kind, folded.row,
                                     1.0f);
  }

  struct Folded {
    Entry::Kind kind;
    uint32_t row;
  };
  // Where the row of a rank is, for which `folded_row` is `row`.
  __device__ Folded folded_from(int place, int rank, int row) const {
    if (!is_own(rank)) {
      const auto at = static_cast<uint32_t>(ring_row(call_, rank, job_.slot, place));
      return {Entry::Kind::kRow, call_.is_elsewhere(rank) ? at | Entry::kReceived : at};
    }
    // What peers drop comes as zeros, too.
    if (row == kDropped) return {Entry::Kind::kZeros, 0};
    return {Entry::Kind::kOwn, static_cast<uint32_t>(row)};
  }

  // Of many ranks: token by token, the biases, then the ranks' rows, as many at a time as there are
  // lanes; zeros for a token that has neither.
  __device__ void write_folded_of_many() {
    Entry* entries = own_.entries[which_];
    for (int at = job_.begin; at < job_.end; ++at) {
      if (!is_folded(at)) continue;
      const int before = count_;
      if (kBiased != 0 && call_.lane < args_.biases)
        entries[count_ + call_.lane] =
            Entry(Entry::Kind::kBias, static_cast<uint32_t>(call_.lane), at, false, 1.0f);
      count_ += kBiased != 0 ? args_.biases : 0;
      for (int round = 0; round < kRankRounds; ++round) append_ranks(at, round * kWarpLanes);
      if (count_ == before && call_.lane == 0)
        entries[count_] = Entry(Entry::Kind::kZeros, 0, at, false, 1.0f);
      count_ += count_ == before ? 1 : 0;
      __syncwarp();
      if (call_.lane == 0) entries[count_ - 1].make_last();
    }
    __syncwarp();
  }

  // The rows of one token from the ranks that the lanes are, from `first` on.
  __device__ void append_ranks(int at, int first) {
    const int rank = first + call_.lane;
    const int row = folded_row(at, rank);
    const uint32_t all = __ballot_sync(kFullWarp, row != kNone);
    if (row != kNone) {
      const Folded folded = folded_from(at, rank, row);
      own_.entries[which_][count_ + __popc(all & lanes_below())] =
          Entry(folded.kind, folded.row, at, false, 1.0f);
    }
    count_ += __popc(all);
  }

  // Appends what the lanes of a pass have, in their order, with `kStarts` behind the biases of each
  // token that exists; for one that has neither, zeros.
  template <int kTerms, bool kStarts>
  __device__ void append(int place, bool exists, bool comes, Entry::Kind kind, uint32_t row,
                         float weight) {
    constexpr uint32_t kToken = kTerms == kWarpLanes ? kFullWarp : (1u << kTerms % kWarpLanes) - 1u;
    const uint32_t token = kToken << (call_.lane / kTerms * kTerms);
    const uint32_t coming = __ballot_sync(kFullWarp, comes);
    const bool begins = exists && term<kTerms>() == 0;
    const bool zeros = !kStarts && begins && (coming & token) == 0;
    const uint32_t all = __ballot_sync(kFullWarp, comes || zeros);
    int at = count_ + __popc(all & lanes_below());
    count_ += __popc(all);
    if constexpr (kStarts) {
      const uint32_t beginning = __ballot_sync(kFullWarp, begins);
      const int biases = args_.biases;
      at += biases * __popc(beginning & lanes_below());
      count_ += biases * __popc(beginning);
      for (int bias = 0; begins && bias < biases; ++bias) {
        const bool last = bias + 1 == biases && (coming & token) == 0;
        own_.entries[which_][at++] =
            Entry(Entry::Kind::kBias, static_cast<uint32_t>(bias), place, last, 1.0f);
      }
    }
    if (comes || zeros) {
      const bool last = (all & token & ~lanes_below()) == 1u << call_.lane;
      own_.entries[which_][at] = comes ? Entry(kind, row, place, last, weight)
                                       : Entry(Entry::Kind::kZeros, 0, place, last, 1.0f);
    }
  }

  const HighThroughputCombineArgs& args_;
  const CombineShared& shared_;
  WorkerShared& own_;
  const Call& call_;
  const JobList jobs_;
  Job job_{};
  BatchWord batch_{};
  int which_ = 0, count_ = 0;
  int rows_[kPasses];
  float weights_[kPasses];
};

}  // namespace fanfold
