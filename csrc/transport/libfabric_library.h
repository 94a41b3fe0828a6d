// libfabric.so.1, loaded at its first use, so that Fanfold builds and imports without it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fork.h"
#include "transport/libfabric_abi.h"

namespace fanfold::transport::libfabric {

// libfabric's exported functions, by their names without the prefix `fi_`. All others are in the
// tables of its objects.
struct Library {
  uint32_t (*version)();
  int (*getinfo)(uint32_t version, const char* node, const char* service, uint64_t flags,
                 const Info* hints, Info** found);
  void (*freeinfo)(Info*);
  Info* (*dupinfo)(const Info*);  // of null: a new one
  int (*fabric)(FabricAttr*, Fabric**, void* context);
  const char* (*strerror)(int error);
  std::string path;  // the name under which it was loaded

  // The API version to ask for: the newest that both sides know, at most `newest`.
  uint32_t api(uint32_t newest = kNewestApi) const;
  // "fi_xyz fails: text (code)". Takes the negative codes that libfabric's functions return.
  std::string failure(const std::string& what, int64_t result) const;
};

// "1.17"
std::string version_text(uint32_t version);

// Returns the library. Throws Unavailable if there is none or if it is too old; after a failure the
// next call tries again.
const Library& library();

struct FreeInfo {
  const Library* library;
  void operator()(Info* info) const { library->freeinfo(info); }
};
using InfoList = std::unique_ptr<Info, FreeInfo>;

// Every endpoint type that Fanfold can use here: reliable, unconnected, with remote writes. Empty
// if there is none. `provider` narrows the search to one provider's name; empty for all. With
// `gpu_memory`, only those that offer FI_HMEM, as they are to be opened for it; none if that search
// fails.
InfoList find_endpoints(const Library& library, const std::string& provider,
                        bool gpu_memory = false);

// Closes an object of libfabric when it goes out of scope. A forked child leaves its parent's
// objects open: both share what closing changes, such as the sockets that epoll watches.
template <typename Object>
struct Close {
  void operator()(Object* object) const {
    if (generation == fork_generation()) object->fid.ops->close(&object->fid);
  }
  uint32_t generation = fork_generation();
};
template <typename Object>
using Owned = std::unique_ptr<Object, Close<Object>>;

}  // namespace fanfold::transport::libfabric
