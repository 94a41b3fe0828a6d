// The order in which one rank's messages to one peer leave.
//
// Messages of one lane leave in the order in which they came, except that a put without a signal
// may overtake another one. Messages of different lanes leave in any order: a hostile network
// draws a delay for each of them. Decisions depend on nothing but the seed and the messages; a put
// can overtake only one that still waits for its delay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "nccl_plugin/memory.h"
#include "nccl_plugin/settings.h"

namespace fanfold::nccl_plugin {

enum class Kind : uint32_t {
  kPut = 1,   // `bytes` of payload follow
  kGet,       // asks for `bytes`
  kReply,     // of a get: `bytes` of payload follow
  kFlush,     // asks for an answer when all before it in its context is done
  kDone,      // of a put or a flush: it has landed
  kRefused,   // of a put or a get: the target could not apply it
  kRegister,  // the sender's registration number `memory` has `bytes`
  kGoodbye,   // the sender closes its communicator
};

// What travels before a payload.
struct Header {
  uint32_t magic = kMagic;
  Kind kind = Kind::kPut;
  uint64_t id = 0;  // of the request, in the rank that asks
  uint64_t bytes = 0;
  uint64_t offset = 0;
  uint64_t signal_offset = 0;
  uint64_t signal_value = 0;
  uint32_t context = 0;
  uint32_t memory = 0;         // the number of a registration; 0: none
  uint32_t signal_memory = 0;  // 0: no signal
  uint32_t reserved = 0;

  static constexpr uint32_t kMagic = 0x46464e31;
};
static_assert(sizeof(Header) == 64);

// A header and where its payload comes from.
struct Message {
  Header header;
  std::shared_ptr<Memory> source;  // null: no payload
  uint64_t source_offset = 0;
  bool injects_error = false;  // sending it breaks the communicator
};

// A message without a payload.
inline Message bare(const Header& header) {
  Message message;
  message.header = header;
  return message;
}

class Outbox {
 public:
  Outbox(const Settings& settings, int32_t rank, int32_t peer);

  void push(Message message, int64_t now_ns);
  void clear();
  bool empty() const { return waiting_ == 0; }
  // When the next message may leave; none if none waits.
  std::optional<int64_t> next_ns() const;
  // The next message that may leave at `now_ns`.
  std::optional<Message> pop(int64_t now_ns);

 private:
  struct Waiting {
    Message message;
    int64_t ready_ns;
    uint64_t order;  // among all messages of the outbox
  };
  struct Lane {
    std::deque<Waiting> messages;
    uint64_t pushed = 0;
    int64_t last_ready_ns = 0;
  };

  // A lane is a context and a direction: answers must not wait for requests.
  static uint64_t lane_of(const Header& header);

  const Settings settings_;
  const uint64_t key_;
  std::map<uint64_t, Lane> lanes_;
  size_t waiting_ = 0;
  uint64_t pushed_ = 0;
};

}  // namespace fanfold::nccl_plugin
