// The thread that moves bytes between the ranks of one communicator.
//
// Each communicator has one such thread. It alone touches links, outboxes and registered memory: it
// sends what other threads post, applies to memory what arrives, and answers.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_plugin/link.h"
#include "nccl_plugin/outbox.h"

namespace fanfold::nccl_plugin {

// Whom the wire reports to, from its thread.
class WireOwner {
 public:
  virtual ~WireOwner() = default;
  // The memory of a registration of this rank; null if there is none.
  virtual std::shared_ptr<Memory> memory_of(uint32_t number) = 0;
  // A request is over; `problem` says why if it has failed.
  virtual void completed(uint64_t request, const Problem& problem) = 0;
  virtual void registered(int32_t peer, uint32_t number, uint64_t bytes) = 0;
  // The peer has closed its communicator in order.
  virtual void closed(int32_t peer) = 0;
  // Nothing moves any more.
  virtual void failed(const Problem& problem) = 0;
};

struct WireOptions {
  Settings settings;
  int32_t rank;
  std::vector<std::unique_ptr<Link>> links;  // by rank; none for this rank
};

class Wire {
 public:
  // Starts the thread. The owner outlives the wire.
  Wire(WireOwner& owner, WireOptions options);
  // Sends what is posted, says goodbye, and serves peers that have not said it, for two seconds at
  // most; what has not left by then is dropped.
  ~Wire();
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  // Any thread.
  void post(int32_t peer, Message message);

 private:
  struct Peer;
  struct Landing {
    std::shared_ptr<Memory> memory;
    uint64_t offset;
  };

  void run();
  void take_posted();
  void sleep();
  bool may_end();
  void fail(const Problem& problem);
  void end_of(Peer& peer, Link::State state);

  bool send_some(Peer& peer);
  bool next_message(Peer& peer);
  Problem fill(Peer& peer);
  Problem injected_error(const Peer& peer) const;
  bool deliver_to_self(Peer& peer);
  Problem apply_to_self(const Message& message);

  bool receive_some(Peer& peer);
  void begin_frame(Peer& peer);
  void take_payload(Peer& peer);
  void finish_frame(Peer& peer);
  void answer(Peer& peer, const Header& header, const Problem& problem);
  void answer_get(Peer& peer, const Header& header);
  Problem signal(const Header& header);

  WireOwner& owner_;
  const Settings settings_;
  const int32_t rank_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<uint64_t, Landing> gets_;  // where replies land, by request
  bool failed_ = false;
  bool said_goodbye_ = false;

  Socket bell_;  // an eventfd: rung by `post` and by the end
  std::mutex mutex_;
  std::vector<std::pair<int32_t, Message>> posted_;  // guarded by mutex_
  std::atomic<bool> closing_ = false;
  std::optional<int64_t> close_deadline_ns_;
  std::thread thread_;
};

}  // namespace fanfold::nccl_plugin
