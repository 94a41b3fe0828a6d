// High-throughput combine. Expert side: for each token of each source one row, the sum of the
// outputs of its local experts (token-major: its output), into the ring that the source has for
// this rank. Source: for each token the sum of the ranks' rows.
//
// Teams of warps draw jobs from one list: batch b of every source, then the fold of an earlier
// batch of this rank's own. Whatever a job waits for was drawn before it, here or on a peer, so no
// order of arrival can block the list.
#include "high_throughput/combine_job.cuh"

namespace fanfold {

class Team {
 public:
  __device__ Team(const HighThroughputCombineArgs& args, CombineShared& shared, const Call& call)
      : args_(args), shared_(shared), call_(call), team_(call.warp / kTeamWarps),
        member_(call.warp % kTeamWarps), next_(args, shared, call, member_) {}

  __device__ void run() {
    int most = 0;
    for (int source = 0; source < kRanks; ++source) most = max(most, shared_.batches(source));
    const auto tickets = static_cast<uint32_t>((most + kLag) * kJobs);
    uint32_t ticket = draw_first();
    next_.begin(ticket, 0);
    next_.complete();
    bool done = false;  // the job before, whose place in `jobs` is that of the one after
    int which = 0;
    for (; ticket < tickets; which = 1 - which) {
      if (member_ == 0) {
        const uint32_t drawn = draw(call_, &call_.args.state->sent);
        if (call_.lane == 0) shared_.tickets[team_][which] = drawn;
      }
      meet();  // the table stands, and everybody is done with the job before
      if (done) tell(shared_.jobs[call_.warp][1 - which]);
      ticket = shared_.tickets[team_][which];
      next_.begin(ticket, 1 - which);
      done = do_job(shared_.jobs[call_.warp][which], shared_.tables[team_][which]);
      next_.complete();
    }
    meet();
    if (done) tell(shared_.jobs[call_.warp][1 - which]);
  }

 private:
  __device__ void meet() const {
    if constexpr (kTeamWarps == 1) {
      __syncwarp();
    } else {
      barrier_of(1 + team_, kTeamWarps * kWarpLanes);
    }
  }

  __device__ uint32_t draw_first() const {
    if (member_ == 0) {
      const uint32_t drawn = draw(call_, &call_.args.state->sent);
      if (call_.lane == 0) shared_.tickets[team_][1] = drawn;
    }
    meet();
    return shared_.tickets[team_][1];
  }

  __device__ bool do_job(const Job& job, const SumTable& table) {
    const auto prepare = [&] { next_.step(); };
    if (job.kind == Job::Kind::kSend) {
      if (!await_free(job)) return false;
      if constexpr (kLanes != 0) send_lanes(job);
      RowSums<kWeighted != 0>(table, member_, call_.lane)
          .run([](int, int, float (&)[8]) {}, prepare);
    } else if (job.kind == Job::Kind::kFold) {
      if (!await_ready(job)) return false;
      RowSums<false>(table, member_, call_.lane)
          .run([&](int token, int unit, float (&sum)[8]) { add_biases(token, unit, sum); },
               prepare);
      if constexpr (kLanes != 0) fold_lanes(job);
    }
    return true;
  }

  // ---- what ranks tell each other ---------------------------------------------------------------

  // Whether a rank's rows come through a ring.
  __device__ bool uses_ring(int rank) const {
    return kExpertMajor != 0 ? rank < kRanks : call_.is_peer(rank);
  }

  // The last warp tells of what the whole team has done; the others go on.
  __device__ void tell(const Job& job) const {
    if (member_ != kTeamWarps - 1) return;
    // Others of the team may have given up where this warp did not.
    if (call_.failed()) return;
    if (job.kind == Job::Kind::kFold && uses_ring(call_.lane)) {
      store_release_system(call_.taken(call_.lane, writer_at(call_.args, call_.lane), job.slot),
                           CountedWord{call_.epoch, job.turn + 1}.encode());
    } else if (job.kind == Job::Kind::kSend && call_.lane == 0) {
      const BatchWord sent{BatchWord::use_of(call_.epoch, job.turn), job.rows.before,
                           job.rows.tokens};
      store_release_system(call_.ready(job.source, writer_at(call_.args, job.source), job.slot),
                           sent.encode());
    }
    __syncwarp();
  }

