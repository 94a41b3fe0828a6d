// The choice among networks, for machines of any kind.
#include <string>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "transport/libfabric_networks.h"

using namespace fanfold;
using namespace fanfold::transport::libfabric;

namespace {

constexpr int64_t kGigabit = 1'000'000'000;

Network rdma(std::string provider, std::string nic, int32_t numa_node, int64_t gigabits) {
  Network network;
  network.provider = std::move(provider);
  network.nic = std::move(nic);
  network.numa_node = numa_node;
  network.bits_per_second = gigabits * kGigabit;
  network.state = LinkState::kUp;
  return network;
}

Network sockets(std::string provider, std::string nic, uint32_t format, bool loopback = false) {
  Network network;
  network.provider = std::move(provider);
  network.nic = std::move(nic);
  network.addr_format = format;
  network.loopback = loopback;
  return network;
}

std::vector<Network> host_without_rdma() {
  return {sockets("tcp;ofi_rxm", "eth0", kSockaddrIn), sockets("net", "lo", kSockaddrIn, true),
          sockets("net", "eth0", kSockaddrIn6), sockets("net", "eth0", kSockaddrIn),
          sockets("shm", "shm", 0, true)};
}

std::vector<Network> host_with_four_nics() {
  std::vector<Network> networks = host_without_rdma();
  networks.push_back(rdma("verbs;ofi_rxm", "mlx5_0", 0, 400));
  networks.push_back(rdma("verbs;ofi_rxm", "mlx5_1", 1, 400));
  networks.push_back(rdma("verbs;ofi_rxm", "mlx5_2", 1, 400));
  networks.push_back(rdma("verbs;ofi_rxm", "mlx5_3", 0, 100));
  return networks;
}

std::vector<std::string> nics_of(const std::vector<Network>& networks, const Request& request) {
  std::vector<std::string> nics;
  for (const size_t index : choose(networks, request).networks) nics.push_back(networks[index].nic);
  return nics;
}

using Names = std::vector<std::string>;

template <typename Error>
std::string message_of(const std::vector<Network>& networks, const Request& request) {
  try {
    choose(networks, request);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(libfabric_setting_names_provider_and_nics) {
  CHECK_EQ(parse_setting("libfabric").provider, "");
  CHECK_EQ(parse_setting("libfabric:tcp").provider, "tcp");
  const Request request = parse_setting("libfabric:verbs:mlx5_0,mlx5_1");
  CHECK_EQ(request.provider, "verbs");
  CHECK_EQ(request.nics, (Names{"mlx5_0", "mlx5_1"}));
  CHECK_EQ(request.nics_wanted, 2);
  for (const char* wrong : {"", "tcp", "libfabric:", "libfabric:sockets",
                            "libfabric:tcp:", "libfabric:tcp:a,,b", "libfabric:tcp:a:b"}) {
    CHECK_THROWS(parse_setting(wrong), BadArgument);
  }
}

TEST(libfabric_choice_prefers_rdma_nics) {
  const std::vector<Network> networks = host_with_four_nics();
  const Choice choice = choose(networks, {});
  CHECK_EQ(choice.networks.size(), 1u);
  CHECK_EQ(networks[choice.networks[0]].provider, "verbs;ofi_rxm");
  CHECK(contains(choice.reason, "an RDMA NIC"));
  std::vector<Network> with_efa = networks;
  with_efa.push_back(rdma("efa", "rdmap0s6-rdm", 0, 100));
  CHECK_EQ(nics_of(with_efa, {}), (Names{"rdmap0s6-rdm"}));
}

TEST(libfabric_choice_takes_sockets_that_other_hosts_reach) {
  const std::vector<Network> networks = host_without_rdma();
  const Choice choice = choose(networks, {});
  CHECK_EQ(choice.networks, (std::vector<size_t>{3}));  // net over IPv4, not over lo
  const std::vector<Network> alone = {networks[1], networks[4]};
  const Choice loopback = choose(alone, {});
  CHECK_EQ(loopback.networks, (std::vector<size_t>{0}));
  CHECK(contains(loopback.reason, "only this host"));
}

TEST(libfabric_choice_takes_the_interface_that_reaches_other_hosts) {
  std::vector<Network> networks = host_without_rdma();
  networks.push_back(sockets("net", "docker0", kSockaddrIn));
  for (Network& network : networks) network.bits_per_second = 10 * kGigabit;
  // Threads stay on one interface, because any thread of a rank writes to any of another.
  for (int32_t thread = 0; thread < 3; ++thread) {
    CHECK_EQ(nics_of(networks, {.thread = thread}), (Names{"eth0"}));
    CHECK_EQ(nics_of(networks, {.interface = "docker0", .thread = thread}), (Names{"docker0"}));
  }
  CHECK(contains(choose(networks, {.interface = "eth0"}).reason, "that reach the other hosts"));
  // What the setting names counts more, and RDMA NICs are no interfaces.
  Request named = parse_setting("libfabric:tcp:eth0");
  named.interface = "docker0";
  CHECK_EQ(nics_of(networks, named), (Names{"eth0"}));
  networks.push_back(rdma("verbs;ofi_rxm", "mlx5_0", 0, 400));
  CHECK_EQ(nics_of(networks, {.interface = "docker0"}), (Names{"mlx5_0"}));
  CHECK(contains(message_of<Unavailable>(networks, {.provider = "tcp", .interface = "eth9"}),
                 "reach the other hosts over eth9; FANFOLD_NETWORK=libfabric:tcp:NAME"));
}

TEST(libfabric_choice_of_tcp_takes_its_best_provider) {
  std::vector<Network> networks = host_without_rdma();
  CHECK_EQ(networks[choose(networks, {.provider = "tcp"}).networks[0]].provider, "net");
  networks.push_back(sockets("tcp", "eth0", kSockaddrIn));  // as since libfabric 1.18
  CHECK_EQ(networks[choose(networks, {.provider = "tcp"}).networks[0]].provider, "tcp");
  CHECK_EQ(networks[choose(networks, {.provider = "net"}).networks[0]].provider, "net");
  networks.resize(1);
  CHECK_EQ(networks[choose(networks, {.provider = "tcp"}).networks[0]].provider, "tcp;ofi_rxm");
}

TEST(libfabric_choice_takes_shm_only_on_one_host) {
  const std::vector<Network> networks = host_with_four_nics();
  CHECK_EQ(nics_of(networks, {.one_host = true}), (Names{"shm"}));
  CHECK_EQ(nics_of(networks, {.provider = "shm"}), (Names{"shm"}));
  CHECK(contains(message_of<Unavailable>({networks[4]}, {}), "no usable network"));
}

TEST(libfabric_choice_takes_nics_near_the_thread) {
  const std::vector<Network> networks = host_with_four_nics();
  CHECK_EQ(nics_of(networks, {.numa_node = 0}), (Names{"mlx5_0"}));
  CHECK_EQ(nics_of(networks, {.nics_wanted = 2, .numa_node = 0}), (Names{"mlx5_0", "mlx5_3"}));
  // Threads of one node go round-robin over equal NICs.
  CHECK_EQ(nics_of(networks, {.numa_node = 1, .thread = 0}), (Names{"mlx5_1"}));
  CHECK_EQ(nics_of(networks, {.numa_node = 1, .thread = 1}), (Names{"mlx5_2"}));
  CHECK_EQ(nics_of(networks, {.numa_node = 1, .thread = 2}), (Names{"mlx5_1"}));
  CHECK_EQ(nics_of(networks, {.nics_wanted = 9, .numa_node = 1}).size(), 4u);
  // Of an unknown node, the fastest.
  CHECK_EQ(nics_of(networks, {.nics_wanted = 3}), (Names{"mlx5_0", "mlx5_1", "mlx5_2"}));
}

TEST(libfabric_choice_leaves_out_what_is_down_refused_or_not_named) {
  std::vector<Network> networks = host_with_four_nics();
  CHECK_EQ(nics_of(networks, parse_setting("libfabric:verbs:mlx5_3")), (Names{"mlx5_3"}));
  for (size_t i = 5; i < networks.size(); ++i) networks[i].state = LinkState::kDown;
  networks[5].state = LinkState::kUp;
  networks[5].refusal = "it needs keys longer than 64 bits (FI_MR_RAW)";
  CHECK_EQ(nics_of(networks, {}), (Names{"eth0"}));
  const std::string message = message_of<Unavailable>(networks, {.provider = "verbs"});
  CHECK(contains(message, "FI_MR_RAW"));
  CHECK(contains(message, "mlx5_1: its link is down"));
  CHECK(contains(message, "apt install"));
}

TEST(libfabric_choice_says_what_is_missing) {
  CHECK(contains(message_of<Unavailable>({}, {}), "no usable network"));
  CHECK(contains(message_of<Unavailable>({}, {.provider = "efa"}), "EFA installer"));
  CHECK(contains(message_of<Unavailable>(host_without_rdma(), parse_setting("libfabric:tcp:eth7")),
                 "on eth7"));
  CHECK_THROWS(choose({}, {.provider = "sockets"}), BadArgument);
  CHECK_THROWS(choose({}, {.nics_wanted = 0}), BadArgument);
}

TEST(libfabric_refuses_endpoints_that_cannot_carry_its_writes) {
  char provider[] = "cxi";
  TxAttr tx{};
  RxAttr rx{};
  EpAttr ep{};
  DomainAttr domain{};
  FabricAttr fabric{};
  fabric.prov_name = provider;
  Info info{};
  info.tx_attr = &tx;
  info.rx_attr = &rx;
  info.ep_attr = &ep;
  info.domain_attr = &domain;
  info.fabric_attr = &fabric;
  ep.type = kEpRdm;
  domain.cq_data_size = 4;
  domain.mr_mode = kMrLocal | kMrVirtAddr | kMrAllocated | kMrProvKey | kMrEndpoint;
  info.mode = kModeContext2 | kModeRxCqData;
  CHECK_EQ(refusal_of(info), "");
  domain.cq_data_size = 3;
  CHECK(contains(refusal_of(info), "3 bytes of immediate data"));
  CHECK(contains(refusal_of(info), "FI_CXI_ENABLE_WRITEDATA=1"));
  domain.cq_data_size = 8;
  domain.mr_mode |= kMrRaw;
  CHECK(contains(refusal_of(info), "FI_MR_RAW"));
  domain.mr_mode = 1 << 10;  // FI_MR_HMEM
  CHECK(contains(refusal_of(info), "mr_mode 1024"));
  domain.mr_mode = 0;
  info.mode = 1ULL << 58;  // FI_MSG_PREFIX
  CHECK(contains(refusal_of(info), "duties"));
  info.mode = 0;
  ep.type = 1;  // FI_EP_MSG
  CHECK(contains(refusal_of(info), "endpoint"));
}
