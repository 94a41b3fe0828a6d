// What the NCCL plugin reports when ranks die, close, disagree, or pass nonsense.
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "nccl_plugin_processes.hpp"
#include "nccl_plugin_world.hpp"
#include "processes.hpp"

namespace fanfold::nccl_plugin {
namespace {

// Rank 1 of two, in a process of its own, which the test kills.
class Victim {
 public:
  explicit Victim(Version version)
      : child_([this, version] {
          Rank rank(version, 1, 2);
          rank.open([this](std::vector<Handle>& handles) {
            require(pipes_.put(1, handles[1].data(), sizeof(Handle)) &&
                        pipes_.get(1, handles[0].data(), sizeof(Handle)),
                    "the exchange of handles");
          });
          static std::vector<std::byte> memory(1 << 20);
          rank.add_memory(memory.data(), memory.size());
          while (pause() != 0) continue;
        }) {}

  void gather(std::vector<Handle>& handles) {
    require(pipes_.put(0, handles[0].data(), sizeof(Handle)) &&
                pipes_.get(0, handles[1].data(), sizeof(Handle)),
            "the exchange of handles");
  }
  void stop() const { kill(child_.pid, SIGSTOP); }
  void end() { child_.end(); }

 private:
  Pipes pipes_;
  Child child_;
};

bool has_error(Rank& rank) {
  bool error = false;
  require_ok(ncclGinPlugin_v11.query_error(rank.comm(), &error), "queryLastError");
  return error;
}

}  // namespace

// A put that a stopped process will never take in fails when the process dies.
TEST(nccl_plugin_killed_peer) {
  for (const char* setting : {"interface=lo,wire=tcp", "interface=lo"}) {
    const Setting set(setting);
    Victim victim(Version::kGin11);
    std::vector<std::byte> memory(1 << 20);
    Rank rank(Version::kGin11, 0, 2);
    rank.open([&](std::vector<Handle>& handles) { victim.gather(handles); });
    void* handle = rank.add_memory(memory.data(), memory.size()).front();
    CHECK(!has_error(rank));
    CHECK(ncclGinPlugin_v11.progress(rank.comm()) == Result::kSuccess);
    victim.stop();
    void* request = nullptr;
    for (int i = 0; i < 20; ++i) {
      CHECK(rank.put({.rank = 1}, {.memory = handle}, memory.size(), {.memory = handle},
                     &request) == Result::kSuccess);
    }
    int done = 0;
    CHECK(ncclGinPlugin_v11.test(rank.comm(), request, &done) == Result::kSuccess);
    CHECK_EQ(done, 0);
    victim.end();
    await("the error", [&] {
      return ncclGinPlugin_v11.test(rank.comm(), request, &done) == Result::kRemoteError;
    });
    CHECK_EQ(done, 0);
    CHECK(has_error(rank));
    CHECK(ncclGinPlugin_v11.progress(rank.comm()) == Result::kRemoteError);
    // NCCL 2.28.9 looks at no other result than that of a put.
    CHECK(rank.put({.rank = 1}, {.memory = handle}, 8, {.memory = handle}, &request) ==
          Result::kRemoteError);
    std::vector<void*> more;
    CHECK(rank.try_register(memory.data(), 8, more) == Result::kRemoteError);
    const std::string log = Log::get().take();
    CHECK(contains(log, "rank 0: the "));
    CHECK(contains(log, "connection to rank 1 has ended: that rank has died, was killed"));
    CHECK(contains(log, "start all ranks again"));
  }
}

// All others notice, also in a registration that waits for the dead rank.
TEST(nccl_plugin_killed_among_four) {
  for (const char* setting : {"interface=lo,wire=tcp", "interface=lo"}) {
    const Setting set(setting);
    Processes processes(4, [](Rank& rank, Pipes& pipe) {
      uint64_t memory[2] = {};
      void* handle = rank.add_memory(memory, sizeof memory).front();
      char letter = 'r';
      require(pipe.put(1, &letter, 1), "the start");
      if (rank.rank == 3) {
        std::vector<void*> more;
        letter = rank.try_register(memory, 8, more) == Result::kRemoteError ? 'e' : 'n';
      } else {
        const auto next = static_cast<uint32_t>((rank.rank + 1) % rank.ranks);
        await("the error", [&] {
          void* request = nullptr;
          return rank.put({.rank = next}, {.memory = handle}, 8, {.memory = handle}, &request) ==
                 Result::kRemoteError;
        });
        letter = has_error(rank) ? 'e' : 'n';
      }
      if (!contains(Log::get().take(), "has ended: that rank has died")) letter = 'm';
      require(pipe.put(1, &letter, 1), "the result");
    });
    processes.expect({0, 1, 2, 3}, 'r');
    processes.kill(1);
    processes.expect({0, 2, 3}, 'e');
  }
}

TEST(nccl_plugin_rank_that_registers_nothing) {
  const Setting set("interface=lo,wire=tcp,timeout_ms=300");
  World{.version = Version::kRma14, .ranks = 3}.run([](Rank& rank) {
    uint64_t word = 0;
    std::vector<void*> memory;
    if (rank.rank == 2) return;
    require(rank.try_register(&word, sizeof word, memory) == Result::kSystemError,
            "a registration that one rank does not make succeeds");
  });
  CHECK(contains(Log::get().take(), "ranks 2 have not made registration 1 (of 8 bytes here)"));
}

// Its owner frees the memory after the error. A rank that comes late writes nothing there.
TEST(nccl_plugin_registration_that_is_given_up) {
  const Setting set("interface=lo,wire=tcp,timeout_ms=300");
  std::vector<uint64_t> memory[2] = {std::vector<uint64_t>(1, 5), std::vector<uint64_t>(1, 6)};
  std::atomic<bool> given_up = false;
  std::atomic<bool> over = false;
  World{.version = Version::kRma14, .ranks = 2}.run([&](Rank& rank) {
    std::vector<uint64_t>& own = memory[rank.rank];
    std::vector<void*> handles;
    if (rank.rank == 0) {
      require(rank.try_register(own.data(), 8, handles) == Result::kSystemError,
              "a registration that one rank does not make succeeds");
      given_up = true;
      await("the other rank", [&] { return over.load(); });
      return;
    }
    await("the other rank", [&] { return given_up.load(); });
    void* handle = rank.add_memory(own.data(), 8).front();
    void* request = nullptr;
    require_ok(rank.put({.rank = 0}, {.memory = handle}, 8, {.memory = handle}, &request), "iput");
    int done = 0;
    await("the refusal", [&] {
      return ncclRmaPlugin_v14.test(rank.comm(), request, &done) == Result::kRemoteError;
    });
    // NCCL 2.28.9 asks again and again; the log has it once.
    static_cast<void>(Log::get().take());
    for (int i = 0; i < 100; ++i) {
      require(
          ncclRmaPlugin_v14.test(rank.comm(), request, &done) == Result::kRemoteError && done == 0,
          "a request that has failed is forgotten");
    }
    require(!contains(Log::get().take(), "no request in flight"), "each question is logged");
    over = true;
  });
  CHECK_EQ(memory[0], (std::vector<uint64_t>{5}));
}

TEST(nccl_plugin_rank_that_does_not_connect) {
  const Setting set("interface=lo,wire=tcp,timeout_ms=300");
  void* instance = nullptr;
  CHECK(ncclGinPlugin_v11.init(&instance, 1, Log::write) == Result::kSuccess);
  std::vector<Handle> handles(2);
  void* pointers[2] = {handles[0].data(), handles[1].data()};
  void* listeners[2] = {};
  for (int rank = 0; rank < 2; ++rank) {
    CHECK(ncclGinPlugin_v11.listen(instance, 0, pointers[rank], &listeners[rank]) ==
          Result::kSuccess);
  }
  void* comm = nullptr;
  CHECK(ncclGinPlugin_v11.connect(instance, pointers, 2, 1, listeners[1], &comm) ==
        Result::kSystemError);
  CHECK(comm == nullptr);
  CHECK(contains(Log::get().take(), "rank 1 of 2 at 127.0.0.1 port "));
  // A rank whose port is closed is reported at once.
  CHECK(ncclGinPlugin_v11.close_listener(listeners[1]) == Result::kSuccess);
  CHECK(ncclGinPlugin_v11.connect(instance, pointers, 2, 0, listeners[0], &comm) ==
        Result::kSystemError);
  CHECK(contains(Log::get().take(), "Connection refused; its rank may have ended"));
  // A handle of another plugin.
  handles[1].fill(std::byte{1});
  CHECK(ncclGinPlugin_v11.connect(instance, pointers, 2, 0, listeners[0], &comm) ==
        Result::kSystemError);
  CHECK(contains(Log::get().take(), "all ranks must load the same plugin"));
  CHECK(ncclGinPlugin_v11.connect(instance, pointers, 2, 2, listeners[0], &comm) ==
        Result::kInvalidArgument);
  CHECK(ncclGinPlugin_v11.close_listener(listeners[0]) == Result::kSuccess);
}

TEST(nccl_plugin_refuses_bad_arguments) {
  const Setting set("interface=lo,wire=tcp");
  World{.version = Version::kRma14, .ranks = 2}.run([](Rank& rank) {
    std::vector<uint64_t> memory(8);
    // The memory of rank 1 is smaller: its bound holds for what goes there.
    const size_t bytes = rank.rank == 0 ? 64 : 32;
    void* handle = rank.add_memory(memory.data(), bytes).front();
    void* last = rank.add_memory(memory.data(), 8).front();
    if (rank.rank == 0) {
      void* request = nullptr;
      const auto refused = [&](Result result, const std::string& why) {
        require(result == Result::kInvalidArgument, "an argument is accepted: " + why);
        const std::string log = Log::get().take();
        require(contains(log, why), "'" + why + "' is not in: " + log);
      };
      const Range good{.memory = handle};
      void* unknown = reinterpret_cast<void*>(uint64_t{77});
      refused(rank.put({.rank = 2}, good, 8, good, &request), "no rank 2 among 2 ranks");
      refused(rank.put({.rank = 1}, {.memory = unknown}, 8, good, &request), "registration 77");
      refused(rank.put({.rank = 1}, good, 8, {.memory = unknown}, &request), "registration 77");
      refused(rank.put({.rank = 1}, {.memory = nullptr}, 8, good, &request), "registration 0");
      refused(rank.put({.rank = 1}, {.memory = handle, .offset = 60}, 8, good, &request),
              "its local memory has 8 bytes at offset 60, but registration 1 of rank 0 has 64");
      refused(rank.put({.rank = 1}, good, 33, good, &request),
              "its remote memory has 33 bytes at offset 0, but registration 1 of rank 1 has 32");
      refused(
          rank.put({.rank = 1}, good, 8, {.memory = handle, .offset = UINT64_MAX - 3}, &request),
          "its remote memory");
      refused(rank.get({.rank = 1}, {.memory = handle, .offset = 25}, 8, good, &request),
              "its remote memory");
      refused(rank.put_signal({.rank = 1}, good, 8, good,
                              {.at = {.memory = handle, .offset = 4}, .value = 1}, &request),
              "a multiple of 8");
      refused(rank.put_signal({.rank = 1}, good, 8, good,
                              {.at = {.memory = handle, .offset = 32}, .value = 1}, &request),
              "its signal has 8 bytes at offset 32");
      refused(rank.put_signal({.rank = 1}, good, 8, good, {.at = good, .value = 1, .operation = 3},
                              &request),
              "the operation 3");
      refused(rank.put_signal({.rank = 1}, good, 8, good, {.at = {}, .value = 1}, &request),
              "no memory of the signal");
      refused(rank.put({.rank = 1, .context = 1}, good, 8, good, &request), "no context 1 among 1");
      int done = 0;
      refused(ncclRmaPlugin_v14.test(rank.comm(), unknown, &done), "77 is no request in flight");
      refused(ncclRmaPlugin_v14.deregister(rank.comm(), unknown), "77 is no registration");
      std::vector<void*> more;
      void* other = nullptr;
      refused(ncclRmaPlugin_v14.register_memory(rank.comm(), memory.data(), 8, 4, 0, &other),
              "the kind 4");
      // None of this has done harm.
      require_ok(rank.put({.rank = 1}, good, 32, good, &request), "iput");
      rank.finish(request);
      require(ncclRmaPlugin_v14.test(rank.comm(), request, &done) == Result::kInvalidArgument,
              "a finished request is known");
      static_cast<void>(Log::get().take());
    }
    rank.add_memory(memory.data(), 8);  // keeps rank 1's memory until here
    require(last != nullptr, "regMrSym");
  });
}

// What arrives for memory that its rank has deregistered touches nothing, and only fails the put.
TEST(nccl_plugin_deregistered_memory) {
  for (const char* wire : {"interface=lo,wire=tcp", "interface=lo"}) {
    const Setting set(wire);
    std::vector<uint64_t> memory[2] = {std::vector<uint64_t>(8, 5), std::vector<uint64_t>(8, 6)};
    World{.version = Version::kRma14, .ranks = 2}.run([&](Rank& rank) {
      std::vector<uint64_t>& own = memory[rank.rank];
      void* first = rank.add_memory(own.data(), 64).front();
      void* second = rank.add_memory(own.data(), 64).front();
      if (rank.rank == 1) {
        require_ok(ncclRmaPlugin_v14.deregister(rank.comm(), first), "deregMrSym");
      }
      rank.add_memory(own.data(), 8);  // waits until it has
      if (rank.rank == 0) {
        void* request = nullptr;
        require_ok(rank.put({.rank = 1}, {.memory = first}, 64, {.memory = first}, &request),
                   "iput");
        int done = 0;
        Result result = Result::kSuccess;
        await("the refusal", [&] {
          result = ncclRmaPlugin_v14.test(rank.comm(), request, &done);
          return done == 1 || result != Result::kSuccess;
        });
        require(result == Result::kRemoteError && done == 0, "the put is reported as done");
        // The communicator goes on.
        require_ok(
            rank.put({.rank = 1}, {.memory = second}, 8, {.memory = second, .offset = 8}, &request),
            "iput");
        rank.finish(request);
      }
      rank.add_memory(own.data(), 8);
    });
    CHECK_EQ(memory[1], (std::vector<uint64_t>{6, 5, 6, 6, 6, 6, 6, 6}));
    const std::string log = Log::get().take();
    CHECK(contains(log,
                   "rank 1 refuses an operation of rank 0 on 64 bytes at offset 0 of "
                   "registration 1: its target memory is not registered (any more)"));
    CHECK(contains(log, "rank 1 could not carry it out"));
  }
}

// Ranks may close one after the other; who writes to a closed rank receives an error.
TEST(nccl_plugin_closes_in_order) {
  for (const char* wire : {"interface=lo,delay_us=20000,wire=tcp", "interface=lo,delay_us=20000"}) {
    const Setting set(wire);
    Gathering gathering(2);
    std::vector<std::unique_ptr<Rank>> ranks;
    ranks.reserve(2);
    for (int rank = 0; rank < 2; ++rank) {
      ranks.push_back(std::make_unique<Rank>(Version::kGin11, rank, 2));
    }
    std::vector<uint64_t> memory(16);
    std::vector<void*> handles[2];
    const auto open = [&](int rank) {
      ranks[static_cast<size_t>(rank)]->open(
          [&](std::vector<Handle>& all) { gathering.gather(rank, all); });
      handles[rank] =
          ranks[static_cast<size_t>(rank)]->add_memory(memory.data() + ptrdiff_t{8} * rank, 64);
    };
    std::thread other([&] { open(1); });
    open(0);
    other.join();
    const Range at{.memory = handles[0].front()};
    std::vector<void*> requests(10);
    for (void*& request : requests) {
      CHECK(ranks[0]->put_signal({.rank = 1}, {}, 0, {}, {.at = at}, &request) == Result::kSuccess);
    }
    await("the signals", [&] {
      return std::atomic_ref(memory[8]).load(std::memory_order_acquire) == requests.size();
    });
    // Its answers are still to come, and come.
    ranks[1].reset();
    for (void* request : requests) ranks[0]->finish(request);
    void* request = nullptr;
    Result result = Result::kSuccess;
    await("the end of rank 1", [&] {
      result = ranks[0]->put({.rank = 1}, at, 8, at, &request);
      return result != Result::kSuccess;
    });
    CHECK(result == Result::kRemoteError);
    CHECK(!has_error(*ranks[0]));  // nothing is broken
    CHECK(ranks[0]->put({.rank = 0}, at, 8, at, &request) == Result::kSuccess);
    ranks[0]->finish(request);
    std::vector<void*> more;
    CHECK(ranks[0]->try_register(memory.data(), 8, more) == Result::kSystemError);
    CHECK(contains(Log::get().take(), "that rank has closed the communicator"));
  }
}

// The same seed breaks the same operation.
TEST(nccl_plugin_injected_errors) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    int succeeded[2] = {};
    for (int& count : succeeded) {
      const Setting set("interface=lo,wire=tcp,error_one_in=20,seed=" + std::to_string(seed));
      std::atomic<int> registered = 0;
      World{.version = Version::kGin11, .ranks = 2}.run([&](Rank& rank) {
        uint64_t word = 1;
        uint64_t target = 0;
        void* source = rank.add_memory(&word, sizeof word).front();
        void* into = rank.add_memory(&target, sizeof target).front();
        ++registered;  // an error while a rank is still at it would be the registration's
        await("all registrations", [&] { return registered == 2; });
        int done = 0;
        await("the injected error", [&] {
          if (rank.rank == 1) return has_error(rank);
          void* request = nullptr;
          Result result = rank.put({.rank = 1}, {.memory = source}, 8, {.memory = into}, &request);
          if (result != Result::kSuccess) return true;
          await("a completion", [&] {
            result = ncclGinPlugin_v11.test(rank.comm(), request, &done);
            return done == 1 || result != Result::kSuccess;
          });
          if (done == 1) ++count;
          return result != Result::kSuccess;
        });
      });
      CHECK(contains(Log::get().take(), "injects (error_one_in, seed " + std::to_string(seed)));
    }
    CHECK_EQ(succeeded[0], succeeded[1]);
  }
}

}  // namespace fanfold::nccl_plugin
