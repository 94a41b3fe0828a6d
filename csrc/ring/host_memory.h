// The accesses of protocol/ring.h by a thread of a CPU.
#pragma once

#include "base/atomics.h"

namespace fanfold {

struct HostMemory {
  uint64_t load_relaxed_system(const uint64_t* word) const {
    return fanfold::load_relaxed_system(word);
  }
  uint64_t load_acquire_system(const uint64_t* word) const {
    return fanfold::load_acquire_system(word);
  }
  void store_release_system(uint64_t* word, uint64_t value) const {
    fanfold::store_release_system(word, value);
  }
  void store_pair_release_system(uint64_t* words, uint64_t first, uint64_t second) const {
    fanfold::store_pair_release_system(words, first, second);
  }
  bool compare_exchange_relaxed_system(uint64_t* word, uint64_t& expected, uint64_t desired) const {
    return fanfold::compare_exchange_relaxed_system(word, expected, desired);
  }
  uint64_t fetch_add_relaxed_system(uint64_t* word, uint64_t value) const {
    return fanfold::fetch_add_relaxed_system(word, value);
  }
};

}  // namespace fanfold
