#include "transport/libfabric_rail.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <random>

#include "base/error.h"
#include "transport/libfabric.h"
#include "transport/libfabric_gpu_memory.h"

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

// The provider shm calls an endpoint's file in /dev/shm after the process and a count. Killed
// processes leave such files, and a later process with the same number, or one of another container
// that shares /dev/shm, cannot enable its endpoint then ("Device or resource busy"). So each gets a
// name of its own.
void name_uniquely(const Library& library, const Info& info, Endpoint& endpoint) {
  if (std::string_view(info.fabric_attr->prov_name) != "shm") return;
  std::random_device device;
  std::string name = "fi_shm://fanfold-" + std::to_string(getpid()) + "-" +
                     std::to_string((uint64_t{device()} << 32) | device());
  check(library, info, "fi_setname",
        endpoint.cm->setname(&endpoint.fid, name.data(), name.size() + 1));
}

// One attempt to register a range, in the words of a message: CALL 4096 bytes OF_WHAT fails ADVICE.
struct Registration {
  int result;
  MemoryRegion* region;
  std::string call;
  std::string of_what;
  std::string advice;
};

Registration register_with(OpenNic& nic, const RegionRequest& request, uint64_t key) {
  if (request.gpu != nullptr) {
    const GpuRegistration made = register_pages(nic, *request.gpu, key);
    return {.result = made.result,
            .region = made.region,
            .call = "fi_mr_regattr of ",
            .of_what = " of GPU " + std::to_string(request.gpu->device) + " " + made.means,
            .advice =
                ": the drivers of the GPU and of the NIC must both know dmabuf, or the kernel "
                "module nvidia-peermem must be loaded"};
  }
  Registration made{.result = 0,
                    .region = nullptr,
                    .call = "fi_mr_reg of ",
                    .of_what = {},
                    .advice =
                        ": raise the limit of locked memory (ulimit -l) if the network locks "
                        "it"};
  Domain& domain = *nic.domain;
  made.result = domain.mr->reg(&domain.fid, request.data, static_cast<size_t>(request.bytes),
                               kRegionAccess, 0, key, 0, &made.region, nullptr);
  return made;
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
  if ((info.caps & kHmem) != 0) why_no_gpu_memory = forbid_cuda(library, info, *endpoint);
  name_uniquely(library, info, *endpoint);
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

bool Rail::has_pending(int32_t peer) const {
  return std::any_of(pending.begin(), pending.end(),
                     [&](const Operation* operation) { return operation->write.peer == peer; });
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
  Region region{.data = request.data,
                .bytes = request.bytes,
                .of_gpu = request.gpu != nullptr,
                .registrations = {}};
  for (size_t i = 0; i < count; ++i) {
    OpenNic& nic = *nics[of_endpoint ? rails[i]->nic_index : i];
    Registration made = register_with(nic, request, request.key + (of_endpoint ? i : 0));
    if (made.result == 0) region.registrations.emplace_back(made.region);
    if (made.result == 0 && of_endpoint) {
      Fid& fid = made.region->fid;
      made.call = "fi_mr_bind of ";
      made.result = fid.ops->bind(&fid, &rails[i]->endpoint->fid, 0);
      if (made.result == 0) made.result = fid.ops->control(&fid, kControlEnable, nullptr);
    }
    if (made.result != 0) {
      error = library.failure(made.call + std::to_string(request.bytes) + " bytes" + made.of_what,
                              made.result) +
              made.advice;
      region.registrations.clear();
      return region;
    }
  }
  return region;
}

}  // namespace fanfold::transport::libfabric
