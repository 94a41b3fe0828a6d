#include "transport/libfabric_rail.h"

#include <algorithm>
#include <functional>
#include <random>

#include "base/error.h"
#include "transport/libfabric.h"

namespace fanfold::transport::libfabric {
namespace {

// In flight on one rail at most; a provider may allow fewer.
constexpr size_t kMostOperations = 1024;
constexpr size_t kMostReceives = 512;
// A peer's writes end in this queue as long as this side does not poll.
constexpr size_t kLeastQueue = 4096;
constexpr size_t kLongestName = 512;

void check(const Library& library, const Info& info, const char* call, int64_t result) {
  if (result == 0) return;
  throw Unavailable(library.failure(std::string("libfabric's provider ") +
                                        info.fabric_attr->prov_name + " on " +
                                        info.domain_attr->name + ": " + call,
                                    result) +
                    ": see that the network is up (fi_info lists what works), or choose another "
                    "provider");
}

}  // namespace

OpenNic::OpenNic(const Library& library, const Info& choice)
    : info(library.dupinfo(&choice), FreeInfo{&library}) {
  if (info == nullptr) throw Unavailable("libfabric has no memory for a fi_info");
  Fabric* opened_fabric = nullptr;
  check(library, *info, "fi_fabric", library.fabric(info->fabric_attr, &opened_fabric, nullptr));
  fabric.reset(opened_fabric);
  Domain* opened_domain = nullptr;
  check(library, *info, "fi_domain",
        fabric->ops->domain(fabric.get(), info.get(), &opened_domain, nullptr));
  domain.reset(opened_domain);
  AvAttr attributes{};
  attributes.type = kAvTable;
  AddressVector* vector = nullptr;
  check(library, *info, "fi_av_open",
        domain->ops->av_open(domain.get(), &attributes, &vector, nullptr));
  peers.reset(vector);
}

Rail::Rail(const Library& library, OpenNic& nic, size_t nic_index_)
    : nic_index(nic_index_), inject_bytes(nic.info->tx_attr->inject_size),
      operation_count(std::clamp(nic.info->tx_attr->size, size_t{1}, kMostOperations)) {
  Info& info = *nic.info;
  const uint64_t mode = info.mode | info.rx_attr->mode | info.domain_attr->mode;
  posts_receives = (mode & kModeRxCqData) != 0;
  CqAttr attributes{};
  attributes.size = std::max(info.tx_attr->size + info.rx_attr->size, kLeastQueue);
  attributes.format = kCqFormatData;
  attributes.wait_obj = kWaitNone;
  CompletionQueue* opened_queue = nullptr;
  check(library, info, "fi_cq_open",
        nic.domain->ops->cq_open(nic.domain.get(), &attributes, &opened_queue, nullptr));
  queue.reset(opened_queue);
  Endpoint* opened = nullptr;
  check(library, info, "fi_endpoint",
        nic.domain->ops->endpoint(nic.domain.get(), &info, &opened, nullptr));
  endpoint.reset(opened);
  FidOps& ops = *endpoint->fid.ops;
  check(library, info, "fi_ep_bind of the address vector",
        ops.bind(&endpoint->fid, &nic.peers->fid, 0));
  check(library, info, "fi_ep_bind of the completion queue",
        ops.bind(&endpoint->fid, &queue->fid, kTransmit | kRecv));
  check(library, info, "fi_enable", ops.control(&endpoint->fid, kControlEnable, nullptr));
  operations = std::make_unique<Operation[]>(operation_count);
  for (size_t i = operation_count; i > 0; --i) idle.push_back(&operations[i - 1]);
  injected.reserve(operation_count);
  if (!posts_receives) return;
  receive_count = std::clamp(info.rx_attr->size, size_t{1}, kMostReceives);
  receives = std::make_unique<Context2[]>(receive_count);
  for (size_t i = receive_count; i > 0; --i) idle_receives.push_back(&receives[i - 1]);
}

Operation* Rail::operation_of(void* context) const {
  auto* operation = static_cast<Operation*>(context);
  const std::less<> before;
  const bool ours = operation != nullptr && !before(operation, operations.get()) &&
                    before(operation, operations.get() + operation_count);
  return ours ? operation : nullptr;
}

bool Rail::is_receive(const void* context) const {
  const auto* receive = static_cast<const Context2*>(context);
  const std::less<> before;
  return receive != nullptr && receive_count > 0 && !before(receive, receives.get()) &&
         before(receive, receives.get() + receive_count);
}

std::vector<std::byte> Rail::name(const Library& library) const {
  std::vector<std::byte> name(kLongestName);
  size_t bytes = name.size();
  const int result = endpoint->cm->getname(&endpoint->fid, name.data(), &bytes);
  if (result != 0) throw Unavailable(library.failure("fi_getname", result));
  name.resize(bytes);
  return name;
}

uint64_t drawn_key(size_t key_bytes, bool many) {
  constexpr int kOwnBits = 10;  // those of one transport's regions and rails
  static_assert((kMostRegions + 2) * kMostRails <= 1 << kOwnBits);
  const size_t bits = std::min(key_bytes * 8, many ? size_t{32} : size_t{63});
  if (bits <= kOwnBits) return 0;
  std::random_device device;
  const uint64_t drawn = (uint64_t{device()} << 32) | device();
  return drawn >> (64 - bits) >> kOwnBits << kOwnBits;
}

Region register_region(const Library& library, std::vector<std::unique_ptr<OpenNic>>& nics,
                       std::vector<std::unique_ptr<Rail>>& rails, const RegionRequest& request,
                       std::string& error) {
  const bool of_endpoint = nics[0]->needs(kMrEndpoint);
  const size_t count = of_endpoint ? rails.size() : nics.size();
  Region region{.data = request.data, .bytes = request.bytes, .registrations = {}};
  for (size_t i = 0; i < count; ++i) {
    Domain& domain = *nics[of_endpoint ? rails[i]->nic_index : i]->domain;
    MemoryRegion* registered = nullptr;
    int result = domain.mr->reg(&domain.fid, request.data, static_cast<size_t>(request.bytes),
                                kWrite | kRemoteWrite | kSend | kRecv, 0,
                                request.key + (of_endpoint ? i : 0), 0, &registered, nullptr);
    const char* call = "fi_mr_reg";
    if (result == 0) region.registrations.emplace_back(registered);
    if (result == 0 && of_endpoint) {
      Fid& fid = registered->fid;
      call = "fi_mr_bind";
      result = fid.ops->bind(&fid, &rails[i]->endpoint->fid, 0);
      if (result == 0) result = fid.ops->control(&fid, kControlEnable, nullptr);
    }
    if (result != 0) {
      error = library.failure(std::string(call) + " of " + std::to_string(request.bytes) + " bytes",
                              result) +
              ": raise the limit of locked memory (ulimit -l) if the network locks it";
      region.registrations.clear();
      return region;
    }
  }
  return region;
}

}  // namespace fanfold::transport::libfabric
