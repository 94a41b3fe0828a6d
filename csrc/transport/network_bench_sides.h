// The two sides of the network bench: the same interface over plain libfabric and over Fanfold's
// transport. Only csrc/transport/network_bench.cpp uses them.
#pragma once

#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/libfabric.h"
#include "transport/libfabric_rail.h"

namespace fanfold::transport {

inline constexpr size_t kEventsAtOnce = 64;

// Memory that both sides register, and how far they have come.
struct BenchSide {
  BenchSide(std::byte* memory_, int64_t bytes_) : memory(memory_), bytes(bytes_) {}

  std::byte* memory;
  int64_t bytes;
  int64_t sent = 0;
  int64_t completed = 0;
  int64_t arrived = 0;
  int64_t expected = 0;  // arrivals that the loops have waited for; more may have come already
};

// fi_writedata and fi_cq_read, and nothing of Fanfold between them and the loop.
class PlainSide : public BenchSide {
 public:
  PlainSide(const libfabric::Library& library, const libfabric::Request& request,
            std::byte* memory_, int64_t bytes_)
      : BenchSide(memory_, bytes_), library_(library) {
    const libfabric::InfoList found = libfabric::find_endpoints(library, "");
    const libfabric::Choice choice = libfabric::choose(libfabric::describe(found.get()), request);
    const libfabric::Info* info = found.get();
    for (size_t i = 0; i < choice.networks[0]; ++i) info = info->next;
    nics_.push_back(std::make_unique<libfabric::OpenNic>(library, *info));
    rails_.push_back(std::make_unique<libfabric::Rail>(library, *nics_[0], 0));
    if (rails_[0]->posts_receives) {
      throw Unavailable("the plain loop of the bench serves no provider that consumes receives: " +
                        std::string(info->fabric_attr->prov_name));
    }
    std::string error;
    region_ = libfabric::register_region(library, nics_, rails_,
                                         {.data = memory, .bytes = bytes, .key = 1}, error);
    if (region_.registrations.empty()) throw Unavailable(error);
    endpoint_ = rails_[0]->endpoint.get();
    queue_ = rails_[0]->queue.get();
    descriptor_ = region_.registrations[0]->descriptor;
    inject_bytes_ = static_cast<int64_t>(rails_[0]->inject_bytes);
    contexts_.resize(rails_[0]->operation_count);
  }

  struct Place {
    std::array<std::byte, 128> name;
    uint64_t base;
    uint64_t key;
  };
  Place place() const {
    Place place{};
    const std::vector<std::byte> name = rails_[0]->name(library_);
    if (name.size() > place.name.size()) throw Unavailable("the endpoint's name is too long");
    std::copy(name.begin(), name.end(), place.name.begin());
    if (nics_[0]->needs(libfabric::kMrVirtAddr)) place.base = reinterpret_cast<uint64_t>(memory);
    place.key = region_.registrations[0]->key;
    return place;
  }
  void connect(const Place& place) {
    peer_ = place;
    libfabric::AddressVector& vector = *nics_[0]->peers;
    if (vector.ops->insert(&vector, peer_.name.data(), 1, &address_, 0, nullptr) != 1) {
      throw Unavailable("fi_av_insert fails");
    }
  }

  bool send(int64_t offset, int64_t count, uint32_t immediate) {
    if (sent - completed >= static_cast<int64_t>(contexts_.size())) return false;
    const auto size = static_cast<size_t>(count);
    const auto at = static_cast<uint64_t>(offset);
    if (count <= inject_bytes_) {
      const ssize_t result = endpoint_->rma->injectdata(endpoint_, memory + offset, size, immediate,
                                                        address_, peer_.base + at, peer_.key);
      if (result == 0) ++completed;
      return counted(result);
    }
    const auto context = static_cast<size_t>(sent) % contexts_.size();
    return counted(endpoint_->rma->writedata(endpoint_, memory + offset, size, descriptor_,
                                             immediate, address_, peer_.base + at, peer_.key,
                                             &contexts_[context]));
  }

  void poll() {
    std::array<libfabric::CqEntry, kEventsAtOnce> entries;
    const ssize_t count = queue_->ops->read(queue_, entries.data(), entries.size());
    for (ssize_t i = 0; i < count; ++i) {
      const uint64_t flags = entries[static_cast<size_t>(i)].flags;
      ++((flags & libfabric::kWrite) != 0 ? completed : arrived);
    }
    if (count < 0 && count != -EAGAIN) throw Unavailable(library_.failure("fi_cq_read", count));
  }

 private:
  bool counted(ssize_t result) {
    if (result == -EAGAIN) return false;
    if (result != 0) throw Unavailable(library_.failure("fi_writedata", result));
    ++sent;
    return true;
  }

  const libfabric::Library& library_;
  std::vector<std::unique_ptr<libfabric::OpenNic>> nics_;
  std::vector<std::unique_ptr<libfabric::Rail>> rails_;
  libfabric::Region region_;
  std::vector<libfabric::Context2> contexts_;
  libfabric::Endpoint* endpoint_ = nullptr;
  libfabric::CompletionQueue* queue_ = nullptr;
  void* descriptor_ = nullptr;
  int64_t inject_bytes_ = 0;
  Place peer_{};
  libfabric::FiAddr address_ = 0;
};

class FanfoldSide : public BenchSide {
 public:
  FanfoldSide(const libfabric::Request& request, std::byte* memory_, int64_t bytes_)
      : BenchSide(memory_, bytes_),
        transport_(open_libfabric({.request = request, .endpoints_per_nic = 1})),
        local_(transport_->register_memory(memory, bytes)) {
    if (local_.index < 0) throw Unavailable(transport_->error());
  }

  const Transport& transport() const { return *transport_; }
  RemoteMemory remote() const { return transport_->remote(local_); }
  void connect(int32_t peer, const Address& address, const RemoteMemory& memory_of_peer) {
    if (transport_->connect(peer, address) != Code::kOk) throw Unavailable(transport_->error());
    peer_ = peer;
    target_ = memory_of_peer;
  }

  bool send(int64_t offset, int64_t count, uint32_t immediate) {
    const Code code = transport_->write({.peer = peer_,
                                         .rail = 0,
                                         .source = local_,
                                         .source_offset = offset,
                                         .target = target_,
                                         .target_offset = offset,
                                         .bytes = count,
                                         .immediate = immediate,
                                         .context = 0});
    if (code == Code::kFailed) throw Unavailable(transport_->error());
    if (code == Code::kOk) ++sent;
    return code == Code::kOk;
  }

  void poll() {
    std::array<Event, kEventsAtOnce> events;
    const int32_t count = transport_->poll(events);
    for (int32_t i = 0; i < count; ++i) {
      const EventKind kind = events[static_cast<size_t>(i)].kind;
      if (kind == EventKind::kPeerFailed) throw Unavailable(transport_->error());
      ++(kind == EventKind::kCompletion ? completed : arrived);
    }
  }

 private:
  std::unique_ptr<Transport> transport_;
  LocalMemory local_;
  RemoteMemory target_;
  int32_t peer_ = -1;
};

}  // namespace fanfold::transport
