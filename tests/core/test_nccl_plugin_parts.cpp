// Parts of the NCCL plugin that need no second rank: settings, the order of an outbox, GPU memory
// over a driver of the test's own, what the library exports; and NET, whose two ends are here.
#include <elf.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "nccl_plugin/gpu_memory.h"
#include "nccl_plugin/outbox.h"
#include "nccl_plugin/settings.h"
#include "nccl_plugin/sockets.h"
#include "nccl_plugin_world.hpp"

namespace fanfold::nccl_plugin {
namespace {

struct Left {
  int64_t at;
  uint32_t context;
  uint64_t id;
  bool operator==(const Left&) const = default;
};

Message put(uint64_t id, uint32_t context, bool signals) {
  return bare({.kind = Kind::kPut,
               .id = id,
               .context = context,
               .memory = 1,
               .signal_memory = signals ? 1U : 0U});
}

// 300 messages in 3 contexts, every fifth of a context with a signal, and when they leave.
std::vector<Left> leave(const Settings& settings, int32_t rank, int32_t peer) {
  Outbox outbox(settings, rank, peer);
  for (uint64_t id = 0; id < 300; ++id) {
    outbox.push(put(id, static_cast<uint32_t>(id % 3), id / 3 % 5 == 4), 0);
  }
  std::vector<Left> left;
  for (auto next = outbox.next_ns(); next; next = outbox.next_ns()) {
    CHECK(!outbox.pop(*next - 1));
    const auto message = outbox.pop(*next);
    CHECK(message.has_value());
    left.push_back({.at = *next, .context = message->header.context, .id = message->header.id});
  }
  CHECK(outbox.empty());
  return left;
}

// A driver that copies on the host, and notes its calls.
struct FakeDriver {
  static inline std::vector<std::string> calls;
  static inline int depth = 0;
  static inline int failing = 0;
  static inline int capture_mode = 0;
  static inline bool device_full = false;
  static inline int device = 3;
  static int note(const char* name) {
    calls.emplace_back(name);
    if (capture_mode != 2) calls.emplace_back("which ends a capture");
    return failing != 0 && depth > 0 ? failing : 0;
  }
  static int name_error(int /*error*/, const char** name) {
    *name = "CUDA_ERROR_OF_THE_TEST";
    return 0;
  }
  static Driver table() {
    return {
        .init = [](unsigned) { return 0; },
        .pointer_attribute =
            [](void* value, int attribute, uintptr_t) {
              *static_cast<int*>(value) = device;
              return attribute == 9 ? 0 : 1;
            },
        .create_context =
            [](void** context, unsigned flags, int device) {
              *context = &calls;
              calls.push_back("context of " + std::to_string(device));
              if (device_full) return 2;
              ++depth;  // it becomes the current one
              return flags == 0 && capture_mode == 2 ? 0 : 1;
            },
        .destroy_context =
            [](void* context) { return context == &calls ? note("end of the context") : 1; },
        .push_context =
            [](void* context) {
              ++depth;
              return context == &calls ? 0 : 1;
            },
        .pop_context =
            [](void**) {
              --depth;
              return 0;
            },
        .exchange_capture_mode =
            [](int* mode) {
              std::swap(*mode, capture_mode);
              return 0;
            },
        .create_stream =
            [](void** stream, unsigned flags) {
              *stream = &depth;
              return flags == 1 ? note("create") : 1;
            },
        .destroy_stream = [](void*) { return note("destroy"); },
        .synchronize = [](void* stream) { return stream == &depth ? note("synchronize") : 1; },
        .to_device =
            [](uintptr_t to, const void* from, size_t bytes, void* stream) {
              std::memcpy(reinterpret_cast<void*>(to), from, bytes);
              return stream == &depth ? note("to device") : 1;
            },
        .to_host =
            [](void* to, uintptr_t from, size_t bytes, void* stream) {
              std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
              return stream == &depth ? note("to host") : 1;
            },
        .write_word =
            [](void* stream, uintptr_t to, uint64_t value, unsigned) {
              std::memcpy(reinterpret_cast<void*>(to), &value, sizeof value);
              return stream == &depth ? note("write word") : 1;
            },
        .error_name = name_error,
    };
  }
};

// Both ends of a connection of NET.
struct NetPair {
  NetPair() {
    void* instance = nullptr;
    require_ok(ncclNetPlugin_v11.init(&instance, 1, nullptr, Log::write, nullptr), "init");
    Handle handle{};
    require_ok(ncclNetPlugin_v11.listen(instance, 0, handle.data(), &listener), "listen");
    require_ok(ncclNetPlugin_v11.accept(listener, &receiver, nullptr), "accept");
    CHECK(receiver == nullptr);  // nobody has connected yet, and nobody waits
    require_ok(ncclNetPlugin_v11.connect(instance, 0, handle.data(), &sender, nullptr), "connect");
    await("a connection", [&] {
      require_ok(ncclNetPlugin_v11.accept(listener, &receiver, nullptr), "accept");
      return receiver != nullptr;
    });
  }
  ~NetPair() {
    ncclNetPlugin_v11.close_sender(sender);
    ncclNetPlugin_v11.close_receiver(receiver);
    ncclNetPlugin_v11.close_listener(listener);
  }
  NetPair(const NetPair&) = delete;
  NetPair& operator=(const NetPair&) = delete;

