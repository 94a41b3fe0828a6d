#include "nccl_plugin/gpu_memory.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace fanfold::nccl_plugin {
namespace {

constexpr int kDeviceOrdinal = 9;             // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
constexpr int kRelaxedCapture = 2;            // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kDefaultContext = 0;       // flags
constexpr unsigned kNonBlockingStream = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kWriteAfterAllBefore = 0;  // CU_STREAM_WRITE_VALUE_DEFAULT
constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kNoCopy =
    "an earlier kernel may have failed, or the memory may have been freed";
constexpr const char* kNoContext =
    "the plugin has a CUDA context of its own, which takes memory of the GPU, and under MPS the "
    "channels of a client, which a lower CUDA_DEVICE_MAX_CONNECTIONS makes fewer";

struct Loaded {
  Driver driver{};
  Problem problem;
};

template <typename F>
void find(void* library, const char* name, F& function, Problem& problem) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (function == nullptr && problem.empty()) {
    problem = std::string(kLibrary) + " lacks " + name + "; install a driver for CUDA 12 or newer";
  }
}

Loaded load() {
  Loaded loaded;
  // Never closed: NCCL and CUDA of this process use the same library to the end.
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.problem = std::string("GPU memory needs ") + kLibrary +
                     ", which cannot be loaded; install NVIDIA's driver";
    return loaded;
  }
  Driver& driver = loaded.driver;
  Problem& problem = loaded.problem;
  find(library, "cuInit", driver.init, problem);
  find(library, "cuPointerGetAttribute", driver.pointer_attribute, problem);
  find(library, "cuCtxCreate_v2", driver.create_context, problem);
  find(library, "cuCtxDestroy_v2", driver.destroy_context, problem);
  find(library, "cuCtxPushCurrent_v2", driver.push_context, problem);
  find(library, "cuCtxPopCurrent_v2", driver.pop_context, problem);
  find(library, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode, problem);
  find(library, "cuStreamCreate", driver.create_stream, problem);
  find(library, "cuStreamDestroy_v2", driver.destroy_stream, problem);
  find(library, "cuStreamSynchronize", driver.synchronize, problem);
  find(library, "cuMemcpyHtoDAsync_v2", driver.to_device, problem);
  find(library, "cuMemcpyDtoHAsync_v2", driver.to_host, problem);
  find(library, "cuStreamWriteValue64_v2", driver.write_word, problem);
  find(library, "cuGetErrorName", driver.error_name, problem);
  if (problem.empty() && driver.init(0) != 0) problem = "cuInit fails; is a GPU visible here?";
  return loaded;
}

// While another thread captures a graph, calls that wait would end the capture otherwise.
template <typename F>
int relaxed(const Driver& driver, const F& calls) {
  int mode = kRelaxedCapture;
  if (const int result = driver.exchange_capture_mode(&mode); result != 0) return result;
  const int result = calls();
  driver.exchange_capture_mode(&mode);
  return result;
}

// A CUDA context of the plugin's own. In the program's context a copy would wait while a module is
// loaded or memory is freed, and these wait for kernels, which may spin for what the copy brings.
class Context {
 public:
  explicit Context(const Driver& driver) : driver_(driver) {}
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    if (handle_ != nullptr) relaxed(driver_, [&] { return driver_.destroy_context(handle_); });
  }

  int open(int device) {
    return relaxed(driver_, [&] {
      void* made = nullptr;
      const int result = driver_.create_context(&made, kDefaultContext, device);
      if (result != 0) return result;
      handle_ = made;
      pop();  // the caller keeps the one it has
      return result;
    });
  }
  int push() const { return driver_.push_context(handle_); }
  void pop() const {
    void* context = nullptr;
    driver_.pop_context(&context);
  }

 private:
  const Driver& driver_;
  void* handle_ = nullptr;
};

// A device has one context, which all registrations of its memory share.
std::shared_ptr<Context> context_of(const Driver& driver, int device, int& result) {
  static std::mutex one_at_a_time;
  static std::map<int, std::weak_ptr<Context>> contexts;
  const std::scoped_lock lock(one_at_a_time);
  std::weak_ptr<Context>& kept = contexts[device];
  if (auto context = kept.lock()) return context;
  auto context = std::make_shared<Context>(driver);
  result = context->open(device);
  if (result != 0) return nullptr;
  kept = context;
  return context;
}

