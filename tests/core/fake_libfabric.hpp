// A libfabric in this process, for the duties of providers that need hardware: registrations of
// endpoints, keys of the provider, receives for immediate data, errors. It moves bytes with memcpy
// when the sender polls.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <ranges>
#include <string>
#include <vector>

#include "transport/libfabric_library.h"

namespace fanfold::transport::libfabric {

// How the fake behaves, set before a test opens it.
struct FakeBehaviour {
  int mr_mode = 0;
  uint64_t mode = 0;
  size_t cq_data_size = 4;
  size_t inject_size = 0;
  size_t tx_size = 16;
  std::vector<std::string> nics = {"nic0"};
  int64_t again = 0;      // so many writes are refused with -EAGAIN
  int refuse_with = 0;    // every write returns this error
  int complete_with = 0;  // every completion is this error
  uint64_t first_provider_key = 0x1000;
  std::string provider = "efa";
  uint32_t version = kNewestApi;    // of the library
  bool pci = false;                 // the NICs are on the PCI bus
  bool hmem = false;                // and are offered for a GPU's memory
  std::string no_hmem_on = "none";  // this one is not
  int no_hmem_with = ENODATA;       // what a search for such NICs returns if there are none
  int hmem_mr_mode = kMrHmem;       // what they ask for then, beside `mr_mode`
  int forbid_cuda_with = 0;         // the option that forbids calls of CUDA returns this error
  int regattr_with = 0;             // a GPU's memory is refused with this error
  int no_hmem_domain_with = 0;      // NICs fail with this error to open for a GPU's memory
  uint16_t port = 0;  // where all its endpoints listen on this host; 0: they have no such address
};

struct FakeEndpoint;

// The objects of all endpoints, as libfabric sees them.
struct Fake {
  static Fake& get() {
    static Fake fake;
    return fake;
  }

