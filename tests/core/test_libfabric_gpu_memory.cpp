// Registration of a GPU's memory: with the providers of this machine, which all refuse it, and with
// a libfabric that plays a NIC. The "GPU's memory" is memory of this process.
#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "fake_libfabric.hpp"
#include "libfabric_pair.hpp"
#include "transport/libfabric.h"
#include "transport/libfabric_gpu_memory.h"

using namespace fanfold;
using namespace fanfold::transport;
using libfabric::Fake;
using libfabric::FakeBehaviour;
using libfabric::version;

namespace {

constexpr int64_t kBytes = 4096;
constexpr uint64_t kAccess =
    libfabric::kWrite | libfabric::kRemoteWrite | libfabric::kSend | libfabric::kRecv;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A library with a NIC that offers all that is needed.
FakeBehaviour offering(uint32_t library = version(1, 20)) {
  return {.version = library, .pci = true, .hmem = true};
}

// Two transports over the fake, each with memory of the CPU and perhaps of a GPU.
struct World {
  explicit World(const FakeBehaviour& behaviour, int32_t endpoints = 1, int32_t nics = 1,
                 bool gpu_memory = true) {
    const libfabric::Library& library = libfabric::fake_library(behaviour);
    const std::string kind = behaviour.provider.substr(0, behaviour.provider.find(';'));
    const LibfabricOptions options{
        .request = {.provider = kind, .gpu_memory = gpu_memory, .nics_wanted = nics},
        .endpoints_per_nic = endpoints};
    for (auto& side : sides) {
      side.transport = open_libfabric(library, options);
      side.cpu.assign(kBytes, std::byte{1});
      side.gpu.assign(kBytes, std::byte{2});
      side.of_cpu = side.transport->register_memory(side.cpu.data(), kBytes);
      CHECK(side.of_cpu.index >= 0);
    }
    CHECK_EQ(sides[0].transport->connect(1, sides[1].transport->address()), Code::kOk);
    CHECK_EQ(sides[1].transport->connect(0, sides[0].transport->address()), Code::kOk);
    Fake::get().registrations.clear();
  }

  // Registers the GPU's memory of side 0, with `dmabuf`.
  LocalMemory register_gpu(int dmabuf = -1) {
    return sides[0].transport->register_gpu_memory(
        {.data = sides[0].gpu.data(), .bytes = kBytes, .device = 3, .dmabuf = dmabuf});
  }

  // Writes `bytes` of side 0 into the CPU's memory of side 1, and awaits arrival and completion.
  void expect_delivered(LocalMemory source, const std::vector<std::byte>& from, int64_t bytes) {
    const Write write{.peer = 1,
                      .rail = 0,
                      .source = source,
                      .source_offset = 16,
                      .target = sides[1].transport->remote(sides[1].of_cpu),
                      .target_offset = 32,
                      .bytes = bytes,
                      .immediate = 5,
                      .context = 6};
    std::fill(sides[1].cpu.begin(), sides[1].cpu.end(), std::byte{0});
    const Code code = sides[0].transport->write(write);
    CHECK_EQ(code, Code::kOk);
    std::array<Event, 8> events{};
    CHECK_EQ(sides[0].transport->poll(events), 1);
    CHECK_EQ(events[0].kind, EventKind::kCompletion);
    CHECK_EQ(events[0].context, 6u);
    CHECK_EQ(sides[1].transport->poll(events), 1);
    CHECK_EQ(events[0].immediate, 5u);
    CHECK(std::equal(from.begin() + 16, from.begin() + 16 + bytes, sides[1].cpu.begin() + 32));
  }

