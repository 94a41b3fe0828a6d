#include "nccl_plugin/wire.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace fanfold::nccl_plugin {
namespace {

constexpr size_t kChunkBytes = size_t{256} << 10;
// What one peer may move before the next one has its turn.
constexpr size_t kTurnBytes = size_t{1} << 20;
constexpr int64_t kLingerNs = 2'000'000'000;
constexpr int64_t kMostSleepNs = 50'000'000;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool has_payload(Kind kind) { return kind == Kind::kPut || kind == Kind::kReply; }

}  // namespace

struct Wire::Peer {
  Peer(int32_t rank_, std::unique_ptr<Link> link_, Outbox outbox_)
      : rank(rank_), link(std::move(link_)), outbox(std::move(outbox_)) {}

  bool is_sending() const { return out_at < out.size(); }
  bool is_idle() const { return outbox.empty() && !is_sending(); }
  // Nothing reaches it any more.
  bool is_gone(int32_t own_rank) const { return !link && rank != own_rank; }

  const int32_t rank;
  std::unique_ptr<Link> link;  // null: this rank, or a peer that has closed
  Outbox outbox;
  bool said_goodbye = false;
  bool receives = true;  // false: it has ended, and its last messages are still to be read

  // The message under way: `out` holds its header and a piece of its payload.
  Message message;
  uint64_t payload_read = 0;
  std::vector<std::byte> out;
  size_t out_at = 0;

  // The message that arrives.
  Header header;
  size_t header_got = 0;
  std::shared_ptr<Memory> target;
  uint64_t target_offset = 0;
  uint64_t payload_got = 0;  // in memory
  std::vector<std::byte> piece;
  size_t piece_got = 0;
  Problem problem;  // why the payload is thrown away
};

Wire::Wire(WireOwner& owner, WireOptions options)
    : owner_(owner), settings_(std::move(options.settings)), rank_(options.rank),
      bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  for (int32_t rank = 0; std::cmp_less(rank, options.links.size()); ++rank) {
    auto& link = options.links[static_cast<size_t>(rank)];
    peers_.push_back(std::make_unique<Peer>(rank, std::move(link), Outbox(settings_, rank_, rank)));
  }
  if (!bell_.is_open()) throw std::runtime_error(system_problem("eventfd", errno));
  thread_ = std::thread([this] {
    try {
      run();
    } catch (const std::exception& error) {
      fail(std::string("its wire's thread ends: ") + error.what());
    }
  });
  pthread_setname_np(thread_.native_handle(), "fanfold-wire");
}

Wire::~Wire() {
  closing_.store(true);
  eventfd_write(bell_.descriptor(), 1);
  thread_.join();
}

void Wire::post(int32_t peer, Message message) {
  {
    const std::scoped_lock lock(mutex_);
    posted_.emplace_back(peer, std::move(message));
  }
  eventfd_write(bell_.descriptor(), 1);
}

void Wire::run() {
  while (!failed_ && !may_end()) {
    take_posted();
    bool moved = false;
    for (const auto& peer : peers_) {
      if (failed_) break;
      if (peer->rank == rank_) {
        moved = deliver_to_self(*peer) || moved;
      } else {
        moved = send_some(*peer) || moved;
        moved = receive_some(*peer) || moved;
      }
    }
    if (!moved && !failed_) sleep();
  }
}

void Wire::take_posted() {
  std::vector<std::pair<int32_t, Message>> posted;
  {
    const std::scoped_lock lock(mutex_);
    posted.swap(posted_);
  }
  const int64_t now = now_ns();
  for (auto& [peer, message] : posted) {
    Peer& to = *peers_[static_cast<size_t>(peer)];
    if (!to.is_gone(rank_)) to.outbox.push(std::move(message), now);
  }
}

