#include "nccl_plugin/comm.h"

#include <chrono>
#include <utility>

namespace fanfold::nccl_plugin {

using abi::Result;

namespace {

bool is_aligned(uint64_t offset) { return offset % sizeof(uint64_t) == 0; }

}  // namespace

Comm::Comm(int32_t rank, size_t ranks, int64_t timeout_ms)
    : rank_(rank), ranks_(ranks), timeout_ms_(timeout_ms), closed_(ranks) {}

// The wire calls its owner until its thread has ended: it is the last member, which goes first.
Comm::~Comm() = default;

Result Comm::connect(const Listener& listener, std::span<const Address> addresses, int32_t rank,
                     std::unique_ptr<Comm>& comm) {
  WireOptions options{.settings = listener.settings, .rank = rank, .links = {}};
  const Problem problem = connect_all(listener, addresses, rank, options.links);
  if (!problem.empty()) return warn(Result::kSystemError, problem);
  std::string wires;
  for (const auto& link : options.links) {
    wires += wires.empty() ? "" : ", ";
    wires += link ? link->name() : "itself";
  }
  comm.reset(new Comm(rank, addresses.size(), listener.settings.timeout_ms));
  comm->wire_ = std::make_unique<Wire>(static_cast<WireOwner&>(*comm), std::move(options));
  info("rank " + std::to_string(rank) + " at " + listener.address.text() +
       " reaches ranks 0, 1, ... by " + wires);
  return Result::kSuccess;
}

// ---- registrations ----

void Comm::note(uint32_t number, int32_t rank, uint64_t bytes) {
  Registration& registration = registrations_[number];
  registration.bytes.resize(ranks_);
  registration.known.resize(ranks_);
  const auto peer = static_cast<size_t>(rank);
  if (!registration.known[peer]) ++registration.known_count;
  registration.known[peer] = true;
  registration.bytes[peer] = bytes;
}

std::string Comm::missing(const Registration& registration) const {
  std::string ranks;
  for (size_t rank = 0; rank < ranks_; ++rank) {
    if (!registration.known[rank]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  return ranks;
}

bool Comm::is_over(const Registration& registration) const {
  for (size_t rank = 0; rank < ranks_; ++rank) {
    if (closed_[rank] && !registration.known[rank]) return true;
  }
  return registration.known_count == ranks_;
}

Result Comm::register_memory(std::shared_ptr<Memory> memory, uint64_t& handle) {
  std::unique_lock lock(mutex_);
  if (!failure_.empty()) return Result::kRemoteError;
  const auto number = static_cast<uint32_t>(++last_registration_);
  const uint64_t bytes = memory->bytes();
  note(number, rank_, bytes);
  registrations_[number].memory = std::move(memory);
  for (int32_t peer = 0; std::cmp_less(peer, ranks_); ++peer) {
    if (peer == rank_ || closed_[static_cast<size_t>(peer)]) continue;
    wire_->post(peer, bare({.kind = Kind::kRegister, .bytes = bytes, .memory = number}));
  }
  changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms_),
                    [&] { return !failure_.empty() || is_over(registrations_[number]); });
  const Registration& registration = registrations_[number];
  if (!failure_.empty() || registration.known_count < ranks_) {
    // Its owner frees the memory now, so nothing may touch it, though peers may still come.
    const std::shared_ptr<Memory> given_up = std::move(registrations_[number].memory);
    const std::string late = missing(registration);
    const bool has_failed = !failure_.empty();
    lock.unlock();
    given_up->close();
    if (has_failed) return Result::kRemoteError;
    return warn(Result::kSystemError,
                "rank " + std::to_string(rank_) + ": ranks " + late +
                    " have not made registration " + std::to_string(number) + " (of " +
                    std::to_string(bytes) + " bytes here) within " + std::to_string(timeout_ms_) +
                    " ms, or have closed the communicator; all ranks must register in the same "
                    "order: look for a rank that has stopped, or set timeout_ms= in "
                    "FANFOLD_NCCL_PLUGIN");
  }
  handle = number;
  return Result::kSuccess;
}

Result Comm::deregister(uint64_t handle) {
  std::shared_ptr<Memory> memory;
  {
    const std::scoped_lock lock(mutex_);
    const auto found = registrations_.find(handle);
    if (found != registrations_.end()) memory = std::move(found->second.memory);
    if (memory) registrations_.erase(found);
  }
  if (!memory) {
    return warn(Result::kInvalidArgument, "rank " + std::to_string(rank_) + ": " +
                                              std::to_string(handle) +
                                              " is no registration of this communicator");
  }
  memory->close();
  return Result::kSuccess;
}

// ---- operations ----

Problem Comm::check_place(const char* what, const Place& place, size_t rank, uint64_t bytes) const {
  const auto found = registrations_.find(place.memory);
  if (found == registrations_.end() || !found->second.memory) {
    return std::string(what) + " names registration " + std::to_string(place.memory) +
           ", which this communicator does not have (any more)";
  }
  const uint64_t size = found->second.bytes[rank];
  if (place.offset <= size && bytes <= size - place.offset) return {};
  return std::string(what) + " has " + std::to_string(bytes) + " bytes at offset " +
         std::to_string(place.offset) + ", but registration " + std::to_string(place.memory) +
         " of rank " + std::to_string(rank) + " has " + std::to_string(size) + " bytes";
}

Problem Comm::check(const Operation& operation) const {
  if (operation.rank >= ranks_) {
    return "there is no rank " + std::to_string(operation.rank) + " among " +
           std::to_string(ranks_) + " ranks";
  }
  Problem problem;
  // Without bytes NCCL passes no memory.
  if (operation.bytes > 0) {
    problem = check_place("its local memory", operation.local, static_cast<size_t>(rank_),
                          operation.bytes);
    if (problem.empty()) {
      problem = check_place("its remote memory", operation.remote, operation.rank, operation.bytes);
    }
  }
  if (!problem.empty() || operation.signal.memory == 0) return problem;
  if (!is_aligned(operation.signal.offset)) {
    return "its signal has the offset " + std::to_string(operation.signal.offset) +
           ", but must have a multiple of 8";
  }
  return check_place("its signal", operation.signal, operation.rank, sizeof(uint64_t));
}

Result Comm::post(const Operation& operation, uint64_t& request) {
  const std::scoped_lock lock(mutex_);
  if (!failure_.empty()) return Result::kRemoteError;
  const auto refuse = [&](Result result, const Problem& problem) {
    return warn(result, "rank " + std::to_string(rank_) + ": an operation to rank " +
                            std::to_string(operation.rank) + " is refused: " + problem);
  };
  if (const Problem problem = check(operation); !problem.empty()) {
    return refuse(Result::kInvalidArgument, problem);
  }
  if (closed_[operation.rank]) {
    return refuse(Result::kRemoteError, "that rank has closed the communicator");
  }
  request = ++last_request_;
  const auto peer = static_cast<int32_t>(operation.rank);
  requests_[request].rank = peer;
  Message message = bare({.kind = operation.kind,
                          .id = request,
                          .bytes = operation.bytes,
                          .offset = operation.remote.offset,
                          .signal_offset = operation.signal.offset,
                          .signal_value = operation.signal_value,
                          .context = operation.context,
                          .memory = static_cast<uint32_t>(operation.remote.memory),
                          .signal_memory = static_cast<uint32_t>(operation.signal.memory)});
  if (operation.bytes > 0) message.source = registrations_[operation.local.memory].memory;
  message.source_offset = operation.local.offset;
  wire_->post(peer, std::move(message));
  return Result::kSuccess;
}

Result Comm::test(uint64_t request, bool& done) {
  done = false;
  const std::scoped_lock lock(mutex_);
  const auto found = requests_.find(request);
  if (found == requests_.end()) {
    return warn(Result::kInvalidArgument, "rank " + std::to_string(rank_) + ": " +
                                              std::to_string(request) +
                                              " is no request in flight of this communicator");
  }
  if (!found->second.done) return failure_.empty() ? Result::kSuccess : Result::kRemoteError;
  // One that has failed stays: NCCL 2.28.9 ignores the result and asks again for ever.
  if (!found->second.problem.empty()) return Result::kRemoteError;
  done = true;
  requests_.erase(found);
  return Result::kSuccess;
}

Result Comm::state() {
  const std::scoped_lock lock(mutex_);
  return failure_.empty() ? Result::kSuccess : Result::kRemoteError;
}

uint32_t Comm::new_contexts(uint32_t count) {
  const std::scoped_lock lock(mutex_);
  return std::exchange(contexts_, contexts_ + count);
}

// ---- what the wire reports ----

std::shared_ptr<Memory> Comm::memory_of(uint32_t number) {
  const std::scoped_lock lock(mutex_);
  const auto found = registrations_.find(number);
  return found == registrations_.end() ? nullptr : found->second.memory;
}

void Comm::completed(uint64_t request, const Problem& problem) {
  const std::scoped_lock lock(mutex_);
  const auto found = requests_.find(request);
  if (found == requests_.end() || found->second.done) return;
  found->second.done = true;
  found->second.problem = problem;
  if (problem.empty()) return;
  warn(Result::kRemoteError, "rank " + std::to_string(rank_) + ": an operation to rank " +
                                 std::to_string(found->second.rank) + " fails: " + problem);
}

void Comm::registered(int32_t peer, uint32_t number, uint64_t bytes) {
  const std::scoped_lock lock(mutex_);
  note(number, peer, bytes);
  changed_.notify_all();
}

void Comm::closed(int32_t peer) {
  const std::scoped_lock lock(mutex_);
  closed_[static_cast<size_t>(peer)] = true;
  for (auto& [id, request] : requests_) {
    if (request.rank != peer || request.done) continue;
    request.done = true;
    request.problem = "that rank has closed the communicator";
    warn(Result::kRemoteError, "rank " + std::to_string(rank_) + ": an operation to rank " +
                                   std::to_string(peer) + " fails: " + request.problem);
  }
  changed_.notify_all();
}

void Comm::failed(const Problem& problem) {
  const std::scoped_lock lock(mutex_);
  failure_ = problem;
  warn(Result::kRemoteError, problem);
  changed_.notify_all();
}

}  // namespace fanfold::nccl_plugin
