// What a kernel knows of NCCL's GIN, by which it puts into the memory of ranks on other hosts.
//
// All ranks have one window, in which an offset means the same on each. It begins with what a rank
// receives, laid out by the mode; then come words on their way and the areas from which it sends.
//
// GIN has no order but that of a signal behind what was put before. So a word that says what has
// arrived is no put to its place: it goes into a queue at its reader, with a signal that counts
// the words there, and a thread of the reader that waits stores it to its place.
#pragma once

#include "layout/protocol.h"

namespace fanfold {

// A word in a queue.
struct alignas(16) GinWord {
  uint64_t word;
  uint64_t place;  // of the word, an offset in 40 bits; above, 24 bits of its number in the queue

  static constexpr int kPlaceBits = 40;
  // No place: the word is the number of a fence.
  static constexpr uint64_t kFence = (uint64_t{1} << kPlaceBits) - 1;

  FANFOLD_HD static constexpr uint64_t tagged(uint64_t place, uint64_t number) {
    return place | number << kPlaceBits;
  }
  FANFOLD_HD constexpr bool has(uint64_t number) const {
    return place >> kPlaceBits == (number & 0xffffffu);
  }
  FANFOLD_HD constexpr uint64_t target() const { return place & kFence; }
};

// What goes to one rank on another host and comes from it.
struct GinPeer {
  uint64_t is_posting;  // 1: a thread posts for it
  uint64_t posted;      // puts
  uint64_t words;       // of those, words
  uint64_t is_taking;   // 1: a thread brings its words to their places
  uint64_t taken;       // words of its queue that are there
  uint64_t fences;      // number of the last fence that has come: see gin/between_calls.cuh
};

// Puts to one rank that are not done. Those of NCCL's proxy and of NICs take more at once; where
// they are full NCCL's code waits for ever.
inline constexpr int kMostGinPuts = 16;

// In the memory of a rank's GPU.
struct GinHosts {
  const void* communicator;  // ncclDevComm, in memory of the GPU
  void* window;              // ncclWindow_t
  unsigned char* memory;     // of this rank, the window's offset 0
  int64_t received;          // offset of the queues of words from each rank
  int64_t sent;              // and of the same words as they go to each rank
  int32_t slots;             // of a queue, a power of two
  int32_t rank;
  // What goes to the place p at a rank lies at words[rank] + p, rows at rows[rank] + p.
  int64_t words[kMostRanks];
  int64_t rows[kMostRanks];
  GinPeer peers[kMostRanks];

  FANFOLD_HD int64_t slot(int64_t queues, int queue, uint64_t number) const {
    const auto at = static_cast<int64_t>(number & static_cast<uint64_t>(slots - 1));
    return queues + (int64_t{queue} * slots + at) * int64_t{sizeof(GinWord)};
  }
};

struct RemoteHosts;

// Of both kernels of gin/.
struct GinBetweenCallsArgs {
  const RemoteHosts* hosts;
  const uint64_t* numbers;  // of each rank's last fence
  int64_t timeout_ns;
  int32_t* late;  // a rank that was not in time
};

}  // namespace fanfold
