// The NCCL plugin's GIN and RMA, between ranks that are threads and ranks that are processes.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_plugin/comm.h"
#include "nccl_plugin/connect.h"
#include "nccl_plugin_processes.hpp"
#include "nccl_plugin_traffic.hpp"
#include "nccl_plugin_world.hpp"

namespace fanfold::nccl_plugin {
namespace {

// The memory of a rank must outlive the ranks that still write to it.
void run_traffic(const World& world, const Traffic& traffic) {
  std::vector<std::unique_ptr<TrafficRank>> ranks(static_cast<size_t>(world.ranks));
  world.run([&](Rank& rank) {
    auto& own = ranks[static_cast<size_t>(rank.rank)];
    own = std::make_unique<TrafficRank>(rank, traffic);
    own->run();
  });
}

void run_traffic_on_all_versions(const std::string& setting) {
  const Setting set(setting);
  for (const Version version : {Version::kGin11, Version::kRma13, Version::kRma14}) {
    for (int ranks = 2; ranks <= 5; ++ranks) {
      run_traffic({.version = version, .ranks = ranks, .contexts = 3},
                  {.seed = static_cast<uint64_t>(ranks), .rounds = 3, .most_bytes = 2000});
    }
  }
  CHECK_EQ(Log::get().take(), "");
}

// Memory that notes what is done to it.
class NotingMemory final : public Memory {
 public:
  explicit NotingMemory(uint64_t bytes) : Memory(bytes) {}
  std::vector<std::string> notes() {
    const std::scoped_lock lock(mutex_);
    return notes_;
  }

 private:
  Problem do_read(uint64_t /*offset*/, std::byte* to, size_t count) override {
    std::fill_n(to, count, std::byte{1});
    return {};
  }
  Problem do_write(uint64_t offset, const std::byte* /*from*/, size_t count) override {
    note(std::to_string(count) + " bytes at " + std::to_string(offset));
    return {};
  }
  Problem do_add(uint64_t offset, uint64_t value) override {
    note("add " + std::to_string(value) + " at " + std::to_string(offset));
    return {};
  }
  void note(std::string text) {
    const std::scoped_lock lock(mutex_);
    notes_.push_back(std::move(text));
  }

  std::mutex mutex_;
  std::vector<std::string> notes_;
};

// The ring's order is invisible to TSAN between threads that map it twice; processes have no such
// trouble, and test_nccl_plugin_processes covers shared memory there.
#if defined(__SANITIZE_THREAD__)
constexpr bool kRingsBetweenThreads = false;
#else
constexpr bool kRingsBetweenThreads = true;
#endif

}  // namespace

TEST(nccl_plugin_traffic_over_tcp) { run_traffic_on_all_versions("interface=lo,wire=tcp"); }

TEST(nccl_plugin_traffic_through_shared_memory) {
  if (kRingsBetweenThreads) run_traffic_on_all_versions("interface=lo");
}

TEST(nccl_plugin_large_puts) {
  for (const char* wire : {"interface=lo,wire=tcp", "interface=lo"}) {
    if (!kRingsBetweenThreads && !contains(wire, "tcp")) continue;
    const Setting set(wire);
    run_traffic({.ranks = 2, .contexts = 2},
                {.seed = 3, .rounds = 2, .most_bytes = size_t{5} << 20, .most_pieces = 3});
  }
}

TEST(nccl_plugin_one_rank_alone) {
  const Setting set("interface=lo");
  run_traffic({.version = Version::kGin11, .ranks = 1, .contexts = 2}, {.rounds = 5});
}

// Each seed delays, reorders and swaps otherwise; the promises hold.
TEST(nccl_plugin_hostile_seeds) {
  const check::Seeds asked = check::asked_seeds();
  const uint64_t first = asked.count == 0 ? 1 : asked.first;
  const uint64_t count = asked.count == 0 ? 24 : asked.count;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    const std::string wire = seed % 2 == 0 && kRingsBetweenThreads ? "" : ",wire=tcp";
    const Setting set("interface=lo,delay_us=300,swap_one_in=2,seed=" + std::to_string(seed) +
                      wire);
    run_traffic({.version = seed % 3 == 0 ? Version::kGin11 : Version::kRma14,
                 .ranks = static_cast<int>(2 + seed % 3),
                 .contexts = 2},
                {.seed = seed, .rounds = 4, .most_bytes = 600});
    CHECK_EQ(Log::get().take(), "");
  }
}

