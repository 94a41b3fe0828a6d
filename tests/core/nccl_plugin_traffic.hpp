// Random traffic through the NCCL plugin, with everything checked that it promises.
//
// In each round each rank sends one message to each rank (itself, too) in each context: puts to
// random parts of the target's slot, then a put with a signal. The target waits for the signal,
// compares the slot, and gives the slot back by a signal without bytes. A message's signal adds a
// number to the word of its slot and, in a second operation, to a word that all senders share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "nccl_plugin_world.hpp"
#include "transport/loopback_plan.h"

namespace fanfold::nccl_plugin {

struct Traffic {
  uint64_t seed = 1;
  int rounds = 4;
  size_t most_bytes = 4096;
  int most_pieces = 5;
};

class TrafficRank {
 public:
  TrafficRank(Rank& rank, const Traffic& traffic)
      : rank_(rank), traffic_(traffic), slots_(static_cast<size_t>(rank.ranks) * at(rank.contexts)),
        source_(slots_ * traffic.most_bytes), target_(slots_ * traffic.most_bytes),
        words_(2 * slots_ + at(rank.contexts)) {
    source_memory_ = rank.add_memory(source_.data(), source_.size());
    target_memory_ = rank.add_memory(target_.data(), target_.size());
    word_memory_ = rank.add_memory(words_.data(), words_.size() * sizeof(uint64_t));
  }

  void run() {
    for (int round = 0; round < traffic_.rounds; ++round) {
      std::vector<Pending> pending;
      for (int peer = 0; peer < rank_.ranks; ++peer) {
        for (int context = 0; context < rank_.contexts; ++context) {
          send(peer, context, round, pending);
        }
      }
      std::vector<bool> received(slots_);
      await("all messages of a round", [&] { return take_all(round, received, pending); });
      await("the slots and completions of a round", [&] {
        std::erase_if(pending,
                      [&](const Pending& one) { return rank_.test(one.request, one.context); });
        return pending.empty() && all_free(round);
      });
    }
    check_totals();
    for (const auto* memory : {&source_memory_, &target_memory_, &word_memory_}) {
      require(!memory->empty(), "memory is registered");
    }
  }

 private:
  struct Pending {
    void* request;
    int context;
  };

  static size_t at(int index) { return static_cast<size_t>(index); }
  // Of what `peer` sends to this rank, or of what this rank sends to `peer`.
  size_t slot(int peer, int context) const { return at(peer) * at(rank_.contexts) + at(context); }

  struct Plan {
    size_t bytes;
    std::vector<size_t> cuts;  // ends of the pieces
    uint64_t value;
    uint64_t fill;
  };
  // Both sides make the same plan.
  Plan plan(int from, int to, int context, int round) const {
    uint64_t key = traffic_.seed;
    for (const int part : {from, to, context, round}) {
      key = transport::loopback::Draw::mix(key * 31 + static_cast<uint64_t>(part) + 1);
    }
    transport::loopback::Draw draw(key);
    Plan plan{.bytes = 0, .cuts = {}, .value = 0, .fill = key};
    // Often nothing, often all, else anything.
    const auto most = static_cast<int64_t>(traffic_.most_bytes);
    plan.bytes = draw.one_in(5)   ? 0
                 : draw.one_in(5) ? traffic_.most_bytes
                                  : static_cast<size_t>(draw.between(1, most));
    const int64_t pieces = draw.between(1, traffic_.most_pieces);
    for (int64_t piece = 1; piece < pieces; ++piece) {
      plan.cuts.push_back(static_cast<size_t>(draw.between(0, static_cast<int64_t>(plan.bytes))));
    }
    std::ranges::sort(plan.cuts);
    plan.cuts.push_back(plan.bytes);
    plan.value = draw.one_in(3) ? 1 : 2 + (draw.next() >> 20);
    return plan;
  }
  static std::byte byte_at(uint64_t fill, size_t offset) {
    return static_cast<std::byte>(fill >> (offset % 7 * 8) ^ offset * 131);
  }

