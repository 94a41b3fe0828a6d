// A model of the network between the windows of a channel. It lets messages and acknowledgements
// land, complete and land again in any order that a transport allows, and knows what each counter
// must be.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "check.hpp"
#include "proxy/window.h"

namespace fanfold {

struct ModelOptions {
  proxy::Credit credit;
  std::vector<bool> signals;  // of each message, whether it is a signal
  uint64_t first_sequence = 0;
  int copies = 2;  // that land at most, of each message and of each acknowledgement
};

// One direction: a sender, its receiver, and all that is on its way between them.
class ModelChannel {
 public:
  explicit ModelChannel(const ModelOptions& options)
      : sender_(options.credit, kAcknowledgementBits, options.first_sequence),
        receiver_(options.credit, options.first_sequence) {}

  // Calls `take(action)` for each step that can be taken from here. An action is a function that
  // takes the step on a copy of this channel.
  using Action = std::function<void(ModelChannel&)>;
  void actions(const ModelOptions& options, const std::function<void(const Action&)>& take) const;

  // Fails the test if the windows are in a state that the protocol forbids.
  void check(const ModelOptions& options) const;
  bool done(const ModelOptions& options) const;

  auto operator<=>(const ModelChannel&) const = default;

  // Bytes of message i: of all sizes, zero included.
  static int64_t bytes_of(size_t i) { return static_cast<int64_t>(i % 3); }
  static uint32_t amount_of(size_t i) { return static_cast<uint32_t>(i % 5 + 1); }

 private:
  static constexpr int32_t kAcknowledgementBits = 9;  // the fewest, so that they wrap first

  struct Write {
    uint32_t value = 0;  // of an acknowledgement
    int copies = 0;      // that have landed
    bool completed = false;

    auto operator<=>(const Write&) const = default;
  };

  void post(const ModelOptions& options, size_t i);
  void land(const ModelOptions& options, size_t i);
  void complete(const ModelOptions& options, size_t i);
  void send_acknowledgement();
  void land_acknowledgement(size_t i);
  void complete_acknowledgement(size_t i);

  proxy::SendWindow sender_;
  proxy::ReceiveWindow receiver_;
  std::vector<Write> messages_;
  std::vector<Write> acknowledgements_;
  uint64_t data_ = 0;  // what the receiver has counted
  uint64_t signals_ = 0;
};

inline void ModelChannel::post(const ModelOptions& options, size_t i) {
  CHECK_EQ(sender_.next(), options.first_sequence + i);
  sender_.post(bytes_of(i), 0);
  messages_.emplace_back();
}

inline void ModelChannel::land(const ModelOptions& options, size_t i) {
  Write& message = messages_[i];
  const Immediate immediate{options.signals[i] ? ImmediateKind::kSignal : ImmediateKind::kData, 0,
                            0, static_cast<uint32_t>((options.first_sequence + i) & 255),
                            amount_of(i)};
  const proxy::Acceptance acceptance = receiver_.accept(immediate);
  CHECK_EQ(acceptance,
           message.copies == 0 ? proxy::Acceptance::kNew : proxy::Acceptance::kDuplicate);
  ++message.copies;
  if (acceptance != proxy::Acceptance::kNew) return;
  if (!options.signals[i]) data_ += amount_of(i);
  while (const std::optional<proxy::Due> due = receiver_.next_due()) {
    signals_ += due->addition.amount;
  }
}

inline void ModelChannel::complete(const ModelOptions& options, size_t i) {
  messages_[i].completed = true;
  CHECK(sender_.complete(options.first_sequence + i));
}

inline void ModelChannel::send_acknowledgement() {
  const auto mask = (uint64_t{1} << kAcknowledgementBits) - 1;
  acknowledgements_.push_back(
      {.value = static_cast<uint32_t>(receiver_.accepted_in_order() & mask)});
  receiver_.acknowledgement_sent();
}

inline void ModelChannel::land_acknowledgement(size_t i) {
  ++acknowledgements_[i].copies;
  sender_.acknowledge(acknowledgements_[i].value);
}

inline void ModelChannel::complete_acknowledgement(size_t i) {
  acknowledgements_[i].completed = true;
  CHECK(receiver_.acknowledgement_completed());
}

inline void ModelChannel::actions(const ModelOptions& options,
                                  const std::function<void(const Action&)>& take) const {
  const size_t posted = messages_.size();
  if (posted < options.signals.size() && sender_.admits(bytes_of(posted))) {
    take([&, posted](ModelChannel& channel) { channel.post(options, posted); });
  }
  const auto may_land = [&](const Write& write) {
    return write.copies == 0 || (!write.completed && write.copies < options.copies);
  };
  for (size_t i = 0; i < posted; ++i) {
    if (may_land(messages_[i])) {
      take([&, i](ModelChannel& channel) { channel.land(options, i); });
    }
    if (!messages_[i].completed) {
      take([&, i](ModelChannel& channel) { channel.complete(options, i); });
    }
  }
  if (receiver_.should_acknowledge(true)) {
    take([](ModelChannel& channel) { channel.send_acknowledgement(); });
  }
  for (size_t i = 0; i < acknowledgements_.size(); ++i) {
    if (may_land(acknowledgements_[i])) {
      take([i](ModelChannel& channel) { channel.land_acknowledgement(i); });
    }
    if (!acknowledgements_[i].completed) {
      take([i](ModelChannel& channel) { channel.complete_acknowledgement(i); });
    }
  }
}

inline void ModelChannel::check(const ModelOptions& options) const {
  CHECK(sender_.messages() <= options.credit.messages);
  CHECK(sender_.bytes() <= options.credit.bytes);
  const size_t posted = messages_.size();
  const size_t freed = posted - static_cast<size_t>(sender_.messages());
  const size_t acknowledged = posted - static_cast<size_t>(sender_.unacknowledged());
  CHECK(freed <= acknowledged);
  uint64_t data = 0;
  uint64_t signals = 0;
  int64_t in_flight = 0;
  bool in_order = true;
  for (size_t i = 0; i < posted; ++i) {
    const Write& message = messages_[i];
    if (i < freed) CHECK(message.completed);
    if (i < acknowledged) CHECK(message.copies > 0);
    if (i >= freed) in_flight += bytes_of(i);
    in_order = in_order && message.copies > 0;
    if (options.signals[i] && in_order) signals += amount_of(i);
    if (!options.signals[i] && message.copies > 0) data += amount_of(i);
  }
  CHECK_EQ(sender_.bytes(), in_flight);
  CHECK_EQ(data_, data);
  CHECK_EQ(signals_, signals);
}

inline bool ModelChannel::done(const ModelOptions& options) const {
  return messages_.size() == options.signals.size() && sender_.idle() && receiver_.news() == 0 &&
         !receiver_.acknowledgement_in_flight();
}

}  // namespace fanfold
