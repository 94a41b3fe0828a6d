// What a proxy thread has done so far, for a peer or for itself.
#pragma once

#include <array>
#include <cstdint>

#include "base/atomics.h"

namespace fanfold::proxy {

struct Stats {
  uint64_t commands = 0;  // taken from the ring
  // Nanoseconds that all of them lay there at most, as far as steps tell them apart: since the ring
  // was last empty.
  uint64_t ring_ns = 0;
  uint64_t coalesced = 0;  // of them, writes that were appended to the command before
  uint64_t messages = 0;   // data and signals sent
  uint64_t bytes = 0;      // sent
  uint64_t parts = 0;      // sent
  // Nanoseconds of all messages together, as far as steps tell them apart: from a command's taking
  // until the transport has the message, and from then until the transport has completed it.
  uint64_t queue_ns = 0;
  uint64_t transit_ns = 0;
  uint64_t retries = 0;     // times that the transport had no room
  uint64_t stalls = 0;      // times that a channel began to wait for credit
  uint64_t arrivals = 0;    // data and signals received, duplicates included
  uint64_t duplicates = 0;  // of them, those that had arrived before
  uint64_t reordered = 0;   // of them, those that arrived before an earlier one
  uint64_t parts_received = 0;
  uint64_t acks_sent = 0;
  uint64_t acks_received = 0;  // stale ones included
  uint64_t fences = 0;         // completed
  uint64_t barriers = 0;       // completed
  uint64_t sleeps = 0;         // times that the thread slept with nothing to wait for
  uint64_t naps = 0;           // times that it slept while it waited for something
  uint64_t dropped = 0;        // commands for peers that were given up

  Stats& operator+=(const Stats& other);
};

struct StatsField {
  const char* name;
  uint64_t Stats::* field;
  bool of_peer;  // counted for each peer, otherwise for the thread
};

// Every field.
inline constexpr std::array kStatsFields = {
    StatsField{"commands", &Stats::commands, false},
    StatsField{"ring_ns", &Stats::ring_ns, false},
    StatsField{"coalesced", &Stats::coalesced, true},
    StatsField{"messages", &Stats::messages, true},
    StatsField{"bytes", &Stats::bytes, true},
    StatsField{"parts", &Stats::parts, true},
    StatsField{"queue_ns", &Stats::queue_ns, true},
    StatsField{"transit_ns", &Stats::transit_ns, true},
    StatsField{"retries", &Stats::retries, true},
    StatsField{"stalls", &Stats::stalls, true},
    StatsField{"arrivals", &Stats::arrivals, true},
    StatsField{"duplicates", &Stats::duplicates, true},
    StatsField{"reordered", &Stats::reordered, true},
    StatsField{"parts_received", &Stats::parts_received, true},
    StatsField{"acks_sent", &Stats::acks_sent, true},
    StatsField{"acks_received", &Stats::acks_received, true},
    StatsField{"fences", &Stats::fences, false},
    StatsField{"barriers", &Stats::barriers, false},
    StatsField{"sleeps", &Stats::sleeps, false},
    StatsField{"naps", &Stats::naps, false},
    StatsField{"dropped", &Stats::dropped, true},
};
static_assert(sizeof(Stats) == kStatsFields.size() * sizeof(uint64_t));

inline Stats& Stats::operator+=(const Stats& other) {
  for (const StatsField& each : kStatsFields) this->*each.field += other.*each.field;
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
    for (const StatsField& each : kStatsFields) stats.*each.field = get(each.field);
    return stats;
  }

 private:
  Stats stats_;
};

}  // namespace fanfold::proxy
