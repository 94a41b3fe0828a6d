#include "memory/symmetric.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/atomics.h"

namespace fanfold {
namespace {

std::chrono::nanoseconds nanoseconds_of(double seconds) {
  return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}

constexpr int64_t kPage = 4096;
constexpr std::chrono::nanoseconds kProbeInterval = std::chrono::milliseconds(500);

Hosts hosts_of(const SymmetricOptions& options) {
  if (options.hosts.empty()) return Hosts(options.ranks);
  if (std::cmp_equal(options.hosts.size(), options.ranks)) return Hosts(options.hosts);
  throw BadArgument("hosts", std::to_string(options.hosts.size()), "one for each rank");
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
    : options_(options), hosts_(hosts_of(options)), layout_{options.ranks, hosts_.several()},
      regions_(index(options.ranks)), peers_(index(options.ranks)), handles_(index(options.ranks)),
      masked_(index(options.ranks), 0), waits_(options.ranks) {
  const auto elsewhere = static_cast<int64_t>(
      options.ranks - std::ssize(hosts_.members(hosts_.host_of(options.rank))));
  // The copies of other hosts' memory follow it. The system provides the pages that are touched.
  Region own = Region::create((1 + elsewhere) * align_up(mapped_bytes(), kPage));
  new (own.data())
      ControlBlock{.magic = kControlMagic, .doorbell = {}, .pending = {}, .reasons = {}};
  regions_[index(rank())] = std::move(own);
  make_peer(rank());
}

std::vector<std::unique_ptr<SymmetricMemory>> SymmetricMemory::in_process(
    SymmetricOptions options) {
  std::vector<std::unique_ptr<SymmetricMemory>> all;
  for (options.rank = 0; options.rank < options.ranks; ++options.rank) {
    all.push_back(std::make_unique<SymmetricMemory>(options));
  }
  for (const auto& memory : all) {
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (memory != all[peer]) {
        memory->regions_[peer] = all[peer]->regions_[peer].part(0, all[peer]->mapped_bytes());
      }
      memory->make_peer(static_cast<int32_t>(peer));
    }
  }
  return all;
}

PeerAddress SymmetricMemory::address() const {
  return PeerAddress{getpid(), regions_[index(rank())].descriptor(), this_thread()};
}

void SymmetricMemory::link(int32_t peer, Link& link) {
  if (peer < 0 || peer >= ranks() || hosts_.together(peer, rank())) {
    throw BadArgument("peer", std::to_string(peer), "a rank on another host");
  }
  regions_[index(peer)] = regions_[index(rank())].part(copy_offset(peer), mapped_bytes());
  peers_[index(peer)] = Peer(base(peer), nullptr, &link);
}

void SymmetricMemory::carry(std::unique_ptr<Carrier> carrier) {
  {
    const std::scoped_lock lock(carrier_mutex_);
    carrier_ = std::move(carrier);
  }
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (!hosts_.together(peer, rank())) link(peer, carrier_->link(peer));
  }
}

// The copies lie one after the other behind this rank's own memory, in rank order.
int64_t SymmetricMemory::copy_offset(int32_t peer) const {
  if (hosts_.together(peer, rank())) return 0;
  int64_t before = 0;
  for (int32_t other = 0; other < peer; ++other) before += hosts_.together(other, rank()) ? 0 : 1;
  return (before + 1) * align_up(mapped_bytes(), kPage);
}

CarriedMemory SymmetricMemory::carried() const {
  const Region& own = regions_[index(rank())];
  CarriedMemory carried{.data = own.data(),
                        .bytes = own.bytes(),
                        .modes = layout_.bytes(),
                        .copies = {},
                        .bell = &control(rank()).doorbell};
  for (int32_t peer = 0; peer < ranks(); ++peer) carried.copies.push_back(copy_offset(peer));
  return carried;
}

void SymmetricMemory::receive(int64_t offset, uint64_t value) const {
  store_release_system(word(rank(), offset), value);
  for (const int32_t local : hosts_.members(hosts_.host_of(rank()))) {
    ring(control(local).doorbell);
  }
}

void SymmetricMemory::map(const std::vector<PeerAddress>& peers) {
  if (static_cast<int32_t>(peers.size()) != ranks()) {
    throw BadArgument("peers", std::to_string(peers.size()), "one address for each rank");
  }
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (peer == rank() || !hosts_.together(peer, rank())) continue;
    const PeerAddress& address = peers[index(peer)];
    regions_[index(peer)] = Region::open(address.pid, address.descriptor, mapped_bytes());
    handles_[index(peer)] = RankHandle(address.pid, address.thread);
    if (control(peer).magic != kControlMagic) {
      throw SystemFailure("the memory of rank " + std::to_string(peer) + " is not Fanfold's",
                          EBADMSG);
    }
    make_peer(peer);
  }
}

