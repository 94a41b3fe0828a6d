// The objects of libfabric behind one transport: a domain for each NIC, endpoints on it, and the
// registrations of memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/libfabric_library.h"
#include "transport/transport.h"

namespace fanfold::transport::libfabric {

// A NIC that is open. Members are closed in the reverse order.
struct OpenNic {
  OpenNic(const Library& library, const Info& choice);

  bool needs(int mr_mode) const { return (info->domain_attr->mr_mode & mr_mode) != 0; }

  InfoList info;
  Owned<Fabric> fabric;
  Owned<Domain> domain;
  Owned<AddressVector> peers;
};

// One write that has been accepted. libfabric hands the pointer back with the completion.
struct Operation {
  Context2 scratch;  // first, because the pointer to it is the pointer to the operation
  Write write;
};

// One endpoint with its completion queue.
struct Rail {
  Rail(const Library& library, OpenNic& nic, size_t nic_index);
  Rail(const Rail&) = delete;
  Rail& operator=(const Rail&) = delete;

  // The operation of a pointer that a completion carries; null if it is none of this rail's.
  Operation* operation_of(void* context) const;
  // Whether the pointer is that of a receive which waits for immediate data.
  bool is_receive(const void* context) const;
  // Whether a write to `peer` is among `pending`.
  bool has_pending(int32_t peer) const;
  // The endpoint's name, by which peers reach it.
  std::vector<std::byte> name(const Library& library) const;

  size_t nic_index;
  size_t inject_bytes;
  bool posts_receives;            // the provider consumes a receive for each immediate
  std::string why_no_gpu_memory;  // empty unless the endpoint is open for it and yet unfit

  std::unique_ptr<Operation[]> operations;
  std::vector<Operation*> idle;
  size_t operation_count;
  std::vector<Operation*> injected;  // whose completion is not reported yet
  // Accepted, but the provider had no room or is still connecting: at most one for each peer, so
  // that a peer that never answers takes no room from the others.
  std::vector<Operation*> pending;
  std::unique_ptr<Context2[]> receives;
  std::vector<Context2*> idle_receives;  // to be posted
  size_t receive_count = 0;

  // Closed first, because the provider may touch operations until the endpoint is closed.
  Owned<CompletionQueue> queue;
  Owned<Endpoint> endpoint;
};

// A registered range: one registration for each NIC, or for each endpoint if the provider binds
// registrations to endpoints.
struct Region {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  bool of_gpu = false;
  std::vector<Owned<MemoryRegion>> registrations;
};

// What a registered range is for: writes from and to it.
inline constexpr uint64_t kRegionAccess = kWrite | kRemoteWrite | kSend | kRecv;

// The keys of two registrations in the one key of `RemoteMemory`: those of EFA and of verbs have 32
// bits.
inline constexpr size_t kMostKeys = 2;

inline uint64_t packed(const Region& region) {
  return region.registrations[0]->key | region.registrations[1]->key << 32;
}
inline uint64_t key_of(uint64_t packed_keys, size_t unit) {
  return unit == 0 ? packed_keys & 0xffffffff : packed_keys >> 32;
}

// The first of the keys that a transport asks for. They fit into `key_bytes`, and into 32 bits if a
// region has `many`. Drawn, because a port that a transport has left may become another job's: who
// still writes to it as to the one before must not find its keys there.
uint64_t drawn_key(size_t key_bytes, bool many);

struct RegionRequest {
  std::byte* data;
  int64_t bytes;
  uint64_t key;  // the first of as many as there are endpoints, for providers that take the
                 // caller's keys
  const GpuMemory* gpu = nullptr;  // whose the range is; null: the CPU's
};

// Registers a range with every NIC or endpoint. Sets `error` and returns a region without
// registrations if that fails.
Region register_region(const Library& library, std::vector<std::unique_ptr<OpenNic>>& nics,
                       std::vector<std::unique_ptr<Rail>>& rails, const RegionRequest& request,
                       std::string& error);

}  // namespace fanfold::transport::libfabric