class GpuMemory final : public Memory {
 public:
  GpuMemory(const Driver& driver, uintptr_t address, uint64_t bytes)
      : Memory(bytes), driver_(driver), address_(address) {}
  ~GpuMemory() override {
    if (stream_ != nullptr && context_->push() == 0) {
      relaxed(driver_, [&] { return driver_.destroy_stream(stream_); });
      context_->pop();
    }
  }

  Problem open() {
    int result = driver_.pointer_attribute(&device_, kDeviceOrdinal, address_);
    if (result != 0) return failure("cuPointerGetAttribute", result);
    context_ = context_of(driver_, device_, result);
    if (context_ == nullptr) return failure("cuCtxCreate", result, kNoContext);
    return in_context(
        [&](const char*& call) {
          call = "cuStreamCreate";
          // Not ordered with the default stream: a kernel there may spin for what arrives here.
          return driver_.create_stream(&stream_, kNonBlockingStream);
        },
        kNoContext);
  }

 private:
  Problem do_read(uint64_t offset, std::byte* to, size_t count) override {
    return in_context([&](const char*& call) {
      call = "cuMemcpyDtoHAsync";
      const int result = driver_.to_host(to, address_ + offset, count, stream_);
      return result == 0 ? finish(call) : result;
    });
  }
  Problem do_write(uint64_t offset, const std::byte* from, size_t count) override {
    return in_context([&](const char*& call) {
      call = "cuMemcpyHtoDAsync";
      const int result = driver_.to_device(address_ + offset, from, count, stream_);
      return result == 0 ? finish(call) : result;
    });
  }
  // Reads the word first: kernels of NCCL 2.28.9 reset signals, so a copy kept here would be wrong.
  Problem do_add(uint64_t offset, uint64_t value) override {
    // Communicators may share a word, and each has a thread of its own.
    static std::mutex one_at_a_time;
    const std::scoped_lock lock(one_at_a_time);
    uint64_t word = 0;
    return in_context([&](const char*& call) {
      call = "cuMemcpyDtoHAsync";
      int result = driver_.to_host(&word, address_ + offset, sizeof word, stream_);
      if (result == 0) result = finish(call);
      if (result != 0) return result;
      call = "cuStreamWriteValue64";
      result = driver_.write_word(stream_, address_ + offset, word + value, kWriteAfterAllBefore);
      return result == 0 ? finish(call) : result;
    });
  }

  int finish(const char*& call) {
    call = "cuStreamSynchronize";
    return driver_.synchronize(stream_);
  }
  template <typename F>
  Problem in_context(const F& calls, const char* cause = kNoCopy) {
    const char* call = "cuCtxPushCurrent";
    int result = context_->push();
    if (result != 0) return failure(call, result);
    result = relaxed(driver_, [&] { return calls(call); });
    context_->pop();
    return result == 0 ? Problem() : failure(call, result, cause);
  }
  Problem failure(const char* call, int result, const char* cause = kNoCopy) const {
    const char* name = nullptr;
    if (driver_.error_name(result, &name) != 0 || name == nullptr) name = "an unknown error";
    return std::string(call) + " on GPU " + std::to_string(device_) + " fails: " + name + "; " +
           cause;
  }

  const Driver& driver_;
  const uintptr_t address_;
  int device_ = -1;
  std::shared_ptr<Context> context_;
  void* stream_ = nullptr;
};

}  // namespace

const Driver* load_driver(Problem& problem) {
  static const Loaded loaded = load();
  problem = loaded.problem;
  return problem.empty() ? &loaded.driver : nullptr;
}

std::shared_ptr<Memory> gpu_memory(const Driver& driver, void* data, uint64_t bytes,
                                   Problem& problem) {
  auto memory = std::make_shared<GpuMemory>(driver, reinterpret_cast<uintptr_t>(data), bytes);
  problem = memory->open();
  if (!problem.empty()) return nullptr;
  return memory;
}

}  // namespace fanfold::nccl_plugin
