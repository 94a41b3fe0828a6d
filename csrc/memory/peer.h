// Another rank as this rank writes to it: rows, then signals. No other code stores to a peer.
//
//   const Peer& to = memory.peer(2);
//   std::memcpy(to.place(offset), row, bytes);
//   to.put(offset, bytes);                    // has the peer receive the row
//   to.signal(arrival, Signal{epoch, 1});     // after everything that was put before
//
// On one host `place` is the peer's own memory, so `put` has nothing left to do. Between hosts
// `place` is a copy of this rank's, and a Link carries what was put and the signals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/atomics.h"
#include "base/wait.h"
#include "layout/control.h"
#include "layout/signal.h"

namespace fanfold {

// Carries writes to one peer on another host. Offsets are those of the peer's part.
class Link {
 public:
  virtual ~Link() = default;

  // Has the peer receive `bytes` bytes at `offset`, as they stand at `place(offset)` now or until
  // the next signal. Both are multiples of kRowAlignment.
  virtual void put(int64_t offset, int64_t bytes) = 0;
  // Stores `word` at `offset` after everything that was put and stored before, and wakes the peer.
  virtual void store(int64_t offset, uint64_t word) = 0;
  // Returns once nothing that was put is read any more, so that its places may be overwritten.
  virtual void fence() = 0;
};

class Peer {
 public:
  Peer() = default;
  // `memory` is where this rank writes what the peer shall have; `bell` is null where `link` is
  // given.
  Peer(std::byte* memory, Doorbell* bell, Link* link) : memory_(memory), bell_(bell), link_(link) {}

  // Where to write what the peer shall have at `offset`, before `put`.
  std::byte* place(int64_t offset) const { return memory_ + offset; }
  void put(int64_t offset, int64_t bytes) const {
    if (link_ != nullptr && bytes > 0) link_->put(offset, align_up(bytes, kRowAlignment));
  }
  void put(int64_t offset, const void* data, int64_t bytes) const {
    if (bytes == 0) return;  // `data` may be null
    std::memcpy(place(offset), data, static_cast<size_t>(bytes));
    put(offset, bytes);
  }

  // Stores `signal` at `offset`, after all earlier writes of this rank, and wakes the peer.
  void signal(int64_t offset, Signal signal) const {
    signal_quietly(offset, signal);
    wake();
  }
  // Does not wake a peer on this host; for a signal that no peer awaits yet.
  void signal_quietly(int64_t offset, Signal signal) const {
    if (link_ != nullptr) return link_->store(offset, signal.encode());
    store_release_system(reinterpret_cast<uint64_t*>(place(offset)), signal.encode());
  }
  // Must precede new writes to places that were put in a call which no peer has acknowledged.
  void fence() const {
    if (link_ != nullptr) link_->fence();
  }
  void wake() const {
    if (bell_ != nullptr) ring(*bell_);
  }

  // Whether what was put has to be carried.
  bool carried() const { return link_ != nullptr; }

 private:
  std::byte* memory_ = nullptr;
  Doorbell* bell_ = nullptr;
  Link* link_ = nullptr;
};

// Puts rows of growing offsets together, so that they travel as few messages. It also puts what
// lies between rows that are near each other, which costs less than a message: only this rank may
// write there, and the peer reads none of it.
class RowRun {
 public:
  explicit RowRun(const Peer& to) : to_(&to) {}

  void put(int64_t offset, int64_t bytes) {
    if (!to_->carried()) return;
    if (offset < end_ || offset - end_ > kMostBetween) finish();
    if (begin_ == end_) begin_ = offset;
    end_ = offset + bytes;
    if (end_ - begin_ >= kMostBytes) finish();
  }
  // Call it before the signal that reports the rows.
  void finish() {
    if (end_ > begin_) to_->put(begin_, end_ - begin_);
    begin_ = end_ = 0;
  }

 private:
  // About what a network carries in the time that a message costs.
  static constexpr int64_t kMostBetween = 4096;
  // The first rows travel while the next ones are made.
  static constexpr int64_t kMostBytes = int64_t{64} << 10;

  const Peer* to_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

}  // namespace fanfold
