#include "transport/libfabric.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "base/cores.h"
#include "base/error.h"
#include "transport/libfabric_address.h"
#include "transport/libfabric_gpu_memory.h"
#include "transport/libfabric_peer.h"
#include "transport/libfabric_rail.h"
#include "transport/socket_probe.h"

namespace fanfold::transport {
namespace {

using libfabric::AddressHead;
using libfabric::AddressRail;
using libfabric::CqEntry;
using libfabric::CqError;
using libfabric::drawn_key;
using libfabric::FiAddr;
using libfabric::Info;
using libfabric::kAddressMagic;
using libfabric::key_of;
using libfabric::kMostKeys;
using libfabric::kMostNameBytes;
using libfabric::Library;
using libfabric::OpenNic;
using libfabric::Operation;
using libfabric::packed;
using libfabric::Peer;
using libfabric::PeerRail;
using libfabric::Rail;
using libfabric::Region;

constexpr int64_t kMostWriteBytes = int64_t{1} << 30;
constexpr size_t kEventsPerRead = 64;
constexpr uint32_t kPollsPerLook = 16;  // at probes, each of which costs a system call

class Libfabric final : public Transport {
 public:
  Libfabric(const Library& library, const LibfabricOptions& options);

  std::string_view name() const override { return name_; }
  Limits limits() const override { return limits_; }
  Address address() const override;
  Code connect(int32_t peer, const Address& address) override;
  std::string path(int32_t peer) const override;
  std::vector<int32_t> cores() const override { return cores_of_node(numa_node_); }
  LocalMemory register_memory(std::byte* data, int64_t bytes) override {
    return add_region(data, bytes, nullptr);
  }
  std::string why_no_gpu_memory() const override { return why_no_gpu_memory_; }
  LocalMemory register_gpu_memory(const GpuMemory& memory) override;
  RemoteMemory remote(LocalMemory memory) const override;
  Code write(const Write& write) override;
  bool probe(int32_t peer) override;
  int32_t poll(std::span<Event> events) override;
  const std::string& error() const override { return error_; }

 private:
  // Where a write takes its bytes from and puts them to, in libfabric's terms.
  struct Places {
    const std::byte* source;
    void* descriptor;
    uint64_t target;
    uint64_t key;
    bool of_gpu;  // the source
  };

  Code fail(std::string why) {
    error_ = std::move(why);
    return Code::kFailed;
  }
  LocalMemory add_region(std::byte* data, int64_t bytes, const GpuMemory* gpu);
  // Empty if `write` is within its bounds.
  std::string refusal(const Write& write) const;
  Places places(const Write& write) const;
  size_t unit(size_t rail) const { return of_endpoint_ ? rail : rails_[rail]->nic_index; }
  bool virtual_addresses() const { return nics_[0]->needs(libfabric::kMrVirtAddr); }
  bool known(LocalMemory memory) const {
    return memory.index >= 0 && std::cmp_less(memory.index, regions_.size());
  }
  bool connected(int32_t peer) const {
    return peer >= 0 && std::cmp_less(peer, peers_.size()) &&
           !peers_[static_cast<size_t>(peer)].rails.empty();
  }

  ssize_t post(Rail& rail, Operation& operation);
  void post_pending(Rail& rail);
  void post_receives(Rail& rail);
  void poll_rail(int32_t index, std::span<Event> events, int32_t& count);
  void accept(int32_t index, const CqEntry& entry, std::span<Event> events, int32_t& count);
  void read_error(int32_t index);
  void read_probes();
  void explain();
  void fail_post(const Write& write, int64_t result);
  void fail_peer(int32_t peer, const std::string& why);
  void fail_all(const std::string& why);
  void report_failure(std::span<Event> events, int32_t& count);

