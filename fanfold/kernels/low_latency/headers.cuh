// A token's header: what its source tells each rank about the token's choices. It holds how many
// earlier rows of this source go to the same expert, which the source counts from its own routing,
// so that a receiver needs to know no other token to place this one's rows.
//
// A token goes to an expert once however often it names it (decision 0003): its first mention
// counts, with the sum of all weights, and the others go nowhere.
#pragma once

#include "low_latency/call.cuh"

namespace fanfold {

inline constexpr HeaderLayout kHeader{kLocalExperts};

// Warps that work out headers together.
struct Team {
  int index;
  int thread;
  int threads;
  int barrier;

  __device__ int warp() const { return thread / kWarpLanes; }
  __device__ void synchronize() const { barrier_of(barrier, threads); }
};

// The routing of this rank's tokens.
struct Choices {
  const int64_t* topk_idx;
  const float* topk_weights;  // null: every weight is 1
  int tokens;

  // The k-th entry of the token's row; -1 beyond.
  __device__ int64_t raw(int token, int k) const {
    return k < kTopK && token < tokens ? topk_idx[int64_t{token} * kTopK + k] : -1;
  }
  // The token's k-th expert; -1 for none and for what is no expert.
  __device__ int of(int token, int k) const { return sane(raw(token, k)); }
  __device__ static int sane(int64_t expert) {
    return static_cast<uint64_t>(expert) < kExperts ? static_cast<int>(expert) : -1;
  }
  __device__ float weight(int token, int k) const {
    if (topk_weights == nullptr || k >= kTopK || token >= tokens) return 1.0f;
    return topk_weights[int64_t{token} * kTopK + k];
  }
};

// A token's routing row in a warp: lane k has choice k.
struct TokenChoices {
  int64_t raw;
  float weight;

  __device__ static TokenChoices load(const Choices& choices, int token, int lane) {
    return {choices.raw(token, lane), choices.weight(token, lane)};
  }
};

// Bit r: the token goes to rank r. All lanes of a warp ask together.
__device__ __forceinline__ uint32_t ranks_of(int expert) {
  const uint32_t bit = expert < 0 ? 0u : 1u << (expert / kLocalExperts);
  return __reduce_or_sync(kFullWarp, bit);
}

// Tokens whose headers a team works out at once.
inline constexpr int kChunkTokens = 7;
inline constexpr int kTeams = 2;  // of a CTA
inline constexpr int kTeamThreads = kThreads / kTeams;
static_assert(kTeamThreads / kWarpLanes >= kChunkTokens && kTeamThreads % kWarpLanes == 0);

// Sets of tokens, one for each expert or counter: what a token names twice counts once. They cover
// a window of tokens at a time.
inline constexpr int kWindowTokens = kExperts <= 1024 ? 128 : 32;  // as shared memory allows
inline constexpr int kSetWords = kWindowTokens / 32;

struct TokenSet {
  uint32_t words[kSetWords];

  __device__ void add(int token) {
    atomicOr(&words[token % kWindowTokens / 32], 1u << (token % 32));
  }
  __device__ int size() const {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kSetWords; ++i) count += __popc(words[i]);
    return count;
  }
};

struct HeaderShared {
  // Of each team: the counter of an expert, plus one; 0 where no token of the chunk names it.
  uint32_t counter_of[kTeams][kExperts];
  TokenSet sets[kTeams][kChunkTokens * kWarpLanes];
  int32_t counters[kTeams][kChunkTokens * kWarpLanes];
};

// The routing entries of a window of tokens, some for each thread of a team.
class Window {
 public:
  __device__ Window(const Choices& choices, const Team& team, int first, int last)
      : choices_(choices), team_(team), begin_(first * kTopK), end_(last * kTopK) {
    load(begin_);
  }

  // Calls `use(token, expert)` for every entry that names an expert.
  template <class Use>
  __device__ void for_each(Use use) {
    for (int begin = begin_;;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = begin + team_.thread + i * team_.threads;
        if (experts_[i] >= 0) use(at / kTopK, experts_[i]);
      }
      begin += kBatch * team_.threads;
      if (begin >= end_) return;
      load(begin);
    }
  }

 private:
  static constexpr int kBatch = 8;  // entries that a thread asks for at once

  __device__ void load(int begin) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = begin + team_.thread + i * team_.threads;
      experts_[i] = at < end_ ? Choices::sane(choices_.topk_idx[at]) : -1;
    }
  }

  const Choices& choices_;
  const Team& team_;
  const int begin_;
  const int end_;
  int experts_[kBatch];
};

template <CallKind Kind>
class HeaderSender {
 public:
  __device__ HeaderSender(const Call<Kind>& call, const Choices& choices, HeaderShared& shared)
      : call_(call), choices_(choices), shared_(shared) {}

  // Pushes the headers of the tokens from `first` to `last` (not included) to all live ranks.
  __device__ void send(const Team& team, int first, int last) {
    for (int chunk = first; chunk < last; chunk += kChunkTokens) {
      const int tokens = min(kChunkTokens, last - chunk);
      const auto own = TokenChoices::load(choices_, chunk + team.warp(), call_.lane);
      count_earlier(team, chunk, team.warp() < tokens ? Choices::sane(own.raw) : -1);
      if (team.warp() == 0) push_chunk(team, chunk, tokens, own);
      if (chunk + kChunkTokens < last) team.synchronize();
    }
  }

