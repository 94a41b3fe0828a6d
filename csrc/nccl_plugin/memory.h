// How bytes reach registered memory, whatever kind it is.
//
// NCCL's signals lie in GPU memory that no other process can map. So the process that registered
// the memory applies to it what arrives from other ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "nccl_plugin/log.h"

namespace fanfold::nccl_plugin {

// Only the thread of a wire calls `read`, `write` and `add`, and any thread `close`. After `close`
// has returned, nothing touches the memory, so that its owner may free it.
class Memory {
 public:
  explicit Memory(uint64_t bytes) : bytes_(bytes) {}
  virtual ~Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  uint64_t bytes() const { return bytes_; }
  bool has(uint64_t offset, uint64_t count) const {
    return offset <= bytes_ && count <= bytes_ - offset;
  }

  Problem read(uint64_t offset, std::byte* to, size_t count);
  // What is written before `add` is visible to whoever sees the sum.
  Problem write(uint64_t offset, const std::byte* from, size_t count);
  // Adds `value` to the 64-bit word at `offset`, a multiple of 8.
  Problem add(uint64_t offset, uint64_t value);
  void close();

 private:
  virtual Problem do_read(uint64_t offset, std::byte* to, size_t count) = 0;
  virtual Problem do_write(uint64_t offset, const std::byte* from, size_t count) = 0;
  virtual Problem do_add(uint64_t offset, uint64_t value) = 0;
  Problem check(const char* what, uint64_t offset, uint64_t count) const;

  const uint64_t bytes_;
  std::mutex mutex_;
  bool open_ = true;
};

std::shared_ptr<Memory> host_memory(void* data, uint64_t bytes);

}  // namespace fanfold::nccl_plugin