TEST(nccl_plugin_gets_and_flushes) {
  for (const Version version : {Version::kRma13, Version::kRma14}) {
    const Setting set("interface=lo,wire=tcp,delay_us=200,seed=5");
    std::vector<std::vector<std::byte>> memory(3, std::vector<std::byte>(300'000));
    World{.version = version, .ranks = 3, .contexts = 2}.run([&](Rank& rank) {
      std::vector<std::byte>& own = memory[static_cast<size_t>(rank.rank)];
      for (size_t i = 0; i < 100'000; ++i) {
        own[i] = static_cast<std::byte>(i * 7 + static_cast<size_t>(rank.rank));
      }
      void* handle = rank.add_memory(own.data(), own.size()).front();
      std::vector<std::byte> got(100'000);
      void* local = rank.add_memory(got.data(), got.size()).front();
      for (int peer = 0; peer < rank.ranks; ++peer) {
        const Target from{.rank = static_cast<uint32_t>(peer), .context = peer % 2};
        const size_t half = got.size() / 2;
        void* requests[4] = {};
        require_ok(rank.get(from, {.memory = handle}, half, {.memory = local}, &requests[0]),
                   "iget");
        require_ok(rank.get(from, {.memory = handle, .offset = half}, half,
                            {.memory = local, .offset = half}, &requests[1]),
                   "iget");
        require_ok(rank.get(from, {}, 0, {}, &requests[2]), "iget");
        require_ok(rank.flush(from, &requests[3]), "iflush");
        rank.finish(requests[3]);
        // A flush is done when all before it in its context is.
        for (int earlier = 0; earlier < 3; ++earlier) {
          require(rank.test(requests[earlier]), "a flush was done before a get");
        }
        for (size_t i = 0; i < got.size(); ++i) {
          if (got[i] == static_cast<std::byte>(i * 7 + static_cast<size_t>(peer))) continue;
          throw std::runtime_error("a get brought a wrong byte");
        }
      }
      // Nobody leaves while others still read.
      void* words = rank.add_memory(own.data(), own.size()).front();
      require(words != nullptr, "regMrSym waits for all ranks");
      static_cast<void>(words);
      require_ok(ncclGinPlugin_v11.deregister(rank.comm(), local), "deregMrSym");
    });
  }
}

// What the target does to its memory for a put, a put with a signal, and a signal alone.
TEST(nccl_plugin_target_applies_in_order) {
  for (const char* wire : {"interface=lo,wire=tcp", "interface=lo"}) {
    Settings settings;
    CHECK_EQ(parse_settings(wire, settings), "");
    Listener listeners[2];
    std::vector<Address> addresses;
    for (Listener& listener : listeners) {
      CHECK_EQ(listen_on(settings, listener), "");
      addresses.push_back(listener.address);
    }
    std::unique_ptr<Comm> comms[2];
    const auto memory = std::make_shared<NotingMemory>(1'000'000);
    uint64_t handles[2] = {};
    const auto open = [&](int rank) {
      require_ok(Comm::connect(listeners[rank], addresses, rank, comms[rank]), "connect");
      require_ok(comms[rank]->register_memory(memory, handles[rank]), "regMrSym");
    };
    std::thread other([&] { open(1); });
    open(0);
    other.join();
    const Place start{.memory = handles[0], .offset = 0};
    const Place word{.memory = handles[0], .offset = 8};
    const Place behind{.memory = handles[0], .offset = 600'000};
    for (const uint32_t target : {1U, 0U}) {
      uint64_t requests[3] = {};
      const Operation operations[3] = {
          {.rank = target, .bytes = 600'000, .local = start, .remote = start},
          {.rank = target,
           .bytes = 300'000,
           .local = start,
           .remote = behind,
           .signal = word,
           .signal_value = 7},
          {.rank = target, .signal = word, .signal_value = 1}};
      for (size_t i = 0; i < 3; ++i) {
        require_ok(comms[0]->post(operations[i], requests[i]), "post");
      }
      for (const uint64_t request : requests) {
        bool done = false;
        await("a completion", [&] {
          require_ok(comms[0]->test(request, done), "test");
          return done;
        });
      }
    }
    std::vector<std::string> expected = {"262144 bytes at 0",
                                         "262144 bytes at 262144",
                                         "75712 bytes at 524288",
                                         "262144 bytes at 600000",
                                         "37856 bytes at 862144",
                                         "add 7 at 8",
                                         "add 1 at 8"};
    const std::vector<std::string> once = expected;
    expected.insert(expected.end(), once.begin(), once.end());
    CHECK_EQ(memory->notes(), expected);
    std::thread closing([&] { comms[1].reset(); });
    comms[0].reset();
    closing.join();
  }
}

// A reader that does nothing but wait for the signal finds all bytes: of the signal's put, and of
// the put before it.
TEST(nccl_plugin_payload_before_signal) {
  for (const char* wire : {"interface=lo,wire=tcp", "interface=lo"}) {
    if (!kRingsBetweenThreads && !contains(wire, "tcp")) continue;
    const Setting set(wire);
    constexpr size_t kWords = 200'000;
    std::vector<uint64_t> memory(2 * kWords + 2);
    std::vector<uint64_t> own(2 * kWords + 2);
    World{.version = Version::kGin11, .ranks = 2}.run([&](Rank& rank) {
      std::vector<uint64_t>& here = rank.rank == 0 ? own : memory;
      void* handle = rank.add_memory(here.data(), here.size() * 8).front();
      const Rank::Signal signal{.at = {.memory = handle, .offset = 2 * kWords * 8}};
      std::atomic_ref<uint64_t> word(here[2 * kWords]);
      for (uint64_t round = 1; round <= 20; ++round) {
        void* request = nullptr;
        if (rank.rank == 0) {
          std::fill_n(here.begin(), 2 * kWords, round);
          void* earlier = nullptr;
          require_ok(
              rank.put({.rank = 1}, {.memory = handle}, kWords * 8, {.memory = handle}, &earlier),
              "iput");
          const Range half{.memory = handle, .offset = kWords * 8};
          require_ok(rank.put_signal({.rank = 1}, half, kWords * 8, half, signal, &request),
                     "iputSignal");
          rank.finish(earlier);
          rank.finish(request);
          await("the answer", [&] { return word.load(std::memory_order_acquire) == round; });
        } else {
          await("a signal", [&] { return word.load(std::memory_order_acquire) == round; });
          require(here[2 * kWords - 1] == round, "the last word came after the signal");
          require(std::count(here.begin(), here.end() - 2, round) == 2 * kWords,
                  "a word came after the signal");
          require_ok(rank.put_signal({.rank = 0}, {}, 0, {}, signal, &request), "iputSignal");
          rank.finish(request);
        }
      }
      rank.add_memory(here.data(), 8);
    });
  }
}

// The bytes and the signal of a request that is done are at the target.
TEST(nccl_plugin_completion_means_landed) {
  const Setting set("interface=lo,wire=tcp,delay_us=300,seed=2");
  std::vector<uint64_t> memory(100'001);
  World{.version = Version::kGin11, .ranks = 2}.run([&](Rank& rank) {
    std::vector<uint64_t> own(100'000);
    void* source = rank.add_memory(own.data(), own.size() * 8).front();
    void* target = rank.add_memory(memory.data(), memory.size() * 8).front();
    for (uint64_t round = 1; rank.rank == 0 && round <= 30; ++round) {
      std::ranges::fill(own, round);
      void* request = nullptr;
      require_ok(
          rank.put_signal({.rank = 1}, {.memory = source}, own.size() * 8, {.memory = target},
                          {.at = {.memory = target, .offset = own.size() * 8}}, &request),
          "iputSignal");
      rank.finish(request);
      require(std::ranges::count(memory, round) >= 100'000, "a put was done before it had landed");
      require(memory.back() == round, "a put was done before its signal");
    }
    // Both keep their memory until the puts are over.
    rank.add_memory(own.data(), 8);
  });
}

// A flush follows the puts of its context: their bytes are at the target when it is done.
TEST(nccl_plugin_flush_follows_puts) {
  const Setting set("interface=lo,wire=tcp,delay_us=500,swap_one_in=2,seed=9");
  std::vector<uint64_t> memory(1000);
  World{.ranks = 2}.run([&](Rank& rank) {
    std::vector<uint64_t> own(1000, 7);
    void* source = rank.add_memory(own.data(), own.size() * 8).front();
    void* target = rank.add_memory(memory.data(), memory.size() * 8).front();
    if (rank.rank == 0) {
      std::vector<void*> requests(1000);
      for (uint64_t i = 0; i < 1000; ++i) {
        require_ok(rank.put({.rank = 1}, {.memory = source, .offset = 8 * i}, 8,
                            {.memory = target, .offset = 8 * i}, &requests[i]),
                   "iput");
      }
      void* flush = nullptr;
      require_ok(rank.flush({.rank = 1}, &flush), "iflush");
      rank.finish(flush);
      for (void* request : requests) require(rank.test(request), "a flush was done before a put");
      require(std::ranges::count(memory, 7U) == 1000, "a flush was done before a put had landed");
    }
    // Both keep their memory until the puts are over.
    rank.add_memory(own.data(), 8);
  });
}

// Ranks come to `connect` in any order, and a stranger at the port does no harm.
TEST(nccl_plugin_connects_in_any_order) {
  const Setting set("interface=lo,wire=tcp");
  for (int late = 0; late < 4; ++late) {
    Gathering gathering(4);
    std::vector<std::thread> threads;
    threads.reserve(4);
    std::vector<std::string> failures(4);
    for (int number = 0; number < 4; ++number) {
      threads.emplace_back([&, number] {
        try {
          Rank rank(Version::kGin11, number, 4);
          rank.open([&](std::vector<Handle>& handles) {
            gathering.gather(number, handles);
            Address address;
            std::memcpy(&address, handles[3].data(), sizeof address);
            Socket stranger;
            require(begin_connect(address, stranger).empty(), "a stranger connects");
            size_t sent = 0;
            const Hello hello{.nonce = address.nonce + 1, .rank = 0};
            static_cast<void>(
                stranger.send(reinterpret_cast<const std::byte*>(&hello), sizeof hello, sent));
            if (number == late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
          });
          uint64_t word = 0;
          rank.add_memory(&word, sizeof word);  // waits for all
        } catch (const std::exception& error) {
          failures[static_cast<size_t>(number)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(failures, std::vector<std::string>(4));
  }
}

// One process for each rank; over both wires, and as several hosts by NCCL_HOSTID.
TEST(nccl_plugin_processes) {
  for (const char* setting : {"interface=lo", "interface=lo,wire=tcp", "interface=lo,seed=4"}) {
    for (const size_t ranks : {size_t{2}, size_t{3}, size_t{5}}) {
      const Setting set(setting);
      Processes processes(
          static_cast<int>(ranks),
          [](Rank& rank, Pipes& pipe) {
            TrafficRank traffic(rank, {.seed = 11, .rounds = 6, .most_bytes = 100'000});
            traffic.run();
            char word = Log::get().take().empty() ? 'y' : 'n';
            // The parent's end is the end: nobody leaves before.
            require(pipe.put(1, &word, 1) && pipe.get(1, &word, 1), "the end");
          },
          [&](int rank) {
            if (!contains(setting, "seed")) return;
            const std::string host = std::to_string(rank);
            setenv("NCCL_HOSTID", host.c_str(), 1);  // NOLINT(concurrency-mt-unsafe)
          });
      for (size_t rank = 0; rank < ranks; ++rank) processes.expect({rank}, 'y');
    }
  }
}

TEST(nccl_plugin_properties) {
  const Setting set("");
  int devices = 0;
  CHECK(ncclNetPlugin_v11.devices(&devices) == Result::kSuccess);
  CHECK_EQ(devices, 1);
  abi::NetProperties11 net{};
  CHECK(ncclNetPlugin_v11.get_properties(0, &net) == Result::kSuccess);
  CHECK_EQ(net.device_type, 0);  // else NCCL does not take the NET, and with it not the GIN
  CHECK_EQ(net.memory_kinds, abi::kHostMemory);
  abi::NetProperties11 gin{};
  CHECK(ncclGinPlugin_v11.get_properties(0, &gin) == Result::kSuccess);
  CHECK_EQ(gin.device_type, abi::kDeviceGinProxy);
  CHECK_EQ(gin.memory_kinds, abi::kHostMemory | abi::kCudaMemory);
  abi::NetProperties12 rma{};
  CHECK(ncclRmaPlugin_v14.get_properties(0, &rma) == Result::kSuccess);
  CHECK_EQ(rma.device_type, abi::kDeviceGinProxy);
  CHECK_EQ(rma.receives & (rma.receives - 1), 0);  // NCCL's queues are powers of two
  CHECK(ncclRmaPlugin_v13.get_properties(1, &rma) == Result::kInvalidArgument);
}

}  // namespace fanfold::nccl_plugin
