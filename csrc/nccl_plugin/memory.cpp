#include "nccl_plugin/memory.h"

#include <atomic>
#include <cstring>

namespace fanfold::nccl_plugin {
namespace {

class HostMemory final : public Memory {
 public:
  HostMemory(std::byte* data, uint64_t bytes) : Memory(bytes), data_(data) {}

 private:
  Problem do_read(uint64_t offset, std::byte* to, size_t count) override {
    std::memcpy(to, data_ + offset, count);
    return {};
  }
  Problem do_write(uint64_t offset, const std::byte* from, size_t count) override {
    std::memcpy(data_ + offset, from, count);
    return {};
  }
  Problem do_add(uint64_t offset, uint64_t value) override {
    if (reinterpret_cast<uintptr_t>(data_ + offset) % sizeof(uint64_t) != 0) {
      return "a signal lies at an address that is no multiple of 8; align the registered memory";
    }
    std::atomic_ref word(*reinterpret_cast<uint64_t*>(data_ + offset));
    word.fetch_add(value, std::memory_order_release);
    return {};
  }

  std::byte* data_;
};

}  // namespace

Problem Memory::check(const char* what, uint64_t offset, uint64_t count) const {
  if (!open_) {
    return std::string(what) +
           " of memory that its rank has deregistered; deregister memory only "
           "when all ranks have finished with it";
  }
  if (!has(offset, count)) {
    return std::string(what) + " of " + std::to_string(count) + " bytes at offset " +
           std::to_string(offset) + " of a registration of " + std::to_string(bytes_) + " bytes";
  }
  return {};
}

Problem Memory::read(uint64_t offset, std::byte* to, size_t count) {
  const std::scoped_lock lock(mutex_);
  Problem problem = check("a read", offset, count);
  if (!problem.empty() || count == 0) return problem;
  return do_read(offset, to, count);
}

Problem Memory::write(uint64_t offset, const std::byte* from, size_t count) {
  const std::scoped_lock lock(mutex_);
  Problem problem = check("a write", offset, count);
  if (!problem.empty() || count == 0) return problem;
  return do_write(offset, from, count);
}

Problem Memory::add(uint64_t offset, uint64_t value) {
  const std::scoped_lock lock(mutex_);
  Problem problem = check("a signal", offset, sizeof(uint64_t));
  return problem.empty() ? do_add(offset, value) : problem;
}

void Memory::close() {
  const std::scoped_lock lock(mutex_);
  open_ = false;
}

std::shared_ptr<Memory> host_memory(void* data, uint64_t bytes) {
  return std::make_shared<HostMemory>(static_cast<std::byte*>(data), bytes);
}

}  // namespace fanfold::nccl_plugin
