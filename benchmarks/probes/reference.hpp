// Random work for all ranks, and what dispatch and combine must make of it, computed on the CPU in
// the same order and with the same roundings: outputs are compared bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <cuda_fp8.h>

#include "layout.cuh"

namespace fanfold::probe {

inline float from_bf16(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float v;
  std::memcpy(&v, &word, 4);
  return v;
}

// As the GPU converts: every NaN becomes the positive one.
inline uint16_t to_bf16(float v) {
  if (std::isnan(v)) return 0x7FFF;
  uint32_t word;
  std::memcpy(&word, &v, 4);
  return static_cast<uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

inline uint8_t to_e4m3(float v) {
  if (std::isnan(v)) return 0x7F;
  return __nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3);
}

// Expert outputs, a few of them NaN, are a function of their place, so that they need not be copied
// to the host.
__host__ __device__ inline uint16_t expert_output(uint32_t rank, uint32_t index) {
  uint32_t h = index * 2654435761u + rank * 40503u + 12345u;
  h ^= h >> 15;
  h *= 2246822519u;
  h ^= h >> 13;
  if ((h & 0x7FFFF) == 0) return 0xFFFF;  // a NaN whose bits are those of an absent row
  return static_cast<uint16_t>((h & 0x8000) | ((120 + (h >> 16 & 7)) << 7) | (h & 0x7F));
}

template <class G>
struct Workload {
  int tokens[kRanks];
  std::vector<uint16_t> x[kRanks];
  std::vector<int64_t> topk_idx[kRanks];
  std::vector<float> topk_weights[kRanks];

  Workload() = default;

  // A share of the choices is -1; with `duplicates`, experts may repeat within a token.
  Workload(uint32_t seed, const std::vector<int>& token_counts, double none, bool duplicates) {
    std::mt19937 random(seed);
    for (int r = 0; r < kRanks; ++r) {
      tokens[r] = token_counts[r];
      x[r].resize(G::kTokens * G::kHidden);
      for (auto& v : x[r]) {
        const uint32_t h = random();
        v = static_cast<uint16_t>((h & 0x8000) | ((116 + (h >> 16 & 15)) << 7) | (h & 0x7F));
        if (h >> 16 == 0) v = h & 1 ? 0xFFFF : 0x7F80;  // now and then a NaN or an infinity
      }
      route(r, random, none, duplicates);
    }
  }

 private:
  void route(int r, std::mt19937& random, double none, bool duplicates) {
    topk_idx[r].assign(G::kTokens * G::kTopK, -1);
    topk_weights[r].resize(G::kTokens * G::kTopK);
    std::uniform_real_distribution<float> share(0.0f, 1.0f);
    for (auto& w : topk_weights[r]) w = share(random);
    for (int t = 0; t < tokens[r]; ++t) {
      std::vector<bool> used(G::kExperts, false);
      for (int k = 0; k < G::kTopK; ++k) {
        int e;
        do e = static_cast<int>(random() % G::kExperts);
        while (used[e] && !duplicates);
        used[e] = true;
        if (share(random) >= none) topk_idx[r][t * G::kTopK + k] = e;
      }
    }
  }
};

// What a GPU of a mirror takes for the work of four ranks: its own, and thrice the other GPU's,
// with experts renumbered so that those of rank p are this GPU's as seen from source -p.
template <class G>
Workload<G> mirrored(const Workload<G>& work, int gpu) {
  Workload<G> world;
  for (int r = 0; r < kRanks; ++r) {
    const int from = r == 0 ? gpu : 1 - gpu;
    world.tokens[r] = work.tokens[from];
    world.x[r] = work.x[from];
    world.topk_weights[r] = work.topk_weights[from];
    world.topk_idx[r] = work.topk_idx[from];
    for (auto& e : world.topk_idx[r])
      if (e >= 0) e = (e + r * G::kLocalExperts) % G::kExperts;
  }
  return world;
}

struct PackedRow {
  int source, token;
};

// Quantised rows of all ranks and the packed place of every choice.
template <class G>
struct Packing {
  std::vector<uint8_t> quantised[kRanks];  // [tokens][hidden]
  std::vector<float> scales[kRanks];       // [tokens][blocks]
  std::vector<PackedRow> rows[G::kExperts];
  std::vector<int> slots[kRanks];  // of every choice, -1 if none

