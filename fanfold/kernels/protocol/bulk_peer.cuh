// Rows from shared memory to a peer, and back, by bulk copies. Compute capability 9.0 and later.
#pragma once

#include "device/bulk.cuh"
#include "protocol/peer.cuh"

namespace fanfold {

class BulkPeer : public Peer {
 public:
  using Peer::Peer;

  // Enqueues a copy, by one thread, which commits it and waits for it as for others of its own.
  // Bytes and offset are multiples of 16.
  __device__ __forceinline__ void put_row(int64_t offset, const void* shared,
                                          uint32_t bytes) const {
    bulk_store(at<unsigned char>(offset), shared, bytes);
  }
  // Enqueues a copy of what the peer has published, by one thread; its bytes count for the barrier.
  __device__ __forceinline__ void read_row(void* shared, int64_t offset, uint32_t bytes,
                                           ArrivalBarrier* barrier) const {
    bulk_load(shared, at<const unsigned char>(offset), bytes, barrier);
  }
};

}  // namespace fanfold