  struct Side {
    std::vector<std::byte> cpu;
    std::vector<std::byte> gpu;
    LocalMemory of_cpu;
    std::unique_ptr<Transport> transport;
  };
  std::array<Side, 2> sides;
};

// What a world says that refuses a GPU's memory, and goes on with that of the CPU.
std::string refusal_in(const FakeBehaviour& behaviour) {
  World world(behaviour);
  CHECK_EQ(world.register_gpu().index, -1);
  const std::string why = world.sides[0].transport->why_no_gpu_memory();
  CHECK(!why.empty());
  CHECK(contains(world.sides[0].transport->error(),
                 "cannot be registered with libfabric:" + behaviour.provider + ": " + why));
  CHECK(Fake::get().registrations.empty());
  const std::vector<std::string> opened = {"nic0", "nic0"};
  CHECK_EQ(Fake::get().opened_nics, opened);
  world.expect_delivered(world.sides[0].of_cpu, world.sides[0].cpu, 2000);
  return why;
}

}  // namespace

TEST(libfabric_gpu_memory_is_refused_by_providers_that_copy) {
  if (left_out_without_libfabric("libfabric_gpu_memory_is_refused_by_providers_that_copy")) return;
  for (const char* provider : {"tcp", "shm"}) {
    Pair pair(provider, kBytes);
    libfabric::Request request = libfabric::parse_setting(std::string("libfabric:") + provider);
    CHECK_EQ(pair.at(0).transport->why_no_gpu_memory(), "it was not asked for");
    request.gpu_memory = true;
    for (Side& side : pair.sides) {
      side.transport = open_libfabric({.request = request, .endpoints_per_nic = 1});
      side.local = side.transport->register_memory(side.memory.data(), kBytes);
      CHECK(side.local.index >= 0);
    }
    Transport& transport = *pair.at(0).transport;
    const std::string name(transport.name());  // of tcp, "libfabric:net" in libfabric 1.17
    const std::string why = transport.why_no_gpu_memory();
    CHECK_EQ(why, name.substr(name.find(':') + 1) + " moves bytes by the CPU");
    const LocalMemory gpu = transport.register_gpu_memory(
        {.data = pair.at(0).memory.data(), .bytes = kBytes, .device = 0});
    CHECK_EQ(gpu.index, -1);
    std::string said = "a GPU's memory cannot be registered with ";
    said.append(name).append(": ").append(why);
    CHECK_EQ(transport.error(), said);
    for (int32_t rank = 0; rank < 2; ++rank) {
      const Address address = pair.at(1 - rank).transport->address();
      CHECK_EQ(pair.at(rank).transport->connect(1 - rank, address), Code::kOk);
    }
    pair.at(0).memory[7] = std::byte{9};
    pair.send(0, pair.write_of(0, 0, 64, 1));
    pair.await(1, 1);
    CHECK(pair.at(1).memory[7] == std::byte{9});
  }
}

TEST(libfabric_gpu_memory_is_not_searched_for_unless_asked) {
  World world(offering(), 1, 1, false);
  CHECK_EQ(world.sides[0].transport->why_no_gpu_memory(), "it was not asked for");
  CHECK_EQ(world.register_gpu().index, -1);
  CHECK_EQ(Fake::get().searches.size(), 2u);  // one for each side
  CHECK(Fake::get().hmem_nics.empty());
  CHECK(Fake::get().cuda_permitted.empty());
  for (const Fake::Search& search : Fake::get().searches) {
    CHECK(!search.hmem);
    CHECK_EQ(search.version, libfabric::kNewestApi);
  }
}

TEST(libfabric_gpu_memory_is_registered_by_its_descriptor) {
  World world(offering(version(1, 22)));
  CHECK_EQ(world.sides[0].transport->why_no_gpu_memory(), "");
  CHECK_EQ(Fake::get().hmem_nics.size(), 2u);
  CHECK(world.register_gpu(77).index > world.sides[0].of_cpu.index);
  CHECK_EQ(Fake::get().registrations.size(), 1u);
  const Fake::Registration& made = Fake::get().registrations[0];
  CHECK_EQ(made.iface, libfabric::kHmemCuda);
  CHECK_EQ(made.device, 3);
  CHECK_EQ(made.access, kAccess);
  CHECK_EQ(made.flags, libfabric::kMrDmabuf);
  CHECK_EQ(made.pages.descriptor, 77);
  CHECK_EQ(made.pages.offset, 0u);
  CHECK_EQ(made.pages.bytes, static_cast<size_t>(kBytes));
  CHECK(made.pages.base == world.sides[0].gpu.data());
  // The newer API is asked for where it is needed, and no newer one than that.
  CHECK_EQ(Fake::get().searches[0].version, version(1, 17));
  CHECK_EQ(Fake::get().searches[1].version, version(1, 20));
  CHECK(Fake::get().searches[1].hmem);
}

