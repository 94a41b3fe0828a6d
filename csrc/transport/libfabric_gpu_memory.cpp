#include "transport/libfabric_gpu_memory.h"

#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "transport/libfabric_networks.h"

namespace fanfold::transport::libfabric {
namespace {

constexpr std::string_view kVerbs = "verbs;ofi_rxm";

std::string_view provider_of(const Info& info) { return info.fabric_attr->prov_name; }

std::string text_or_nothing(const char* text) { return text != nullptr ? text : ""; }

std::string name_of(const Info& info) {
  return std::string(provider_of(info)) + " on " + text_or_nothing(info.domain_attr->name);
}

// Whether both are endpoint types of one provider on one NIC that reach the same peers.
bool alike(const Info& a, const Info& b) {
  return provider_of(a) == provider_of(b) && a.addr_format == b.addr_format &&
         text_or_nothing(a.domain_attr->name) == text_or_nothing(b.domain_attr->name) &&
         text_or_nothing(a.fabric_attr->name) == text_or_nothing(b.fabric_attr->name);
}

// Whether both have the same address, of which a NIC may have several.
bool same_address(const Info& a, const Info& b) {
  return a.src_addrlen == b.src_addrlen &&
         (a.src_addrlen == 0 || std::memcmp(a.src_addr, b.src_addr, a.src_addrlen) == 0);
}

// What needs no search: the provider, the library and the bus.
std::string why_never(const Library& library, const Info& info) {
  const std::string_view provider = provider_of(info);
  if (over_sockets(provider) || provider == "shm") {
    return std::string(provider) + " moves bytes by the CPU";
  }
  const std::string version = "libfabric " + version_text(library.version());
  if (library.version() < kFirstHmem) return version + " knows no GPU memory";
  if (!on_pci_bus(info)) return name_of(info) + " is no NIC on the PCI bus";
  if (provider != kVerbs && library.version() < kFirstCudaPermission) {
    return version + " cannot keep " + std::string(provider) + " from calling CUDA (1.18 can)";
  }
  return {};
}

}  // namespace

bool on_pci_bus(const Info& info, const std::string& folder) {
  const Nic* nic = info.nic;
  if (nic != nullptr && nic->bus != nullptr && nic->bus->type == kBusPci) return true;
  const bool named = nic != nullptr && nic->device != nullptr && nic->device->name != nullptr;
  const std::string name = text_or_nothing(named ? nic->device->name : info.domain_attr->name);
  const std::filesystem::path device = std::filesystem::path(folder) / name;
  std::error_code error;  // a file that is missing is no error here
  // RoCE in software belongs to the device of the interface that it names.
  if (std::filesystem::exists(device / "parent", error)) return false;
  const auto bus = std::filesystem::read_symlink(device / "device" / "subsystem", error);
  return bus.filename() == "pci";
}

GpuOffer find_gpu_offer(const Library& library, const Info& plain, const Info* offers) {
  if (std::string why = why_never(library, plain); !why.empty()) return {.why_not = why};
  const Info* found = nullptr;
  for (const Info* info = offers; info != nullptr; info = info->next) {
    if ((info->caps & kHmem) == 0 || !alike(*info, plain)) continue;
    if (found == nullptr || (same_address(*info, plain) && !same_address(*found, plain))) {
      found = info;
    }
  }
  if (found == nullptr) return {.why_not = name_of(plain) + " does not offer FI_HMEM"};
  if (const std::string refusal = refusal_of(*found, kMrHmem); !refusal.empty()) {
    return {.why_not = name_of(plain) + " is not usable with FI_HMEM: " + refusal};
  }
  return {.info = found, .why_not = {}};
}

InfoList find_gpu_offers(const Library& library, const std::string& provider) {
  if (library.version() < kFirstHmem) return {nullptr, FreeInfo{&library}};
  return find_endpoints(library, provider, true);
}

OpenNics open_nics(const Library& library, const Info* found, const std::vector<size_t>& chosen,
                   const std::string& why_no_gpu_memory) {
  OpenNics open{.nics = {}, .why_no_gpu_memory = why_no_gpu_memory};
  std::vector<const Info*> plain;
  for (const size_t index : chosen) {
    plain.push_back(found);
    for (size_t i = 0; i < index; ++i) plain.back() = plain.back()->next;
  }
  InfoList offers(nullptr, FreeInfo{&library});
  std::vector<const Info*> with_hmem;
  for (const Info* info : plain) {
    std::string& why = open.why_no_gpu_memory;
    if (why.empty()) why = why_never(library, *info);
    if (!why.empty()) break;
    if (offers == nullptr) offers = find_gpu_offers(library, std::string(provider_of(*info)));
    const GpuOffer offer = find_gpu_offer(library, *info, offers.get());
    why = offer.why_not;
    with_hmem.push_back(offer.info);
  }
  for (const Info* info : open.why_no_gpu_memory.empty() ? with_hmem : plain) {
    open.nics.push_back(std::make_unique<OpenNic>(library, *info));
  }
  return open;
}

std::string forbid_cuda(const Library& library, const Info& info, Endpoint& endpoint) {
  // ofi_rxm refuses, because it copies messages; but it hands remote writes, which are all that a
  // transport sends, to the NIC with the caller's descriptor.
  if (provider_of(info) == kVerbs) return {};
  const bool permitted = false;
  const int result = endpoint.ops->setopt(&endpoint.fid, kOptEndpoint, kOptCudaApiPermitted,
                                          &permitted, sizeof permitted);
  if (result == 0) return {};
  return name_of(info) + " may call CUDA to move a GPU's memory: " +
         library.failure("FI_OPT_CUDA_API_PERMITTED", result);
}

GpuRegistration register_pages(OpenNic& nic, const GpuMemory& memory, uint64_t key) {
  const auto bytes = static_cast<size_t>(memory.bytes);
  const iovec range{.iov_base = memory.data, .iov_len = bytes};
  const MrPages pages{
      .descriptor = memory.dmabuf, .offset = 0, .bytes = bytes, .base = memory.data};
  // Providers look at the API with which their fabric was opened.
  const bool by_descriptor = memory.dmabuf >= 0 && nic.fabric->api_version >= kDmabufApi;
  MrAttr attributes{};
  if (by_descriptor) {
    attributes.pages = &pages;
  } else {
    attributes.ranges = &range;
  }
  attributes.count = 1;
  attributes.access = kRegionAccess;
  attributes.requested_key = key;
  attributes.iface = kHmemCuda;
  attributes.device.cuda = memory.device;
  GpuRegistration made{.result = 0,
                       .region = nullptr,
                       .means = by_descriptor ? "by a dmabuf descriptor" : "by address"};
  made.result = nic.domain->mr->regattr(&nic.domain->fid, &attributes,
                                        by_descriptor ? kMrDmabuf : 0, &made.region);
  return made;
}

}  // namespace fanfold::transport::libfabric