// A rank does not ring its own bell: while it writes, it does not wait.
void SymmetricMemory::make_peer(int32_t peer) {
  Doorbell* bell = peer == rank() ? nullptr : &control(peer).doorbell;
  peers_[index(peer)] = Peer(base(peer), bell, nullptr);
}

void SymmetricMemory::close() {
  if (carrier_ != nullptr && generation_ == fork_generation()) {
    carrier_->finish(!failure_.empty());
  }
  closed_ = true;
  end_carrier();
  for (Region& region : regions_) region.unmap();
  handles_.clear();
}

void SymmetricMemory::end_carrier() {
  std::unique_ptr<Carrier> ended;
  const std::scoped_lock lock(carrier_mutex_);
  if (carrier_ == nullptr) return;
  last_counts_ = carrier_->counts();
  ended = std::move(carrier_);
}

std::vector<CarrierCount> SymmetricMemory::carrier_counts() const {
  const std::scoped_lock lock(carrier_mutex_);
  return carrier_ != nullptr ? carrier_->counts() : last_counts_;
}

std::string SymmetricMemory::why_lost(int32_t peer) const {
  const std::scoped_lock lock(carrier_mutex_);
  if (carrier_ == nullptr) return {};
  try {
    carrier_->check(peer);
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

Carrier& SymmetricMemory::carrier() const {
  check_usable();
  if (carrier_ == nullptr) throw Misuse("all ranks are on one host, so nothing carries to others");
  return *carrier_;
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

Signal SymmetricMemory::peek(int32_t owner, int64_t offset) const {
  return Signal::decode(load_acquire_system(word(owner, offset)));
}

// --- Waiting --------------------------------------------------------------------------------

bool SymmetricMemory::wait(const AwaitedSignal& awaited, const std::function<int64_t()>& actual) {
  if (masked(awaited.peer)) return false;
  check_usable();
  const auto has = [&](int64_t offset) {
    const uint32_t epoch = peek(offset).epoch;
    return awaited.exact ? epoch == awaited.epoch : reached(epoch, awaited.epoch);
  };
  const auto report = [&] {
    const std::string phase = std::string(name_of(awaited.phase)) + awaited.detail;
    return TimeoutReport{rank(), awaited.peer, phase, awaited.epoch, actual(), 0.0, false};
  };
  return wait_for(
      awaited.phase, [&] { return has(awaited.offset) || has(awaited.alternative); }, report,
      &awaited);
}

// How long a rank waits for a peer on another host before it asks whether the peer still runs, and
// then at least until it asks again.
std::chrono::nanoseconds SymmetricMemory::probe_interval() const {
  return std::min(kProbeInterval, nanoseconds_of(options_.timeout_seconds / 4));
}

bool SymmetricMemory::has_ended(int32_t peer, const CountedWait& wait,
                                std::chrono::nanoseconds& probe_at) const {
  if (peer == rank()) return false;
  if (carrier_ != nullptr) {
    if (!hosts_.together(peer, rank()) && wait.waited() >= probe_at) {
      probe_at = wait.waited() + std::max(probe_interval(), wait.waited() / 8);
      carrier_->probe(peer);
    }
    if (carrier_->ended(peer) || (options_.mask_late_peers && carrier_->lost(peer))) return true;
    carrier_->check(peer);
  }
  return handles_[index(peer)].ended();
}

bool SymmetricMemory::wait_for(Phase phase, const std::function<bool()>& ready,
                               const std::function<TimeoutReport()>& report,
                               const AwaitedSignal* awaited) {
  if (ready()) return true;  // reads no clock and counts nothing
  CountedWait counted(waits_, phase, awaited != nullptr ? awaited->peer : kAnyPeer);
  const WaitPolicy policy{nanoseconds_of(options_.timeout_seconds),
                          nanoseconds_of(options_.spin_seconds)};
  std::chrono::nanoseconds probe_at = probe_interval();
  const auto peer_gone = [&] {
    // The interrupt check may have run a signal handler of the user that closed this memory.
    if (closed_) throw Misuse("it was closed while it waited");
    return has_ended(report().peer, counted, probe_at);
  };
  bool published = false;
  std::vector<BlockedRank> chain;
  const auto deadlocked = [&] {
    if (awaited == nullptr) return false;
    if (!published) publish(control(rank()).pending, *awaited);
    published = true;
    chain = find_deadlock(pending_view(), rank());
    return !chain.empty();
  };
  WaitResult result = WaitResult::kTimedOut;
  try {
    const CarrierWait waiting(carrier_);
    result = Waiter(control(rank()).doorbell, policy).until(ready, peer_gone, deadlocked);
  } catch (const PeerTimeout& error) {  // of the carrier
    failure_ = report().phase + ": " + error.what();
    throw;
  } catch (const TransportError& error) {
    failure_ = report().phase + ": " + error.what();
    throw;
  } catch (...) {  // an interrupt in the middle of a call: no rank can finish the call any more
    if (!closed_) {
      failure_ = "interrupted in " + report().phase;
      if (published) withdraw(control(rank()).pending);
    }
    throw;
  }
  if (result == WaitResult::kDeadlocked) end_deadlocked(*awaited, chain);
  if (published) withdraw(control(rank()).pending);
  if (result == WaitResult::kReady) return counted.ready();
  TimeoutReport late = report();
  late.seconds = std::chrono::duration<double>(counted.waited()).count();
  late.peer_gone = result == WaitResult::kPeerGone;
  // Without another peer to mask, the caller would wait again for the same.
  const bool nobody = late.peer == rank() || (awaited == nullptr && masked(late.peer));
  if (options_.mask_late_peers && !nobody) {
    set_masked(late.peer, true);
    if (awaited != nullptr) {
      late.phase = std::string(name_of(awaited->phase)) + " " + std::to_string(awaited->call);
    }
    late_.push_back(late);
    return false;
  }
  end_late(std::move(late));
}

bool SymmetricMemory::poll(Phase phase, const std::function<bool()>& ready) {
  if (ready()) return true;
  const WaitPolicy policy{.timeout = nanoseconds_of(options_.timeout_seconds),
                          .spin = nanoseconds_of(options_.spin_seconds),
                          .idle = std::chrono::milliseconds(1)};
  try {
    const bool came = poll_until(ready, policy);
    // The interrupt check may have run a signal handler of the user that closed this memory.
    if (closed_) throw Misuse("it was closed while it waited");
    if (!came) failure_ = std::string(name_of(phase)) + ", waiting for a signal of this rank's own";
    return came;
  } catch (...) {
    if (!closed_) failure_ = std::string("interrupted in ") + name_of(phase);
    throw;
  }
}

void SymmetricMemory::end_late(TimeoutReport late) {
  if (carrier_ != nullptr && !hosts_.together(late.peer, rank())) {
    late.path = carrier_->path(late.peer);
  }
  failure_ = late.phase + ", waiting for rank " + std::to_string(late.peer);
  throw PeerTimeout(std::move(late));
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

// Leaves the wait published, so that the peers find the same deadlock. This rank pushes no signal
// any more.
void SymmetricMemory::end_deadlocked(const AwaitedSignal& awaited,
                                     const std::vector<BlockedRank>& chain) {
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    peers_[index(peer)].wake();
  }
  const auto call_of = [](Phase phase, uint32_t call) {
    return std::string(name_of(phase)) + " " + std::to_string(call);
  };
  const std::string ours = call_of(awaited.phase, awaited.call);
  BlockedRank other = chain.back();
  for (const BlockedRank& blocked : chain) {
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
  // Readers decode UTF-8, so drop a character that does not fit as a whole.
  while (length < reason.size() && length > 0 && (reason[length] & 0xc0) == 0x80) --length;
  std::memcpy(place, reason.data(), length);
  place[length] = '\0';
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (hosts_.together(peer, rank())) continue;
    peers_[index(peer)].put(copied_reason(rank(), phase, epoch), place, kReasonBytes);
  }
}

// Where the reason of `peer`'s refusal lies in the memory of ranks on other hosts.
int64_t SymmetricMemory::copied_reason(int32_t peer, Phase phase, uint32_t epoch) const {
  const int64_t place = int64_t{static_cast<int32_t>(phase)} * kParities + parity_of(epoch);
  return layout_.reasons_offset(peer) + place * kReasonBytes - layout_.bytes();
}

RefusalReport SymmetricMemory::refusal(int32_t peer, Phase phase, uint32_t epoch) const {
  const char* place =
      hosts_.together(peer, rank())
          ? control(peer).reasons[static_cast<int32_t>(phase)][parity_of(epoch)]
          : reinterpret_cast<const char*>(own() + copied_reason(peer, phase, epoch));
  const size_t length = strnlen(place, static_cast<size_t>(kReasonBytes));
  return RefusalReport{rank(), peer, name_of(phase), std::string(place, length)};
}

void SymmetricMemory::barrier() {
  check_usable();
  const uint32_t epoch = ++barrier_epoch_;
  // Barrier signals lie between the control block and the modes' part, before base().
  const auto offset = [&](int32_t peer) {
    return layout_.barrier_offset() + int64_t{8} * peer - layout_.bytes();
  };
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    if (!masked(peer)) peers_[index(peer)].signal(offset(rank()), Signal{epoch, 0});
  }
  for (int32_t peer = 0; peer < ranks(); ++peer) {
    wait(AwaitedSignal{.peer = peer,
                       .phase = Phase::kBarrier,
                       .call = epoch,
                       .epoch = epoch,
                       .offset = offset(peer),
                       .alternative = offset(peer)},
         [&] { return peek(offset(peer)).epoch; });
  }
}

}  // namespace fanfold
