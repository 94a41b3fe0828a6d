#include "nccl_plugin/outbox.h"

#include <algorithm>
#include <utility>

#include "transport/loopback_plan.h"

namespace fanfold::nccl_plugin {
namespace {

using transport::loopback::Draw;

bool is_request(Kind kind) {
  return kind == Kind::kPut || kind == Kind::kGet || kind == Kind::kFlush;
}

// Of registrations and the end: they belong to no context.
bool is_control(Kind kind) { return kind == Kind::kRegister || kind == Kind::kGoodbye; }

bool is_plain_put(const Header& header) {
  return header.kind == Kind::kPut && header.signal_memory == 0;
}

}  // namespace

Outbox::Outbox(const Settings& settings, int32_t rank, int32_t peer)
    : settings_(settings),
      key_(Draw::mix(Draw::mix(settings.seed + 1) ^
                     (static_cast<uint64_t>(static_cast<uint32_t>(rank)) << 32 |
                      static_cast<uint32_t>(peer)))) {}

uint64_t Outbox::lane_of(const Header& header) {
  if (is_control(header.kind)) return UINT64_MAX;
  return uint64_t{header.context} << 1 | (is_request(header.kind) ? 0U : 1U);
}

void Outbox::push(Message message, int64_t now_ns) {
  const Header& header = message.header;
  const uint64_t number = lane_of(header);
  Lane& lane = lanes_[number];
  Draw draw(key_ ^ Draw::mix(number * 0x9e3779b97f4a7c15U + lane.pushed));
  ++lane.pushed;
  const int64_t delay_ns = is_control(header.kind) || settings_.delay_us == 0
                               ? 0
                               : draw.between(0, settings_.delay_us * 1000);
  const bool swaps = draw.one_in(settings_.swap_one_in);
  message.injects_error = is_request(header.kind) && draw.one_in(settings_.error_one_in);
  // Never before its predecessor: the order within a lane is the promise.
  lane.last_ready_ns = std::max(lane.last_ready_ns, now_ns + delay_ns);
  Waiting waiting{
      .message = std::move(message), .ready_ns = lane.last_ready_ns, .order = pushed_++};
  if (swaps && !lane.messages.empty() && is_plain_put(waiting.message.header) &&
      is_plain_put(lane.messages.back().message.header)) {
    std::swap(waiting.message, lane.messages.back().message);
  }
  lane.messages.push_back(std::move(waiting));
  ++waiting_;
}

void Outbox::clear() {
  lanes_.clear();
  waiting_ = 0;
}

std::optional<int64_t> Outbox::next_ns() const {
  std::optional<int64_t> next;
  for (const auto& [number, lane] : lanes_) {
    if (lane.messages.empty()) continue;
    const int64_t ready_ns = lane.messages.front().ready_ns;
    next = next ? std::min(*next, ready_ns) : ready_ns;
  }
  return next;
}

std::optional<Message> Outbox::pop(int64_t now_ns) {
  Lane* first = nullptr;
  for (auto& [number, lane] : lanes_) {
    if (lane.messages.empty() || lane.messages.front().ready_ns > now_ns) continue;
    const auto place = [](const Lane& of) {
      return std::pair(of.messages.front().ready_ns, of.messages.front().order);
    };
    if (first == nullptr || place(lane) < place(*first)) first = &lane;
  }
  if (first == nullptr) return {};
  Message message = std::move(first->messages.front().message);
  first->messages.pop_front();
  --waiting_;
  // Contexts come and go; only a hostile network still needs how many messages a lane has had.
  if (first->messages.empty() && !settings_.is_hostile()) lanes_.erase(lane_of(message.header));
  return message;
}

}  // namespace fanfold::nccl_plugin
