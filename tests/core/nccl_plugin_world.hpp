// Ranks that drive the tables of the NCCL plugin as NCCL does, and what its logger has received.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "nccl_plugin/abi.h"

namespace fanfold::nccl_plugin {

using abi::Result;

#ifdef FANFOLD_SANITIZED
inline constexpr auto kPatience = std::chrono::seconds(120);
#else
inline constexpr auto kPatience = std::chrono::seconds(30);
#endif

// Ranks run on threads of their own, where CHECK cannot be used: they throw.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

inline void require_ok(Result result, const char* what) {
  require(result == Result::kSuccess,
          std::string(what) + " returns " + std::to_string(static_cast<int>(result)));
}

// Polls until `ready` holds. The bound is only there against hanging.
inline void await(const char* what, const std::function<bool()>& ready) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!ready()) {
    require(std::chrono::steady_clock::now() < deadline, std::string("nothing came: ") + what);
    std::this_thread::yield();
  }
}

class Log {
 public:
  static Log& get() {
    static Log log;
    return log;
  }
  void add(const char* text) {
    const std::scoped_lock lock(mutex_);
    text_ += std::string(text) + "\n";
  }
  // What has been logged as a warning since the last call.
  std::string take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(text_, {});
  }
  static void write(int level, unsigned long /*subsystems*/, const char* /*file*/, int /*line*/,
                    const char* format, ...) {
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    static_cast<void>(vsnprintf(text, sizeof text, format, arguments));
    va_end(arguments);
    if (level == abi::kLogWarn) get().add(text);
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// FANFOLD_NCCL_PLUGIN for the time of a test. No other thread runs when it changes.
class Setting {
 public:
  explicit Setting(const std::string& value) {
    static_cast<void>(Log::get().take());
    setenv("FANFOLD_NCCL_PLUGIN", value.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
  }
  ~Setting() { unsetenv("FANFOLD_NCCL_PLUGIN"); }  // NOLINT(concurrency-mt-unsafe)
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;
};

enum class Version { kGin11, kRma13, kRma14 };

struct Range {
  void* memory = nullptr;
  uint64_t offset = 0;
};

struct Target {
  uint32_t rank = 0;
  int context = 0;
};

using Handle = std::array<std::byte, abi::kHandleBytes>;

// One rank, by the table of a version. GIN v11 has no contexts: there each is a communicator.
class Rank {
 public:
  Rank(Version version_, int rank_, int ranks_, int contexts_ = 1)
      : version(version_), rank(rank_), ranks(ranks_), contexts(contexts_) {}
  ~Rank() {
    if (set_ != nullptr) destroy();
    for (void* comm : comms_) ncclGinPlugin_v11.close(comm);
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  // `gather` fills in the handles of all ranks.
  void open(const std::function<void(std::vector<Handle>&)>& gather) {
    void* instance = nullptr;
    require_ok(ncclGinPlugin_v11.init(&instance, 1, Log::write), "init");
    const int comms = version == Version::kGin11 ? contexts : 1;
    for (int number = 0; number < comms; ++number) {
      std::vector<Handle> handles(static_cast<size_t>(ranks));
      void* listener = nullptr;
      require_ok(ncclGinPlugin_v11.listen(instance, 0, handles[at(rank)].data(), &listener),
                 "listen");
      gather(handles);
      std::vector<void*> pointers;
      pointers.reserve(handles.size());
      for (Handle& handle : handles) pointers.push_back(handle.data());
      void* comm = nullptr;
      // NCCL 2.28.9 may pass no instance here.
      const Result result =
          ncclGinPlugin_v11.connect(nullptr, pointers.data(), ranks, rank, listener, &comm);
      ncclGinPlugin_v11.close_listener(listener);
      require_ok(result, "connect");
      comms_.push_back(comm);
    }
    create_contexts();
  }

  void* comm(int context = 0) { return comms_[version == Version::kGin11 ? at(context) : 0]; }

  // One handle for each context: GIN v11 registers with each communicator.
  Result try_register(void* data, size_t bytes, std::vector<void*>& memory) {
    for (void* comm : comms_) {
      void* handle = nullptr;
      void* device_handle = nullptr;
      const Result result =
          version == Version::kRma14
              ? ncclRmaPlugin_v14.register_memory(comm, data, bytes, abi::kHostMemory, 0, &handle)
              : ncclGinPlugin_v11.register_memory(comm, data, bytes, abi::kHostMemory, 0, &handle,
                                                  &device_handle);
      if (result != Result::kSuccess) return result;
      memory.push_back(handle);
    }
    for (int context = 1; version != Version::kGin11 && context < contexts; ++context) {
      memory.push_back(memory.front());
    }
    return Result::kSuccess;
  }
  std::vector<void*> add_memory(void* data, size_t bytes) {
    std::vector<void*> memory;
    require_ok(try_register(data, bytes, memory), "regMrSym");
    return memory;
  }

  Result put(Target to, Range from, size_t bytes, Range into, void** request) {
    if (version == Version::kGin11) {
      return ncclGinPlugin_v11.put(comm(to.context), from.offset, from.memory, bytes, into.offset,
                                   into.memory, to.rank, request);
    }
    const auto function =
        version == Version::kRma13 ? ncclRmaPlugin_v13.put : ncclRmaPlugin_v14.put;
    return function(set_, to.context, from.offset, from.memory, bytes, into.offset, into.memory,
                    to.rank, request);
  }

  struct Signal {
    Range at;
    uint64_t value = 1;
    uint32_t operation = abi::kSignalAdd;
  };
  Result put_signal(Target to, Range from, size_t bytes, Range into, Signal signal,
                    void** request) {
    if (version == Version::kGin11) {
      return ncclGinPlugin_v11.put_signal(
          comm(to.context), from.offset, from.memory, bytes, into.offset, into.memory, to.rank,
          signal.at.offset, signal.at.memory, signal.value, signal.operation, request);
    }
    if (version == Version::kRma13) {
      return ncclRmaPlugin_v13.put_signal(
          set_, to.context, from.offset, from.memory, bytes, into.offset, into.memory, to.rank,
          signal.at.offset, signal.at.memory, signal.value, signal.operation, request);
    }
    return ncclRmaPlugin_v14.put_signal(
        set_, to.context, from.offset, from.memory, bytes, into.offset, into.memory, to.rank,
        signal.at.offset, signal.at.memory, signal.value, signal.operation, false, request);
  }
  Result get(Target from, Range remote, size_t bytes, Range local, void** request) {
    const auto function =
        version == Version::kRma13 ? ncclRmaPlugin_v13.get : ncclRmaPlugin_v14.get;
    return function(set_, from.context, remote.offset, remote.memory, bytes, local.offset,
                    local.memory, from.rank, request);
  }
  Result flush(Target to, void** request) {
    const auto function =
        version == Version::kRma13 ? ncclRmaPlugin_v13.flush : ncclRmaPlugin_v14.flush;
    return function(set_, to.context, nullptr, to.rank, request);
  }
  bool test(void* request, int context = 0) {
    int done = 0;
    require_ok(ncclGinPlugin_v11.test(comm(context), request, &done), "test");
    return done == 1;
  }
  void finish(void* request, int context = 0) {
    await("the completion of a request", [&] { return test(request, context); });
  }

  const Version version;
  const int rank;
  const int ranks;
  const int contexts;

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }
  void create_contexts() {
    if (version == Version::kRma13) {
      abi::GinConfig13 config{
          .signals = 0, .counters = 0, .contexts = contexts, .queue_depth = 0, .traffic_class = -1};
      // NCCL's proxy passes no place for a handle.
      require_ok(ncclRmaPlugin_v13.create_context(comm(), &config, &set_, nullptr),
                 "createContext");
    } else if (version == Version::kRma14) {
      abi::RmaConfig14 config{.contexts = contexts, .traffic_class = -1};
      require_ok(ncclRmaPlugin_v14.create_context(comm(), &config, &set_), "createContext");
    }
  }
  void destroy() {
    static_cast<void>(version == Version::kRma13 ? ncclRmaPlugin_v13.destroy_context(set_)
                                                 : ncclRmaPlugin_v14.destroy_context(set_));
  }

  std::vector<void*> comms_;
  void* set_ = nullptr;
};

// Exchanges the handles of ranks that are threads of one process, any number of times.
class Gathering {
 public:
  explicit Gathering(int ranks) : handles_(static_cast<size_t>(ranks)), ranks_(ranks) {}
  void gather(int rank, std::vector<Handle>& handles) {
    const auto own = static_cast<size_t>(rank);
    {
      const std::scoped_lock lock(mutex_);
      handles_[own].push_back(handles[own]);
    }
    const size_t round = rounds_of(own);
    await("the handles of all ranks", [&] {
      for (int peer = 0; peer < ranks_; ++peer) {
        if (rounds_of(static_cast<size_t>(peer)) < round) return false;
      }
      return true;
    });
    const std::scoped_lock lock(mutex_);
    for (size_t peer = 0; peer < handles.size(); ++peer) handles[peer] = handles_[peer][round - 1];
  }

 private:
  size_t rounds_of(size_t rank) {
    const std::scoped_lock lock(mutex_);
    return handles_[rank].size();
  }

  std::mutex mutex_;
  std::vector<std::vector<Handle>> handles_;
  const int ranks_;
};

// Runs `body` for each rank on a thread of its own, and throws the first failure. No rank closes
// before all have finished.
struct World {
  Version version = Version::kRma14;
  int ranks = 2;
  int contexts = 1;

  void run(const std::function<void(Rank&)>& body) const {
    Gathering gathering(ranks);
    std::atomic<int> finished = 0;
    std::vector<std::string> failures(static_cast<size_t>(ranks));
    std::vector<std::thread> threads;
    threads.reserve(failures.size());
    for (int number = 0; number < ranks; ++number) {
      threads.emplace_back([&, number] {
        try {
          Rank rank(version, number, ranks, contexts);
          rank.open([&](std::vector<Handle>& handles) { gathering.gather(number, handles); });
          body(rank);
          ++finished;
          await("the end of all ranks", [&] { return finished == ranks; });
        } catch (const std::exception& error) {
          failures[static_cast<size_t>(number)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (size_t number = 0; number < failures.size(); ++number) {
      if (failures[number].empty() || contains(failures[number], "the end of all ranks")) continue;
      check::fail(__FILE__, __LINE__,
                  "rank " + std::to_string(number) + ": " + failures[number] +
                      "; logged: " + Log::get().take());
    }
  }
};

}  // namespace fanfold::nccl_plugin
