// The state of a loopback network. Every member function runs under the network's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/loopback.h"
#include "transport/loopback_link.h"
#include "transport/loopback_plan.h"
#include "transport/transport.h"

namespace fanfold::transport::loopback {

// A write on its way. The steps that are still to come share it.
struct Message {
  Write write{};
  size_t source = 0;  // indices of endpoints
  size_t target = 0;
  Plan plan{};
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::vector<std::byte> copy;  // of the source
  bool copied = false;
  bool landed = false;
  bool completion_scheduled = false;
  bool completed = false;  // and reported
  bool lost = false;
  int32_t unreported_duplicates = 0;  // landed without a poll
  int64_t first_refused = -1;         // by a cut, at this time
  int64_t piece_bytes = 0;
  std::vector<bool> pieces;  // which have landed
  int64_t next_packet = 0;   // the target's link has passed all before it
  int32_t train = 0;         // number of the current train of packets
  bool train_broken = false;
};
using MessagePtr = std::shared_ptr<Message>;

// What a poll of the target finds.
struct Inbound {
  int64_t time;
  uint64_t order;
  MessagePtr message;
  int64_t piece;  // -1: the whole write with its immediate
  bool duplicate;
  bool landed;  // without a poll
};

struct Completion {
  int64_t time;
  uint64_t order;
  MessagePtr message;
};

struct Rail {
  int32_t in_flight = 0;
  std::deque<Inbound> inbound;
  std::deque<Inbound> waiting;  // for room in the receive queue
  int32_t queued = 0;           // inbound without pieces
  int64_t stalled_until = 0;
};

struct Memory {
  std::byte* data;
  int64_t bytes;
  uint64_t key;
};

// The way from an endpoint to one of its peers.
struct Channel {
  size_t target;
  int64_t writes = 0;
  std::vector<int32_t> in_flight;     // of each rail
  std::vector<int64_t> last_arrival;  // of each rail, if writes stay in order
  std::string failure;                // empty while the peer is reachable
};

// One thread of one rank.
struct Endpoint {
  int32_t rank;
  int32_t thread;
  bool open = true;
  std::string failure;  // of the whole transport
  std::vector<Memory> memories;
  std::map<int32_t, Channel> channels;  // by the number under which a peer was connected
  std::vector<Rail> rails;
  std::deque<Completion> completions;
  std::deque<int32_t> failed_peers;  // not yet reported
  int64_t writes = 0;
  int64_t attempts = 0;
};

class State {
 public:
  explicit State(Options options_) : options(std::move(options_)) {}

  // --- For transports; `error` receives what `Transport::error` returns.
  size_t open(int32_t rank, int32_t thread);
  void close(size_t id);
  Code connect(size_t id, int32_t peer, const Address& address, std::string& error);
  LocalMemory register_memory(size_t id, std::byte* data, int64_t bytes, std::string& error);
  RemoteMemory remote(size_t id, LocalMemory memory) const;
  Address address(size_t id) const;
  Code write(size_t id, const Write& write, std::string& error);
  int32_t poll(size_t id, std::span<Event> events, std::string& error);

  // --- For the network.
  int64_t now() const { return now_; }
  void advance(int64_t ns);
  int64_t until_next() const { return steps_.empty() ? -1 : steps_.front().time - now_; }
  void stall(int32_t rank, int32_t rail, int64_t ns);  // rail -1: all
  void cut(int32_t rank, int32_t peer, int64_t ns);
  void kill(int32_t rank);
  const Counters& counters() const { return counters_; }

  const Options options;
  std::mutex mutex;

 private:
  // Something that happens at a time, without a poll. Steps of the same time keep their order.
  struct Step {
    int64_t time;
    uint64_t order;
    std::function<void()> run;
  };
  void at(int64_t time, std::function<void()> run);

  // Sending (loopback_send.cpp).
  std::string wrong_with(const Endpoint& source, const Write& write) const;
  std::string wrong_target(const Endpoint& target, const Write& write) const;
  bool has_room(Endpoint& source, const Write& write);
  const WriteError* write_error(const Endpoint& source) const;
  void send(size_t id, Channel& channel, const Write& write);
  void schedule_arrival(const MessagePtr& message, int64_t time);
  void start_train(const MessagePtr& message);
  void pass_packet(const MessagePtr& message, int32_t train, int64_t packet, int64_t start_ps);
  Link& link(bool outgoing, const Endpoint& endpoint, int32_t rail);

  // Arriving and completing (loopback_receive.cpp).
  void arrive(const MessagePtr& message, bool duplicate);
  bool held_by_cut(const MessagePtr& message, bool duplicate);
  void enter_queue(Rail& rail, Inbound inbound);
  void land_without_poll(Endpoint& target);
  // Returns true if the target has something to report.
  bool land(Inbound& inbound);
  void land_piece(Message& message, int64_t piece);
  void land_whole(Message& message, bool duplicate);
  void leave_queue(Endpoint& target, Rail& rail);
  void schedule_completion(const MessagePtr& message);
  void read_source(Message& message);
  bool report(Endpoint& endpoint, int32_t rail, Event& event);
  bool report_completion(Endpoint& source, Event& event);
  int32_t next_ready(const Endpoint& endpoint) const;

  // Failures (loopback_receive.cpp).
  bool lost(const Message& message) const;
  void lose(const MessagePtr& message, const std::string& why);
  void fail_peer(size_t id, int32_t peer, const std::string& why);

  int64_t now_ = 0;
  uint64_t order_ = 0;
  std::vector<Step> steps_;  // a heap, the earliest in front
  std::vector<std::unique_ptr<Endpoint>> endpoints_;
  std::map<std::pair<int32_t, int32_t>, int64_t> cuts_;   // until when; the lower rank first
  std::map<std::pair<int32_t, int32_t>, Link> incoming_;  // by rank and rail
  std::map<std::pair<int32_t, int32_t>, Link> outgoing_;
  Counters counters_;
};

}  // namespace fanfold::transport::loopback
