// High-throughput combine. Expert side: for each token of each source one row, the sum of the
// outputs of its local experts (token-major: its output), into the ring that the source has for
// this rank. Source: for each token the sum of the biases and the ranks' rows.
//
// Warps draw jobs from one list: of every slice of columns, batch b of every source, then folds of
// earlier batches of this rank's own. Whatever a job waits for stands before it in the list, here
// or on a peer, and each warp does its jobs in that order, so the list cannot block. The last
// warp of each CTA signals to the ranks what the others have done: to release what is written takes
// a round trip on the link.
#include "high_throughput/combine_job.cuh"
#include "high_throughput/relay.cuh"
#include "high_throughput/row_sum.cuh"

namespace fanfold {

// What a send adds up, and where to.
struct SentRows {
  static constexpr bool kAdds = kExpertMajor != 0, kWeights = kWeighted != 0, kFolds = false;
  static constexpr float kNothing = 0.0f;

  const unsigned char* y;  // the slice of row 0
  Peer ring;               // the slice of the batch's first token in the source's ring
  int stride;              // to that of the next token

  __device__ const unsigned char* from(const Entry& entry) const {
    return y + entry.row() * kRowBytes;
  }
  __device__ Peer to(int place) const { return ring.from(place * stride); }
};

// A result of this rank, with what a Peer has for rows.
struct Result {
  unsigned char* begin;

  __device__ Result from(int64_t offset) const { return {begin + offset}; }
  __device__ void put_unit(int64_t offset, uint4 unit) const {
    store_weak(reinterpret_cast<uint4*>(begin + offset), unit);
  }
};

// What a send adds up whose sums are results.
struct SummedRows {
  static constexpr bool kAdds = true, kWeights = kWeighted != 0, kFolds = true;
  static constexpr float kNothing = 0.0f;

  const unsigned char* y;  // the slice of row 0
  unsigned char* out;      // the slice of the batch's first token

  __device__ const unsigned char* from(const Entry& entry) const {
    return y + entry.row() * kRowBytes;
  }
  __device__ Result to(int place) const { return {out + place * kRowBytes}; }
};

// What a fold adds up.
struct FoldedRows {
  static constexpr bool kAdds = true, kWeights = false, kFolds = false;
  // A sum begins with its bias, which may be -0.0 and stays that only if it is added to that.
  static constexpr float kNothing = kBiased != 0 ? -0.0f : 0.0f;

  const unsigned char* y;
  const unsigned char* ring;      // the slice of row 0 of all rings of this rank
  const unsigned char* received;  // likewise, of those that the network writes, ...
  int received_stride;            // ... with so much to the next row of the batch
  unsigned char* out;             // the slice of the batch's first token
  const unsigned char* bias[2];   // likewise
  RingGaps gaps;

  __device__ const unsigned char* from(const Entry& entry) const {
    if (kBiased != 0 && entry.kind() == Entry::Kind::kBias)
      return (entry.row() == 0 ? bias[0] : bias[1]) + entry.place() * kRowBytes;
    if (kExpertMajor == 0 && entry.kind() == Entry::Kind::kOwn) return y + entry.row() * kRowBytes;
    if (kAcrossHosts != 0 && (entry.row() & Entry::kReceived) != 0) {
      const int64_t row = entry.row() & ~int64_t{Entry::kReceived};
      const int place = static_cast<int>(row % kBatchTokens);
      return received + from_first(row - place) + place * received_stride;
    }
    return ring + from_first(entry.row());
  }
  __device__ int64_t from_first(int64_t row) const { return row * kSlotBytes + gaps.before(row); }
  __device__ Result to(int place) const { return {out + place * kRowBytes}; }
};

class Worker {
 public:
  __device__ Worker(const HighThroughputCombineArgs& args, CombineShared& shared, const Call& call)
      : args_(args), shared_(shared), own_(shared.workers[call.warp]), call_(call),
        sums_(own_, call.lane), next_(args, shared, own_, call) {}

  __device__ void run() {
    const uint32_t tickets = next_.tickets();
    uint32_t ticket = of_lane_0(draw(call_, &args_.call.state->sent));
    uint32_t drawn = draw(call_, &args_.call.state->sent);
    next_.begin(ticket);
    next_.complete(0);
    while (ticket < tickets) {
      const Job job = next_.job();
      const BatchWord batch = next_.batch();
      const Entry* entries = next_.entries();
      const int count = next_.count();
      ticket = of_lane_0(drawn);
      drawn = draw(call_, &args_.call.state->sent);
      next_.begin(ticket);
      if (!do_job(job, batch, entries, count)) break;
      next_.complete(count);
    }
    __syncwarp();
    if (call_.lane == 0) arrive(&shared_.ended);
  }

