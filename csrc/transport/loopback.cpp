#include "transport/loopback.h"

#include <mutex>
#include <utility>

#include "base/error.h"
#include "transport/loopback_state.h"

namespace fanfold::transport::loopback {
namespace {

class Loopback final : public Transport {
 public:
  Loopback(std::shared_ptr<State> state, size_t id) : state_(std::move(state)), id_(id) {}
  ~Loopback() override {
    const std::scoped_lock lock(state_->mutex);
    state_->close(id_);
  }
  Loopback(const Loopback&) = delete;
  Loopback& operator=(const Loopback&) = delete;

  std::string_view name() const override { return "loopback"; }
  Limits limits() const override {
    const Options& options = state_->options;
    return {.write_bytes = options.write_bytes, .writes = options.writes, .rails = options.rails};
  }

  Address address() const override {
    const std::scoped_lock lock(state_->mutex);
    return state_->address(id_);
  }
  Code connect(int32_t peer, const Address& address) override {
    const std::scoped_lock lock(state_->mutex);
    return state_->connect(id_, peer, address, error_);
  }
  LocalMemory register_memory(std::byte* data, int64_t bytes) override {
    const std::scoped_lock lock(state_->mutex);
    return state_->register_memory(id_, data, bytes, error_);
  }
  RemoteMemory remote(LocalMemory memory) const override {
    const std::scoped_lock lock(state_->mutex);
    return state_->remote(id_, memory);
  }
  Code write(const Write& write) override {
    const std::scoped_lock lock(state_->mutex);
    return state_->write(id_, write, error_);
  }
  int32_t poll(std::span<Event> events) override {
    const std::scoped_lock lock(state_->mutex);
    return state_->poll(id_, events, error_);
  }
  const std::string& error() const override { return error_; }

 private:
  std::shared_ptr<State> state_;
  size_t id_;
  std::string error_;  // of this thread's own calls, so that no other thread changes it
};

int64_t at_least_zero(int64_t ns) {
  if (ns >= 0) return ns;
  throw BadArgument("ns", std::to_string(ns), "at least 0");
}

}  // namespace

std::shared_ptr<Network> Network::create(const Options& options) {
  check_options(options);
  return std::make_shared<Network>(std::make_unique<State>(options));
}

Network::Network(std::unique_ptr<State> state) : state_(std::move(state)) {}
Network::~Network() = default;

std::unique_ptr<Transport> Network::open(int32_t rank, int32_t thread) {
  const std::scoped_lock lock(state_->mutex);
  return std::make_unique<Loopback>(state_, state_->open(rank, thread));
}

int64_t Network::now() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->now();
}

void Network::advance(int64_t ns) {
  const std::scoped_lock lock(state_->mutex);
  state_->advance(at_least_zero(ns));
}

int64_t Network::until_next() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->until_next();
}

void Network::stall(int32_t rank, int64_t ns) {
  const std::scoped_lock lock(state_->mutex);
  state_->stall(rank, -1, at_least_zero(ns));
}

void Network::stall_rail(int32_t rank, int32_t rail, int64_t ns) {
  const std::scoped_lock lock(state_->mutex);
  if (rail < 0 || rail >= state_->options.rails) {
    throw BadArgument("rail", std::to_string(rail),
                      "between 0 and " + std::to_string(state_->options.rails - 1));
  }
  state_->stall(rank, rail, at_least_zero(ns));
}

void Network::cut(int32_t rank, int32_t peer, int64_t ns) {
  const std::scoped_lock lock(state_->mutex);
  state_->cut(rank, peer, at_least_zero(ns));
}

void Network::kill(int32_t rank) {
  const std::scoped_lock lock(state_->mutex);
  state_->kill(rank);
}

Counters Network::counters() const {
  const std::scoped_lock lock(state_->mutex);
  return state_->counters();
}

}  // namespace fanfold::transport::loopback