  void send(int peer, int context, int round, std::vector<Pending>& pending) {
    const Plan message = plan(rank_.rank, peer, context, round);
    const size_t base = slot(peer, context) * traffic_.most_bytes;
    const size_t far = slot(rank_.rank, context) * traffic_.most_bytes;
    for (size_t i = 0; i < message.bytes; ++i) source_[base + i] = byte_at(message.fill, i);
    const Target to{.rank = static_cast<uint32_t>(peer), .context = context};
    size_t begin = 0;
    for (const size_t& end : message.cuts) {
      const Range from{.memory = source_memory_[at(context)], .offset = base + begin};
      const Range into{.memory = target_memory_[at(context)], .offset = far + begin};
      void* request = nullptr;
      if (&end != &message.cuts.back()) {
        require_ok(rank_.put(to, from, end - begin, into, &request), "iput");
      } else {
        const Rank::Signal signal{
            .at = word(slot(rank_.rank, context), context),
            .value = message.value,
            .operation = message.value == 1 ? abi::kSignalIncrement : abi::kSignalAdd};
        require_ok(rank_.put_signal(to, from, end - begin, into, signal, &request), "iputSignal");
      }
      pending.push_back({.request = request, .context = context});
      begin = end;
    }
    add(peer, context, 2 * slots_ + at(context), message.value, pending);
  }

  Range word(size_t index, int context) const {
    return {.memory = word_memory_[at(context)], .offset = index * sizeof(uint64_t)};
  }
  // A signal without bytes and without memory, as NCCL sends it.
  void add(int peer, int context, size_t index, uint64_t value, std::vector<Pending>& pending) {
    const Target to{.rank = static_cast<uint32_t>(peer), .context = context};
    void* request = nullptr;
    require_ok(
        rank_.put_signal(to, {}, 0, {}, {.at = word(index, context), .value = value}, &request),
        "iputSignal");
    pending.push_back({.request = request, .context = context});
  }

  uint64_t load(size_t index) {
    return std::atomic_ref(words_[index]).load(std::memory_order_acquire);
  }

  bool take_all(int round, std::vector<bool>& received, std::vector<Pending>& pending) {
    bool all = true;
    for (int peer = 0; peer < rank_.ranks; ++peer) {
      for (int context = 0; context < rank_.contexts; ++context) {
        const size_t from = slot(peer, context);
        if (!received[from]) received[from] = take(peer, context, round, pending);
        all = all && received[from];
      }
    }
    return all;
  }

  bool take(int peer, int context, int round, std::vector<Pending>& pending) {
    const size_t from = slot(peer, context);
    uint64_t before = 0;
    for (int earlier = 0; earlier < round; ++earlier) {
      before += plan(peer, rank_.rank, context, earlier).value;
    }
    const Plan message = plan(peer, rank_.rank, context, round);
    const uint64_t value = load(from);
    // The sender has one message in a slot: any other value is a lost, doubled or early signal.
    require(value == before || value == before + message.value,
            "a signal has the value " + std::to_string(value));
    if (value == before) return false;
    for (size_t i = 0; i < message.bytes; ++i) {
      if (target_[from * traffic_.most_bytes + i] == byte_at(message.fill, i)) continue;
      throw std::runtime_error("a signal came before its payload, at byte " + std::to_string(i) +
                               " of " + std::to_string(message.bytes));
    }
    add(peer, context, slots_ + slot(rank_.rank, context), 1, pending);
    return true;
  }

  bool all_free(int round) {
    for (size_t from = 0; from < slots_; ++from) {
      const uint64_t free = load(slots_ + from);
      require(free <= static_cast<uint64_t>(round) + 1, "a slot was given back twice");
      if (free != static_cast<uint64_t>(round) + 1) return false;
    }
    return true;
  }

  void check_totals() {
    for (int context = 0; context < rank_.contexts; ++context) {
      uint64_t sum = 0;
      for (int peer = 0; peer < rank_.ranks; ++peer) {
        for (int round = 0; round < traffic_.rounds; ++round) {
          sum += plan(peer, rank_.rank, context, round).value;
        }
      }
      const size_t total = 2 * slots_ + at(context);
      await("the sum of all senders", [&] { return load(total) == sum; });
    }
  }

  Rank& rank_;
  const Traffic traffic_;
  const size_t slots_;
  std::vector<std::byte> source_;
  std::vector<std::byte> target_;
  std::vector<uint64_t> words_;  // of slots, of given-back slots, shared
  std::vector<void*> source_memory_;
  std::vector<void*> target_memory_;
  std::vector<void*> word_memory_;
};

}  // namespace fanfold::nccl_plugin