 private:
  // Leaves in the chunk's counters and sets how often its experts were chosen before the chunk.
  // `expert` is this lane's of the chunk.
  __device__ void count_earlier(const Team& team, int chunk, int expert) {
    uint32_t* counter_of = shared_.counter_of[team.index];
    TokenSet* sets = shared_.sets[team.index];
    for (int first = 0; first == 0 || first < chunk; first += kWindowTokens) {
      Window window(choices_, team, first, min(first + kWindowTokens, chunk));
      clear(team, first == 0);
      team.synchronize();
      if (first == 0) {
        // One counter serves all tokens that name the expert.
        const auto counter = static_cast<uint32_t>(team.warp() * kWarpLanes + call_.lane);
        if (expert >= 0) atomicMax(&counter_of[expert], counter + 1);
        team.synchronize();
      }
      window.for_each([&](int token, int other) {
        const auto counter = static_cast<int>(counter_of[other]);
        if (counter != 0) sets[counter - 1].add(token);
      });
      team.synchronize();
      if (first + kWindowTokens >= chunk) return;  // the last window's sets are counted when used
      for (int i = team.thread; i < kChunkTokens * kWarpLanes; i += team.threads)
        shared_.counters[team.index][i] += sets[i].size();
      team.synchronize();
    }
  }

  __device__ void clear(const Team& team, bool all) {
    auto* sets = reinterpret_cast<uint32_t*>(shared_.sets[team.index]);
    for (int i = team.thread; i < kChunkTokens * kWarpLanes * kSetWords; i += team.threads)
      sets[i] = 0;
    if (!all) return;
    for (int i = team.thread; i < kExperts; i += team.threads)
      shared_.counter_of[team.index][i] = 0;
    for (int i = team.thread; i < kChunkTokens * kWarpLanes; i += team.threads)
      shared_.counters[team.index][i] = 0;
  }

  // One warp, the chunk's tokens in order: each sees the rows of those before it.
  __device__ void push_chunk(const Team& team, int chunk, int tokens, TokenChoices own) {
    int32_t* counters = shared_.counters[team.index];
    const uint32_t live = call_.await_receipts();
    for (int token = chunk; token < chunk + tokens; ++token) {
      if (token > chunk) own = TokenChoices::load(choices_, token, call_.lane);
      const int expert = Choices::sane(own.raw);
      // Combine, where its routing is late, meets those that dispatch has told.
      if (Kind == CallKind::kDispatch && expert < 0 && own.raw != -1)
        report_bad_index(token, own.raw);
      const uint32_t same = __match_any_sync(kFullWarp, expert);
      const bool first = expert >= 0 && (same & lanes_below()) == 0;
      const float weight = summed_weight(own.weight, expert >= 0 ? same : 0u);
      int place = 0;
      if (first) {
        const auto counter = static_cast<int>(shared_.counter_of[team.index][expert]) - 1;
        place = counters[counter] + shared_.sets[team.index][counter].size();
        ++counters[counter];
      }
      __syncwarp();
      push(token, first ? expert : -1, place, weight, live);
    }
  }

  // The sum of the weights of all lanes that name the expert, in their order; 1 without weights.
  __device__ float summed_weight(float own, uint32_t same) const {
    if (choices_.topk_weights == nullptr) return 1.0f;
    if (__ballot_sync(kFullWarp, __popc(same) > 1) == 0) return own;
    float sum = own;
    for (int k = 0; k < kTopK; ++k) {
      const float other = __shfl_sync(kFullWarp, own, k);
      if (k > call_.lane && (same >> k & 1u) != 0) sum = __fadd_rn(sum, other);
    }
    return sum;
  }

  __device__ void push(int token, int expert, int place, float weight, uint32_t live) {
    if (call_.lane >= kTopK) return;
    const uint32_t bits = never_absent(__float_as_uint(weight));
    // Starting points differ, so that links fill evenly.
#pragma unroll
    for (int i = 0; i < kRanks; ++i) {
      const int rank = (call_.args.rank + 1 + token + i) % kRanks;
      if ((live >> rank & 1u) == 0) continue;
      const int local = expert - rank * kLocalExperts;
      const bool here = expert >= 0 && local >= 0 && local < kLocalExperts;
      const uint32_t where = here ? static_cast<uint32_t>(local) : kHeader.elsewhere();
      store_relaxed_system(call_.header(rank, call_.writer_at(rank), token, call_.lane),
                           kHeader.encode(where, static_cast<uint32_t>(place), bits));
    }
  }

  __device__ void report_bad_index(int token, int64_t value) const {
    call_.report(ReportKind::kIndex, call_.args.rank, token, bad_choice(call_.lane, value));
  }

  const Call<Kind>& call_;
  const Choices choices_;
  HeaderShared& shared_;
};

// What the header of one (source, token) says to this rank. Lane k < kTopK holds choice k.
struct Resolved {
  bool here;     // this lane's choice is one of this rank's experts
  uint32_t all;  // the lanes of which that is so
  int local;     // the expert
  int place;     // among the rows of this source
  float weight;
};

// Waits for a header, and makes its place absent again. All lanes of a warp take part.
template <CallKind Kind>
__device__ Resolved take_header(const Call<Kind>& call, int source, int token) {
  uint64_t header = kHeader.elsewhere();
  if (call.lane < kTopK) {
    uint64_t* place = call.header(call.args.rank, source, token, call.lane);
    Patience<Kind> patience(call);
    header = load_relaxed_system(place);
    while (header == ~uint64_t{0}) {
      if (patience.exhausted(source, 0)) {
        header = kHeader.elsewhere();
        break;
      }
      header = load_relaxed_system(place);
    }
    *place = ~uint64_t{0};
  }
  __syncwarp();
  const uint32_t local = kHeader.local(header);
  const bool here = local != kHeader.elsewhere();
  return {here, __ballot_sync(kFullWarp, here), static_cast<int>(local),
          static_cast<int>(kHeader.place(header)), __uint_as_float(HeaderLayout::weight(header))};
}

}  // namespace fanfold
