#include "proxy/failure.h"

#include "base/error.h"

namespace fanfold::proxy {

void raise(const Failure& failure) {
  const bool ended = failure.reason == FailureReason::kEnded;
  if (ended || failure.reason == FailureReason::kTimeout ||
      failure.reason == FailureReason::kBarrier) {
    throw PeerTimeout(
        TimeoutReport{.rank = failure.rank,
                      .peer = failure.peer,
                      .phase = ended ? "the proxy (" + failure.text + ")" : failure.text,
                      .expected = failure.messages,
                      .actual = 0,
                      .seconds = failure.seconds,
                      .peer_gone = ended,
                      .path = failure.path});
  }
  throw TransportError(TransportReport{.rank = failure.rank,
                                       .peer = failure.peer,
                                       .transport = failure.transport,
                                       .what = failure.text,
                                       .messages = failure.messages,
                                       .bytes = failure.bytes,
                                       .seconds = failure.seconds,
                                       .path = failure.path});
}

}  // namespace fanfold::proxy