  // The source has folded what the slot held before.
  __device__ bool await_free(const Job& job) const {
    if (job.turn == 0) return true;
    bool free = false;
    if (call_.lane == 0) {
      const uint64_t* word = call_.taken(call_.args.rank, job.source, job.slot);
      Patience patience(call_);
      CountedWord taken{};
      do {
        taken = CountedWord::decode(load_acquire_system(word));
        free = taken.epoch == call_.epoch && taken.count >= job.turn;
      } while (!free && !patience.exhausted(job.source, taken.epoch));
    }
    __syncwarp();
    return __any_sync(kFullWarp, free) != 0;
  }

  // Every rank's rows of the batch have come.
  __device__ bool await_ready(const Job& job) const {
    const uint32_t use = BatchWord::use_of(call_.epoch, job.turn);
    bool came = true;
    if (uses_ring(call_.lane)) {
      const uint64_t* word = call_.ready(call_.args.rank, call_.lane, job.slot);
      Patience patience(call_);
      uint32_t seen = 0;
      do {
        seen = BatchWord::decode(load_acquire_system(word)).use;
        came = seen == use;
      } while (!came && !patience.exhausted(call_.lane, seen >> BatchWord::kTurnBits));
    }
    __syncwarp();
    return __all_sync(kFullWarp, came) != 0;
  }

  __device__ void add_biases(int token, int unit, float (&sum)[8]) const {
    for (const unsigned char* bias : args_.bias) {
      if (bias == nullptr) continue;
      const auto* row = reinterpret_cast<const uint4*>(bias + int64_t{token} * kRowBytes);
      add_weighted(sum, load_once(row + unit), 1.0f);
    }
  }

  // ---- numbers of the choices -------------------------------------------------------------------

  __device__ void send_lanes(const Job& job) const {
    const BatchWord& word = job.rows;
    for (int place = member_; place < kBatchTokens; place += kTeamWarps) {
      if ((word.tokens >> place & 1u) == 0 || call_.lane >= kTopK) continue;
      const uint32_t earlier = word.tokens & ((1u << place) - 1u);
      const int row = shared_.prefix[job.source] + static_cast<int>(word.before) + __popc(earlier);
      unsigned char* to =
          shared_.ring_row(call_, job.source, writer_at(call_.args, job.source), job.slot, place);
      reinterpret_cast<float*>(to + kLanesAt)[call_.lane] = lane_of(row);
    }
  }

  // The number of lane k for a row that came here.
  __device__ float lane_of(int row) const {
    if (row >= args_.kept) return 0.0f;
    const int64_t at = int64_t{row} * kTopK + call_.lane;
    if constexpr (kExpertMajor == 0) return args_.lane_weights[at];
    const int place = args_.rows_of[at];
    return place >= 0 ? args_.lane_weights[place] : 0.0f;
  }

  __device__ void fold_lanes(const Job& job) const {
    for (int place = member_; place < kBatchTokens; place += kTeamWarps) {
      const int token = job.batch * kBatchTokens + place;
      if (token >= call_.args.tokens || call_.lane >= kTopK) continue;
      float sum = 0.0f;
      for (int rank = 0; rank < kRanks; ++rank) {
        const int row = args_.rows[int64_t{token} * kRanks + rank];
        if (row < 0) continue;
        sum = __fadd_rn(sum, uses_ring(rank) ? came(rank, job.slot, place)
                                             : lane_of(shared_.prefix[rank] + row));
      }
      args_.out_weights[int64_t{token} * kTopK + call_.lane] = sum;
    }
  }

  __device__ float came(int rank, int slot, int place) const {
    const unsigned char* from = shared_.ring_row(call_, call_.args.rank, rank, slot, place);
    const auto* words = reinterpret_cast<const uint32_t*>(from + kLanesAt);
    return __uint_as_float(load_relaxed_system(words + call_.lane));
  }

  const HighThroughputCombineArgs& args_;
  CombineShared& shared_;
  const Call& call_;
  const int team_, member_;
  Preparation next_;  // of the job after the one that is done
};

}  // namespace fanfold

using namespace fanfold;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    high_throughput_combine(const __grid_constant__ HighThroughputCombineArgs args) {
  auto& shared = dynamic_shared<CombineShared>();
  wait_for_previous_kernel();
  allow_next_kernel();  // not before, or ever more kernels would wait on SMs of their own
  if (is_void(args.source_prefix)) return;
  const Call call(args.call, HighThroughputPhase::kCombine);
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kRanks) shared.prefix[thread] = thread == 0 ? 0 : args.source_prefix[thread - 1];
  gather(call, shared.participants);
  if (!shared.participants.is_void) Team(args, shared, call).run();
  finish(call);
}
