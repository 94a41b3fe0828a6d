#include "proxy/command_rings.h"

namespace fanfold::proxy {

CommandRings::CommandRings(int64_t slots, int64_t kernel_slots) : host_(slots) {
  if (kernel_slots > 0) kernels_.emplace(kernel_slots);
}

bool CommandRings::pop(Command& command) {
  last_is_kernels_ = true;
  if (kernels_ && kernels_->consumer.pop(command)) return true;
  if (!host_.consumer.has_command()) return false;
  // Whoever pushed that command may have waited for kernels, which have pushed since.
  if (kernels_ && kernels_->consumer.pop(command)) return true;
  last_is_kernels_ = false;
  return host_.consumer.pop(command);
}

void CommandRings::publish(bool held) {
  host_.publish(held && !last_is_kernels_);
  if (kernels_) kernels_->publish(held && last_is_kernels_);
}

void CommandRings::Popped::publish(bool but_last) {
  const uint64_t done = consumer.popped() - (but_last ? 1 : 0);
  if (done != consumer.published()) consumer.publish(done);
}

uint64_t CommandRings::abandoned() const {
  return host_.consumer.abandoned() + (kernels_ ? kernels_->consumer.abandoned() : 0);
}

void CommandRings::tell_lost(int32_t peer) {
  if (kernels_) kernels_->consumer.tell_lost(peer);
}

bool CommandRings::take_question(int32_t peer) {
  return kernels_ && kernels_->consumer.take_question(peer);
}

}  // namespace fanfold::proxy
