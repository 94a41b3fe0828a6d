// A token's header: what its source sends each rank about the token's top-k entries. It holds how
// many earlier rows of this source go to the same expert (token-major: to the same rank), which the
// source counts from its own routing, so that a receiver needs to know no other token to place this
// one's rows.
//
// A token goes to an expert once however often it names it (docs/decisions/arithmetic.md): its
// first mention counts, with the sum of all weights, and the others go nowhere. Token-major each
// mention arrives as it is.
#pragma once

#include "low_latency/routing.cuh"

namespace fanfold {

inline constexpr HeaderLayout kHeader{kLocalExperts};

template <CallKind Kind>
class HeaderSender {
 public:
  __device__ HeaderSender(const Call<Kind>& call, const TopKEntries& entries, TokenSet* tokens_of)
      : call_(call), entries_(entries), tokens_of_(tokens_of) {}

  // Pushes the headers of the tokens from `first` to `last` (not included) to all live ranks: a
  // token for each warp at a time. All threads of the CTA come.
  __device__ void send(int first, int last) {
    for (int chunk = first; chunk < last; chunk += kWarps) {
      if (chunk > first) __syncthreads();  // all have read the sets
      const int token = chunk + call_.warp;
      // A warp without a token has no entries.
      const int looked_at = token < last ? token : entries_.tokens;
      const auto own = TokenEntries::load(entries_, looked_at, call_.lane);
      const bool awaits = chunk == first && call_.warp == kWarps - 1;
      const int rows =
          rows_before(token, TopKEntries::sane(own.raw), min(chunk + kWarps, last), awaits);
      if (token < last) push_token(token, own, rows);
    }
  }

 private:
  // How many rows go where those of `expert`, this lane's, do, from tokens before it. If this warp
  // `awaits` the acknowledgements, all warps may put headers then.
  __device__ int rows_before(int token, int expert, int last, bool awaits) {
    int rows = 0;
    const auto count = [&](int first) {
      if (expert >= 0) rows += tokens_of_[set_of_rows(expert)].size_below(token - first);
    };
    for_each_window(entries_, last, tokens_of_, count, [&] {
      if (awaits) call_.await_acks();
    });
    return rows;
  }

  __device__ void push_token(int token, const TokenEntries& own, int rows) {
    const RankSet live = call_.live_ranks();
    const int expert = TopKEntries::sane(own.raw);
    // Where routing is late, dispatch has reported them before combine meets them.
    if (Kind == CallKind::kDispatch && expert < 0 && own.raw != -1)
      report_bad_index(token, own.raw);
    if constexpr (kTokenMajor != 0) return push(token, expert, rows, own.weight, live);
    const uint32_t same = __match_any_sync(kFullWarp, expert);
    const bool first = expert >= 0 && (same & lanes_below()) == 0;
    const float weight = summed_weight(own.weight, expert >= 0 ? same : 0u);
    push(token, first ? expert : -1, rows, weight, live);
  }

  // The sum of the weights of all lanes that name the expert, in their order; 1 without weights.
  __device__ float summed_weight(float own, uint32_t same) const {
    if (entries_.topk_weights == nullptr) return 1.0f;
    if (__ballot_sync(kFullWarp, __popc(same) > 1) == 0) return own;
    float sum = own;
    for (int k = 0; k < kTopK; ++k) {
      const float other = __shfl_sync(kFullWarp, own, k);
      if (k > call_.lane && (same >> k & 1u) != 0) sum = __fadd_rn(sum, other);
    }
    return sum;
  }

  __device__ void push(int token, int expert, int place, float weight, const RankSet& live) {
    if (kHasFewRanks && call_.lane >= kTopK) return;
    const uint32_t bits = escape_sentinel(__float_as_uint(weight));
    // Starting points differ, so that links fill evenly.
#pragma unroll kHasFewRanks ? kRanks : 4
    for (int i = 0; i < kRanks; ++i) {
      const int rank = (call_.args.rank + 1 + token + i) % kRanks;
      if (!live.has(rank) || call_.lane >= kTopK) continue;
      const int local = expert - rank * kLocalExperts;
      const bool here = expert >= 0 && local >= 0 && local < kLocalExperts;
      const uint32_t where = here ? static_cast<uint32_t>(local) : kHeader.elsewhere();
      Peer(call_.args, rank)
          .put(call_.header(call_.writer_to(rank), token, call_.lane),
               kHeader.encode(where, static_cast<uint32_t>(place), bits));
    }
  }

  __device__ void report_bad_index(int token, int64_t value) const {
    call_.report(ReportKind::kIndex, call_.args.rank, token, bad_entry(call_.lane, value));
  }

  const Call<Kind>& call_;
  const TopKEntries entries_;
  TokenSet* const tokens_of_;
};

// The header of one (source, token), decoded for this rank. Lane k < kTopK holds entry k.
struct Resolved {
  bool here;     // this lane's entry is one of this rank's experts
  uint32_t all;  // the lanes of which that is so
  int local;     // the expert
  int place;     // among the rows of this source
  float weight;
};

// Where this lane's entry of a header is; lane < kTopK.
template <CallKind Kind>
__device__ __forceinline__ uint64_t* header_at(const Call<Kind>& call, int source, int token) {
  const Writer writer = call.writer_of(source);
  return call.template own_at<uint64_t>(writer, call.header(writer, token, call.lane));
}

// Waits for an entry; one that does not come is none of this rank's.
template <CallKind Kind>
__device__ __forceinline__ uint64_t await_entry(const Call<Kind>& call, int source,
                                                const uint64_t* place) {
  Deadline deadline(call);
  uint64_t header = load_relaxed_system(place);
  while (header == ~uint64_t{0}) {
    if (deadline.expired(source)) return kHeader.elsewhere();
    header = load_relaxed_system(place);
  }
  return header;
}

// All lanes of a warp take part, each with its entry.
__device__ __forceinline__ Resolved resolve(uint64_t header) {
  const uint32_t local = kHeader.local(header);
  const bool here = local != kHeader.elsewhere();
  return {here, __ballot_sync(kFullWarp, here), static_cast<int>(local),
          static_cast<int>(kHeader.place(header)), __uint_as_float(HeaderLayout::weight(header))};
}

// Waits for a header, and fills its place with the sentinel again. The header of a rank elsewhere
// is there already, and stays. All lanes of a warp take part.
template <CallKind Kind>
__device__ Resolved take_header(const Call<Kind>& call, int source, int token) {
  uint64_t header = kHeader.elsewhere();
  if (call.lane < kTopK) {
    auto* place = header_at(call, source, token);
    if (call.is_elsewhere(source)) {
      header = load_relaxed_system(place);
    } else {
      header = await_entry(call, source, place);
      *place = ~uint64_t{0};
    }
  }
  __syncwarp();
  return resolve(header);
}

}  // namespace fanfold
