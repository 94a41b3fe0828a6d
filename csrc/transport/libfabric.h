// The transport over libfabric: EFA, InfiniBand and RoCE, Slingshot, sockets, and shared memory.
//
// It uses remote writes with immediate data between reliable unconnected endpoints (FI_EP_RDM), and
// relies neither on the order of writes nor on a completion to mean that a write has landed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "transport/libfabric_networks.h"
#include "transport/transport.h"

namespace fanfold::transport {

struct LibfabricOptions {
  libfabric::Request request = {};  // which provider and NICs
  int32_t endpoints_per_nic = 1;    // rails = endpoints_per_nic * NICs
  // What a transport says that is not asked for a GPU's memory.
  std::string why_no_gpu_memory = "it was not asked for";
};

// Opens the endpoints. All ranks of a job must pass the same options. Throws Unavailable, saying
// what to install or to change, if libfabric or a network is missing or fails to open; BadArgument
// for options outside of their bounds. NICs that fail to open for a GPU's memory are opened
// without, and `why_no_gpu_memory` says why.
//
// At most `kMostRegions` ranges can be registered. If the provider gives each NIC or endpoint a key
// of its own (EFA, verbs, Slingshot), a transport serves two of them.
std::unique_ptr<Transport> open_libfabric(const LibfabricOptions& options);
// The same over a given library, which must outlive the transport.
std::unique_ptr<Transport> open_libfabric(const libfabric::Library& library,
                                          const LibfabricOptions& options);

inline constexpr int32_t kMostRegions = 16;
inline constexpr int32_t kMostRails = 32;

}  // namespace fanfold::transport