 private:
  __device__ bool do_job(const Job& job, const BatchWord& batch, const Entry* entries, int count) {
    if (job.kind == Job::Kind::kNone) return true;
    const int units = min(kSliceUnits, kUnits - job.slice * kSliceUnits);
    const auto prepare = [&](int i) {
      if (i < Preparation::kSteps) next_.step(i);
    };
    const int64_t columns = int64_t{job.slice} * kSliceBytes;
    const int64_t first = int64_t{job.batch} * kBatchTokens * kRowBytes + columns;
    if constexpr (kSumsAreResults) {
      const SummedRows rows{args_.y + columns, args_.out + first};
      sums_.begin(entries, count, units, rows);
      sums_.run(rows, prepare);
      if (kTopKWeights != 0 && job.slice == 0) fold_topk_weights(job);
    } else if (job.kind == Job::Kind::kSend) {
      const int64_t row = ring_row(call_, call_.rank_at(job.source), job.slot, 0);
      const SlotPlaces places(call_.is_elsewhere(job.source));
      const SentRows rows{
          args_.y + columns,
          call_.rows_peer(job.source).from(ring_offset(call_, row) + places.slice(job.slice)),
          places.stride(job.slice)};
      sums_.begin(entries, count, units, rows);
      if (!await_free(job)) return sums_.drop(), false;
      if (kTopKWeights != 0 && job.slice == 0) send_topk_weights(job, batch);
      sums_.run(rows, prepare);
    } else {
      if (!await_ready(job)) return false;
      const FoldedRows rows{args_.y + columns,
                            call_.own_at<unsigned char>(ring_offset(call_, 0)) + columns,
                            received_rings(job.slice),
                            SlotPlaces(true).stride(job.slice),
                            args_.out + first,
                            {args_.bias[0] + first, args_.bias[1] + first},
                            RingGaps(call_)};
      sums_.begin(entries, count, units, rows);
      sums_.run(rows, prepare);
      if (kTopKWeights != 0 && job.slice == 0) fold_topk_weights(job);
    }
    if (job.is_signalled) post(job, batch);
    return true;
  }

  __device__ const unsigned char* received_rings(int slice) const {
    if constexpr (kAcrossHosts == 0) return nullptr;
    const int64_t at = ring_offset(call_, 0) + SlotPlaces(true).slice(slice);
    return call_.received_rows_at<const unsigned char>(at);
  }

  // Hands a job to the signal warp.
  __device__ void post(const Job& job, const BatchWord& batch) {
    __syncwarp();
    if (call_.lane == 0) {
      // The signal warp waits for nobody but a full ring of commands, and may have failed.
      const int late = kAcrossHosts != 0 ? call_.first_elsewhere() : args_.call.rank;
      Deadline deadline(call_);
      while (posted_ > 0 && !phase_is_over(&own_.signalled, (posted_ - 1) & 1u))
        if (deadline.expired(late, 0)) break;
      static_cast<Job&>(own_.done) = job;
      own_.done.keep(batch.tokens);
      arrive(&own_.posted);
    }
    ++posted_;
    __syncwarp();
  }

  // The source has folded what the slot held before.
  __device__ bool await_free(const Job& job) const {
    if (job.turn == 0) return true;
    bool free = false;
    if (call_.lane == 0) {
      const auto* word = call_.own_at<const uint64_t>(call_.ack(job.source, word_of(job)));
      Deadline deadline(call_);
      CountedWord ack{};
      do {
        ack = CountedWord::decode(load_acquire_system(word));
        free = ack.epoch == call_.epoch && ack.count >= job.turn;
        if (!free) nap();
      } while (!free && !deadline.expired(job.source, ack.epoch));
    }
    __syncwarp();
    return __any_sync(kFullWarp, free) != 0;
  }

  // Every rank's rows of the batch have come.
  __device__ bool await_ready(const Job& job) const {
    const uint32_t use = BatchWord::use_of(call_.epoch, job.turn);
    bool came = true;
    for_ranks_of(call_.lane, kWarpLanes, [&](int rank) {
      if (!came || !uses_ring(call_, rank)) return;
      const auto* word = call_.own_at<const uint64_t>(call_.ready(rank, word_of(job)));
      Deadline deadline(call_);
      uint32_t seen = 0;
      do {
        seen = BatchWord::decode(load_acquire_system(word)).use;
        came = seen == use;
        if (!came) nap();
      } while (!came && !deadline.expired(rank, seen >> BatchWord::kTurnBits));
    });
    __syncwarp();
    return __all_sync(kFullWarp, came) != 0;
  }

  // ---- numbers of the top-k entries -------------------------------------------------------------

