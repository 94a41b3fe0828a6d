// Whether a NIC writes and reads a GPU's memory, and how its endpoints are opened for that.
//
// A proxy's thread must never call CUDA: the call may wait for a running kernel, which itself waits
// for the proxy. Providers that move bytes by the CPU copy a GPU's memory with CUDA, so they are
// refused even if they offer FI_HMEM.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/libfabric_library.h"
#include "transport/libfabric_rail.h"
#include "transport/transport.h"

namespace fanfold::transport::libfabric {

// What a provider offers on one NIC for a GPU's memory.
struct GpuOffer {
  const Info* info = nullptr;  // the endpoint type with FI_HMEM; null if there is none
  std::string why_not;         // why there is none; empty if there is one
};

// Looks for the endpoint type `plain` among `offers`, which `find_gpu_offers` has found.
GpuOffer find_gpu_offer(const Library& library, const Info& plain, const Info* offers);

// The endpoint types of a provider with FI_HMEM, of all providers if `provider` is empty.
InfoList find_gpu_offers(const Library& library, const std::string& provider);

// Whether the NIC of an endpoint type is on the PCI bus. If libfabric has no record of the bus, as
// verbs of most releases has not, the kernel's record of RDMA devices in `folder` counts.
bool on_pci_bus(const Info& info, const std::string& folder = "/sys/class/infiniband");

// The NICs of a transport.
struct OpenNics {
  std::vector<std::unique_ptr<OpenNic>> nics;
  std::string why_no_gpu_memory;  // empty if all are open for a GPU's memory
};

// Opens the `chosen` ones of the endpoint types in `found`, all of one provider. They are open for
// a GPU's memory if all of them offer it and `why_no_gpu_memory` is empty: else it says why not.
OpenNics open_nics(const Library& library, const Info* found, const std::vector<size_t>& chosen,
                   const std::string& why_no_gpu_memory);

// Keeps the provider of an endpoint from calling CUDA. Returns why it would call it all the same;
// empty if it does not. Call it before the endpoint is enabled.
std::string forbid_cuda(const Library& library, const Info& info, Endpoint& endpoint);

// Registers a GPU's memory, by its descriptor where there is one and the provider takes it.
struct GpuRegistration {
  int result;  // 0, or libfabric's error
  MemoryRegion* region;
  const char* means;  // for messages: "by a dmabuf descriptor", "by address"
};
GpuRegistration register_pages(OpenNic& nic, const GpuMemory& memory, uint64_t key);

}  // namespace fanfold::transport::libfabric
