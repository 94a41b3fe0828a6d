// One communicator of GIN or RMA: its ranks, registered memory, and requests in flight.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "nccl_plugin/connect.h"
#include "nccl_plugin/wire.h"

namespace fanfold::nccl_plugin {

// A place in registered memory. `memory` is what `register_memory` returned; 0: none.
struct Place {
  uint64_t memory = 0;
  uint64_t offset = 0;
};

struct Operation {
  Kind kind = Kind::kPut;  // or kGet, kFlush
  uint32_t context = 0;
  uint32_t rank = 0;
  uint64_t bytes = 0;
  // NOLINTBEGIN(readability-redundant-member-init): designated initialisers may leave these out
  Place local = {};
  Place remote = {};
  Place signal = {};  // of a put: a 64-bit word of the target
  // NOLINTEND(readability-redundant-member-init)
  uint64_t signal_value = 0;
};

// Any thread may call it. The work is the wire's thread's.
class Comm final : private WireOwner {
 public:
  // Waits for all ranks.
  static abi::Result connect(const Listener& listener, std::span<const Address> addresses,
                             int32_t rank, std::unique_ptr<Comm>& comm);
  ~Comm() override;
  Comm(const Comm&) = delete;
  Comm& operator=(const Comm&) = delete;

  // Waits until all ranks have made the same registration: the n-th on each rank belong together.
  abi::Result register_memory(std::shared_ptr<Memory> memory, uint64_t& handle);
  // When it returns, nothing touches the memory.
  abi::Result deregister(uint64_t handle);

  abi::Result post(const Operation& operation, uint64_t& request);
  // A request is done when its bytes and its signal have landed. Then it is forgotten; one that has
  // failed is not.
  abi::Result test(uint64_t request, bool& done);
  // kSuccess unless the communicator has failed.
  abi::Result state();

  // Numbers of contexts that nobody else of this communicator has.
  uint32_t new_contexts(uint32_t count);

 private:
  struct Registration {
    std::shared_ptr<Memory> memory;  // null until this rank registers, too
    std::vector<uint64_t> bytes;     // by rank
    std::vector<bool> known;         // by rank
    size_t known_count = 0;
  };
  struct Request {
    int32_t rank = 0;
    bool done = false;
    Problem problem;
  };

  Comm(int32_t rank, size_t ranks, int64_t timeout_ms);

  std::shared_ptr<Memory> memory_of(uint32_t number) override;
  void completed(uint64_t request, const Problem& problem) override;
  void registered(int32_t peer, uint32_t number, uint64_t bytes) override;
  void closed(int32_t peer) override;
  void failed(const Problem& problem) override;

  // With the mutex held
  void note(uint32_t number, int32_t rank, uint64_t bytes);
  Problem check(const Operation& operation) const;
  Problem check_place(const char* what, const Place& place, size_t rank, uint64_t bytes) const;
  // All ranks have made it, or one of those that have not never will.
  bool is_over(const Registration& registration) const;
  std::string missing(const Registration& registration) const;

  const int32_t rank_;
  const size_t ranks_;
  const int64_t timeout_ms_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by mutex_
  std::map<uint64_t, Registration> registrations_;
  std::map<uint64_t, Request> requests_;
  std::vector<bool> closed_;  // by rank
  uint64_t last_registration_ = 0;
  uint64_t last_request_ = 0;
  uint32_t contexts_ = 1;  // 0 is GIN v11's
  Problem failure_;

  std::unique_ptr<Wire> wire_;  // last: its thread ends first
};

}  // namespace fanfold::nccl_plugin