  __device__ void send_topk_weights(const Job& job, const BatchWord& batch) const {
    for (int place = 0; place < kBatchTokens; ++place) {
      if ((batch.tokens >> place & 1u) == 0 || call_.lane >= kTopK) continue;
      const uint32_t earlier = batch.tokens & ((1u << place) - 1u);
      const int row = shared_.prefix[job.source] + static_cast<int>(batch.before) + __popc(earlier);
      const int64_t to = topk_words_at(job.source, call_.rank_at(job.source), job.slot, place);
      call_.rows_peer(job.source)
          .put_word(to + call_.lane * 4, __float_as_uint(topk_weight_of(row)));
    }
  }

  // Where they are in the ring of `writer` that `other` shares.
  __device__ int64_t topk_words_at(int other, int writer, int slot, int place) const {
    return ring_offset(call_, ring_row(call_, writer, slot, 0)) +
           SlotPlaces(call_.is_elsewhere(other)).topk_words(place);
  }

  // The number of lane k for a row that came here.
  __device__ float topk_weight_of(int row) const {
    if (row >= args_.kept) return 0.0f;
    const int64_t at = int64_t{row} * kTopK + call_.lane;
    if constexpr (kExpertMajor == 0) return args_.topk_weights[at];
    const int place = args_.rows_of[at];
    return place >= 0 ? args_.topk_weights[place] : 0.0f;
  }

  __device__ void fold_topk_weights(const Job& job) const {
    if constexpr (!kHasFewRanks) return fold_topk_weights_of_many(job);
    for (int place = job.begin; place < job.end; ++place) {
      const int token = job.batch * kBatchTokens + place;
      if (token >= args_.call.tokens || call_.lane >= kTopK) continue;
      float sum = 0.0f;
      for (int rank = 0; rank < kRanks; ++rank) {
        const int row = args_.rows[int64_t{token} * kRanks + rank];
        if (row < 0) continue;
        sum = __fadd_rn(sum, topk_weight_from(rank, row, job.slot, place));
      }
      args_.out_weights[int64_t{token} * kTopK + call_.lane] = sum;
    }
  }

  // The rows of a token are looked up by all lanes, then each lane adds its own entry's numbers.
  __device__ void fold_topk_weights_of_many(const Job& job) const {
    for (int place = job.begin; place < job.end; ++place) {
      const int token = job.batch * kBatchTokens + place;
      if (token >= args_.call.tokens) continue;
      float sum = 0.0f;
      for (int round = 0; round < kRankRounds; ++round) {
        const int first = round * kWarpLanes, rank = first + call_.lane;
        const int row = rank < kRanks ? args_.rows[int64_t{token} * kRanks + rank] : -1;
        for (uint32_t left = __ballot_sync(kFullWarp, row >= 0); left != 0; left &= left - 1) {
          const int lane = __ffs(static_cast<int>(left)) - 1;
          const int own = __shfl_sync(kFullWarp, row, lane);
          if (call_.lane < kTopK)
            sum = __fadd_rn(sum, topk_weight_from(first + lane, own, job.slot, place));
        }
      }
      if (call_.lane < kTopK) args_.out_weights[int64_t{token} * kTopK + call_.lane] = sum;
    }
  }

  // The number of this lane's entry from a rank, to which `row` rows went before.
  __device__ float topk_weight_from(int rank, int row, int slot, int place) const {
    return uses_ring(call_, rank) ? arrived_topk_weight(rank, slot, place)
                                  : topk_weight_of(shared_.prefix[rank] + row);
  }

  __device__ float arrived_topk_weight(int rank, int slot, int place) const {
    const int64_t from = topk_words_at(rank, rank, slot, place);
    const auto* words = call_.rows_at<const uint32_t>(rank, from);
    return __uint_as_float(load_relaxed_system(words + call_.lane));
  }

  const HighThroughputCombineArgs& args_;
  CombineShared& shared_;
  WorkerShared& own_;
  const Call& call_;
  RowSums sums_;
  Preparation next_;  // of the job after the one that is done
  uint32_t posted_ = 0;
};

// The warp that signals what the workers have done: one fence for all that are posted.
class SignalWarp {
 public:
  __device__ SignalWarp(CombineShared& shared, const Call& call) : shared_(shared), call_(call) {}

  // Ends when the workers have, whose waits have bounds.
  __device__ void run() {
    while (look()) nap();
  }

 private:
  // Signals what is posted; whether more may come.
  __device__ bool look() {
    const bool works = !phase_is_over_now(&shared_.ended, 0);  // before what is posted
    const bool signals = signal();
    return __any_sync(kFullWarp, works || signals) != 0;
  }

  // Lane w signals what worker w has posted.
  __device__ bool signal() {
    if constexpr (kAcrossHosts != 0) return signal_across_hosts();
    WorkerShared* worker = call_.lane < kWorkers ? &shared_.workers[call_.lane] : nullptr;
    if (worker == nullptr || !phase_is_over_now(&worker->posted, signalled_ & 1u)) return false;
    const Job job = worker->done;
    arrive(&worker->signalled);
    ++signalled_;
    fence_system();
    if (job.kind == Job::Kind::kSend) {
      call_.peer(job.source).put(ready_of(job), ready_word(job));
      return true;
    }
    for (int rank = 0; rank < kRanks; ++rank)
      if (uses_ring(call_, rank)) call_.peer(rank).put(ack_of(job, rank), ack_word(job));
    return true;
  }