TEST(libfabric_gpu_memory_is_registered_by_address_otherwise) {
  for (const bool old : {false, true}) {
    World world(offering(old ? version(1, 19) : version(1, 20)));
    CHECK(world.register_gpu(old ? 77 : -1).index >= 0);
    const Fake::Registration& made = Fake::get().registrations.at(0);
    CHECK_EQ(made.iface, libfabric::kHmemCuda);
    CHECK_EQ(made.device, 3);
    CHECK_EQ(made.access, kAccess);
    CHECK_EQ(made.flags, 0u);
    CHECK_EQ(made.pages.bytes, static_cast<size_t>(kBytes));
    CHECK(made.pages.base == world.sides[0].gpu.data());
  }
}

TEST(libfabric_gpu_memory_leaves_registrations_of_the_cpu_as_they_are) {
  World world(offering());
  std::vector<std::byte> more(64);
  CHECK(world.sides[0].transport->register_memory(more.data(), 64).index >= 0);
  CHECK_EQ(Fake::get().registrations.at(0).iface, libfabric::kHmemSystem);
  CHECK_EQ(Fake::get().registrations.at(0).access, kAccess);
  world.expect_delivered(world.sides[0].of_cpu, world.sides[0].cpu, 2000);
}

TEST(libfabric_gpu_memory_is_written_from_with_a_descriptor_and_without_inject) {
  FakeBehaviour behaviour = offering();
  behaviour.inject_size = 64;
  World world(behaviour);
  const LocalMemory gpu = world.register_gpu(77);
  for (const int64_t bytes : {1, 64, 2000}) {
    Fake::get().descriptors.clear();
    world.expect_delivered(gpu, world.sides[0].gpu, bytes);
    CHECK_EQ(Fake::get().injected, 0);
    CHECK_EQ(Fake::get().descriptors.size(), 1u);
    CHECK(Fake::get().descriptors[0] != nullptr);
  }
  world.expect_delivered(world.sides[0].of_cpu, world.sides[0].cpu, 64);
  CHECK_EQ(Fake::get().injected, 1);
  // A write without bytes reads no memory, whatever source it names.
  world.expect_delivered(gpu, world.sides[0].gpu, 0);
  CHECK_EQ(Fake::get().injected, 2);
}

TEST(libfabric_gpu_memory_is_registered_with_every_nic_and_endpoint) {
  FakeBehaviour behaviour = offering();
  behaviour.nics = {"nic0", "nic1"};
  World nics(behaviour, 1, 2);
  const std::vector<std::string> opened = {"nic0", "nic1", "nic0", "nic1"};
  CHECK_EQ(Fake::get().hmem_nics, opened);
  CHECK(nics.register_gpu(77).index >= 0);
  CHECK_EQ(Fake::get().registrations.size(), 2u);
  behaviour = offering();
  behaviour.mr_mode = libfabric::kMrEndpoint | libfabric::kMrProvKey | libfabric::kMrVirtAddr;
  World endpoints(behaviour, 2);
  const LocalMemory gpu = endpoints.register_gpu();
  CHECK_EQ(Fake::get().registrations.size(), 2u);
  CHECK_EQ(endpoints.sides[0].transport->remote(gpu).base,
           reinterpret_cast<uint64_t>(endpoints.sides[0].gpu.data()));
  endpoints.expect_delivered(gpu, endpoints.sides[0].gpu, 2000);
}

