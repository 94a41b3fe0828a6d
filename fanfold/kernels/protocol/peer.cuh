// The ranks' symmetric memory as kernels reach it. Only `Peer` knows the address of another rank's
// memory. A place is named by its offset from the start of the memory, which is the same on every
// rank; modes find offsets with the structs of layout/.
#pragma once

#include "constants.h"
#include "device/memory.cuh"
#include "layout/protocol.h"

namespace fanfold {

// Every access goes through here. A kernel for few ranks has their addresses in its arguments.
template <class Args>
__device__ __forceinline__ unsigned char* memory_of(const Args& args, int rank) {
  if constexpr (kRanks <= kFewRanks) {
    return args.peers.few[rank];
  } else {
    return args.peers.all[rank];
  }
}

// The memory of one rank, for writing: of a peer, or of this rank, which then is its own peer.
//
//   put      words whose order does not matter: each one says by itself that it has arrived
//   put_unit, put_word
//            16 or 4 bytes of a row that a signal publishes later
//   signal   a word that publishes all that this thread has done before
//   count    one more in a counter of 32 bits, likewise
//
// And for reading, what the peer has published:
//
//   counted  what stands in a counter, with all that those who counted have done before
//   read_unit
//            16 bytes
//
// A word of 32 bits is never torn. Nothing else is assumed of one put, or of several.
class Peer {
 public:
  template <class Args>
  __device__ __forceinline__ Peer(const Args& args, int rank) : base_(memory_of(args, rank)) {}
  // Of a rank on another host: the memory from which the network sends to it.
  __device__ __forceinline__ explicit Peer(unsigned char* area) : base_(area) {}

  // The memory from `offset` on, for several puts beside each other.
  __device__ __forceinline__ Peer from(int64_t offset) const { return Peer(base_ + offset); }

  template <class Word>
  __device__ __forceinline__ void put(int64_t offset, Word word) const {
    store_relaxed_system(at<Word>(offset), word);
  }
  __device__ __forceinline__ void put_unit(int64_t offset, uint4 unit) const {
    store_weak(at<uint4>(offset), unit);
  }
  __device__ __forceinline__ void put_word(int64_t offset, uint32_t word) const {
    *at<uint32_t>(offset) = word;
  }
  __device__ __forceinline__ void signal(int64_t offset, uint64_t word) const {
    store_release_system(at<uint64_t>(offset), word);
  }
  __device__ __forceinline__ void count(int64_t offset) const {
    add_release_system(at<uint32_t>(offset), 1);
  }
  __device__ __forceinline__ uint32_t counted(int64_t offset) const {
    return load_acquire_system(at<const uint32_t>(offset));
  }
  __device__ __forceinline__ uint4 read_unit(int64_t offset) const {
    return load_published(at<const uint4>(offset));
  }
  // What stands there now. A round trip: for a rank that has waited long, to find out why.
  __device__ __forceinline__ uint64_t look_up(int64_t offset) const {
    return load_relaxed_system(at<const uint64_t>(offset));
  }

 protected:
  template <class T>
  __device__ __forceinline__ T* at(int64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  unsigned char* base_;
};

// This rank's own memory, which peers write, and kernels read by its address: to wait for a peer is
// a loop of such loads that asks a Deadline after each.
template <class T, class Args>
__device__ __forceinline__ T* own_memory(const Args& args, int64_t offset) {
  return reinterpret_cast<T*>(memory_of(args, args.rank) + offset);
}

}  // namespace fanfold