  void* send(std::vector<std::byte>& data) const {
    void* request = nullptr;
    require_ok(
        ncclNetPlugin_v11.send(sender, data.data(), data.size(), 0, nullptr, nullptr, &request),
        "isend");
    return request;
  }
  void* receive(std::vector<std::byte>& data) const {
    void* pointer = data.data();
    size_t bytes = data.size();
    int tag = 0;
    void* memory = nullptr;
    void* request = nullptr;
    require_ok(
        ncclNetPlugin_v11.receive(receiver, 1, &pointer, &bytes, &tag, &memory, nullptr, &request),
        "irecv");
    return request;
  }
  static bool test(void* request, int& bytes) {
    int done = 0;
    require_ok(ncclNetPlugin_v11.test(request, &done, &bytes), "test");
    return done == 1;
  }

  void* listener = nullptr;
  void* sender = nullptr;
  void* receiver = nullptr;
};

// The names that a shared library defines for others.
std::set<std::string> exported_names(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string image((std::istreambuf_iterator<char>(file)), {});
  const auto read = [&](auto& into, size_t offset) {
    CHECK(offset + sizeof into <= image.size());
    std::memcpy(&into, image.data() + offset, sizeof into);
  };
  Elf64_Ehdr header{};
  read(header, 0);
  std::set<std::string> names;
  for (size_t number = 0; number < header.e_shnum; ++number) {
    Elf64_Shdr section{};
    read(section, header.e_shoff + number * sizeof section);
    if (section.sh_type != SHT_DYNSYM) continue;
    Elf64_Shdr texts{};
    read(texts, header.e_shoff + section.sh_link * sizeof texts);
    for (size_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol{};
      read(symbol, section.sh_offset + at);
      if (symbol.st_shndx == SHN_UNDEF) continue;
      names.insert(image.data() + texts.sh_offset + symbol.st_name);
    }
  }
  return names;
}

}  // namespace

TEST(nccl_plugin_exports_four_symbols) {
  const std::set<std::string> wanted = {"ncclNetPlugin_v11", "ncclGinPlugin_v11",
                                        "ncclRmaPlugin_v13", "ncclRmaPlugin_v14"};
  CHECK_EQ(exported_names(FANFOLD_NCCL_PLUGIN_FILE), wanted);
}

TEST(nccl_plugin_settings) {
  Settings settings;
  CHECK_EQ(parse_settings("", settings), "");
  CHECK_EQ(parse_settings("interface=eth0,wire=tcp,timeout_ms=5,seed=18446744073709551615,"
                          "delay_us=3,swap_one_in=4,error_one_in=9",
                          settings),
           "");
  CHECK_EQ(settings.interface, "eth0");
  CHECK(settings.tcp_only);
  CHECK_EQ(settings.timeout_ms, 5);
  CHECK_EQ(settings.seed, UINT64_MAX);
  CHECK_EQ(settings.delay_us, 3);
  CHECK_EQ(settings.swap_one_in, 4);
  CHECK_EQ(settings.error_one_in, 9);
  const Settings before = settings;
  for (const char* wrong : {"seed", "seed=", "seed=x", "seed=-1", "seed=3x", "delay_us=-1",
                            "timeout_ms=0", "wire=udp", "speed=3", "seed=4,,", "seed=4 "}) {
    const Problem problem = parse_settings(wrong, settings);
    CHECK(contains(problem, "FANFOLD_NCCL_PLUGIN: "));
    CHECK_EQ(settings.seed, before.seed);
  }
  CHECK(contains(parse_settings("timeout_ms=0", settings),
                 "timeout_ms is '0', but must be a whole number from 1 to 86400000"));
  const Setting set("interface=nowhere");
  void* listener = nullptr;
  Handle handle{};
  void* instance = nullptr;
  CHECK(ncclGinPlugin_v11.init(&instance, 1, Log::write) == Result::kSuccess);
  CHECK(ncclGinPlugin_v11.listen(nullptr, 0, handle.data(), &listener) == Result::kSystemError);
  CHECK(contains(Log::get().take(), "no interface 'nowhere' is up with an address; those"));
  const Setting bad("seed=no");
  CHECK(ncclRmaPlugin_v13.init(&instance, 1, Log::write) == Result::kInvalidArgument);
  CHECK(contains(Log::get().take(), "seed is 'no'"));
}

TEST(nccl_plugin_outbox_without_hostility_keeps_the_order) {
  const std::vector<Left> left = leave({}, 0, 1);
  CHECK_EQ(left.size(), 300);
  for (uint64_t id = 0; id < 300; ++id) CHECK_EQ(left[id].id, id);
}

TEST(nccl_plugin_outbox_of_hostile_seeds) {
  int others = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Settings settings{
        .interface = {}, .seed = seed, .delay_us = 1000, .swap_one_in = 2, .error_one_in = 0};
    const std::vector<Left> left = leave(settings, 0, 1);
    CHECK(leave(settings, 0, 1) == left);  // the same seed decides the same
    if (leave(settings, 1, 0) != left) ++others;
    CHECK_EQ(left.size(), 300);
    std::map<uint32_t, std::vector<uint64_t>> by_context;
    for (const Left& one : left) by_context[one.context].push_back(one.id);
    bool contexts_mix = false;
    for (size_t i = 0; i < left.size(); ++i) contexts_mix |= left[i].context != i % 3;
    CHECK(contexts_mix);
    size_t swapped = 0;
    for (const auto& [context, ids] : by_context) {
      CHECK_EQ(ids.size(), 100);
      for (size_t i = 0; i < ids.size(); ++i) {
        // Puts change places between two signals only, and signals keep theirs.
        CHECK_EQ(ids[i] / 15, i / 5);
        if (i % 5 == 4) CHECK_EQ(ids[i], 3 * i + context);
        if (ids[i] != 3 * i + context) ++swapped;
      }
    }
    CHECK(swapped > 20);
  }
  CHECK(others > 35);
}