TEST(libfabric_gpu_memory_is_refused_unless_all_nics_offer_it) {
  FakeBehaviour behaviour = offering();
  behaviour.nics = {"nic0", "nic1"};
  behaviour.no_hmem_on = "nic1";
  World world(behaviour, 1, 2);
  CHECK_EQ(world.sides[0].transport->why_no_gpu_memory(), "efa on nic1 does not offer FI_HMEM");
  CHECK_EQ(world.register_gpu().index, -1);
  CHECK(Fake::get().hmem_nics.empty());
  const std::vector<std::string> opened = {"nic0", "nic1", "nic0", "nic1"};
  CHECK_EQ(Fake::get().opened_nics, opened);
}

TEST(libfabric_gpu_memory_goes_without_calls_of_cuda) {
  const World efa(offering(version(1, 18)), 2);
  CHECK(Fake::get().cuda_permitted == std::vector<bool>(4, false));  // two endpoints on each side
  FakeBehaviour behaviour = offering(version(1, 18));
  behaviour.provider = "cxi";
  behaviour.forbid_cuda_with = EOPNOTSUPP;
  CHECK(contains(refusal_in(behaviour), "cxi on nic0 may call CUDA to move a GPU's memory"));
  // ofi_rxm would refuse for the sake of messages, which a transport does not send.
  behaviour.provider = "verbs;ofi_rxm";
  behaviour.version = version(1, 17);
  World verbs(behaviour);
  CHECK_EQ(verbs.sides[0].transport->why_no_gpu_memory(), "");
  CHECK(verbs.register_gpu().index >= 0);
}

TEST(libfabric_gpu_memory_is_refused_with_its_reason) {
  FakeBehaviour behaviour = offering();
  behaviour.pci = false;
  CHECK_EQ(refusal_in(behaviour), "efa on nic0 is no NIC on the PCI bus");
  CHECK_EQ(Fake::get().searches.size(), 2u);
  behaviour = offering();
  behaviour.hmem = false;
  CHECK_EQ(refusal_in(behaviour), "efa on nic0 does not offer FI_HMEM");
  CHECK_EQ(Fake::get().searches.size(), 4u);
  behaviour.no_hmem_with = ENOSYS;
  CHECK_EQ(refusal_in(behaviour), "efa on nic0 does not offer FI_HMEM");
  CHECK_EQ(refusal_in(offering(version(1, 8))), "libfabric 1.8 knows no GPU memory");
  CHECK_EQ(refusal_in(offering(version(1, 17))),
           "libfabric 1.17 cannot keep efa from calling CUDA (1.18 can)");
  behaviour = offering();
  behaviour.hmem_mr_mode |= 1 << 11;  // FI_MR_COLLECTIVE
  CHECK(contains(refusal_in(behaviour), "efa on nic0 is not usable with FI_HMEM: it needs memory"));
  CHECK(Fake::get().hmem_nics.empty());
  // Offers of a provider that copies do not count, even with a NIC.
  behaviour = offering();
  behaviour.provider = "tcp";
  CHECK_EQ(refusal_in(behaviour), "tcp moves bytes by the CPU");
  CHECK(Fake::get().hmem_nics.empty());
}

TEST(libfabric_gpu_memory_is_given_up_if_nics_open_only_without) {
  FakeBehaviour behaviour = offering();
  behaviour.no_hmem_domain_with = ENOSYS;
  World world(behaviour);
  CHECK(contains(world.sides[0].transport->why_no_gpu_memory(), "fi_domain"));
  CHECK_EQ(world.register_gpu().index, -1);
  world.expect_delivered(world.sides[0].of_cpu, world.sides[0].cpu, 2000);
}

TEST(libfabric_gpu_memory_that_cannot_be_registered) {
  FakeBehaviour behaviour = offering();
  behaviour.regattr_with = EFAULT;
  World world(behaviour);
  CHECK_EQ(world.register_gpu(77).index, -1);
  for (const char* part : {"libfabric:efa", "fi_mr_regattr of 4096 bytes of GPU 3",
                           "by a dmabuf descriptor", "nvidia-peermem"}) {
    CHECK(contains(world.sides[0].transport->error(), part));
  }
  CHECK_EQ(world.register_gpu().index, -1);
  CHECK(contains(world.sides[0].transport->error(), "by address"));
  const GpuMemory nothing{.data = nullptr, .bytes = 0, .device = 0};
  CHECK_EQ(world.sides[0].transport->register_gpu_memory(nothing).index, -1);
  CHECK(contains(world.sides[0].transport->error(), "at least 1 is needed"));
  world.expect_delivered(world.sides[0].of_cpu, world.sides[0].cpu, 2000);
}

