// The choice among networks: no system call in this file.
#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "transport/libfabric_networks.h"

namespace fanfold::transport::libfabric {
namespace {

constexpr std::string_view kPrefix = "libfabric";

// The user's name of a kind of network, and the providers that serve it, the best first. The order
// of the kinds is the order of the automatic choice.
struct Kind {
  const char* name;
  std::vector<const char*> providers;
  const char* what;
  const char* missing;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"efa",
       {"efa"},
       "an RDMA NIC",
       "it needs an EFA device (lspci shows it), and the EFA installer of AWS"},
      {"cxi", {"cxi"}, "an RDMA NIC", "it needs a Slingshot NIC, and the libfabric of its vendor"},
      {"verbs",
       {"verbs;ofi_rxm"},
       "an RDMA NIC",
       "it needs an InfiniBand or RoCE NIC (ibv_devices shows it); Debian, Ubuntu: apt install "
       "ibverbs-providers rdma-core"},
      // `tcp` offers no RDM endpoint before libfabric 1.18. In 1.17 `net` is its successor, and
      // faster than ofi_rxm over tcp.
      {"tcp",
       {"tcp", "net", "tcp;ofi_rxm", "net;ofi_rxm"},
       "sockets",
       "it needs an interface that is up; Debian, Ubuntu: apt install libfabric1"},
      {"net",
       {"net", "tcp", "net;ofi_rxm", "tcp;ofi_rxm"},
       "sockets",
       "it needs an interface that is up; Debian, Ubuntu: apt install libfabric1"},
      {"shm", {"shm"}, "memory of this host", "Debian, Ubuntu: apt install libfabric1"},
  };
  return all;
}

const Kind* kind_named(std::string_view name) {
  for (const Kind& kind : kinds()) {
    if (name == kind.name) return &kind;
  }
  return nullptr;
}

std::string kind_names() {
  std::string names;
  for (const Kind& kind : kinds()) names += (names.empty() ? "" : ", ") + std::string(kind.name);
  return names;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end = text.find(separator); end != std::string_view::npos;
       end = text.find(separator, begin)) {
    parts.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.emplace_back(text.substr(begin));
  return parts;
}

// Whether the request allows a network's NIC. RDMA NICs reach whatever the fabric's switches reach;
// sockets reach other hosts through some interfaces only.
bool allows(const Request& request, const Network& network) {
  if (!request.nics.empty()) {
    return std::find(request.nics.begin(), request.nics.end(), network.nic) != request.nics.end();
  }
  return request.interface.empty() || !over_sockets(network.provider) ||
         network.nic == request.interface;
}

// The entries of one provider that can be used, those of the preferred kind of address first. All
// have the same kind of address, so that rails and peers can reach each other.
std::vector<size_t> usable_of(const std::vector<Network>& networks, std::string_view provider,
                              const Request& request) {
  std::vector<size_t> usable;
  for (size_t index = 0; index < networks.size(); ++index) {
    const Network& network = networks[index];
    if (network.provider != provider || !network.refusal.empty()) continue;
    if (!allows(request, network)) continue;
    if (network.state == LinkState::kDown) continue;
    usable.push_back(index);
  }
  const auto far = [&](size_t index) {
    const Network& network = networks[index];
    return (network.loopback ? 4 : 0) + (network.link_local ? 2 : 0) +
           (network.addr_format == kSockaddrIn6 ? 1 : 0);
  };
  std::stable_sort(usable.begin(), usable.end(),
                   [&](size_t a, size_t b) { return far(a) < far(b); });
  std::vector<size_t> alike;
  std::copy_if(usable.begin(), usable.end(), std::back_inserter(alike), [&](size_t index) {
    return networks[index].addr_format == networks[usable[0]].addr_format &&
           networks[index].loopback == networks[usable[0]].loopback;
  });
  return alike;
}

// What was found of a kind and cannot be used, for the message.
std::string found_instead(const std::vector<Network>& networks, const Kind& kind) {
  std::string text;
  for (const Network& network : networks) {
    const bool of_kind = std::any_of(kind.providers.begin(), kind.providers.end(),
                                     [&](const char* name) { return network.provider == name; });
    if (!of_kind) continue;
    text += (text.empty() ? "found " : "; ") + network.provider + " on " + network.nic;
    if (!network.refusal.empty()) text += ": " + network.refusal;
    if (network.state == LinkState::kDown) text += ": its link is down";
  }
  return text;
}

std::string reason_of(const Kind& kind, const Network& first, const Request& request) {
  if (!request.provider.empty()) return "the setting asks for " + request.provider;
  if (std::string_view(kind.name) == "shm") return "all ranks are on this host";
  std::string reason = std::string("it is the best that was found: ") + kind.what;
  if (over_sockets(first.provider) && first.nic == request.interface) {
    reason += " that reach the other hosts";
  }
  if (first.loopback) reason += ", but reaches only this host";
  return reason;
}

}  // namespace

