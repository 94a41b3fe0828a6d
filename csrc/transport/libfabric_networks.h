// The networks that libfabric finds on this machine, and the choice among them.
//
// `find_networks` reads the machine. `choose` is pure: the same records give the same choice, so
// tests and `fanfold doctor` feed it records of any machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/libfabric_library.h"

namespace fanfold::transport::libfabric {

enum class LinkState { kUnknown, kDown, kUp };

// One endpoint type of one provider on one NIC.
struct Network {
  std::string provider;  // libfabric's name: "efa", "verbs;ofi_rxm", "net"
  std::string fabric;
  std::string nic;              // libfabric's domain: "eth0", "rdmap0s6-rdm", "shm"
  int64_t bits_per_second = 0;  // 0 if unknown
  LinkState state = LinkState::kUnknown;
  int32_t numa_node = -1;  // -1 if unknown
  uint32_t addr_format = 0;
  bool loopback = false;    // reaches only this host
  bool link_local = false;  // an IPv6 address that other networks do not know
  std::string refusal;      // why Fanfold cannot use it; empty if it can
  // Why a GPU's memory cannot be registered with it; empty if it may be. Only `find_networks` asks.
  std::string why_no_gpu_memory;
};

struct Request {
  // NOLINTBEGIN(readability-redundant-member-init): designated initialisers may leave them out
  std::string provider = {};           // "tcp", "efa", ...; empty for the best one
  std::vector<std::string> nics = {};  // names to choose from; empty for all
  std::string interface = {};          // of sockets, where `nics` is empty; empty for all
  // NOLINTEND(readability-redundant-member-init)
  bool gpu_memory = false;  // a GPU's memory is to be registered where the network allows it
  bool one_host = false;    // all ranks are on this host
  int32_t nics_wanted = 1;  // rails over as many NICs as there are, at most this number
  int32_t numa_node = -1;   // of the calling thread
  int32_t thread = 0;       // equally near NICs are dealt out by this number
};

struct Choice {
  std::vector<size_t> networks;  // indices, the nearest NIC first
  std::string reason;            // for a user: why these
};

// Reads "libfabric", "libfabric:tcp" or "libfabric:verbs:mlx5_0,mlx5_1". Throws BadArgument for
// anything else.
Request parse_setting(std::string_view setting);

// The endpoint types in libfabric's order. Entry i describes the i-th element of `list`.
std::vector<Network> describe(const Info* list);
std::vector<Network> find_networks();
std::vector<Network> find_networks(const Library& library);

// Throws Unavailable if no network fits; the message says what to install or to change.
Choice choose(const std::vector<Network>& networks, const Request& request);

// The part of `choose` that picks NICs: indices of `networks` among `usable`, at most
// `request.nics_wanted`, each NIC once: those of the thread's NUMA node first, then the faster
// ones.
std::vector<size_t> nearest_nics(const std::vector<Network>& networks,
                                 const std::vector<size_t>& usable, const Request& request);

// Whether a provider goes through the kernel's sockets, so that its NICs are interfaces.
bool over_sockets(std::string_view provider);

// An endpoint's name of a provider over sockets: "10.0.0.1 port 4711"; empty for other formats.
std::string socket_text(uint32_t addr_format, std::span<const std::byte> name);

// Why an endpoint type cannot carry Fanfold's writes; empty if it can. `further_modes` of memory
// registration are served, too.
std::string refusal_of(const Info& info, int further_modes = 0);

// The NUMA node on which the calling thread runs; -1 if unknown.
int32_t numa_node_of_thread();

}  // namespace fanfold::transport::libfabric
