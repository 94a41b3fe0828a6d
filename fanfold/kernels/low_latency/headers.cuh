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

// Tokens whose headers a CTA works out at once: one for each warp.
inline constexpr int kChunkTokens = kWarps;
inline constexpr int kCounters = kChunkTokens * kTopK;
static_assert(kChunkTokens <= 32, "a word has a bit for each of them");

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
  uint32_t counter_of[kExperts];  // plus one; 0 where no token of the chunk names the expert
  // Of each counter: the tokens of the window and how many came in windows before it, and bit w
  // for the w-th token of the chunk itself.
  TokenSet window[kCounters];
  int32_t earlier[kCounters];
  uint32_t chunk[kCounters];
};

// The routing entries of a window of tokens, some for each thread of a CTA.
class Window {
 public:
  __device__ Window(const Choices& choices, int first, int last)
      : choices_(choices), begin_(first * kTopK), end_(last * kTopK) {
    load(begin_);
  }

  // Calls `use(token, expert)` for every entry that names an expert.
  template <class Use>
  __device__ void for_each(Use use) {
    for (int begin = begin_;;) {
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = begin + static_cast<int>(threadIdx.x) + i * kThreads;
        if (experts_[i] >= 0) use(at / kTopK, experts_[i]);
      }
      begin += kBatch * kThreads;
      if (begin >= end_) return;
      load(begin);
    }
  }

 private:
  static constexpr int kBatch = 8;  // entries that a thread asks for at once

  __device__ void load(int begin) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = begin + static_cast<int>(threadIdx.x) + i * kThreads;
      experts_[i] = at < end_ ? Choices::sane(choices_.topk_idx[at]) : -1;
    }
  }

  const Choices& choices_;
  const int begin_;
  const int end_;
  int experts_[kBatch];
};

template <CallKind Kind>
class HeaderSender {
 public:
  __device__ HeaderSender(const Call<Kind>& call, const Choices& choices, HeaderShared& shared)
      : call_(call), choices_(choices), shared_(shared) {}

  // Pushes the headers of the tokens from `first` to `last` (not included) to all live ranks. All
  // warps of the CTA come.
  __device__ void send(int first, int last) {
    for (int chunk = first; chunk < last; chunk += kChunkTokens) {
      if (chunk > first) __syncthreads();  // all have read what is cleared now
      const bool has_token = chunk + call_.warp < last;
      const int token = has_token ? chunk + call_.warp : choices_.tokens;
      const auto own = TokenChoices::load(choices_, token, call_.lane);
      count_earlier(chunk, Choices::sane(own.raw));
      if (has_token) push_token(token, own);
    }
  }

 private:
  // Leaves in the counters how often the chunk's experts were chosen before. `expert` is this
  // lane's of the chunk.
  __device__ void count_earlier(int chunk, int expert) {
    for (int first = 0; first == 0 || first < chunk; first += kWindowTokens) {
      Window window(choices_, first, min(first + kWindowTokens, chunk));
      clear(first == 0);
      __syncthreads();
      if (first == 0) give_counter(expert);
      window.for_each([&](int token, int other) {
        const auto counter = static_cast<int>(shared_.counter_of[other]);
        if (counter != 0) shared_.window[counter - 1].add(token);
      });
      __syncthreads();
      if (first + kWindowTokens >= chunk) return;  // the last window is counted where it is used
      for (int i = static_cast<int>(threadIdx.x); i < kCounters; i += kThreads)
        shared_.earlier[i] += shared_.window[i].size();
      __syncthreads();
    }
  }

  __device__ void clear(bool all) {
    const auto thread = static_cast<int>(threadIdx.x);
    auto* words = reinterpret_cast<uint32_t*>(shared_.window);
    for (int i = thread; i < kCounters * kSetWords; i += kThreads) words[i] = 0;
    if (!all) return;
    for (int i = thread; i < kExperts; i += kThreads) shared_.counter_of[i] = 0;
    for (int i = thread; i < kCounters; i += kThreads) shared_.earlier[i] = 0;
    for (int i = thread; i < kCounters; i += kThreads) shared_.chunk[i] = 0;
  }

  // One counter serves all tokens of the chunk that name the expert.
  __device__ void give_counter(int expert) {
    if (expert >= 0) {
      const auto counter = static_cast<uint32_t>(call_.warp * kTopK + call_.lane);
      atomicMax(&shared_.counter_of[expert], counter + 1);
    }
    __syncthreads();
    if (expert >= 0) atomicOr(&shared_.chunk[shared_.counter_of[expert] - 1], 1u << call_.warp);
  }

  // One warp; each has a token of the chunk.
  __device__ void push_token(int token, const TokenChoices& own) {
    const uint32_t live = call_.await_receipts();
    const int expert = Choices::sane(own.raw);
    // Combine, where its routing is late, meets those that dispatch has told.
    if (Kind == CallKind::kDispatch && expert < 0 && own.raw != -1)
      report_bad_index(token, own.raw);
    const uint32_t same = __match_any_sync(kFullWarp, expert);
    const bool first = expert >= 0 && (same & lanes_below()) == 0;
    const float weight = summed_weight(own.weight, expert >= 0 ? same : 0u);
    push(token, first ? expert : -1, first ? rows_before(expert) : 0, weight, live);
  }

  // Of this rank to the expert, of tokens before this warp's.
  __device__ int rows_before(int expert) const {
    const auto counter = static_cast<int>(shared_.counter_of[expert]) - 1;
    const uint32_t of_chunk = shared_.chunk[counter] & ((1u << call_.warp) - 1u);
    return shared_.earlier[counter] + shared_.window[counter].size() + __popc(of_chunk);
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
