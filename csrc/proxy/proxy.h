// Moves rows and signals between ranks of different hosts.
//
// Producers push commands; the proxy's threads send them; the peers' threads count what arrives.
//
//     Proxy proxy(options, memory, std::move(transports));
//     proxy.connect(addresses_of_all_ranks);   // in rank order, exchanged by the caller
//     proxy.start();
//     proxy.push({.kind = CommandKind::kWrite, .peer = 1, .bytes = 4096, ...});
//     const Tickets fence = proxy.push_all(CommandKind::kFence);
//     proxy.wait(fence);                       // peers have all of it; the source may be reused
//
// A consumer does this, in this order:
//
//  1. It knows how much it expects: the sum of `parts_of` over the commands of the source, and the
//     amounts of its signals. Counters only grow, so it adds that to what it expected before.
//  2. It waits until `has_arrived`. That loads the counter of the source with acquire, and throws
//     if the expected number may never be reached. A consumer that loads the counter itself looks
//     at `check(source)` after a load that was too low, then loads once more before it gives up:
//     a peer may have sent everything and ended.
//  3. It reads the rows.
//  4. It lets the producer know that it has read them, for example with a signal of its own.
//
// A data counter says only how many parts have arrived, in any order. So a producer pushes data of
// the next call on the same counter only after step 4; until then it uses another counter. A signal
// says that everything that was pushed before it to the same peer is in place.
//
// A message may land again while it is in flight. So the proxy holds a write back while one in
// flight has the same target, and after step 4 a producer may change its source rows if it sends
// them only to the same target. For anything else it waits for a fence behind its writes.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "base/fork.h"
#include "base/wait.h"
#include "layout/command.h"
#include "proxy/failure.h"
#include "proxy/options.h"
#include "proxy/proxy_thread.h"
#include "proxy/stats.h"
#include "ring/ring.h"
#include "transport/transport.h"

namespace fanfold::proxy {

// One command in the ring of each thread.
using Tickets = std::vector<uint64_t>;

class Proxy {
 public:
  // One transport for each thread. Throws BadArgument and TransportError.
  Proxy(const ProxyOptions& options, const ProxyMemory& memory,
        std::vector<std::unique_ptr<transport::Transport>> transports);
  ~Proxy();
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  // Gives rows memory of their own, before `address`. It stays mapped while the proxy exists. A
  // proxy uses it if those of all ranks have some: `connect` finds that out. Throws Unavailable if
  // that fails, and can go on without it.
  void register_rows(const RowsMemory& rows);
  // Whether a thread has registered it, also if another could not.
  bool holds_rows() const;
  // Whether they all have; after `connect`.
  bool has_rows_apart() const { return rows_apart_; }
  // Why that cannot be a GPU's memory; empty if it may be.
  std::string why_no_gpu_memory() const;

  ProxyAddress address() const;
  // Makes all peers reachable. `ranks` are the addresses of all ranks in rank order, this one's
  // included. Throws BadArgument if ranks have different settings, and TransportError.
  void connect(const std::vector<ProxyAddress>& ranks);
  // Starts the threads. Throws BadArgument if a thread cannot run on its core.
  void start();
  // Stops the threads at once, whatever is outstanding: wait for a barrier before. Writes of peers
  // may still land until the proxy is destroyed.
  void stop();

  // The ring of the thread that serves `peer`, for producers of any kind. Producers that push there
  // themselves wake the thread with `wake`, or begin a Busy, or accept a delay of milliseconds.
  const Ring& ring_of(int32_t peer) const { return thread_of(peer).command_ring(); }
  void wake(int32_t peer) { fanfold::ring(thread_of(peer).bell()); }

  // Pushes a write, a signal or a store, wakes the thread, and returns the ticket in the ring of
  // the peer's thread. Throws BadArgument if a field is out of bounds, RingFull if the ring stays
  // full for the timeout, and as `check()` does. Any thread may call it.
  uint64_t push(const CommandFields& fields);
  // Pushes a fence or a barrier to every thread; waits for room in a ring for the timeout, or for
  // `longest` if that is less. Throws as `push` does.
  Tickets push_all(CommandKind kind,
                   std::chrono::nanoseconds longest = std::chrono::nanoseconds::max());
  // Whether the commands are done.
  bool passed(const Tickets& tickets) const;
  // Waits until they are, at most for the timeout. Throws Misuse then, and as `check()` does.
  void wait(const Tickets& tickets) const;

  // What has arrived from `source`: data and signals of the counter. Loads with acquire.
  uint64_t arrived(int32_t source, int32_t counter) const;
  // Whether at least `expected` has arrived. If not, and it may never arrive, throws as
  // `check(source)` does. This is the condition of a consumer's wait.
  bool has_arrived(int32_t source, int32_t counter, uint64_t expected) const;

  // Has the thread of `peer` find out whether it still runs, while the thread is busy. If the peer
  // has ended, it is lost soon; behind a barrier only over networks that tell it without a message.
  void probe(int32_t peer) { thread_of(peer).probe(peer); }
  // Whether `peer` is lost, and the others are not.
  bool lost(int32_t peer) const;
  // How `peer` is reached, for messages; empty if nothing is known.
  std::string path(int32_t peer) const { return thread_of(peer).path(peer); }
  // Whether the process of `peer` is known to have ended.
  bool ended(int32_t peer) const;
  // Throws PeerTimeout or TransportError if a thread has stopped, or if `peer` is lost.
  void check(int32_t peer = -1) const;
  const Failure* failure() const;
  Stats stats() const;  // of all threads together

  // Between the two, threads poll without sleeping, and nap once they have polled in vain for 4 ms.
  // May be nested.
  void begin_busy();
  void end_busy() { busy_.fetch_sub(1, std::memory_order_relaxed); }
  // For the length of a call.
  class Busy {
   public:
    explicit Busy(Proxy& proxy) : proxy_(proxy) { proxy_.begin_busy(); }
    ~Busy() { proxy_.end_busy(); }
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    Proxy& proxy_;
  };

  const ProxyOptions& options() const { return options_; }
  // For a scheduler that steps the threads itself, instead of `start`.
  ProxyThread& thread(int32_t index) { return *threads_.at(static_cast<size_t>(index)); }

 private:
  ProxyThread& thread_of(int32_t peer) const;
  Producer& producer(size_t thread) const { return *producers_[thread]; }
  uint64_t push_to(size_t thread, const Command& command, std::chrono::nanoseconds longest);
  void check_usable() const;
  void run(ProxyThread& thread);
  void poll(ProxyThread& thread);

  ProxyOptions options_;
  ProxyMemory memory_;
  std::vector<std::unique_ptr<ProxyThread>> threads_;
  std::vector<std::unique_ptr<Producer>> producers_;
  std::vector<std::thread> running_;
  std::atomic<int32_t> busy_ = 0;
  std::atomic<uint64_t> begun_ = 0;  // of all that made it busy
  std::atomic<bool> stopping_ = false;
  bool connected_ = false;
  bool rows_apart_ = false;
  uint32_t generation_ = fork_generation();
};

}  // namespace fanfold::proxy
