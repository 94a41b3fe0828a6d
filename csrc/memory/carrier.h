// What carries the writes of a rank to ranks on other hosts: a Link to each, and what all share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "layout/ring.h"
#include "memory/peer.h"

namespace fanfold {

// A number that a carrier has counted: of one of its threads, or of what it carries to and from a
// peer.
struct CarrierCount {
  const char* name;
  int32_t thread;
  int32_t peer;  // -1 for a number of the thread
  uint64_t value;
};

class Carrier {
 public:
  virtual ~Carrier() = default;

  virtual Link& link(int32_t peer) = 0;
  // Into which a GPU's kernels may push commands: those for peer p into ring p % size. Offsets of
  // commands count from where CarriedMemory has the data, or the peer's copy. Each ring's memory is
  // that of a Ring, from its identity on. Empty if no kernels push.
  virtual std::vector<RingView> kernel_rings() const = 0;
  // Called as a wait begins and ends, so that what arrives meanwhile is seen at once, or behind a
  // long silence soon.
  virtual void begin_wait() = 0;
  virtual void end_wait() = 0;
  // Throws TransportError or PeerTimeout if what `peer` sends, or is sent, may never arrive.
  virtual void check(int32_t peer) const = 0;
  // Whether `peer` alone is lost.
  virtual bool lost(int32_t peer) const = 0;
  // Whether the process of `peer` is known to have ended.
  virtual bool ended(int32_t peer) const = 0;
  // Called now and then in a long wait for `peer`, to find out whether it still runs.
  virtual void probe(int32_t peer) = 0;
  // For any thread.
  virtual std::vector<CarrierCount> counts() const = 0;
  // How `peer` is reached, for messages; empty if nothing is known.
  virtual std::string path(int32_t peer) const = 0;
  // Returns once the peers have what was put and stored and have come to this, too, or after a
  // while. Nothing is written after it. If this rank has `failed`, it waits for no peer to come.
  virtual void finish(bool failed) noexcept = 0;
};

// Tells a carrier of a wait, if there is one. It may end before the wait does, because a signal
// handler may close the memory that owns it.
class CarrierWait {
 public:
  explicit CarrierWait(const std::unique_ptr<Carrier>& carrier) : carrier_(carrier) {
    if (carrier_ != nullptr) carrier_->begin_wait();
  }
  ~CarrierWait() {
    if (carrier_ != nullptr) carrier_->end_wait();
  }
  CarrierWait(const CarrierWait&) = delete;
  CarrierWait& operator=(const CarrierWait&) = delete;

 private:
  const std::unique_ptr<Carrier>& carrier_;
};

}  // namespace fanfold
