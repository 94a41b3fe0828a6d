#include "proxy/open_carrier.h"

#include <charconv>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "memory/rows_layout.h"
#include "transport/libfabric.h"
#include "transport/loopback.h"

namespace fanfold::proxy {
namespace {

using transport::Transport;
namespace loopback = transport::loopback;

constexpr std::string_view kLoopback = "loopback";
// A poll of a loopback network passes as much of its time as one of a real network takes.
constexpr int64_t kLoopbackPollNs = 1000;
// Emulated kernels are slow, and are to see what has come while something else is under way.
constexpr int64_t kLoopbackPollNsForKernels = 100;
// Longer than the time between two steps of decoding.
constexpr std::chrono::nanoseconds kAwakeForKernels = std::chrono::seconds(1);
// The time of a loopback network passes with the polls, so a proxy polls for as long as its delays.
constexpr std::chrono::nanoseconds kAwakeForEmulation = std::chrono::milliseconds(4);

// The options of the loopback network that `setting` names; nothing if it names another network.
std::optional<loopback::Options> loopback_options(std::string_view setting, bool for_kernels) {
  if (!setting.starts_with(kLoopback)) return std::nullopt;
  const std::string_view rest = setting.substr(kLoopback.size());
  loopback::Options options;
  if (!rest.empty()) {
    uint64_t seed = 0;
    const char* const end = rest.data() + rest.size();
    const auto [parsed, error] = std::from_chars(rest.data() + 1, end, seed);
    if (rest[0] != ':' || error != std::errc() || parsed != end) {
      throw BadArgument("network", std::string(setting), "loopback or loopback:SEED");
    }
    options = loopback::Options::hostile(seed);
  }
  options.poll_ns = for_kernels ? kLoopbackPollNsForKernels : kLoopbackPollNs;
  return options;
}

// The loopback network of a world. Its first rank makes it; it lasts while a rank keeps it.
std::shared_ptr<loopback::Network> meet_in(const std::string& world,
                                           const loopback::Options& options) {
  static std::mutex mutex;
  static std::map<std::string, std::weak_ptr<loopback::Network>> networks;
  const std::scoped_lock lock(mutex);
  std::erase_if(networks, [](const auto& entry) { return entry.second.expired(); });
  std::weak_ptr<loopback::Network>& known = networks[world];
  std::shared_ptr<loopback::Network> network = known.lock();
  if (network == nullptr) known = network = loopback::Network::create(options);
  return network;
}

std::vector<std::unique_ptr<Transport>> open_libfabrics(const CarrierOptions& options) {
  transport::libfabric::Request request = transport::libfabric::parse_setting(options.network);
  request.one_host = options.one_host;
  request.gpu_memory = options.gpu_memory;
  request.interface = options.interface;
  request.numa_node = transport::libfabric::numa_node_of_thread();
  std::vector<std::unique_ptr<Transport>> transports;
  for (int32_t thread = 0; thread < options.threads; ++thread) {
    request.thread = thread;
    transports.push_back(transport::open_libfabric({.request = request, .endpoints_per_nic = 1}));
  }
  return transports;
}

}  // namespace

OpenCarrier::OpenCarrier(const SymmetricMemory& memory, const CarrierOptions& options)
    : memory_(memory) {
  std::vector<std::unique_ptr<Transport>> transports;
  if (const auto found = loopback_options(options.network, options.kernel_ring_slots > 0)) {
    const auto network = meet_in(options.world, *found);
    for (int32_t thread = 0; thread < options.threads; ++thread) {
      transports.push_back(network->open(memory.rank(), thread));
    }
    meeting_ = network;
  } else {
    transports = open_libfabrics(options);
  }
  if (!transports.empty()) network_ = transports.front()->name();
  ProxyOptions proxy;
  proxy.threads = options.threads;
  proxy.timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(options.timeout_seconds));
  proxy.give_up_peers = options.give_up_peers;
  proxy.kernel_ring_slots = options.kernel_ring_slots;
  if (options.kernel_ring_slots > 0) {
    proxy.awake = meeting_ != nullptr ? kAwakeForEmulation : kAwakeForKernels;
  }
  carrier_ = std::make_unique<ProxyCarrier>(memory, proxy, std::move(transports));
}

void OpenCarrier::register_rows(RowsMemory rows) {
  if (!RowsLayout::fits_beside(memory_.mapped_bytes())) {
    throw BadArgument("memory between hosts", std::to_string(memory_.mapped_bytes()) + " bytes",
                      "at most 16 GiB, where rows have memory of their own");
  }
  const RowsLayout layout{.ranks = memory_.ranks(), .bytes = memory_.bytes()};
  for (int32_t peer = 0; peer < layout.ranks; ++peer) rows.sources.push_back(layout.area(peer));
  carrier().register_rows(rows);
}

void OpenCarrier::close() {
  carrier_.reset();
  meeting_.reset();
}

std::string OpenCarrier::network() const {
  static_cast<void>(carrier());
  return network_;
}

std::unique_ptr<Carrier> OpenCarrier::take() {
  static_cast<void>(carrier());
  return std::move(carrier_);
}

ProxyCarrier& OpenCarrier::carrier() const {
  if (carrier_ == nullptr) throw Misuse("this carrier was given to its memory or closed");
  return *carrier_;
}

}  // namespace fanfold::proxy
