#include "transport/libfabric_networks.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "transport/libfabric_gpu_memory.h"

namespace fanfold::transport::libfabric {
namespace {

std::string text_or(const char* text, const char* otherwise) {
  return text != nullptr ? text : otherwise;
}

// The first word of a file of the kernel; empty if there is none.
std::string kernel_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

int64_t kernel_number(const std::string& path, int64_t otherwise) {
  const std::string word = kernel_word(path);
  if (word.empty() || word.find_first_not_of("0123456789") != std::string::npos) return otherwise;
  return std::stoll(word.substr(0, 15));
}

// From libfabric's own record of the NIC, which RDMA providers fill in.
void read_nic(const Nic& nic, Network& network) {
  if (nic.link != nullptr) {
    network.bits_per_second = static_cast<int64_t>(nic.link->speed);
    if (nic.link->state == kLinkUp) network.state = LinkState::kUp;
    if (nic.link->state == kLinkDown) network.state = LinkState::kDown;
  }
  if (nic.bus != nullptr && nic.bus->type == kBusPci) {
    std::array<char, 32> address{};
    // NOLINTNEXTLINE(cppcoreguidelines-pro-type-vararg)
    std::snprintf(address.data(), address.size(), "%04x:%02x:%02x.%x", nic.bus->pci_domain,
                  nic.bus->pci_bus, nic.bus->pci_device, nic.bus->pci_function);
    network.numa_node = static_cast<int32_t>(
        kernel_number(std::string("/sys/bus/pci/devices/") + address.data() + "/numa_node", -1));
  }
}

// From the kernel's record of an interface, for providers over sockets.
void read_interface(Network& network) {
  const std::string folder = "/sys/class/net/" + network.nic;
  network.bits_per_second = kernel_number(folder + "/speed", 0) * 1'000'000;
  network.numa_node = static_cast<int32_t>(kernel_number(folder + "/device/numa_node", -1));
  const std::string state = kernel_word(folder + "/operstate");
  if (state == "up") network.state = LinkState::kUp;
  if (state == "down") network.state = LinkState::kDown;
}

void read_address(const Info& info, Network& network) {
  if (info.src_addr == nullptr) return;
  if (info.addr_format == kSockaddrIn && info.src_addrlen >= sizeof(sockaddr_in)) {
    sockaddr_in address{};
    std::memcpy(&address, info.src_addr, sizeof address);
    network.loopback = ntohl(address.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  } else if (info.addr_format == kSockaddrIn6 && info.src_addrlen >= sizeof(sockaddr_in6)) {
    sockaddr_in6 address{};
    std::memcpy(&address, info.src_addr, sizeof address);
    const uint8_t* bytes = address.sin6_addr.s6_addr;
    network.loopback = std::count(bytes, bytes + 15, uint8_t{0}) == 15 && bytes[15] == 1;
    network.link_local = bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
  }
}

}  // namespace

std::string socket_text(uint32_t addr_format, std::span<const std::byte> name) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  uint16_t port = 0;
  if (addr_format == kSockaddrIn && name.size() >= sizeof(sockaddr_in)) {
    sockaddr_in address{};
    std::memcpy(&address, name.data(), sizeof address);
    inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size());
    port = address.sin_port;
  } else if (addr_format == kSockaddrIn6 && name.size() >= sizeof(sockaddr_in6)) {
    sockaddr_in6 address{};
    std::memcpy(&address, name.data(), sizeof address);
    inet_ntop(AF_INET6, &address.sin6_addr, text.data(), text.size());
    port = address.sin6_port;
  } else {
    return {};
  }
  return std::string(text.data()) + " port " + std::to_string(ntohs(port));
}

std::string refusal_of(const Info& info, int further_modes) {
  const DomainAttr& domain = *info.domain_attr;
  if (info.ep_attr->type != kEpRdm) return "it offers no reliable unconnected endpoint";
  if ((domain.mr_mode & kMrRaw) != 0) return "it needs keys longer than 64 bits (FI_MR_RAW)";
  const int served =
      kMrLocal | kMrVirtAddr | kMrAllocated | kMrProvKey | kMrEndpoint | further_modes;
  if ((domain.mr_mode & ~served) != 0) {
    return "it needs memory registration modes that Fanfold lacks (mr_mode " +
           std::to_string(domain.mr_mode) + ")";
  }
  constexpr uint64_t duties = kModeContext | kModeContext2 | kModeRxCqData;
  const uint64_t mode = info.mode | info.tx_attr->mode | info.rx_attr->mode | domain.mode;
  if ((mode & ~duties) != 0) {
    return "it asks its caller for duties that Fanfold lacks (mode " + std::to_string(mode) + ")";
  }
  if (domain.cq_data_size < sizeof(uint32_t)) {
    return "its writes carry " + std::to_string(domain.cq_data_size) +
           " bytes of immediate data, but 4 are needed" +
           (std::string_view(info.fabric_attr->prov_name) == "cxi"
                ? " (set FI_CXI_ENABLE_WRITEDATA=1)"
                : "");
  }
  return {};
}

int32_t numa_node_of_thread() {
  unsigned node = 0;
  return getcpu(nullptr, &node) == 0 ? static_cast<int32_t>(node) : -1;
}

std::vector<Network> describe(const Info* list) {
  std::vector<Network> networks;
  for (const Info* info = list; info != nullptr; info = info->next) {
    Network network;
    network.provider = text_or(info->fabric_attr->prov_name, "unnamed");
    network.fabric = text_or(info->fabric_attr->name, "unnamed");
    network.nic = text_or(info->domain_attr->name, "unnamed");
    network.addr_format = info->addr_format;
    network.refusal = refusal_of(*info);
    if (network.provider == "shm") {
      network.loopback = true;
    } else {
      if (info->nic != nullptr) read_nic(*info->nic, network);
      // The providers over sockets may give a record of the NIC, but one without a speed.
      if (network.bits_per_second == 0) read_interface(network);
      read_address(*info, network);
    }
    networks.push_back(std::move(network));
  }
  return networks;
}

std::vector<Network> find_networks(const Library& library) {
  const InfoList found = find_endpoints(library, "");
  const InfoList offers = find_gpu_offers(library, "");
  std::vector<Network> networks = describe(found.get());
  const Info* info = found.get();
  for (Network& network : networks) {
    network.why_no_gpu_memory = find_gpu_offer(library, *info, offers.get()).why_not;
    info = info->next;
  }
  return networks;
}

std::vector<Network> find_networks() { return find_networks(library()); }

}  // namespace fanfold::transport::libfabric