  // The same where some ranks are on other hosts: lanes that have nothing come, too.
  __device__ bool signal_across_hosts() {
    WorkerShared* worker = call_.lane < kWorkers ? &shared_.workers[call_.lane] : nullptr;
    const bool has = worker != nullptr && phase_is_over_now(&worker->posted, signalled_ & 1u);
    Job job{};
    uint32_t tokens = 0;
    if (has) {
      job = worker->done;
      tokens = worker->done.kept();
      arrive(&worker->signalled);
      ++signalled_;
    }
    if (__any_sync(kFullWarp, has) == 0) return false;
    fence_system();
    const bool sends = has && job.kind == Job::Kind::kSend;
    const bool pushes = sends && call_.is_elsewhere(job.source);
    if (sends && !pushes) call_.peer(job.source).put(ready_of(job), ready_word(job));
    push_slice(pushes, job, tokens);
    for (int rank = 0; rank < kRanks; ++rank) {
      const bool acks = has && !sends && uses_ring(call_, rank);
      if (call_.is_elsewhere(rank)) {
        call_.push_word(acks, rank, ack_of(job, rank), ack_word(job));
      } else if (acks) {
        call_.peer(rank).put(ack_of(job, rank), ack_word(job));
      }
    }
    return has;
  }

  // The numbers of the top-k entries go with the first slice.
  __device__ void push_slice(bool pushes, const Job& job, uint32_t tokens) const {
    const int to = pushes ? job.source : 0;
    const int64_t slot = ring_offset(call_, ring_row(call_, call_.rank_at(to), job.slot, 0));
    const SlotPlaces places(true);
    bool pushed = true;
    if constexpr (kTopKWeights != 0)
      pushed = push_runs(call_, pushes && job.slice == 0, to, slot + places.topk_words(0),
                         kTopKWordsBytes, tokens);
    pushed = pushed && push_runs(call_, pushes, to, slot + places.slice(job.slice),
                                 places.stride(job.slice), tokens);
    // Without its rows the word is not sent, and the peer is late here.
    if (pushed) call_.push_word(pushes, to, ready_of(job), ready_word(job));
  }

  __device__ int64_t ready_of(const Job& job) const {
    return call_.ready(call_.rank_at(job.source), word_of(job));
  }
  __device__ uint64_t ready_word(const Job& job) const {
    return BatchWord{BatchWord::use_of(call_.epoch, job.turn), 0, 0}.encode();
  }
  __device__ int64_t ack_of(const Job& job, int rank) const {
    return call_.ack(call_.rank_at(rank), word_of(job));
  }
  __device__ uint64_t ack_word(const Job& job) const {
    return CountedWord{call_.epoch, job.turn + 1}.encode();
  }

  CombineShared& shared_;
  const Call& call_;
  uint32_t signalled_ = 0;  // by this lane
};

}  // namespace fanfold

namespace fanfold::high_throughput {

__global__ void __launch_bounds__(kThreads, 1)
    combine(const __grid_constant__ HighThroughputCombineArgs args) {
  auto& shared = dynamic_shared<CombineShared>();
  wait_for_previous_kernel();
  if (is_aborted(args.source_prefix)) return;
  const Call call(args.call, HighThroughputPhase::kCombine);
  const auto thread = static_cast<int>(threadIdx.x);
  for_ranks_of(thread, kThreads, [&](int rank) {
    shared.prefix[rank] = rank == 0 ? 0 : args.source_prefix[rank - 1];
  });
  if (thread < kWorkers) init_barrier(&shared.workers[thread].posted, 1);
  if (thread < kWorkers) init_barrier(&shared.workers[thread].signalled, 1);
  if (thread == 0) init_barrier(&shared.ended, kWorkers);
  gather(call, shared.participants);
  // One worker less where ranks are on other hosts: all jobs are for whoever comes.
  const bool relays = kAcrossHosts != 0 && blockIdx.x == gridDim.x - 1 && call.warp == 0;
  if (!shared.participants.is_aborted) {
    if (relays) {
      const int own = shared.batches(args.call.rank);
      Relay<kSlices>(call).run([own](int) { return own; },
                               [&](int source) { return shared.batches(source); });
      __syncwarp();
      if (call.lane == 0) arrive(&shared.ended);
    } else if (call.warp < kWorkers) {
      Worker(args, shared, call).run();
    } else {
      SignalWarp(shared, call).run();
    }
  }
  finish(call);
}

}  // namespace fanfold::high_throughput
