// Commands of a proxy's thread that wait for what was pushed before them.
#include <algorithm>
#include <utility>

#include "base/atomics.h"
#include "proxy/proxy_thread.h"

namespace fanfold::proxy {

// Finishes a fence or barrier once it is done. `take_commands` publishes its ticket in the next
// step at the latest, so the step's caller has to know that something was done.
bool ProxyThread::finish_held() {
  if (!held_ || failure() != nullptr || pending_ > 0 || in_flight_ > 0) return false;
  if (held_->kind == CommandKind::kFence) {
    counted_.add(&Stats::fences);
  } else if (held_->kind != CommandKind::kBarrier || !finish_barrier()) {
    return false;
  }
  held_.reset();
  rings_.publish(false);
  return true;
}

// Called while nothing is outstanding. Sends the signals; once these are acknowledged, waits for
// those of the peers. Because the peers have received this rank's signals, the rank may end.
bool ProxyThread::finish_barrier() {
  if (!std::exchange(barrier_sent_, true)) {
    ++barriers_;
    barrier_next_ = 0;
    barrier_moved_ = elapsed_;
    for (const int32_t peer : peers_) {
      if (channel_of(peer).given_up) continue;
      Pending pending;
      pending.kind = CommandKind::kSignal;
      pending.counter = kBarrierCounter;
      pending.amount = 1;
      enqueue(channel_of(peer), pending);
    }
    if (pending_ > 0) return false;
  }
  while (barrier_next_ < peers_.size()) {
    const uint64_t* counter =
        memory_.counters + int64_t{peers_[barrier_next_]} * kCounters + kBarrierCounter;
    const bool given_up = channel_of(peers_[barrier_next_]).given_up;
    if (!given_up && load_relaxed_system(counter) < barriers_) return false;
    ++barrier_next_;
    barrier_moved_ = elapsed_;
  }
  // Peers wait until their signals are acknowledged, which this rank cannot do once it has ended.
  const auto owes = [this](int32_t peer) { return channel_of(peer).owes(); };
  if (std::any_of(peers_.begin(), peers_.end(), owes)) return false;
  barrier_sent_ = false;
  counted_.add(&Stats::barriers);
  return true;
}

}  // namespace fanfold::proxy
