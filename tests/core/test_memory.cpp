// Symmetric memory: visibility between ranks, cleanup of operating-system resources, and every
// refusal.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.hpp"
#include "memory/region.h"
#include "memory/symmetric.h"
#include "ranks.hpp"

using namespace fanfold;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kBytes = 4096;

size_t open_descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

// The number of this process's descriptors that refer to Fanfold's memory.
size_t memory_descriptors() {
  size_t count = 0;
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // set for the descriptor that lists the others
    const fs::path target = fs::read_symlink(entry.path(), gone);
    if (target.string().find("memfd:fanfold") != std::string::npos) ++count;
  }
  return count;
}

size_t memory_mappings() {
  std::ifstream maps("/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:fanfold") != std::string::npos) ++count;
  }
  return count;
}

// Starts a process that runs `body`. `body` ends with pause(), so the process runs until it is
// killed.
pid_t start_idle_process(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
  }
  return child;
}

void interrupt() { throw std::runtime_error("interrupted"); }

}  // namespace

TEST(region_is_private_zeroed_and_nameless) {
  const Region region = Region::create(kBytes);
  struct stat status{};
  CHECK_EQ(fstat(region.descriptor(), &status), 0);
  CHECK_EQ(status.st_mode & 07777, 0600u);
  CHECK_EQ(status.st_size, kBytes);
  CHECK_EQ(status.st_nlink, 0u);
  CHECK_EQ(fcntl(region.descriptor(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  for (int64_t i = 0; i < kBytes; ++i) CHECK_EQ(std::to_integer<int>(region.data()[i]), 0);
}

TEST(region_refuses_a_size_it_cannot_have) {
  CHECK_THROWS(Region::create(-1), SystemFailure);
  CHECK_THROWS(Region::create(0), SystemFailure);
  CHECK_EQ(memory_descriptors(), 0u);
}

TEST(region_refuses_what_it_cannot_open) {
  const Region region = Region::create(kBytes);
  CHECK_THROWS(Region::open(getpid(), 1 << 20, kBytes), SystemFailure);
  CHECK_THROWS(Region::open(getpid(), region.descriptor(), kBytes + 1), SystemFailure);
  CHECK_THROWS(Region::open(1 << 30, 3, kBytes), SystemFailure);
  CHECK_EQ(memory_descriptors(), 1u);
  CHECK_EQ(memory_mappings(), 1u);
}

TEST(region_shares_and_moves_its_mapping) {
  Region region = Region::create(kBytes);
  Region shared = region.part(0, kBytes);
  CHECK(shared.data() == region.data());
  CHECK_EQ(shared.bytes(), kBytes);
  CHECK_EQ(shared.descriptor(), -1);
  const Region part = region.part(512, 16);
  CHECK(part.data() == region.data() + 512);
  CHECK_EQ(part.bytes(), 16);
  region.unmap();
  CHECK(region.data() == nullptr);
  CHECK_EQ(memory_descriptors(), 0u);
  shared.data()[kBytes - 1] = std::byte{7};
  Region moved = std::move(shared);
  CHECK_EQ(std::to_integer<int>(moved.data()[kBytes - 1]), 7);
  CHECK_EQ(memory_mappings(), 1u);
  moved = Region::create(kBytes);
  CHECK_EQ(memory_mappings(), 2u);  // the part keeps the first
  moved.unmap();
  CHECK_EQ(memory_mappings(), 1u);
}

TEST(memory_leaves_no_descriptor_mapping_or_name) {
  std::vector<fs::path> before;
  for (const auto& entry : fs::directory_iterator("/dev/shm")) before.push_back(entry.path());
  const size_t descriptors = open_descriptors();
  for (int round = 0; round < 50; ++round) {
    const Group group = mapped_group(options_for(3, kBytes));
    CHECK_EQ(memory_descriptors(), 0u);  // sealed: only the mappings remain
    CHECK_EQ(memory_mappings(), 9u);
    for (const auto& entry : fs::directory_iterator("/dev/shm")) {
      const std::string name = entry.path().filename().string();
      // Other tests' processes have endpoints of libfabric there, which the process's number tells.
      const bool of_others =
          name.starts_with("fanfold-") && !name.starts_with("fanfold-" + std::to_string(getpid()));
      CHECK(of_others || name.find("fanfold") == std::string::npos);
    }
    for (const auto& memory : group) memory->close();
    CHECK_EQ(memory_mappings(), 0u);
    CHECK_EQ(open_descriptors(), descriptors);
  }
}

// A forked child that uses its parent's memory gets an error, and does not affect the parent.
TEST(memory_of_a_parent_is_misuse_in_a_forked_child) {
  const Group group = SymmetricMemory::in_process(options_for(2, 4096));
  SymmetricMemory& own = *group[0];
  const auto is_misuse = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Misuse&) {
      return true;
    }
    return false;
  };
  int answers[2];
  CHECK_EQ(pipe(answers), 0);
  const pid_t child = start_idle_process([&] {
    bool right = is_misuse([&] { own.check_usable(); }) && is_misuse([&] { own.barrier(); }) &&
                 is_misuse([&] { own.window(0, 0, 8); }) && is_misuse([&] {
                   own.wait({.peer = 1,
                             .phase = Phase::kBarrier,
                             .call = 1,
                             .epoch = 1,
                             .offset = 0,
                             .alternative = 0},
                            [] { return 0; });
                 });
    // The child may map other memory at the address of the parent's mapping. Closing must not unmap
    // that memory.
    void* here = own.base(0) - ControlLayout{2}.bytes();
    void* mapped = mmap(here, 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    right = right && mapped == here;
    for (const auto& memory : group) memory->close();
    if (mapped != MAP_FAILED) *static_cast<volatile char*>(mapped) = 1;
    const char answer = right ? 'y' : 'n';
    static_cast<void>(!write(answers[1], &answer, 1));
    pause();
  });
  close(answers[1]);  // so that read() returns if the child crashes
  char answer = 0;
  CHECK_EQ(read(answers[0], &answer, 1), 1);
  CHECK_EQ(answer, 'y');
  close(answers[0]);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  own.check_usable();
  *own.window(1, 0, 8) = std::byte{3};
}

TEST(memory_is_not_inherited_by_forked_processes) {
  const Group group = mapped_group(options_for(2, kBytes));
  int to_parent[2];
  CHECK_EQ(pipe2(to_parent, O_CLOEXEC), 0);
  const pid_t child = start_idle_process([&] {
    const size_t mappings = memory_mappings();
    static_cast<void>(write(to_parent[1], &mappings, sizeof mappings) == sizeof mappings);
    pause();
  });
  close(to_parent[1]);
  size_t inherited = 0;
  const bool complete = read(to_parent[0], &inherited, sizeof inherited) == sizeof inherited;
  close(to_parent[0]);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(complete);
  CHECK_EQ(inherited, 0u);
  CHECK_EQ(memory_mappings(), 4u);
}

// A signal handler may close the memory that waits. The wait must not touch it afterwards.
TEST(memory_closed_by_an_interrupt_ends_its_wait) {
  static SymmetricMemory* waiting = nullptr;
  const Group group = mapped_group(options_for(2, kBytes));
  waiting = group[0].get();
  set_interrupt_check([] { waiting->close(); });
  CHECK_THROWS(group[0]->barrier(), Misuse);
  set_interrupt_check(nullptr);
}

TEST(memory_that_is_destroyed_without_close_leaves_nothing) {
  const size_t descriptors = open_descriptors();
  static_cast<void>(mapped_group(options_for(2, kBytes)));
  CHECK_EQ(memory_mappings(), 0u);
  CHECK_EQ(open_descriptors(), descriptors);
}

TEST(peers_see_what_is_written) {
  const Group group = mapped_group(options_for(3, kBytes));
  for (const auto& writer : group) {
    for (int32_t owner = 0; owner < 3; ++owner) {
      const auto value = static_cast<std::byte>(10 * writer->rank() + owner + 1);
      writer->base(owner)[writer->rank()] = value;
      for (const auto& reader : group) CHECK(reader->base(owner)[writer->rank()] == value);
    }
  }
  group[0]->peer(2).signal(64, Signal{7, -5});
  CHECK_EQ(group[2]->peek(64).epoch, 7u);
  CHECK_EQ(group[2]->peek(64).value, -5);
  CHECK_EQ(group[1]->peek(64).epoch, 0u);
}

TEST(ranks_of_one_process_share_one_mapping) {
  const size_t mappings = memory_mappings();
  const Group group = SymmetricMemory::in_process(options_for(3, kBytes));
  CHECK_EQ(memory_mappings() - mappings, 3u);
  for (int32_t rank = 0; rank < 3; ++rank) {
    CHECK_EQ(group[static_cast<size_t>(rank)]->rank(), rank);
    for (int32_t owner = 0; owner < 3; ++owner) {
      CHECK(group[static_cast<size_t>(rank)]->base(owner) == group[0]->base(owner));
    }
  }
  CHECK(group[0]->base(0) != group[0]->base(1));
  group[1]->close();
  CHECK_EQ(std::to_integer<int>(group[0]->base(1)[kBytes - 1]), 0);
}

TEST(map_refuses_what_is_not_its_peers_memory) {
  SymmetricMemory memory(options_for(2, kBytes));
  CHECK_THROWS(memory.map({memory.address()}), BadArgument);
  const Region other = Region::create(memory.mapped_bytes());
  CHECK_THROWS(memory.map({memory.address(), {getpid(), other.descriptor()}}), SystemFailure);
  const Region small = Region::create(memory.mapped_bytes() - 1);
  CHECK_THROWS(memory.map({memory.address(), {getpid(), small.descriptor()}}), SystemFailure);
}

TEST(close_is_idempotent_and_ends_all_use) {
  const Group group = mapped_group(options_for(2, kBytes));
  group[0]->check_usable();
  group[0]->close();
  group[0]->close();
  group[0]->seal();
  CHECK_THROWS(group[0]->check_usable(), Misuse);
  CHECK_THROWS(group[0]->barrier(), Misuse);
  // The peer keeps its own mappings.
  group[1]->peer(0).signal(0, Signal{1, 1});
  group[1]->check_usable();
}

TEST(rank_handle_notices_the_end_of_a_process) {
  const pid_t child = start_idle_process([] { pause(); });
  CHECK(child > 0);
  RankHandle handle(child);
  const bool ended_early = handle.ended();
  kill(child, SIGKILL);
  // Dead but not reaped: waitid with WNOWAIT does not reap the process.
  siginfo_t end{};
  waitid(P_PID, static_cast<id_t>(child), &end, WEXITED | WNOWAIT);
  const bool ended_unreaped = handle.ended();
  const RankHandle moved = std::move(handle);
  waitpid(child, nullptr, 0);
  CHECK(!ended_early);
  CHECK(ended_unreaped);
  CHECK(moved.ended());
  CHECK(!RankHandle(getpid()).ended());
  CHECK(!RankHandle(getpid(), this_thread()).ended());
  CHECK(!RankHandle().ended());
}

TEST(rank_handle_notices_the_end_of_a_thread) {
  std::promise<pid_t> id;
  std::promise<void> may_end;
  std::thread thread([&] {
    id.set_value(this_thread());
    may_end.get_future().wait();
  });
  RankHandle handle(getpid(), id.get_future().get());
  const bool ended_early = handle.ended();
  may_end.set_value();
  thread.join();
  const RankHandle moved = std::move(handle);
  // A joined thread may take a moment to end in the kernel.
  for (int looks = 0; looks < 1000 && !moved.ended(); ++looks) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(!ended_early);
  CHECK(moved.ended());
}

// Two processes: the peer offers its memory, pushes one signal and is killed.
TEST(wait_ends_early_when_the_peers_process_has_ended) {
  int to_parent[2];
  CHECK_EQ(pipe2(to_parent, O_CLOEXEC), 0);
  const pid_t child = start_idle_process([&] {
    SymmetricOptions options = options_for(2, kBytes);
    options.rank = 1;
    const SymmetricMemory memory(options);
    memory.peer(1).signal_quietly(0, Signal{1, 77});
    const PeerAddress address = memory.address();
    static_cast<void>(write(to_parent[1], &address, sizeof address) == sizeof address);
    pause();
  });
  close(to_parent[1]);  // so that the read ends if the child dies first
  PeerAddress address{};
  const bool offered = read(to_parent[0], &address, sizeof address) == sizeof address;
  close(to_parent[0]);
  SymmetricMemory memory(options_for(2, kBytes));
  if (offered) memory.map({memory.address(), address});
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK(offered);
  CHECK_EQ(address.pid, child);
  const Signal left = Signal::decode(*reinterpret_cast<uint64_t*>(memory.base(1)));
  CHECK_EQ(left.value, 77);  // the writes of a dead peer stay readable
  TimeoutReport report{};
  try {
    wait_for_signal(memory, Phase::kBarrier, 1, 0, 1);
  } catch (const PeerTimeout& timeout) {
    report = timeout.report;
  }
  CHECK(report.peer_gone);
  CHECK_EQ(report.peer, 1);
  CHECK(report.seconds < kLongTimeoutSeconds);
}

TEST(barrier_orders_what_ranks_wrote) {
  constexpr int32_t kRanks = 4;
  const int rounds = 2000 / kRoundsShare;
  const Group group = SymmetricMemory::in_process(options_for(kRanks, kBytes));
  std::atomic<int> wrong{0};
  on_ranks(kRanks, [&](int32_t rank) {
    SymmetricMemory& memory = *group[static_cast<size_t>(rank)];
    // Plain words: only the barriers order the accesses.
    const auto word = [&](int32_t owner, int32_t writer) -> int32_t& {
      return reinterpret_cast<int32_t*>(memory.base(owner))[writer];
    };
    for (int32_t round = 1; round <= rounds; ++round) {
      for (int32_t owner = 0; owner < kRanks; ++owner) word(owner, rank) = round;
      memory.barrier();
      for (int32_t peer = 0; peer < kRanks; ++peer) {
        if (word(rank, peer) != round) ++wrong;
      }
      memory.barrier();
    }
  });
  CHECK_EQ(wrong.load(), 0);
}

TEST(barrier_of_one_rank) {
  SymmetricMemory memory(options_for(1, kBytes));
  memory.map({memory.address()});
  for (int i = 0; i < 100; ++i) memory.barrier();
  memory.check_usable();
}

TEST(timeout_names_rank_peer_phase_and_epochs) {
  const Group group = mapped_group(options_for(3, kBytes, 0.02));
  group[2]->peer(0).signal(8, Signal{3, 0});
  TimeoutReport report{};
  try {
    wait_for_signal(*group[0], Phase::kHighThroughputCombine, 2, 8, 5);
  } catch (const PeerTimeout& timeout) {
    report = timeout.report;
  }
  CHECK_EQ(report.rank, 0);
  CHECK_EQ(report.peer, 2);
  CHECK_EQ(report.phase, "high_throughput combine");
  CHECK_EQ(report.expected, 5);
  CHECK_EQ(report.actual, 3);
  CHECK(report.seconds >= 0.02);
  CHECK(!report.peer_gone);
  CHECK_THROWS(group[0]->check_usable(), Misuse);
  CHECK_THROWS(group[0]->barrier(), Misuse);
  group[1]->check_usable();
}

TEST(a_wait_that_is_interrupted_ends_all_use) {
  const Group group = mapped_group(options_for(2, kBytes, kLongTimeoutSeconds));
  set_interrupt_check(interrupt);
  bool interrupted = false;
  try {
    group[0]->barrier();
  } catch (const std::runtime_error& error) {
    interrupted = std::string(error.what()) == "interrupted";
  }
  set_interrupt_check(nullptr);
  CHECK(interrupted);
  // The interrupted call has left the ranks out of step.
  CHECK_THROWS(group[0]->check_usable(), Misuse);
}

TEST(every_phase_has_a_name) {
  for (int32_t phase = 0; phase < static_cast<int32_t>(Phase::kCount); ++phase) {
    CHECK(std::strlen(name_of(static_cast<Phase>(phase))) > 0);
  }
}

TEST(late_peers_are_masked_where_wanted) {
  SymmetricOptions options = options_for(3, kBytes, 0.02);
  options.mask_late_peers = true;
  const Group group = mapped_group(options);
  CHECK(!group[0]->masked(1));
  CHECK(!wait_for_signal(*group[0], Phase::kBarrier, 1, 0, 1));
  CHECK(group[0]->masked(1));
  CHECK(!group[0]->masked(2));
  group[0]->check_usable();
  // A wait for a masked peer returns false, even if the peer's signal has arrived.
  group[1]->peer(0).signal(0, Signal{1, 9});
  CHECK(!wait_for_signal(*group[0], Phase::kBarrier, 1, 0, 1));
  group[0]->set_masked(1, false);
  CHECK_EQ(group[0]->late().size(), 1u);
  CHECK_EQ(group[0]->late()[0].peer, 1);
  CHECK_EQ(group[0]->late()[0].phase, "barrier 1");
  CHECK(group[0]->late()[0].seconds > 0.01);
  CHECK(wait_for_signal(*group[0], Phase::kBarrier, 1, 0, 1));
  CHECK_EQ(group[0]->peek(0).value, 9);
}

TEST(a_wait_that_finds_no_other_peer_to_mask_ends) {
  SymmetricOptions options = options_for(2, kBytes, 0.02);
  options.mask_late_peers = true;
  const Group group = mapped_group(options);
  const auto wait_for_rank = [&](int32_t peer) {
    return group[0]->wait_until(
        Phase::kBarrier, [] { return false; },
        [&] { return TimeoutReport{0, peer, "barrier", 1, 0, 0.0, false}; });
  };
  CHECK(!wait_for_rank(1));
  CHECK_THROWS(wait_for_rank(1), PeerTimeout);
  CHECK(!group[0]->masked(0));
  const Group other = mapped_group(options);
  CHECK_THROWS(other[0]->wait_until(
                   Phase::kBarrier, [] { return false; },
                   [] { return TimeoutReport{0, 0, "barrier", 1, 0, 0.0, false}; }),
               PeerTimeout);
  CHECK(!other[0]->masked(0));
}

TEST(waits_that_find_nothing_at_once_are_counted) {
  SymmetricOptions options = options_for(3, kBytes, 0.02);
  options.mask_late_peers = true;
  const Group group = mapped_group(options);
  SymmetricMemory& memory = *group[0];
  group[1]->peer(0).signal(0, Signal{1, 0});
  CHECK(wait_for_signal(memory, Phase::kLowLatencyDispatch, 1, 0, 1));
  CHECK(memory.waits().empty());  // the signal was there
  CHECK(!wait_for_signal(memory, Phase::kLowLatencyDispatch, 2, 8, 1));
  CHECK(!wait_for_signal(memory, Phase::kLowLatencyDispatch, 2, 8, 1));  // masked: no wait
  int polls = 0;
  CHECK(memory.wait_until(
      Phase::kHighThroughputCounts, [&] { return ++polls > 3; }, [] { return TimeoutReport{}; }));
  group[0]->close();
  const std::vector<WaitCount> waits = memory.waits();
  CHECK_EQ(waits.size(), 2u);
  CHECK(waits[0].phase == Phase::kLowLatencyDispatch);
  CHECK_EQ(waits[0].peer, 2);
  CHECK_EQ(waits[0].waits, 1u);
  CHECK_EQ(waits[0].failures, 1u);
  CHECK(waits[0].nanoseconds >= 20'000'000u);  // the timeout
  CHECK(waits[1].phase == Phase::kHighThroughputCounts);
  CHECK_EQ(waits[1].peer, kAnyPeer);
  CHECK_EQ(waits[1].waits, 1u);
  CHECK_EQ(waits[1].failures, 0u);
  CHECK(waits[1].nanoseconds > 0u);
}

TEST(barrier_goes_on_without_a_masked_peer) {
  SymmetricOptions options = options_for(3, kBytes, 0.5);
  options.mask_late_peers = true;
  const Group group = mapped_group(options);
  on_ranks(2, [&](int32_t rank) {
    for (int round = 0; round < 20; ++round) group[static_cast<size_t>(rank)]->barrier();
  });
  CHECK(group[0]->masked(2));
  CHECK(group[1]->masked(2));
  CHECK(!group[0]->masked(1));
  CHECK(!group[1]->masked(0));
}

TEST(refusals_carry_their_reason) {
  const Group group = mapped_group(options_for(2, kBytes));
  const auto reason = [&](Phase phase, uint32_t epoch) {
    return group[0]->refusal(1, phase, epoch).reason;
  };
  group[1]->set_reason(Phase::kLowLatencyDispatch, 4, "even");
  group[1]->set_reason(Phase::kLowLatencyDispatch, 5, "odd");
  group[1]->set_reason(Phase::kLowLatencyCombine, 4, "");
  CHECK_EQ(reason(Phase::kLowLatencyDispatch, 4), "even");
  CHECK_EQ(reason(Phase::kLowLatencyDispatch, 5), "odd");
  CHECK_EQ(reason(Phase::kLowLatencyCombine, 4), "");
  const RefusalReport report = group[0]->refusal(1, Phase::kLowLatencyCombine, 4);
  CHECK_EQ(report.rank, 0);
  CHECK_EQ(report.peer, 1);
  CHECK_EQ(report.phase, "low_latency combine");
}

TEST(long_reasons_are_cut_between_characters) {
  const Group group = mapped_group(options_for(2, kBytes));
  const auto through = [&](const std::string& text) {
    group[1]->set_reason(Phase::kBarrier, 0, text);
    return group[0]->refusal(1, Phase::kBarrier, 0).reason;
  };
  const std::string longest(kReasonBytes - 1, 'x');
  CHECK_EQ(through(longest), longest);
  CHECK_EQ(through(longest + "yz"), longest);
  // Each letter has two bytes in UTF-8. The cut must not split the last letter.
  std::string umlauts;
  for (int i = 0; i < 200; ++i) umlauts += "\xc3\xa4";
  CHECK_EQ(through(umlauts), umlauts.substr(0, 254));
  CHECK_EQ(through('x' + umlauts), 'x' + umlauts.substr(0, 254));
}