TEST(nccl_plugin_outbox_swaps_no_get_and_no_flush) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Outbox outbox({.interface = {}, .seed = seed, .swap_one_in = 1}, 0, 1);
    for (uint64_t id = 0; id < 30; ++id) {
      Message message = put(id, 0, false);
      if (id % 3 == 1) message.header.kind = Kind::kGet;
      if (id % 3 == 2) message.header.kind = Kind::kFlush;
      outbox.push(std::move(message), 0);
    }
    for (uint64_t id = 0; id < 30; ++id) {
      const auto message = outbox.pop(0);
      CHECK(message.has_value() && message->header.id == id);
    }
  }
}

TEST(nccl_plugin_gpu_memory) {
  using Fake = FakeDriver;
  const Driver driver = Fake::table();
  Fake::calls.clear();
  std::vector<uint64_t> pretended(8, 1);
  {
    Problem problem;
    const auto memory = gpu_memory(driver, pretended.data(), 64, problem);
    CHECK_EQ(problem, "");
    CHECK(Fake::calls == (std::vector<std::string>{"context of 3", "create"}));
    Fake::calls.clear();
    CHECK(gpu_memory(driver, pretended.data(), 8, problem) != nullptr);  // shares the context
    CHECK(Fake::calls == (std::vector<std::string>{"create", "destroy"}));
    Fake::calls.clear();
    for (int turn = 0; turn < 2; ++turn) {  // another device has its own, and anew after its end
      Fake::device = 4;
      CHECK(gpu_memory(driver, pretended.data(), 8, problem) != nullptr);
      CHECK(Fake::calls ==
            (std::vector<std::string>{"context of 4", "create", "destroy", "end of the context"}));
      Fake::calls.clear();
    }
    Fake::device = 3;
    const uint64_t value = 5;
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    CHECK_EQ(memory->write(8, bytes, 8), "");
    // The signal's write begins when the payload's copy is over, and adds to what the GPU has.
    CHECK_EQ(memory->add(8, 10), "");
    CHECK(Fake::calls == (std::vector<std::string>{"to device", "synchronize", "to host",
                                                   "synchronize", "write word", "synchronize"}));
    CHECK_EQ(pretended, (std::vector<uint64_t>{1, 15, 1, 1, 1, 1, 1, 1}));
    pretended[1] = 0;  // a kernel resets the signal
    CHECK_EQ(memory->add(8, 2), "");
    CHECK_EQ(pretended[1], 2);
    uint64_t back = 0;
    CHECK_EQ(memory->read(8, reinterpret_cast<std::byte*>(&back), 8), "");
    CHECK_EQ(back, 2);
    CHECK(contains(memory->write(60, bytes, 8), "8 bytes at offset 60 of a registration of 64"));
    Fake::failing = 700;
    CHECK(contains(memory->write(0, bytes, 8), "on GPU 3 fails: CUDA_ERROR_OF_THE_TEST"));
    CHECK(contains(memory->add(0, 1), "on GPU 3 fails: CUDA_ERROR_OF_THE_TEST"));
    Fake::failing = 0;
    CHECK_EQ(Fake::depth, 0);
    CHECK_EQ(Fake::capture_mode, 0);
    memory->close();
    CHECK(contains(memory->write(0, bytes, 8), "has deregistered"));
    Fake::calls.clear();
  }
  CHECK(Fake::calls == (std::vector<std::string>{"destroy", "end of the context"}));
  CHECK_EQ(Fake::depth, 0);
  Fake::device_full = true;
  Problem problem;
  CHECK(gpu_memory(driver, pretended.data(), 64, problem) == nullptr);
  CHECK(contains(
      problem,
      "cuCtxCreate on GPU 3 fails: CUDA_ERROR_OF_THE_TEST; the plugin has a CUDA context"));
  CHECK_EQ(Fake::calls.back(), "context of 3");  // and no end of it
  CHECK_EQ(Fake::depth, 0);
  Fake::device_full = false;
}

