// The plan of a new routing: for every token how many rows go to each rank before it, and for every
// top-k entry the expert-major row that it gets there. All ranks tell each other how many rows they
// have for every expert, so that each knows all places by itself.
//
// Tokens are looked at in tiles of 32: one word for each expert says which tokens of the tile name
// it, so that a token that names an expert twice counts once, and its place is the number of bits
// below its own. A CTA counts a run of tiles, all CTAs meet, and each then places the same run.
//
// Constants: kGroupTiles (tiles that are in shared memory at once).
#include "high_throughput/call.cuh"

namespace fanfold {

inline constexpr int kColumns = kExperts + kRanks;  // what is counted: experts, then ranks
// Of a rank's counts for another: what a command names begins and ends on 16 bytes.
inline constexpr int kColumnStride = kAcrossHosts != 0 ? align_up(kColumns, 2) : kColumns;
inline constexpr int kTileTokens = 32;
static_assert(kWarps >= 2);
static_assert(kColumnStride <= HighThroughputDeviceLayout::kMostCounted + kRanks);

struct PlanShared {
  uint32_t tokens_of[kGroupTiles][kColumns];  // a bit for each token of the tile
  int32_t first[kGroupTiles][kColumns];       // the row of the tile's first token
  int32_t next[kColumns];                     // the row of the next token
  int32_t total[kColumns];                    // rows of this rank; then of all
  int32_t end[kExperts];                      // where each expert's rows end on its rank, padded
  Participants participants;
  bool met;
};

// The results of an aborted call, for its readers on the GPU: no rows.
__device__ __forceinline__ void bring_nothing(const PlanArgs& args) {
  for (int e = static_cast<int>(threadIdx.x); e < kLocalExperts + 2; e += kThreads) {
    args.offsets[e] = 0;
    if (e < kLocalExperts) args.tokens_per_expert[e] = 0;
  }
}

class Planner {
 public:
  __device__ Planner(const PlanArgs& args, PlanShared& shared, const Call& call)
      : args_(args), shared_(shared), call_(call) {
    const int tiles = (args.call.tokens + kTileTokens - 1) / kTileTokens;
    const int each = (tiles + ctas() - 1) / ctas();
    begin_ = min(cta() * each, tiles);
    end_ = min(begin_ + each, tiles);
  }

