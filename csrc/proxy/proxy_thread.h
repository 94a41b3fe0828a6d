// One thread of a proxy: a ring, a transport, and the channels to and from its peers.
//
// `step` does a bounded amount of work and never waits. A Proxy calls it from a thread of its own;
// a test calls it for several ranks in any order that it likes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "layout/command.h"
#include "layout/control.h"
#include "layout/immediate.h"
#include "proxy/channel.h"
#include "proxy/command_rings.h"
#include "proxy/failure.h"
#include "proxy/options.h"
#include "proxy/stats.h"
#include "transport/transport.h"

namespace fanfold::proxy {

class ProxyThread {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Registers the memory with the transport. Throws TransportError if that fails.
  ProxyThread(const ProxyOptions& options, int32_t index, const ProxyMemory& memory,
              std::unique_ptr<transport::Transport> transport);

  // Registers it, before `address`. Throws Unavailable if that fails, and can go on without it.
  void register_rows(const RowsMemory& rows);
  bool has_rows() const { return rows_bytes_ > 0; }
  // Why a RowsMemory cannot be a GPU's; empty if it may be.
  std::string why_no_gpu_memory() const { return transport_->why_no_gpu_memory(); }
  ThreadAddress address() const;
  // Makes the peer reachable, for each peer of this thread, before the first step.
  void connect(int32_t peer, const ThreadAddress& address, const Credit& theirs);

  // Does what can be done at the time `now`. Returns whether anything was done.
  bool step(Time now);
  // Whether commands, messages or acknowledgements are unfinished, so that `step` should be called
  // again soon.
  bool outstanding() const;

  // For any thread, after `connect`: has this thread find out whether `peer` still runs. Networks
  // need not tell that to a rank that only waits for the peer. Behind a barrier the peer gets no
  // message for it.
  void probe(int32_t peer) { probe_.store(peer, std::memory_order_relaxed); }

  // Ends this thread's work because of an exception in it.
  void die(const std::string& what);

  // For any thread: why this thread has stopped, or null.
  const Failure* failure() const { return failed_.load(std::memory_order_acquire); }
  // For any thread: why `peer` is lost, or null. The thread goes on without a peer that it loses
  // while nothing is outstanding for that peer.
  const Failure* lost(int32_t peer) const;
  // For any thread, after `connect`: how the transport reaches `peer`, for messages; may be empty.
  std::string path(int32_t peer) const { return serves(peer) ? channels_[place(peer)]->path : ""; }
  // For any thread, after `connect`: why a command cannot be executed, or nothing.
  std::optional<BadArgument> refusal(const CommandFields& fields) const;
  // For any thread, after `connect`: of this thread, those of its peers included, and of one peer.
  Stats stats() const;
  Stats stats_of(int32_t peer) const;
  const std::vector<int32_t>& peers() const { return peers_; }
  std::vector<int32_t> cores() const { return transport_->cores(); }
  Counted& counted() { return counted_; }

  const Ring& command_ring() const { return rings_.of_host(); }
  // Null if no kernels push.
  const Ring* kernel_ring() const { return rings_.of_kernels(); }
  Doorbell& bell() { return bell_; }
  // For tests, on the thread that calls `step`.
  const Channel* channel(int32_t peer) const {
    return serves(peer) ? channels_[place(peer)].get() : nullptr;
  }

 private:
  bool serves(int32_t peer) const;
  Channel& channel_of(int32_t peer) { return *channels_[place(peer)]; }
  size_t place(int32_t peer) const { return static_cast<size_t>(peer / options_.threads); }
  // Where the word of a store lies in `stored_` of the rank that it comes to, and of this one.
  int64_t inbox_place(int32_t source, uint64_t sequence) const;
  int64_t outbox_place(int32_t peer, uint64_t sequence) const;
  int64_t source_of(int32_t peer) const {
    return memory_.sources.empty() ? 0 : memory_.sources[static_cast<size_t>(peer)];
  }
  transport::LocalMemory register_memory(std::byte* data, int64_t bytes);
  std::string unregistered(int64_t bytes) const;
  // Of an offset of a command: whether it is one of memory for rows alone, and within its memory.
  bool is_apart(int64_t offset) const { return rows_bytes_ > 0 && offset >= kRowsApart; }
  int64_t within(int64_t offset) const { return is_apart(offset) ? offset - kRowsApart : offset; }
  // Of an offset of a span, which is beyond all others if it is one of memory for rows alone.
  static constexpr int64_t kRowsSpan = int64_t{1} << 62;
  int64_t source_span(const CommandFields& fields) const;
  int64_t target_span(const CommandFields& fields) const;

