// One rank's shared memory. Its owner creates the memory, and its peers map it.
//
// The memory has no name in any file system (memfd), so a process that dies leaves nothing behind,
// and the size of /dev/shm does not limit it. Peers open it through the owner's descriptor in
// /proc; the kernel allows this to processes of the same user in the same PID namespace.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace fanfold {

class Region {
 public:
  Region() = default;
  ~Region() { unmap(); }
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  // Zeroed memory of `bytes`, readable and writable by this user only (mode 0600).
  static Region create(int64_t bytes);
  // Maps the memory behind `descriptor` of process `pid`.
  static Region open(pid_t pid, int descriptor, int64_t bytes);
  // Another reference to `bytes` bytes at `offset` of this mapping, for another rank in the same
  // process or for a part with a use of its own.
  Region part(int64_t offset, int64_t bytes) const;

  std::byte* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }
  int descriptor() const { return descriptor_; }

  // Call it once every peer has mapped the region.
  void close_descriptor();
  void unmap();

 private:
  Region(int descriptor, int64_t bytes);

  std::shared_ptr<std::byte> data_;  // the last Region that shares the mapping unmaps it
  int64_t bytes_ = 0;
  int descriptor_ = -1;
};

// Reports whether the process or the thread that runs a rank has ended. A process has ended even if
// its parent has not reaped it yet.
class RankHandle {
 public:
  RankHandle() = default;
  // If `pid` is this process, the handle watches its thread `thread`; with 0 it watches none and
  // `ended()` returns false.
  explicit RankHandle(pid_t pid, pid_t thread = 0);
  ~RankHandle();
  RankHandle(RankHandle&& other) noexcept;
  RankHandle& operator=(RankHandle&& other) noexcept;
  RankHandle(const RankHandle&) = delete;
  RankHandle& operator=(const RankHandle&) = delete;

  bool ended() const;

 private:
  int descriptor_ = -1;
  pid_t thread_ = 0;
};

// The kernel's id of the calling thread.
pid_t this_thread();

}  // namespace fanfold