  FakeBehaviour behaviour;
  std::vector<FakeEndpoint*> endpoints;  // the name of an endpoint is its index
  struct Key {
    uint64_t key;
    Fid* owner;  // the endpoint if registrations are bound to endpoints, else the domain
    const std::byte* data;
    size_t bytes;
  };
  std::vector<Key> keys;
  uint64_t next_key = 0;
  int64_t open_objects = 0;
  int64_t injected = 0;
  std::vector<void*> descriptors;  // of writes
  struct Search {
    uint32_t version;
    bool hmem;
  };
  std::vector<Search> searches;
  std::vector<std::string> opened_nics;  // of domains
  std::vector<std::string> hmem_nics;    // of domains that were opened for a GPU's memory
  std::vector<bool> cuda_permitted;      // set at endpoints before they are enabled
  // Registrations of `regattr`, and of `reg` with `iface` kHmemSystem.
  struct Registration {
    int iface;
    int device;
    uint64_t access;
    uint64_t flags;
    MrPages pages;  // without a descriptor: -1
  };
  std::vector<Registration> registrations;
};

struct FakeMr {
  MemoryRegion base{};
  FidOps ops{};
  Fake::Key key{};
};

struct FakeCq {
  CompletionQueue base{};
  FidOps fid_ops{};
  CqOps ops{};
  std::deque<CqEntry> entries;
  std::deque<CqError> errors;
};

struct FakeAv {
  AddressVector base{};
  FidOps fid_ops{};
  AvOps ops{};
  std::vector<uint64_t> names;
};

struct FakeEndpoint {
  Endpoint base{};
  FidOps fid_ops{};
  EpOps ops{};
  bool enabled = false;
  CmOps cm{};
  MsgOps msg{};
  RmaOps rma{};
  Fid* domain = nullptr;
  FakeCq* queue = nullptr;
  FakeAv* peers = nullptr;
  uint64_t name = 0;
  std::deque<void*> receives;
};

struct FakeDomain {
  Domain base{};
  FidOps fid_ops{};
  DomainOps ops{};
  MrOps mr{};
};

struct FakeFabric {
  Fabric base{};
  FidOps fid_ops{};
  FabricOps ops{};
};

// An object that counts as open until it is closed.
template <typename Object>
Object* make_fake(FidOps& (*ops_of)(Object&)) {
  auto* object = new Object;
  ++Fake::get().open_objects;
  FidOps& ops = ops_of(*object);
  ops.size = sizeof ops;
  ops.close = [](Fid* fid) {
    --Fake::get().open_objects;
    delete reinterpret_cast<Object*>(fid);
    return 0;
  };
  ops.bind = [](Fid*, Fid*, uint64_t) { return 0; };
  ops.control = [](Fid*, int, void*) { return 0; };
  object->base.fid.ops = &ops;
  return object;
}

// ---- writes -------------------------------------------------------------------------------------

inline void fake_fail(FakeCq& queue, void* context, int error) {
  CqError entry{};
  entry.context = context;
  entry.flags = kRma | kWrite;
  entry.error = error;
  entry.provider_error = 77;
  queue.errors.push_back(entry);
}

struct FakePost {
  const void* data;
  size_t bytes;
  uint64_t immediate;
  FiAddr peer;
  uint64_t address;
  uint64_t key;
};

// Lands a write at once. Returns an error of the target: no such key, or no receive.
inline int fake_land(FakeEndpoint& from, const FakePost& post) {
  Fake& fake = Fake::get();
  FakeEndpoint& to = *fake.endpoints.at(from.peers->names.at(post.peer));
  const bool of_endpoint = (fake.behaviour.mr_mode & kMrEndpoint) != 0;
  const Fid* owner = of_endpoint ? &to.base.fid : to.domain;
  const Fake::Key* found = nullptr;
  for (const Fake::Key& key : fake.keys) {
    if (key.key == post.key && key.owner == owner) found = &key;
  }
  if (found == nullptr) return EACCES;
  const bool is_virtual = (fake.behaviour.mr_mode & kMrVirtAddr) != 0;
  const uint64_t base = is_virtual ? reinterpret_cast<uint64_t>(found->data) : 0;
  if (post.address < base || post.address + post.bytes > base + found->bytes) return EFAULT;
  if (post.bytes > 0) {
    std::memcpy(const_cast<std::byte*>(found->data) + (post.address - base), post.data, post.bytes);
  }
  CqEntry arrival{};
  arrival.flags = kRma | kRemoteWrite | kRemoteCqData;
  arrival.immediate = post.immediate;
  if ((fake.behaviour.mode & kModeRxCqData) != 0) {
    if (to.receives.empty()) return EAGAIN;
    arrival.context = to.receives.front();
    to.receives.pop_front();
  }
  to.queue->entries.push_back(arrival);
  return 0;
}

inline ssize_t fake_write(FakeEndpoint& from, const FakePost& post, void* context, bool inject) {
  Fake& fake = Fake::get();
  if (fake.behaviour.again > 0) {
    --fake.behaviour.again;
    return -EAGAIN;
  }
  if (fake.behaviour.refuse_with != 0) return -fake.behaviour.refuse_with;
  int error = fake.behaviour.complete_with;
  if (error == 0) error = fake_land(from, post);
  if (error == EAGAIN) return -EAGAIN;
  fake.injected += inject ? 1 : 0;
  // The provider overwrites the context that its caller lends.
  if (context != nullptr && (fake.behaviour.mode & kModeContext2) != 0) {
    std::memset(context, 0xff, sizeof(Context2));
  }
  if (error != 0) {
    fake_fail(*from.queue, context, error);
  } else if (!inject) {
    CqEntry completion{};
    completion.context = context;
    completion.flags = kRma | kWrite;
    from.queue->entries.push_back(completion);
  }
  return 0;
}

// ---- making objects -----------------------------------------------------------------------------

inline ssize_t fake_cq_read(CompletionQueue* queue, void* entries, size_t count) {
  auto& fake = *reinterpret_cast<FakeCq*>(queue);
  if (!fake.errors.empty()) return -kErrorAvailable;
  size_t read = 0;
  for (; read < count && !fake.entries.empty(); ++read) {
    static_cast<CqEntry*>(entries)[read] = fake.entries.front();
    fake.entries.pop_front();
  }
  return read > 0 ? static_cast<ssize_t>(read) : -EAGAIN;
}

inline int fake_cq_open(Domain*, CqAttr*, CompletionQueue** opened, void*) {
  auto* queue = make_fake<FakeCq>([](FakeCq& made) -> FidOps& { return made.fid_ops; });
  queue->base.ops = &queue->ops;
  queue->ops.read = fake_cq_read;
  queue->ops.readerr = [](CompletionQueue* base, CqError* error, uint64_t) -> ssize_t {
    auto& fake = *reinterpret_cast<FakeCq*>(base);
    if (fake.errors.empty()) return -EAGAIN;
    *error = fake.errors.front();
    fake.errors.pop_front();
    return 1;
  };
  queue->ops.strerror = [](CompletionQueue*, int, const void*, char*, size_t) {
    return "the fake's own reason";
  };
  *opened = &queue->base;
  return 0;
}

inline int fake_av_open(Domain*, AvAttr*, AddressVector** opened, void*) {
  auto* vector = make_fake<FakeAv>([](FakeAv& made) -> FidOps& { return made.fid_ops; });
  vector->base.ops = &vector->ops;
  vector->ops.insert = [](AddressVector* base, const void* address, size_t, FiAddr* found, uint64_t,
                          void*) {
    auto& names = reinterpret_cast<FakeAv*>(base)->names;
    uint64_t name = 0;
    const auto* bytes = static_cast<const char*>(address);
    std::memcpy(&name, bytes + (Fake::get().behaviour.port == 0 ? 0 : 8), sizeof name);
    *found = names.size();
    names.push_back(name);
    return 1;
  };
  *opened = &vector->base;
  return 0;
}

inline int fake_bind_endpoint(Fid* endpoint, Fid* other, uint64_t flags) {
  auto& fake = *reinterpret_cast<FakeEndpoint*>(endpoint);
  if (flags == 0) {
    fake.peers = reinterpret_cast<FakeAv*>(other);
  } else {
    fake.queue = reinterpret_cast<FakeCq*>(other);
  }
  return 0;
}

inline int fake_endpoint(Domain* domain, Info*, Endpoint** opened, void*) {
  auto* made = make_fake<FakeEndpoint>([](FakeEndpoint& e) -> FidOps& { return e.fid_ops; });
  made->fid_ops.bind = fake_bind_endpoint;
  made->fid_ops.control = [](Fid* fid, int, void*) {
    reinterpret_cast<FakeEndpoint*>(fid)->enabled = true;
    return 0;
  };
  made->ops.setopt = [](Fid* fid, int level, int name, const void* value, size_t bytes) {
    if (level != kOptEndpoint || name != kOptCudaApiPermitted) return -ENOPROTOOPT;
    if (reinterpret_cast<FakeEndpoint*>(fid)->enabled || bytes != sizeof(bool)) return -EINVAL;
    if (Fake::get().behaviour.forbid_cuda_with != 0) {
      return -Fake::get().behaviour.forbid_cuda_with;
    }
    Fake::get().cuda_permitted.push_back(*static_cast<const bool*>(value));
    return 0;
  };
  made->domain = &domain->fid;
  made->name = Fake::get().endpoints.size();
  Fake::get().endpoints.push_back(made);
  made->cm.getname = [](Fid* fid, void* address, size_t* bytes) {
    const uint64_t name = reinterpret_cast<FakeEndpoint*>(fid)->name;
    const uint16_t port = Fake::get().behaviour.port;
    sockaddr_in socket{};
    socket.sin_family = AF_INET;
    socket.sin_port = htons(port);
    socket.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    std::memcpy(&socket.sin_zero, &name, sizeof name);
    *bytes = port == 0 ? sizeof name : sizeof socket;
    std::memcpy(address, port == 0 ? static_cast<const void*>(&name) : &socket, *bytes);
    return 0;
  };
  made->msg.recv = [](Endpoint* endpoint, void*, size_t, void*, FiAddr, void* context) -> ssize_t {
    reinterpret_cast<FakeEndpoint*>(endpoint)->receives.push_back(context);
    return 0;
  };
  made->rma.writedata = [](Endpoint* endpoint, const void* data, size_t bytes, void* descriptor,
                           uint64_t immediate, FiAddr peer, uint64_t address, uint64_t key,
                           void* context) {
    Fake::get().descriptors.push_back(descriptor);
    return fake_write(*reinterpret_cast<FakeEndpoint*>(endpoint),
                      {data, bytes, immediate, peer, address, key}, context, false);
  };
  made->rma.injectdata = [](Endpoint* endpoint, const void* data, size_t bytes, uint64_t immediate,
                            FiAddr peer, uint64_t address, uint64_t key) {
    return fake_write(*reinterpret_cast<FakeEndpoint*>(endpoint),
                      {data, bytes, immediate, peer, address, key}, nullptr, true);
  };
  made->base.ops = &made->ops;
  made->base.cm = &made->cm;
  made->base.msg = &made->msg;
  made->base.rma = &made->rma;
  *opened = &made->base;
  return 0;
}

inline int fake_register(Fid* domain, const void* data, size_t bytes, uint64_t requested_key,
                         MemoryRegion** opened) {
  Fake& fake = Fake::get();
  const bool chooses = (fake.behaviour.mr_mode & kMrProvKey) != 0;
  const uint64_t key =
      chooses ? fake.behaviour.first_provider_key + fake.next_key++ : requested_key;
  for (const Fake::Key& other : fake.keys) {
    if (!chooses && other.key == key && other.owner == domain) return -ENOKEY;
  }
  auto* region = make_fake<FakeMr>([](FakeMr& made) -> FidOps& { return made.ops; });
  region->key = {key, domain, static_cast<const std::byte*>(data), bytes};
  region->base.key = key;
  region->base.descriptor = region;
  // Bound to an endpoint, only that one knows the key.
  region->ops.bind = [](Fid* fid, Fid* endpoint, uint64_t) {
    auto& bound = *reinterpret_cast<FakeMr*>(fid);
    Fake::get().keys.push_back(bound.key);
    Fake::get().keys.back().owner = endpoint;
    return 0;
  };
  fake.keys.push_back(region->key);
  *opened = &region->base;
  return 0;
}

inline int fake_mr_reg(Fid* domain, const void* data, size_t bytes, uint64_t access, uint64_t,
                       uint64_t requested_key, uint64_t flags, MemoryRegion** opened, void*) {
  Fake::get().registrations.push_back({kHmemSystem, 0, access, flags, {-1, 0, bytes, nullptr}});
  return fake_register(domain, data, bytes, requested_key, opened);
}

inline int fake_mr_regattr(Fid* domain, const MrAttr* attributes, uint64_t flags,
                           MemoryRegion** opened) {
  if (Fake::get().behaviour.regattr_with != 0) return -Fake::get().behaviour.regattr_with;
  if (attributes->count != 1 || attributes->offset != 0) return -EINVAL;
  MrPages pages{-1, 0, 0, nullptr};
  if ((flags & kMrDmabuf) != 0) {
    pages = *attributes->pages;
  } else {
    pages.bytes = attributes->ranges->iov_len;
    pages.base = attributes->ranges->iov_base;
  }
  Fake::get().registrations.push_back(
      {attributes->iface, attributes->device.cuda, attributes->access, flags, pages});
  return fake_register(domain, pages.base, pages.bytes, attributes->requested_key, opened);
}

inline int fake_domain(Fabric*, Info* info, Domain** opened, void*) {
  Fake::get().opened_nics.emplace_back(info->domain_attr->name);
  if ((info->caps & kHmem) != 0) {
    Fake::get().hmem_nics.emplace_back(info->domain_attr->name);
    const int error = Fake::get().behaviour.no_hmem_domain_with;
    if (error != 0) return -error;
  }
  auto* domain = make_fake<FakeDomain>([](FakeDomain& made) -> FidOps& { return made.fid_ops; });
  domain->ops.av_open = fake_av_open;
  domain->ops.cq_open = fake_cq_open;
  domain->ops.endpoint = fake_endpoint;
  domain->mr.reg = fake_mr_reg;
  domain->mr.regattr = fake_mr_regattr;
  domain->base.ops = &domain->ops;
  domain->base.mr = &domain->mr;
  *opened = &domain->base;
  return 0;
}

// ---- the library --------------------------------------------------------------------------------

// A fi_info with all that it points to.
struct FakeInfo {
  Info base{};
  TxAttr tx{};
  RxAttr rx{};
  EpAttr ep{};
  DomainAttr domain{};
  FabricAttr fabric{};
  Nic card{};
  BusAttr bus{};
  std::string nic;
  std::string provider = Fake::get().behaviour.provider;
};

inline Info* fake_info(const std::string& nic, bool hmem = false) {
  auto* made = new FakeInfo;
  const FakeBehaviour& behaviour = Fake::get().behaviour;
  made->nic = nic;
  made->base.mode = behaviour.mode;
  made->base.addr_format = behaviour.port == 0 ? 0 : kSockaddrIn;
  made->base.tx_attr = &made->tx;
  made->base.rx_attr = &made->rx;
  made->base.ep_attr = &made->ep;
  made->base.domain_attr = &made->domain;
  made->base.fabric_attr = &made->fabric;
  made->tx.size = behaviour.tx_size;
  made->tx.inject_size = behaviour.inject_size;
  made->rx.size = 8;
  made->ep.type = kEpRdm;
  made->ep.max_msg_size = size_t{1} << 40;
  made->domain.mr_mode = behaviour.mr_mode;
  made->domain.cq_data_size = behaviour.cq_data_size;
  made->domain.name = made->nic.data();
  made->fabric.prov_name = made->provider.data();
  made->base.nic = &made->card;
  made->card.bus = &made->bus;
  made->bus.type = behaviour.pci ? kBusPci : 0;
  if (hmem) {
    made->base.caps |= kHmem;
    made->domain.mr_mode |= behaviour.hmem_mr_mode;
  }
  return &made->base;
}

inline void fake_free(Info* info) {
  while (info != nullptr) {
    Info* next = info->next;
    auto* made = reinterpret_cast<FakeInfo*>(info);
    // A caller's own name comes from strdup.
    if (made->fabric.prov_name != made->provider.data()) std::free(made->fabric.prov_name);
    delete made;
    info = next;
  }
}

inline int fake_getinfo(uint32_t version, const char*, const char*, uint64_t, const Info* hints,
                        Info** found) {
  const bool hmem = (hints->caps & kHmem) != 0;
  Fake::get().searches.push_back({version, hmem});
  *found = nullptr;
  if (hmem && !Fake::get().behaviour.hmem) return -Fake::get().behaviour.no_hmem_with;
  for (const std::string& nic : Fake::get().behaviour.nics | std::views::reverse) {
    if (hmem && nic == Fake::get().behaviour.no_hmem_on) continue;
    Info* info = fake_info(nic, hmem);
    info->fabric_attr->api_version = version;
    info->next = *found;
    *found = info;
  }
  return 0;
}

inline Info* fake_dupinfo(const Info* info) {
  if (info == nullptr) return fake_info("");
  Info* copy = fake_info(info->domain_attr->name, (info->caps & kHmem) != 0);
  copy->fabric_attr->api_version = info->fabric_attr->api_version;
  return copy;
}

inline int fake_fabric(FabricAttr* attributes, Fabric** opened, void*) {
  auto* fabric = make_fake<FakeFabric>([](FakeFabric& made) -> FidOps& { return made.fid_ops; });
  fabric->ops.domain = fake_domain;
  fabric->base.ops = &fabric->ops;
  fabric->base.api_version = attributes->api_version;
  *opened = &fabric->base;
  return 0;
}

// Starts afresh with `behaviour`.
inline const Library& fake_library(const FakeBehaviour& behaviour) {
  static const Library library{
      .version = [] { return Fake::get().behaviour.version; },
      .getinfo = fake_getinfo,
      .freeinfo = fake_free,
      .dupinfo = fake_dupinfo,
      .fabric = fake_fabric,
      .strerror = [](int error) { return error == EACCES ? "no access" : "an error"; },
      .path = "fake"};
  Fake& fake = Fake::get();
  fake = Fake{};
  fake.behaviour = behaviour;
  return library;
}

}  // namespace fanfold::transport::libfabric
