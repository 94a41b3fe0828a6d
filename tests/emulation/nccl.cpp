// What libnccl has for windows and GIN, over the memory of one process: ranks are threads, and each
// reaches the memory of all.
//
// Like NCCL it lets all ranks of a communicator wait for each other where a call is collective, and
// calls a window that it cannot give a success.
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gin.hpp"

namespace {

constexpr int kSuccess = 0, kSystemError = 2, kInvalidArgument = 4;

// All ranks that share an identity.
struct World {
  explicit World(int ranks) : addresses(static_cast<size_t>(ranks)) {}

  int ranks() const { return static_cast<int>(addresses.size()); }

  // Returns when all ranks have come, or false when it was released.
  bool meet() {
    std::unique_lock lock(mutex);
    const int turn = turns;
    if (++arrived == ranks()) {
      arrived = 0;
      ++turns;
      all_here.notify_all();
    }
    all_here.wait(lock, [&] { return turns != turn || released; });
    return !released;
  }
  // Lets those go that wait for somebody who does not come.
  void release() {
    const std::lock_guard lock(mutex);
    released = true;
    all_here.notify_all();
  }

  std::vector<char*> addresses;  // of the ranks' memory
  std::unique_ptr<emulation::GinNetwork> gin;
  std::mutex mutex;
  std::condition_variable all_here;
  int arrived = 0, turns = 0;
  bool released = false;
};

struct Communicator {
  std::shared_ptr<World> world;
  int rank;
  std::string last_error;
};

// What a handle of a window points to in 2.28.9, for a world whose memory is 4 GiB apart.
struct Window {
  void* host;
  char* first;
  int rank, world_rank;
  uint32_t stride;
  uint32_t unused[9];
  World* world;
};

struct State {
  std::mutex mutex;
  std::map<uint64_t, std::shared_ptr<World>> worlds;
  std::set<void*> memory;
  std::set<void*> windows;
  std::map<std::string, int> behaviour;
  int communicators = 0;
};

State& state() {
  static State state;
  return state;
}

int behaviour(const char* name, int otherwise) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().behaviour.find(name);
  return found == state().behaviour.end() ? otherwise : found->second;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

struct Identity {
  char internal[128];
};
struct Team {
  int ranks, rank, stride;
};

// ncclDevCommRequirements, as far as it is looked at.
struct Requirements {
  void* resources;
  void* teams;
  bool lsa_multimem;
  int barriers, lsa_barriers, rail_barriers, blocks, slots;
  bool gin_force_enable;
  int gin_contexts, gin_signals, gin_counters;
};
struct SizedRequirements {
  size_t size;
  unsigned magic, version;
  Requirements rest;
  int gin_connections;
  bool exclusive_contexts;
  int queue_depth, traffic_class, world_barriers;
  bool strong_signals;
};

// For tests: what goes wrong, and what is left.
EXPORT void behave(const char* name, int value) {
  const std::lock_guard lock(state().mutex);
  state().behaviour[name] = value;
}
EXPORT void behave_well() {
  const std::lock_guard lock(state().mutex);
  state().behaviour.clear();
}
EXPORT void release_all() {
  const std::lock_guard lock(state().mutex);
  for (const auto& [number, world] : state().worlds) world->release();
  state().worlds.clear();
}
EXPORT int left() {
  const std::lock_guard lock(state().mutex);
  return static_cast<int>(state().memory.size() + state().windows.size()) + state().communicators;
}

EXPORT int ncclGetVersion(int* version) {
  *version = behaviour("version", 23007);
  return kSuccess;
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == kSystemError ? "unhandled system error" : "invalid argument";
}
EXPORT const char* ncclGetLastError(Communicator* comm) {
  return comm == nullptr ? "" : comm->last_error.c_str();
}
EXPORT int ncclGetUniqueId(Identity* identity) {
  static uint64_t next = 0;
  const std::lock_guard lock(state().mutex);
  *identity = {};
  ++next;
  std::memcpy(identity->internal, &next, sizeof next);
  return kSuccess;
}
EXPORT int ncclCommInitRank(Communicator** comm, int ranks, Identity identity, int rank) {
  if (behaviour("no_communicator_of", -1) == rank) return kSystemError;
  uint64_t number;
  std::memcpy(&number, identity.internal, sizeof number);
  std::shared_ptr<World> world;
  {
    const std::lock_guard lock(state().mutex);
    std::shared_ptr<World>& known = state().worlds[number];
    if (known == nullptr) known = std::make_shared<World>(ranks);
    world = known;
    ++state().communicators;
  }
  if (world->ranks() != ranks || rank < 0 || rank >= ranks) return kInvalidArgument;
  const bool met = world->meet();
  if (!met || behaviour("communicator_lost_by", -1) == rank) {
    const std::lock_guard lock(state().mutex);
    --state().communicators;
    return kSystemError;
  }
  *comm = new Communicator{.world = world, .rank = rank, .last_error = {}};
  return kSuccess;
}
EXPORT int ncclCommDestroy(Communicator* comm) {
  comm->world->meet();
  delete comm;
  const std::lock_guard lock(state().mutex);
  --state().communicators;
  return kSuccess;
}
EXPORT Team ncclTeamLsa(Communicator* comm) {
  return {behaviour("within_reach", comm->world->ranks()), comm->rank, 1};
}
EXPORT int ncclMemAlloc(void** address, size_t bytes) {
  if (static_cast<int64_t>(bytes) > behaviour("most_bytes", 1 << 30)) return kSystemError;
  {
    const std::lock_guard lock(state().mutex);
    const auto found = state().behaviour.find("allocations");  // that succeed
    if (found != state().behaviour.end() && found->second-- <= 0) return kSystemError;
  }
  const size_t whole = (bytes + 4095) / 4096 * 4096;
  *address = std::memset(std::aligned_alloc(4096, whole), 0xA5, whole);
  const std::lock_guard lock(state().mutex);
  state().memory.insert(*address);
  return kSuccess;
}
EXPORT int ncclMemFree(void* address) {
  const std::lock_guard lock(state().mutex);
  if (state().memory.erase(address) == 0) return kInvalidArgument;
  std::free(address);
  return kSuccess;
}
EXPORT int ncclCommWindowRegister(Communicator* comm, void* address, size_t bytes, Window** window,
                                  int flags) {
  World& world = *comm->world;
  if (flags != 1 || bytes == 0) return kInvalidArgument;
  world.addresses[static_cast<size_t>(comm->rank)] = static_cast<char*>(address);
  world.meet();
  *window = nullptr;
  if (behaviour("no_window", 0) != 0) return kSuccess;
  if (behaviour("refuses_window_of", -1) == comm->rank) {
    comm->last_error = "Cuda failure 'peer access is not supported'\n";
    return kSystemError;
  }
  *window = new Window{.host = nullptr,
                       .first = world.addresses[0],
                       .rank = comm->rank,
                       .world_rank = comm->rank,
                       .stride = 0,
                       .unused = {},
                       .world = &world};
  if (world.ranks() > 1) {
    (*window)->stride =
        static_cast<uint32_t>(static_cast<uint64_t>(world.addresses[1] - world.addresses[0]) >> 32);
  }
  const std::lock_guard lock(state().mutex);
  state().windows.insert(*window);
  return kSuccess;
}
EXPORT int ncclCommWindowDeregister(Communicator* comm, Window* window) {
  const std::lock_guard lock(state().mutex);
  if (comm == nullptr || state().windows.erase(window) == 0) return kInvalidArgument;
  if (comm->world->gin != nullptr) comm->world->gin->end(comm->rank);
  delete window;
  return kSuccess;
}
EXPORT int ncclGetLsaDevicePointer(Window* window, size_t offset, int peer, void** address) {
  if (peer < 0 || peer >= window->world->ranks()) return kInvalidArgument;
  *address = window->world->addresses[static_cast<size_t>(peer)] + offset;
  return kSuccess;
}
EXPORT int ncclDevCommCreate(Communicator* comm, const void* asked, emulation::GinDevice* device) {
  const int version = behaviour("version", 23007);
  const auto* sized = static_cast<const SizedRequirements*>(asked);
  const bool is_sized = version >= 22902;
  if (is_sized && (sized->magic != 0xcafebeefu || sized->version != static_cast<unsigned>(version)))
    return kInvalidArgument;
  const Requirements& needs = is_sized ? sized->rest : *static_cast<const Requirements*>(asked);
  const bool connects = is_sized ? sized->gin_connections == 1 : needs.gin_force_enable;
  if (behaviour("no_gin", 0) != 0 || !connects) {
    comm->last_error = "GIN not supported.";
    return kInvalidArgument;
  }
  World& world = *comm->world;
  world.meet();
  {
    const std::lock_guard lock(world.mutex);
    if (world.gin == nullptr) {
      const auto seed = static_cast<uint32_t>(behaviour("gin_seed", 0));
      const auto most_us = static_cast<uint32_t>(behaviour("gin_most_us", seed == 0 ? 0 : 25));
      const int words = std::min(needs.gin_signals, needs.gin_counters);
      const bool strong = !is_sized || sized->strong_signals;
      world.gin =
          std::make_unique<emulation::GinNetwork>(world.addresses, words, seed, most_us, strong);
    }
  }
  *device = world.gin->device(comm->rank);
  return kSuccess;
}
EXPORT int ncclCommGetAsyncError(Communicator* comm, int* error) {
  *error = behaviour("lost_by", -1) == comm->rank ? kSystemError : kSuccess;
  return kSuccess;
}
// Of all networks there are: puts that NCCL would not take, and those that landed before earlier
// ones.
EXPORT int gin_faults() {
  const std::lock_guard lock(state().mutex);
  int faults = 0;
  for (const auto& [number, world] : state().worlds)
    if (world->gin != nullptr) faults += world->gin->faults();
  return faults;
}
EXPORT int gin_reordered() {
  const std::lock_guard lock(state().mutex);
  int reordered = 0;
  for (const auto& [number, world] : state().worlds)
    if (world->gin != nullptr) reordered += world->gin->reordered();
  return reordered;
}