  __device__ void run() {
    count_run();
    if (!meet()) {
      if (cta() == 0) bring_nothing(args_);
      return;
    }
    add_runs();
    push_counts();
    add_sources();
    align_experts();
    if (cta() == 0) publish();
    place_run();
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int cta() { return static_cast<int>(blockIdx.x); }
  __device__ static int ctas() { return static_cast<int>(gridDim.x); }

  // ---- tiles ------------------------------------------------------------------------------------

  // -1 for none, and for what is no expert.
  __device__ int expert(int token, int k) const {
    if (token >= args_.call.tokens) return -1;
    const int64_t raw = args_.topk_idx[int64_t{token} * kTopK + k];
    return static_cast<uint64_t>(raw) < kExperts ? static_cast<int>(raw) : -1;
  }

  // Calls `body(first tile, tiles)` for each group of this CTA's run, when the words stand that say
  // which tokens of each tile name each expert and rank.
  template <class Body>
  __device__ void for_groups(const Body& body) {
    for (int group = begin_; group < end_; group += kGroupTiles) {
      const int tiles = min(kGroupTiles, end_ - group);
      for (int i = thread(); i < tiles * kColumns; i += kThreads)
        shared_.tokens_of[i / kColumns][i % kColumns] = 0;
      __syncthreads();
      for (int i = thread(); i < tiles * kTileTokens * kTopK; i += kThreads) {
        const int token = i / kTopK;
        const int chosen = expert(group * kTileTokens + token, i % kTopK);
        if (chosen < 0) continue;
        uint32_t* words = shared_.tokens_of[token / kTileTokens];
        const uint32_t bit = 1u << (token % kTileTokens);
        atomicOr(&words[chosen], bit);
        atomicOr(&words[kExperts + chosen / kLocalExperts], bit);
      }
      __syncthreads();
      body(group, tiles);
      __syncthreads();
    }
  }

  // Gives the tiles of a group their first rows, from `next` on.
  __device__ void advance(int tiles) {
    for (int c = thread(); c < kColumns; c += kThreads) {
      int row = shared_.next[c];
      for (int tile = 0; tile < tiles; ++tile) {
        shared_.first[tile][c] = row;
        row += __popc(shared_.tokens_of[tile][c]);
      }
      shared_.next[c] = row;
    }
  }

  __device__ int row_of(int tile, int token, int column) const {
    const uint32_t below = (1u << token) - 1u;
    return shared_.first[tile][column] + __popc(shared_.tokens_of[tile][column] & below);
  }

  // ---- counts -----------------------------------------------------------------------------------

  __device__ uint32_t* counted(int of_cta, int column) const {
    return reinterpret_cast<uint32_t*>(args_.counted) + int64_t{of_cta} * kColumns + column;
  }

  __device__ void count_run() {
    for (int c = thread(); c < kColumns; c += kThreads) shared_.next[c] = 0;
    for_groups([&](int, int tiles) { advance(tiles); });
    __syncthreads();
    for (int c = thread(); c < kColumns; c += kThreads)
      store_relaxed_gpu(counted(cta(), c), static_cast<uint32_t>(shared_.next[c]));
    check_entries();
  }

  // Reports what is no expert, and writes none in its place.
  __device__ void check_entries() const {
    const int64_t end = min(int64_t{end_} * kTileTokens, int64_t{args_.call.tokens}) * kTopK;
    for (int64_t i = int64_t{begin_} * kTileTokens * kTopK + thread(); i < end; i += kThreads) {
      const int64_t raw = args_.topk_idx[i];
      const bool good = raw >= -1 && raw < kExperts;
      if (args_.choices != nullptr) args_.choices[i] = good ? static_cast<int32_t>(raw) : -1;
      if (good) continue;
      call_.report(ReportKind::kIndex, args_.call.rank, static_cast<int32_t>(i / kTopK),
                   bad_entry(static_cast<int32_t>(i % kTopK), raw));
    }
  }

  // All CTAs of this rank have counted; false if the call has failed.
  __device__ bool meet() {
    __syncthreads();
    if (thread() == 0) {
      uint32_t* gathered = &args_.call.state->gathered;
      add_release_gpu(gathered, 1u);
      Deadline deadline(call_);
      shared_.met = true;
      while (shared_.met && load_acquire_gpu(gathered) != gridDim.x)
        shared_.met = !deadline.expired(args_.call.rank, 0);
    }
    __syncthreads();
    return shared_.met;
  }

  // What earlier runs have, and the rank in all.
  __device__ void add_runs() {
    for (int c = thread(); c < kColumns; c += kThreads) {
      int before = 0, all = 0;
      for (int run = 0; run < ctas(); ++run) {
        const auto rows = static_cast<int>(load_relaxed_gpu(counted(run, c)));
        before += run < cta() ? rows : 0;
        all += rows;
      }
      shared_.next[c] = before;
      shared_.total[c] = all;
    }
    __syncthreads();
  }

  __device__ int64_t count_at(int source, int column) const {
    const int64_t row = int64_t{call_.parity() * kRanks + source} * kColumnStride;
    return args_.call.at.counts + (row + column) * 8;
  }

  __device__ void push_counts() const {
    for (int peer = cta(); peer < kRanks; peer += ctas()) {
      if (!call_.is_peer(peer)) continue;
      const int64_t theirs = count_at(call_.rank_at(peer), 0);
      for (int c = thread(); c < kColumns; c += kThreads) {
        const auto rows = static_cast<uint32_t>(shared_.total[c]);
        call_.peer(peer).put(theirs + int64_t{c} * 8, CountedWord{call_.epoch, rows}.encode());
      }
      if (call_.is_elsewhere(peer)) push_counts_to(peer, theirs);
    }
  }
  // All threads, which have stored the counts in the send area. Each says itself of which call it
  // is.
  __device__ void push_counts_to(int peer, int64_t theirs) const {
    __syncthreads();
    if (call_.warp != 0) return;
    fence_system();
    push_commands(call_, call_.lane == 0, peer,
                  words_command(call_.remote_hosts(), peer, theirs, int64_t{kColumnStride} * 8));
  }

  __device__ int await_count(int source, int column) const {
    const auto is_awaited = [this](uint64_t found) {
      return CountedWord::decode(found).epoch == call_.epoch;
    };
    const auto* word = call_.own_at<const uint64_t>(count_at(source, column));
    Deadline deadline(call_);
    CountedWord counted{};
    do {
      counted = CountedWord::decode(call_.look_at(
          word, source, cta() == 0, [](const uint64_t* at) { return load_relaxed_system(at); },
          [](uint64_t* at, uint64_t found) { store_relaxed_system(at, found); }, is_awaited));
      if (counted.epoch == call_.epoch) return static_cast<int>(counted.count);
    } while (!deadline.expired(source, counted.epoch));
    return 0;
  }

  // An expert's rows lie by source. A rank's are counted for each source by itself.
  __device__ void add_sources() {
    for (int c = thread(); c < kExperts; c += kThreads) {
      int before = 0, all = 0;
      for (int source = 0; source < kRanks; ++source) {
        const int rows = call_.is_peer(source) ? await_count(source, c) : shared_.total[c];
        before += source < call_.rank_at(c / kLocalExperts) ? rows : 0;
        all += rows;
      }
      shared_.next[c] += before;
      shared_.total[c] = all;
    }
    __syncthreads();
  }

  // A warp for each rank: its experts' rows one after the other.
  __device__ void align_experts() {
    for (int rank = call_.warp; rank < kRanks; rank += kWarps) {
      int end = 0;
      for (int first = 0; first < kLocalExperts; first += kWarpLanes) {
        const int e = rank * kLocalExperts + first + call_.lane;
        const bool exists = first + call_.lane < kLocalExperts;
        const int rows = exists ? padded(shared_.total[e]) : 0;
        end += sum_up_to_here(rows);
        if (exists) {
          shared_.end[e] = end;
          shared_.next[e] += end - rows;
        }
        end = __shfl_sync(kFullWarp, end, kWarpLanes - 1);
      }
    }
    __syncthreads();
  }

  __device__ int padded(int rows) const {
    return (rows + args_.alignment - 1) / args_.alignment * args_.alignment;
  }

  // The sum of the values of this lane and those below.
  __device__ int sum_up_to_here(int value) const {
    for (int step = 1; step < kWarpLanes; step *= 2) {
      const int other = __shfl_sync(kFullWarp, value, (call_.lane - step) & (kWarpLanes - 1));
      if (call_.lane >= step) value += other;
    }
    return value;
  }

  // ---- what remains -----------------------------------------------------------------------------

  // How many rows of a source go to a rank.
  __device__ int count_of(int source, int rank) const {
    const int column = kExperts + rank;
    return call_.is_peer(source) ? await_count(source, column) : shared_.total[column];
  }

  __device__ void publish() {
    // What reads these on the GPU shall find no row behind the results.
    const int first = args_.call.rank * kLocalExperts;
    const auto fitting = [this](int64_t rows) { return min(rows, args_.capacity); };
    for (int e = thread(); e < kLocalExperts; e += kThreads) {
      const int64_t end = shared_.end[first + e], rows = shared_.total[first + e];
      const int64_t begin = end - padded(shared_.total[first + e]);
      args_.tokens_per_expert[e] = static_cast<int32_t>(fitting(begin + rows) - fitting(begin));
      args_.offsets[e + 1] = fitting(end);
    }
    const int all = shared_.end[first + kLocalExperts - 1];
    // Of few ranks by a warp of its own, as thread 0 waits for counts, too.
    const int thread_of_rank = kHasFewRanks ? thread() - kWarpLanes : thread();
    if (thread_of_rank >= 0) {
      for_ranks_of(thread_of_rank, kThreads, [&](int rank) {
        int before = 0;
        for (int source = 0; source < call_.rank_at(rank); ++source)
          before += count_of(source, rank);
        args_.first_rows[rank] = before;
      });
    }
    if (thread() != 0) return;
    args_.offsets[0] = 0;
    args_.offsets[kLocalExperts + 1] = all;
    int rows = 0;
    for (int source = 0; source < kRanks; ++source) {
      rows += count_of(source, args_.call.rank);
      args_.source_prefix[source] = rows;
    }
    if (args_.totals == nullptr) return;
    store_relaxed_system(
        reinterpret_cast<uint64_t*>(args_.totals),
        (uint64_t{static_cast<uint32_t>(all)} << 32) | static_cast<uint32_t>(rows));
  }

  __device__ void place_run() {
    for_groups([&](int group, int tiles) {
      advance(tiles);
      __syncthreads();
      const int first = group * kTileTokens;
      const int tokens = min(tiles * kTileTokens, args_.call.tokens - first);
      for (int i = thread(); i < tokens * kTopK; i += kThreads) {
        const int token = i / kTopK;
        const int chosen = expert(first + token, i % kTopK);
        uint32_t word = PlaceWord::kNowhere;
        if (chosen >= 0) {
          const int row = row_of(token / kTileTokens, token % kTileTokens, chosen);
          const auto rank = static_cast<uint32_t>(chosen / kLocalExperts);
          word = PlaceWord{rank, static_cast<uint32_t>(row)}.encode(kRanks);
        }
        args_.places[int64_t{first} * kTopK + i] = word;
      }
      for (int i = thread(); i < tokens * kRanks; i += kThreads) {
        const int token = i / kRanks, column = kExperts + i % kRanks;
        const int tile = token / kTileTokens, bit = token % kTileTokens;
        const bool goes = (shared_.tokens_of[tile][column] >> bit & 1u) != 0;
        args_.rows[int64_t{first} * kRanks + i] = goes ? row_of(tile, bit, column) : -1;
      }
    });
  }

  const PlanArgs& args_;
  PlanShared& shared_;
  const Call& call_;
  int begin_, end_;  // tiles of this CTA
};

}  // namespace fanfold

namespace fanfold::high_throughput {

__global__ void __launch_bounds__(kThreads, 1) plan(const __grid_constant__ PlanArgs args) {
  auto& shared = dynamic_shared<PlanShared>();
  wait_for_previous_kernel();
  // Who refuses a call launches this whatever the call was, with the routing if it knows it.
  const bool refuses = args.call.refused != 0;
  if (refuses && args.source_prefix != nullptr && is_aborted(args.source_prefix)) return;
  const Call call(args.call, HighThroughputPhase::kPlan);
  gather(call, shared.participants);
  const bool moves = !shared.participants.is_aborted;
  if (moves) Planner(args, shared, call).run();
  if (!moves && args.offsets != nullptr && blockIdx.x == 0) bring_nothing(args);
  if (!moves && args.totals != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    store_relaxed_system(reinterpret_cast<uint64_t*>(args.totals), ~uint64_t{0});
  finish(call, moves || refuses ? nullptr : args.source_prefix);
}

}  // namespace fanfold::high_throughput
