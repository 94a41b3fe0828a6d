#include "host/stream_paths.h"

#include <algorithm>

namespace fanfold {
namespace {

using Kind = HighThroughputSignals::Kind;

int32_t own_host(const Exchange& exchange) { return exchange.hosts().host_of(exchange.rank()); }

int64_t share_of_staging(const Exchange& exchange, int64_t rings) {
  return exchange.staging_bytes() / rings / kAreaAlignment * kAreaAlignment;
}

// A dispatch has one ring for this rank's own host, and one for each source that it receives for.
StreamPlace dispatch_ring(const Exchange& exchange, int32_t owner, int32_t number) {
  return {owner, exchange.staging_offset() + number * dispatch_ring_bytes(exchange)};
}

// A combine has one ring for each source, and one for the sums of each other host.
StreamPlace combine_ring(const Exchange& exchange, int32_t owner, int32_t number) {
  return {owner, exchange.staging_offset() + number * combine_ring_bytes(exchange)};
}

// The place of the ring for `host`'s sums among those in the memory of `source`.
int32_t sums_ring(const Exchange& exchange, int32_t source, int32_t host) {
  const int32_t passed = host > exchange.hosts().host_of(source) ? 1 : 0;
  return exchange.ranks() + host - passed;
}

}  // namespace

int64_t dispatch_ring_bytes(const Exchange& exchange) {
  const int32_t served = exchange.hosts().most_served();
  if (served == 0) return exchange.staging_bytes();
  return share_of_staging(exchange, 1 + served);
}

int64_t combine_ring_bytes(const Exchange& exchange) {
  return share_of_staging(exchange, int64_t{exchange.ranks()} + exchange.hosts().count() - 1);
}

std::vector<int32_t> others_on(const Exchange& exchange, int32_t host) {
  std::vector<int32_t> peers;
  for (int32_t step = 1; step < exchange.ranks(); ++step) {
    const int32_t peer = (exchange.rank() + step) % exchange.ranks();
    if (exchange.hosts().host_of(peer) == host) peers.push_back(peer);
  }
  return peers;
}

OutgoingPath dispatch_to(const Exchange& exchange, int32_t host) {
  const int64_t published = exchange.signal(Kind::kPublished, exchange.rank());
  OutgoingPath path;
  for (const int32_t reader : others_on(exchange, host)) {
    path.readers.push_back({reader, exchange.signal(Kind::kAck, reader)});
    if (exchange.is_here(reader)) path.published.push_back({reader, published});
  }
  if (host == own_host(exchange)) {
    path.ring = dispatch_ring(exchange, exchange.rank(), 0);
    return path;
  }
  const int32_t gateway = exchange.hosts().gateway(exchange.rank(), host);
  path.published.push_back({gateway, published});
  path.ring = dispatch_ring(exchange, gateway, 1 + exchange.hosts().inbox(exchange.rank(), host));
  return path;
}

IncomingPath dispatch_from(const Exchange& exchange, int32_t source) {
  const Hosts& hosts = exchange.hosts();
  const StreamPlace ack{source, exchange.signal(Kind::kAck, exchange.rank())};
  const int64_t published = exchange.signal(Kind::kPublished, source);
  if (exchange.is_here(source)) {
    return {source, dispatch_ring(exchange, source, 0), {exchange.rank(), published}, ack};
  }
  const int32_t host = own_host(exchange);
  const int32_t gateway = hosts.gateway(source, host);
  const StreamPlace ring = dispatch_ring(exchange, gateway, 1 + hosts.inbox(source, host));
  return {source, ring, {gateway, published}, ack};
}

OutgoingPath rows_to(const Exchange& exchange, int32_t source) {
  const StreamPlace ring = combine_ring(exchange, exchange.rank(), source);
  if (source == exchange.rank()) return {ring, {}, {}};
  if (exchange.is_here(source)) {
    return {ring,
            {{source, exchange.signal(Kind::kPublished, exchange.rank())}},
            {{source, exchange.signal(Kind::kAck, source)}}};
  }
  const int32_t gateway = exchange.hosts().gateway(source, own_host(exchange));
  return {ring,
          {{exchange.rank(), exchange.signal(Kind::kForwarded, source)}},
          {{gateway, exchange.signal(Kind::kForwardAck, source)}}};
}

IncomingPath rows_from(const Exchange& exchange, int32_t peer) {
  return {peer,
          combine_ring(exchange, peer, exchange.rank()),
          {exchange.rank(), exchange.signal(Kind::kPublished, peer)},
          {peer, exchange.signal(Kind::kAck, exchange.rank())}};
}

IncomingPath rows_for(const Exchange& exchange, int32_t peer, int32_t source) {
  return {peer,
          combine_ring(exchange, peer, source),
          {peer, exchange.signal(Kind::kForwarded, source)},
          {peer, exchange.signal(Kind::kForwardAck, source)}};
}

OutgoingPath sums_to(const Exchange& exchange, int32_t source) {
  return {combine_ring(exchange, source, sums_ring(exchange, source, own_host(exchange))),
          {{source, exchange.signal(Kind::kPublished, exchange.rank())}},
          {{source, exchange.signal(Kind::kAck, source)}}};
}

IncomingPath sums_from(const Exchange& exchange, int32_t host) {
  const int32_t gateway = exchange.hosts().gateway(exchange.rank(), host);
  return {gateway,
          combine_ring(exchange, exchange.rank(), sums_ring(exchange, exchange.rank(), host)),
          {exchange.rank(), exchange.signal(Kind::kPublished, gateway)},
          {gateway, exchange.signal(Kind::kAck, exchange.rank())}};
}

}  // namespace fanfold
