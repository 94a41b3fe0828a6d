#include "proxy/proxy.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/atomics.h"
#include "base/error.h"
#include "base/wait.h"
#include "proxy/idling.h"
#include "ring/command.h"

namespace fanfold::proxy {
namespace {

// A waiting producer looks that often at least.
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::milliseconds kIdle{1};

void pin(std::thread& thread, int32_t core) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const bool valid = core >= 0 && core < CPU_SETSIZE;
  if (valid) CPU_SET(static_cast<size_t>(core), &cores);
  if (valid && pthread_setaffinity_np(thread.native_handle(), sizeof(cores), &cores) == 0) return;
  throw BadArgument("cores", std::to_string(core), "cores that this process may run on");
}

// Keeps a thread on those of `cores` that the process may use. Without any it runs wherever it may,
// and is only slower.
void keep_near(std::thread& thread, const std::vector<int32_t>& cores) {
  cpu_set_t allowed;
  cpu_set_t near;
  CPU_ZERO(&near);
  if (pthread_getaffinity_np(thread.native_handle(), sizeof allowed, &allowed) != 0) return;
  for (const int32_t core : cores) {
    const bool usable = core < CPU_SETSIZE && CPU_ISSET(static_cast<size_t>(core), &allowed);
    if (usable) CPU_SET(static_cast<size_t>(core), &near);
  }
  if (CPU_COUNT(&near) == 0) return;
  static_cast<void>(pthread_setaffinity_np(thread.native_handle(), sizeof near, &near));
}

void check_same(const char* name, int64_t ours, int32_t rank, int64_t theirs, int32_t peer) {
  if (ours != theirs) throw disagreement(name, ours, rank, theirs, peer);
}

}  // namespace

Proxy::Proxy(const ProxyOptions& options, const ProxyMemory& memory,
             std::vector<std::unique_ptr<transport::Transport>> transports)
    : options_(options), memory_(memory) {
  check_options(options);
  memory.counters.require("counters", int64_t{options.ranks} * kCounters);
  if (!memory.sources.empty() && std::cmp_not_equal(memory.sources.size(), options.ranks)) {
    throw BadArgument("sources", std::to_string(memory.sources.size()), "one for each rank");
  }
  if (transports.size() != static_cast<size_t>(options.threads)) {
    throw BadArgument("transports", std::to_string(transports.size()),
                      "one for each of the " + std::to_string(options.threads) + " threads");
  }
  for (int64_t i = 0; i < int64_t{options.ranks} * kCounters; ++i) {
    store_relaxed_system(memory.counters + i, uint64_t{0});
  }
  for (int32_t t = 0; t < options.threads; ++t) {
    threads_.push_back(std::make_unique<ProxyThread>(
        options, t, memory, std::move(transports[static_cast<size_t>(t)])));
    producers_.push_back(std::make_unique<Producer>(threads_.back()->command_ring()));
  }
}

Proxy::~Proxy() { stop(); }

void Proxy::register_rows(const RowsMemory& rows) {
  for (const auto& thread : threads_) thread->register_rows(rows);
}

bool Proxy::holds_rows() const {
  return std::ranges::any_of(threads_, [](const auto& thread) { return thread->has_rows(); });
}

std::string Proxy::why_no_gpu_memory() const {
  std::string reason;
  for (const auto& thread : threads_) {
    if (reason.empty()) reason = thread->why_no_gpu_memory();
  }
  return reason;
}

ProxyAddress Proxy::address() const {
  ProxyAddress address{.ranks = options_.ranks,
                       .part_bytes = options_.part_bytes,
                       .first_sequence = options_.first_sequence,
                       .credit = options_.credit,
                       .threads = {}};
  for (const auto& thread : threads_) address.threads.push_back(thread->address());
  return address;
}