void Wire::sleep() {
  std::vector<pollfd> waits = {{.fd = bell_.descriptor(), .events = POLLIN, .revents = 0}};
  const int64_t now = now_ns();
  int64_t wake = now + kMostSleepNs;
  for (const auto& peer : peers_) {
    if (peer->is_gone(rank_)) continue;
    if (const auto next = peer->outbox.next_ns(); next && !peer->is_sending()) {
      wake = std::min(wake, *next);
    }
    if (!peer->link) continue;
    const short events = peer->link->events_to_sleep(peer->is_sending() && peer->receives);
    if (events == 0) return;
    waits.push_back({.fd = peer->link->descriptor(), .events = events, .revents = 0});
  }
  const int64_t wait_ns = std::max<int64_t>(0, wake - now);
  const timespec wait{.tv_sec = wait_ns / 1'000'000'000, .tv_nsec = wait_ns % 1'000'000'000};
  ppoll(waits.data(), waits.size(), &wait, nullptr);
  eventfd_t rung = 0;
  static_cast<void>(eventfd_read(bell_.descriptor(), &rung));
}

// Closing, with nothing left to send, and nobody who may still send.
bool Wire::may_end() {
  if (!closing_.load()) return false;
  if (!close_deadline_ns_) close_deadline_ns_ = now_ns() + kLingerNs;
  if (now_ns() > *close_deadline_ns_) return true;
  take_posted();
  const auto idle = [&](const auto& peer) { return peer->is_idle() || peer->is_gone(rank_); };
  if (!std::ranges::all_of(peers_, idle)) return false;
  if (!said_goodbye_) {
    said_goodbye_ = true;
    for (const auto& peer : peers_) {
      if (peer->link) peer->outbox.push(bare({.kind = Kind::kGoodbye}), now_ns());
    }
    return false;
  }
  return std::ranges::all_of(peers_,
                             [](const auto& peer) { return peer->said_goodbye || !peer->link; });
}

void Wire::fail(const Problem& problem) {
  if (failed_) return;
  failed_ = true;
  // Closed links tell the peers.
  for (const auto& peer : peers_) peer->link.reset();
  owner_.failed("rank " + std::to_string(rank_) + ": " + problem);
}

void Wire::end_of(Peer& peer, Link::State state) {
  if (peer.said_goodbye) {
    peer.link.reset();
    peer.outbox.clear();
    owner_.closed(peer.rank);
    return;
  }
  const std::string connection =
      std::string("the ") + peer.link->name() + " connection to rank " + std::to_string(peer.rank);
  if (state == Link::State::kEnded) {
    fail(connection +
         " has ended: that rank has died, was killed, or has failed itself; look at "
         "its output, and start all ranks again");
  } else {
    fail(system_problem(connection + " fails", errno) + "; check the network between the hosts");
  }
}

// ---- sending ----

bool Wire::send_some(Peer& peer) {
  size_t moved = 0;
  while (peer.link && peer.receives && moved < kTurnBytes) {
    if (!peer.is_sending() && !next_message(peer)) break;
    const size_t before = moved;
    const auto state =
        peer.link->send(peer.out.data() + peer.out_at, peer.out.size() - peer.out_at, moved);
    peer.out_at += moved - before;
    if (state != Link::State::kOpen) {
      // What the peer sent before it ended says whether it ended in order.
      peer.receives = state != Link::State::kEnded;
      if (peer.receives) end_of(peer, state);
      return true;
    }
    if (moved == before) break;
    if (peer.is_sending()) continue;
    if (const Problem problem = fill(peer); !problem.empty()) fail(problem);
  }
  return moved > 0;
}

// Makes `out` hold the next message that may leave. Returns false if there is none.
bool Wire::next_message(Peer& peer) {
  while (std::optional<Message> next = peer.outbox.pop(now_ns())) {
    if (next->injects_error) {
      fail(injected_error(peer));
      return false;
    }
    peer.message = std::move(*next);
    peer.payload_read = 0;
    Header& header = peer.message.header;
    if (header.kind == Kind::kGet) {
      gets_[header.id] = {.memory = std::move(peer.message.source),
                          .offset = peer.message.source_offset};
    }
    peer.out.resize(sizeof header);
    peer.out_at = 0;
    std::memcpy(peer.out.data(), &header, sizeof header);
    const Problem problem = fill(peer);
    if (problem.empty()) return true;
    // Nothing of the message has left: only its request fails.
    peer.out.clear();
    if (header.kind == Kind::kPut) {
      owner_.completed(header.id, problem);
    } else {
      answer(peer, header, problem);
    }
  }
  return false;
}

