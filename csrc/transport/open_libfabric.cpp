#include "base/error.h"
#include "transport/libfabric.h"
#include "transport/libfabric_library.h"
#include "transport/libfabric_peer.h"

namespace fanfold::transport {

std::unique_ptr<Transport> open_libfabric(const LibfabricOptions& options) {
  return open_libfabric(libfabric::library(), options);
}

std::unique_ptr<Transport> open_libfabric(const libfabric::Library& library,
                                          const LibfabricOptions& options) {
  if (options.endpoints_per_nic < 1 || options.endpoints_per_nic > kMostRails) {
    throw BadArgument("endpoints_per_nic", std::to_string(options.endpoints_per_nic),
                      "from 1 to " + std::to_string(kMostRails));
  }
  try {
    return libfabric::make_transport(library, options);
  } catch (const Unavailable& failure) {
    if (!options.request.gpu_memory) throw;
    LibfabricOptions plain = options;
    plain.request.gpu_memory = false;
    plain.why_no_gpu_memory = failure.what();
    return libfabric::make_transport(library, plain);
  }
}

}  // namespace fanfold::transport