  explicit Packing(const Workload<G>& work) {
    for (int r = 0; r < kRanks; ++r) quantise(work, r);
    pack(work);
  }

 private:
  void quantise(const Workload<G>& work, int r) {
    quantised[r].resize(G::kTokens * G::kHidden);
    scales[r].resize(G::kTokens * G::kBlocks);
    for (int b = 0; b < work.tokens[r] * G::kBlocks; ++b) {
      const uint16_t* in = work.x[r].data() + b * 128;
      float largest = 1e-4f;
      for (int i = 0; i < 128; ++i) largest = std::fmax(largest, std::fabs(from_bf16(in[i])));
      const float inverse = 448.0f / largest;
      for (int i = 0; i < 128; ++i) quantised[r][b * 128 + i] = to_e4m3(from_bf16(in[i]) * inverse);
      scales[r][b] = largest / 448.0f;
    }
  }

  void pack(const Workload<G>& work) {
    for (int r = 0; r < kRanks; ++r) {
      slots[r].assign(G::kTokens * G::kTopK, -1);
      for (int c = 0; c < work.tokens[r] * G::kTopK; ++c) {
        const int64_t e = work.topk_idx[r][c];
        if (e < 0) continue;
        slots[r][c] = static_cast<int>(e % G::kLocalExperts * G::kSlots + rows[e].size());
        rows[e].push_back({r, c / G::kTopK});
      }
    }
  }
};

// What one GPU must end up with.
template <class G>
struct Expected {
  Packing<G> packing;
  int rank;                        // the GPU's, in the world of `packing`
  std::vector<uint16_t> combined;  // [tokens][hidden]
};

// The weighted sum of one token's expert outputs at each rank, rounded, then the sum of ranks.
// `place_of(rank, choice)` gives the GPU and the packed slot of a choice.
template <class G, class PlaceOf>
std::vector<uint16_t> combine_of(const Workload<G>& work, int gpu, const PlaceOf& place_of) {
  std::vector<uint16_t> out(G::kTokens * G::kHidden);
  std::vector<float> part(G::kHidden), total(G::kHidden);
  for (int t = 0; t < work.tokens[gpu]; ++t) {
    std::fill(total.begin(), total.end(), 0.0f);
    for (int rank = 0; rank < kRanks; ++rank) {
      std::fill(part.begin(), part.end(), 0.0f);
      bool any = false;
      for (int c = t * G::kTopK; c < (t + 1) * G::kTopK; ++c) {
        const int64_t e = work.topk_idx[gpu][c];
        if (e < 0 || e / G::kLocalExperts != rank) continue;
        any = true;
        const auto [owner, slot] = place_of(rank, c);
        for (int h = 0; h < G::kHidden; ++h)
          part[h] += work.topk_weights[gpu][c] *
                     from_bf16(expert_output(owner, uint32_t(slot) * G::kHidden + h));
      }
      for (int h = 0; h < G::kHidden && any; ++h) total[h] += from_bf16(to_bf16(part[h]));
    }
    for (int h = 0; h < G::kHidden; ++h) out[t * G::kHidden + h] = to_bf16(total[h]);
  }
  return out;
}

template <class G>
std::vector<Expected<G>> expect(const Workload<G>& work, int gpus) {
  std::vector<Expected<G>> all;
  for (int g = 0; g < gpus; ++g) {
    if (gpus == kRanks)
      all.push_back({Packing<G>(work), g, {}});
    else
      all.push_back({Packing<G>(mirrored(work, g)), 0, {}});
  }
  for (int g = 0; g < gpus; ++g) {
    const Route route = Route::of(g, gpus);
    all[g].combined = combine_of(work, g, [&](int expert_rank, int choice) {
      // In a mirror, a GPU's tokens name experts of its own world: rank 0 is itself.
      const int owner = route.gpu_of[expert_rank];
      return std::pair(owner, all[owner].packing.slots[route.source_at[expert_rank]][choice]);
    });
  }
  return all;
}

}  // namespace fanfold::probe
