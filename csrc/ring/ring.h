// A ring of commands from many producers to one consumer.
//
// Producers and the consumer may be threads of one process, processes that map the same memory, or
// GPU threads (protocol/ring.cuh). A Ring gives access to the memory; a Producer pushes; the one
// Consumer pops.
//
//     Ring ring = Ring::create(1024);
//     Producer producer(ring);                      // any number of threads may use it
//     const uint64_t ticket = producer.push(make_command(fields), timeout);
//     ...
//     Consumer consumer(ring);                      // one thread
//     Command command;
//     while (consumer.pop(command)) execute(command);
//     consumer.publish();                           // now consumed() > ticket
//
// A producer that ends between taking a ticket and storing the command stops the consumer for ever.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "layout/ring.h"
#include "memory/region.h"

namespace fanfold {

class Ring {
 public:
  // A ring in memory of its own, which other processes may map (`region()`). `slots` is a power of
  // two from 2 to 2^30; `first` is the first ticket. Throws BadArgument.
  static Ring create(int64_t slots, uint64_t first = 0);
  // Makes a ring in `bytes` of memory that the caller keeps mapped. The memory is aligned to 128
  // bytes and has RingLayout{slots}.bytes(). Nobody uses it yet.
  static Ring create_in(std::byte* memory, int64_t bytes, int64_t slots, uint64_t first = 0);
  // The ring that somebody has created in this memory. Throws BadArgument if there is none.
  static Ring attach(std::byte* memory, int64_t bytes);

  int64_t slots() const { return static_cast<int64_t>(view_.slots); }
  // For producers and consumers of any kind, GPU threads included.
  const RingView& view() const { return view_; }
  // The memory that `create` has made; empty for other rings.
  const Region& region() const { return region_; }

 private:
  Ring(const RingView& view, Region region);

  RingView view_;
  Region region_;
};

// Pushes commands. Any number of threads may use one Producer, and a ring may have any number of
// them. The ring's memory outlives it.
class Producer {
 public:
  explicit Producer(const Ring& ring) : ring_(ring.view()) {}

  // Pushes the command and returns its ticket. Returns nothing if the ring is full, or if other
  // producers were faster several times in a row. What this thread has written before is visible to
  // a consumer that pops the command.
  std::optional<uint64_t> try_push(const Command& command);

  // Pushes the command and returns its ticket. Waits at most for `timeout` while the ring is full,
  // then throws RingFull; the ring is then as if this push had not been tried.
  uint64_t push(const Command& command, std::chrono::nanoseconds timeout);

  // The consumer has finished all commands with tickets before this count.
  uint64_t consumed() const;

 private:
  RingView ring_;
};

// Pops commands in the order of their tickets. A ring has one Consumer, and one thread uses it.
class Consumer {
 public:
  // Continues at the published count.
  explicit Consumer(const Ring& ring);

  // Sets `command` to the next one and returns true; returns false if none has been pushed. The
  // command's slot stays occupied until a count beyond its ticket is published.
  bool pop(Command& command);
  // Whether there is a command to pop.
  bool has_command() const;

  // The ticket of the next command to pop.
  uint64_t popped() const { return popped_; }
  uint64_t published() const { return published_; }

  // Tells producers that all commands with tickets before `count` are done, and frees their slots.
  // Throws BadArgument unless the count lies from `published()` to `popped()`.
  void publish(uint64_t count);
  void publish() { publish(popped_); }

  // Tickets that producers on GPUs have abandoned after their timeout. If there are any, the
  // consumer will never pop the commands behind them.
  uint64_t abandoned() const;

  // Tells producers that nothing will come from a peer any more; below RingLosses::kMostPeers. What
  // this thread has written before is visible to them then.
  void tell_lost(int32_t peer);
  // Whether producers have asked if a peer still runs since this was called before; below
  // RingQuestions' number of peers.
  bool take_question(int32_t peer);

 private:
  RingView ring_;
  uint64_t popped_;
  uint64_t published_;
};

}  // namespace fanfold