// Appends the next piece of the payload if all before it has left, or only the header is there.
Problem Wire::fill(Peer& peer) {
  const Header& header = peer.message.header;
  if (!has_payload(header.kind) || peer.payload_read == header.bytes) return {};
  const size_t kept = peer.is_sending() ? peer.out.size() : 0;
  const size_t count = std::min<uint64_t>(kChunkBytes, header.bytes - peer.payload_read);
  peer.out.resize(kept + count);
  peer.out_at = 0;
  Problem problem = peer.message.source->read(peer.message.source_offset + peer.payload_read,
                                              peer.out.data() + kept, count);
  peer.payload_read += count;
  return problem;
}

Problem Wire::injected_error(const Peer& peer) const {
  return "an error that FANFOLD_NCCL_PLUGIN injects (error_one_in, seed " +
         std::to_string(settings_.seed) + ") breaks an operation to rank " +
         std::to_string(peer.rank);
}

bool Wire::deliver_to_self(Peer& peer) {
  std::optional<Message> next = peer.outbox.pop(now_ns());
  if (!next) return false;
  if (next->injects_error) {
    fail(injected_error(peer));
    return true;
  }
  owner_.completed(next->header.id, apply_to_self(*next));
  return true;
}

Problem Wire::apply_to_self(const Message& message) {
  const Header& header = message.header;
  if (header.kind == Kind::kFlush) return {};
  std::shared_ptr<Memory> far = owner_.memory_of(header.memory);
  if (header.bytes > 0 && (!far || !message.source)) return "the memory has been deregistered";
  const bool is_put = header.kind == Kind::kPut;
  std::vector<std::byte> piece(std::min<uint64_t>(header.bytes, kChunkBytes));
  for (uint64_t at = 0; at < header.bytes; at += kChunkBytes) {
    const size_t count = std::min<uint64_t>(kChunkBytes, header.bytes - at);
    Memory& from = is_put ? *message.source : *far;
    Memory& to = is_put ? *far : *message.source;
    const uint64_t near_at = message.source_offset + at;
    const uint64_t far_at = header.offset + at;
    Problem problem = from.read(is_put ? near_at : far_at, piece.data(), count);
    if (problem.empty()) problem = to.write(is_put ? far_at : near_at, piece.data(), count);
    if (!problem.empty()) return problem;
  }
  return signal(header);
}

// ---- receiving ----

bool Wire::receive_some(Peer& peer) {
  size_t moved = 0;
  while (peer.link && moved < kTurnBytes) {
    const size_t before = moved;
    auto state = Link::State::kOpen;
    if (peer.header_got < sizeof(Header)) {
      auto* header = reinterpret_cast<std::byte*>(&peer.header);
      state = peer.link->receive(header + peer.header_got, sizeof(Header) - peer.header_got, moved);
      peer.header_got += moved - before;
      if (peer.header_got == sizeof(Header)) begin_frame(peer);
    } else {
      state = peer.link->receive(peer.piece.data() + peer.piece_got,
                                 peer.piece.size() - peer.piece_got, moved);
      peer.piece_got += moved - before;
      if (peer.piece_got == peer.piece.size()) take_payload(peer);
    }
    if (failed_) return true;
    if (state != Link::State::kOpen) {
      end_of(peer, state);
      return true;
    }
    if (moved == before) break;
  }
  return moved > 0;
}

