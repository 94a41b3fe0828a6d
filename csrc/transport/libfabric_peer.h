// What a transport over libfabric keeps of a peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/libfabric.h"
#include "transport/libfabric_abi.h"

namespace fanfold::transport::libfabric {

struct PeerRail {
  FiAddr address;
  uint64_t landing;
  uint64_t landing_key;
};

struct Peer {
  std::vector<PeerRail> rails;    // empty: not connected
  std::string name;               // of its first rail, where it is one of sockets
  std::vector<std::byte> socket;  // the address that it names
  std::string failure;            // why writes to the peer fail; empty while they do not
  bool ended = false;             // the peer listens no more
  bool reported = false;          // the failure has been reported
};

// As open_libfabric, within the bounds of options, and without a second try.
std::unique_ptr<Transport> make_transport(const Library& library, const LibfabricOptions& options);

}  // namespace fanfold::transport::libfabric
