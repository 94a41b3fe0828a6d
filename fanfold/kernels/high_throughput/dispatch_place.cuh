// Where a row goes that has come: its places among the results, and what is kept of it.
#pragma once

#include "high_throughput/dispatch_shape.cuh"

namespace fanfold {

// All threads of one CTA.
__device__ __forceinline__ void copy_for_caller(const HighThroughputDispatchArgs& args) {
  if (args.offsets_copy == nullptr) return;
  for (int e = static_cast<int>(threadIdx.x); e <= kLocalExperts; e += kThreads) {
    args.offsets_copy[e] = args.offsets[e];
    if (e < kLocalExperts) args.tokens_per_expert_copy[e] = args.tokens_per_expert[e];
  }
}

// All lanes of some warps: the descriptions of rows say that there is none, from row `row` of those
// that arrive and from `place` of the results on.
__device__ __forceinline__ void mark_absent(const HighThroughputDispatchArgs& args, int64_t row,
                                            int64_t place, int warp, int warps) {
  if (args.marks_absent == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int first = warp * kWarpLanes + lane, step = warps * kWarpLanes;
  for (int64_t i = place + first; i < args.capacity; i += step) {
    args.row_source_rank[i] = args.row_source_token[i] = -1;
    if (kExpertMajor != 0 && args.row_weights != nullptr) args.row_weights[i] = 0.0f;
  }
  if constexpr (kNewRouting == 0) return;
  for (int64_t i = row + first; i < args.capacity; i += step) args.source_token[i] = -1;
  for (int64_t i = row * kTopK + first; i < args.capacity * kTopK; i += step) {
    if constexpr (kExpertMajor != 0) {
      if (args.rows_of != nullptr) args.rows_of[i] = -1;
    } else {
      args.topk_idx[i] = -1;
      if constexpr (kWeighted != 0) args.topk_weights[i] = 0.0f;
    }
  }
}

class Placer {
 public:
  __device__ explicit Placer(const DispatchWarp& warp)
      : args_(warp.args), cta_(warp.cta), call_(warp.call) {}

  // All lanes: enqueues the copies of the row in a slot, and stores what describes it.
  __device__ void place(const unsigned char* bytes, const ReceivedRow& row) const {
    const bool fits = row.row < args_.capacity;
    if (!fits && call_.lane == 0) report_capacity(row.row);
    if constexpr (kExpertMajor != 0) {
      place_copies(bytes, row, fits);
    } else {
      if (fits && call_.lane == 0) store_copy(bytes, row.row, row);
      if (kNewRouting != 0 && fits) keep_entry(bytes, row);
    }
    if (kNewRouting != 0 && fits && call_.lane == 0) args_.source_token[row.row] = row.token;
  }

  // All lanes: what lies in the ring beside the rows of a batch, which are in place. `rows` is that
  // of its first token, `first` what arrives first.
  __device__ void place_beside(const unsigned char* rows, const ReceivedRow& first,
                               uint32_t tokens) const {
    const int last = first.row + __popc(tokens) - 1;
    if (last >= args_.capacity && call_.lane == 0) report_capacity(last);
    const auto beside = [rows](int at, int place, int word) {
      const unsigned char* row = rows + place * kRingRowBytes + at - kSentAt;
      return load_relaxed_system(reinterpret_cast<const uint32_t*>(row) + word);
    };
    if constexpr (kScaleWords > 0)
      for_words<kScaleWords>(
          first, tokens, [&](int place, int word) { return beside(kScalesAt, place, word); },
          [&](int, int row, int word, uint32_t scale) {
            args_.out_scales[int64_t{row} * kScaleWords + word] = scale;
          });
    if constexpr (kNewRouting != 0)
      for_words<kTopK>(
          first, tokens,
          [&](int place, int k) {
            return TopKEntry{static_cast<int>(beside(kTopKWordsAt, place, k)),
                             kWeighted != 0 ? __uint_as_float(beside(kWeightsAt, place, k)) : 0.0f};
          },
          [&](int, int row, int k, const TopKEntry& entry) {
            const int local = entry.expert - call_.rank_at(first.source) * kLocalExperts;
            const bool here = local >= 0 && local < kLocalExperts;
            args_.topk_idx[int64_t{row} * kTopK + k] = here ? local : -1;
            if constexpr (kWeighted != 0)
              args_.topk_weights[int64_t{row} * kTopK + k] = here ? entry.weight : 0.0f;
          });
    if (call_.lane >= kBatchTokens || (tokens >> call_.lane & 1u) == 0) return;
    const int row = first.row + __popc(tokens & lanes_below());
    if (row >= args_.capacity) return;
    args_.row_source_rank[row] = first.source;
    args_.row_source_token[row] = first.token + call_.lane;
    if constexpr (kNewRouting != 0) args_.source_token[row] = first.token + call_.lane;
  }

  // All lanes of some warps, before anything is in their rings: the rows between the experts, each
  // by one lane, so that all warps have as many. They get zeros, or only what describes them, if
  // the call does not ask for zeros. `zeros` is a slot of the warp's ring.
  __device__ void pad(unsigned char* zeros, int warp, int warps) const {
    if constexpr (kExpertMajor == 0) return;
    const int last = cta_.offsets[kLocalExperts + 1] - 1;  // also where it is padding
    if (warp == 0 && call_.lane == 0 && last >= args_.capacity) report_capacity(last);
    for (int i = call_.lane; i < kSlotBytes / 16; i += kWarpLanes)
      reinterpret_cast<uint4*>(zeros)[i] = uint4{0, 0, 0, 0};
    fence_shared_before_bulk();
    __syncwarp();
    for (int e = call_.lane; e < kLocalExperts; e += kWarpLanes) {
      const int64_t end = min(int64_t{cta_.offsets[e + 1]}, args_.capacity);
      const int begin = cta_.offsets[e] + args_.tokens_per_expert[e];
      for (int64_t place = begin + (warp + e) % warps; place < end; place += warps) {
        const ReceivedRow none{-1, -1, 0, -1};
        if (args_.zeroes_padding != 0) store_values(zeros, static_cast<int>(place), none);
        describe(static_cast<int>(place), none);
        if (args_.row_weights != nullptr) args_.row_weights[place] = 0.0f;
      }
    }
    bulk_commit();
    bulk_await_read<0>();
    __syncwarp();
  }

 private:
  __device__ static float weight(const unsigned char* bytes, int k) {
    return reinterpret_cast<const float*>(bytes + kWeightsAt)[k];
  }

  // ---- expert-major -----------------------------------------------------------------------------

  // The row of this rank's results that the token's k-th entry has; -1 if it has none here.
  __device__ int place_of(const unsigned char* bytes, int k, int source) const {
    if (k >= kTopK) return -1;
    const uint32_t word = topk_word(bytes, k);
    const PlaceWord place = PlaceWord::decode(word, kRanks);
    const auto reader = static_cast<uint32_t>(call_.rank_at(source));
    return word != PlaceWord::kNowhere && place.rank == reader ? static_cast<int>(place.row) : -1;
  }

  // Each lane sees to one top-k entry. Of those that name one expert the first makes the copy, with
  // the weights of all.
  __device__ void place_copies(const unsigned char* bytes, const ReceivedRow& row,
                               bool keeps) const {
    const int place = place_of(bytes, call_.lane, row.source);
    if (keeps && args_.rows_of != nullptr && call_.lane < kTopK)
      args_.rows_of[int64_t{row.row} * kTopK + call_.lane] = place < args_.capacity ? place : -1;
    uint32_t same = __match_any_sync(kFullWarp, place);
    if (place < 0 || (same & lanes_below()) != 0) return;
    if (place >= args_.capacity) return report_capacity(place);
    store_copy(bytes, place, row);
    if (args_.row_weights == nullptr) return;
    float sum = 0.0f;
    if constexpr (kWeighted != 0)
      for (; same != 0; same &= same - 1)
        sum = __fadd_rn(sum, weight(bytes, __ffs(static_cast<int>(same)) - 1));
    args_.row_weights[place] = sum;
  }

  // ---- token-major ------------------------------------------------------------------------------

  __device__ void keep_entry(const unsigned char* bytes, const ReceivedRow& row) const {
    if (call_.lane >= kTopK) return;
    const int first = call_.rank_at(row.source) * kLocalExperts;
    const int local = static_cast<int>(topk_word(bytes, call_.lane)) - first;
    const bool here = local >= 0 && local < kLocalExperts;
    const int64_t at = int64_t{row.row} * kTopK + call_.lane;
    args_.topk_idx[at] = here ? local : -1;
    if constexpr (kWeighted != 0) args_.topk_weights[at] = here ? weight(bytes, call_.lane) : 0.0f;
  }

  struct TopKEntry {
    int expert;
    float weight;
  };

  // Of `kWords` words of each token of a batch each lane takes some: what `load(place, word)` gives
  // goes to `store(place, row, word, value)`. Many loads are on their way at once.
  template <int kWords, class Load, class Store>
  __device__ void for_words(const ReceivedRow& first, uint32_t tokens, const Load& load,
                            const Store& store) const {
    constexpr int kEach = (kBatchTokens * kWords + kWarpLanes - 1) / kWarpLanes, kAtOnce = 16;
    for (int done = 0; done < kEach; done += kAtOnce) {
      decltype(load(0, 0)) values[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce && i < kEach; ++i) {
        const int at = (done + i) * kWarpLanes + call_.lane, place = at / kWords;
        if (place < kBatchTokens && (tokens >> place & 1u) != 0)
          values[i] = load(place, at % kWords);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce && i < kEach; ++i) {
        const int at = (done + i) * kWarpLanes + call_.lane, place = at / kWords;
        if (place >= kBatchTokens || (tokens >> place & 1u) == 0) continue;
        const int row = first.row + __popc(tokens & ((1u << place) - 1u));
        if (row < args_.capacity) store(place, row, at % kWords, values[i]);
      }
    }
  }

  // ---- either -----------------------------------------------------------------------------------

  // By one lane.
  __device__ void store_copy(const unsigned char* bytes, int place, const ReceivedRow& row) const {
    store_values(bytes, place, row);
    describe(place, row);
  }

  __device__ void store_values(const unsigned char* bytes, int place,
                               const ReceivedRow& row) const {
    if (kInPlace == 0 || place != row.lies)
      bulk_store(args_.out + int64_t{place} * kRowBytes, bytes, kRowBytes);
    uint32_t* scales = args_.out_scales + int64_t{place} * kScaleWords;
    if constexpr (kScaleWords % 4 == 0) {
      if constexpr (kScaleWords > 0) bulk_store(scales, bytes + kScalesAt, kScaleWords * 4);
    } else {
      const auto* from = reinterpret_cast<const uint32_t*>(bytes + kScalesAt);
      for (int i = 0; i < kScaleWords; ++i) scales[i] = from[i];
    }
  }

  __device__ void describe(int place, const ReceivedRow& row) const {
    if (args_.row_source_rank == nullptr) return;
    args_.row_source_rank[place] = row.source;
    args_.row_source_token[place] = row.token;
  }

  __device__ __noinline__ void report_capacity(int row) const {
    call_.report(ReportKind::kCapacity, call_.args.rank, row, static_cast<int32_t>(args_.capacity));
  }

  const HighThroughputDispatchArgs& args_;
  const DispatchShared& cta_;
  const Call& call_;
};

}  // namespace fanfold