  const Library& library_;
  std::string name_;
  std::string error_;
  std::string why_no_gpu_memory_;
  Limits limits_{};
  std::vector<std::unique_ptr<OpenNic>> nics_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::vector<Region> regions_;  // closed before the endpoints that they may be bound to
  Region landing_;
  std::array<std::byte, 64> landing_bytes_{};
  std::vector<Peer> peers_;
  bool sockets_ = false;                   // the provider goes over them
  std::map<int32_t, SocketProbe> probes_;  // of peers, until they are answered
  uint32_t polls_asking_ = 0;
  std::string unexplained_;   // an error of an unknown peer, until the probes are answered
  bool of_endpoint_ = false;  // registrations belong to an endpoint
  bool many_keys_ = false;    // one region has several keys
  uint64_t first_key_ = 0;
  bool failures_to_report_ = false;
  std::string lost_;  // why the whole transport failed
  int32_t next_rail_ = 0;
  int32_t numa_node_ = -1;  // of the first NIC
};

Libfabric::Libfabric(const Library& library, const LibfabricOptions& options) : library_(library) {
  const libfabric::InfoList found = libfabric::find_endpoints(library, "");
  libfabric::Request request = options.request;
  if (request.numa_node < 0) request.numa_node = libfabric::numa_node_of_thread();
  const std::vector<libfabric::Network> networks = libfabric::describe(found.get());
  const libfabric::Choice choice = libfabric::choose(networks, request);
  numa_node_ = networks[choice.networks[0]].numa_node;
  libfabric::OpenNics open =
      libfabric::open_nics(library, found.get(), choice.networks,
                           request.gpu_memory ? std::string() : options.why_no_gpu_memory);
  nics_ = std::move(open.nics);
  why_no_gpu_memory_ = std::move(open.why_no_gpu_memory);
  const Info& first = *nics_[0]->info;
  name_ = std::string("libfabric:") + first.fabric_attr->prov_name;
  limits_.write_bytes = kMostWriteBytes;
  limits_.writes = INT32_MAX;
  limits_.rails = static_cast<int32_t>(nics_.size()) * options.endpoints_per_nic;
  if (limits_.rails > kMostRails) {
    throw BadArgument("endpoints_per_nic", std::to_string(options.endpoints_per_nic),
                      "at most " + std::to_string(kMostRails) + " for all NICs");
  }
  // Rail r is on NIC r % NICs, so that the first rails use all NICs.
  for (size_t rail = 0; std::cmp_less(rail, limits_.rails); ++rail) {
    const size_t nic = rail % nics_.size();
    rails_.push_back(std::make_unique<Rail>(library, *nics_[nic], nic));
    const auto writes = static_cast<int32_t>(rails_.back()->operation_count);
    limits_.writes = std::min(limits_.writes, writes);
    if (why_no_gpu_memory_.empty()) why_no_gpu_memory_ = rails_.back()->why_no_gpu_memory;
  }
  for (const auto& nic : nics_) {
    const size_t most = std::min(nic->info->ep_attr->max_msg_size, size_t{kMostWriteBytes});
    limits_.write_bytes = std::min(limits_.write_bytes, static_cast<int64_t>(most));
  }
  of_endpoint_ = nics_[0]->needs(libfabric::kMrEndpoint);
  sockets_ = libfabric::over_sockets(first.fabric_attr->prov_name);
  const bool several = (of_endpoint_ ? rails_.size() : nics_.size()) > 1;
  many_keys_ = several && (of_endpoint_ || nics_[0]->needs(libfabric::kMrProvKey));
  first_key_ = drawn_key(first.domain_attr->mr_key_size, many_keys_);
  landing_ = register_region(library_, nics_, rails_,
                             {.data = landing_bytes_.data(),
                              .bytes = static_cast<int64_t>(landing_bytes_.size()),
                              .key = first_key_},
                             error_);
  if (landing_.registrations.empty()) throw Unavailable(name_ + ": " + error_);
  if (many_keys_ && landing_.registrations.size() > kMostKeys) {
    throw Unavailable(name_ + " has " + std::to_string(landing_.registrations.size()) +
                      " keys for each range of memory, but at most 2 are served: use one or two "
                      "NICs or endpoints for each transport");
  }
  for (const auto& rail : rails_) post_receives(*rail);
}

// ---- peers and memory ---------------------------------------------------------------------------

Address Libfabric::address() const {
  AddressHead head{};
  head.magic = kAddressMagic;
  const Info& info = *nics_[0]->info;
  std::strncpy(head.provider.data(), info.fabric_attr->prov_name, head.provider.size() - 1);
  head.addr_format = info.addr_format;
  head.rails = limits_.rails;
  Address address(sizeof head + rails_.size() * sizeof(AddressRail));
  std::memcpy(address.data(), &head, sizeof head);
  for (size_t i = 0; i < rails_.size(); ++i) {
    AddressRail part{};
    const std::vector<std::byte> name = rails_[i]->name(library_);
    if (name.size() > kMostNameBytes) {
      throw Unavailable(name_ + " names its endpoint with " + std::to_string(name.size()) +
                        " bytes, but at most " + std::to_string(kMostNameBytes) +
                        " are served: choose another provider");
    }
    part.name_bytes = name.size();
    std::copy(name.begin(), name.end(), part.name.begin());
    part.landing = virtual_addresses() ? reinterpret_cast<uint64_t>(landing_.data) : 0;
    part.landing_key = landing_.registrations[unit(i)]->key;
    std::memcpy(address.data() + sizeof head + i * sizeof part, &part, sizeof part);
  }
  return address;
}

Code Libfabric::connect(int32_t peer, const Address& address) {
  const std::string who = "peer " + std::to_string(peer);
  if (peer < 0) return fail("the number of a peer is " + std::to_string(peer) + ", below 0");
  AddressHead head{};
  const size_t size = sizeof head + rails_.size() * sizeof(AddressRail);
  if (address.size() != size) {
    return fail(name_ + ": the address of " + who + " has " + std::to_string(address.size()) +
                " bytes instead of " + std::to_string(size) +
                ": give all ranks the same number of rails and the same version of Fanfold");
  }
  std::memcpy(&head, address.data(), sizeof head);
  const Info& info = *nics_[0]->info;
  head.provider.back() = '\0';
  const bool alike = head.magic == kAddressMagic && head.rails == limits_.rails &&
                     std::string_view(head.provider.data()) == info.fabric_attr->prov_name &&
                     head.addr_format == info.addr_format;
  if (!alike) {
    return fail(name_ + " cannot reach " + who + ", which opened " +
                std::string(head.provider.data()) + " with address format " +
                std::to_string(head.addr_format) + " instead of " +
                std::to_string(info.addr_format) + ": name the same provider on all ranks");
  }
  if (std::cmp_greater_equal(peer, peers_.size())) peers_.resize(static_cast<size_t>(peer) + 1);
  Peer& entry = peers_[static_cast<size_t>(peer)];
  if (!entry.rails.empty()) return fail(who + " is connected already");
  std::vector<PeerRail> rails;
  for (size_t i = 0; i < rails_.size(); ++i) {
    AddressRail part{};
    std::memcpy(&part, address.data() + sizeof head + i * sizeof part, sizeof part);
    FiAddr found = libfabric::kAddrNotAvailable;
    libfabric::AddressVector& vector = *nics_[rails_[i]->nic_index]->peers;
    const int result = vector.ops->insert(&vector, part.name.data(), 1, &found, 0, nullptr);
    if (result != 1) {
      return fail(
          library_.failure(name_ + ": fi_av_insert of " + who, result < 0 ? result : -EINVAL));
    }
    if (i == 0 && sockets_) {
      entry.name = libfabric::socket_text(head.addr_format, part.name);
      entry.socket.assign(part.name.begin(),
                          part.name.begin() + static_cast<ptrdiff_t>(part.name_bytes));
    }
    rails.push_back({found, part.landing, part.landing_key});
  }
  entry.rails = std::move(rails);
  return Code::kOk;
}

std::string Libfabric::path(int32_t peer) const {
  if (!connected(peer)) return {};
  const std::string& to = peers_[static_cast<size_t>(peer)].name;
  if (to.empty()) return {};
  const Info& info = *nics_[0]->info;
  const std::string from = libfabric::socket_text(info.addr_format, rails_[0]->name(library_));
  return std::string(info.domain_attr->name) + ", from " + from + " to " + to;
}

LocalMemory Libfabric::register_gpu_memory(const GpuMemory& memory) {
  if (why_no_gpu_memory_.empty()) return add_region(memory.data, memory.bytes, &memory);
  fail("a GPU's memory cannot be registered with " + name_ + ": " + why_no_gpu_memory_);
  return {};
}

LocalMemory Libfabric::add_region(std::byte* data, int64_t bytes, const GpuMemory* gpu) {
  if (data == nullptr || bytes < 1) {
    fail("memory of " + std::to_string(bytes) +
         " bytes cannot be registered: at least 1 is needed");
    return {};
  }
  if (std::cmp_greater_equal(regions_.size(), kMostRegions)) {
    fail("at most " + std::to_string(kMostRegions) + " ranges can be registered");
    return {};
  }
  const uint64_t key = first_key_ + (regions_.size() + 1) * uint64_t{kMostRails};
  std::string why;
  Region region = register_region(library_, nics_, rails_,
                                  {.data = data, .bytes = bytes, .key = key, .gpu = gpu}, why);
  if (region.registrations.empty()) {
    fail(name_ + ": " + why);
    return {};
  }
  for (const auto& registration : region.registrations) {
    if (many_keys_ && registration->key >> 32 != 0) {
      fail(name_ +
           " gives keys of more than 32 bits, of which only one is served: use one NIC and "
           "one endpoint for each transport");
      return {};
    }
  }
  regions_.push_back(std::move(region));
  return {static_cast<int32_t>(regions_.size()) - 1};
}

RemoteMemory Libfabric::remote(LocalMemory memory) const {
  if (!known(memory)) return {};
  const Region& region = regions_[static_cast<size_t>(memory.index)];
  return {.base = virtual_addresses() ? reinterpret_cast<uint64_t>(region.data) : 0,
          .key = many_keys_ ? packed(region) : region.registrations[0]->key,
          .bytes = region.bytes};
}

// ---- writes -------------------------------------------------------------------------------------

std::string Libfabric::refusal(const Write& write) const {
  const auto outside = [](const char* what, int64_t value, int64_t bound) {
    return std::string("a write's ") + what + " is " + std::to_string(value) +
           ", but must be from 0 to " + std::to_string(bound);
  };
  if (!connected(write.peer)) {
    return "a write's peer " + std::to_string(write.peer) + " is not connected";
  }
  if (write.rail < 0 || write.rail >= limits_.rails) {
    return outside("rail", write.rail, limits_.rails - 1);
  }
  if (write.bytes < 0 || write.bytes > limits_.write_bytes) {
    return outside("number of bytes", write.bytes, limits_.write_bytes);
  }
  if (write.bytes == 0) return {};
  if (!known(write.source)) return "a write's source is not registered";
  const int64_t room = regions_[static_cast<size_t>(write.source.index)].bytes - write.bytes;
  if (write.source_offset < 0 || write.source_offset > room) {
    return outside("source offset", write.source_offset, room);
  }
  if (write.target_offset < 0 || write.target_offset > write.target.bytes - write.bytes) {
    return outside("target offset", write.target_offset, write.target.bytes - write.bytes);
  }
  return {};
}

Libfabric::Places Libfabric::places(const Write& write) const {
  const auto rail = static_cast<size_t>(write.rail);
  const PeerRail& to = peers_[static_cast<size_t>(write.peer)].rails[rail];
  if (write.bytes == 0) {
    return {landing_.data, landing_.registrations[unit(rail)]->descriptor, to.landing,
            to.landing_key, false};
  }
  const Region& region = regions_[static_cast<size_t>(write.source.index)];
  return {region.data + write.source_offset, region.registrations[unit(rail)]->descriptor,
          write.target.base + static_cast<uint64_t>(write.target_offset),
          many_keys_ ? key_of(write.target.key, unit(rail)) : write.target.key, region.of_gpu};
}

Code Libfabric::write(const Write& write) {
  if (!lost_.empty()) return fail(lost_);
  if (std::string why = refusal(write); !why.empty()) return fail(std::move(why));
  if (const Peer& peer = peers_[static_cast<size_t>(write.peer)]; !peer.failure.empty()) {
    return fail(peer.failure);
  }
  Rail& rail = *rails_[static_cast<size_t>(write.rail)];
  if (rail.idle.empty() || rail.has_pending(write.peer)) return Code::kAgain;
  Operation* operation = rail.idle.back();
  operation->write = write;
  const ssize_t result = post(rail, *operation);
  if (result == -EAGAIN) {
    rail.pending.push_back(operation);
  } else if (result != 0) {
    fail_post(write, result);
    return fail(peers_[static_cast<size_t>(write.peer)].failure);
  }
  rail.idle.pop_back();
  return Code::kOk;
}

ssize_t Libfabric::post(Rail& rail, Operation& operation) {
  const Write& write = operation.write;
  const Places at = places(write);
  const auto rail_index = static_cast<size_t>(write.rail);
  const FiAddr to = peers_[static_cast<size_t>(write.peer)].rails[rail_index].address;
  libfabric::Endpoint* endpoint = rail.endpoint.get();
  const auto bytes = static_cast<size_t>(write.bytes);
  // The CPU copies what is injected, so it must not be a GPU's memory.
  const bool injects = rail.inject_bytes > 0 && bytes <= rail.inject_bytes && !at.of_gpu;
  if (!injects || write.reported) {
    return endpoint->rma->writedata(endpoint, at.source, bytes, at.descriptor, write.immediate, to,
                                    at.target, at.key, &operation);
  }
  // An injected write has no completion: its source is free when the call returns. If it fails, its
  // peer is not known.
  const ssize_t result =
      endpoint->rma->injectdata(endpoint, at.source, bytes, write.immediate, to, at.target, at.key);
  if (result == 0) rail.injected.push_back(&operation);
  return result;
}

void Libfabric::post_pending(Rail& rail) {
  std::erase_if(rail.pending, [&](Operation* operation) {
    const ssize_t result = post(rail, *operation);
    if (result == -EAGAIN) return false;
    if (result != 0) {
      fail_post(operation->write, result);
      rail.idle.push_back(operation);
    }
    return true;
  });
}

// ---- events -------------------------------------------------------------------------------------

int32_t Libfabric::poll(std::span<Event> events) {
  int32_t count = 0;
  if (!probes_.empty() && ++polls_asking_ % kPollsPerLook == 0) read_probes();
  report_failure(events, count);
  for (int32_t i = 0; i < limits_.rails && lost_.empty(); ++i) {
    poll_rail((next_rail_ + i) % limits_.rails, events, count);
  }
  // Another rail comes first next time, so that none starves when `events` is short.
  next_rail_ = (next_rail_ + 1) % limits_.rails;
  if (count == 0) report_failure(events, count);
  return count;
}

void Libfabric::poll_rail(int32_t index, std::span<Event> events, int32_t& count) {
  Rail& rail = *rails_[static_cast<size_t>(index)];
  while (!rail.injected.empty() && std::cmp_less(count, events.size())) {
    events[static_cast<size_t>(count++)] = {.kind = EventKind::kCompletion,
                                            .rail = index,
                                            .peer = -1,
                                            .immediate = 0,
                                            .context = rail.injected.back()->write.context};
    rail.idle.push_back(rail.injected.back());
    rail.injected.pop_back();
  }
  post_receives(rail);
  if (!rail.pending.empty()) post_pending(rail);
  std::array<CqEntry, kEventsPerRead> entries;
  const size_t room = std::min(events.size() - static_cast<size_t>(count), entries.size());
  // Without room the read drives the provider all the same.
  const ssize_t result = rail.queue->ops->read(rail.queue.get(), entries.data(), room);
  if (result > 0) {
    for (size_t i = 0; std::cmp_less(i, result); ++i) {
      accept(index, entries[i], events, count);
    }
  } else if (result == -libfabric::kErrorAvailable) {
    read_error(index);
  } else if (result < 0 && result != -EAGAIN) {
    fail_all(library_.failure(name_ + ": fi_cq_read", result));
  }
}

void Libfabric::accept(int32_t index, const CqEntry& entry, std::span<Event> events,
                       int32_t& count) {
  Rail& rail = *rails_[static_cast<size_t>(index)];
  Event event{.kind = EventKind::kArrival, .rail = index, .peer = -1, .immediate = 0, .context = 0};
  if ((entry.flags & libfabric::kRemoteCqData) != 0 && (entry.flags & libfabric::kWrite) == 0) {
    event.immediate = static_cast<uint32_t>(entry.immediate);
    if (rail.is_receive(entry.context)) {
      rail.idle_receives.push_back(static_cast<libfabric::Context2*>(entry.context));
    }
  } else if (Operation* operation = rail.operation_of(entry.context)) {
    event.kind = EventKind::kCompletion;
    event.context = operation->write.context;
    event.peer = -1;
    rail.idle.push_back(operation);
  } else {
    fail_all(name_ + " reports a completion that belongs to no write (flags " +
             std::to_string(entry.flags) + ")");
    return;
  }
  events[static_cast<size_t>(count++)] = event;
}

void Libfabric::post_receives(Rail& rail) {
  while (!rail.idle_receives.empty()) {
    libfabric::Endpoint* endpoint = rail.endpoint.get();
    const ssize_t result = endpoint->msg->recv(endpoint, nullptr, 0, nullptr,
                                               libfabric::kAddrUnspec, rail.idle_receives.back());
    if (result == -EAGAIN) return;  // the next poll tries again
    if (result != 0) return fail_all(library_.failure(name_ + ": fi_recv", result));
    rail.idle_receives.pop_back();
  }
}

void Libfabric::read_error(int32_t index) {
  Rail& rail = *rails_[static_cast<size_t>(index)];
  CqError error{};
  const ssize_t result = rail.queue->ops->readerr(rail.queue.get(), &error, 0);
  if (result == -EAGAIN || result == 0) return;
  if (result < 0) return fail_all(library_.failure(name_ + ": fi_cq_readerr", result));
  std::array<char, 256> text{};
  const char* detail = rail.queue->ops->strerror(rail.queue.get(), error.provider_error,
                                                 error.detail, text.data(), text.size());
  const std::string reason = std::string(library_.strerror(error.error)) + " (" +
                             std::to_string(error.error) +
                             "; provider: " + (detail != nullptr ? detail : "no detail") + ")";
  if (Operation* operation = rail.operation_of(error.context)) {
    fail_peer(operation->write.peer, name_ + ": a write to peer " +
                                         std::to_string(operation->write.peer) + " on rail " +
                                         std::to_string(index) + " failed: " + reason);
    rail.idle.push_back(operation);
    return;
  }
  const bool incoming = (error.flags & (libfabric::kRemoteWrite | libfabric::kRecv)) != 0;
  if (rail.is_receive(error.context)) {
    rail.idle_receives.push_back(static_cast<libfabric::Context2*>(error.context));
  } else if (!incoming) {
    unexplained_ = name_ + ": an operation on rail " + std::to_string(index) + " failed: " + reason;
  }
  // A peer's write broke off, or an injected one to it, most likely because the peer has ended.
  // Which peer is not known, so all are asked where that is possible, and the others go on.
  for (size_t peer = 0; peer < peers_.size(); ++peer) probe(static_cast<int32_t>(peer));
  if (probes_.empty()) explain();
}

// ---- failures -----------------------------------------------------------------------------------

// libfabric's tcp connects again and again to a peer that has ended, and reports nothing.
bool Libfabric::probe(int32_t peer) {
  if (!connected(peer) || peers_[static_cast<size_t>(peer)].name.empty()) return false;
  const Peer& asked = peers_[static_cast<size_t>(peer)];
  if (asked.failure.empty()) probes_.try_emplace(peer, asked.socket);
  return true;
}

void Libfabric::read_probes() {
  for (auto probe = probes_.begin(); probe != probes_.end();) {
    const int32_t peer = probe->first;
    const SocketProbe::Answer answer = probe->second.answer();
    Peer& asked = peers_[static_cast<size_t>(peer)];
    if (answer == SocketProbe::Answer::kRefused && asked.failure.empty()) {
      asked.ended = true;
      fail_peer(peer, name_ + ": peer " + std::to_string(peer) + " has ended: " + asked.name +
                          " refuses connections");
    }
    probe = answer == SocketProbe::Answer::kNone ? std::next(probe) : probes_.erase(probe);
  }
  if (probes_.empty()) explain();
}

// An operation of an unknown peer has failed. If no peer has, what it carried is lost all the same.
void Libfabric::explain() {
  const std::string why = std::exchange(unexplained_, {});
  const auto failed = [](const Peer& peer) { return !peer.failure.empty(); };
  if (!why.empty() && std::none_of(peers_.begin(), peers_.end(), failed)) fail_all(why);
}

// `error()` says so once the failure is reported.
void Libfabric::fail_peer(int32_t peer, const std::string& why) {
  Peer& failed = peers_[static_cast<size_t>(peer)];
  if (!failed.failure.empty()) return;
  failed.failure = why;
  failures_to_report_ = true;
}

void Libfabric::fail_post(const Write& write, int64_t result) {
  fail_peer(write.peer, library_.failure(name_ + ": the write of " + std::to_string(write.bytes) +
                                             " bytes to peer " + std::to_string(write.peer) +
                                             " on rail " + std::to_string(write.rail),
                                         result));
}

void Libfabric::fail_all(const std::string& why) {
  if (lost_.empty()) lost_ = why;
  error_ = lost_;
  for (Peer& peer : peers_) {
    if (peer.failure.empty()) peer.failure = lost_;
  }
  failures_to_report_ = true;
}

// Reports one failure at most, so that `error()` tells why.
void Libfabric::report_failure(std::span<Event> events, int32_t& count) {
  if (!failures_to_report_ || events.empty()) return;
  for (size_t peer = 0; peer < peers_.size(); ++peer) {
    Peer& failed = peers_[peer];
    if (failed.failure.empty() || failed.reported || failed.rails.empty()) continue;
    failed.reported = true;
    error_ = failed.failure;
    const EventKind kind = failed.ended ? EventKind::kPeerEnded : EventKind::kPeerFailed;
    events[static_cast<size_t>(count++)] = {
        .kind = kind, .rail = -1, .peer = static_cast<int32_t>(peer), .immediate = 0, .context = 0};
    return;
  }
  failures_to_report_ = false;
}

}  // namespace

std::unique_ptr<Transport> libfabric::make_transport(const Library& library,
                                                     const LibfabricOptions& options) {
  return std::make_unique<Libfabric>(library, options);
}

}  // namespace fanfold::transport