void Wire::begin_frame(Peer& peer) {
  const Header& header = peer.header;
  if (header.magic != Header::kMagic || header.kind < Kind::kPut || header.kind > Kind::kGoodbye) {
    fail("rank " + std::to_string(peer.rank) +
         " sends what this plugin does not understand; all ranks must load the same plugin");
    return;
  }
  peer.problem.clear();
  peer.payload_got = 0;
  peer.piece_got = 0;
  if (!has_payload(header.kind) || header.bytes == 0) {
    finish_frame(peer);
    return;
  }
  if (header.kind == Kind::kPut) {
    peer.target = owner_.memory_of(header.memory);
    peer.target_offset = header.offset;
    if (!peer.target) peer.problem = "its target memory is not registered (any more)";
  } else if (const auto get = gets_.find(header.id); get != gets_.end()) {
    peer.target = get->second.memory;
    peer.target_offset = get->second.offset;
  } else {
    peer.problem = "nobody has asked for it";
  }
  peer.piece.resize(std::min<uint64_t>(kChunkBytes, header.bytes));
}

void Wire::take_payload(Peer& peer) {
  if (peer.problem.empty()) {
    peer.problem = peer.target->write(peer.target_offset + peer.payload_got, peer.piece.data(),
                                      peer.piece.size());
  }
  peer.payload_got += peer.piece.size();
  peer.piece_got = 0;
  if (peer.payload_got == peer.header.bytes) {
    finish_frame(peer);
  } else {
    peer.piece.resize(std::min<uint64_t>(kChunkBytes, peer.header.bytes - peer.payload_got));
  }
}

void Wire::finish_frame(Peer& peer) {
  const Header header = peer.header;
  peer.header_got = 0;
  peer.target.reset();
  switch (header.kind) {
    case Kind::kPut:
      if (peer.problem.empty()) peer.problem = signal(header);
      answer(peer, header, peer.problem);
      break;
    case Kind::kGet:
      answer_get(peer, header);
      break;
    case Kind::kFlush:
      answer(peer, header, {});
      break;
    case Kind::kReply:
    case Kind::kDone:
      gets_.erase(header.id);
      owner_.completed(header.id, peer.problem);
      break;
    case Kind::kRefused:
      gets_.erase(header.id);
      owner_.completed(header.id, "rank " + std::to_string(peer.rank) +
                                      " could not carry it out; its output says why");
      break;
    case Kind::kRegister:
      owner_.registered(peer.rank, header.memory, header.bytes);
      break;
    case Kind::kGoodbye:
      peer.said_goodbye = true;
      break;
  }
}

void Wire::answer(Peer& peer, const Header& header, const Problem& problem) {
  if (!problem.empty()) {
    warn(abi::Result::kRemoteError,
         "rank " + std::to_string(rank_) + " refuses an operation of rank " +
             std::to_string(peer.rank) + " on " + std::to_string(header.bytes) +
             " bytes at offset " + std::to_string(header.offset) + " of registration " +
             std::to_string(header.memory) + ": " + problem);
  }
  const Kind kind = problem.empty() ? Kind::kDone : Kind::kRefused;
  peer.outbox.push(bare({.kind = kind, .id = header.id, .context = header.context}), now_ns());
}

void Wire::answer_get(Peer& peer, const Header& header) {
  if (header.bytes == 0) {
    answer(peer, header, {});
    return;
  }
  std::shared_ptr<Memory> source = owner_.memory_of(header.memory);
  if (!source || !source->has(header.offset, header.bytes)) {
    answer(peer, header, "the memory is not registered (any more), or smaller");
    return;
  }
  Header reply = header;
  reply.kind = Kind::kReply;
  Message message = bare(reply);
  message.source = std::move(source);
  message.source_offset = header.offset;
  peer.outbox.push(std::move(message), now_ns());
}

Problem Wire::signal(const Header& header) {
  if (header.signal_memory == 0) return {};
  const std::shared_ptr<Memory> words = owner_.memory_of(header.signal_memory);
  if (!words) return "its signal's memory is not registered (any more)";
  return words->add(header.signal_offset, header.signal_value);
}

}  // namespace fanfold::nccl_plugin