TEST(nccl_plugin_net_moves_messages) {
  const Setting set("interface=lo");
  const NetPair pair;
  const size_t sizes[] = {0, 1, 8, 100'000, 0, size_t{6} << 20, 77};
  std::vector<std::vector<std::byte>> sent;
  std::vector<std::vector<std::byte>> got;
  for (const size_t size : sizes) {
    sent.emplace_back(size, static_cast<std::byte>(size % 251 + 1));
    got.emplace_back(size + 5);
  }
  std::vector<void*> requests;
  for (size_t i = 0; i < sent.size(); ++i) {
    requests.push_back(pair.send(sent[i]));
    requests.push_back(pair.receive(got[i]));
  }
  std::vector<int> bytes(requests.size(), -1);
  std::vector<bool> done(requests.size());
  await("all messages", [&] {
    for (size_t i = 0; i < requests.size(); ++i) {
      if (!done[i]) done[i] = NetPair::test(requests[i], bytes[i]);
    }
    return std::ranges::find(done, false) == done.end();
  });
  for (size_t i = 0; i < sent.size(); ++i) {
    CHECK_EQ(bytes[2 * i + 1], sizes[i]);
    got[i].resize(sizes[i]);
    CHECK(got[i] == sent[i]);
  }
}

// Whoever connects to the port and sends nothing keeps nobody out.
TEST(nccl_plugin_net_accepts_beside_a_silent_stranger) {
  const Setting set("interface=lo");
  void* instance = nullptr;
  Handle handle{};
  void* listener = nullptr;
  CHECK(ncclNetPlugin_v11.init(&instance, 1, nullptr, Log::write, nullptr) == Result::kSuccess);
  CHECK(ncclNetPlugin_v11.listen(instance, 0, handle.data(), &listener) == Result::kSuccess);
  Address address;
  std::memcpy(&address, handle.data(), sizeof address);
  Socket stranger;
  CHECK_EQ(begin_connect(address, stranger), "");
  void* receiver = nullptr;
  void* sender = nullptr;
  for (int i = 0; i < 100; ++i) {  // time for the stranger
    CHECK(ncclNetPlugin_v11.accept(listener, &receiver, nullptr) == Result::kSuccess);
    CHECK(receiver == nullptr);
  }
  CHECK(ncclNetPlugin_v11.connect(instance, 0, handle.data(), &sender, nullptr) ==
        Result::kSuccess);
  await("a connection", [&] {
    require_ok(ncclNetPlugin_v11.accept(listener, &receiver, nullptr), "accept");
    return receiver != nullptr;
  });
  ncclNetPlugin_v11.close_sender(sender);
  ncclNetPlugin_v11.close_receiver(receiver);
  ncclNetPlugin_v11.close_listener(listener);
}

// 32 messages in flight, and no request for the next one until the oldest is tested.
TEST(nccl_plugin_net_bounds_requests) {
  const Setting set("interface=lo");
  const NetPair pair;
  std::vector<std::byte> data(10);
  std::vector<void*> sends;
  sends.reserve(abi::kNetRequests);
  for (int i = 0; i < abi::kNetRequests; ++i) sends.push_back(pair.send(data));
  CHECK(pair.send(data) == nullptr);
  int bytes = 0;
  CHECK(NetPair::test(sends.front(), bytes));
  CHECK(pair.send(data) != nullptr);
}

TEST(nccl_plugin_net_reports_errors) {
  const Setting set("interface=lo");
  {
    const NetPair pair;
    std::vector<std::byte> data(10);
    std::vector<std::byte> room(9);
    pair.send(data);
    void* pointer = room.data();
    size_t size = room.size();
    void* request = nullptr;
    CHECK(ncclNetPlugin_v11.receive(pair.receiver, 2, &pointer, &size, nullptr, nullptr, nullptr,
                                    &request) == Result::kInvalidArgument);
    int done = 0;
    int bytes = 0;
    await("the error", [&] {
      if (request == nullptr &&
          ncclNetPlugin_v11.receive(pair.receiver, 1, &pointer, &size, nullptr, nullptr, nullptr,
                                    &request) == Result::kRemoteError) {
        return true;
      }
      return ncclNetPlugin_v11.test(request, &done, &bytes) == Result::kRemoteError;
    });
    CHECK(contains(Log::get().take(), "a message of 10 bytes meets a receive of 9 bytes"));
    void* memory = nullptr;
    CHECK(ncclNetPlugin_v11.register_memory(pair.receiver, data.data(), 10, abi::kCudaMemory,
                                            &memory) == Result::kInvalidArgument);
  }
  NetPair pair;
  std::vector<std::byte> data(10);
  void* request = pair.receive(data);
  ncclNetPlugin_v11.close_sender(pair.sender);
  pair.sender = nullptr;
  int done = 0;
  int bytes = 0;
  await("the end of the peer",
        [&] { return ncclNetPlugin_v11.test(request, &done, &bytes) == Result::kRemoteError; });
  CHECK(contains(Log::get().take(), "the peer has ended"));
}

}  // namespace fanfold::nccl_plugin
