#include "memory/symmetric.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "base/atomics.h"

namespace fanfold {
namespace {

std::chrono::nanoseconds nanoseconds_of(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

const char* name_of(Phase phase) {
  static constexpr std::array<const char*, static_cast<size_t>(Phase::kCount)> kNames = {
      "barrier",
      "low_latency dispatch",
      "low_latency combine",
      "high_throughput counts",
      "high_throughput dispatch",
      "high_throughput combine",
  };
  return kNames.at(static_cast<size_t>(phase));
}

SymmetricMemory::SymmetricMemory(const SymmetricOptions& options)
    : options_(options), layout_{options.ranks}, regions_(index(options.ranks)),
      handles_(index(options.ranks)), masked_(index(options.ranks), 0) {
  Region own = Region::create(mapped_bytes());
  new (own.data())
      ControlBlock{.magic = kControlMagic, .doorbell = {}, .pending = {}, .reasons = {}};
  regions_[index(rank())] = std::move(own);
}

std::vector<std::unique_ptr<SymmetricMemory>> SymmetricMemory::in_process(
    SymmetricOptions options) {
  std::vector<std::unique_ptr<SymmetricMemory>> all;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    all.push_back(std::make_unique<SymmetricMemory>(options));
  }
  for (const auto& memory : all) {
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (memory != all[peer]) memory->regions_[peer] = all[peer]->regions_[peer].share();
    }
  }
  return all;
}

PeerAddress SymmetricMemory::address() const {
  return PeerAddress{getpid(), regions_[index(rank())].descriptor(), this_thread()};
}

void SymmetricMemory::map(const std::vector<PeerAddress>& peers) {
  if (static_cast<int32_t>(peers.size()) != ranks()) {
    throw BadArgument("peers", std::to_string(peers.size()), "one address for each rank");
  }
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer == rank()) continue;
    const PeerAddress& address = peers[index(peer)];
    regions_[index(peer)] = Region::open(address.pid, address.descriptor, mapped_bytes());
    handles_[index(peer)] = RankHandle(address.pid, address.thread);
    if (control(peer).magic != kControlMagic) {
      throw SystemFailure("the memory of rank " + std::to_string(peer) + " is not Fanfold's",
                          EBADMSG);
    }
  }
}

void SymmetricMemory::close() {
  closed_ = true;
  for (Region& region : regions_) region.unmap();
  handles_.clear();
}

void SymmetricMemory::check_usable() const {
  if (fork_generation() != generation_) {
    throw Misuse(
        "it was made before this process was forked, which left its memory to the parent: "
        "make a new one in this process");
  }
  if (closed_) throw Misuse("it is closed");
  if (!failure_.empty()) throw Misuse("it failed earlier (" + failure_ + "); close it");
}

std::byte* SymmetricMemory::window(int32_t peer, int64_t offset, int64_t bytes) const {
  check_usable();
  if (peer < 0 || peer >= ranks()) {
    throw BadArgument("peer", std::to_string(peer), "a rank below " + std::to_string(ranks()));
  }
  if (offset < 0 || bytes < 0 || offset > options_.bytes - bytes) {
    throw BadArgument("window",
                      "of " + std::to_string(bytes) + " bytes at " + std::to_string(offset),
                      "within the " + std::to_string(options_.bytes) + " bytes of a rank");
  }
  return base(peer) + offset;
}

void SymmetricMemory::push_quietly(int32_t peer, int64_t offset, Signal signal) const {
  store_release_system(word(peer, offset), signal.encode());
}

void SymmetricMemory::push(int32_t peer, int64_t offset, Signal signal) const {
  push_quietly(peer, offset, signal);
  if (peer != rank()) wake(peer);
}

Signal SymmetricMemory::peek(int64_t offset) const {
  return Signal::decode(load_acquire_system(word(rank(), offset)));
}

// --- Waiting --------------------------------------------------------------------------------

bool SymmetricMemory::wait(const Awaited& awaited, const std::function<int64_t()>& actual) {
  if (masked(awaited.peer)) return false;
  check_usable();
  const auto has = [&](int64_t offset) {
    const uint32_t epoch = peek(offset).epoch;
    return awaited.exact ? epoch == awaited.epoch : reached(epoch, awaited.epoch);
  };
  const auto facts = [&] {
    const std::string phase = std::string(name_of(awaited.phase)) + awaited.what;
    return TimeoutFacts{rank(), awaited.peer, phase, awaited.epoch, actual(), 0.0, false};
  };
  return wait_for([&] { return has(awaited.offset) || has(awaited.other); }, facts, &awaited);
}