void Proxy::connect(const std::vector<ProxyAddress>& ranks) {
  if (connected_) throw Misuse("this proxy is connected already");
  const int32_t rank = options_.rank;
  check_same("ranks", options_.ranks, rank, static_cast<int64_t>(ranks.size()), rank);
  for (int32_t peer = 0; peer < options_.ranks; ++peer) {
    const ProxyAddress& theirs = ranks[static_cast<size_t>(peer)];
    check_same("ranks", options_.ranks, rank, theirs.ranks, peer);
    check_same("threads", options_.threads, rank, static_cast<int64_t>(theirs.threads.size()),
               peer);
    check_same("part_bytes", options_.part_bytes, rank, theirs.part_bytes, peer);
    check_same("first_sequence", static_cast<int64_t>(options_.first_sequence), rank,
               static_cast<int64_t>(theirs.first_sequence), peer);
    check_credit(theirs.credit);
  }
  for (int32_t peer = 0; peer < options_.ranks; ++peer) {
    if (peer == rank) continue;
    const ProxyAddress& theirs = ranks[static_cast<size_t>(peer)];
    // The peer's thread that serves this rank.
    const auto thread = static_cast<size_t>(rank % options_.threads);
    thread_of(peer).connect(peer, theirs.threads[thread], theirs.credit);
  }
  rows_apart_ = std::ranges::all_of(ranks, [](const ProxyAddress& each) {
    return std::ranges::all_of(each.threads,
                               [](const ThreadAddress& thread) { return thread.rows.bytes > 0; });
  });
  connected_ = true;
}

void Proxy::start() {
  if (!connected_) throw Misuse("a proxy starts after `connect`");
  if (!running_.empty()) throw Misuse("this proxy runs already");
  stopping_ = false;
  try {
    for (size_t t = 0; t < threads_.size(); ++t) {
      running_.emplace_back([this, t] { run(*threads_[t]); });
      if (options_.cores.empty()) {
        keep_near(running_.back(), threads_[t]->cores());
      } else {
        pin(running_.back(), options_.cores[t % options_.cores.size()]);
      }
    }
  } catch (...) {
    stop();
    throw;
  }
}

void Proxy::stop() {
  stopping_ = true;
  for (const auto& thread : threads_) fanfold::ring(thread->bell());
  // A forked child has no threads to wait for.
  const bool ours = generation_ == fork_generation();
  for (std::thread& thread : running_) ours ? thread.join() : thread.detach();
  running_.clear();
}

void Proxy::run(ProxyThread& thread) {
  try {
    poll(thread);
  } catch (const std::exception& error) {
    thread.die(error.what());
  } catch (...) {
    thread.die("an unknown exception");
  }
}

void Proxy::poll(ProxyThread& thread) {
  using Clock = std::chrono::steady_clock;
  Idling idling(options_, Clock::now());
  int64_t empty = 0;
  uint64_t begun = begun_;
  while (!stopping_.load(std::memory_order_relaxed)) {
    const auto now = Clock::now();
    const bool begins = begun != begun_.load(std::memory_order_relaxed);
    if (begins) begun = begun_;
    if (thread.step(now) || begins) {
      empty = 0;
      idling.restart(now);
      continue;
    }
    const bool waits = thread.outstanding() || busy_.load(std::memory_order_relaxed) > 0;
    const std::chrono::nanoseconds sleep = idling.sleep(now, waits);
    if (sleep.count() == 0) {
      pause_or_yield(++empty);
      continue;
    }
    empty = 0;
    thread.counted().add(waits ? &Stats::naps : &Stats::sleeps);
    const auto woken = [&] {
      if (stopping_ || begun_ != begun) return true;
      const auto then = Clock::now();
      if (!thread.step(then)) return false;
      idling.restart(then);
      return true;
    };
    sleep_until_rung(thread.bell(), woken, sleep);
  }
}

ProxyThread& Proxy::thread_of(int32_t peer) const {
  if (peer < 0 || peer >= options_.ranks) {
    throw BadArgument("peer", std::to_string(peer),
                      "from 0 to " + std::to_string(options_.ranks - 1));
  }
  return *threads_[static_cast<size_t>(peer % options_.threads)];
}

void Proxy::check_usable() const {
  if (generation_ != fork_generation()) {
    throw Misuse("this proxy belongs to the process that made it, not to a forked child");
  }
  check();
}

uint64_t Proxy::push(const CommandFields& fields) {
  if (!has_peer(fields.kind)) {
    throw BadArgument("kind", std::to_string(static_cast<uint32_t>(fields.kind)),
                      "a write, a signal or a store; `push_all` takes fences and barriers");
  }
  const Command command = make_command(fields);
  const auto peer = static_cast<int32_t>(fields.peer);
  ProxyThread& thread = thread_of(peer);
  if (const std::optional<BadArgument> wrong = thread.refusal(fields)) {
    throw BadArgument(wrong->argument, wrong->value, wrong->bound);
  }
  check_usable();
  return push_to(static_cast<size_t>(peer % options_.threads), command, options_.timeout);
}

