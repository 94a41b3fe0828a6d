#include "transport/libfabric_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "base/error.h"

namespace fanfold::transport::libfabric {
namespace {

// The system's library first; then where Amazon's installer for EFA puts its own.
constexpr const char* kNames[] = {
    "libfabric.so.1",
    "/opt/amazon/efa/lib64/libfabric.so.1",
    "/opt/amazon/efa/lib/libfabric.so.1",
};

constexpr const char* kInstall =
    "install it (Debian, Ubuntu: apt install libfabric1; AWS: the EFA installer; Cray: the "
    "module libfabric)";

// Restores what the process does at each signal. Debian's libfabric loads libpsm, which takes over
// SIGINT, SIGTERM and others, to end the process with exit(): a process that exits already hangs.
class SignalKeeper {
 public:
  SignalKeeper() {
    for (int number = 1; number < NSIG; ++number) {
      Kept& kept = kept_[static_cast<size_t>(number)];
      kept.known = sigaction(number, nullptr, &kept.action) == 0;
    }
  }
  ~SignalKeeper() {
    for (int number = 1; number < NSIG; ++number) {
      // Even to set what is set already may discard a signal that is pending.
      const Kept& kept = kept_[static_cast<size_t>(number)];
      struct sigaction now{};
      if (!kept.known || sigaction(number, nullptr, &now) != 0) continue;
      if (now.sa_handler != kept.action.sa_handler) sigaction(number, &kept.action, nullptr);
    }
  }
  SignalKeeper(const SignalKeeper&) = delete;
  SignalKeeper& operator=(const SignalKeeper&) = delete;

 private:
  struct Kept {
    struct sigaction action;
    bool known;
  };
  std::array<Kept, NSIG> kept_{};
};

template <typename Pointer>
void require(void* handle, Pointer& function, const char* name) {
  function = reinterpret_cast<Pointer>(dlsym(handle, name));
  if (function == nullptr) {
    throw Unavailable(std::string(kNames[0]) + " has no function " + name + ": " + kInstall);
  }
}

Library load() {
  const SignalKeeper keeper;
  std::string reason;
  void* handle = nullptr;  // never unloaded, because other libraries of the process may use it
  Library library{};
  for (const char* name : kNames) {
    handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    library.path = name;
    if (handle != nullptr) break;
    const char* text = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps it per thread
    if (reason.empty() && text != nullptr) reason = text;
  }
  if (handle == nullptr) {
    throw Unavailable("there is no libfabric (" + reason + "): " + kInstall);
  }
  require(handle, library.version, "fi_version");
  require(handle, library.getinfo, "fi_getinfo");
  require(handle, library.freeinfo, "fi_freeinfo");
  require(handle, library.dupinfo, "fi_dupinfo");
  require(handle, library.fabric, "fi_fabric");
  require(handle, library.strerror, "fi_strerror");
  if (library.version() < kOldestApi) {
    throw Unavailable("libfabric is " + version_text(library.version()) + ", but " +
                      version_text(kOldestApi) + " or newer is needed: " + kInstall);
  }
  return library;
}

}  // namespace

std::string version_text(uint32_t version) {
  return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff);
}

uint32_t Library::api(uint32_t newest) const { return std::min(newest, version()); }

std::string Library::failure(const std::string& what, int64_t result) const {
  const int code = static_cast<int>(result < 0 ? -result : result);
  return what + " fails: " + strerror(code) + " (" + std::to_string(code) + ")";
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

InfoList find_endpoints(const Library& library, const std::string& provider, bool gpu_memory) {
  const InfoList hints(library.dupinfo(nullptr), FreeInfo{&library});
  if (hints == nullptr) throw Unavailable("libfabric has no memory for a fi_info");
  hints->caps = kMsg | kRma | kWrite | kRemoteWrite | kSend | kRecv;
  hints->mode = kModeContext | kModeContext2 | kModeRxCqData;
  hints->ep_attr->type = kEpRdm;
  DomainAttr& domain = *hints->domain_attr;
  // FI_MR_RAW is asked for only to find such a provider and to say why it is refused.
  domain.mr_mode = kMrLocal | kMrVirtAddr | kMrAllocated | kMrProvKey | kMrEndpoint | kMrRaw;
  if (gpu_memory) {
    hints->caps |= kHmem;
    domain.mr_mode |= kMrHmem;
  }
  domain.threading = kThreadDomain;
  domain.control_progress = kProgressManual;
  domain.data_progress = kProgressManual;
  domain.resource_mgmt = kResourceMgmtEnabled;
  // fi_freeinfo frees the name with free().
  if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
  Info* found = nullptr;
  // With a newer API some providers offer FI_HMEM although they copy by CUDA, which `forbid_cuda`
  // then finds out.
  const uint32_t api = library.api(gpu_memory ? kDmabufApi : kNewestApi);
  const int result = library.getinfo(api, nullptr, nullptr, 0, hints.get(), &found);
  // Without an offer for GPUs a transport opens all the same.
  if (result != 0 && result != -ENODATA && !gpu_memory) {
    throw Unavailable(library.failure("fi_getinfo", result));
  }
  return InfoList(result == 0 ? found : nullptr, FreeInfo{&library});
}

}  // namespace fanfold::transport::libfabric