  // The context of a write: peer, whether it is an acknowledgement, low half of the number.
  static constexpr uint64_t kAcknowledgementContext = uint64_t{1} << 32;
  static constexpr int kPeerShift = 33;
  static uint64_t context_of(int32_t peer) { return static_cast<uint64_t>(peer) << kPeerShift; }

  // Receiving.
  bool poll();
  void handle(const transport::Event& event);
  void arrive(const transport::Event& event);
  void accept(Channel& channel, const Immediate& immediate);
  void count(int32_t source, const Addition& addition);
  void store(int32_t source, uint64_t sequence);
  void complete(uint64_t context);
  void count_time(Channel& channel, uint64_t Stats::* field, std::chrono::nanoseconds since) const {
    channel.counted.add(field, static_cast<uint64_t>((elapsed_ - since).count()));
  }
  void add_news(Channel& channel) {
    if (!std::exchange(channel.in_news, true)) news_.push_back(channel.peer);
  }
  bool acknowledge();
  transport::Code send_acknowledgement(Channel& channel, bool reported = false);

  // Sending.
  bool take_commands();
  bool take(const CommandFields& fields);
  void enqueue(Channel& channel, const Pending& pending);
  bool send_pending();
  enum class Sent { kAll, kCredit, kRoom, kFailed };
  Sent send(Channel& channel);
  struct Message {
    transport::LocalMemory source;
    transport::RemoteMemory target;
    Span span{};
    Immediate immediate;
  };
  Message message_of(const Channel& channel, const StoredWord& stored);
  Sent send_message(Channel& channel, const Message& message);
  transport::Code write(transport::Write& write);
  bool finish_held();
  bool finish_barrier();

  // Failing.
  void send_probe(int32_t peer);
  void check_timeouts();
  void lose(int32_t peer, FailureReason reason);
  void mark_lost(Channel& channel, FailureReason reason, const std::string& text);
  // Fails, or gives up the channel's peer if the options say so or the peer has ended.
  void stop_for(Channel& channel, FailureReason reason, const std::string& text);
  void fail(FailureReason reason, int32_t peer, const std::string& text);
  Failure describe(FailureReason reason, int32_t peer, const std::string& text) const;
  // Calls `change` and keeps the number of messages in flight.
  template <typename Change>
  void freeing(Channel& channel, Change change);

  ProxyOptions options_;
  int32_t index_;
  ProxyMemory memory_;
  // [in, out][peers of this thread][kMostInFlight]: the words of stores. Outlives the transport.
  std::vector<StoredWord> stored_;
  std::unique_ptr<transport::Transport> transport_;
  transport::LocalMemory local_;
  transport::LocalMemory local_stored_;
  transport::LocalMemory local_rows_;
  int64_t rows_bytes_ = 0;             // of a RowsMemory, ...
  std::vector<int64_t> rows_sources_;  // ... with one for each rank
  ImmediateLayout layout_;
  SpanLimits limits_;
  CommandRings rings_;
  std::vector<std::unique_ptr<Channel>> channels_;  // of peer / threads; null for this rank itself
  std::vector<int32_t> peers_;
  std::vector<int32_t> sending_;  // channels with pending commands
  std::vector<int32_t> news_;     // channels with messages to acknowledge
  std::array<transport::Event, 64> events_{};

  std::optional<CommandFields> held_;  // popped, and not finished or not yet in its channel
  int64_t pending_ = 0;                // commands in channels
  int64_t in_flight_ = 0;              // messages
  int64_t acks_in_flight_ = 0;         // to peers that are not lost
  std::atomic<int32_t> probe_ = -1;    // the peer to ask, or -1
  uint64_t barriers_ = 0;              // begun
  bool barrier_sent_ = false;    // the signals of the barrier in `held_` are in their channels
  size_t barrier_next_ = 0;      // peers_ before this one have come to it
  bool behind_barrier_ = false;  // a barrier was taken, and no command for a peer since
  int32_t next_rail_ = 0;

  std::chrono::nanoseconds elapsed_{};  // of steps; the time of a suspended process hardly counts
  std::optional<Time> last_;
  std::chrono::nanoseconds ring_empty_{};  // when both rings were last seen to be
  std::chrono::nanoseconds next_check_{};
  std::chrono::nanoseconds barrier_moved_{};
  bool grown_ = false;       // a counter has grown in this step
  std::string known_error_;  // the transport's words for the peers that are lost

  Counted counted_;  // what is of no peer; channels have the rest
  Doorbell bell_{};
  std::unique_ptr<const Failure> failure_;
  std::atomic<const Failure*> failed_ = nullptr;  // `failure_`, for other threads
};

}  // namespace fanfold::proxy