TEST(libfabric_networks_say_where_rows_of_gpus_land) {
  FakeBehaviour behaviour = offering();
  behaviour.nics = {"nic0", "nic1"};
  for (const bool hmem : {true, false}) {
    behaviour.hmem = hmem;
    const auto networks = libfabric::find_networks(libfabric::fake_library(behaviour));
    CHECK_EQ(networks.size(), 2u);
    for (const libfabric::Network& network : networks) {
      CHECK_EQ(network.why_no_gpu_memory,
               hmem ? "" : "efa on " + network.nic + " does not offer FI_HMEM");
    }
  }
}

TEST(libfabric_gpu_memory_is_offered_at_the_same_address) {
  const libfabric::Library& library = libfabric::fake_library(offering());
  using Owner = std::unique_ptr<libfabric::Info, void (*)(libfabric::Info*)>;
  const auto made = [](const char* nic, bool hmem, char& address) {
    Owner info(libfabric::fake_info(nic, hmem), libfabric::fake_free);
    info->src_addr = &address;
    info->src_addrlen = 1;
    return info;
  };
  std::array<char, 3> addresses = {'a', 'b', 'c'};
  const Owner plain = made("nic0", false, addresses[1]);
  const Owner elsewhere = made("nic1", true, addresses[1]);
  const Owner other = made("nic0", true, addresses[0]);
  const Owner same = made("nic0", true, addresses[1]);
  const Owner third = made("nic0", true, addresses[2]);
  const auto found_in = [&](const std::vector<libfabric::Info*>& offers) {
    for (size_t i = 0; i < offers.size(); ++i) {
      offers[i]->next = i + 1 < offers.size() ? offers[i + 1] : nullptr;
    }
    const libfabric::Info* found = libfabric::find_gpu_offer(library, *plain, offers[0]).info;
    for (libfabric::Info* offer : offers) offer->next = nullptr;
    return found;
  };
  CHECK(found_in({elsewhere.get(), other.get(), same.get(), third.get()}) == same.get());
  CHECK(found_in({elsewhere.get(), other.get()}) == other.get());
  CHECK(found_in({elsewhere.get()}) == nullptr);
}

// The kernel's record of RDMA devices, where libfabric has none of the bus.
TEST(libfabric_gpu_memory_needs_a_nic_that_the_kernel_finds_on_the_pci_bus) {
  namespace fs = std::filesystem;
  libfabric::fake_library({});
  const fs::path folder = fs::temp_directory_path() / ("fanfold-nics-" + std::to_string(getpid()));
  for (const char* name : {"mlx5_0", "rxe0", "other0"}) {
    fs::create_directories(folder / name / "device");
    const char* bus = std::string(name) == "other0" ? "/sys/bus/virtio" : "/sys/bus/pci";
    fs::create_directory_symlink(bus, folder / name / "device" / "subsystem");
  }
  fs::create_directory(folder / "rxe0" / "parent");
  const auto on_bus = [&](const char* nic) {
    const std::unique_ptr<libfabric::Info, void (*)(libfabric::Info*)> info(
        libfabric::fake_info(nic), libfabric::fake_free);
    return libfabric::on_pci_bus(*info, folder.string());
  };
  CHECK(on_bus("mlx5_0"));
  CHECK(!on_bus("rxe0"));
  CHECK(!on_bus("other0"));
  CHECK(!on_bus("missing0"));
  const std::unique_ptr<libfabric::Info, void (*)(libfabric::Info*)> bare(
      libfabric::fake_info("mlx5_0"), libfabric::fake_free);
  bare->nic = nullptr;
  CHECK(libfabric::on_pci_bus(*bare, folder.string()));
  fs::remove_all(folder);
}
