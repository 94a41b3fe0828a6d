#include "proxy/window.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "base/error.h"

namespace fanfold::proxy {
namespace {

constexpr uint64_t kSequenceMask = (uint64_t{1} << kSequenceBits) - 1;
// A power of two of slots, so that the low bits of a sequence number are its index.
size_t slots_for(const Credit& credit) {
  check_credit(credit);
  return std::bit_ceil(static_cast<size_t>(credit.messages));
}

uint32_t acknowledgement_mask(int32_t bits) {
  // One bit more than a window: then an overtaken acknowledgement looks like no window's progress.
  if (bits < kSequenceBits + 1 || bits > 32) {
    throw BadArgument("acknowledgement_bits", std::to_string(bits),
                      "from " + std::to_string(kSequenceBits + 1) + " to 32");
  }
  return static_cast<uint32_t>((uint64_t{1} << bits) - 1);
}

}  // namespace

void check_credit(const Credit& credit) {
  if (credit.messages < 1 || credit.messages > kMostInFlight) {
    throw BadArgument("credit.messages", std::to_string(credit.messages),
                      "from 1 to " + std::to_string(kMostInFlight));
  }
  if (credit.bytes < 1) {
    throw BadArgument("credit.bytes", std::to_string(credit.bytes), "at least 1");
  }
}

SendWindow::SendWindow(const Credit& credit, int32_t acknowledgement_bits, uint64_t first_sequence)
    : credit_(credit), acknowledgement_mask_(acknowledgement_mask(acknowledgement_bits)),
      oldest_(first_sequence), acknowledged_(first_sequence), next_(first_sequence),
      sent_(slots_for(credit)) {}

bool SendWindow::admits(int64_t bytes) const {
  return messages() < credit_.messages && bytes >= 0 && bytes <= credit_.bytes - bytes_;
}

bool SendWindow::writes_to(int64_t target, int64_t bytes) const {
  for (uint64_t sequence = oldest_; sequence != next_; ++sequence) {
    const Sent& earlier = sent_[place(sequence)];
    const int64_t begin = std::max(target, earlier.target);
    if (begin < std::min(target + bytes, earlier.target + earlier.bytes)) return true;
  }
  return false;
}

void SendWindow::post(int64_t bytes, int64_t target) {
  if (!admits(bytes)) {
    throw Misuse("a message of " + std::to_string(bytes) +
                 " bytes is outside of the credit: " + std::to_string(messages()) + " of " +
                 std::to_string(credit_.messages) + " messages and " + std::to_string(bytes_) +
                 " of " + std::to_string(credit_.bytes) + " bytes are in flight");
  }
  sent(next_) = {.bytes = bytes, .target = target, .completed = false};
  bytes_ += bytes;
  ++next_;
}

bool SendWindow::acknowledge(uint32_t accepted) {
  const uint64_t news = (accepted - acknowledged_) & acknowledgement_mask_;
  // More than was sent: an acknowledgement from before the last one, seen through the wrap.
  if (news == 0 || news > next_ - acknowledged_) return false;
  acknowledged_ += news;
  free_oldest();
  return true;
}

bool SendWindow::complete(uint64_t sequence) {
  if (sequence - oldest_ >= next_ - oldest_ || sent(sequence).completed) return false;
  sent(sequence).completed = true;
  free_oldest();
  return true;
}

void SendWindow::free_oldest() {
  while (oldest_ != acknowledged_ && sent(oldest_).completed) {
    bytes_ -= sent(oldest_).bytes;
    sent(oldest_) = {};
    ++oldest_;
  }
}

ReceiveWindow::ReceiveWindow(const Credit& credit, uint64_t first_sequence)
    : window_(credit.messages), in_order_(first_sequence), reported_(first_sequence),
      arrived_(slots_for(credit)) {}

ReceiveWindow::Arrived& ReceiveWindow::arrived(uint64_t sequence) {
  return arrived_[static_cast<size_t>(sequence) & (arrived_.size() - 1)];
}

Acceptance ReceiveWindow::accept(const Immediate& message) {
  const auto distance = static_cast<int8_t>((message.sequence - in_order_) & kSequenceMask);
  static_assert(kSequenceBits == 8, "the distance of two sequence numbers is an int8_t");
  if (distance < -window_ || distance >= window_) return Acceptance::kInvalid;
  if (distance < 0) return Acceptance::kDuplicate;
  Arrived& place = arrived(in_order_ + static_cast<uint64_t>(distance));
  if (place.slot != Slot::kMissing) return Acceptance::kDuplicate;
  if (message.kind == ImmediateKind::kSignal) {
    place = {Slot::kSignal, {message.counter, message.amount}};
  } else {
    place.slot = message.kind == ImmediateKind::kStore ? Slot::kStore : Slot::kData;
  }
  return Acceptance::kNew;
}

std::optional<Due> ReceiveWindow::next_due() {
  while (arrived(in_order_).slot != Slot::kMissing) {
    const Arrived first = std::exchange(arrived(in_order_), Arrived{});
    const uint64_t sequence = in_order_++;
    if (first.slot == Slot::kData) continue;
    return Due{first.slot == Slot::kStore, sequence, first.addition};
  }
  return std::nullopt;
}

bool ReceiveWindow::should_acknowledge(bool quiet) const {
  if (acknowledgement_in_flight_ || news() == 0) return false;
  return quiet || news() * 4 >= window_;
}

void ReceiveWindow::acknowledgement_sent() {
  reported_ = in_order_;
  acknowledgement_in_flight_ = true;
}

bool ReceiveWindow::acknowledgement_completed() {
  return std::exchange(acknowledgement_in_flight_, false);
}

}  // namespace fanfold::proxy