bool over_sockets(std::string_view provider) {
  const Kind& tcp = *kind_named("tcp");
  return std::any_of(tcp.providers.begin(), tcp.providers.end(),
                     [&](std::string_view name) { return name == provider; });
}

Request parse_setting(std::string_view setting) {
  const std::vector<std::string> parts = split(setting, ':');
  Request request;
  const std::string bound =
      "libfabric, libfabric:PROVIDER or libfabric:PROVIDER:NIC,NIC with one "
      "of the providers " +
      kind_names();
  if (parts[0] != kPrefix || parts.size() > 3) {
    throw BadArgument("transport", "'" + std::string(setting) + "'", bound);
  }
  if (parts.size() > 1) {
    if (kind_named(parts[1]) == nullptr) {
      throw BadArgument("transport", "'" + std::string(setting) + "'", bound);
    }
    request.provider = parts[1];
  }
  if (parts.size() > 2) {
    request.nics = split(parts[2], ',');
    request.nics_wanted = static_cast<int32_t>(request.nics.size());
    if (std::any_of(request.nics.begin(), request.nics.end(),
                    [](const std::string& nic) { return nic.empty(); })) {
      throw BadArgument("transport", "'" + std::string(setting) + "'", bound);
    }
  }
  return request;
}

std::vector<size_t> nearest_nics(const std::vector<Network>& networks,
                                 const std::vector<size_t>& usable, const Request& request) {
  // One entry for each NIC: the first, which `choose` has put in front.
  std::vector<size_t> nics;
  for (const size_t index : usable) {
    const bool known = std::any_of(nics.begin(), nics.end(), [&](size_t other) {
      return networks[other].nic == networks[index].nic;
    });
    if (!known) nics.push_back(index);
  }
  const auto key = [&](size_t index) {
    const Network& network = networks[index];
    int distance = 1;
    if (network.numa_node >= 0 && request.numa_node >= 0) {
      distance = network.numa_node == request.numa_node ? 0 : 2;
    }
    return std::tuple(network.loopback, network.link_local, distance, -network.bits_per_second);
  };
  std::stable_sort(nics.begin(), nics.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
  // Threads are spread round-robin over the NICs that are as good as the first.
  const auto equal_end = std::find_if(nics.begin(), nics.end(),
                                      [&](size_t index) { return key(index) != key(nics[0]); });
  // Over sockets they stay on one interface: thread t of one rank writes to any thread of another,
  // and what leaves through one interface need not reach the address of another one.
  const auto equal =
      !nics.empty() && over_sockets(networks[nics[0]].provider) ? 1 : equal_end - nics.begin();
  if (equal > 0) std::rotate(nics.begin(), nics.begin() + request.thread % equal, equal_end);
  if (std::cmp_greater(nics.size(), request.nics_wanted)) {
    nics.resize(static_cast<size_t>(request.nics_wanted));
  }
  return nics;
}

Choice choose(const std::vector<Network>& networks, const Request& request) {
  if (request.nics_wanted < 1) {
    throw BadArgument("nics_wanted", std::to_string(request.nics_wanted), "at least 1");
  }
  if (!request.provider.empty() && kind_named(request.provider) == nullptr) {
    throw BadArgument("provider", "'" + request.provider + "'", "one of " + kind_names());
  }
  std::vector<const Kind*> wanted;
  for (const Kind& kind : kinds()) {
    const bool shm = std::string_view(kind.name) == "shm";
    if (request.provider.empty() && shm && request.one_host) {
      wanted.insert(wanted.begin(), &kind);
    } else if (request.provider.empty() ? !shm : request.provider == kind.name) {
      wanted.push_back(&kind);
    }
  }
  std::string instead;
  for (const Kind* kind : wanted) {
    for (const char* provider : kind->providers) {
      const std::vector<size_t> usable = usable_of(networks, provider, request);
      if (usable.empty()) continue;
      Choice choice{.networks = nearest_nics(networks, usable, request), .reason = {}};
      choice.reason = reason_of(*kind, networks[choice.networks[0]], request);
      return choice;
    }
    const std::string found = found_instead(networks, *kind);
    if (!found.empty()) instead += (instead.empty() ? "" : "; ") + found;
  }
  std::string message = "libfabric finds no usable network";
  if (!request.provider.empty()) message += " for " + request.provider;
  for (const std::string& nic : request.nics) {
    message += (&nic == request.nics.data() ? " on " : ", ") + nic;
  }
  if (request.nics.empty() && !request.interface.empty()) {
    message += " (sockets reach the other hosts over " + request.interface +
               "; FANFOLD_NETWORK=libfabric:tcp:NAME names another interface)";
  }
  message += instead.empty() ? "" : " (" + instead + ")";
  message += ": ";
  throw Unavailable(message + (request.provider.empty() ? "connect an interface, or see fi_info"
                                                        : kind_named(request.provider)->missing));
}

}  // namespace fanfold::transport::libfabric