Tickets Proxy::push_all(CommandKind kind, std::chrono::nanoseconds longest) {
  if (kind != CommandKind::kFence && kind != CommandKind::kBarrier) {
    throw BadArgument("kind", std::to_string(static_cast<uint32_t>(kind)),
                      "a fence or a barrier; `push` takes the other kinds");
  }
  check_usable();
  const Command command = make_command({.kind = kind});
  Tickets tickets;
  for (size_t t = 0; t < threads_.size(); ++t) {
    tickets.push_back(push_to(t, command, std::min(longest, options_.timeout)));
  }
  return tickets;
}

uint64_t Proxy::push_to(size_t thread, const Command& command, std::chrono::nanoseconds longest) {
  std::optional<uint64_t> ticket = producer(thread).try_push(command);
  if (!ticket) {
    // Ends when the proxy fails, not only when the ring stays full.
    const auto pushed_or_failed = [&] {
      ticket = producer(thread).try_push(command);
      return ticket || failure() != nullptr;
    };
    static_cast<void>(
        poll_until(pushed_or_failed, {.timeout = longest, .spin = kSpin, .idle = kIdle}));
    check();
    // One more attempt, so that the error carries the ring's numbers.
    if (!ticket) ticket = producer(thread).push(command, std::chrono::nanoseconds(0));
  }
  fanfold::ring(threads_[thread]->bell());
  return *ticket;
}

bool Proxy::passed(const Tickets& tickets) const {
  if (tickets.size() != threads_.size()) {
    throw BadArgument("tickets", std::to_string(tickets.size()), "those that `push_all` returned");
  }
  for (size_t t = 0; t < tickets.size(); ++t) {
    if (static_cast<int64_t>(producer(t).consumed() - tickets[t]) <= 0) return false;
  }
  return true;
}

void Proxy::wait(const Tickets& tickets) const {
  const auto passed_or_failed = [&] { return passed(tickets) || failure() != nullptr; };
  // A thread that is stuck fails after the timeout; this wait lasts longer, to see why.
  const bool ended =
      poll_until(passed_or_failed, {.timeout = 2 * options_.timeout, .spin = kSpin, .idle = kIdle});
  if (passed(tickets)) return;
  check();
  static_cast<void>(ended);
  throw Misuse(
      "fences or barriers of this proxy did not end, and its threads saw no failure: does "
      "the proxy run?");
}

uint64_t Proxy::arrived(int32_t source, int32_t counter) const {
  static_cast<void>(thread_of(source));
  if (counter < 0 || counter >= kCounters) {
    throw BadArgument("counter", std::to_string(counter),
                      "from 0 to " + std::to_string(kCounters - 1));
  }
  return load_acquire_system(memory_.counters + int64_t{source} * kCounters + counter);
}

bool Proxy::has_arrived(int32_t source, int32_t counter, uint64_t expected) const {
  if (arrived(source, counter) >= expected) return true;
  if (failure() == nullptr && thread_of(source).lost(source) == nullptr) return false;
  // What came before the failure counts.
  if (arrived(source, counter) >= expected) return true;
  check(source);
  return false;
}

void Proxy::check(int32_t peer) const {
  if (const Failure* failed = failure()) raise(*failed);
  if (peer < 0) return;
  if (const Failure* lost = thread_of(peer).lost(peer)) raise(*lost);
}

const Failure* Proxy::failure() const {
  for (const auto& thread : threads_) {
    if (const Failure* failed = thread->failure()) return failed;
  }
  return nullptr;
}

Stats Proxy::stats() const {
  Stats sum;
  for (const auto& thread : threads_) sum += thread->stats();
  return sum;
}

bool Proxy::lost(int32_t peer) const {
  return failure() == nullptr && thread_of(peer).lost(peer) != nullptr;
}

bool Proxy::ended(int32_t peer) const {
  const Failure* found = thread_of(peer).lost(peer);
  return found != nullptr && found->reason == FailureReason::kEnded;
}

void Proxy::begin_busy() {
  busy_.fetch_add(1, std::memory_order_relaxed);
  begun_.fetch_add(1, std::memory_order_seq_cst);
  for (const auto& thread : threads_) fanfold::ring(thread->bell());
}

}  // namespace fanfold::proxy
