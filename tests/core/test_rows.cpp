// Copies of rows to results, and the local experts of a token's row.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "check.hpp"
#include "host/routes.h"
#include "host/row_copy.h"
#include "ranks.hpp"

using namespace fanfold;

// Copies for results that fit the caches and for larger ones, at every alignment, write exactly the
// row.
TEST(row_copies_write_the_row_and_no_more) {
  constexpr std::byte kPoison{0xee};
  Random random(3);
  for (const int64_t result_bytes : {int64_t{1}, int64_t{1} << 40}) {
    for (const int64_t bytes : {0, 1, 16, 48, 511, 512, 520, 2048, 5760}) {
      for (const int64_t shift : {0, 2, 16, 24}) {
        const auto size = static_cast<size_t>(bytes);
        std::vector<std::byte> from(size + 64);
        std::generate(from.begin(), from.end(),
                      [&] { return static_cast<std::byte>(random.next()); });
        std::vector<std::byte> to(size + 128, kPoison);
        {
          const RowCopy copy(result_bytes, 1);
          copy(to.data() + shift, from.data() + shift, bytes);
        }
        std::vector<std::byte> expected(to.size(), kPoison);
        std::copy_n(from.begin() + shift, bytes, expected.begin() + shift);
        CHECK(to == expected);
      }
    }
  }
}

TEST(local_topk_names_each_local_expert_once) {
  Random random(5);
  for (int round = 0; round < 2000; ++round) {
    const int32_t first = random.between(0, 9);
    const int32_t locals = random.between(1, 6);
    const int32_t top_k = random.between(1, 12);
    LocalTopK local_topk(first, locals);
    for (int token = 0; token < 3; ++token) {
      std::vector<int16_t> ids(static_cast<size_t>(top_k));
      std::vector<float> weights(ids.size());
      std::vector<int32_t> order;
      std::map<int32_t, float> weight_of;
      for (size_t k = 0; k < ids.size(); ++k) {
        ids[k] = static_cast<int16_t>(random.between(-1, 15));
        weights[k] = random.real(-1.0f, 1.0f);
        const int32_t local = ids[k] - first;
        if (ids[k] < 0 || local < 0 || local >= locals) continue;
        const auto [place, added] = weight_of.emplace(local, weights[k]);
        if (added) {
          order.push_back(local);
        } else {
          place->second += weights[k];
        }
      }
      for (const bool weighted : {true, false}) {
        const auto& found = local_topk.of(ids.data(), weighted ? weights.data() : nullptr, top_k);
        CHECK_EQ(found.size(), order.size());
        for (size_t i = 0; i < order.size(); ++i) {
          CHECK_EQ(found[i].local, order[i]);
          CHECK_EQ(found[i].weight, weighted ? weight_of[order[i]] : 1.0f);
        }
      }
    }
  }
}
