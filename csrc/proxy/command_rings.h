// The rings whose commands one thread of a proxy executes: one of threads of the host, and perhaps
// one of a GPU's kernels, whose producers' line lies in the GPU's memory.
#pragma once

#include <cstdint>
#include <optional>

#include "layout/command.h"
#include "ring/ring.h"

namespace fanfold::proxy {

class CommandRings {
 public:
  // `kernel_slots` is 0 if no kernels push.
  CommandRings(int64_t slots, int64_t kernel_slots);

  const Ring& of_host() const { return host_.ring; }
  // Null if no kernels push.
  const Ring* of_kernels() const { return kernels_ ? &kernels_->ring : nullptr; }

  // As a Consumer's. Each ring's commands come in their order. What is in the kernels' ring when a
  // thread of the host pushes comes before what that thread pushes, so that a fence waits for it.
  bool pop(Command& command);
  // Frees the slots of all commands that were popped, but for the last one if that is `held`.
  void publish(bool held);
  // Tickets that kernels have abandoned.
  uint64_t abandoned() const;
  // Tells kernels that wait for a peer that it is lost.
  void tell_lost(int32_t peer);
  // Whether kernels have asked if a peer still runs since this was called before.
  bool take_question(int32_t peer);

 private:
  struct Popped {
    Popped(int64_t slots) : ring(Ring::create(slots)), consumer(ring) {}
    void publish(bool but_last);

    Ring ring;
    Consumer consumer;
  };

  Popped host_;
  std::optional<Popped> kernels_;
  bool last_is_kernels_ = false;
};

}  // namespace fanfold::proxy