bool SymmetricMemory::wait_for(const std::function<bool()>& ready,
                               const std::function<TimeoutFacts()>& facts, const Awaited* awaited) {
  const WaitPolicy policy{nanoseconds_of(options_.timeout_seconds),
                          nanoseconds_of(options_.spin_seconds)};
  const auto start = std::chrono::steady_clock::now();
  const auto hopeless = [&] {
    // The interrupt check may have run a handler of the user's that closes this memory.
    if (closed_) throw Misuse("it was closed while it waited");
    const int32_t peer = facts().peer;
    return peer != rank() && handles_[index(peer)].ended();
  };
  bool published = false;
  std::vector<Blocked> chain;
  const auto deadlocked = [&] {
    if (awaited == nullptr) return false;
    if (!published) publish(control(rank()).pending, *awaited);
    published = true;
    chain = find_deadlock(pending_view(), rank());
    return !chain.empty();
  };
  WaitResult result = WaitResult::kTimedOut;
  try {
    result = Waiter(control(rank()).doorbell, policy).until(ready, hopeless, deadlocked);
  } catch (...) {  // interrupted in the middle of a call, which now can never be finished
    if (!closed_) {
      failure_ = "interrupted in " + facts().phase;
      if (published) withdraw(control(rank()).pending);
    }
    throw;
  }
  if (result == WaitResult::kDeadlocked) end_deadlocked(*awaited, chain);
  if (published) withdraw(control(rank()).pending);
  if (result == WaitResult::kReady) return true;
  TimeoutFacts blame = facts();
  blame.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  blame.peer_gone = result == WaitResult::kAbandoned;
  if (options_.mask_late_peers) {
    set_masked(blame.peer, true);
    if (awaited != nullptr) {
      blame.phase = std::string(name_of(awaited->phase)) + " " + std::to_string(awaited->call);
    }
    late_.push_back(blame);
    return false;
  }
  failure_ = blame.phase + ", waiting for rank " + std::to_string(blame.peer);
  throw PeerTimeout(blame);
}

PendingView SymmetricMemory::pending_view() const {
  return PendingView{
      ranks(),
      [this](int32_t peer) -> const PendingWait& { return control(peer).pending; },
      [this](int32_t peer, int64_t offset) {
        return Signal::decode(load_acquire_system(word(peer, offset)));
      },
  };
}

// The published wait stays, as this rank pushes nothing any more: its peers find the same.
void SymmetricMemory::end_deadlocked(const Awaited& awaited, const std::vector<Blocked>& chain) {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer != rank()) wake(peer);
  }
  const auto call_of = [](Phase phase, uint32_t call) {
    return std::string(name_of(phase)) + " " + std::to_string(call);
  };
  const std::string ours = call_of(awaited.phase, awaited.call);
  Blocked other = chain.back();
  for (const Blocked& blocked : chain) {
    if (call_of(blocked.phase, blocked.call) == ours) continue;
    other = blocked;
    break;
  }
  const BadArgument error =
      different_calls(ours, rank(), call_of(other.phase, other.call), other.rank);
  failure_ = "the call was " + error.value;
  throw BadArgument(error);
}

void SymmetricMemory::set_reason(Phase phase, uint32_t epoch, const std::string& reason) const {
  char* place = control(rank()).reasons[static_cast<int32_t>(phase)][parity_of(epoch)];
  size_t length = std::min(reason.size(), static_cast<size_t>(kReasonBytes) - 1);
  // Readers take it for UTF-8, so a character that does not fit is left out whole.
  while (length < reason.size() && length > 0 && (reason[length] & 0xc0) == 0x80) --length;
  std::memcpy(place, reason.data(), length);
  place[length] = '\0';
}

RefusalFacts SymmetricMemory::refusal(int32_t peer, Phase phase, uint32_t epoch) const {
  const char* place = control(peer).reasons[static_cast<int32_t>(phase)][parity_of(epoch)];
  const size_t length = strnlen(place, static_cast<size_t>(kReasonBytes));
  return RefusalFacts{rank(), peer, name_of(phase), std::string(place, length)};
}

void SymmetricMemory::barrier() {
  check_usable();
  const uint32_t epoch = ++barrier_epoch_;
  // Barrier signals lie between the control block and the modes' part, before base().
  const auto offset = [&](int32_t peer) {
    return layout_.barrier_offset() + int64_t{8} * peer - layout_.bytes();
  };
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (!masked(peer)) push(peer, offset(rank()), Signal{epoch, 0});
  }
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    wait(Awaited{.peer = peer,
                 .phase = Phase::kBarrier,
                 .call = epoch,
                 .epoch = epoch,
                 .offset = offset(peer),
                 .other = offset(peer)},
         [&] { return peek(offset(peer)).epoch; });
  }
}

}  // namespace fanfold
