// What a proxy thread has done so far.
#pragma once

#include <array>
#include <cstdint>

#include "base/atomics.h"

namespace fanfold::proxy {

struct Stats {
  uint64_t commands = 0;    // taken from the ring
  uint64_t coalesced = 0;   // of them, writes that were appended to the command before
  uint64_t messages = 0;    // data and signals sent
  uint64_t bytes = 0;       // sent
  uint64_t parts = 0;       // sent
  uint64_t retries = 0;     // times that the transport had no room
  uint64_t stalls = 0;      // times that a channel began to wait for credit
  uint64_t arrivals = 0;    // data and signals received, duplicates included
  uint64_t duplicates = 0;  // of them, those that had arrived before
  uint64_t acks_sent = 0;
  uint64_t acks_received = 0;  // stale ones included
  uint64_t fences = 0;         // completed
  uint64_t barriers = 0;       // completed
  uint64_t sleeps = 0;         // times that the idle thread slept
  uint64_t dropped = 0;        // commands for peers that were given up

  Stats& operator+=(const Stats& other);
};

// Every field.
inline constexpr std::array kStatsFields = {
    &Stats::commands,   &Stats::coalesced, &Stats::messages,      &Stats::bytes,
    &Stats::parts,      &Stats::retries,   &Stats::stalls,        &Stats::arrivals,
    &Stats::duplicates, &Stats::acks_sent, &Stats::acks_received, &Stats::fences,
    &Stats::barriers,   &Stats::sleeps,    &Stats::dropped};
static_assert(sizeof(Stats) == kStatsFields.size() * sizeof(uint64_t));

inline Stats& Stats::operator+=(const Stats& other) {
  for (uint64_t Stats::* const field : kStatsFields) this->*field += other.*field;
  return *this;
}

// Any thread may read while the one owner counts.
class Counted {
 public:
  void add(uint64_t Stats::* field, uint64_t amount = 1) {
    uint64_t& word = stats_.*field;
    store_relaxed_system(&word, load_relaxed_system(&word) + amount);
  }
  uint64_t get(uint64_t Stats::* field) const { return load_relaxed_system(&(stats_.*field)); }

  Stats snapshot() const {
    Stats stats;
    for (uint64_t Stats::* const field : kStatsFields) stats.*field = get(field);
    return stats;
  }

 private:
  Stats stats_;
};

}  // namespace fanfold::proxy
